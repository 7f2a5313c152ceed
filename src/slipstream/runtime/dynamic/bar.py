"""The progress bar of dynamic work: shown by the main process alone, counting the items that all processes have finished.

It is moved by a thread of its own, because the main process may be busy with one long item while the others finish many. Without a
terminal there is none, unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from slipstream.runtime import progress as bars

__all__ = ["Bar", "make_bar"]


class Bar(Protocol):
    """What shows how far the work is."""

    def close(self) -> None:
        """The work is over, or has failed."""


def make_bar(progress: bool | None, *, is_main: bool, finished: Callable[[], int], total: int, before: int) -> Bar:
    """The bar that was asked for: `progress` None is one where there is a terminal to show it on."""
    shown = bars.bar(total, "", "item", is_main=is_main, wanted=progress, initial=before)
    if type(shown) is bars.Hidden:
        return shown

    def move() -> None:
        try:
            shown.to(min(total, before + finished()))
        except RuntimeError:  # the store is gone, which the work itself will tell
            return

    both = ExitStack()
    both.enter_context(shown)
    both.enter_context(bars.moving(move))
    return both
