"""From the command to the end of the first training step, in two processes: interleaved rounds, in wall and CPU time.

    python benchmarks/first_step.py [--quick] [--processes 2] [--json FILE]

The same training (two layers, AdamW, one batch of eight) is written three times: plain PyTorch with DistributedDataParallel, with
Slipstream, and with Accelerate where it is installed. Plain PyTorch is started by `torchrun --standalone`, which is the baseline, and by
`slipstream launch`. `accelerate launch` starts several CPU processes only through MPI, so its script is started by torchrun.

Every process notes the time after each stage; the step has ended when the last process says so. CPU is that of the whole command, with
all its processes, until it has ended. The figure is the median over all rounds of ours / torchrun within a round. The stages are
those of the slowest process, in the round that was fastest.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, options, quiet_environment, report, slipstream, spread_of
from turns import ratio

GOAL = 0.6
ROUNDS = {False: 7, True: 3}
"""With --quick or without."""
TRAINING = """
import json, os, sys, time
stages = [("the script starts", time.monotonic())]
def ended(stage):
    stages.append((stage, time.monotonic()))
import torch
from torch.utils.data import DataLoader, TensorDataset
IMPORTS
ended("imports")
START
ended("process group")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ended("model and optimizer")
PREPARE
ended("prepared")
batch, target = next(iter(loader))
ended("first batch")
loss = torch.nn.functional.mse_loss(model(batch), target)
ended("forward")
BACKWARD
ended("backward")
optimizer.step()
optimizer.zero_grad()
ended("optimizer")
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(stages, file)
END
"""
PLAIN = {
    "IMPORTS": "import torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\n"
    "from torch.utils.data import DistributedSampler",
    "START": "dist.init_process_group('gloo')",
    "PREPARE": "model = DistributedDataParallel(model)\nloader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))",
    "BACKWARD": "loss.backward()",
    "END": "dist.destroy_process_group()",
}
PREPARED = {
    "IMPORTS": "from LIBRARY import Accelerator",
    "START": "accelerator = Accelerator(cpu=True)",
    "PREPARE": "loader = DataLoader(data, batch_size=8, shuffle=True)\n"
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    "BACKWARD": "accelerator.backward(loss)",
    "END": "accelerator.end_training()",
}
BASELINE = "torchrun, plain DDP"


@dataclass(frozen=True)
class Start:
    """One run of a command."""

    wall: float
    """Seconds until the last process had made its first step."""
    cpu: float
    """Seconds of all its processes until it had ended."""
    stages: tuple[tuple[str, float], ...]
    """The seconds of each stage, in the process that was last."""


def program(parts: Mapping[str, str], library: str = "") -> str:
    text = TRAINING
    for name, lines in parts.items():
        text = text.replace(f"{name}\n", f"{lines.replace('LIBRARY', library)}\n")
    return text


def commands(folder: Path, processes: int) -> dict[str, list[str]]:
    """Return the measured commands, with their scripts written to a folder."""
    libraries = ("slipstream", "accelerate")
    scripts = {"plain": program(PLAIN)} | {f"with_{library}": program(PREPARED, library) for library in libraries}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", str(processes)]
    ours = slipstream("launch", "--cpu", "--num_processes", str(processes))
    found = {
        BASELINE: [*torchrun, str(folder / "plain.py")],
        "slipstream launch, Accelerator": [*ours, str(folder / "with_slipstream.py")],
        "slipstream launch, plain DDP": [*ours, str(folder / "plain.py")],
    }
    if importlib.util.find_spec("accelerate"):
        found["torchrun, Accelerate"] = [*torchrun, str(folder / "with_accelerate.py")]
    return found


def run(command: list[str], processes: int) -> Start:
    """Run a command and return when its first step had ended.

    What happens afterwards does not count: under load torch's gloo threads sometimes abort a process of torchrun while it ends.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        begin = time.monotonic()
        started = subprocess.Popen([*command, folder], stdout=output, stderr=output, env=quiet_environment(ACCELERATE_USE_CPU="true"))
        _, status, usage = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        notes = [Path(folder) / str(rank) for rank in range(processes)]
        if not all(note.exists() for note in notes):
            output.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with exit code {started.returncode} before the step:\n{output.read()}")
        ranks = [json.loads(note.read_text()) for note in notes]
    last = max(ranks, key=lambda stages: stages[-1][1])
    times = [begin, *(moment for _, moment in last)]
    stages = tuple((name, end - start) for (name, end), start in zip(last, times, strict=False))
    return Start(times[-1] - begin, usage.ru_utime + usage.ru_stime, stages)


def start_in_turns(rounds: int, processes: int) -> dict[str, list[Start]]:
    """Return the runs of each command, one for each round, in changing order."""
    shuffle = random.Random(0).shuffle
    with tempfile.TemporaryDirectory() as folder:
        named = commands(Path(folder), processes)
        found: dict[str, list[Start]] = {name: [] for name in named}
        for command in named.values():
            run(command, processes)  # files are in the page cache and compiled
        for _ in range(rounds):
            order = list(named)
            shuffle(order)
            for name in order:
                found[name].append(run(named[name], processes))
    return found


def figures(starts: Mapping[str, list[Start]]) -> list[Figure]:
    """Return every command against torchrun with plain DDP; ours has the goal."""
    base_wall, base_cpu = ([getattr(start, clock) for start in starts[BASELINE]] for clock in ("wall", "cpu"))
    found = []
    for name, runs in starts.items():
        if name == BASELINE:
            continue
        wall, cpu = ([getattr(start, clock) for start in runs] for clock in ("wall", "cpu"))
        low, high = spread_of([entry / other for entry, other in zip(wall, base_wall, strict=True)])
        note = f"(CPU {ratio(cpu, base_cpu):.2f}, {statistics.median(cpu):.2f} s)"
        goal = GOAL if name.startswith("slipstream") else None
        middle, base = statistics.median(wall), statistics.median(base_wall)
        found.append(Figure(name, middle, "s", base, BASELINE, goal, note, paired=ratio(wall, base_wall), low=low, high=high))
    return found


def stage_table(starts: Mapping[str, list[Start]]) -> str:
    """Return the stages of each command's fastest run, in milliseconds."""
    columns = {name: dict(min(runs, key=lambda start: start.wall).stages) for name, runs in starts.items()}
    lines = ["  " + " " * 20 + "".join(f"{name:>32}" for name in columns)]
    for stage in next(iter(columns.values())):
        lines.append(f"  {stage:<20}" + "".join(f"{stages[stage] * 1000:>29.1f} ms" for stages in columns.values()))
    return "\n".join(["stages of the fastest run", *lines])


def measure(quick: bool) -> list[Figure]:
    """Return the figures of two processes."""
    return figures(start_in_turns(ROUNDS[quick], 2))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    starts = start_in_turns(ROUNDS[given.quick], given.processes)
    report("first step", figures(starts), given)
    print(stage_table(starts))


if __name__ == "__main__":
    main()
