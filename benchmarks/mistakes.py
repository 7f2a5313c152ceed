"""Twelve kinds of wrong collective on 2 and 4 ranks: each an exception on every rank within a second, and the group works after it.

    python benchmarks/mistakes.py [--show] [--json FILE]

`--show` prints the message of each mistake on two ranks. Exits with 1 when a goal is missed.
"""

from __future__ import annotations

import sys
from typing import Any

from figures import Figure, job, options, report

Seen = list[dict[str, dict[str, Any]]]
"""By rank and mistake: type, message, seconds, works."""
EXPECTED = "MismatchError"


def run(ranks: int) -> Seen:
    """Run one job that makes every mistake."""
    found: Seen = job(ranks, "_mistakes_worker.py", limit=120)
    return found


def figures(seen: Seen) -> list[Figure]:
    """Return the time to the last rank's exception of the slowest mistake; a rank that raised nothing or something else counts as never."""
    slowest = {}
    for name in seen[0]:
        everyone = [rank[name] for rank in seen]
        right = all(entry["type"] == EXPECTED and entry["works"] for entry in everyone)
        slowest[name] = max(entry["seconds"] for entry in everyone) * 1000 if right else float("inf")
    worst = max(slowest, key=lambda name: slowest[name])
    what = f"{len(seen)} ranks: {len(slowest)} wrong collectives, the last exception"
    return [Figure(what, slowest[worst], "ms", goal=1000, spread=f"(the slowest: {worst})", low=min(slowest.values()), high=slowest[worst])]


def measure(quick: bool) -> list[Figure]:
    """Return the figures of two and of four ranks; there is nothing to leave out for a quick run."""
    return [figure for ranks in (2, 4) for figure in figures(run(ranks))]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--show", action="store_true", help="print the message of each mistake on two ranks")
    given = parser.parse_args()
    two, four = run(2), run(4)
    if given.show:
        for name, entry in two[0].items():
            print(f"--- {name}: {entry['type']}, the group {'works' if entry['works'] else 'does NOT work'} after it\n{entry['message']}\n")
    found = [*figures(two), *figures(four)]
    report("mistakes", found, given)
    sys.exit(not all(figure.met for figure in found))


if __name__ == "__main__":
    main()
