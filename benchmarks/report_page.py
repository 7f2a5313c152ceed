"""The report of a run with a million logged points: the time to write the page, its size, and the time until it is drawn.

    python benchmarks/report_page.py [--quick] [--json FILE]

A run is written as the local tracker writes it: a line for each step, with a value for each curve.
`slipstream.observability.report.write` makes the page from it, which includes reading the lines. Chromium opens it repeatedly from its
file; the page sets a mark when the visible part has been drawn, and the time of that mark counts from the start of the
navigation. Goals:

- a page of 1,000,000 points, opened and drawn    at most 2 s
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import Figure, options, report

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "pictures"))

from looking import Looker, chromium
from made_up import make_run

from slipstream.observability.report import write

SHAPES = {"10 curves of 100,000": (10, 100_000), "100 curves of 10,000": (100, 10_000), "1 curve of 1,000,000": (1, 1_000_000)}


def logged(folder: Path, curves: int, steps: int) -> Path:
    """Write a run with this many values, beside a ledger, events and settings."""
    make_run(folder)
    chance = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            values = {f"group {curve // 5}/curve {curve}": round(chance.random() + curve, 6) for curve in range(curves)}
            file.write(json.dumps({"step": step, "time": 1_790_000_000.0 + step * 0.1, "values": values}) + "\n")
    return folder


def measured(driver: Any, folder: Path, curves: int, steps: int, rounds: int) -> dict[str, float]:
    """Return the seconds to write and to open, and the megabytes."""
    run = logged(folder, curves, steps)
    started = time.perf_counter()
    page = write(run)
    made = time.perf_counter() - started
    opened = []
    for _ in range(rounds):
        driver.get("about:blank")
        looker = Looker(driver, page)
        opened.append(looker.ask("performance.getEntriesByName('slipstream-drawn')[0].startTime") / 1000)
        assert looker.ask("slipstream.page.plots.find((one) => one.visible).drawn") > 0
    return {"made": made, "opened": statistics.median(opened), "worst": max(opened), "size": page.stat().st_size / 1e6}


def measure(quick: bool) -> list[Figure]:
    found = []
    with tempfile.TemporaryDirectory() as name, chromium(Path(name) / "profile") as driver:
        for place, (shape, (curves, steps)) in enumerate(SHAPES.items()):
            times = measured(driver, Path(name) / f"run {place}", curves, steps // 10 if quick else steps, 3 if quick else 7)
            found += [
                Figure(f"{shape} points: opened and drawn", times["opened"], "s", goal=2.0, spread=f"worst {times['worst']:.2f} s"),
                Figure(f"{shape} points: read and page written", times["made"], "s"),
                Figure(f"{shape} points: the page", times["size"], "MB"),
            ]
    return found


def main() -> None:
    parser = options(__doc__)
    given = parser.parse_args()
    found = measure(given.quick)
    report("report page", found, given)


if __name__ == "__main__":
    main()
