"""A model as stepping knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from slipstream.step.accumulation import Accumulation

__all__ = ["PreparedModel"]


@dataclass(eq=False)
class PreparedModel:
    """A model as the user gave it, as `prepare` gave it back, and where its accumulation stands."""

    original: torch.nn.Module
    prepared: torch.nn.Module
    accumulation: Accumulation = field(default_factory=Accumulation)
    owned: frozenset[int] = frozenset()
    """Identities of the parameters."""
    shared: frozenset[int] = frozenset()
    """Of these, the ones that belong to a model prepared before: their gradients are corrected with that one."""

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that are there now, without those of shared parameters."""
        return [
            parameter.grad
            for parameter in self.original.parameters()
            if parameter.grad is not None and id(parameter) not in self.shared
        ]

    def rescale(self, factor: float) -> None:
        """Multiplies the gradients that are there."""
        gradients = self.gradients()
        dense = [gradient for gradient in gradients if gradient.layout == torch.strided]
        if dense:
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.layout != torch.strided:
                gradient.mul_(factor)
