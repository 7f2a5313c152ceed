"""How the page of a report grows with the points of a run: the time to read and write it, memory, size, and drawing in Chromium.

    python benchmarks/growth_report.py [--quick] [--json FILE] [--draw]

A run has two curves, a line for each step. Each page is made in a process of its own, which reports its time and its peak memory beyond
the imports. Reading is linear in the lines. The other three are bounded: a page has at most 4,000 points of a curve, and the reader
thins older points beyond a million (see `Series.limit`). Where there is no Chromium, drawing is left out.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from curves import Curve, Growth, main
from figures import quiet_environment

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "pictures"))

LINES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
ROUNDS = 3
MAKE = """
import json, sys, time
from slipstream.observability.report import write

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:")) / 1e3

before, begin = peak(), time.perf_counter()
page = write(sys.argv[1])
took = time.perf_counter() - begin
print(json.dumps({"time": took, "memory": max(0.1, peak() - before), "size": page.stat().st_size / 1e6, "page": str(page)}))
"""


def make_run(folder: Path, lines: int) -> Path:
    """Write a run with two curves of so many points, as the local tracker writes it."""
    folder.mkdir()
    info = {"format": "slipstream run", "version": 1, "name": folder.name, "project": "growth", "started": 1.79e9, "ended": None}
    (folder / "run.json").write_text(json.dumps({**info, "state": "finished"}))
    chance = random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(lines):
            loss = 3 / (1 + step / 5000) + chance.random() / 10
            file.write(f'{{"step":{step},"time":{1.79e9 + step / 50},"values":{{"train/loss":{loss},"train/rate":{1e-3 / (1 + step)}}}}}\n')
    return folder


def make_page(run: Path) -> dict[str, float | str]:
    made = subprocess.run([sys.executable, "-c", MAKE, str(run)], capture_output=True, text=True, env=quiet_environment())
    if made.returncode:
        raise SystemExit(made.stderr)
    found: dict[str, float | str] = json.loads(made.stdout)
    return found


def drawing_times(pages: dict[int, Path]) -> dict[int, float]:
    """Return the seconds from the start of the navigation until each page is drawn; nothing where there is no browser."""
    try:
        from looking import Looker, chromium
    except ImportError:
        return {}
    found = {}
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as driver:
        for lines, page in pages.items():
            times = []
            for _ in range(ROUNDS):
                driver.get("about:blank")
                times.append(Looker(driver, page).ask("performance.getEntriesByName('slipstream-drawn')[0].startTime") / 1000)
            found[lines] = statistics.median(times)
    return found


def measure(quick: bool) -> list[Growth]:
    """Make pages of all sizes."""
    points: dict[str, list[tuple[float, float]]] = {"time": [], "memory": [], "size": []}
    with tempfile.TemporaryDirectory() as name:
        pages = {}
        for lines in LINES[:4] if quick else LINES:
            run = make_run(Path(name) / str(lines), lines)
            rounds = [make_page(run) for _ in range(ROUNDS if lines <= 100_000 else 1)]
            for what, curve in points.items():
                curve.append((lines, min(float(made[what]) for made in rounds)))
            pages[lines] = Path(str(rounds[0]["page"]))
            (run / "metrics.jsonl").unlink()
        drawn = drawing_times(pages)
    curves = [Curve("read the lines, write the page", tuple(points["time"]))]
    curves += [Curve("open it in Chromium until drawn", tuple(drawn.items()))] if drawn else []
    note = "A line has two values. Reading is linear; what is drawn has at most 4,000 points of each curve."
    bounded = (Curve("peak memory of making the page", tuple(points["memory"])), Curve("the page", tuple(points["size"])))
    return [
        Growth("report-time", "Report page over the lines of a run: time", "lines", "s", tuple(curves), note),
        Growth("report-size", "Report page over the lines of a run: memory and size", "lines", "MB", bounded, "Both stay below a bound."),
    ]


if __name__ == "__main__":
    main(measure, __doc__)
