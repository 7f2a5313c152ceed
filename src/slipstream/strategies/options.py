"""`DistributedDataParallelKwargs`: how replicas average their gradients; communication hooks included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from slipstream.config.handlers import KwargsHandler
from slipstream.errors import ConfigError
from slipstream.strategies.power import batched_power_hook

__all__ = ["DDPCommunicationHookType", "DistributedDataParallelKwargs"]


class DDPCommunicationHookType(str, Enum):
    """How gradients are compressed on their way between ranks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_POWER = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
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
        self.comm_hook = _hook("comm_hook", self.comm_hook)
        self.comm_wrapper = _hook("comm_wrapper", self.comm_wrapper)
        if self.dim != 0 or self.check_reduction:
            raise ConfigError(
                "DistributedDataParallelKwargs(dim=..., check_reduction=...): torch ignores both, so leave them out"
            )
        if self.comm_wrapper in _POWER:
            raise ConfigError(f"DistributedDataParallelKwargs(comm_wrapper={self.comm_wrapper.value!r}): a wrapper is fp16 or bf16")
        if self.comm_wrapper is not DDPCommunicationHookType.NO and self.comm_hook is DDPCommunicationHookType.NO:
            raise ConfigError("DistributedDataParallelKwargs(comm_wrapper=...) wraps a hook: pass comm_hook too, or only comm_hook")
        if self.comm_state_option and self.comm_hook not in _POWER:
            raise ConfigError("DistributedDataParallelKwargs(comm_state_option=...) is for comm_hook='power_sgd'; leave it out")

    def to_dict(self, ignore_keys: tuple[str, ...] = _HOOK_FIELDS) -> dict[str, Any]:
        """The options of the constructor, without those of the hook."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def to_kwargs(self) -> dict[str, Any]:
        """The options of the constructor that differ from the defaults."""
        usual = KwargsHandler.to_dict(DistributedDataParallelKwargs())
        return {name: value for name, value in self.to_dict().items() if value != usual[name]}

    def register_comm_hook(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Attaches the hook, in its wrapper, to a replicated model."""
        if self.comm_hook is DDPCommunicationHookType.NO:
            return
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: batched_power_hook,
        }
        wrappers: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
        }
        hook = hooks[self.comm_hook]
        if self.comm_wrapper is not DDPCommunicationHookType.NO:
            hook = wrappers[self.comm_wrapper](hook)
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if self.comm_hook in _POWER else None
        # torch knows the bf16 hooks by name and wants a GPU for them; the backends themselves, gloo too, add bfloat16.
        model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))


def _hook(name: str, value: Any) -> DDPCommunicationHookType:
    known = [one.value for one in DDPCommunicationHookType]
    text = str(getattr(value, "value", value)).lower()
    if text not in known:
        raise ConfigError(f"DistributedDataParallelKwargs({name}={value!r}) is not a hook: write one of {', '.join(known)}")
    return DDPCommunicationHookType(text)
