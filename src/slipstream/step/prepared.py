"""A model as stepping knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from slipstream.step.window import Window

__all__ = ["PreparedModel"]


@dataclass(eq=False)
class PreparedModel:
    """A model as the user gave it, as `prepare` gave it back, and its window."""

    original: torch.nn.Module
    prepared: torch.nn.Module
    window: Window = field(default_factory=Window)
    owned: frozenset[int] = frozenset()
    """Identities of the parameters, for finding the model of an optimizer."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that are there now."""
        return [parameter.grad for parameter in self.original.parameters() if parameter.grad is not None]

    def rescale(self, factor: float) -> None:
        """Multiplies the gradients that are there."""
        gradients = self.gradients()
        dense = [one for one in gradients if one.layout == torch.strided]
        if dense:
            torch._foreach_mul_(dense, factor)
        for one in gradients:
            if one.layout != torch.strided:
                one.mul_(factor)
