"""All measurements, and what became slower since the baseline; for `make bench`.

    python benchmarks/run.py --quick                        all groups, fewer rounds; compared with baseline.json
    python benchmarks/run.py --only training --runs 3       one group, three times: the spread is then that over the runs
    python benchmarks/run.py --only training --save         keep the figures in results/, from which page.py makes the docs
    python benchmarks/run.py --growth --save                all growth_*.py: curves in results/, drawings in docs/pictures/
    python benchmarks/run.py --quick --save-baseline        make these figures the baseline
    python benchmarks/run.py --list                         the groups, and what each measures

A group that lacks what it compares with (Accelerate, Lightning, chromium) says so and is left out. The soak runs (`killed_ranks.py`,
`false_alarms.py`, `soak_restarts.py`) take longer and belong to `make soak`.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import curves
from baseline import BASELINE, compare, differences, read_baseline, summary
from figures import HERE, Figure, Missing, Record, machine, over_runs, save, table

RESULTS = HERE / "results"
GROUPS = {
    "imports": "imports",
    "launch": "launch",
    "first step": "first_step",
    "collectives": "collectives",
    "mistakes": "mistakes",
    "training": "training",
    "sharded training": "fsdp",
    "ledger": "ledger",
    "loading": "loading",
    "checkpoints": "checkpoints",
    "sharded checkpoint": "sharded_checkpoint",
    "offload": "offload",
    "device maps": "device_maps",
    "skewed work": "skewed_work",
    "watch": "watch",
    "report page": "report_page",
    "lightning": "lightning_strategy",
    "dropin import": "dropin_import",
    "dropin trainer": "dropin_trainer",
    "dropin offload": "dropin_offload",
}
"""The module of each group: a script with `measure(quick)`."""
GROWTHS = {path.stem.removeprefix("growth_").replace("_", " "): path.stem for path in sorted(HERE.glob("growth_*.py"))}


def main() -> None:
    given = parsed()
    groups = GROWTHS if given.growth else GROUPS
    if given.list:
        print("\n".join(f"{name:<20} {first_line(module)}" for name, module in groups.items()))
        return
    wanted = given.only or list(groups)
    earlier = {} if given.growth or given.save_baseline else read_baseline(given.baseline)
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    failed: list[str] = []
    if given.growth:
        growing(wanted, given, failed)
        sys.exit(bool(failed))
    found = {name: figures for name in wanted if (figures := measured(name, given, failed))}
    slower = keep_or_compare(found, earlier, given)
    missed = said_goals(found)
    sys.exit(bool(failed or (given.strict and (missed or slower))))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--only", action="append", metavar="GROUP", help="only this group; may be repeated")
    parser.add_argument("--runs", type=int, default=1, help="measure each group so often; the spread is then that over the runs")
    parser.add_argument("--growth", action="store_true", help="measure the curves of growth instead")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--save", action="store_true", help=f"keep the results in {RESULTS.name}/, with their drawings")
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="the figures to compare with (%(default)s)")
    parser.add_argument("--save-baseline", action="store_true", help="write the figures there instead of comparing")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a goal is missed or something became slower")
    parser.add_argument("--list", action="store_true", help="print the groups and end")
    given = parser.parse_args()
    groups = GROWTHS if given.growth else GROUPS
    if unknown := [name for name in given.only or () if name not in groups]:
        of = "of growth " if given.growth else ""
        parser.error(f"there is no group {of}{' or '.join(map(repr, unknown))}; the groups are: {', '.join(groups) or 'none yet'}")
    if given.runs < 1:
        parser.error(f"--runs {given.runs}: a group is measured at least once")
    if given.growth and (given.save_baseline or given.strict or given.runs > 1):
        parser.error("--growth draws curves: --runs, --strict and --save-baseline are for figures")
    return given


def first_line(module: str) -> str:
    """Return what a script says it measures, without running it."""
    return (HERE / f"{module}.py").read_text().removeprefix('"""').splitlines()[0]


def command(name: str, given: argparse.Namespace) -> str:
    """Return the command that measures one group like this."""
    words = ["python benchmarks/run.py", "--growth" * given.growth, "--only", shlex.quote(name)]
    return " ".join(filter(None, [*words, "--quick" * given.quick, f"--runs {given.runs}" if given.runs > 1 else ""]))


def attempt(name: str, module: str, measure: Callable[[ModuleType], Any], failed: list[str]) -> Any:
    """Measure a group between two lines that say what goes on; None where something that it needs is not there, or it failed."""
    print(f"\n{name}: measuring ...", flush=True)
    began = time.monotonic()
    try:
        found = measure(importlib.import_module(module))
    except (Missing, ModuleNotFoundError) as error:
        print(f"{name}: not measured: {error}", flush=True)
        return None
    except subprocess.CalledProcessError as error:  # the worker has said why; the other groups are still of use
        print(f"{name}: FAILED: {error}", flush=True)
        failed.append(name)
        return None
    print(f"{name}: took {time.monotonic() - began:.0f} s", flush=True)
    return found


def measured(name: str, given: argparse.Namespace, failed: list[str]) -> list[Figure]:
    """Return the figures of a group, printed, and kept where the options say so; none where it cannot be measured here."""
    runs = attempt(name, GROUPS[name], lambda module: [module.measure(given.quick) for _ in range(given.runs)], failed)
    if runs is None:
        return []
    found = over_runs(runs)
    print(table(name, found), flush=True)
    files = [given.json] if given.json else []
    files += [RESULTS / f"{GROUPS[name]}.json"] if given.save else []
    for file in files:  # at once, so that an interrupted run keeps what it has
        save(file, {name: found}, command(name, given))
    return found


def growing(names: Sequence[str], given: argparse.Namespace, failed: list[str]) -> None:
    """Measure curves; print, keep and draw them."""
    for name in names:
        growths = attempt(name, GROWTHS[name], lambda module: module.measure(given.quick), failed)
        for growth in growths or ():
            print(curves.text(growth), flush=True)
            if given.save:
                print(f"drawn: {curves.draw(growth)}", flush=True)
        if growths and given.save:
            curves.save(RESULTS / f"{GROWTHS[name]}.json", growths, command(name, given))


def keep_or_compare(found: dict[str, list[Figure]], earlier: dict[str, Record], given: argparse.Namespace) -> list[str]:
    """Write the baseline if that was asked for, else print what changed; return what became slower."""
    if given.save_baseline:
        for name, figures in found.items():
            save(given.baseline, {name: figures}, command(name, given))
        print(f"\nthe baseline of {', '.join(found)} is written to {given.baseline}")
        return []
    changes = compare({name: record.figures for name, record in earlier.items()}, found)
    print("\n" + summary(changes, earlier, found))
    for name in found:
        record = earlier.get(name)
        unlike = [f"its command was {record.command}"] if record and record.command != command(name, given) else []
        if record and (unlike := [*unlike, *differences(record, machine())]):
            print(f"  beware, {name}: {'; '.join(unlike)}")
    return [str(change) for change in changes if change.kind == "slower"]


def said_goals(found: dict[str, list[Figure]]) -> list[str]:
    """Print how many goals are met, and return those that are not."""
    with_goal = [figure for figures in found.values() for figure in figures if figure.goal is not None]
    missed = [figure.what for figure in with_goal if not figure.met]
    print(f"\n{len(with_goal) - len(missed)} of {len(with_goal)} goals met" + (f"; missed: {'; '.join(missed)}" if missed else ""))
    return missed


if __name__ == "__main__":
    main()
