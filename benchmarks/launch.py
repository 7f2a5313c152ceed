"""Start-up time, side by side in one run: best of interleaved repeats, so read the ratios.

    python benchmarks/launch.py [REPEATS]

- `slipstream launch --help` against `import torch`                         goal: at most 0.1
- two CPU workers, command to first barrier and out, against torchrun       goal: at most 0.65
- each further worker (2 to 4), against one fork of a process with torch    goal: at most one fork each, within the noise
- kill -9 of a worker to the next barrier, with forked workers              goal: p95 at most 1.5 s
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BIN = Path(sys.executable).parent
BARRIER = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
RESTARTING = """
import os, sys, time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
note = f"{sys.argv[1]}/{attempt}-{dist.get_rank()}"
with open(note + ".part", "w") as file:
    file.write(f"{os.getpid()} {time.time()}")
os.rename(note + ".part", note)
while attempt != os.environ["TORCHELASTIC_MAX_RESTARTS"]:
    dist.barrier()
    time.sleep(0.01)
"""
FORK = """
import os, time, torch
start = time.perf_counter()
if os.fork() == 0:
    os._exit(0)
os.wait()
print(time.perf_counter() - start)
"""


def seconds(command: list[str]) -> float:
    """Return the wall time of a command that must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return time.perf_counter() - start


def best(repeats: int, **commands: list[str]) -> dict[str, float]:
    """Return the best time of each command, interleaved, so that background load affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            times[name].append(seconds(command))
    return {name: min(found) for name, found in times.items()}


def launching(workers: int, script: Path) -> list[str]:
    return [str(BIN / "slipstream"), "launch", "--cpu", "--num_processes", str(workers), str(script)]


def restarts(kills: int, folder: Path) -> list[float]:
    """Return the seconds from the kill of a worker until every worker of the next attempt has passed a barrier."""
    script = folder / "restarting.py"
    script.write_text(RESTARTING)
    notes = folder / f"notes-{time.time_ns()}"
    notes.mkdir()
    command = [*launching(2, script), str(notes)]
    command[2:2] = ["--max_restarts", str(kills), "--quiet"]
    found = []
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL) as launcher:
        for attempt in range(kills):
            pids = [int(await_note(notes / f"{attempt}-{rank}", launcher).split()[0]) for rank in range(2)]
            killed = time.time()
            os.kill(pids[attempt % 2], signal.SIGKILL)
            up = [float(await_note(notes / f"{attempt + 1}-{rank}", launcher).split()[1]) for rank in range(2)]
            found.append(max(up) - killed)
    if launcher.returncode != 0:
        raise SystemExit(f"the job did not come back: exit code {launcher.returncode}")
    return found


def await_note(path: Path, launcher: subprocess.Popen[bytes]) -> str:
    while not path.exists():
        if launcher.poll() is not None:
            raise SystemExit(f"the launcher ended with exit code {launcher.returncode} before {path.name} was up")
        time.sleep(0.002)
    return path.read_text()


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, round(share * (len(times) - 1)))]


def row(what: str, ours: float, theirs: float, name: str, goal: float) -> str:
    return f"{what:<44} {ours:7.3f} s   {name} {theirs:7.3f} s   ratio {ours / theirs:5.2f}   goal <= {goal}"


def main(repeats: int, say: Callable[[str], None] = print) -> None:
    """Measure everything and print a line for each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        barrier = folder / "barrier.py"
        barrier.write_text(BARRIER)
        torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(barrier)]
        found = best(
            repeats,
            help=[str(BIN / "slipstream"), "launch", "--help"],
            torch=[sys.executable, "-c", "import torch"],
            two=launching(2, barrier),
            torchrun=torchrun,
            four=launching(4, barrier),
        )
        forks = [float(subprocess.run([sys.executable, "-c", FORK], check=True, capture_output=True).stdout) for _ in range(2)]
        say(row("slipstream launch --help", found["help"], found["torch"], "import torch", 0.1))
        say(row("two workers to the first barrier and out", found["two"], found["torchrun"], "torchrun    ", 0.65))
        each = (found["four"] - found["two"]) / 2
        say(f"{'each further worker (2 to 4)':<44} {each:7.3f} s   a bare fork  {min(forks):7.3f} s   (two cores: the workers share them)")
        times = restarts(max(10, repeats * 4), folder)
        middle, late = statistics.median(times), percentile(times, 0.95)
        say(f"{'kill -9 to the next barrier':<44} median {middle:.3f} s   p95 {late:.3f} s   goal p95 <= 1.5 s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
