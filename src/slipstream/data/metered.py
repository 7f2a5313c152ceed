"""Reading with the meter on: how long batches were waited for, and how many samples and tokens they held.

A step ends where the next batch is asked for after an update. A pass over a loader in which nothing was trained was an evaluation: its
data, and its forward passes, are counted as such when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from slipstream.comm.meter import DATA, EVALUATION, FORWARD, SAMPLES, TOKENS, ZERO, Meter
from slipstream.comm.nested import ignorant_find_batch_size
from slipstream.runtime.gradient_state import Shares

__all__ = ["metered"]

_MOVED = (DATA, FORWARD)
_FORGOTTEN = (SAMPLES, TOKENS)


class _Loader(Protocol):
    shares: Shares | None


def metered(batches: Iterator[Any], meter: Meter, loader: _Loader, rank: int, size: int | None) -> Iterator[Any]:
    """The same batches. `size` is how many samples a full one has on this rank; None if only a batch can tell."""
    meter.begin()
    measure: Callable[[Any], int] = _size
    before, count, is_first = -1, None, True
    clock, spent, trained, at_first = meter.clock, meter.spent, meter.trained, meter.spent[:]
    try:
        while True:
            now = clock()
            before = meter.phase
            spent[before] += now - meter.since
            meter.since = now
            if meter.updated:  # as `Meter.end_step`
                meter.rows += spent
                spent[:] = ZERO
                meter.updated = False
                meter.step += 1
                if now >= meter.due:
                    meter.attend(now)
                if is_first:
                    trained, at_first = meter.trained, spent[:]
            meter.phase = DATA
            batch = next(batches)  # its StopIteration, and any other exception, ends the pass below
            if is_first:
                is_first, count, measure = False, meter.token_counter(batch), _size_of(batch)
            now = clock()
            spent[meter.phase] += now - meter.since
            meter.since, meter.phase, before = now, before, -1
            if size is None:
                spent[SAMPLES] += measure(batch)
            else:
                shares = loader.shares
                spent[SAMPLES] += size if shares is None else shares.real[rank]
            if count is not None:
                spent[TOKENS] += count(batch)
            yield batch
    except StopIteration:
        return
    finally:
        if before >= 0:
            meter.leave(before)
        batches.close()  # type: ignore[attr-defined]  # a generator
        if meter.trained == trained:
            _was_evaluation(spent, at_first)


def _size_of(batch: Any) -> Callable[[Any], int]:
    """How the samples of batches like this one are counted: by the first tensor in it, wherever that is."""
    if isinstance(batch, torch.Tensor) and batch.ndim:
        return len
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    key, first = next(iter(entries), (None, None))
    return (lambda batch: len(batch[key])) if isinstance(first, torch.Tensor) and first.ndim else _size


def _size(batch: Any) -> int:
    return ignorant_find_batch_size(batch) or 1


def _was_evaluation(spent: list[int], at_first: list[int]) -> None:
    for column in _MOVED:
        moved = max(0, spent[column] - at_first[column])
        spent[column] -= moved
        spent[EVALUATION] += moved
    for column in _FORGOTTEN:
        spent[column] -= max(0, spent[column] - at_first[column])
