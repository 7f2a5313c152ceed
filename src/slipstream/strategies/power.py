"""PowerSGD on whole buckets: a bucket of gradients travels as two thin matrices (Vogels et al. 2019).

torch has a hook of this kind, but its batched form fails an assertion of its own (it hands matrices to a function that takes batches of
them), so this is ours, on torch's `PowerSGDState`. A bucket is laid out as one square matrix M. With an orthonormal Q that all ranks
share, P = M Q is averaged over the ranks and made orthonormal, then Q = M^T P is averaged, and P Q^T takes the place of M. What that
loses is added to the gradients of the next pass (error feedback), and Q is kept as the next start (warm start).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["batched_power_hook"]


def batched_power_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The averaged bucket, as the product of two matrices of rank `state.matrix_approximation_rank`."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    group: Any = state.process_group or dist.group.WORLD
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(group, bucket)
    buffer, index = bucket.buffer(), bucket.index()
    side = math.isqrt(buffer.numel() - 1) + 1
    matrix = torch.zeros(side * side, dtype=torch.float32, device=buffer.device)
    matrix[: buffer.numel()] = buffer
    if state.use_error_feedback and index in state.error_dict:
        matrix += state.error_dict[index]
    matrix = matrix.view(side, side)
    right = _orthonormal(_start(state, index, side, buffer.device))
    left = _orthonormal(_averaged(matrix @ right, group))
    right = _averaged(matrix.t() @ left, group)
    product = left @ right.t()
    if state.warm_start:
        state.q_memory_dict[index] = right
    if state.use_error_feedback:
        state.error_dict[index] = (matrix - product).view(-1)
    buffer.copy_(product.view(-1)[: buffer.numel()])
    state.maybe_increase_iter(bucket)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _start(state: Any, index: int, side: int, device: torch.device) -> torch.Tensor:
    """The matrix to begin with: that of the last pass, or random numbers that are the same on every rank."""
    kept: torch.Tensor | None = state.q_memory_dict.get(index)
    if kept is not None:
        return kept
    generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    return torch.randn(side, min(side, state.matrix_approximation_rank), generator=generator).to(device)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    columns: torch.Tensor = torch.linalg.qr(matrix).Q
    return columns


def _averaged(matrix: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(matrix, group=group)
    return matrix.div_(group.size())
