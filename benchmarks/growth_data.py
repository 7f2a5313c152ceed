"""How the start of a shuffled pass, and a skip to its middle, grow with the number of samples, beside plain PyTorch and Accelerate.

    python benchmarks/growth_data.py [--quick] [--json FILE] [--draw]

The data is `range(samples)` in batches of 32. Each point is a process of its own, forked from one that has imported everything: it makes
the loader, then measures the first batch of an epoch, or the first one after `skip_first_batches(loader, len(loader) // 2)`. Time is the
best of three such processes (of one where it takes seconds). Memory is how far the most that the process ever held (VmHWM) rises above what
it held before. The others lay the order out, and read everything that they skip; they are measured up to 10^7 samples.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from curves import Curve, Growth, main
from torch.utils.data import DataLoader

BATCH = 32
SIZES = tuple(10**power for power in range(3, 10))
ROUNDS = 3
LONG = 2.0
"""Seconds from which a point is measured once."""

Cost = tuple[float, float]
"""Milliseconds and MB."""


def shuffled(samples: int) -> DataLoader[Any]:
    return DataLoader(range(samples), batch_size=BATCH, shuffle=True, collate_fn=list)


def begin_ours(samples: int, skip: bool) -> Callable[[], Any]:
    from slipstream import Accelerator, skip_first_batches

    loader = Accelerator(cpu=True).prepare(shuffled(samples))
    return lambda: next(iter(skip_first_batches(loader, len(loader) // 2) if skip else loader))


def begin_accelerate(samples: int, skip: bool) -> Callable[[], Any]:
    from accelerate import Accelerator, skip_first_batches

    loader = Accelerator(cpu=True).prepare(shuffled(samples))
    return lambda: next(iter(skip_first_batches(loader, len(loader) // 2) if skip else loader))


def begin_plain(samples: int, skip: bool) -> Callable[[], Any]:
    loader = shuffled(samples)
    return lambda: next(islice(loader, len(loader) // 2 if skip else 0, None))


CONTENDERS: dict[str, tuple[Callable[[int, bool], Callable[[], Any]], int]] = {
    "slipstream": (begin_ours, SIZES[-1]),
    "Accelerate": (begin_accelerate, 10**7),
    "DataLoader": (begin_plain, 10**7),
}
"""With the most samples that they are measured with."""


def held_memory(name: str) -> float:
    """Return a line of this process's memory, in MB: VmRSS is what it holds, VmHWM the most that it ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1e3 for line in lines if line.startswith(name))


def measure_here(begin: Callable[[int, bool], Callable[[], Any]], samples: int, skip: bool, answer: Any) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    begin(1000, skip)()  # what is imported and built once
    call = begin(samples, skip)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, start = held_memory("VmRSS"), time.perf_counter()
    call()
    answer.send(((time.perf_counter() - start) * 1e3, max(0.0, held_memory("VmHWM") - before)))


def measure_forked(begin: Callable[[int, bool], Callable[[], Any]], samples: int, skip: bool) -> Cost:
    """Return the costs in a process of its own: the best of some."""
    found: list[Cost] = []
    fork = multiprocessing.get_context("fork")
    while not found or (len(found) < ROUNDS and found[0][0] < LONG * 1e3):
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=measure_here, args=(begin, samples, skip, sender))
        process.start()
        sender.close()
        found.append(receiver.recv())
        process.join()
    return min(time for time, _ in found), min(memory for _, memory in found)


def measure(quick: bool) -> list[Growth]:
    """Measure all contenders at all sizes."""
    import accelerate  # noqa: F401  # so that the processes have it

    import slipstream.data.permutation
    import slipstream.data.prepare  # noqa: F401

    sizes = SIZES[:4] + SIZES[-1:] if quick else SIZES
    times: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    memory: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for samples in sizes:
        for name, (begin, most) in CONTENDERS.items():
            for skip in (False, True):
                if samples <= most:
                    took, held = measure_forked(begin, samples, skip)
                    times.setdefault((name, skip), []).append((samples, took))
                    memory.setdefault((name, skip), []).append((samples, max(held, 0.1)))
    return [
        Growth("data-start", "First batch of a shuffled epoch", "samples", "ms", make_curves(times, False)),
        Growth("data-skip", "skip_first_batches to the middle of a shuffled epoch", "samples", "ms", make_curves(times, True)),
        Growth("data-memory", "Memory of the first batch of a shuffled epoch", "samples", "MB", make_curves(memory, False)),
    ]


def make_curves(found: dict[tuple[str, bool], list[tuple[float, float]]], skip: bool) -> tuple[Curve, ...]:
    return tuple(Curve(name, tuple(found[name, skip]), dashed=name != "slipstream") for name in CONTENDERS)


if __name__ == "__main__":
    main(measure, __doc__)
