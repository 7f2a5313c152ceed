"""Detect lost throughput, from steps that wait for data and from ranks that wait for a straggler.

Both checks look at the ledger's intervals (about a second each, with the seconds of every rank in every phase) and report when the limit
is exceeded over the last five together. The first two intervals are ignored, because workers start and caches fill.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.devices.memory import available_cores
from slipstream.observability.guards.findings import GuardFinding

__all__ = ["DataWaitGuard", "StragglerGuard", "suggest_workers"]

_IGNORED_INTERVALS = 2
_WINDOW = 5
_LAST_SHARE = 0.7
"""In which share of the steps a rank has to be the last to be called the slow one."""


class _RecentIntervals:
    """The last intervals with steps, without the first ones of the run."""

    def __init__(self) -> None:
        self.last: deque[Mapping[str, Any]] = deque(maxlen=_WINDOW)
        self._seen = 0

    def take(self, interval: Mapping[str, Any]) -> bool:
        """Add an interval; return whether there are enough to judge."""
        if not interval.get("steps"):
            return False
        self._seen += 1
        if self._seen <= _IGNORED_INTERVALS:
            return False
        self.last.append(interval)
        return len(self.last) == _WINDOW


class DataWaitGuard:
    """Reports steps that wait for data.

    >>> starving = DataWaitGuard(limit=0.3, processors=8)
    >>> interval = {"seconds": 1.0, "last": 50, "steps": 10, "phases": {"data": [0.1, 0.6]}}
    >>> found = [starving.look(interval, workers=0, pinned=True) for _ in range(7)]
    >>> print(found[-1])
    step 50, rank 1: its steps waited 60 % of the time for data (60 ms of 100 ms per step). What to do: load in the background: \
DataLoader(..., num_workers=2, prefetch_factor=4, persistent_workers=True).
    """

    def __init__(self, limit: float, processors: int | None = None, local_ranks: int = 1) -> None:
        self._limit = limit
        self._processors = max(1, (processors or available_cores()) // max(1, local_ranks))
        self._recent = _RecentIntervals()

    def look(self, interval: Mapping[str, Any], *, workers: int | None = None, pinned: bool = True) -> GuardFinding | None:
        """Add an interval. `workers`: those of the loader, if known; `pinned`: whether pinning memory would not help."""
        if not self._recent.take(interval):
            return None
        seconds = sum(recent["seconds"] for recent in self._recent.last)
        waited = _sum_by_rank(self._recent.last, "data")
        rank = max(range(len(waited)), key=waited.__getitem__, default=0)
        if not waited or not seconds or waited[rank] / seconds <= self._limit:
            return None
        steps = sum(recent["steps"] for recent in self._recent.last)
        share, step, wait = waited[rank] / seconds, seconds / steps, waited[rank] / steps
        text = f"its steps waited {share:.0%} of the time for data ({wait * 1e3:.3g} ms of {step * 1e3:.3g} ms per step)".replace("%", " %")
        return GuardFinding(
            "starving", interval.get("last"), rank, text, self._remedy(step, wait, workers, pinned), {"share": round(share, 3)}
        )

    def _remedy(self, step: float, wait: float, workers: int | None, pinned: bool) -> str:
        pin = "" if pinned else ", pin_memory=True"
        if workers is None:
            return f"prepare the loader, and give it workers: DataLoader(..., num_workers=..., persistent_workers=True{pin})"
        wanted = suggest_workers(step, wait, workers)
        if workers == 0:
            count = max(1, min(wanted, self._processors))
            return f"load in the background: DataLoader(..., num_workers={count}, prefetch_factor=4, persistent_workers=True{pin})"
        if wanted <= self._processors:
            return f"num_workers={wanted} instead of {workers}, and prefetch_factor=4{pin}"
        return (
            f"{workers} workers are too few and {wanted} would be more than the {self._processors} processors for each process: do less "
            f"per sample (decode and resize once, ahead of training), read fewer and larger files, or keep the data in memory{pin}"
        )


def suggest_workers(step: float, wait: float, workers: int) -> int:
    """Return how many workers a loader needs so that steps do not wait, by the seconds of a step and those that it waits.

    >>> suggest_workers(step=0.1, wait=0.06, workers=0), suggest_workers(step=0.1, wait=0.05, workers=4)
    (2, 8)
    """
    rest = max(step - wait, step * 0.02)
    if workers == 0:
        return math.ceil(wait / rest - 1e-9)
    return max(workers + 1, math.ceil(workers * step / rest - 1e-9))


class StragglerGuard:
    """Reports a rank that the others always wait for.

    >>> straggler = StragglerGuard(limit=0.3)
    >>> phases = {"waiting": [0.5, 0.0], "forward": [0.2, 0.7], "data": [0.1, 0.1]}
    >>> interval = {"seconds": 1.0, "last": 50, "steps": 10, "phases": phases, "slowest": [1, 9]}
    >>> print([straggler.look(interval) for _ in range(7)][-1])
    step 50, rank 1: it was the last in 90 % of the steps, and the others waited 50 % of the time for it. What to do: its forward takes \
0.7 of each second and that of the others 0.2: look at what else runs on its machine or device, and at the sizes of its batches.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._recent = _RecentIntervals()

    def look(self, interval: Mapping[str, Any]) -> GuardFinding | None:
        """Add an interval; return a finding if one rank is always the last."""
        last = interval.get("slowest") or []
        if len(last) < 2 or not self._recent.take(interval):
            return None
        seconds = sum(recent["seconds"] for recent in self._recent.last)
        times = [sum(recent["slowest"][rank] or 0 for recent in self._recent.last) for rank in range(len(last))]
        rank = max(range(len(times)), key=times.__getitem__)
        waited = [value for other, value in enumerate(_sum_by_rank(self._recent.last, "waiting")) if other != rank]
        mostly = times[rank] / (sum(times) or 1)
        share = sum(waited) / len(waited) / seconds if waited and seconds else 0.0
        if mostly < _LAST_SHARE or share <= self._limit:
            return None
        text = f"it was the last in {mostly:.0%} of the steps, and the others waited {share:.0%} of the time for it".replace("%", " %")
        return GuardFinding("straggler", interval.get("last"), rank, text, self._remedy(rank, seconds), {"share": round(share, 3)})

    def _remedy(self, rank: int, seconds: float) -> str:
        best, own, theirs = "", 0.0, 0.0
        for phase in ("data", "forward", "backward", "optimizer", "checkpoint", "other"):
            values = _sum_by_rank(self._recent.last, phase)
            if rank >= len(values):
                continue
            others = [value for other, value in enumerate(values) if other != rank]
            mean = sum(others) / max(1, len(others))
            if values[rank] - mean > own - theirs:
                best, own, theirs = phase, values[rank], mean
        if not best:
            return "look at what else runs on its machine or device"
        compared = f"its {best} takes {own / seconds:.2g} of each second and that of the others {theirs / seconds:.2g}"
        if best == "data":
            return f"{compared}: look at its disk or network, and give loaders more workers (num_workers)"
        if best == "other":
            return f"{compared}: look at what your code does on this rank alone (logging, printing, saving)"
        return f"{compared}: look at what else runs on its machine or device, and at the sizes of its batches"


def _sum_by_rank(intervals: Sequence[Mapping[str, Any]] | deque[Mapping[str, Any]], phase: str) -> list[float]:
    """Return the seconds of each rank in a phase, over intervals."""
    rows = [interval["phases"].get(phase) or [] for interval in intervals]
    return [sum(row[rank] or 0.0 for row in rows if rank < len(row)) for rank in range(max(map(len, rows), default=0))]


