"""Which blocks stay in memory and which pass through it: decided once, from sizes and the limit alone.

A model runs its blocks in the same order again and again. Under such an order, keeping what was used last is the worst choice (it is
needed again after everything else); the best one keeps some blocks for good and lets the others pass through a small window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.devices.memory import convert_bytes
from slipstream.errors import ConfigError

__all__ = ["AHEAD", "Residency", "decide"]

AHEAD = 2
"""Blocks that are asked for ahead: one that is being read, and one behind it that keeps the disk busy."""


@dataclass(frozen=True)
class Residency:
    """What `decide` found."""

    kept: frozenset[int]
    """The numbers of the blocks that stay."""
    ahead: int
    """How many blocks are asked for ahead of the one that runs."""


def decide(sizes: Sequence[int], limit: int | None, names: Sequence[str] = ()) -> Residency:
    """The blocks that stay within `limit` bytes (None: no limit), beside the window for those that do not.

    >>> decide([10, 10, 10, 10, 10, 10], limit=45)
    Residency(kept=frozenset({0}), ahead=2)
    >>> decide([10, 10], limit=100).kept == {0, 1}
    True
    >>> decide([10, 30], limit=20, names=["embed", "head"])
    Traceback (most recent call last):
    slipstream.errors.ConfigError: head needs 30 bytes in memory to run, and the limit for weights that are offloaded is 20 bytes. ...
    """
    if limit is None or sum(sizes) <= limit:
        return Residency(frozenset(range(len(sizes))), AHEAD)
    largest = max(sizes)
    if largest > limit:
        number = sizes.index(largest)
        raise ConfigError(
            f"{names[number] if names else f'block {number}'} needs {convert_bytes(largest)} in memory to run, and the limit for weights "
            f"that are offloaded is {convert_bytes(limit)}. Give a limit of at least {convert_bytes(largest)} (three times that, to read "
            "ahead), or offload smaller modules."
        )
    ahead = min(AHEAD, limit // largest - 1)
    left = limit - (1 + ahead) * largest
    kept = []
    for number, size in enumerate(sizes):
        if size <= left:
            kept.append(number)
            left -= size
    return Residency(frozenset(kept), ahead)
