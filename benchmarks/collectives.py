"""Collectives of small and large data: ours (guard on) against Accelerate and plain torch, in the same processes, interleaved.

    python benchmarks/collectives.py [--ranks 2] [--quick] [--case "one tensor"] [--profile FILE] [--json FILE]

The figure of a contender is its best round (`ratio` compares these); the ratio of the medians follows. Goals apply to two ranks:

- one small tensor                   at most 1.3 x a bare all-gather of torch (into a reused buffer)
- a dict of 20 small tensors         at most 0.15 x Accelerate's gather
- gather_object of 64 small dicts    at most 0.6 x Accelerate's
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, launch, quiet_environment, save, table

Rounds = dict[str, dict[str, list[float]]]
"""Seconds per call: by case, by contender, one for each round."""

WHAT = {
    "one tensor": "gather one tensor, 64 bytes",
    "20 tensors": "gather a dict of 20 tensors, 32 bytes each",
    "64 dicts": "gather_object of 64 small dicts",
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
GOALS = {("one tensor", "torch"): 1.3, ("20 tensors", "accelerate"): 0.15, ("64 dicts", "accelerate"): 0.6}


def measure(ranks: int = 2, quick: bool = False, cases: Sequence[str] = (), profile: Path | None = None) -> Rounds:
    """Run one job that measures everything."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rounds.json"
        words = [str(output), "--rounds", "80" if quick else "240", "--calls", "5"]
        words += [word for case in cases for word in ("--case", case)]
        words += ["--profile", str(profile)] if profile else []
        subprocess.run(launch(ranks, "_collectives_worker.py", *words), check=True, timeout=900, env=quiet_environment())
        found: Rounds = json.loads(output.read_text())
    return found


def figures(rounds: Rounds, ranks: int) -> list[Figure]:
    """Return our figures against each of the others, those with a goal first."""
    found = [
        Figure(
            WHAT[case],
            min(times["ours"]) * 1e6,
            "us",
            min(times[other]) * 1e6,
            other,
            goal=GOALS.get((case, other)) if ranks == 2 else None,
            spread=f"(medians {statistics.median(times['ours']) / statistics.median(times[other]):.2f})",
        )
        for case, times in rounds.items()
        for other in times
        if other != "ours"
    ]
    return sorted(found, key=lambda figure: figure.goal is None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a third of the rounds")
    parser.add_argument("--case", action="append", default=[], choices=WHAT, help="only this one; may be repeated")
    parser.add_argument("--profile", type=Path, help="append where ours spends its time to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    found = figures(measure(options.ranks, options.quick, options.case, options.profile), options.ranks)
    print(table(f"collectives on {options.ranks} ranks", found))
    if options.json:
        save(options.json, {"collectives": found})


if __name__ == "__main__":
    main()
