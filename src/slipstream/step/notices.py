"""What a script is told about the losses that it passes to `backward`: each thing once."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from slipstream.comm.sites import call_site

__all__ = ["notice_alone", "notice_division", "number_of"]

_USER = 6
"""How many calls away the line is that called `accelerator.backward`."""


def notice_division(warned: set[str], loss: torch.Tensor, steps: float) -> None:
    """Warns of a loss that was divided by the number of batches already. Only the first loss is looked at."""
    if "division" in warned:
        return
    warned.add("division")
    if _divided_by(loss, steps):
        warnings.warn(
            f"the loss at {call_site()} was divided by {steps:g}, the number of batches per update, and backward divides by it too: "
            f"the gradient is {steps:g} times too small. Pass the loss as it is.",
            stacklevel=_USER,
        )


def notice_alone(warned: set[str], text: str) -> None:
    """Warns of a backward pass outside of `accumulate`."""
    if "alone" not in warned:
        warned.add("alone")
        warnings.warn(text, stacklevel=_USER)


def number_of(weight: Any) -> float:
    """The weight of a loss; an error where it is none."""
    number = float(weight)
    if not number >= 0.0 or number == float("inf"):
        raise ValueError(f"backward(loss, weight={weight!r}): the weight is the count of samples or tokens in the loss: a number from 0")
    return number


def _divided_by(loss: torch.Tensor, steps: float) -> bool:
    """Whether the graph of a loss ends in a division by this number, or in a product with its inverse."""
    node: Any = loss.grad_fn
    name = node.name() if node is not None else ""
    if name not in ("DivBackward0", "MulBackward0"):
        return False
    other = getattr(node, "_saved_other", None)
    if other is None or other.numel() != 1:
        return False
    expected = steps if name == "DivBackward0" else 1.0 / steps
    return abs(float(other) - expected) < 1e-6
