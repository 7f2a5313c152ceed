"""Lightning on Slipstream: our strategy against Lightning's own DDP strategy, on two processes, interleaved.

    python benchmarks/lightning_strategy.py [--quick] [--rounds 24] [--json FILE]

Both run the same loops of Lightning with the same tiny model (two layers of 32) in the same processes, in turns whose order alternates.
The figure is the median, over the rounds, of the ratio of two neighbouring runs, in CPU time, as in `training.py`: the mean of both ranks.
It is followed by the ratio of the wall times. Ranks wait for each other, so on cores that other programs use too the wall times of the same
run differ by several times. Nearly all of the time is Lightning's loop, which is the same for both: what differs is sampling, the
wrapper, collectives for logging, and the agreement about signals before every batch. Goals:

- a step of the Trainer, plain, logged, accumulated; a validation step; a step of Fabric    at most 1.00 x Lightning's DDP
"""

from __future__ import annotations

from figures import Figure, job, options, report, require
from turns import Rounds, compared

STEPS = 100
"""Batches in a run."""


def run(rounds: int) -> Rounds:
    """Run one job on two processes."""
    require("lightning")
    found: Rounds = job(2, "_lightning_worker.py", str(rounds), str(STEPS), "2", apart=True)
    return found


def figures(rounds: Rounds) -> list[Figure]:
    """Return our runs against those of Lightning's strategy, per step."""
    return [compared(case, 1.0, times["slipstream"], times["ddp"], "Lightning's DDP") for case, times in rounds.items()]


def measure(quick: bool) -> list[Figure]:
    """Return all figures."""
    return figures(run(8 if quick else 24))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    given = parser.parse_args()
    found = figures(run(given.rounds)) if given.rounds else measure(given.quick)
    report("lightning", found, given)


if __name__ == "__main__":
    main()
