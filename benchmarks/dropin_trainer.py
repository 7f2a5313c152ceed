"""transformers' Trainer on the drop-in against Accelerate 1.15: steps, the time from the command to the first step, the loss.

    python benchmarks/dropin_trainer.py [--accelerate FOLDER] [--rounds 5] [--steps 300] [--json FILE]

Run it with the interpreter of an environment that has transformers and the drop-in (`make test-ecosystem` makes `.venv-ecosystem`).
Accelerate 1.15 is put in front of the path from a folder of its own, which is filled if it does not exist
(`pip install --no-deps --target FOLDER accelerate==1.15.0`). The two alternate. The model is a GPT-2 of two layers, one thread for each
process, 8 sequences of 16 tokens for each update on all processes together. Goals: a step at most 1.00 x, command to first step at most
0.8 x, and the same loss in all printed digits.

One process is started by `accelerate launch --cpu` on both. Two processes are started by `accelerate launch --cpu --num_processes 2` on the
drop-in; Accelerate would run one process with these flags, so there it is `--multi_gpu --num_processes 2` with ACCELERATE_USE_CPU=true.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from figures import HERE, Figure, Missing, best_of, options, quiet_environment, report, require

Result = dict[str, float]
OURS, THEIRS = "drop-in", "Accelerate"
LAUNCH = {
    (OURS, 1): ["--cpu", "--num_processes", "1"],
    (THEIRS, 1): ["--cpu", "--num_processes", "1"],
    (OURS, 2): ["--cpu", "--num_processes", "2"],
    (THEIRS, 2): ["--multi_gpu", "--num_processes", "2"],
}


ORIGINAL = Path(sys.prefix) / "original"
"""The folder with Accelerate 1.15, where `make test-ecosystem` puts it."""


def provide_accelerate(folder: Path = ORIGINAL) -> None:
    """Raise `Missing` without transformers and the drop-in; install Accelerate 1.15 into a folder that does not exist yet."""
    require("transformers", "accelerate")
    if not any(name.startswith("slipstream") for name in metadata.requires("accelerate") or ()):
        raise Missing("this needs the drop-in, and here `accelerate` is the original: run it in `.venv-ecosystem` (make test-ecosystem)")
    if not folder.exists():
        words = ["--disable-pip-version-check", "install", "--quiet", "--no-deps", "--target", str(folder), "accelerate==1.15.0"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def environment_with(folder: Path | None) -> dict[str, str]:
    """Return the environment of a measured program, with a folder in front of its path."""
    found = quiet_environment(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", PYTHONWARNINGS="ignore")
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    if folder is not None:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), found.get("PYTHONPATH")]))
    return found


def run(who: str, processes: int, steps: int, folder: Path) -> Result:
    """Run one job and return the seconds to the first step, per step (wall and CPU), and the loss."""
    environment = environment_with(folder if who == THEIRS else None)
    script = str(HERE / "_trainer_worker.py")
    words = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH[who, processes], script, str(steps)]
    began = time.time()
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    found = [line for line in ended.stdout.splitlines() if "RESULT " in line]
    if ended.returncode or not found:
        raise SystemExit(f"{' '.join(words)} ended with exit code {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    result: Result = json.loads(found[0].partition("RESULT ")[2])
    return {**result, "first": result["first"] - began}


def compare(processes: int, rounds: int, steps: int, folder: Path) -> list[Figure]:
    """Return the figures for so many processes: best and median of interleaved rounds."""
    results: dict[str, list[Result]] = {OURS: [], THEIRS: []}
    for number in range(rounds):
        for who in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
            results[who].append(run(who, processes, steps, folder))
    found = []
    title = "one process" if processes == 1 else f"{processes} processes"
    cpu = f"CPU {min(found['cpu'] for found in results[OURS]) / min(found['cpu'] for found in results[THEIRS]):.2f}"
    for name, what, unit, scale, goal in (("step", "a step", "ms", 1e3, 1.0), ("first", "command to first step", "s", 1.0, 0.8)):
        ours, theirs = ([result[name] * scale for result in results[who]] for who in (OURS, THEIRS))
        found.append(best_of(f"{title}: {what}", unit, ours, theirs, THEIRS, goal, cpu if name == "step" else ""))
    losses = [result["loss"] for who in (OURS, THEIRS) for result in results[who]]
    found.append(Figure(f"{title}: difference of the losses", max(losses) - min(losses), "", goal=0.0, spread=f"(loss {losses[0]})"))
    return found


def measure(quick: bool) -> list[Figure]:
    """Return the figures of one and of two processes."""
    provide_accelerate()
    rounds, steps = (2, 100) if quick else (5, 300)
    return [figure for processes in (1, 2) for figure in compare(processes, rounds, steps, ORIGINAL)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--accelerate", type=Path, default=ORIGINAL, help="the folder with Accelerate 1.15")
    parser.add_argument("--processes", type=int, action="append", choices=(1, 2), help="only on so many processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    provide_accelerate(given.accelerate)
    found = [
        figure
        for processes in given.processes or (1, 2)
        for figure in compare(processes, given.rounds, given.steps, given.accelerate)
    ]
    report("dropin trainer", found, given)


if __name__ == "__main__":
    main()
