"""What a strategy is: a few methods, and the null object that implements them for one process.

    check          raise for a model that this strategy cannot run, before anything is changed
    prepare        wrap a model, or return it
    realise        return the device type that autocast and the loss scaler work on
    no_sync        a block in which backward does not reduce gradients; set_sync and defer: the same, decided batch by batch
    backward       compute the gradients of a loss and reduce them
    step           check a model before its optimizer steps
    watch_buckets  show this rank's gradients to an observer before they are reduced
    clip           clip gradients to a norm and return the global norm
    unwrap         return the user's model inside what `prepare` returned
    state          return the weights under the names of the user's model; sharded ones as DTensor

A strategy overrides what it does differently, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slipstream.devices.table import CPU
from slipstream.errors import ConfigError

__all__ = ["Strategy"]


class Strategy:
    """One process runs the step by itself: every verb as plain PyTorch does it."""

    name = "single"
    averages = False
    """Whether gradients are averaged between processes: if not, a step need not ask this strategy for anything."""

    replicated = True
    """Whether every rank holds the whole state. If not, `state` gives sharded tensors, and a checkpoint is saved by all ranks together."""

    def check(self, model: torch.nn.Module, device: torch.device) -> None:
        """Refuses models whose parameters are nowhere, or not where this process computes."""
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            raise ConfigError(
                f"prepare was given a {type(model).__name__} that was made by hand around a {type(model.module).__name__}: gradients would "
                "be averaged twice. Give it the module itself; options go into DistributedDataParallelKwargs."
            )
        for name, parameter in model.named_parameters():
            if parameter.device.type == "meta":
                raise ConfigError(
                    f"parameter {name} of {type(model).__name__} has no memory yet (it is on the meta device): "
                    "load or initialise the weights before prepare"
                )
            if parameter.device != device and parameter.device.type != device.type:
                raise ConfigError(
                    f"parameter {name} of {type(model).__name__} is on {parameter.device}, but this process computes on {device}: "
                    "leave device_placement on, or move the model there before prepare"
                )

    def prepare(self, model: torch.nn.Module, before: torch.nn.Module | None = None) -> torch.nn.Module:
        """`before` is what it gave back for this model the last time: given back again if it is still right."""
        return model

    def realise(self, device: torch.device) -> str:
        """Which kind of device autocast and the loss scale work on."""
        return device.type or CPU.type

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def set_sync(self, model: torch.nn.Module, reduces: bool) -> None:
        """Sets whether a backward pass reduces the gradients of a model; a block of `no_sync` around it has the last word."""

    def defer(self, model: torch.nn.Module, defers: bool) -> None:
        """Sets whether a forward pass of a model leaves it to `backward` to decide about that: it runs in a block of other models."""

    def backward(self, loss: torch.Tensor, reducing: Sequence[torch.nn.Module] | None, **kwargs: Any) -> None:
        """The gradients of a loss, reduced for these models; None means all that it reaches."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def step(self, model: torch.nn.Module) -> None:
        return None

    def watch_buckets(self, look: Callable[[Any], None], *, leaves_out: bool) -> None:
        """Shows this rank's own gradients to somebody before they are averaged; `leaves_out`: updates may be left out because of them."""

    def clip(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def state(self, model: torch.nn.Module) -> dict[str, Any]:
        return self.unwrap(model).state_dict()
