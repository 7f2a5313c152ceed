"""The cost of `--help`, of imports, and of `env`: against `import torch` and others, interleaved.

    python benchmarks/imports.py [--quick] [--repeats 10] [--json FILE]

Every command is a separate process, and its figure is its best wall time, followed by the ratio of the CPU times.

- `slipstream launch --help`                     at most 0.1 x `import torch`, and torch is not among its modules
- `import slipstream; slipstream.PartialState`   at most 1.05 x `import torch`, and the same for `slipstream.Accelerator`
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from figures import Figure, best_of, options, quiet_environment, report, slipstream, timed

TORCH_FREE = (("launch", "--help"), ("env",), ("config", "--help"), ("--help",))
"""Commands of ours that import no torch."""


def commands() -> dict[str, list[str]]:
    """Return the measured commands: ours and, if installed, the others'."""
    python = [sys.executable, "-c"]
    found = {
        "import torch": [*python, "import torch"],
        "slipstream launch --help": slipstream("launch", "--help"),
        "slipstream.PartialState": [*python, "import slipstream; slipstream.PartialState"],
        "slipstream.Accelerator": [*python, "import slipstream; slipstream.Accelerator"],
        "slipstream env": slipstream("env"),
    }
    if importlib.util.find_spec("accelerate"):
        accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
        found["accelerate launch --help"] = [*accelerate, "launch", "--help"]
        found["accelerate.PartialState"] = [*python, "import accelerate; accelerate.PartialState"]
        found["accelerate env"] = [*accelerate, "env"]
    if importlib.util.find_spec("lightning"):
        found["lightning.fabric.Fabric"] = [*python, "from lightning.fabric import Fabric"]
    return found


Times = dict[str, list[tuple[float, float]]]
"""Wall and CPU seconds of each run, by command."""


def run_all(repeats: int) -> Times:
    """Return the times of all commands, interleaved."""
    times: Times = {name: [] for name in commands()}
    for _ in range(repeats):
        for name, command in commands().items():
            times[name].append(timed(command))
    return times


def modules_of_torch(words: tuple[str, ...]) -> list[str]:
    """Return the torch modules that a Slipstream command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "slipstream", *words]
    report = subprocess.run(command, check=True, capture_output=True, text=True, env=quiet_environment()).stderr
    names = [line.rpartition("|")[2].strip() for line in report.splitlines() if line.startswith("import time:")]
    if "slipstream" not in names:
        raise SystemExit(f"the import report of {' '.join(command)} does not name slipstream: is it of this interpreter?")
    return [name for name in names if name.split(".")[0] == "torch"]


def figures(times: Times) -> list[Figure]:
    """Return our figures against torch, which has the goals, and against the counterparts of others."""

    def compare(ours: str, other: str, goal: float | None = None) -> Figure:
        (wall, cpu), (their_wall, their_cpu) = (list(zip(*times[name], strict=True)) for name in (ours, other))
        return best_of(ours, "s", wall, their_wall, other, goal, f"CPU {min(cpu) / min(their_cpu):.2f}")

    found = [
        compare("slipstream launch --help", "import torch", 0.1),
        compare("slipstream.PartialState", "import torch", 1.05),
        compare("slipstream.Accelerator", "import torch", 1.05),
        compare("slipstream env", "import torch"),
    ]
    pairs = [("launch --help", "slipstream launch --help"), ("PartialState", "slipstream.PartialState"), ("env", "slipstream env")]
    found += [compare(ours, other) for what, ours in pairs for other in times if other.startswith("accelerate") and other.endswith(what)]
    found += [compare("slipstream.PartialState", other) for other in times if other == "lightning.fabric.Fabric"]
    for words in TORCH_FREE:
        found.append(Figure(f"modules of torch in `slipstream {' '.join(words)}`", len(modules_of_torch(words)), "modules", goal=0))
    return found


def measure(quick: bool) -> list[Figure]:
    """Return all figures."""
    return figures(run_all(4 if quick else 10))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int, help="how often each command runs")
    given = parser.parse_args()
    found = figures(run_all(given.repeats)) if given.repeats else measure(given.quick)
    report("imports", found, given)


if __name__ == "__main__":
    main()
