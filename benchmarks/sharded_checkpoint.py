"""Checkpoints of sharded runs on two ranks, interleaved with bare `torch.distributed.checkpoint`; best and median of the rounds.

    python benchmarks/sharded_checkpoint.py [--quick] [--megabytes 200] [--rounds 7] [--folder FOLDER] [--json FILE]

A model of 200 MB and its AdamW state, 600 MB in all, sharded by `fully_shard` over two processes, which live through all rounds and hold
it twice: once prepared by us, once sharded by hand for `dcp.save` and `dcp.load`. Every save goes into a new folder, after all earlier
writes have reached the disk, and both are durable: `FileSystemWriter(sync_files=True)` is the default of torch. Ours also has checksums and
is committed by a rename. Loads are made with all files in the page cache, and with none. Goals:

- a durable save            at most 1.1 x that of DCP
- a load                    at most 1.0 x that of DCP

The time of a round is that of the slowest rank. The ratio of the best rounds is followed by that of the medians.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from figures import HERE, Figure, best_of, launch, options, quiet_environment, report

Times = dict[str, list[float]]
MEGABYTES, QUICK_MEGABYTES = 200.0, 50.0


def run(quick: bool, megabytes: float | None = None, rounds: int | None = None, folder: Path | None = None) -> Times:
    """Measure everything, interleaved."""
    megabytes = megabytes or (QUICK_MEGABYTES if quick else MEGABYTES)
    with tempfile.TemporaryDirectory(prefix=".sharded-", dir=folder or HERE) as place:
        words = [place, str(megabytes), str(rounds or (3 if quick else 7))]
        subprocess.run(launch(2, "_sharded_checkpoint_worker.py", *words), check=True, env=quiet_environment())
        found: Times = json.loads(Path(place, "times.json").read_text())
    return found


def figures(times: Times) -> list[Figure]:
    """Return the ratios."""
    size = times["size"][0] / 1e9
    rows = [
        (f"sharded save on 2 ranks, {size:.1f} GB, durable", "save", 1.1),
        ("sharded load, files in the page cache", "warm load", 1.0),
        ("sharded load, page cache empty", "cold load", 1.0),
    ]
    found = []
    for what, name, goal in rows:
        ours, theirs = ([second * 1e3 for second in times[f"{who}: {name}"]] for who in ("ours", "dcp"))
        found.append(best_of(what, "ms", ours, theirs, "dcp", goal))
    return found


def measure(quick: bool) -> list[Figure]:
    """Return all figures."""
    return figures(run(quick))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--megabytes", type=float, help="size of the weights; AdamW has twice that")
    parser.add_argument("--rounds", type=int, help="how often everything is measured")
    parser.add_argument("--folder", type=Path, help="where files are written, on the disk that is meant")
    given = parser.parse_args()
    found = figures(run(given.quick, given.megabytes, given.rounds, given.folder))
    report("sharded checkpoint", found, given)


if __name__ == "__main__":
    main()
