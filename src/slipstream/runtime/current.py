"""The one place with module-level state: the runtime of this process.

Everything else gets the runtime passed in. It is made when first asked for, ends at the end of the process, and is forgotten by a
child after a fork, which is another process and must not use its parent's connections.
"""

from __future__ import annotations

import atexit
import os

from slipstream.comm.vigil import Limits
from slipstream.config import for_worker
from slipstream.config.sources import environment
from slipstream.runtime.clusters import detect
from slipstream.runtime.runtime import Runtime

__all__ = ["current", "current_or_none", "reset"]

_current: Runtime | None = None
_registered = False


def current_or_none() -> Runtime | None:
    """The runtime, if this process has one already; never makes one."""
    if _current is not None and _current.pid == os.getpid():
        return _current
    return None


def current() -> Runtime:
    """The runtime of this process.

    >>> current() is current()
    True
    """
    global _current, _registered
    if current_or_none() is None:
        safety = for_worker().safety
        _current = Runtime(detect(environment()), Limits(safety.timeout, safety.barrier_timeout, safety.hang_warning), debug=safety.debug)
        if not _registered:
            _registered = True
            atexit.register(_end_at_exit)
    assert _current is not None
    return _current


def reset(reason: str = "reset") -> None:
    """Closes the group and forgets the runtime: the next state object begins anew, reading the environment again."""
    global _current
    runtime, _current = current_or_none(), None
    if runtime is not None:
        runtime.end(reason)


def _end_at_exit() -> None:
    reset("end of the process")
