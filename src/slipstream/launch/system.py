"""What the launcher asks of the operating system: death signals, adoption of orphans, memory-killer counters, open files.

Linux offers all of it. Elsewhere every function here does nothing, or says that it does not know, and the launcher's promises
are kept as far as plain process groups keep them. Nothing here imports torch, and nothing here decides anything.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["adopt_orphans", "die_with_parent", "memory_kills", "open_files", "prepare_child"]

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_IS_LINUX: Final = sys.platform == "linux"


def _prctl() -> Callable[[int, int], int] | None:
    if not _IS_LINUX:
        return None
    library = ctypes.CDLL(None, use_errno=True)
    prctl = library.prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong]
    prctl.restype = ctypes.c_int
    return prctl


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes a child of this process, so that it can still be found and ended."""
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent ends; ends it at once when that has already happened."""
    prctl = _prctl()
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def prepare_child(parent: int) -> Callable[[], None]:
    """What a new child runs between fork and exec to die with its parent; everything it needs is looked up beforehand."""
    prctl = _prctl()

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)

    return prepare


def open_files() -> frozenset[int]:
    """The numbers of the files that this process has open; empty where the system does not tell."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    return frozenset(int(name) for name in names if _is_open(int(name)))


def _is_open(number: int) -> bool:
    """False for the one through which the list itself was read."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def memory_kills() -> dict[str, int]:
    """How often the kernel's out-of-memory killer has struck so far: "here" (this control group) and "host", where known.

    >>> all(count >= 0 for count in memory_kills().values())
    True
    """
    found = {"here": _first_count(_group_counters(), "oom_kill"), "host": _first_count([Path("/proc/vmstat")], "oom_kill")}
    return {scope: count for scope, count in found.items() if count is not None}


def _group_counters() -> list[Path]:
    """Files that may hold this control group's counter: version 2, version 1, and both as a container sees them."""
    mount = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    candidates: list[Path] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            candidates += [mount / group.lstrip("/") / "memory.events", mount / "memory.events"]
        elif "memory" in controllers.split(","):
            candidates += [mount / "memory" / group.lstrip("/") / "memory.oom_control", mount / "memory" / "memory.oom_control"]
    return candidates


def _first_count(files: list[Path], name: str) -> int | None:
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, count = line.partition(" ")
            if key == name and count.isdigit():
                return int(count)
    return None
