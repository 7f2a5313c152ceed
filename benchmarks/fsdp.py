"""Sharded training: our step against a hand-written `fully_shard` loop, and the memory of a rank.

    python benchmarks/fsdp.py [--quick] [--ranks 2] [--profile FILE] [--json FILE]

The step is forward, backward, clipping to a norm, AdamW and LambdaLR of eight blocks of two layers (4.2 million parameters), on two
ranks, in the same processes, interleaved (see `turns.py`). The loop by hand calls `fully_shard` for each block and for the model, and
torch's own clipping; it runs twice, which shows the noise. Memory is that of processes of its own: one that trains the model plainly,
and four that share it. Goals:

- a step, prepared, and under `accumulate`              at most 1.03 x the loop by hand
- weights, gradients and optimizer state on 4 ranks      at most 0.27 of one process's

The peak of resident memory beyond the imports and `prepare` itself are for information.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import HERE, Figure, launch, quiet_environment, save, table
from turns import against_plain

WORKER = "_fsdp_worker.py"


def run(ranks: int, *words: str) -> Any:
    """Run one job of the worker and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        all_words = [str(output), *words]
        command = [sys.executable, str(HERE / WORKER), *all_words] if ranks == 1 else launch(ranks, WORKER, *all_words)
        subprocess.run(command, check=True, timeout=1800, env=quiet_environment())
        return json.loads(output.read_text())


def steps(ranks: int, quick: bool, profile: Path | None) -> list[Figure]:
    words = ["--builds", "2" if quick else "5", "--rounds", "30" if quick else "80"]
    rounds = run(ranks, *words, *(["--profile", str(profile)] if profile else []))
    return [
        against_plain(f"{ranks} processes: step, prepared", 1.03, rounds["step"], "ours"),
        against_plain(f"{ranks} processes: step under accumulate", 1.03, rounds["step"], "ours, accumulate"),
        Figure("prepare of model and optimizer", rounds["prepare"]["ours"], "ms", rounds["prepare"]["plain"], "fully_shard by hand"),
    ]


def memory(ranks: int) -> list[Figure]:
    alone, shared = run(1, "--memory"), run(ranks, "--memory")
    what = f"on {ranks} ranks"
    return [
        Figure(f"state of a rank {what}", shared["state"] / 2**20, "MiB", alone["state"] / 2**20, "one process", goal=0.27),
        Figure(f"peak of a rank {what}, beyond the imports", shared["peak"] / 2**20, "MiB", alone["peak"] / 2**20, "one process"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the timed steps")
    parser.add_argument("--quick", action="store_true", help="a sixth of the rounds")
    parser.add_argument("--profile", type=Path, help="append where the loop by hand and ours spend their time to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    found = [*steps(options.ranks, options.quick, options.profile), *memory(4)]
    print(table("sharded training", found))
    if options.json:
        save(options.json, {"fsdp": found})


if __name__ == "__main__":
    main()
