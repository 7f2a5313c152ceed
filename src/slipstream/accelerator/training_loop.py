"""The methods of `Accelerator` that a training loop calls: accumulation, backward, clipping, autocast, `gather_for_metrics`.

Each method delegates to the component that implements it and holds no state.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slipstream.accelerator.components import AcceleratorBase
from slipstream.config.handlers import check_count
from slipstream.distributed.gradient_state import GradientState
from slipstream.precision.policy import AutocastKwargs, PrecisionPolicy
from slipstream.training.stepper import AccumulateBlock

__all__ = ["TrainingLoopMixin"]


class TrainingLoopMixin(AcceleratorBase):
    """Accumulation, backward, clipping, precision, and metrics."""

    # -- accumulation and backward (training/stepper.py) --------------------------------------------------------------

    def accumulate(self, *models: torch.nn.Module) -> AccumulateBlock:
        """A block for one batch of an accumulation window: gradients are reduced and optimizers step where the window closes.

        >>> from slipstream import Accelerator
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
        >>> for _ in range(2):
        ...     with accelerator.accumulate(model):
        ...         print(accelerator.sync_gradients)
        False
        True
        """
        stepper = self._components.stepper
        if models and isinstance(models[0], list | tuple):
            raise TypeError("accumulate takes models themselves: write accumulate(*models)")
        return stepper.blocks.get(models) or stepper.accumulate(models)

    def backward(self, loss: torch.Tensor, *, weight: Any = None, **kwargs: Any) -> None:
        """Compute the gradients of a loss: a mean over the batch, or with `weight` a sum over that many samples or tokens.

        The update then has the gradient of one global batch over all processes and all batches of its window.
        """
        self._components.stepper.backward(loss, weight, kwargs)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """A block in which backward does not reduce gradients between processes."""
        _check_model("no_sync", model)
        return self._components.strategy.no_sync(model)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """A block whose backward reduces gradients even if the passes before it ran in `no_sync`."""
        _check_model("trigger_sync_in_backward", model)
        return self._components.strategy.trigger_sync(model)

    @property
    def gradient_state(self) -> GradientState:
        """The state of the loop; see `distributed/gradient_state.py`."""
        return self._components.gradient_state

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends an update."""
        return self._components.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._components.stepper.set_closing(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per update; with `effective_batch_size`, those of the loader that is being read, or of the first that was prepared."""
        loader = self._components.gradient_state.active
        if loader is None:  # `or` would ask a loader for its length, which streams do not have
            loader = next(iter(self._components.registry.loaders), None)
        return (None if loader is None else loader.steps_per_update) or self._components.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        check_count(value, f"gradient_accumulation_steps={value!r}: write a whole number of batches, from 1")
        self._components.gradient_state.plugin.num_steps = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._components.registry.optimizers)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """A block in which sequences are cut over the ranks of a context-parallel mesh; there is none here, so it does nothing."""
        return nullcontext()

    # -- clipping (training/clip.py) ----------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip gradients to a norm, once per update, and return the norm that they had over all processes."""
        return self._components.clipper.norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients, once per update."""
        self._components.clipper.value(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the fp16 loss scale, once per update, for these optimizers or for all."""
        self._components.clipper.unscale(optimizer)

    # -- precision (precision/) -----------------------------------------------------------------------------------

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A block that computes in the precision of this Accelerator, for code outside of prepared models, such as a loss."""
        return self._components.precision.context(autocast_handler)

    @property
    def precision(self) -> PrecisionPolicy:
        """The precision policy: the dtypes of computation, reduction and outputs."""
        return self._components.precision.policy

    @property
    def scaler(self) -> Any:
        """The loss scale of fp16, or None."""
        scaler = self._components.precision.scaler
        return scaler if scaler.scales else None

    # -- metrics (data/metrics.py) --------------------------------------------------------------------------------

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather in dataset order, without the samples that only padded a batch.

        A list that holds tensors and has one entry per sample is joined as a list (`data/metrics.py`).
        """
        from slipstream.data.metrics import gather_for_metrics

        return gather_for_metrics(self._components.state, self._components.gradient_state, input_data, use_gather_object)


def _check_model(where: str, model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{where} got a {type(model).__name__}: pass a model that prepare gave back")
