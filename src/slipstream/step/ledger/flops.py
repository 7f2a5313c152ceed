"""Floating-point operations: counted in one step by torch's counter, and what the device could do, measured by a product of matrices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Counting", "measured_peak"]

_SIZE = 768
_REPEATS = 5
_LIMIT = 0.2
"""Seconds after which no further product is begun."""


class Counting:
    """Counts the operations of a step: of forward passes and of backward passes, each in a block of its own.

    >>> counting = Counting()
    >>> with counting.block():
    ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counting.total
    48
    """

    def __init__(self) -> None:
        self.total = 0
        self._inside = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """What runs in the block counts; a block inside of another adds nothing."""
        from torch.utils.flop_counter import FlopCounterMode

        if self._inside:
            yield
            return
        self._inside = True
        counter = FlopCounterMode(display=False)
        try:
            with counter:
                yield
        finally:
            self._inside = False
            self.total += counter.get_total_flops()


def measured_peak(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Operations per second of a product of matrices on this device: the best of a few."""
    factor = torch.ones((_SIZE, _SIZE), device=device, dtype=dtype or torch.get_default_dtype())
    best, first = float("inf"), time.perf_counter()
    with torch.no_grad():
        for _ in range(_REPEATS):
            began = time.perf_counter()
            if began - first > _LIMIT:
                break
            product: Any = factor @ factor
            product[0, 0].item()  # waits for the device
            best = min(best, time.perf_counter() - began)
    return 2.0 * _SIZE**3 / best
