"""What a migration shows: a unified diff that `patch` and `git apply` take, with the reasons of each hunk in its heading."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Final

from slipstream.migrate.edits import Edit

__all__ = ["Change", "find_changes", "unified_diff"]

_HUNK: Final = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


class Change:
    """A change with the lines of the old text that it touches, and its reason."""

    def __init__(self, first: int, last: int, reason: str) -> None:
        self.first: Final = first
        self.last: Final = last
        self.reason: Final = reason


def find_changes(text: str, edits: Sequence[Edit]) -> list[Change]:
    """Return the lines and reasons of edits of a text."""
    return [Change(_line(text, edit.start), _line(text, max(edit.start, edit.end - 1)), edit.reason) for edit in edits]


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def unified_diff(old: str, new: str, name: str, changes: Sequence[Change]) -> str:
    """Return the difference of two texts, with the reasons of each hunk behind its `@@`.

    >>> print(unified_diff("a\\nb\\n", "a\\nc\\n", "x.py", [Change(2, 2, "b is old")]), end="")
    --- a/x.py
    +++ b/x.py
    @@ -1,2 +1,2 @@ b is old
     a
    -b
    +c
    """
    plain = name.lstrip("/")
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (old, new))
    lines = difflib.unified_diff(before, after, f"a/{plain}", f"b/{plain}", n=1)
    shown: list[str] = []
    for line in lines:
        found = _HUNK.match(line)
        if found is not None:
            first = int(found[1])
            last = first + int(found[2] or 1)
            reasons = dict.fromkeys(change.reason for change in changes if change.first < last and change.last >= first)
            line = f"{found[0]} {'; '.join(reasons)}\n"
        shown.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(shown)
