"""Kill a random worker repeatedly, and check that the job restarts every time, and that its launcher holds no more than before.

    python benchmarks/soak_restarts.py [--kills 100]

Prints the restarts and their times, and what the launcher holds more per 100 restarts (least squares over a sample at the first barrier of
every attempt, without the first ten). Exits with 1 when a restart failed or something grows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import psutil
from figures import percentile
from soak_usage import fit, usage

from launch import restarts

LIMITS = {"private": 1.0, "files": 0.5, "threads": 0.5, "zombies": 0.5}
"""What the launcher may hold more after 100 restarts: MB, and numbers."""
_WARM_UP = 10
"""Attempts after which the launcher should hold no more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    kills = parser.parse_args().kills
    if kills < 2 * _WARM_UP:
        parser.error(f"--kills {kills}: growth is seen from {2 * _WARM_UP} kills on")
    held: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        times = restarts(kills, Path(folder), lambda pid: held.append(usage(psutil.Process(pid))))
    grows = []
    for what, limit in LIMITS.items():
        slope, error, level, _ = fit([[(number / 100, sample[what]) for number, sample in enumerate(held)][_WARM_UP:]])
        unit = " MB" if what == "private" else ""
        print(f"the launcher, {what}: {level:.2f}{unit} in the mean, {slope:+.3f} ± {error:.2g}{unit} per 100 restarts")
        grows += [what] if slope - 2 * error > limit else []
    spread = f"median {statistics.median(times):.3f} s, p95 {percentile(times, 0.95):.3f} s, longest {max(times):.3f} s"
    print(f"{len(times)} of {kills} kills survived; kill to the next barrier: {spread}")
    if grows:
        sys.exit(f"the launcher holds more with every restart: {', '.join(grows)}")


if __name__ == "__main__":
    main()
