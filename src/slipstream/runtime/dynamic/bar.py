"""The progress bar of dynamic work: shown by the main process alone, counting the items that all processes have finished.

It is moved by a thread of its own, because the main process may be busy with one long item while the others finish many. Without a
terminal there is none, unless it is asked for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Bar", "Hidden", "Shown", "make_bar"]

_EVERY = 0.3


class Bar(Protocol):
    """What shows how far the work is."""

    def close(self) -> None:
        """The work is over, or has failed."""


class Hidden:
    """No bar."""

    def close(self) -> None:
        """Nothing is shown."""


class Shown:
    """A bar of tqdm, moved to what `finished` says until it is closed."""

    def __init__(self, finished: Callable[[], int], total: int, before: int) -> None:
        from tqdm import tqdm

        self._finished, self._total, self._before = finished, total, before
        self._bar: Any = tqdm(total=total, initial=before, unit="item", dynamic_ncols=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            self._move()

    def _move(self) -> None:
        try:
            now = min(self._total, self._before + self._finished())
        except RuntimeError:  # the store is gone, which the work itself will tell
            return
        self._bar.update(now - self._bar.n)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._move()
        self._bar.close()


def make_bar(progress: bool | None, *, is_main: bool, finished: Callable[[], int], total: int, before: int) -> Bar:
    """The bar that was asked for: `progress` None is one where there is a terminal to show it on."""
    wanted = sys.stderr is not None and sys.stderr.isatty() if progress is None else progress
    return Shown(finished, total, before) if wanted and is_main else Hidden()
