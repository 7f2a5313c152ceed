"""What processes hold (memory, open files, threads), and whether that grows: samples of many processes, and lines fitted through them.

A process that was restarted begins anew, so growth has two parts. *Within*: a common slope of all processes, each with its own height
(least squares over time, after a warm-up). *From process to process*: the slope of what each new process holds at the same point of its
work. Both are per hour, with their standard error; growth is what exceeds its limit by more than two standard errors.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MEASURES = {"memory": "MB", "files": "", "threads": "", "children": ""}
"""What is fitted, with units. Memory is the anonymous one: pages of files come and go with the load of the machine. It includes the pages
that a worker shares with its launcher, so that it does not grow when the worker writes to one of them, as its private memory does."""
LIMITS = {"MB": 10.0, "": 1.0}
"""Growth per hour that would be noticed in a run of a week, by unit."""
KEEPS_DATA = {("watch", "MB"): 40.0}
"""Other limits, for what keeps the data that it reads."""


def usage(process: psutil.Process) -> dict[str, Any]:
    """Return what a process holds now."""
    memory = process.memory_full_info()
    return {
        "time": time.time(),
        "private": memory.uss / 1e6,
        "memory": _anonymous(process.pid) / 1e6,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children()),
        "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in process.children()),
    }


def _anonymous(pid: int) -> int:
    """Return the bytes of anonymous memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0


@dataclass(frozen=True)
class Slope:
    """A line through samples: how much more per hour."""

    kind: str
    what: str
    unit: str
    scope: str
    """`within` a process, `process to process`, or `job`."""
    level: float
    """The mean."""
    per_hour: float
    error: float
    """The standard error of `per_hour`; infinite if there are too few samples."""
    samples: int

    @property
    def limit(self) -> float:
        return KEEPS_DATA.get((self.kind, self.unit), LIMITS[self.unit])

    @property
    def grows(self) -> bool:
        return math.isfinite(self.error) and self.per_hour - 2 * self.error > self.limit

    def row(self) -> tuple[str, ...]:
        error = f"{self.error:.2g}" if math.isfinite(self.error) else "?"
        verdict = "GROWS" if self.grows else "flat" if math.isfinite(self.error) else "too few samples"
        level = f"{self.level:.1f} {self.unit}".strip()
        return self.kind, self.what, self.scope, level, f"{self.per_hour:+.2f} ± {error}", str(self.samples), verdict


TITLES = ("process", "holds", "compared", "mean", "more per hour", "samples", "")


def fit(groups: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, float, float, int]:
    """Return the common slope of groups of points, its standard error, the mean of y, and the number of points.

    >>> fit([[(0, 1.0), (1, 3.0)], [(5, 0.0), (6, 2.0)]])
    (2.0, 0.0, 1.5, 4)
    """
    kept = [group for group in groups if len(group) > 1]
    points: list[tuple[float, float]] = []
    for group in kept:
        x_mean, y_mean = (sum(point[axis] for point in group) / len(group) for axis in (0, 1))
        points += [(x - x_mean, y - y_mean) for x, y in group]
    total = [y for group in kept for _, y in group]
    spread = sum(x * x for x, _ in points)
    if not spread:
        return 0.0, math.inf, 0.0, len(points)
    slope = sum(x * y for x, y in points) / spread
    freedom = len(points) - len(kept) - 1
    left = sum((y - slope * x) ** 2 for x, y in points)
    error = math.sqrt(left / freedom / spread) if freedom > 0 else math.inf
    return slope, error, sum(total) / len(total), len(points)


def slopes(kind: str, samples: Sequence[dict[str, Any]], *, warm_up: float) -> list[Slope]:
    """Return the growth of one kind of process, without the samples of each process before it has done `warm_up` of its work.

    Processes are compared with those of the same `role`: rank 0 holds more than the others.
    """
    found = []
    by_process: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        if sample["work"] >= warm_up:
            by_process[sample["process"]].append(sample)
    firsts = [group[0] for group in by_process.values()]
    same = min((first["work"] for first in firsts), default=0)
    for what, unit in MEASURES.items():
        within = fit([[(one["time"] / 3600, one[what]) for one in group] for group in by_process.values()])
        found.append(_slope(kind, what, unit, "within", within))
        levels: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for one in firsts:
            if one["work"] <= 1.5 * same + 1:
                levels[one.get("role", "")].append((one["time"] / 3600, one[what]))
        found.append(_slope(kind, what, unit, "process to process", fit(levels.values())))
    return found


def job_slopes(samples: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Slope]:
    """Return the growth of what belongs to no single process."""
    return [_slope("all", name, "", "job", fit([[(one["time"] / 3600, one[name]) for one in samples]])) for name in names]


def _slope(kind: str, what: str, unit: str, scope: str, fitted: tuple[float, float, float, int]) -> Slope:
    per_hour, error, level, count = fitted
    return Slope(kind, what, unit, scope, level, per_hour, error, count)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; a line that was torn by a kill is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
