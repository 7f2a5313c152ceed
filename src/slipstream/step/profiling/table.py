"""Where the time of a recording went: the operators with the most time of their own, as rows and as a short table.

Time of its own is that without what an operator calls, so that nothing counts twice. Where a device has worked its time counts, and that of
the host where none has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from slipstream.devices.memory import convert_bytes
from slipstream.errors import ConfigError

__all__ = ["Operator", "TopOperators", "top_operators"]

_STEPS: Final = "ProfilerStep"
_LONGEST: Final = 48


@dataclass(frozen=True)
class Operator:
    """One operator, over all of its calls."""

    name: str
    calls: int
    self_time: float
    """Seconds, without what it calls."""
    share: float
    """Of the time of all operators together."""
    memory: int | None
    """Bytes that it took and did not give back; None if memory was not recorded."""


@dataclass(frozen=True)
class TopOperators:
    """The operators with the most time of their own; as text it is a table."""

    operators: tuple[Operator, ...]
    total: float
    """Seconds of all operators together."""
    others: int
    """How many there are besides."""
    where: str
    """Whose time it is: "host" or "device"."""

    def __str__(self) -> str:
        if not self.operators:
            return "no operator was recorded"
        with_memory = any(one.memory is not None for one in self.operators)
        titles = ["operator", "self time", "share", "calls", *(["memory"] if with_memory else [])]
        rows = [[_short(one.name), _time(one.self_time), f"{one.share:.1%}", f"{one.calls:,}"] for one in self.operators]
        if with_memory:
            rows = [[*row, convert_bytes(one.memory or 0)] for row, one in zip(rows, self.operators, strict=True)]
        more = f" (and {self.others:,} others)" if self.others else ""
        return "\n".join([f"time of operators on the {self.where}: {_time(self.total)} in all{more}", *_aligned([titles, *rows])])


def top_operators(profiler: Any, count: int = 10) -> TopOperators:
    """The `count` operators that took the most time of their own in what a profiler has recorded (its last cycle, with a schedule).

    >>> import torch
    >>> from torch.profiler import ProfilerActivity, profile
    >>> with profile(activities=[ProfilerActivity.CPU]) as profiler:
    ...     _ = torch.ones(200, 200) @ torch.ones(200, 200)
    >>> top = top_operators(profiler, count=1)
    >>> len(top.operators), top.where, str(top).splitlines()[1].split()
    (1, 'host', ['operator', 'self', 'time', 'share', 'calls'])
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"top_operators(count={count!r}): write how many operators are wanted, from 1")
    events = [event for event in profiler.key_averages() if not event.key.startswith(_STEPS)]
    on_device = any(event.self_device_time_total > 0 for event in events)
    times = [event.self_device_time_total if on_device else event.self_cpu_time_total for event in events]
    total = sum(times)
    with_memory = bool(getattr(profiler, "profile_memory", False))
    ranked = sorted(zip(times, events, strict=True), key=lambda pair: -pair[0])
    chosen = tuple(
        Operator(event.key, event.count, time / 1e6, time / total if total else 0.0, _memory(event, on_device) if with_memory else None)
        for time, event in ranked[:count]
    )
    return TopOperators(chosen, total / 1e6, len(ranked) - len(chosen), "device" if on_device else "host")


def _memory(event: Any, on_device: bool) -> int:
    return int(event.self_device_memory_usage if on_device else event.self_cpu_memory_usage)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 3] + "..."


def _time(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns under each other: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
