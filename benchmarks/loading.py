"""Prepared loaders: ours against plain `DataLoader` (1.00), Accelerate and Fabric, in the same processes, interleaved.

    python benchmarks/loading.py [--ranks 1] [--ranks 2] [--quick] [--profile FILE] [--json FILE]

A round is one pass over the loader: 128 batches of 32 samples (160 where they are shuffled, 64 where rank 0 reads for two), without
workers, start and end included. The comparison is that of `training.py`, in CPU time where each process reads for itself, and in wall
time where rank 0 reads for two, because the ranks wait for each other there. On two ranks plain PyTorch has a `DistributedSampler`. A pass
of one batch shows the start-up cost, when the ranks compare what they are about to read. Goals:

- a pass over tensors, and over dicts that are collated   at most 1.05 x plain `DataLoader`, per batch
- a dispatched batch                                       at most 0.15 x Accelerate's, reading included
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from figures import Figure, job, require
from turns import Rounds, against_plain, compared, main_on_ranks

SHARED: dict[tuple[int, str], tuple[str, float | None]] = {
    (1, "tensors"): ("tensors, in order", 1.05),
    (1, "tensors, shuffled"): ("tensors, shuffled", 1.05),
    (1, "dicts"): ("dicts of tensors and numbers, default collate", 1.05),
    (1, "beginning"): ("tensors, a pass of one batch", None),
    (2, "tensors"): ("two processes: tensors, each its part", 1.05),
    (2, "beginning"): ("two processes: tensors, a pass of one batch", None),
}
DISPATCHED = {
    "tensors dispatched": "two processes: tensors, dispatched",
    "dicts dispatched": "two processes: dicts, dispatched",
    "stream dispatched": "two processes: stream of dicts, dispatched",
}


def run(ranks: int, quick: bool = False, profile: Path | None = None) -> Rounds:
    """Run one job that measures everything."""
    words = ["--rounds", "50" if quick else "250"]
    words += ["--profile", str(profile)] if profile else []
    require("accelerate")
    found: Rounds = job(ranks, "_loading_worker.py", *words)
    return found


def figures(rounds: Rounds, ranks: int) -> list[Figure]:
    """Return our figures against plain PyTorch, and against Accelerate where rank 0 reads."""
    found = [against_plain(what, goal, rounds[case], "ours") for (wanted, case), (what, goal) in SHARED.items() if wanted == ranks]
    for case, what in DISPATCHED.items() if ranks > 1 else ():
        found.append(compared(what, 0.15, rounds[case]["ours"], rounds[case]["accelerate"], "accelerate", clock="wall"))
    return found


def measure(quick: bool, ranks: Sequence[int] = (1, 2), profile: Path | None = None) -> list[Figure]:
    """Return the figures of one process, then of two."""
    return [figure for count in ranks for figure in figures(run(count, quick, profile), count)]


if __name__ == "__main__":
    main_on_ranks("loading", __doc__, measure)
