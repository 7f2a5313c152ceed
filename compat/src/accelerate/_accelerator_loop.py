"""Methods of `Accelerator` that a training loop calls: accumulation, backward, collectives, the flag that stops a loop.

They are Slipstream's, with what scripts written for Accelerate rely on besides: a model that was not prepared can be accumulated (its
gradients are then not averaged over processes), `step` counts batches, and with one process a collective returns what it is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from slipstream.distributed import collectives
from slipstream.training.accumulation import Accumulation

__all__ = ["EqualBatches", "LoopMixin"]


class EqualBatches(Accumulation):
    """Accumulation by the rule of Accelerate: every loss is divided by the configured number of batches, also in a shorter last window.

    >>> accumulation = EqualBatches()
    >>> accumulation.begin(3, None), accumulation.add_mean(), accumulation.begin(3, None), accumulation.add_mean()
    (False, 3, False, 3)
    """

    __slots__ = ()

    def begin(self, steps: int, batch: Any, follows_loader: bool = True) -> bool:
        """Begin the next batch, and return whether it closes the window."""
        closing = super().begin(steps, batch, follows_loader)
        self.expected = max(1, steps)
        self.is_whole_window = steps <= 1
        return closing

    def add_mean(self, count: float = 1.0, reached: bool = True) -> float:
        """Count a backward pass, and return the divisor of its loss."""
        super().add_mean(count, reached)
        return self.expected


class LoopMixin:
    """The loop side of `accelerate.Accelerator`. Its methods come before those of `slipstream.Accelerator`."""

    step: int
    _window: int = 0
    """Batches per update of the running block of models that were not prepared; 0 outside of one."""

    # -- accumulation -----------------------------------------------------------------------------------------------

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """A block for one batch of an accumulation window: gradients are reduced and optimizers step where the window closes."""
        stepper, state = self._components.stepper, self._components.gradient_state
        ends = state.plugin.sync_with_dataloader and state.end_of_dataloader
        self.step = 0 if ends else self.step + 1
        if models and models not in stepper.blocks and any(stepper.find(model) is None for model in models if _is_model(model)):
            return self._accumulate_plain(models, ends)
        return super().accumulate(*models)

    @contextmanager
    def _accumulate_plain(self, models: tuple[Any, ...], ends: bool) -> Iterator[None]:
        """The block for models of which one was not prepared: counted for all of them by `step`, as Accelerate does."""
        state = self._components.gradient_state
        if self.num_processes > 1:
            names = ", ".join(type(model).__name__ for model in models if self._components.stepper.find(model) is None)
            warnings.warn(
                f"accumulate({names}): it was not prepared by this Accelerator, so its gradients are not averaged over the processes",
                stacklevel=4,
            )
        state._set_sync_gradients(ends or self.step % state.num_steps == 0)
        self._window = state.num_steps
        try:
            yield
        finally:
            self._window = 0

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss; `weight=` (of Slipstream) says that it is a sum over that many samples or tokens.

        Outside of `accumulate` the loss is divided by `gradient_accumulation_steps`, for scripts that step after so many batches.
        """
        stepper = self._components.stepper
        if not stepper.models:
            stepper._losses_to_check = 0  # a model that the script wrapped itself, as the Trainer allows
        if self._window > 1:
            (loss / self._window).backward(**kwargs)
            return
        if stepper.block is None and kwargs.get("weight") is None and self.gradient_accumulation_steps > 1:
            stepper.warned.add("outside")  # Slipstream would not divide, and say so
            loss = loss / self.gradient_accumulation_steps
        super().backward(loss, **kwargs)

    # -- collectives --------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return the data of all processes, tensors joined along the first dimension."""
        if self.state._runtime.process.world_size == 1:
            return tensor
        return _verified("gather", tensor, lambda data: collectives.gather(self.state.channel(), self.state.limits, data))

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather in dataset order, without the samples that only padded a batch; see `slipstream.Accelerator`."""
        if self.state._runtime.process.world_size == 1 and (use_gather_object or not _holds_tensors(input_data)):
            return input_data
        return super().gather_for_metrics(input_data, use_gather_object)  # also on one process: Trainer repeats the loss of a short batch

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors, arrays or numbers over the processes (sum, mean, max or min), and multiply by `scale`."""
        combine = super().reduce
        return _verified("reduce", tensor, lambda data: combine(data, reduction, scale))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors along `dim` to the largest size over the processes."""
        from accelerate.utils.operations import pad_across_processes

        return pad_across_processes(tensor, dim, pad_index, pad_first)

    # -- the flag -----------------------------------------------------------------------------------------------------

    flag_tensor: torch.Tensor | None = None
    """1 where this process has raised its flag, 0 after it was seen; scripts read it."""

    def set_trigger(self) -> None:
        """Raise a flag on this process; `check_trigger` sees it on all."""
        super().set_trigger()
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Whether any process has raised its flag since the last check; all processes call it, and it lowers the flags."""
        raised: bool = super().check_trigger()
        if raised or self.flag_tensor is None:
            self.flag_tensor = torch.tensor(0, device=self.device)
        return raised


def _holds_tensors(value: Any) -> bool:
    """Return whether a structure has tensors and nothing else."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_holds_tensors(item) for item in value)
    return isinstance(value, torch.Tensor)


def _is_model(value: Any) -> bool:
    return isinstance(value, torch.nn.Module)


def _verified(name: str, tensor: Any, collective: Any) -> Any:
    """Call a collective; in debug mode after comparing the shapes of all processes, as `accelerate.utils` does."""
    from accelerate.state import PartialState

    if not PartialState().debug:
        return collective(tensor)
    from accelerate.utils.operations import verify_operation

    def call(tensor: Any) -> Any:
        return collective(tensor)

    call.__module__, call.__name__ = "accelerate.Accelerator", name
    return verify_operation(call)(tensor)
