"""How ledger and journal grow with the length of a run: the time of a step, the memory of the process, the size of the run directory.

    python benchmarks/growth_ledger.py [--quick] [--json FILE] [--draw]

One process makes a million steps in which torch does nothing, so that our calls are all there is: a loader, forward, backward, update,
and in a second run `log({"loss": loss})` in every step. The time is CPU time per step since the size before (a step of 10^4 is one
between 10^3 and 10^4). The ledger writes a line per second, whatever the number of steps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import _ledger_worker
import torch
from curves import Curve, Growth, main

SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000, 3_000, 10_000, 30_000)


@dataclass
class Run:
    """Points of one run."""

    microseconds: list[tuple[float, float]] = field(default_factory=list)
    megabytes: list[tuple[float, float]] = field(default_factory=list)
    metrics: list[tuple[float, float]] = field(default_factory=list)
    ledger: list[tuple[float, float]] = field(default_factory=list)


def resident() -> float:
    """Return the main memory that this process has now, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def size(folder: Path, name: str) -> float:
    """Return the size of the files of a run by this name, in KiB."""
    return sum(path.stat().st_size for path in folder.rglob(name)) / 1024


def follow(build: Callable[[], Callable[[], None]], sizes: tuple[int, ...], folder: Path) -> Run:
    """Make the steps, and look at each size."""
    found, step, done = Run(), build(), 0
    for _ in range(100):
        step()
    for wanted in sizes:
        begin = time.process_time()
        for _ in range(wanted - done):
            step()
        found.microseconds.append((wanted, (time.process_time() - begin) / (wanted - done) * 1e6))
        found.megabytes.append((wanted, resident()))
        for points, name in ((found.metrics, "metrics.*"), (found.ledger, "ledger.jsonl")):
            if kilobytes := size(folder, name):
                points.append((wanted, kilobytes))
        done = wanted
    step.accelerator.end_training()  # type: ignore[attr-defined]
    return found


def measure(quick: bool) -> list[Growth]:
    """Return the drawings: time, memory, files."""
    torch.set_num_threads(1)
    sizes = QUICK_SIZES if quick else SIZES
    with tempfile.TemporaryDirectory() as place:
        plain = follow(_ledger_worker.bare(), sizes, Path(place))
        logged = follow(_ledger_worker.bare(place), sizes, Path(place))
    with_ledger, with_log = "ledger and guards", "the same, and log() in every step"
    drawings = {
        ("ledger-time", "Our calls in a step", "us"): {with_ledger: plain.microseconds, with_log: logged.microseconds},
        ("ledger-memory", "Resident memory of the process", "MiB"): {with_ledger: plain.megabytes, with_log: logged.megabytes},
        ("ledger-files", "The run directory", "KiB"): {"metrics.jsonl and its index": logged.metrics, "ledger.jsonl": logged.ledger},
    }
    return [
        Growth(name, title, "steps", unit, tuple(Curve(what, tuple(points)) for what, points in curves.items() if points))
        for (name, title, unit), curves in drawings.items()
    ]


if __name__ == "__main__":
    main(measure, __doc__)
