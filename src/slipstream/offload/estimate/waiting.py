"""A sign of life for what may take long, on a terminal, when it has taken two seconds. Nothing is said of what is done by then."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final

from slipstream.runtime.progress import waiting

__all__ = ["telling"]

_PATIENCE: Final = 2.0


def telling(what: str, patience: float = _PATIENCE) -> AbstractContextManager[None]:
    """Within it, `what` is going on; that is shown, with the time that it takes, once it has taken so many seconds.

    >>> with telling("counting"):
    ...     sum(range(10))
    45
    """
    return waiting(what, after=patience)
