"""Which prepared models a loss reaches: a walk over its autograd graph, down to the parameters.

Asked where several models are trained by one Accelerator and it matters: a loss then counts for, and is reduced for, the models that it
gives gradients to, and for no others. A walk takes about a microsecond for each node, and ends as soon as every model was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["reached_owners"]

_HIDDEN = "CheckpointFunctionBackward"
"""Reentrant activation checkpointing: what the block computes is not in the graph before the backward pass."""


def reached_owners(loss: torch.Tensor, owners: Mapping[int, Any]) -> list[Any] | None:
    """The owners (by identity of parameters) that a loss gives gradients to, in no order; None if the graph hides them.

    >>> weight, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> reached_owners((weight * 2).sum(), {id(weight): "first", id(other): "second"})
    ['first']
    """
    if loss.grad_fn is None:
        return [owners[id(loss)]] if id(loss) in owners else []
    wanted = len({id(owner) for owner in owners.values()})
    found: dict[int, Any] = {}
    seen: set[Any] = {loss.grad_fn}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        following = node.next_functions
        if not following:
            variable = getattr(node, "variable", None)
            owner = None if variable is None else owners.get(id(variable))
            if owner is not None and id(owner) not in found:
                found[id(owner)] = owner
                if len(found) == wanted:
                    break
            continue
        if node.name() == _HIDDEN:
            return None
        for child, _ in following:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return list(found.values())
