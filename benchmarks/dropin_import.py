"""What importing costs: the drop-in against Slipstream itself, and transformers' Trainer on the drop-in against Accelerate 1.15.

    python benchmarks/dropin_import.py [--accelerate FOLDER] [--rounds 7] [--json FILE]

Run it with the interpreter of an environment that has transformers and the drop-in. Accelerate 1.15 is put in front of the path from a
folder of its own, which is filled if it does not exist. Every program runs in an interpreter of its own; the two of a pair alternate, after
a run of each that is not counted and writes the compiled files. Goals: `accelerate.Accelerator` at most 1.10 x `slipstream.Accelerator`,
and `from transformers import Trainer` at most 1.00 x.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from dropin_trainer import ORIGINAL, environment_with, provide_accelerate
from figures import Figure, best_of, options, report

SLIPSTREAM = "import slipstream; slipstream.Accelerator"
DROP_IN = "import accelerate; accelerate.Accelerator"
TRAINER = "from transformers import Trainer"


Times = tuple[float, float]


def run(program: str, folder: Path | None) -> Times:
    """Return the seconds that an interpreter takes for a program, with a folder in front of its path; and those of its processor."""
    began, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", program], env=environment_with(folder), check=True, timeout=300)
    after = os.times()
    return time.perf_counter() - began, after.children_user + after.children_system - before.children_user - before.children_system


def compare(what: str, pair: tuple[tuple[str, Path | None], tuple[str, Path | None]], other: str, goal: float, rounds: int) -> Figure:
    """Return the best time of a program against that of another; the two alternate."""
    times: list[list[Times]] = [[], []]
    for number in range(rounds + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            times[index].append(run(*pair[index]))
    (ours, our_cpu), (theirs, their_cpu) = (list(zip(*entries[1:], strict=True)) for entries in times)
    return best_of(what, "s", ours, theirs, other, goal, f"CPU {min(our_cpu) / min(their_cpu):.2f}")


def measure(quick: bool, folder: Path = ORIGINAL, rounds: int | None = None) -> list[Figure]:
    """Return both figures; the folder has Accelerate 1.15."""
    provide_accelerate(folder)
    rounds = rounds or (3 if quick else 7)
    return [
        compare(DROP_IN, ((DROP_IN, None), (SLIPSTREAM, None)), "slipstream", 1.10, rounds),
        compare(TRAINER, ((TRAINER, None), (TRAINER, folder)), "Accelerate", 1.00, rounds),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--accelerate", type=Path, default=ORIGINAL, help="the folder with Accelerate 1.15")
    parser.add_argument("--rounds", type=int, help="how often each program runs")
    given = parser.parse_args()
    report("dropin import", measure(given.quick, given.accelerate.resolve(), given.rounds), given)


if __name__ == "__main__":
    main()
