"""A command-line parser whose long options can be written with underscores and with dashes; the help shows the first only.

It also remembers which options were given: `parse_args(...).nondefault` is the set of their names, so that a configuration file overrides
defaults and never what was typed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

__all__ = ["CustomArgumentGroup", "CustomArgumentParser"]

_NOT_GIVEN = object()


class _StoreAction(argparse._StoreAction):
    """Store a value. The class exists because Accelerate has it."""


class _StoreConstAction(argparse._StoreConstAction):
    """Store a constant. The class exists because Accelerate has it."""


class _StoreTrueAction(argparse._StoreTrueAction):
    """Store True. The class exists because Accelerate has it."""


def _both_spellings(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of an option, each long one followed by its spelling with dashes.

    >>> _both_spellings(("-t", "--log_dir"))
    ('-t', '--log_dir', '--log-dir')
    """
    found: list[str] = []
    for name in names:
        found += [name, f"--{name[2:].replace('_', '-')}"] if name.startswith("--") else [name]
    return tuple(dict.fromkeys(found))


class _HelpFormatter(argparse.HelpFormatter):
    """Shows the spelling with underscores only."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = action.option_strings
        action.option_strings = [name for name in shown if not _is_second_spelling(name, shown)]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = shown


def _is_second_spelling(name: str, names: Sequence[str]) -> bool:
    return name.startswith("--") and any(other != name and other.replace("_", "-") == name for other in names)


class CustomArgumentGroup(argparse._ArgumentGroup):
    """A titled group of options in both spellings."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an option in both spellings."""
        return super().add_argument(*_both_spellings(args), **kwargs)


class CustomArgumentParser(argparse.ArgumentParser):
    """A parser of options in both spellings, which says in `nondefault` what was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add an option in both spellings."""
        return super().add_argument(*_both_spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        """Add a titled group whose options have both spellings."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and set `nondefault` to the names of what was given."""
        namespace = argparse.Namespace() if namespace is None else namespace
        watched = {action.dest: action for action in reversed(self._actions) if self._is_watched(action, namespace)}
        for dest in watched:
            setattr(namespace, dest, _NOT_GIVEN)
        found, rest = super().parse_known_args(args, namespace)
        if found is None:  # argparse returns nothing where exit_on_error is off
            return found, rest
        given = {action.dest for action in self._actions if action.dest not in watched and getattr(found, action.dest, None) is not None}
        for dest, action in watched.items():
            if getattr(found, dest) is _NOT_GIVEN:
                setattr(found, dest, self._default(action))
            else:
                given.add(dest)
        found.nondefault = given | getattr(found, "nondefault", set())
        return found, rest

    def _is_watched(self, action: argparse.Action, namespace: argparse.Namespace) -> bool:
        simple = isinstance(action, (argparse._StoreAction, argparse._StoreConstAction)) and bool(action.option_strings)
        return simple and action.default is not argparse.SUPPRESS and not hasattr(namespace, action.dest)

    def _default(self, action: argparse.Action) -> Any:
        default = self._defaults.get(action.dest, action.default)
        return self._get_value(action, default) if isinstance(default, str) else default
