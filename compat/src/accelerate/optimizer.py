"""`AcceleratedOptimizer`: an optimizer that steps and clears gradients only where an update ends.

A prepared one follows its models, as in Slipstream. One that a script makes itself, `AcceleratedOptimizer(optimizer)`, or that was
unpickled, follows `GradientState`. Where Slipstream refuses (parameters of models that were not prepared, a window without
`accelerator.backward`), Accelerate goes on, and so does this class; on several processes it warns, because such gradients are not
averaged.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from accelerate._forwarding import forward_names
from slipstream.training.optimizer import AcceleratedOptimizer as _AcceleratedOptimizer, OptimizerLink, move_to_device
from slipstream.training.stepper import Stepper

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState GradientState",
        "accelerate.utils.dataclasses": "DistributedType",
        "accelerate.utils.imports": "is_lomo_available is_torch_xla_available",
        "accelerate.utils.operations": "honor_type",
    },
)
__all__ = ["AcceleratedOptimizer", "move_to_device", "patch_optimizer_step", *_forwarded]


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Any) -> Any:
    """Return the `step` of an optimizer, which also records on the prepared one that it ran: a loss scaler may leave it out."""

    def step(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True
        return method(*args, **kwargs)

    return step


class AcceleratedOptimizer(_AcceleratedOptimizer):
    """An optimizer as `prepare` returns it, or around one that a script wraps itself.

    >>> from accelerate import Accelerator
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: Any = None,
        *,
        stepper: Stepper | None = None,
        check: Any = None,
    ) -> None:
        from accelerate._gradient_state import GradientState

        self.gradient_state = GradientState()
        self.device_placement = device_placement
        self._accelerate_step_called = False
        self._own_scaler = scaler
        """The scaler of one that a script made; a prepared one has that of its Accelerator."""
        super().__init__(optimizer, stepper or _follow_gradient_state(self.gradient_state), check)
        self._is_alone = stepper is None
        if self._is_alone:
            self.scaler = scaler
            if device_placement:
                self._place_state()

    def _place_state(self) -> None:
        """Move the state of the optimizer to the devices of its parameters, as Accelerate does where it is asked to place it.

        Step counts stay where torch keeps them: on a device, each would be waited for in every step.
        """
        from accelerate.state import PartialState

        if self.optimizer.state and PartialState._shared_state and PartialState().device.type != "cpu":
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    @property
    def _is_overflow(self) -> bool:
        """See `step_was_skipped`. Tests of schedulers assign it."""
        return self.step_was_skipped

    @_is_overflow.setter
    def _is_overflow(self, value: bool) -> None:
        self.step_was_skipped = value

    def step(self, closure: Any = None) -> Any:
        """Update the parameters if an update ends with this batch; otherwise do nothing."""
        if self._is_alone:
            return self._step_alone(closure)
        for accumulation in self.linked.accumulations:
            accumulation.backward_done = True  # Accelerate steps whether or not the script used `accelerator.backward`
        if not self.linked.accumulations and not self.gradient_state.sync_gradients:
            return None
        return super().step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, unless the next update needs them."""
        if not (self._is_alone or not self.linked.accumulations):
            super().zero_grad(set_to_none)
        elif self.gradient_state.sync_gradients:
            self.optimizer.zero_grad() if set_to_none is None else self.optimizer.zero_grad(set_to_none)

    def _step_alone(self, closure: Any) -> Any:
        if not self.gradient_state.sync_gradients:
            return None
        scaler = self._own_scaler
        if scaler is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        original, self._accelerate_step_called = self.optimizer.step, False
        self.optimizer.step = patch_optimizer_step(self, original)  # type: ignore[method-assign]
        try:
            result = scaler.step(self.optimizer) if closure is None else scaler.step(self.optimizer, closure)
            scaler.update()
        finally:
            self.optimizer.step = original  # type: ignore[method-assign]
        self.step_was_skipped = not self._accelerate_step_called
        return result

    def unscale(self) -> None:
        """Divide gradients by the loss scale, if there is one, once per update."""
        if not self._is_alone:
            super().unscale()
        elif self._own_scaler is not None and self.gradient_state.sync_gradients:
            self._own_scaler.unscale_(self.optimizer)

    def _link(self) -> OptimizerLink:
        """Find the models that own its parameters; warn where some have none, if that makes a difference."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        models, unowned = self.stepper.owners(parameters)
        if unowned and self.stepper.world_size > 1:
            warnings.warn(
                f"{type(self.optimizer).__name__} has {len(unowned)} of {len(parameters)} parameters that belong to no model prepared by "
                "this Accelerator: their gradients are not averaged over the processes. Prepare their model too.",
                stacklevel=4,
            )
        self._linked = OptimizerLink(self, tuple(models))
        return self._linked

    @property
    def closing(self) -> bool:
        """Whether an update ends with the current batch."""
        if self._is_alone or not self.linked.accumulations:
            return self.gradient_state.sync_gradients
        return self.linked.closing

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Unpickle as an optimizer that follows `GradientState`: the Accelerator and its models are not part of the pickle."""
        return AcceleratedOptimizer, (self.optimizer, self.device_placement, self._own_scaler)


def _follow_gradient_state(state: Any) -> Stepper:
    """Return a stepper without models, for an optimizer that no Accelerator prepared."""
    from slipstream.precision.scaler import NoScaler
    from slipstream.strategies.base import Strategy

    return Stepper(state, Strategy(), NoScaler())
