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

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from figures import HERE, Figure, quiet_environment, save, table

Result = dict[str, float]
OURS, THEIRS = "drop-in", "Accelerate"
LAUNCH = {
    (OURS, 1): ["--cpu", "--num_processes", "1"],
    (THEIRS, 1): ["--cpu", "--num_processes", "1"],
    (OURS, 2): ["--cpu", "--num_processes", "2"],
    (THEIRS, 2): ["--multi_gpu", "--num_processes", "2"],
}


def provide_accelerate(folder: Path) -> None:
    """Install Accelerate 1.15 into a folder that does not exist yet."""
    if not folder.exists():
        words = ["--disable-pip-version-check", "install", "--quiet", "--no-deps", "--target", str(folder), "accelerate==1.15.0"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def run(who: str, processes: int, steps: int, folder: Path) -> Result:
    """Run one job and return the seconds to the first step, per step (wall and CPU), and the loss."""
    environment = quiet_environment(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", PYTHONWARNINGS="ignore")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if who == THEIRS:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), environment.get("PYTHONPATH")]))
    script = str(HERE / "_trainer_worker.py")
    words = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH[who, processes], script, str(steps)]
    began = time.time()
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    found = [line for line in ended.stdout.splitlines() if "RESULT " in line]
    if ended.returncode or not found:
        raise SystemExit(f"{' '.join(words)} ended with exit code {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    result: Result = json.loads(found[0].partition("RESULT ")[2])
    return {**result, "first": result["first"] - began}


def measure(processes: int, rounds: int, steps: int, folder: Path) -> list[Figure]:
    """Return the figures for so many processes: best and median of interleaved rounds."""
    results: dict[str, list[Result]] = {OURS: [], THEIRS: []}
    for number in range(rounds):
        for who in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
            results[who].append(run(who, processes, steps, folder))
    found = []
    title = "one process" if processes == 1 else f"{processes} processes"
    cpu = f"; CPU time {min(found['cpu'] for found in results[OURS]) / min(found['cpu'] for found in results[THEIRS]):.2f}"
    for name, what, unit, scale, goal in (("step", "a step", "ms", 1e3, 1.0), ("first", "command to first step", "s", 1.0, 0.8)):
        ours, theirs = ([result[name] * scale for result in results[who]] for who in (OURS, THEIRS))
        spread = f"(medians {statistics.median(ours) / statistics.median(theirs):.2f}{cpu if name == 'step' else ''})"
        found.append(Figure(f"{title}: {what}", min(ours), unit, min(theirs), THEIRS, goal=goal, spread=spread))
    losses = [result["loss"] for who in (OURS, THEIRS) for result in results[who]]
    found.append(Figure(f"{title}: difference of the losses", max(losses) - min(losses), "", goal=0.0, spread=f"(loss {losses[0]})"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerate", type=Path, default=Path(sys.prefix) / "accelerate", help="the folder with Accelerate 1.15")
    parser.add_argument("--processes", type=int, action="append", choices=(1, 2), help="only on so many processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    provide_accelerate(options.accelerate)
    found = [
        figure
        for processes in options.processes or (1, 2)
        for figure in measure(processes, options.rounds, options.steps, options.accelerate)
    ]
    print(table("transformers' Trainer on the drop-in", found))
    if options.json:
        save(options.json, {"dropin trainer": found})


if __name__ == "__main__":
    main()
