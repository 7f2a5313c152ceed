"""Collectives of small and large data: ours (guard on) against Accelerate and plain torch, in the same processes, interleaved.

    python benchmarks/collectives.py [--ranks 2] [--quick] [--case "one tensor"] [--profile FILE] [--json FILE]

The figure of a contender is its best round (`ratio` compares these); the ratio of the medians follows. Goals apply to two ranks:

- one small tensor                   at most 1.3 x a bare all-gather of torch (into a reused buffer)
- a dict of 20 small tensors         at most 0.15 x Accelerate's gather
- gather_object of 64 small dicts    at most 0.6 x Accelerate's
- gather_object of 64 long dicts     at most 0.35 x Accelerate's
- gather and reduce of 64 MiB        at most 1.1 x bare torch, which allocates its result as ours does ("reused" keeps it)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from figures import Figure, best_of, job, options, report, require

Rounds = dict[str, dict[str, list[float]]]
"""Seconds per call: by case, by contender, one for each round."""

WHAT = {
    "one tensor": "gather one tensor, 64 bytes",
    "20 tensors": "gather a dict of 20 tensors, 32 bytes each",
    "64 dicts": "gather_object of 64 small dicts",
    "64 long dicts": "gather_object of 64 dicts with 250 characters each",
    "64 texts": "gather of 64 texts",
    "reduce": "reduce one tensor",
    "reduce 20": "reduce a dict of 20 tensors",
    "broadcast": "broadcast one tensor",
    "broadcast 20": "broadcast a dict of 20 tensors",
    "ragged": "gather of uneven rows (others pad)",
    "barrier": "wait_for_everyone",
    "64 MiB": "gather one tensor, 64 MiB",
    "64 MiB reduce": "reduce one tensor, 64 MiB",
}
GOALS = {
    ("one tensor", "torch"): 1.3,
    ("20 tensors", "accelerate"): 0.15,
    ("64 dicts", "accelerate"): 0.6,
    ("64 long dicts", "accelerate"): 0.35,
    ("64 MiB", "torch"): 1.1,
    ("64 MiB reduce", "torch"): 1.1,
}


def run(ranks: int, quick: bool, cases: Sequence[str] = (), profile: Path | None = None) -> Rounds:
    """Run one job that measures everything."""
    require("accelerate")
    words = ["--rounds", "80" if quick else "240", "--calls", "5", *(word for case in cases for word in ("--case", case))]
    words += ["--profile", str(profile)] if profile else []
    found: Rounds = job(ranks, "_collectives_worker.py", *words, limit=900)
    return found


def figures(rounds: Rounds, ranks: int) -> list[Figure]:
    """Return our figures against each of the others, those with a goal first."""
    found = [
        best_of(WHAT[case], "us", times["ours"], times[other], other, GOALS.get((case, other)) if ranks == 2 else None)
        for case, seconds in rounds.items()
        for times in [{name: [second * 1e6 for second in found] for name, found in seconds.items()}]
        for other in times
        if other != "ours"
    ]
    return sorted(found, key=lambda figure: figure.goal is None)


def measure(quick: bool) -> list[Figure]:
    """Return the figures of two ranks."""
    return figures(run(2, quick), 2)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--case", action="append", default=[], choices=WHAT, help="only this one; may be repeated")
    parser.add_argument("--profile", type=Path, help="append where ours spends its time to this file")
    given = parser.parse_args()
    found = figures(run(given.ranks, given.quick, given.case, given.profile), given.ranks)
    report("collectives", found, given)


if __name__ == "__main__":
    main()
