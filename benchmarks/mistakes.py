"""Twelve kinds of wrong collective on 2 and 4 ranks: each an exception on every rank within a second, and the group works after it.

    python benchmarks/mistakes.py [--show] [--json FILE]

`--show` prints the message of each mistake on two ranks. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import Figure, launch, quiet_environment, save, table

Seen = list[dict[str, dict[str, Any]]]
"""By rank and mistake: type, message, seconds, works."""
EXPECTED = "MismatchError"


def measure(ranks: int) -> Seen:
    """Run one job that makes every mistake."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seen.json"
        subprocess.run(launch(ranks, "_mistakes_worker.py", str(output)), check=True, timeout=120, env=quiet_environment())
        found: Seen = json.loads(output.read_text())
    return found


def figures(seen: Seen) -> list[Figure]:
    """Return the time to the last rank's exception for each mistake; a rank that raised nothing or something else counts as never."""
    found = []
    for name in seen[0]:
        everyone = [rank[name] for rank in seen]
        right = sum(entry["type"] == EXPECTED for entry in everyone)
        works = all(entry["works"] for entry in everyone)
        slowest = max(entry["seconds"] for entry in everyone) if right == len(seen) and works else float("inf")
        spread = f"{right} of {len(seen)} ranks raised {EXPECTED}; the group {'works' if works else 'does NOT work'} after it"
        found.append(Figure(f"{len(seen)} ranks: {name}", slowest * 1000, "ms", goal=1000, spread=spread))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print the message of each mistake on two ranks")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    two, four = measure(2), measure(4)
    if options.show:
        for name, entry in two[0].items():
            print(f"--- {name}\n{entry['message']}\n")
    found = [*figures(two), *figures(four)]
    print(table("mistakes", found))
    if options.json:
        save(options.json, {"mistakes": found})
    sys.exit(not all(figure.met for figure in found))


if __name__ == "__main__":
    main()
