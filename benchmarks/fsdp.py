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

from pathlib import Path

from figures import Figure, job, options, report
from turns import against_plain

WORKER = "_fsdp_worker.py"


def steps(ranks: int, quick: bool, profile: Path | None = None) -> list[Figure]:
    words = ["--builds", "2" if quick else "5", "--rounds", "30" if quick else "80"]
    rounds = job(ranks, WORKER, *words, *(["--profile", str(profile)] if profile else []))
    return [
        against_plain(f"{ranks} processes: step, prepared", 1.03, rounds["step"], "ours"),
        against_plain(f"{ranks} processes: step under accumulate", 1.03, rounds["step"], "ours, accumulate"),
        Figure("prepare of model and optimizer", rounds["prepare"]["ours"], "ms", rounds["prepare"]["plain"], "fully_shard by hand"),
    ]


def memory(ranks: int) -> list[Figure]:
    alone, shared = job(1, WORKER, "--memory"), job(ranks, WORKER, "--memory")
    what = f"on {ranks} ranks"
    return [
        Figure(f"state of a rank {what}", shared["state"] / 2**20, "MiB", alone["state"] / 2**20, "one process", goal=0.27),
        Figure(f"peak of a rank {what}, beyond the imports", shared["peak"] / 2**20, "MiB", alone["peak"] / 2**20, "one process"),
    ]


def measure(quick: bool) -> list[Figure]:
    """Return the figures of steps on two ranks, and of the memory of four."""
    return [*steps(2, quick), *memory(4)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the timed steps")
    parser.add_argument("--profile", type=Path, help="append where the loop by hand and ours spend their time to this file")
    given = parser.parse_args()
    found = [*steps(given.ranks, given.quick, given.profile), *memory(4)]
    report("sharded training", found, given)


if __name__ == "__main__":
    main()
