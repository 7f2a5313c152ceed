"""Gather with gradient: what a loss over everyone's rows sends back to the rows of this rank.

Forward joins the rows of all ranks. Backward adds up the gradients that all ranks have for the joined rows, and each rank keeps the
part of its own. So if every rank computes a loss from the gathered rows, the gradient is that of the sum of these losses.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream.comm import tree
from slipstream.comm.channel import Channel, Limits
from slipstream.comm.gather import gather
from slipstream.comm.guarded import refuse
from slipstream.comm.ops import reduce

__all__ = ["gather_with_gradient"]


def gather_with_gradient(channel: Channel, limits: Limits, data: Any) -> Any:
    """Nested tensors of all ranks joined along the first dimension; gradients flow back to every rank's own rows."""
    leaves = tree.flatten(data)
    other = next((leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)), None)
    if other is not None:
        cause = TypeError(f"gather with gradient takes nested tensors, but there is a {type(other).__name__} in the data")
        raise refuse(channel, limits, "gather with gradient", cause)
    return tree.unflatten(data, _Gather.apply(channel, limits, *leaves))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channel: Channel, limits: Limits, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.tensor([[leaf.shape[0] if leaf.dim() else 1 for leaf in leaves]])
        wanted = "".join("1" if needed else "0" for needed in ctx.needs_input_grad[2:])
        everyone, joined = gather(
            channel, limits, (rows, list(leaves)), operation="gather with gradient", condition=f" with requires_grad {wanted}"
        )
        ctx.channel, ctx.limits = channel, limits
        ctx.shapes = [leaf.shape for leaf in leaves]
        ctx.starts = everyone[: channel.rank].sum(dim=0).tolist()
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        totals = reduce(ctx.channel, ctx.limits, list(gradients), "sum", operation="gather backward")
        own = [
            total[start : start + (shape[0] if shape else 1)].reshape(shape).clone()  # it may become a gradient that is kept
            for total, start, shape in zip(totals, ctx.starts, ctx.shapes, strict=True)
        ]
        return None, None, *own
