"""Lightning on Slipstream: our strategy against Lightning's own DDP strategy, on two processes, interleaved.

    python benchmarks/lightning_strategy.py [--quick] [--rounds 5] [--json FILE]

Both run the same loops of Lightning with the same tiny model (two layers of 32) in the same processes, in turns whose order alternates;
the figure is the best round of each, per step, on rank 0, by the clock; a note has the ratios of
medians and of best processor times. Nearly all of the time is Lightning's loop, which is the same for both: what
differs is sampling, the wrapper, collectives for logging, and the agreement about signals before every batch. Goals:

- a step of the Trainer, plain, logged, accumulated; a validation step; a step of Fabric    at most 1.00 x Lightning's DDP
"""

from __future__ import annotations

from figures import Figure, best_of, job, options, report, require

Times = dict[str, dict[str, list[tuple[float, float]]]]
"""Seconds per step of each round by case and strategy: by the clock, and of the processor."""


def run(rounds: int, steps: int) -> Times:
    """Run one job on two processes."""
    require("lightning")
    found: Times = job(2, "_lightning_worker.py", str(rounds), str(steps), "2", apart=True)
    return found


def figures(times: Times) -> list[Figure]:
    """Return the best rounds, per step."""
    found = []
    for case, by_strategy in times.items():
        (ours, our_cpu), (theirs, their_cpu) = (
            zip(*([second * 1e6 for second in both] for both in by_strategy[name]), strict=True) for name in ("slipstream", "ddp")
        )
        found.append(best_of(case, "us", ours, theirs, "Lightning's DDP", 1.0, f"CPU {min(our_cpu) / min(their_cpu):.2f}"))
    return found


def measure(quick: bool) -> list[Figure]:
    """Return all figures."""
    return figures(run(2, 100) if quick else run(5, 400))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    given = parser.parse_args()
    found = figures(run(given.rounds, 400)) if given.rounds else measure(given.quick)
    report("lightning", found, given)


if __name__ == "__main__":
    main()
