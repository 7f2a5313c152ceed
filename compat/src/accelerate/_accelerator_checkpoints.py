"""Methods of `Accelerator` about checkpoints and saved models."""

from __future__ import annotations

__all__ = ["CheckpointsMixin"]


class CheckpointsMixin:
    """The checkpoint side of `accelerate.Accelerator`. Its methods come before those of `slipstream.Accelerator`."""
