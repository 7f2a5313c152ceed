"""The training step: ours against plain PyTorch (1.00), Accelerate and Fabric, in the same processes, interleaved.

    python benchmarks/training.py [--ranks 1] [--ranks 2] [--quick] [--profile FILE] [--json FILE]

The step is forward, backward, AdamW and LambdaLR of two small layers, about 300 us of plain PyTorch on an idle core, so that overhead
is visible. The figure is the median, over many short rounds, of ours / plain within one pass (see `turns.py`), in CPU time; plain PyTorch
runs twice. It is followed by the added microseconds, the ratio of the wall times, the others, and plain PyTorch against
itself, which shows the noise. Goals:

- one process, prepared, and under `accumulate`       at most 1.01 x plain PyTorch, and at most 10 us more
- the same with `log({"loss": loss})` in every step    at most 1.02 x plain PyTorch, which logs nothing
- our calls alone, in a step where torch does nothing  at most 5 us more than the same calls without us
- two processes, guard and heartbeat on                at most 1.01 x plain DistributedDataParallel; accumulation of 4 too

Ledger and guards are on in all of them. The steps have no loader, so that none hides what they cost.

The time of our calls alone is the ratio to the same calls without Slipstream, at the pace of the best round. Caches are warm there; in a
real step, where torch's work has emptied the caches, the same calls take three to five times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from figures import Figure, job, require
from turns import Rounds, against_plain, alone, main_on_ranks, more_than

STEP_GOAL, LOGGED_GOAL = 1.01, 1.02
WHAT = {
    (1, "step", "ours"): ("step, prepared", STEP_GOAL),
    (1, "step", "ours, accumulate"): ("step under accumulate", STEP_GOAL),
    (1, "step", "ours, logged"): ("step, and its loss logged to the local tracker", LOGGED_GOAL),
    (2, "step", "ours"): ("two processes: step, prepared", STEP_GOAL),
    (2, "step", "ours, accumulate"): ("two processes: step under accumulate", STEP_GOAL),
    (2, "step", "ours, logged"): ("two processes: step, and its loss logged to the local tracker", LOGGED_GOAL),
    (2, "window", "ours"): ("two processes: update of 4 accumulated batches", STEP_GOAL),
}
MOST_ADDED = 10.0
"""Microseconds that a step of one process may take more than plain PyTorch."""
BARE = {"ours": "our calls in a step, alone", "ours, accumulate": "our calls in a step under accumulate, alone"}


def run(ranks: int, quick: bool = False, profile: Path | None = None) -> Rounds:
    """Run one job that measures everything."""
    words = ["--builds", "3" if quick else "7", "--rounds", "200" if quick else "500", "--calls", "2"]
    words += ["--profile", str(profile)] if profile else []
    require("accelerate")
    found: Rounds = job(ranks, "_training_worker.py", *words)
    return found


def figures(rounds: Rounds, ranks: int) -> list[Figure]:
    """Return our figures against plain PyTorch, followed by the others."""
    found = []
    for (wanted, case, name), (what, goal) in WHAT.items():
        if wanted == ranks:
            found.append(against_plain(what, goal, rounds[case], name))
            if ranks == 1 and goal == STEP_GOAL:
                found.append(more_than(f"{what}: more than plain", MOST_ADDED, rounds[case][name]["cpu"], rounds[case]["plain"]["cpu"]))
    for name, what in BARE.items() if "bare" in rounds else ():
        found.append(alone(what, 5.0, rounds["bare"][name]["cpu"], rounds["bare"]["plain"]["cpu"]))
    if ranks > 1:
        found.append(Figure("CPU of an idle rank: heartbeat, torch's threads", rounds["helpers"]["idle"]["cpu"][0] * 1e3, "ms/s"))
    return found


def measure(quick: bool, ranks: Sequence[int] = (1, 2), profile: Path | None = None) -> list[Figure]:
    """Return the figures of one process, then of two."""
    return [figure for count in ranks for figure in figures(run(count, quick, profile), count)]


if __name__ == "__main__":
    main_on_ranks("training", __doc__, measure)
