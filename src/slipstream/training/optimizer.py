"""`AcceleratedOptimizer`: wraps an optimizer so that it steps and clears gradients only where an update ends.

It is an instance of `torch.optim.Optimizer`, and everything but `step` and `zero_grad` is passed to the wrapped optimizer. It finds the
models of its parameters at its first step, so optimizers and models can be prepared in any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks as _hooks_after, _global_optimizer_pre_hooks as _hooks_before

from slipstream.config.handlers import check_count
from slipstream.distributed.pytree import recursively_apply
from slipstream.errors import StateError
from slipstream.observability.timing.meter import OPTIMIZER
from slipstream.training.stepper import PreparedModel, Stepper, run_timed

__all__ = ["AcceleratedOptimizer", "OptimizerLink", "UnmarkedStep", "move_state", "move_to_device"]


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Return the state of an optimizer with its tensors on a device.

    >>> move_to_device({"step": 1, "moments": [torch.ones(1)]}, "cpu")
    {'step': 1, 'moments': [tensor([1.])]}
    """
    return recursively_apply(lambda tensor: tensor.to(device), state)


def move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move the state of an optimizer to the devices of its parameters, in the dtypes that it has.

    A count of steps stays on the host unless the optimizer computes with it on the device, as in torch. (torch's own way to move a state,
    `load_state_dict`, casts it to the dtype of the parameters.)
    """
    for group in optimizer.param_groups:
        counts_on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if name != "step" or counts_on_device:
                    state[name] = move_to_device(value, parameter.device)


# torch internals: whether a profiler runs (torch 2.13); there is no public way to ask. tests/observability/test_profiler.py notices.
_is_profiled = torch._C._autograd._profiler_enabled
_is_compiling = torch.compiler.is_dynamo_compiling


class UnmarkedStep:
    """Calls `step` of an optimizer without the profiler range around it, which takes a tenth of a small step also where no profiler runs.

    With a profiler or hooks, and where `step` was replaced by something unknown, it is called as it is.
    """

    __slots__ = ("_class_step", "_optimizer", "_own_step", "_raw")

    # torch internals: `profile_hook_step` wraps the `step` of every optimizer class, and a scheduler wraps that of its optimizer to notice
    # the first call (torch 2.13). tests/training/test_unmarked_step.py notices a change; this can go when torch's range costs nothing.
    _RANGE = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._class_step: Any = None
        self._own_step: Any = None
        self._raw: Callable[[torch.optim.Optimizer], Any] | None = None

    def run(self) -> Any:
        """Make one step."""
        optimizer = self._optimizer
        if type(optimizer).step is not self._class_step or optimizer.__dict__.get("step") is not self._own_step:
            self._look()
            return optimizer.step()  # a scheduler wants to see the first one
        if self._raw is None or _is_profiled() or _is_compiling():
            return optimizer.step()
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or _hooks_before or _hooks_after:
            return optimizer.step()
        return self._raw(optimizer)

    def _look(self) -> None:
        """Find what is inside of the known wrappers; nothing if there is an unknown one."""
        optimizer = self._optimizer
        self._class_step, self._own_step = type(optimizer).step, vars(optimizer).get("step")
        own = self._own_step
        is_known = own is None or (hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is self._class_step)
        self._raw = self._class_step.__wrapped__ if is_known and getattr(self._class_step, "__code__", None) is self._RANGE else None


class OptimizerLink:
    """What a step reads, in slots: the `__getattr__` of a prepared optimizer makes attribute look-ups slow."""

    __slots__ = (
        "accumulations", "check", "check_weights", "clears_as_torch", "foreign_parameters", "is_sharded", "may_skip", "meter", "models",
        "next_check", "optimizer", "scales", "should_skip", "step", "stepper", "updates",
    )  # fmt: skip

    def __init__(self, optimizer: AcceleratedOptimizer, models: tuple[PreparedModel, ...]) -> None:
        self.optimizer, self.stepper, self.check = optimizer.optimizer, optimizer.stepper, optimizer._check
        self.meter = optimizer.stepper.meter
        self.scales = optimizer.scaler.scales
        self.is_sharded = not optimizer.stepper.strategy.replicated
        self.step = UnmarkedStep(self.optimizer)
        self.models = models
        self.updates = optimizer._updates_before
        # torch's `zero_grad` opens a profiler range, which takes longer than clearing: `_clear_gradients` skips it without a profiler
        self.clears_as_torch = type(self.optimizer).zero_grad is torch.optim.Optimizer.zero_grad and "zero_grad" not in vars(self.optimizer)
        self.accumulations = tuple(model.accumulation for model in models)
        self.foreign_parameters = _find_foreign_parameters(self.optimizer, models)
        """For each model: its trained parameters that this optimizer does not have."""
        guards = optimizer.stepper.guards
        self.should_skip: Callable[..., bool] | None = None if guards is None else guards.refuses
        """Called before each update; returns whether to skip it."""
        self.check_weights: Callable[[AcceleratedOptimizer, OptimizerLink], float] | None = None if guards is None else guards.look
        self.next_check: float = math.inf if guards is None else guards.first_look
        """The number of updates after which `check_weights` is called next."""
        self.may_skip = self.scales or self.should_skip is not None

    @property
    def closing(self) -> bool:
        """Whether an update ends with the current batch."""
        for accumulation in self.accumulations:  # noqa: SIM110  # a generator costs as much as all the rest
            if not accumulation.closing:
                return False
        return True


def _forward_attribute(name: str) -> Any:
    """Return a property that reads and sets an attribute of the wrapped optimizer."""
    return property(lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value))


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer as `prepare` returns it.

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
        # The base class is not initialised: groups, state and hooks belong to the wrapped optimizer.
        self.optimizer = optimizer
        self.stepper = stepper
        self.scaler = stepper.scaler
        self.step_was_skipped = False
        """Whether the last step was skipped because gradients overflowed, or were not finite (`on_nan="skip"`)."""
        self._check = check
        self._linked: OptimizerLink | None = None
        self._updates_before = 0

    # -- where updates end ----------------------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """Whether an update ends with the current batch."""
        return self.linked.closing

    @property
    def linked(self) -> OptimizerLink:
        """The link to its models, created on first use."""
        return self._linked or self._link()

    def step(self, closure: Any = None) -> Any:
        """Update the parameters if an update ends with this batch; otherwise do nothing."""
        linked = self._linked or self._link()
        for accumulation in linked.accumulations:
            if not accumulation.closing:
                return None
            if accumulation.index > 1 and not accumulation.backward_done:
                raise StateError(
                    f"{type(self.optimizer).__name__}.step() ends an accumulation window whose last batch had no "
                    "accelerator.backward(loss), so its gradients are neither complete nor averaged. Call accelerator.backward(loss) "
                    "(not loss.backward()) on every batch. To skip a batch, call accelerator.backward(loss * 0), or optimizer.zero_grad()."
                )
            accumulation.backward_done = True
        meter = linked.meter
        result = run_timed(meter, OPTIMIZER, _run_update, self, linked, closure)
        if meter is not None:
            meter.updated = True
            if linked.stepper.state.active is None:  # otherwise the loader's next batch ends the step
                meter.end_step()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, unless the next update needs them."""
        linked = self._linked or self._link()
        for accumulation in linked.accumulations:
            if not (accumulation.closing and accumulation.backward_done) and accumulation.holds_gradients:  # mostly the first is enough
                return
        for accumulation, others in zip(linked.accumulations, linked.foreign_parameters, strict=True):
            if accumulation.loss_kind is not None and all(parameter.grad is None for parameter in others):
                accumulation.on_zero_grad()
        run_timed(linked.meter, OPTIMIZER, _clear_gradients, self, linked, set_to_none)

    def unscale(self) -> None:
        """Divide gradients by the loss scale, if there is one, once per update."""
        if self.scaler.scales and self.closing:
            self.scaler.unscale(self.optimizer)

    def forget(self) -> None:
        """Find its models again at the next step."""
        self._updates_before, self._linked = self.updates, None

    @property
    def updates(self) -> int:
        """How many updates it has made: calls of `step` that ended a window and were not skipped because of an overflow."""
        linked = self._linked
        return self._updates_before if linked is None else linked.updates

    @updates.setter
    def updates(self, updates: int) -> None:
        check_count(updates, f"optimizer.updates = {updates!r}: the number of updates made is a whole number from 0", least=0)
        self._updates_before = updates
        if self._linked is not None:
            self._linked.updates = updates

    def _link(self) -> OptimizerLink:
        """Find the models that own its parameters."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        models, unowned = self.stepper.owners(parameters)
        if unowned:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in unowned[:3]) + (", ..." if len(unowned) > 3 else "")
            raise StateError(
                f"{type(self.optimizer).__name__} has {len(unowned)} of {len(parameters)} parameters (shapes {shapes}) that belong to no "
                "model prepared by this Accelerator: their gradients would not be averaged over processes. Prepare their model (the same "
                "object: not a copy, and not one created after the optimizer). Put a lone parameter into a module."
            )
        self._linked = OptimizerLink(self, tuple(models))
        return self._linked

    # -- passed to the wrapped optimizer ------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a prepared optimizer cannot be copied or pickled: copy its state_dict(), or the optimizer inside (.optimizer)")

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    state = _forward_attribute("state")
    param_groups = _forward_attribute("param_groups")
    defaults = _forward_attribute("defaults")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; its model must be prepared too."""
        self.optimizer.add_param_group(param_group)
        self.stepper.strategy.map_optimizer(self.optimizer)  # the script may have kept parameters that `prepare` has replaced
        self.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch an optimizer with modes, such as a schedule-free one, to training."""
        self._mode("train")

    def eval(self) -> None:
        """Switch an optimizer with modes, such as a schedule-free one, to evaluation."""
        self._mode("eval")

    def _mode(self, name: str) -> None:
        change = getattr(self.optimizer, name, None)
        if callable(change):
            change()


def _find_foreign_parameters(optimizer: torch.optim.Optimizer, models: Sequence[PreparedModel]) -> list[list[torch.nn.Parameter]]:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [
        [parameter for parameter in model.original.parameters() if parameter.requires_grad and id(parameter) not in own] for model in models
    ]


def _run_update(optimizer: AcceleratedOptimizer, linked: OptimizerLink, closure: Any) -> Any:
    """Run one update, unless it is skipped."""
    if linked.check is not None:
        for model in linked.models:
            linked.check(model.prepared)
    linked.stepper.backward_outside_block = False
    if linked.should_skip is not None:
        optimizer.step_was_skipped = skipped = linked.should_skip(optimizer, linked, closure)
        if skipped:
            return None
    result = None
    if linked.scales:
        optimizer.step_was_skipped = skipped = not optimizer.scaler.step(linked.optimizer, closure)
        linked.updates += not skipped
    else:
        linked.updates += 1
        result = linked.step.run() if closure is None else linked.optimizer.step(closure)
    if linked.updates >= linked.next_check and linked.check_weights is not None:
        linked.next_check = linked.check_weights(optimizer, linked)
    return result


def _clear_gradients(optimizer: AcceleratedOptimizer, linked: OptimizerLink, set_to_none: bool | None) -> None:
    """Clear the gradients of the wrapped optimizer."""
    if linked.scales:
        optimizer.scaler.on_zero_grad(linked.optimizer)
    if set_to_none is None and linked.clears_as_torch and not _is_profiled():
        for group in linked.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    elif set_to_none is None:
        linked.optimizer.zero_grad()
    else:
        linked.optimizer.zero_grad(set_to_none)
    if linked.is_sharded:
        linked.stepper.strategy.discard_waiting([parameter for group in linked.optimizer.param_groups for parameter in group["params"]])
