"""`AcceleratedOptimizer`: the user's optimizer, which steps and clears gradients only where an update ends.

It is an optimizer to everyone who asks (`isinstance`, schedulers made on it), and everything but `step` and `zero_grad` is the user's own.
Which models it belongs to is found out when it first steps, so optimizers and models can be prepared in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.comm.nested import recursively_apply
from slipstream.errors import StateError
from slipstream.step.stepper import PreparedModel, Scaler, Stepper

__all__ = ["AcceleratedOptimizer", "move_to_device"]


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """The state of an optimizer with its tensors on a device.

    >>> move_to_device({"step": 1, "moments": [torch.ones(1)]}, "cpu")
    {'step': 1, 'moments': [tensor([1.])]}
    """
    return recursively_apply(lambda tensor: tensor.to(device), state)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer as `prepare` gives it back.

    >>> from slipstream import Accelerator
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(2, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> accelerator.backward(model(torch.ones(1, 2)).sum())
    >>> optimizer.step()
    >>> optimizer.step_was_skipped
    False
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stepper: Stepper, check: Callable[[torch.nn.Module], None] | None) -> None:
        # The base class is not initialised: groups, state and hooks are those of the user's optimizer.
        self.optimizer = optimizer
        self.stepper = stepper
        self.scaler: Scaler = stepper.scaler
        self.step_was_skipped = False
        """Whether the last step was left out because gradients overflowed."""
        self._check = check
        self._models: tuple[PreparedModel, ...] = ()

    # -- where updates end ----------------------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """Whether an update ends with the present batch."""
        for model in self._models or self._link():  # noqa: SIM110  # a generator costs as much as all the rest
            if not self.stepper.window_of(model).closing:
                return False
        return True

    def step(self, closure: Any = None) -> Any:
        """Updates the parameters if an update ends with this batch; else nothing is done."""
        models = self._models or self._link()
        for model in models:
            window = self.stepper.window_of(model)
            if not window.closing:
                return None
            if window.index > 1 and not window.touched:
                raise StateError(
                    f"{type(self.optimizer).__name__}.step() ends a window of accumulation whose last batch had no "
                    "accelerator.backward(loss): its gradients are neither complete nor averaged. Call it on every batch (not "
                    "loss.backward()); for a batch that is to be left out, on the loss times 0, or clear the gradients."
                )
            if self._check is not None:
                self._check(model.prepared)
            window.touched = True
        if self.scaler.scales:
            self.step_was_skipped = not self.scaler.step(self.optimizer, closure)
            return None
        return self.optimizer.step(closure) if closure is not None else self.optimizer.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients, unless they belong to an update that is still to come."""
        for model in self._models or self._link():
            window = self.stepper.window_of(model)
            if window.holds_gradients:
                return
            window.cleared()
        if self.scaler.scales:
            self.scaler.cleared(self.optimizer)
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none)

    def unscale(self) -> None:
        """Divides gradients by the loss scale, where there is one, once per update."""
        if self.scaler.scales and self.closing:
            self.scaler.unscale(self.optimizer)

    def forget(self) -> None:
        """Looks for its models anew when it steps next."""
        self._models = ()

    def _link(self) -> tuple[PreparedModel, ...]:
        """Finds the models whose parameters these are."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        models, strangers = self.stepper.owners(parameters)
        if strangers:
            shapes = ", ".join(str(tuple(one.shape)) for one in strangers[:3]) + (", ..." if len(strangers) > 3 else "")
            raise StateError(
                f"{type(self.optimizer).__name__} has {len(strangers)} of {len(parameters)} parameters (shapes {shapes}) that belong to no "
                "model prepared by this Accelerator: their gradients would not be averaged over processes. Prepare the model they belong "
                "to (as it is now: not a copy, and not one made after the optimizer); a lone parameter goes into a module."
            )
        self._models = tuple(models)
        return self._models

    # -- the user's own -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while it is being made or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a prepared optimizer cannot be copied or pickled: copy its state_dict(), or the optimizer inside (.optimizer)")

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    @property
    def state(self) -> Any:
        """The state of the user's optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The groups of the user's optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> Any:
        """The defaults of the user's optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, value: Any) -> None:
        self.optimizer.defaults = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its model has to be prepared too."""
        self.optimizer.add_param_group(param_group)
        self.forget()

    def state_dict(self) -> dict[str, Any]:
        """The state of the user's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the user's optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """For optimizers with a mode of their own (schedule-free ones); nothing for others."""
        self._mode("train")

    def eval(self) -> None:
        """For optimizers with a mode of their own (schedule-free ones); nothing for others."""
        self._mode("eval")

    def _mode(self, name: str) -> None:
        change = getattr(self.optimizer, name, None)
        if callable(change):
            change()
