"""The ledger: a training loop with it, without it, and in plain PyTorch, in the same processes, interleaved.

    python benchmarks/ledger.py [--ranks 1] [--ranks 2] [--quick] [--json FILE]

The step is about a millisecond of plain PyTorch, with a loader, clipping and an update, so that it passes every mark. The figure is the
median, over many short rounds, of on / off within one pass (see `turns.py`), in CPU time; off runs twice. It is followed by the
added microseconds, plain PyTorch, and off against itself, which shows the noise. Goals:

- a step of a millisecond                    at most 1.01 x without the ledger, on one process and on two
- the same, and `log({"loss": loss.item()})`      at most 1.02 x without both
- the marks, in a step where torch does nothing   at most 5 us
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import HERE, Figure, launch, quiet_environment, save, table
from turns import Rounds, added, compared, ratio


def measure(ranks: int, quick: bool = False) -> Rounds:
    """Run one job that measures everything."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rounds.json"
        words = [str(output), "--builds", "2" if quick else "6", "--rounds", "40" if quick else "100"]
        worker = "_ledger_worker.py"
        command = [sys.executable, str(HERE / worker), *words] if ranks == 1 else launch(ranks, worker, *words)
        subprocess.run(command, check=True, timeout=1800, env=quiet_environment())
        found: Rounds = json.loads(output.read_text())
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
        on, without = rounds["bare"]["on"]["cpu"], rounds["bare"]["off"]["cpu"]
        more = (ratio(on, without) - 1) * min(without) * 1e6
        spread = f"(median {added(on, without) * 1e6:.1f} us)"
        found.append(Figure("the ledger's marks in a step, alone", more, "us", goal=5.0, spread=spread))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", choices=(1, 2), help="only on so many ranks")
    parser.add_argument("--quick", action="store_true", help="an eighth of the rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    found = [figure for ranks in options.ranks or (1, 2) for figure in figures(measure(ranks, options.quick), ranks)]
    print(table("ledger", found))
    if options.json:
        save(options.json, {"ledger": found})


if __name__ == "__main__":
    main()
