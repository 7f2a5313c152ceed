"""The migration of one script: which rules apply, the changed text, the changes with reasons, and the notes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from slipstream.migrate.accelerate_scripts import rewrite_accelerate, uses_accelerate
from slipstream.migrate.ddp_scripts import rewrite_ddp, uses_ddp
from slipstream.migrate.deepspeed_scripts import rewrite_deepspeed, uses_deepspeed
from slipstream.migrate.edits import Note, Rewriter
from slipstream.migrate.report import Change, find_changes, unified_diff
from slipstream.migrate.source import Script, parse_script

__all__ = ["Migration", "ORIGINS", "migrate_text"]

_RULES: Final[Mapping[str, tuple[Callable[[Script], bool], Callable[[Rewriter], None]]]] = MappingProxyType(
    {
        "accelerate": (uses_accelerate, rewrite_accelerate),
        "ddp": (uses_ddp, rewrite_ddp),
        "deepspeed": (uses_deepspeed, rewrite_deepspeed),
    }
)

ORIGINS: Final = ("auto", *_RULES)
"""What a script can come from."""


@dataclass(frozen=True)
class Migration:
    """The old and the new text of a script, and why."""

    name: str
    old: str
    new: str
    changes: Sequence[Change]
    notes: Sequence[Note]
    origins: Sequence[str] = field(default=())
    written: str | None = None
    """What to write instead of `new`, if the file is not the script itself but a notebook."""

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to write."""
        return self.old != self.new

    def diff(self) -> str:
        """Return the difference, with a reason for each hunk."""
        return unified_diff(self.old, self.new, self.name, self.changes)


def migrate_text(text: str, name: str = "script.py", origin: str = "auto") -> Migration:
    """Return the migration of a script.

    >>> migration = migrate_text("from accelerate import Accelerator\\n")
    >>> migration.new, migration.origins
    ('from slipstream import Accelerator\\n', ('accelerate',))
    """
    script = parse_script(text, name)
    found = tuple(rule for rule, (detect, _) in _RULES.items() if origin in ("auto", rule) and detect(script))
    if "deepspeed" in found:
        found = tuple(rule for rule in found if rule != "ddp")  # whose rules are part of those of DeepSpeed
    rewriter = Rewriter(script)
    for rule in found:
        _RULES[rule][1](rewriter)
    new, edits = rewriter.result()
    _parse_result(new, name)
    notes = sorted(rewriter.notes)
    return Migration(name, text, new, find_changes(text, edits), notes, found)


def _parse_result(new: str, name: str) -> ast.Module:
    """Return the tree of a changed text; a text that Python cannot read would be our mistake."""
    try:
        return ast.parse(new)
    except SyntaxError as error:
        told = f"the migration of {name} would break it in line {error.lineno}: {error.text!r}. Please report this."
        raise AssertionError(told) from error


