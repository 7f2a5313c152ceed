"""All comparisons: starting, importing, collectives, training, loading, checkpoints, offload, watching; for `make bench`.

    python benchmarks/run.py [--quick] [--only imports] [--json FILE] [--strict]

The soak runs (`kills.py`, `false_alarms.py`, `soak_restarts.py`) take longer and belong to `make soak`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import checkpoints
import collectives
import device_maps
import fsdp
import imports
import ledger
import lightning_strategy
import loading
import mistakes
import offload
import sharded_checkpoint
import skewed_work
import watch
from figures import Figure, machine, save, table

import launch
import training


def starting(quick: bool) -> list[Figure]:
    """Return the figures of two workers against torchrun, two more workers, and a restart after a kill."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        barrier = folder / "barrier.py"
        barrier.write_text(launch.BARRIER)
        times = launch.best(
            3 if quick else 7,
            two=launch.launching(2, barrier),
            torchrun=[str(launch.BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(barrier)],
            four=launch.launching(4, barrier),
        )
        fork = min(float(subprocess.check_output([sys.executable, "-c", launch.FORK])) for _ in range(3))
        returns = launch.restarts(5 if quick else 20, folder)
    late = launch.percentile(returns, 0.95)
    return [
        Figure("two workers to the first barrier and out", times["two"], "s", times["torchrun"], "torchrun", goal=0.65),
        Figure("each further worker (2 to 4)", (times["four"] - times["two"]) / 2, "s", fork, "a bare fork"),
        Figure("kill -9 to the next barrier, p95", late, "s", goal=1.5, spread=f"p50 {launch.percentile(returns, 0.5):.2f}"),
    ]


def importing(quick: bool) -> list[Figure]:
    return imports.figures(imports.measure(4 if quick else 10))


def collecting(quick: bool) -> list[Figure]:
    return collectives.figures(collectives.measure(2, quick), 2)


def mistaking(quick: bool) -> list[Figure]:
    return [figure for ranks in (2, 4) for figure in mistakes.figures(mistakes.measure(ranks))]


def stepping(quick: bool) -> list[Figure]:
    return [figure for ranks in (1, 2) for figure in training.figures(training.measure(ranks, quick), ranks)]


def sharding(quick: bool) -> list[Figure]:
    return [*fsdp.steps(2, quick, None), *fsdp.memory(4)]


def accounting(quick: bool) -> list[Figure]:
    return [figure for ranks in (1, 2) for figure in ledger.figures(ledger.measure(ranks, quick), ranks)]


def reading(quick: bool) -> list[Figure]:
    return [figure for ranks in (1, 2) for figure in loading.figures(loading.measure(ranks, quick), ranks)]


def saving(quick: bool) -> list[Figure]:
    return checkpoints.figures(checkpoints.measure(quick))


def saving_shards(quick: bool) -> list[Figure]:
    return sharded_checkpoint.figures(sharded_checkpoint.measure(quick))


def handing_out(quick: bool) -> list[Figure]:
    return [figure for ranks in (2, 4) for figure in skewed_work.figures(skewed_work.measure(ranks, quick), ranks)]


def offloading(quick: bool) -> list[Figure]:
    return offload.measure(quick)


def hosting(quick: bool) -> list[Figure]:
    return lightning_strategy.figures(lightning_strategy.measure(2, 100) if quick else lightning_strategy.measure(5, 400))


GROUPS: dict[str, Callable[[bool], list[Figure]]] = {
    "imports": importing,
    "launch": starting,
    "collectives": collecting,
    "mistakes": mistaking,
    "training": stepping,
    "sharded training": sharding,
    "ledger": accounting,
    "loading": reading,
    "checkpoints": saving,
    "sharded checkpoint": saving_shards,
    "offload": offloading,
    "device maps": device_maps.measure,
    "skewed work": handing_out,
    "watch": watch.measure,
    "lightning": hosting,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", action="append", choices=GROUPS, help="only this group; may be repeated")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a goal is missed")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    found = {}
    for name in options.only or GROUPS:
        found[name] = GROUPS[name](options.quick)
        print("\n" + table(name, found[name]), flush=True)
    if options.json:
        save(options.json, found)
    with_goal = [figure for figures in found.values() for figure in figures if figure.goal is not None]
    missed = [figure.what for figure in with_goal if not figure.met]
    print(f"\n{len(with_goal) - len(missed)} of {len(with_goal)} goals met" + (f"; missed: {'; '.join(missed)}" if missed else ""))
    sys.exit(bool(missed) and options.strict)


if __name__ == "__main__":
    main()
