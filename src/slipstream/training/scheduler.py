"""`AcceleratedScheduler`: a learning-rate scheduler that steps once per update, the same on any number of processes.

`scheduler.step()` may be called after every batch. It does nothing while gradients are accumulated, or when the optimizer step was
skipped because gradients overflowed or were not finite. `moves` above 1 is the rule of Accelerate: one step per process and update, for
schedules whose length is counted in batches of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slipstream.distributed.gradient_state import GradientState
from slipstream.errors import StateError
from slipstream.training.optimizer import AcceleratedOptimizer

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler:
    """A scheduler as `prepare` returns it.

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
        check_same: Callable[[Any], None] = lambda value: None,
        on_first_step: Callable[[AcceleratedScheduler], None] | None = None,
        loaders_before: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.step_with_optimizer = step_with_optimizer
        self.moves = moves
        """How many steps it makes per update."""
        self._state = state
        self._find = find
        self._check_same = check_same
        """Raises unless all processes pass the same value."""
        self.loaders_before = loaders_before
        """How many loaders were prepared before it; its length may be derived from theirs."""
        self._on_first_step = on_first_step
        self._optimizer: AcceleratedOptimizer | None = None
        """The prepared optimizer whose updates it follows; found at the first step."""
        self._is_linked = False
        self._needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    @property
    def built_on_prepared(self) -> bool:
        """Whether the scheduler was built on an optimizer that had been prepared."""
        return isinstance(getattr(self.scheduler, "optimizer", None), AcceleratedOptimizer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a prepared scheduler cannot be copied or pickled: copy its state_dict(), or the scheduler inside (.scheduler)")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizer has made an update with this batch."""
        if not self._is_linked:
            self._link()
        optimizer = self._optimizer
        if optimizer is not None:
            linked = optimizer._linked or optimizer.linked
            if not linked.closing:
                if self._state.plugin.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                    self.scheduler._step_count += 1
                return
            if linked.may_skip and optimizer.step_was_skipped:
                return
        if self._needs_metric:
            self._check_same(args[0] if args else kwargs.get("metrics"))
        self.scheduler.step(*args, **kwargs)
        for _ in range(self.moves - 1):
            if self._is_over():
                return
            self.scheduler.step(*args, **kwargs)

    def _is_over(self) -> bool:
        """Return whether the schedule has reached its end, where another step would raise."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler.last_epoch + 1 >= total

    def _link(self) -> None:
        self._optimizer = self._find_optimizer() if self.step_with_optimizer else None
        self._is_linked = True
        if self._on_first_step is not None:
            self._on_first_step(self)

    def _find_optimizer(self) -> AcceleratedOptimizer:
        own = self.scheduler.optimizer
        found = own if isinstance(own, AcceleratedOptimizer) else self._find(own)
        if found is None:
            raise StateError(
                f"{type(self.scheduler).__name__} belongs to {type(own).__name__}, which this Accelerator did not prepare, so it cannot "
                "follow its updates. Prepare that optimizer too, or pass step_scheduler_with_optimizer=False to step with every call."
            )
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet
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
        """Return the state of the wrapped scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)
