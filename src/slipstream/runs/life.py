"""Whether a run that calls itself running still does: whose process it is, whether that is there, and how long nothing was written.

A process that is killed says nothing of it. So each attempt in run.json has the number of its process, and a reader on the same machine
looks whether it lives: the same number, started at the same moment. Where that cannot be told (another machine, another container), the
files tell how long there was no sign of life. Nothing here signals a process or writes a file.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["PATIENCE", "is_gone", "this_process"]

PATIENCE: Final = 60.0
"""Seconds without a new line after which a run that is running has shown no sign of life."""

_ENDED: Final = (b"Z", b"X", b"x")


def this_process() -> dict[str, Any]:
    """How this process can be recognised later: its number, and what makes the number its own.

    >>> sorted(this_process())
    ['host', 'pid', 'pid_namespace', 'pid_started']
    """
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_namespace": _namespace(), "pid_started": _state(pid)[1]}


def is_gone(info: Mapping[str, Any]) -> bool:
    """Whether the process of the latest attempt is known to have ended; False also where nobody here can know.

    >>> is_gone({"attempts": [this_process()]}), is_gone({}), is_gone({"attempts": [{**this_process(), "host": "elsewhere"}]})
    (False, False, False)
    """
    attempts = info.get("attempts")
    latest = attempts[-1] if isinstance(attempts, list) and attempts else None
    if not isinstance(latest, dict) or latest.get("host") != socket.gethostname() or latest.get("pid_namespace") != _namespace():
        return False
    pid, started = latest.get("pid"), latest.get("pid_started")
    if type(pid) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)  # no signal: it asks whether there is such a process
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's, or no number of a process
        return False
    state, since = _state(pid)
    return state in _ENDED or (since is not None and started is not None and since != started)


def _namespace() -> int | None:
    """Which processes can be seen from here: those of a container have numbers of their own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # a system without it
        return None


def _state(pid: int) -> tuple[bytes | None, int | None]:
    """The state of a process and when it was started, in the clock of the kernel; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None, None
