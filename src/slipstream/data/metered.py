"""Reading with the meter on: how long batches were waited for, and how many samples and tokens they held.

A step ends where the next batch is asked for after an update. Where a pass over a loader begins and ends is told too: one in which
nothing was trained was an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from slipstream.comm.meter import COUNTED, DATA, HANDED, LEAVE, PASS, PASSED, STEP, Meter
from slipstream.comm.nested import ignorant_find_batch_size
from slipstream.runtime.gradient_state import MicroBatch

__all__ = ["metered"]


class _Loader(Protocol):
    current: MicroBatch | None


def metered(batches: Iterator[Any], meter: Meter, loader: _Loader, rank: int, size: int | None) -> Iterator[Any]:
    """The same batches. `size` is how many samples a full one has on this rank; None if only a batch can tell."""
    meter.begin()
    add, clock, number, inside = meter.add, meter.clock, 0, True
    measure: Callable[[Any], int] = _size
    count: Callable[[Any], int] | None = None
    try:
        while True:
            add(DATA)
            now = clock()
            add(now)
            inside = True
            if meter.updated:  # as `Meter.end_step`
                add(STEP)
                add(0)
                meter.updated = False
                meter.step += 1
            if now >= meter.due:
                meter.attend(now)
            if not number:
                meter.passes = number = meter.passes + 1
                add(PASS)
                add(number)
                batch = next(batches)
                count, measure = meter.token_counter(batch), _size_of(batch)
            else:
                batch = next(batches)  # its StopIteration, and any other exception, ends the pass below
            add(LEAVE)
            add(clock())
            inside = False
            add(HANDED)
            if size is None:
                add(measure(batch))
            else:
                current = loader.current
                shares = None if current is None else current.shares
                add(size if shares is None else shares.real[rank])
            if count is not None:
                add(COUNTED)
                add(count(batch))
            yield batch
    except StopIteration:
        return
    finally:
        meter.leave() if inside else meter.tick()
        batches.close()  # type: ignore[attr-defined]  # a generator
        add(PASSED)
        add(number)


def _size_of(batch: Any) -> Callable[[Any], int]:
    """How the samples of batches like this one are counted: by the first tensor in it, wherever that is."""
    if isinstance(batch, torch.Tensor) and batch.ndim:
        return len
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    key, first = next(iter(entries), (None, None))
    return (lambda batch: len(batch[key])) if isinstance(first, torch.Tensor) and first.ndim else _size


def _size(batch: Any) -> int:
    return ignorant_find_batch_size(batch) or 1
