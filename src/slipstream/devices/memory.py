"""Memory of devices and of the host: available, allocated, peak; cached memory given back; out-of-memory errors recognised.

Host memory and cores are what the control groups around this process allow, which may be less than the machine has. Allocator statistics
and timing events are asked of the device family and left out where it does not provide them. Torch is imported when a function needs it.
Nothing here talks to other processes, allocates memory, or starts a device.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.devices.table import CPU, FAMILIES, Family, family_of
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    import torch

__all__ = [
    "HostMemory", "allocator_statistics", "available_cores", "available_memory", "clear_after_failure", "clear_device_cache",
    "convert_bytes",
    "device_peak_memory", "host_memory", "host_peak_memory", "release_memory", "should_reduce_batch_size", "timing_event_factory",
]


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


def available_cores(root: Path = _ROOT) -> int:
    """Return how many cores this process may use: its affinity, limited by the CPU quota of its control groups.

    >>> available_cores() >= 1
    True
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.ceil(quota) for quota in _cpu_quotas(root))]))


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Return the memory of the host that this process may use."""
    import psutil

    host = psutil.virtual_memory()
    rooms = [(limit, max(0, limit - used)) for limit, used in _memory_groups(root)]
    limit = min((limit for limit, _ in rooms), default=None)
    return HostMemory(total=host.total, available=min([host.available, *(room for _, room in rooms)]), limit=limit)


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use that cannot be reclaimed) of every control group of this process with a limit."""
    for group in _groups(root, ""):
        yield from _memory_of(group, "memory.max", "memory.current", "inactive_file")
    for group in _groups(root, "memory"):
        yield from _memory_of(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _memory_of(group: Path, limit_file: str, used_file: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    limit, used = _read_number(group / limit_file), _read_number(group / used_file)
    if limit is None or used is None or limit >= _UNLIMITED:
        return
    lines = (line.split() for line in _read_text(group / "memory.stat").splitlines())
    cached = next((int(words[1]) for words in lines if len(words) == 2 and words[0] == reclaimable), 0)
    yield limit, max(0, used - cached)


def _cpu_quotas(root: Path) -> Iterator[float]:
    for group in _groups(root, ""):
        words = _read_text(group / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            yield int(words[0]) / int(words[1])
    for group in _groups(root, "cpu"):
        quota, period = _read_number(group / "cpu.cfs_quota_us"), _read_number(group / "cpu.cfs_period_us")
        if quota and period:
            yield quota / period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, the innermost first; "" is the single hierarchy of version 2."""
    top = root / "sys/fs/cgroup" / controller
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller in controllers.split(","):
            inner = top / path.lstrip("/")
            # Inside a container the path may be the one of the host, which is not there; the top always is.
            yield from (folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents)
            return


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not on this system, or not this version of control groups
        return ""


def _read_number(file: Path) -> int | None:
    text = _read_text(file).strip()
    return int(text) if text.isdigit() else None


def clear_device_cache(garbage_collection: bool = False, *, families: tuple[Family, ...] = FAMILIES) -> None:
    """Release cached but unused device memory, for every family that this process has used.

    >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    for family in families:
        if family is not CPU and family.may_be_used():
            family.ask("empty_cache")


_QUEUES = 8
"""How many queues of devices may each have a failure to report: for kernels, for copies, for communication."""


def clear_after_failure(is_expected: Callable[[RuntimeError], bool], *, families: tuple[Family, ...] = FAMILIES) -> None:
    """Collect garbage and release cached device memory after something failed; failures that are expected are dropped.

    A device reports work that failed, such as what waited for a collective that a lost process had begun, late: in whatever is asked of
    it next, once for each queue.

    >>> clear_after_failure(lambda error: False)
    """
    for _ in range(_QUEUES):
        try:
            clear_device_cache(garbage_collection=True, families=families)
            return
        except RuntimeError as error:
            if not is_expected(error):
                raise
    clear_device_cache(garbage_collection=True, families=families)


def release_memory(*objects: Any) -> list[None]:
    """Drop references and release their memory: `model, optimizer = release_memory(model, optimizer)`.

    The caller's own names are what keeps the objects alive, so the result has to be assigned to them.

    >>> a, b = [1], [2]
    >>> a, b = release_memory(a, b)
    >>> a is b is None
    True
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def available_memory(device: torch.device | str) -> int | None:
    """Return the bytes that can still be allocated on a device, or None if the device does not tell.

    On the host this is what the kernel can give without swapping, and no more than the control groups around this process allow. On an
    accelerator memory that torch keeps for reuse counts as free.

    >>> available_memory("cpu") > 0
    True
    """
    family = family_of(device)
    if family is CPU:
        return host_memory().available
    return _free_on(family, device)


def _free_on(family: Family, device: torch.device | str) -> int | None:
    if family.has("mem_get_info"):
        cached = family.ask("memory_reserved", device=device, default=0) - family.ask("memory_allocated", device=device, default=0)
        return int(family.ask("mem_get_info", device=device)[0]) + max(0, int(cached))
    if family.has("recommended_max_memory"):  # memory shared with the host: there is a budget, not a pool
        return max(0, int(family.ask("recommended_max_memory")) - int(family.ask("driver_allocated_memory")))
    return None


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether an exception says that memory ran out, so that a smaller batch may fit.

    The type decides where it can; the texts are for allocators that raise a plain RuntimeError. Errors of this library do not
    count, also if they quote the error of another process: memory did not run out here.

    >>> should_reduce_batch_size(MemoryError()), should_reduce_batch_size(ValueError("out of memory"))
    (True, False)
    """
    import torch

    if isinstance(exception, MemoryError | torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or isinstance(exception, SlipstreamError):
        return False
    text = str(exception)
    return any(part in text for family in FAMILIES for part in family.out_of_memory)


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text with a unit.

    >>> convert_bytes(1536), convert_bytes(3 * 1024**3)
    ('1.5 KB', '3.0 GB')
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(size) < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def allocator_statistics(*, families: tuple[Family, ...] = FAMILIES) -> dict[str, dict[str, int]]:
    """Return statistics by device, for devices that this process has used: bytes allocated and reserved, their peaks, failed attempts.

    >>> isinstance(allocator_statistics(), dict)
    True
    """
    used = [family for family in families if family is not CPU and family.may_be_used()]
    found = {name: _device_statistics(family, number) for family in used for name, number in _devices(family)}
    return {name: statistics for name, statistics in found.items() if any(statistics.values())}


def _devices(family: Family) -> list[tuple[str, int]]:
    return [(f"{family.type}:{number}", number) for number in range(family.count())] if family.indexed else [(family.type, 0)]


def _device_statistics(family: Family, number: int) -> dict[str, int]:
    counts: Any = family.ask("memory_stats", device=number, default={})
    statistics = {
        # Memory shared with the host has a total of its own names, and no peaks.
        "allocated": family.ask("memory_allocated", device=number, default=family.ask("current_allocated_memory")),
        "most_allocated": family.ask("max_memory_allocated", device=number),
        "reserved": family.ask("memory_reserved", device=number, default=family.ask("driver_allocated_memory")),
        "most_reserved": family.ask("max_memory_reserved", device=number),
        "retries": counts.get("num_alloc_retries"),
        "failures": counts.get("num_ooms"),
    }
    return {name: int(value) for name, value in statistics.items() if value is not None}


_STATUS = Path("/proc/self/status")


def host_peak_memory(status: Path = _STATUS) -> int:
    """Return the peak of the main memory of this process, in bytes.

    >>> host_peak_memory() > 1_000_000
    True
    """
    try:
        text = status.read_text()
    except OSError:  # not Linux
        text = ""
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "")
    if line:
        return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def device_peak_memory(device: Any) -> int | None:
    """Return the peak of the memory that torch held on a device, in bytes; None for the host, and if the device does not tell.

    >>> device_peak_memory("cpu") is None
    True
    """
    family = family_of(device)
    most = None if family is CPU else family.ask("max_memory_allocated", device=device)
    return None if most is None else int(most)


class _TimingEvent:
    """An event that is recorded on the current stream of its own device. (torch measures between objects of its own class alone.)"""

    __slots__ = ("_current_stream", "_event", "query", "synchronize")

    def __init__(self, event: torch.Event, current_stream: Callable[[], torch.Stream]) -> None:
        self._event, self._current_stream = event, current_stream
        self.query, self.synchronize = event.query, event.synchronize

    def record(self) -> None:
        self._event.record(self._current_stream())

    def elapsed_time(self, later: _TimingEvent) -> float:
        return float(self._event.elapsed_time(later._event))


def timing_event_factory(device: Any) -> Callable[[], Any] | None:
    """Return a function that makes timing events of a device; None if the device works synchronously or has none.

    They are recorded on the current stream of this device, whichever device is the current one of the script.

    >>> timing_event_factory("cpu") is None
    True
    """
    import torch

    if family_of(device) is CPU:
        return None

    def make() -> _TimingEvent:
        return _TimingEvent(torch.Event(device=device, enable_timing=True), lambda: torch.accelerator.current_stream(device))

    try:
        earlier_event, later_event = make(), make()
        earlier_event.record()  # an event asks its device for support only now
        later_event.record()
        later_event.synchronize()
        earlier_event.elapsed_time(later_event)
    except (RuntimeError, NotImplementedError, TypeError):  # a family without such events: callers use the clock of the host
        return None
    return make
