"""Options of data-parallel replicas (`DistributedDataParallelKwargs`) and the communication hooks that they choose.

The batched PowerSGD hook is ours, on torch's `PowerSGDState`, because torch's own fails one of its assertions (it passes matrices to a
function that takes batches of them). A bucket is one square matrix M; with an orthonormal Q that all ranks share, P = M Q is averaged and
made orthonormal, Q = M^T P is averaged, and P Q^T replaces M, with error feedback and warm start (Vogels et al. 2019). A `BucketObserver`
sees each bucket before it is averaged; the sums are bit for bit those that DDP computes without a hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from slipstream.config.handlers import KwargsHandler
from slipstream.errors import ConfigError

__all__ = ["BucketObserver", "DDPCommunicationHookType", "DistributedDataParallelKwargs", "batched_power_sgd_hook", "observe_bucket"]


def batched_power_sgd_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Return the averaged bucket, as the product of two matrices of rank `state.matrix_approximation_rank`."""
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
    right = torch.linalg.qr(_initial_matrix(state, index, side, buffer.device)).Q
    left = torch.linalg.qr(_average_matrix(matrix @ right, group)).Q
    right = _average_matrix(matrix.t() @ left, group)
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


def _initial_matrix(state: Any, index: int, side: int, device: torch.device) -> torch.Tensor:
    """Return the matrix to begin with: that of the last pass, or random numbers that are the same on every rank."""
    kept: torch.Tensor | None = state.q_memory_dict.get(index)
    if kept is not None:
        return kept
    generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    return torch.randn(side, min(side, state.matrix_approximation_rank), generator=generator).to(device)


def _average_matrix(matrix: torch.Tensor, group: Any) -> torch.Tensor:
    dist.all_reduce(matrix, group=group)
    return matrix.div_(group.size())


class DDPCommunicationHookType(str, Enum):
    """How gradients are compressed on their way between ranks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_POWER_SGD_HOOKS = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of torch's DistributedDataParallel, for `Accelerator(kwargs_handlers=[...])`.

    >>> DistributedDataParallelKwargs(find_unused_parameters=True).to_kwargs()
    {'find_unused_parameters': True}
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = _parse_hook("comm_hook", self.comm_hook)
        self.comm_wrapper = _parse_hook("comm_wrapper", self.comm_wrapper)
        if self.dim != 0 or self.check_reduction:
            raise ConfigError(
                "DistributedDataParallelKwargs(dim=..., check_reduction=...): torch ignores both, so leave them out"
            )
        if self.comm_wrapper in _POWER_SGD_HOOKS:
            raise ConfigError(f"DistributedDataParallelKwargs(comm_wrapper={self.comm_wrapper.value!r}): a wrapper is fp16 or bf16")
        if self.comm_wrapper is not DDPCommunicationHookType.NO and self.comm_hook is DDPCommunicationHookType.NO:
            raise ConfigError("DistributedDataParallelKwargs(comm_wrapper=...) wraps a hook: pass comm_hook too, or only comm_hook")
        if self.comm_state_option and self.comm_hook not in _POWER_SGD_HOOKS:
            raise ConfigError("DistributedDataParallelKwargs(comm_state_option=...) is for comm_hook='power_sgd'; leave it out")

    def to_dict(self, ignore_keys: tuple[str, ...] = _HOOK_FIELDS) -> dict[str, Any]:
        """Return the options of the constructor, without those of the hook."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options of the constructor that differ from the defaults."""
        usual = KwargsHandler.to_dict(DistributedDataParallelKwargs())
        return {name: value for name, value in self.to_dict().items() if value != usual[name]}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Attach the hook, in its wrapper, to a replicated model."""
        if self.comm_hook is DDPCommunicationHookType.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: batched_power_sgd_hook,
        }
        wrappers: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
        }
        hook = hooks[self.comm_hook]
        if self.comm_wrapper is not DDPCommunicationHookType.NO:
            hook = wrappers[self.comm_wrapper](hook)
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if self.comm_hook in _POWER_SGD_HOOKS else None
        # torch knows the bf16 hooks by name and wants a GPU for them; the backends themselves, gloo too, add bfloat16.
        model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))


def _parse_hook(name: str, value: Any) -> DDPCommunicationHookType:
    known = [hook.value for hook in DDPCommunicationHookType]
    text = str(getattr(value, "value", value)).lower()
    if text not in known:
        raise ConfigError(f"DistributedDataParallelKwargs({name}={value!r}) is not a hook: write one of {', '.join(known)}")
    return DDPCommunicationHookType(text)


_BucketCallback = Callable[[Any], None]
_CommunicationHook = Callable[[Any, Any], Any]


class BucketObserver:
    """Who looks at a bucket, and the hook that averages it then."""

    def __init__(self, look: _BucketCallback, group: Any) -> None:
        self.look = look
        self.state: Any = group
        self.hook: _CommunicationHook = _average_bucket
        self.is_usual = True
        """Whether nobody has given another hook yet: there can be one."""

    def put(self, state: Any, hook: _CommunicationHook) -> None:
        """Set another way to average, after the look."""
        self.state, self.hook, self.is_usual = state, hook, False


def observe_bucket(shown: BucketObserver, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Show the bucket, then run the hook that averages it."""
    shown.look(bucket)
    done: torch.futures.Future[torch.Tensor] = shown.hook(shown.state, bucket)
    return done


def _average_bucket(group: Any, bucket: Any) -> Any:
    buffer = bucket.buffer()
    buffer.mul_(1.0 / dist.get_world_size(group))
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
