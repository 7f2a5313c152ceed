"""Skewed work on 2 and 4 processes: the makespan of a static split, a dynamic one and one by cost against the ideal.

    python benchmarks/skewed_work.py [--quick] [--json FILE]

Items cost from 1 to 50 units with a heavy tail, and sleep for it, so that two cores are enough for four processes. The ideal is the total
time of the items divided by the processes, or the longest item. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from figures import Figure, job, options, report

GOALS = {"static": None, "dynamic": 1.1, "dynamic, key": 1.1}


def run(ranks: int, quick: bool) -> dict[str, Any]:
    """Run one job in which all ways of sharing alternate."""
    found: dict[str, Any] = job(ranks, "_skewed_work_worker.py", "3" if quick else "7", "200" if quick else "400", limit=600)
    return found


def figures(seen: dict[str, Any], ranks: int) -> list[Figure]:
    """Return the median makespan of each way against the ideal, and the cost of distribution."""
    found = []
    for name, goal in GOALS.items():
        times, ideals = zip(*seen["times"][name], strict=True)
        ratios = [time / ideal for time, ideal in seen["times"][name]]
        found.append(
            Figure(
                f"{ranks} processes: {name}",
                statistics.median(times),
                "s",
                statistics.median(ideals),
                "ideal",
                goal=goal,
                paired=statistics.median(ratios),
                low=min(ratios),
                high=max(ratios),
            )
        )
    found.append(Figure(f"{ranks} processes: one claim", seen["round_trip"] * 1e6, "us"))
    found.append(Figure(f"{ranks} processes: an item that takes no time, all counted", seen["tiny"] * 1e6, "us"))
    return found


def measure(quick: bool) -> list[Figure]:
    """Return the figures of two and of four processes."""
    return [figure for ranks in (2, 4) for figure in figures(run(ranks, quick), ranks)]


def main() -> None:
    parser = options(__doc__)
    given = parser.parse_args()
    found = measure(given.quick)
    report("skewed work", found, given)
    sys.exit(any(figure.met is False for figure in found))


if __name__ == "__main__":
    main()
