"""Hold the runtime of this process: the one place with module-level state.

Everything else has the runtime passed in. It is created when first asked for and ends at the end of the process. A child of a rank (a
DataLoader worker, forked or spawned) inherits the variables that name the rank but is not that rank: it is recognised by the process that
claimed the rank first, and gets a runtime that knows its parent's rank and opens nothing.
"""

from __future__ import annotations

import atexit
import os

from slipstream.config import for_worker
from slipstream.config.sources import environment
from slipstream.distributed.cluster import Process, detect
from slipstream.distributed.process_group import Runtime
from slipstream.distributed.wait_monitor import Limits
from slipstream.errors import StateError

__all__ = ["adopt", "reset_keeping_store", "current", "current_or_none", "reset"]

_OWNER_VARIABLE = "SLIPSTREAM_INTERNAL_OWNER"
_current: Runtime | None = None
_registered = False


def current_or_none() -> Runtime | None:
    """Return the runtime if this process has one already; never create one."""
    if _current is not None and _current.pid == os.getpid():
        return _current
    return None


def current() -> Runtime:
    """Return the runtime of this process; create it if there is none.

    >>> current() is current()
    True
    """
    return current_or_none() or _begin(detect(environment()))


def adopt(process: Process) -> Runtime:
    """Return the runtime of a process whose rank another framework knows, where no variable of a launcher tells it.

    Raise if this process runs as another rank already.

    >>> adopt(current().process) is current()
    True
    """
    runtime = current_or_none()
    if runtime is None:
        return _begin(process)
    known = runtime.process
    if (known.rank, known.world_size) != (process.rank, process.world_size):
        raise StateError(
            f"this process is rank {process.rank} of {process.world_size} ({process.cluster}), but runs as rank {known.rank} of "
            f"{known.world_size} ({known.cluster}) already: an Accelerator or a state was made before. Make it after the processes are "
            "started, or not at all."
        )
    return runtime


def _begin(process: Process) -> Runtime:
    global _current, _registered
    safety = for_worker().safety
    limits = Limits(safety.timeout, safety.barrier_timeout, safety.hang_warning)
    _current = Runtime(process, limits, debug=safety.debug, child_of=_claim_rank(process))
    if not _registered:
        _registered = True
        atexit.register(_end_at_exit)
        os.register_at_fork(after_in_child=_leave_to_parent)
    return _current


def _leave_to_parent() -> None:
    """In a forked child: objects that it has inherited take no part in collectives either."""
    if _current is not None and _current.process.world_size > 1:
        _current.leave_to_parent(_current.pid)


def _claim_rank(process: Process) -> int | None:
    """Mark the rank as this process's own; return the process that has it already, if this is one of its children."""
    if process.world_size == 1:
        return None
    place = f"{process.rank} {process.world_size} {process.run_id} {process.attempt} {process.master_port}"
    owner, _, owned = environment().get(_OWNER_VARIABLE, "").partition(" ")
    if owned == place and owner != str(os.getpid()):
        return int(owner)
    os.environ[_OWNER_VARIABLE] = f"{os.getpid()} {place}"
    return None


def reset(reason: str = "reset") -> None:
    """Close the group and forget the runtime: the next state object reads the environment again."""
    global _current
    runtime, _current = current_or_none(), None
    if runtime is not None:
        runtime.end(reason)
        if runtime.child_of is None:
            os.environ.pop(_OWNER_VARIABLE, None)


def reset_keeping_store(reason: str) -> None:
    """Reset; if the environment still names the same rank of the same job, keep the store for the next group."""
    runtime = current_or_none()
    if runtime is not None and runtime.process.world_size > 1 and runtime.process == detect(environment()):
        runtime.close(reason)
    else:
        reset(reason)


def _end_at_exit() -> None:
    reset("end of the process")
