"""Kill a random worker repeatedly, and check that the job restarts every time.

    python benchmarks/soak_restarts.py [KILLS]          50 by default

Prints the number of restarts and their times; exits with 1 when one failed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from figures import percentile

from launch import restarts


def main(kills: int) -> None:
    """Run one job that survives `kills` kills."""
    with tempfile.TemporaryDirectory() as folder:
        times = restarts(kills, Path(folder))
    spread = f"median {statistics.median(times):.3f} s, p95 {percentile(times, 0.95):.3f} s, longest {max(times):.3f} s"
    print(f"{len(times)} of {kills} kills survived; kill to the next barrier: {spread}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
