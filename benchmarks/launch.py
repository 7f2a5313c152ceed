"""Start-up time, side by side in one run: best of interleaved repeats, so read the ratios.

    python benchmarks/launch.py [--quick] [--json FILE]

- two CPU workers, command to first barrier and out, against torchrun       goal: at most 0.65
- each further worker (2 to 4), against one fork of a process with torch    goal: at most one fork each, within the noise
- kill -9 of a worker to the next barrier, with forked workers              goal: p95 at most 1.5 s
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from figures import Figure, best_of, options, percentile, quiet_environment, report, timed

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


def in_turns(repeats: int, **commands: list[str]) -> dict[str, list[float]]:
    """Return the times of each command, interleaved, so that background load affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            times[name].append(timed(command)[0])
    return times


def launching(workers: int, script: Path) -> list[str]:
    return [str(BIN / "slipstream"), "launch", "--cpu", "--num_processes", str(workers), str(script)]


def restarts(kills: int, folder: Path, look: Callable[[int], None] = lambda pid: None) -> list[float]:
    """Return the seconds from the kill of a worker until every worker of the next attempt has passed a barrier.

    `look` gets the process id of the launcher after each.
    """
    script = folder / "restarting.py"
    script.write_text(RESTARTING)
    notes = folder / f"notes-{time.time_ns()}"
    notes.mkdir()
    command = [*launching(2, script), str(notes)]
    command[2:2] = ["--max_restarts", str(kills), "--quiet"]
    found = []
    with subprocess.Popen(command, env=quiet_environment(), stderr=subprocess.DEVNULL) as launcher:
        for attempt in range(kills):
            pids = [int(await_note(notes / f"{attempt}-{rank}", launcher).split()[0]) for rank in range(2)]
            killed = time.time()
            os.kill(pids[attempt % 2], signal.SIGKILL)
            up = [float(await_note(notes / f"{attempt + 1}-{rank}", launcher).split()[1]) for rank in range(2)]
            found.append(max(up) - killed)
            if attempt < kills - 1:  # the last attempt ends by itself
                look(launcher.pid)
    if launcher.returncode != 0:
        raise SystemExit(f"the job did not come back: exit code {launcher.returncode}")
    return found


def await_note(path: Path, launcher: subprocess.Popen[bytes]) -> str:
    while not path.exists():
        if launcher.poll() is not None:
            raise SystemExit(f"the launcher ended with exit code {launcher.returncode} before {path.name} was up")
        time.sleep(0.002)
    return path.read_text()


def measure(quick: bool) -> list[Figure]:
    """Return the figures of two workers against torchrun, two more workers, and a restart after a kill."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        barrier = folder / "barrier.py"
        barrier.write_text(BARRIER)
        times = in_turns(
            3 if quick else 7,
            two=launching(2, barrier),
            torchrun=[str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(barrier)],
            four=launching(4, barrier),
        )
        fork = min(float(subprocess.check_output([sys.executable, "-c", FORK])) for _ in range(3))
        returns = restarts(5 if quick else 20, folder)
    further, late = (min(times["four"]) - min(times["two"])) / 2, percentile(returns, 0.95)
    note = f"(p50 {percentile(returns, 0.5):.2f} s)"
    return [
        best_of("two workers to the first barrier and out", "s", times["two"], times["torchrun"], "torchrun", 0.65),
        Figure("each further worker (2 to 4)", further, "s", fork, "a bare fork", spread="(two cores: the workers share them)"),
        Figure("kill -9 to the next barrier, p95", late, "s", goal=1.5, spread=note, low=min(returns), high=max(returns)),
    ]


def main() -> None:
    given = options(__doc__).parse_args()
    report("launch", measure(given.quick), given)


if __name__ == "__main__":
    main()
