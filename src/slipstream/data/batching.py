"""`effective_batch_size`: the batch of the textbook, as batches per device and batches per update.

With `drop_last` what is left over after the last full update is dropped, so that updates are the same on any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slipstream.data.plan import Order
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["derive", "full_updates"]


def derive(effective: int, batch_size: int | None, world_size: int, *, split: bool = False) -> tuple[int, int]:
    """(samples per device and batch, batches per update), whose product over all processes is the effective batch size.

    `batch_size` is the most that fits a device; the largest size up to it that comes out even is taken. If that is less than half of
    what would fit, one line says so and names a number that comes out better. `split`: it is the size for all processes together.

    >>> derive(64, 16, 2), derive(64, 12, 2), derive(64, 100, 2)
    ((16, 2), (8, 4), (32, 1))
    """
    if isinstance(effective, bool) or not isinstance(effective, int) or effective < 1:
        raise ConfigError(f"effective_batch_size={effective!r}: it is a whole number of samples from 1; write e.g. 64")
    if split and batch_size is not None:
        batch_size = max(1, batch_size // world_size)
    if batch_size is None:
        raise ConfigError(
            f"effective_batch_size={effective} needs a loader with a batch_size, the most that fits a device; this loader has none "
            "(batch_size=None or a batch sampler of its own). Give it a batch_size, or use gradient_accumulation_steps."
        )
    if effective % world_size:
        below = effective - effective % world_size
        near = f"{below} or {below + world_size}" if below else f"{world_size}"
        raise ConfigError(
            f"effective_batch_size={effective} cannot be shared evenly by {world_size} processes. Write effective_batch_size={near}, "
            f"or start a number of processes that divides {effective}."
        )
    each = effective // world_size
    per_device = next(size for size in range(min(batch_size, each), 0, -1) if each % size == 0)
    if 2 * per_device < min(batch_size, each):
        fitting = batch_size * world_size
        better = max(1, round(effective / fitting)) * fitting
        get_logger(__name__).warning(
            f"effective_batch_size={effective} on {world_size} processes is {each} samples for each, whose largest divisor up to "
            f"batch_size={batch_size} is {per_device}: an update takes {each // per_device} small batches. "
            f"effective_batch_size={better} keeps batches of {batch_size}."
        )
    return per_device, each // per_device


def full_updates(order: Order | Iterator[Any], samples: int, begun: int = 0) -> Order | Iterator[Any]:
    """An order without what is left over after the last full update of so many samples, of which `begun` came before an iterator.

    >>> list(full_updates(iter(range(8)), 3))
    [0, 1, 2, 3, 4, 5]
    """
    return _drawn(order, samples, begun) if isinstance(order, Iterator) else _Front(order, len(order) - len(order) % samples)


def _drawn(order: Iterator[Any], samples: int, begun: int) -> Iterator[Any]:
    update: list[Any] = []
    for position in order:
        update.append(position)
        if len(update) + begun == samples:
            yield from update
            update.clear()
            begun = 0


class _Front:
    """The first positions of an order."""

    def __init__(self, order: Order, length: int) -> None:
        self.order = order
        self.length = length

    def __len__(self) -> int:
        return self.length

    def take(self, start: int, stop: int) -> list[Any]:
        return self.order.take(start, min(stop, self.length))
