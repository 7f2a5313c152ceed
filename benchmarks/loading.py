"""Prepared loaders: ours against plain `DataLoader` (1.00), Accelerate and Fabric, in the same processes, interleaved.

    python benchmarks/loading.py [--ranks 1] [--ranks 2] [--quick] [--profile FILE] [--json FILE]

A round is one pass over the loader: 128 batches of 32 samples (64 where rank 0 reads for two), without workers, start and
end included. The comparison is that of `training.py`, in CPU time where each process reads for itself, and in wall time where rank 0
reads for two, because the ranks wait for each other there. On two ranks plain PyTorch has a `DistributedSampler`. A pass of one batch shows
the start-up cost, when the ranks compare what they are about to read. Goals:

- a pass over tensors, and over dicts that are collated   at most 1.05 x plain `DataLoader`, per batch
- a dispatched batch                                       at most 0.25 x Accelerate's, reading included
"""

from __future__ import annotations

from pathlib import Path

from figures import Figure, job, options, report, require
from turns import Rounds, against_plain, compared

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
        found.append(compared(what, 0.25, rounds[case]["ours"], rounds[case]["accelerate"], "accelerate", clock="wall"))
    return found


def measure(quick: bool) -> list[Figure]:
    """Return the figures of one process, then of two."""
    return [figure for ranks in (1, 2) for figure in figures(run(ranks, quick), ranks)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, action="append", choices=(1, 2), help="only on so many ranks")
    parser.add_argument("--profile", type=Path, help="append where plain PyTorch and ours spend their time to this file")
    given = parser.parse_args()
    found = [figure for ranks in given.ranks or (1, 2) for figure in figures(run(ranks, given.quick, given.profile), ranks)]
    report("loading", found, given)


if __name__ == "__main__":
    main()
