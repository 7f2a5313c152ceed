"""Lightning on Slipstream: our strategy against Lightning's own DDP strategy, on two processes, interleaved.

    python benchmarks/lightning_strategy.py [--quick] [--rounds 5] [--json FILE]

Both run the same loops of Lightning with the same tiny model (two layers of 32) in the same processes, in turns whose order alternates;
the figure is the best round of each, per step, on rank 0, by the clock; a note has the ratios of
medians and of best processor times. Nearly all of the time is Lightning's loop, which is the same for both: what
differs is sampling, the wrapper, collectives for logging, and the agreement about signals before every batch. Goals:

- a step of the Trainer, plain, logged, accumulated; a validation step; a step of Fabric    at most 1.00 x Lightning's DDP
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from figures import Figure, launch, quiet_environment, save, table

Times = dict[str, dict[str, list[tuple[float, float]]]]
"""Seconds per step of each round by case and strategy: by the clock, and of the processor."""


def measure(rounds: int, steps: int) -> Times:
    """Run one job on two processes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "times.json"
        command = launch(2, "_lightning_worker.py", str(output), str(rounds), str(steps), "2")
        subprocess.run(command, check=True, timeout=1800, env=quiet_environment(), cwd=folder)
        found: Times = json.loads(output.read_text())
    return found


def figures(times: Times) -> list[Figure]:
    """Return the best rounds, per step."""
    found = []
    for case, by_strategy in times.items():
        (ours, our_cpu), (theirs, their_cpu) = (zip(*by_strategy[name], strict=True) for name in ("slipstream", "ddp"))
        note = f"medians {statistics.median(ours) / statistics.median(theirs):.2f}, processor {min(our_cpu) / min(their_cpu):.2f}"
        found.append(Figure(case, min(ours) * 1e6, "us", min(theirs) * 1e6, "Lightning's DDP", goal=1.0, spread=note))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds of 100 steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    found = figures(measure(2, 100) if options.quick else measure(options.rounds, 400))
    print(table("Lightning", found))
    if options.json:
        save(options.json, {"lightning": found})


if __name__ == "__main__":
    main()
