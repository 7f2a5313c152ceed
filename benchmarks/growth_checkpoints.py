"""How saves and loads grow: with the bytes of a checkpoint from 10 MB to 8 GB, and with its tensors from 10 to 50,000.

    python benchmarks/growth_checkpoints.py [--quick] [--json FILE] [--draw]

A model and its AdamW: a third of the bytes are weights. Bytes: tensors of 4 MB, or three smaller ones. Tensors: 8 KB each, counted with
those of AdamW (two of 8 KB and a step for each weight), so that their bytes grow too: from 80 KB to 300 MB. Measured are `save_state`,
durable, the stall of a later `save_state(async_save=True)`, and `load_state` with all files in the page cache into an optimizer without
state; the best of three, or of one from 4 GB on. Each size has a process of its own. The largest needs twice its bytes of memory and of
disk; files are written beside this script.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from pathlib import Path

from checkpoints import read_files, running
from curves import Curve, Growth, main
from figures import HERE

MEGABYTES = (10, 100, 1000, 8000)
QUICK_MEGABYTES = (10, 100, 300)
TENSORS = (10, 100, 1000, 10_000, 50_000)
QUICK_TENSORS = (10, 100, 1000)
LARGE = 4_000_000_000
"""Bytes that are measured once."""
ELEMENTS = 2048
PARTS = 4
"""Tensors for a weight: itself, two averages and a step."""
Points = dict[str, list[tuple[float, float]]]


def follow(library: str, size: float, tensors: int, elements: int, points: Points) -> None:
    """Measure one size, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix=".growth-", dir=HERE) as place, running(library, tensors=tensors, elements=elements) as worker:
        folder, best = str(Path(place, "saved")), dict[str, float]()

        def note(what: str, seconds: float) -> None:
            best[what] = min(best.get(what, math.inf), seconds * 1e3)

        rounds = 1 if tensors * elements * 12 >= LARGE else 3
        for number in range(rounds):
            os.sync()
            note("save", worker.ask("save", folder=folder)[0])
            read_files(folder)
            note("load", worker.ask("load", folder=folder)[0])
            if number < rounds - 1:
                shutil.rmtree(folder)
        for _ in range(rounds + 1 if library == "ours" else 0):  # the first one allocates memory
            os.sync()
            stall, _ = worker.ask("save_behind", folder=f"{place}/behind")
            note("stall of async_save", stall[0])
            shutil.rmtree(f"{place}/behind")
    for what, milliseconds in best.items():
        points.setdefault(f"{library}: {what}", []).append((size, milliseconds))


def by_bytes(megabytes: float) -> tuple[int, int]:
    """Return how many tensors of weights, and elements of each, make so many megabytes with AdamW.

    >>> by_bytes(10), by_bytes(1200)
    ((1, 833333), (100, 1000000))
    """
    elements = megabytes * 1e6 / 12
    tensors = max(1, round(elements / 1e6))
    return tensors, round(elements / tensors)


def measure(quick: bool) -> list[Growth]:
    """Return two drawings: by bytes, and by tensors."""
    bytes_points, tensor_points = Points(), Points()
    for library in ("ours", "accelerate"):
        for megabytes in QUICK_MEGABYTES if quick else MEGABYTES:
            follow(library, megabytes, *by_bytes(megabytes), bytes_points)
        for tensors in QUICK_TENSORS if quick else TENSORS:
            follow(library, tensors, max(1, tensors // PARTS), ELEMENTS, tensor_points)
    return [
        Growth("checkpoint-bytes", "Checkpoints of more bytes", "MB", "ms", curves(bytes_points)),
        Growth("checkpoint-tensors", "Checkpoints of more tensors, 8 KB each", "tensors", "ms", curves(tensor_points)),
    ]


def curves(points: Points) -> tuple[Curve, ...]:
    return tuple(Curve(what, tuple(found), dashed=what.startswith("accelerate")) for what, found in points.items())


if __name__ == "__main__":
    main(measure, __doc__)
