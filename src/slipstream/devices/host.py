"""What this process may use of its host: cores and memory, as the control groups around it allow.

A container or a batch system often allows less than the machine has, and `/proc/meminfo` does not say so. Nothing here imports
torch; every function takes the root of the file system, so that tests can give it another.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostMemory", "cores", "host_memory", "memory_limit"]

_ROOT = Path("/")
_UNLIMITED = 2**60
"""Control groups of the first version write "no limit" as a number of about this size."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of main memory."""

    total: int
    available: int
    """What can still be taken without swapping, and without reaching the limit of a control group."""
    limit: int | None = None
    """The tightest limit of a control group, if there is one."""


def cores(root: Path = _ROOT) -> int:
    """How many cores this process may use: its affinity, narrowed by the CPU quota of its control groups.

    >>> cores() >= 1
    True
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.ceil(quota) for quota in _cpu_quotas(root))]))


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Memory of the host as this process may use it."""
    import psutil

    host = psutil.virtual_memory()
    rooms = [(limit, max(0, limit - used)) for limit, used in _memory_groups(root)]
    limit = min((limit for limit, _ in rooms), default=None)
    return HostMemory(total=host.total, available=min([host.available, *(room for _, room in rooms)]), limit=limit)


def memory_limit(root: Path = _ROOT) -> int | None:
    """The tightest memory limit of the control groups around this process, or None."""
    return min((limit for limit, _ in _memory_groups(root)), default=None)


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every group around this process that has a limit."""
    for group in _groups(root, ""):
        yield from _memory_of(group, "memory.max", "memory.current", "inactive_file")
    for group in _groups(root, "memory"):
        yield from _memory_of(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _memory_of(group: Path, limit_file: str, used_file: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    limit, used = _number(group / limit_file), _number(group / used_file)
    if limit is None or used is None or limit >= _UNLIMITED:
        return
    lines = (line.split() for line in _text(group / "memory.stat").splitlines())
    cached = next((int(words[1]) for words in lines if len(words) == 2 and words[0] == reclaimable), 0)
    yield limit, max(0, used - cached)


def _cpu_quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, ""):
        words = _text(group / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            yield int(words[0]) / int(words[1])
    for group in _groups(root, "cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota and period:
            yield quota / period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups, the innermost first; "" is the one hierarchy of the second version."""
    top = root / "sys/fs/cgroup" / controller
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller in controllers.split(","):
            inner = top / path.lstrip("/")
            # Inside a container the path may be the one of the host, which is not there; the top always is.
            yield from (folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents)
            return


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not on this system, or not this version of control groups
        return ""


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None
