"""How a launch grows with its workers: from the command to the first barrier and out, beside `torchrun --standalone`.

    python benchmarks/growth_launch.py [--quick] [--json FILE] [--draw]

Wall and CPU time of the whole command, the best of three rounds in which both launchers alternate (up to 8 workers; one round for more).
In a run of its own, because reading it takes time, the memory of a worker at the barrier: its proportional share (PSS), where a page
that several processes share counts for each of them by its part. On few cores the workers take turns, so that the time of a worker is
CPU time. torchrun starts an interpreter with torch for each worker, which takes 0.2 GB: it goes as far as half of the free memory lets it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from curves import Curve, Growth, main
from figures import slipstream, timed

WORKERS = (2, 4, 8, 16, 32)
ROUNDS = 3
MANY = 8
"""Workers of which one round is enough: a start takes a minute."""
OURS, TORCHRUN = "slipstream launch", "torchrun"
BYTES_OF_AN_INTERPRETER = 250e6
"""With torch imported."""
BARRIER = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if len(sys.argv) > 1:
    with open("/proc/self/smaps_rollup") as file:
        share = next(line.split()[1] for line in file if line.startswith("Pss:"))
    with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
        file.write(share)
    dist.barrier()  # all have read while all were there
dist.destroy_process_group()
"""

Command = Callable[[int], list[str]]


def commands(script: Path) -> dict[str, Command]:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    return {
        OURS: lambda workers: [*slipstream("launch", "--cpu", "--num_processes", str(workers)), str(script)],
        TORCHRUN: lambda workers: [torchrun, "--standalone", "--nproc-per-node", str(workers), str(script)],
    }


def worker_memory(command: list[str]) -> float:
    """Return the mean of the workers' proportional shares of memory, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        timed([*command, folder])
        return statistics.fmean(int(share.read_text()) for share in Path(folder).iterdir()) * 1024 / 1e6


def fits(name: str, workers: int) -> bool:
    """Whether there is memory for so many workers."""
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    return name == OURS or workers * BYTES_OF_AN_INTERPRETER < available / 2


def measure(quick: bool) -> list[Growth]:
    sizes = WORKERS[:3] if quick else WORKERS
    points: dict[str, dict[str, list[tuple[float, float]]]] = {what: {OURS: [], TORCHRUN: []} for what in ("wall", "cpu", "memory")}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "barrier.py"
        script.write_text(BARRIER)
        starts = commands(script)
        for command in starts.values():
            timed(command(2))  # files are in the page cache and compiled
        for workers in sizes:
            measured = {name: command(workers) for name, command in starts.items() if fits(name, workers)}
            rounds = 1 if quick or workers > MANY else ROUNDS
            times = [{name: timed(command) for name, command in measured.items()} for _ in range(rounds)]
            for name, command in measured.items():
                points["wall"][name].append((workers, min(turn[name][0] for turn in times)))
                points["cpu"][name].append((workers, min(turn[name][1] for turn in times)))
                points["memory"][name].append((workers, worker_memory(command)))
    each = (points["cpu"][OURS][-1][1] - points["cpu"][OURS][0][1]) / (sizes[-1] - sizes[0])

    def growth(name: str, title: str, unit: str, what: str, note: str = "") -> Growth:
        curves = tuple(Curve(who, tuple(found), dashed=who == TORCHRUN) for who, found in points[what].items())
        return Growth(name, title, "workers", unit, curves, note)

    return [
        growth("launch-time", "From the command to the first barrier and out", "s", "wall"),
        growth("launch-cpu", "The same in CPU time of all processes", "s", "cpu", f"A further worker takes {each * 1000:.0f} ms."),
        growth("launch-memory", "Memory of a worker at the first barrier (PSS)", "MB", "memory"),
    ]


if __name__ == "__main__":
    main(measure, __doc__)
