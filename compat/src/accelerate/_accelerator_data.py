"""Methods of `Accelerator` about data: loaders, their batches, uneven inputs, metrics."""

from __future__ import annotations

__all__ = ["DataMixin"]


class DataMixin:
    """The data side of `accelerate.Accelerator`. Its methods come before those of `slipstream.Accelerator`."""
