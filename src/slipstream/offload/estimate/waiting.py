"""A sign of life for what may take long: one line on stderr, when it has taken two seconds. Nothing is said of what is done by then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["telling"]

_PATIENCE: Final = 2.0


@contextmanager
def telling(what: str, patience: float = _PATIENCE) -> Iterator[None]:
    """Within it, `what` is going on; that is said once, if it takes longer than so many seconds.

    >>> with telling("counting"):
    ...     sum(range(10))
    45
    """
    stream = sys.stderr  # of now: the thread may come when it has been replaced
    timer = threading.Timer(patience, lambda: print(f"{what} ...", file=stream, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
