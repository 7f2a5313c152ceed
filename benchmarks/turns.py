"""Interleaved timing of contenders: short rounds of calls, in wall and CPU time, in one process or in several in step.

A round of a contender is a few calls; in one pass every contender has a round, in changing order. The CPU time is that of the
whole process, its helper threads included. On several ranks a round begins with a barrier, and what counts is the mean of the ranks' CPU
times and the longest of their wall times. Garbage is collected between rounds, not in them.

Rounds are short (about a millisecond) so that those of one pass see the same machine: on shared cores the time
of the same code varies by a half from second to second, while the ratio of neighbouring rounds is stable. So contenders are compared
within each pass, and the median over all passes is the figure; the same code entered twice shows the noise.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Figure, options, report, spread_of

Contender = Callable[[int], Any]
"""Makes so many calls."""


Clocks = dict[str, list[float]]
"""Seconds per call: `cpu` and `wall`, one for each round."""
Rounds = dict[str, dict[str, Clocks]]
"""By case, and by contender."""


@dataclass
class Times:
    """Seconds per call of one contender, one entry for each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def extend(self, other: Times) -> None:
        self.wall += other.wall
        self.cpu += other.cpu


def in_turns(contenders: dict[str, Contender], rounds: int, calls: int, barrier: Callable[[], Any] = lambda: None) -> dict[str, Times]:
    """Return the times of all contenders on this rank; each runs once before timing."""
    names = list(contenders)
    shuffle = random.Random(0).shuffle  # the same on every rank
    found = {name: Times() for name in names}
    for name in names:
        contenders[name](calls)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            shuffle(names)
            for name in names:
                barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                contenders[name](calls)
                found[name].cpu.append((time.process_time() - cpu) / calls)
                found[name].wall.append((time.perf_counter() - wall) / calls)
            if number % 50 == 49:
                gc.collect()
    finally:
        gc.enable()
    return found


def has_fabric() -> bool:
    """Return whether Lightning is installed, whose Fabric is a further contender; say so where it is not."""
    found = importlib.util.find_spec("lightning") is not None
    if not found and os.environ.get("RANK", "0") == "0":
        print("lightning is not installed: measured without Fabric", file=sys.stderr)
    return found


def joined(ranks: Iterable[dict[str, Any]]) -> dict[str, Clocks]:
    """Combine the times of several ranks: the mean of their CPU times, the longest of their wall times."""
    every = list(ranks)
    return {
        name: {
            "cpu": [statistics.fmean(cpu) for cpu in zip(*(rank[name]["cpu"] for rank in every), strict=True)],
            "wall": [max(wall) for wall in zip(*(rank[name]["wall"] for rank in every), strict=True)],
        }
        for name in every[0]
    }


def ratio(times: list[float], base: list[float]) -> float:
    """Return the median of the ratios within each pass.

    >>> ratio([2.0, 3.0, 40.0], [1.0, 2.0, 20.0])
    2.0
    """
    return statistics.median(ratios(times, base))


def ratios(times: list[float], base: list[float]) -> list[float]:
    """Return the ratio within each pass."""
    return [entry / other for entry, other in zip(times, base, strict=True)]


def added(times: list[float], base: list[float]) -> float:
    """Return the median of the differences within each pass.

    >>> added([2.0, 3.0, 40.0], [1.0, 2.0, 20.0])
    1.0
    """
    return statistics.median(entry - other for entry, other in zip(times, base, strict=True))


# -- the program of a script on one rank and on two -------------------------------------------------------------------


def main_on_ranks(group: str, description: str | None, measure: Callable[..., list[Figure]]) -> None:
    """Be the program of a script with `measure(quick, ranks, profile)`."""
    parser = options(description)
    parser.add_argument("--ranks", type=int, action="append", choices=(1, 2), help="only on so many ranks")
    parser.add_argument("--profile", type=Path, help="append where the contenders spend their time to this file")
    given = parser.parse_args()
    report(group, measure(given.quick, given.ranks or (1, 2), given.profile), given)


# -- figures ----------------------------------------------------------------------------------------------------------


def against_plain(what: str, goal: float | None, times: dict[str, Clocks], name: str) -> Figure:
    """Compare our contender with plain PyTorch, which runs twice; then the others, and plain PyTorch with itself."""
    first, second = times["plain"], times["plain, again"]
    plain = {clock: first[clock] + second[clock] for clock in first}
    ours = _twice(times[name])
    others = [other for other in (name.replace("ours", "accelerate"), "fabric") if other in times]
    behind = [f"{other} {ratio(_twice(times[other])['cpu'], plain['cpu']):.2f}" for other in others]
    behind.append(f"plain/plain {ratio(second['cpu'], first['cpu']):.3f}")
    return compared(what, goal, ours, plain, "plain", behind)


def compared(
    what: str, goal: float | None, ours: Clocks, theirs: Clocks, other: str, behind: Iterable[str] = (), clock: str = "cpu"
) -> Figure:
    """Compare two contenders by one of the clocks, followed by the difference, and the ratio by the other clock."""
    beside = "wall" if clock == "cpu" else "cpu"
    more = added(ours[clock], theirs[clock]) * 1e6
    low, high = spread_of(ratios(ours[clock], theirs[clock]))
    words = [f"{more:+.3g} us" if abs(more) < 100 else f"{more:+.0f} us", f"{beside} {ratio(ours[beside], theirs[beside]):.2f}", *behind]
    return Figure(
        what,
        statistics.median(ours[clock]) * 1e6,
        "us",
        statistics.median(theirs[clock]) * 1e6,
        other,
        goal=goal,
        spread=f"({'; '.join(words)})",
        paired=ratio(ours[clock], theirs[clock]),
        low=low,
        high=high,
    )


def alone(what: str, goal: float, ours: list[float], base: list[float]) -> Figure:
    """Return the microseconds that ours adds to calls in which nothing else happens: the ratio, at the pace of the best round."""
    pace = min(base) * 1e6
    low, high = ((end - 1) * pace for end in spread_of(ratios(ours, base)))
    note = f"(median {added(ours, base) * 1e6:.1f} us)"
    return Figure(what, (ratio(ours, base) - 1) * pace, "us", goal=goal, spread=note, low=low, high=high)


def more_than(what: str, goal: float, ours: list[float], base: list[float]) -> Figure:
    """Return the microseconds that ours takes more, within each pass."""
    low, high = spread_of([(entry - other) * 1e6 for entry, other in zip(ours, base, strict=True)])
    return Figure(what, added(ours, base) * 1e6, "us", goal=goal, low=low, high=high)


def _twice(times: Clocks) -> Clocks:
    return {clock: found + found for clock, found in times.items()}
