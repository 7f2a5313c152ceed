"""`AcceleratedScheduler`: a learning-rate scheduler that moves once per update, the same on any number of processes.

`scheduler.step()` may be called after every batch. It does nothing while gradients are accumulated, or when the optimizer step was
skipped because of an overflow or of gradients that are not finite. `moves` above 1 is the rule of Accelerate: as many moves per update as
there are processes, for schedules whose length was counted in batches of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.distributed.gradient_state import GradientState
from slipstream.errors import StateError
from slipstream.training.optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedScheduler"]


class _SchedulerLink:
    """What a step needs, in one place: see `OptimizerLink` of optimizers."""

    __slots__ = ("inner", "optimizer", "usual")

    def __init__(self, optimizer: AcceleratedOptimizer | None, inner: Any, usual: bool) -> None:
        self.optimizer, self.inner, self.usual = optimizer, inner, usual


class AcceleratedScheduler:
    """A scheduler as `prepare` gives it back.

    >>> from slipstream import Accelerator
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    >>> model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    >>> accelerator.backward(model(torch.ones(1, 2)).sum())
    >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()
    [0.5]
    """

    def __init__(
        self,
        scheduler: Any,
        state: GradientState,
        find: Callable[[torch.optim.Optimizer], AcceleratedOptimizer | None],
        *,
        step_with_optimizer: bool = True,
        moves: int = 1,
        same_everywhere: Callable[[Any], None] = lambda value: None,
        begins: Callable[[AcceleratedScheduler], None] | None = None,
        loaders_before: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.step_with_optimizer = step_with_optimizer
        self.moves = moves
        """How often it moves per update."""
        self._state = state
        self._find = find
        self._same_everywhere = same_everywhere
        """Raises unless all processes gave the same value."""
        self.loaders_before = loaders_before
        """How many loaders were prepared before it was given to `prepare`: its length may come from theirs."""
        self._begins = begins
        """Called at the first step, when all parts are known."""
        self._way: _SchedulerLink | None = None
        self._needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    @property
    def built_on_prepared(self) -> bool:
        """Whether the scheduler was built on an optimizer that had been prepared."""
        return isinstance(getattr(self.scheduler, "optimizer", None), AcceleratedOptimizer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a prepared scheduler cannot be copied or pickled: copy its state_dict(), or the scheduler inside (.scheduler)")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move on, if the optimizers have made an update with this batch."""
        way = self._way or self._find_way()
        optimizer = way.optimizer
        if optimizer is not None:
            linked = optimizer.linked
            if not linked.closing:
                if self._state.plugin.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                    self.scheduler._step_count += 1
                return
            if linked.may_skip and optimizer.step_was_skipped:
                return
        if way.usual:
            way.inner.step(*args, **kwargs)
        else:
            self._move(args, kwargs)

    def _move(self, args: Any, kwargs: Any) -> None:
        if self._needs_metric:
            self._same_everywhere(args[0] if args else kwargs.get("metrics"))
        self.scheduler.step(*args, **kwargs)
        for _ in range(self.moves - 1):
            if self._is_over():
                return
            self.scheduler.step(*args, **kwargs)

    def _is_over(self) -> bool:
        """Return whether several moves per update have used up a schedule that raises beyond its end."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler.last_epoch + 1 >= total

    def _find_way(self) -> _SchedulerLink:
        usual = self.moves == 1 and not self._needs_metric
        self._way = _SchedulerLink(self._link() if self.step_with_optimizer else None, self.scheduler, usual)
        if self._begins is not None:
            self._begins(self)
        return self._way

    def _link(self) -> AcceleratedOptimizer:
        own = self.scheduler.optimizer
        found = own if isinstance(own, AcceleratedOptimizer) else self._find(own)
        if found is None:
            raise StateError(
                f"{type(self.scheduler).__name__} belongs to {type(own).__name__}, which this Accelerator did not prepare, so it cannot "
                "move with its updates. Prepare that optimizer too, or pass step_scheduler_with_optimizer=False to move with every call."
            )
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while it is being made or unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates in use."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> Any:
        """Return what the scheduler's own `get_lr` returns."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Call the scheduler's own `print_lr`."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the user's scheduler."""
        self.scheduler.load_state_dict(state_dict)
