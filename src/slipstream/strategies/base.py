"""What a strategy is: the methods below, and the null object that implements them for one process.

    check, move, prepare, unwrap       raise for a model that cannot run; move it to the device; wrap it; return the user's model
    expect, map_optimizer              optimizers that come with the models; let one work on parameters that `prepare` has replaced
    mesh, mesh_axes                    torch's mesh of the ranks; its axes and their sizes
    device_type                        the device type that autocast and the loss scaler work on
    set_sync, defer                    whether the coming backward passes reduce gradients
    no_sync, trigger_sync, join        the same as blocks: none; the next one; as long as any rank has batches
    backward, watch_buckets            compute and reduce the gradients of a loss; show them to an observer before they are reduced
    gradients, aliases                 the gradients of a model; parameters by what stands for them in a pass
    reduce_waiting, discard_waiting    reduce, or clear, gradients that were added up on each rank
    step, clip, clip_value             check a model before its optimizer steps; clip gradients to a norm, or their entries
    state, full_state                  the weights under the names of the user's model; sharded ones as DTensor, or put together

A strategy overrides what it does differently, and no more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slipstream.devices.table import CPU
from slipstream.errors import ConfigError

__all__ = ["Strategy", "check_not_sharded"]


class Strategy:
    """One process runs the step by itself: every method as plain PyTorch does it."""

    name = "single"
    averages = False
    """Whether gradients are averaged between processes: if not, a step need not ask this strategy for anything."""

    replicated = True
    """Whether every rank holds the whole state. If not, `state` gives sharded tensors, and a checkpoint is saved by all ranks together."""

    @property
    def saves_whole_weights(self) -> bool:
        """Whether `save_state` writes the weights of sharded models as whole files (`state_dict_type="FULL_STATE_DICT"`)."""
        return False

    @property
    def mesh(self) -> Any:
        """torch's mesh of the ranks, where models are sharded; else None."""
        return None

    def mesh_axes(self, world_size: int) -> dict[str, int]:
        """Return the axes of the mesh that have more than one rank, with their sizes; checkpoints keep them."""
        return {"dp_replicate" if self.replicated else "dp_shard": world_size}

    def check(self, model: torch.nn.Module, device: torch.device) -> None:
        """Raise for models whose parameters have no memory, or are not on the device of this process."""
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            raise ConfigError(
                f"prepare was given a {type(model).__name__} that was made by hand around a {type(model.module).__name__}: gradients would "
                "be averaged twice. Give it the module itself; options go into DistributedDataParallelKwargs."
            )
        if self.replicated:
            check_not_sharded(model)
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

    def move(self, model: torch.nn.Module, device: torch.device) -> None:
        """Move a model to the device of this process, before it is prepared."""
        model.to(device)

    def prepare(self, model: torch.nn.Module, before: torch.nn.Module | None = None) -> torch.nn.Module:
        """Wrap a model; `before` is what was returned for it the last time, and is returned again if it is still right."""
        return model

    def expect(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take note of the optimizers that are prepared together with the coming models, to say what they will need; [] forgets them."""

    def map_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let an optimizer work on the parameters that `prepare` put in the place of its own; return whether any changed."""
        return False

    def device_type(self, device: torch.device) -> str:
        """Return the type of device that autocast and the loss scaler work on."""
        return device.type or CPU.type

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a block in which backward does not reduce the gradients of a model."""
        return nullcontext()

    def trigger_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a block whose backward reduces gradients, although the passes before it ran without."""
        return nullcontext()

    def join(self, models: list[torch.nn.Module]) -> AbstractContextManager[Any]:
        """Return a block in which ranks may run out of batches at different times: those that are done shadow the others."""
        return nullcontext()

    def set_sync(self, model: torch.nn.Module, reduces: bool) -> None:
        """Set whether a backward pass reduces the gradients of a model; a block of `no_sync` around it overrides that."""

    def defer(self, model: torch.nn.Module, defers: bool) -> None:
        """Set whether a forward pass of a model leaves that decision to `backward`: it runs in a block of other models."""

    def backward(
        self, loss: torch.Tensor, reducing: Sequence[torch.nn.Module] | None, run: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        """Compute the gradients of a loss, reduced for these models; None means all that it reaches.

        `run` takes the place of `loss.backward`: it computes the gradients of the loss, its own way.
        """
        (run or loss.backward)(**kwargs)  # type: ignore[no-untyped-call]

    def gradients(self, model: torch.nn.Module) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return the gradients of a model that are there now, each with its parameter."""
        return ((parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None)

    def current_parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that optimizers work on, for some that `prepare` may have replaced."""
        return parameters

    def aliases(self) -> dict[int, torch.Tensor]:
        """Return parameters by the identities of tensors that stand for them in the graph of a loss."""
        return {}

    def discard_waiting(self, parameters: list[torch.Tensor]) -> None:
        """Clear gradients of these parameters that wait for their reduction; `zero_grad` has cleared the others."""

    def reduce_waiting(self, model: torch.nn.Module) -> None:
        """Reduce gradients that were added up without communication, in the middle of a window; all ranks have to call it."""

    def step(self, model: torch.nn.Module) -> None:
        """Raise if gradients of a model were not reduced, before its optimizer steps."""

    def watch_buckets(self, look: Callable[[Any], None], *, leaves_out: bool) -> None:
        """Show this rank's own gradients to `look` before they are averaged; `leaves_out`: updates may be skipped because of them."""

    def clip(self, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip gradients together to a norm, and return the norm that they had on all ranks."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_value(self, parameters: list[torch.Tensor], clip_value: float) -> None:
        """Clip each entry of the gradients to at most `clip_value`."""
        if any(parameter.grad is not None for parameter in parameters):  # torch fails without any
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's model inside what `prepare` returned."""
        return model

    def state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the weights under the names of the user's model."""
        return self.unwrap(model).state_dict()

    def full_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole weights under the names of the user's model; where they are sharded, all ranks have to call it."""
        return self.state(model)


def check_not_sharded(model: torch.nn.Module, instead: str = "pass Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())") -> None:
    """Raise for a model whose parameters a script has sharded or split itself: no other strategy can average its gradients."""
    package = sys.modules.get("torch.distributed.tensor")
    if package is None:
        return
    for name, parameter in model.named_parameters():
        if isinstance(parameter, package.DTensor):
            sharded = any("FSDP" in kind.__name__ for module in model.modules() for kind in type(module).__mro__)
            remedy = f"sharded (fully_shard): {instead}" if sharded else (
                "split between processes (tensor parallelism), which this version does not run: load the model without it"
            )
            raise ConfigError(f"parameter {name} of {type(model).__name__} is {remedy}")
