"""Skewed work on 2 and 4 processes: the makespan of a static split, a dynamic one and one by cost against the ideal.

    python benchmarks/skewed_work.py [--quick] [--json FILE]

Items cost from 1 to 50 units with a heavy tail, and sleep for it, so that two cores are enough for four processes. The ideal is the total
time of the items divided by the processes, or the longest item. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import Figure, launch, quiet_environment, save, table

GOALS = {"static": None, "dynamic": 1.1, "dynamic, key": 1.1}


def measure(ranks: int, quick: bool = False) -> dict[str, Any]:
    """Run one job in which all ways of sharing alternate."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seen.json"
        words = (str(output), "3" if quick else "7", "200" if quick else "400")
        subprocess.run(launch(ranks, "_skewed_work_worker.py", *words), check=True, timeout=600, env=quiet_environment())
        found: dict[str, Any] = json.loads(output.read_text())
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
                spread=f"({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} rounds)",
                paired=statistics.median(ratios),
            )
        )
    found.append(Figure(f"{ranks} processes: one claim", seen["round_trip"] * 1e6, "us"))
    found.append(Figure(f"{ranks} processes: an item that takes no time, all counted", seen["tiny"] * 1e6, "us"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and items")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    found = [figure for ranks in (2, 4) for figure in figures(measure(ranks, options.quick), ranks)]
    print(table("skewed work", found))
    if options.json:
        save(options.json, {"skewed work": found})
    sys.exit(any(figure.met is False for figure in found))


if __name__ == "__main__":
    main()
