"""Activation checkpointing: blocks keep their inputs alone, and run again in the backward pass.

The forward of each block is replaced on the instance; names of parameters and classes stay. It is applied before `torch.compile` and
sharding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from slipstream.devices.table import CPU
from slipstream.logging import get_logger

__all__ = ["checkpoint_activations"]


def checkpoint_activations(blocks: Sequence[tuple[str, torch.nn.Module]], *, offload: bool = False, device: torch.device) -> None:
    """Let these modules compute their activations again in the backward pass; `offload` keeps their inputs in host memory.

    >>> block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    >>> checkpoint_activations([("block", block)], device=torch.device("cpu"))
    >>> block(torch.ones(1, 2)).sum().backward()
    >>> block[0].weight.grad.shape
    torch.Size([2, 2])
    """
    if offload and device.type == CPU.type:
        get_logger(__name__).warning_once(
            "activation_checkpointing_offload has no effect on the CPU: activations are in host memory already. Leave it out there."
        )
        offload = False
    for _, module in blocks:
        _turn_cache_off(module)
        if not isinstance(vars(module).get("forward"), _CheckpointedForward):
            module.forward = _CheckpointedForward(module, vars(module).get("forward"), device.type if offload else None)


def _turn_cache_off(block: torch.nn.Module) -> None:
    """Let a model of transformers keep no keys and values of earlier tokens: a block that runs twice would add its own twice."""
    for module in block.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
            get_logger(__name__).warning_once(
                "activation_checkpointing: config.use_cache=True became False, because a block that runs again in the backward pass would "
                "add its keys and values to the cache twice. `generate` still uses its cache."
            )


class _CheckpointedForward:
    """The forward of one module. It holds the module weakly: the module holds it, and a cycle would keep the weights."""

    def __init__(self, module: torch.nn.Module, before: Callable[..., Any] | None, offloaded: str | None) -> None:
        self._module = weakref.ref(module)
        self._before = before
        self._offloaded = offloaded  # the type of the device whose activations go to pinned host memory
        self.__doc__ = (before or type(module).forward).__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=self._offloaded) if self._offloaded else nullcontext():
            return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module = self._module()
        assert module is not None, "its forward runs, so it is there"
        return self._before or partial(type(module).forward, module)
