"""The ledger: a training loop with it, without it, and in plain PyTorch, in the same processes, interleaved.

    python benchmarks/ledger.py [--ranks 1] [--ranks 2] [--quick] [--json FILE]

The step is about a millisecond of plain PyTorch, with a loader, clipping and an update, so that it passes every mark. The figure is the
median, over many short rounds, of on / off within one pass (see `turns.py`), in CPU time; off runs twice. It is followed by the
added microseconds, plain PyTorch, and off against itself, which shows the noise. Goals:

- a step of a millisecond                    at most 1.01 x without the ledger, on one process and on two
- the same, and `log({"loss": loss})`             at most 1.02 x without both
- the marks, in a step where torch does nothing   at most 5 us
"""

from __future__ import annotations

from figures import Figure, job, options, report
from turns import Rounds, alone, compared, ratio


def run(ranks: int, quick: bool = False) -> Rounds:
    """Run one job that measures everything."""
    words = ["--builds", "2" if quick else "6", "--rounds", "40" if quick else "100"]
    found: Rounds = job(ranks, "_ledger_worker.py", *words)
    return found


def figures(rounds: Rounds, ranks: int) -> list[Figure]:
    """Return the figures of on against off."""
    step = rounds["step"]
    off = {clock: step["off"][clock] + step["off, again"][clock] for clock in step["off"]}
    twice = {clock: step["on"][clock] * 2 for clock in step["on"]}
    plain = {clock: step["plain"][clock] * 2 for clock in step["plain"]}
    behind = [f"plain {ratio(plain['cpu'], off['cpu']):.3f}", f"off/off {ratio(step['off, again']['cpu'], step['off']['cpu']):.3f}"]
    what = "step with the ledger" if ranks == 1 else f"{ranks} processes: step with the ledger"
    logged = {clock: step["logged"][clock] * 2 for clock in step["logged"]}
    found = [compared(what, 1.01, twice, off, "without", behind)]
    found.append(compared(f"{what}, and the local tracker", 1.02, logged, off, "without", behind[1:]))
    if "bare" in rounds:
        found.append(alone("the ledger's marks in a step, alone", 5.0, rounds["bare"]["on"]["cpu"], rounds["bare"]["off"]["cpu"]))
    return found


def measure(quick: bool) -> list[Figure]:
    """Return the figures of one process, then of two."""
    return [figure for ranks in (1, 2) for figure in figures(run(ranks, quick), ranks)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, action="append", choices=(1, 2), help="only on so many ranks")
    given = parser.parse_args()
    found = [figure for ranks in given.ranks or (1, 2) for figure in figures(run(ranks, given.quick), ranks)]
    report("ledger", found, given)


if __name__ == "__main__":
    main()
