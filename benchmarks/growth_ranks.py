"""Growth of guarded calls with the number of ranks: a gather of 64 bytes and a barrier, bare torch (gloo) beside each.

    python benchmarks/growth_ranks.py [--quick] [--large] [--json FILE] [--draw]

At 2, 4, 8, 16 and 32 ranks, with `--large` also 64 and 96, which are forked from one interpreter. All ranks share the cores of this
machine: what grows here is the work of all ranks together (logarithmic messages make n log n of it), where ranks with cores of their
own would see its logarithm alone. The best round counts.
"""

from __future__ import annotations

import curves
from curves import Curve, Growth
from figures import job

SIZES, QUICK, LARGE = (2, 4, 8, 16, 32), (2, 4, 8), (64, 96)
NOTE = (
    "All ranks share the cores of one machine, so this is the work of all of them together: messages in logarithmically many rounds make"
    " n log n of it, and a gather brings n parts to each of n ranks. Ranks with cores of their own see the logarithm, and their n parts."
)
WHAT = {"gather": "a guarded gather of 64 bytes", "barrier": "a guarded barrier"}


def times(ranks: int, quick: bool) -> dict[str, float]:
    """Return the seconds per call in one job of so many ranks."""
    found: dict[str, float] = job(ranks, "_growth_ranks_worker.py", "3" if quick else "7", str(max(5, 400 // ranks)), limit=900)
    return found


def measure(quick: bool, large: bool = False) -> list[Growth]:
    """Return a drawing for each call."""
    sizes = (QUICK if quick else SIZES) + (LARGE if large else ())
    found = {ranks: times(ranks, quick) for ranks in sizes}

    def curve(what: str, name: str, dashed: bool = False) -> Curve:
        return Curve(what, tuple((ranks, by_name[name] * 1e3) for ranks, by_name in found.items()), dashed)

    return [
        Growth(f"ranks-{name}", title, "ranks", "ms", (curve("ours", name), curve("torch", f"{name}, torch", dashed=True)), NOTE)
        for name, title in WHAT.items()
    ]


def main() -> None:
    parser = curves.options(__doc__)
    parser.add_argument("--large", action="store_true", help="also 64 and 96 ranks, which takes long")
    given = parser.parse_args()
    curves.report(measure(given.quick, given.large), given)


if __name__ == "__main__":
    main()
