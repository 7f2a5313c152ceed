"""Reading with the meter on: how long batches were waited for, and how many samples and tokens they held.

A step ends where the next batch is asked for after an update. A pass over a loader in which nothing was trained was an evaluation: its
data, and its forward passes, are counted as such when it is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from slipstream.comm.meter import DATA, EVALUATION, FORWARD, SAMPLES, TOKENS, Meter
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
    before, count, is_first = -1, None, True
    spent, trained, at_first = meter.spent, meter.trained, meter.spent[:]
    try:
        while True:
            now = meter.clock()
            before = meter.phase
            spent[before] += now - meter.since
            meter.since = now
            if meter.updated:
                meter.end_step(now)
                if is_first:
                    trained, at_first = meter.trained, spent[:]
            meter.phase = DATA
            batch = next(batches)  # its StopIteration, and any other exception, ends the pass below
            if is_first:
                is_first, count = False, meter.token_counter(batch)
            now = meter.clock()
            spent[meter.phase] += now - meter.since
            meter.since, meter.phase, before = now, before, -1
            shares = loader.shares
            if size is None:
                spent[SAMPLES] += ignorant_find_batch_size(batch) or 1
            else:
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


def _was_evaluation(spent: list[int], at_first: list[int]) -> None:
    for column in _MOVED:
        moved = max(0, spent[column] - at_first[column])
        spent[column] -= moved
        spent[EVALUATION] += moved
    for column in _FORGOTTEN:
        spent[column] -= max(0, spent[column] - at_first[column])
