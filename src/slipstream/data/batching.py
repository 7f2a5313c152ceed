"""`effective_batch_size`: the batch of the textbook, as batches per device and batches per update. Pure."""

from __future__ import annotations

from slipstream.errors import ConfigError

__all__ = ["derive"]


def derive(effective: int, batch_size: int | None, world_size: int) -> tuple[int, int]:
    """(samples per device and batch, batches per update), whose product over all processes is the effective batch size.

    `batch_size` is the most that fits a device; the largest size up to it that comes out even is taken.

    >>> derive(64, 16, 2), derive(64, 12, 2), derive(64, 100, 2)
    ((16, 2), (8, 4), (32, 1))
    """
    if isinstance(effective, bool) or not isinstance(effective, int) or effective < 1:
        raise ConfigError(f"effective_batch_size={effective!r}: it is a whole number of samples from 1; write e.g. 64")
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
    return per_device, each // per_device
