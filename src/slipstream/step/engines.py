"""What stepping needs of others: of the loss scale of a precision, and of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Engine", "Scaler"]


class Scaler(Protocol):
    """What stepping needs of the loss scaling of a precision; see `precision/scaler.py`."""

    @property
    def scales(self) -> bool:
        """Whether losses are scaled at all."""

    @property
    def due(self) -> bool:
        """Whether the scale is to be updated before the next loss is scaled."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor: ...

    def flush(self, want_ratio: bool = False) -> float: ...

    def unscale(self, optimizer: torch.optim.Optimizer) -> None: ...

    def cleared(self, optimizer: torch.optim.Optimizer) -> None: ...

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool: ...


class Engine(Protocol):
    """What stepping needs of a strategy."""

    averages: bool

    def set_sync(self, model: torch.nn.Module, reduces: bool) -> None:
        """Sets whether backward passes reduce the gradients of a model."""

    def defer(self, model: torch.nn.Module, defers: bool) -> None:
        """Sets whether a forward pass of a model leaves it to `backward` to decide about that: it runs in a block of other models."""

    def backward(self, loss: torch.Tensor, reducing: Sequence[torch.nn.Module] | None, **kwargs: Any) -> None:
        """Runs a backward pass that reduces the gradients of these models; None means all that it reaches."""
