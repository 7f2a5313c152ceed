"""`AcceleratedScheduler`: a learning-rate scheduler that follows the updates of its optimizers, by the rule of Accelerate.

It moves as often per update as there are processes (unless batches are split), because schedules written for Accelerate count the batches
of one process. `slipstream.Accelerator` moves once per update.
"""

from __future__ import annotations

from typing import Any

from accelerate._forwarding import forward_names
from accelerate.optimizer import AcceleratedOptimizer
from slipstream.training.scheduler import AcceleratedScheduler as _AcceleratedScheduler

_forwarded, __getattr__, __dir__ = forward_names(__name__, {"accelerate.state": "AcceleratorState GradientState"})
__all__ = ["AcceleratedScheduler", *_forwarded]


class AcceleratedScheduler(_AcceleratedScheduler):
    """A scheduler as `prepare` returns it, or around one that a script wraps itself.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> accelerator = Accelerator(cpu=True)
    >>> inner = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    >>> optimizer = AcceleratedOptimizer(inner)
    >>> scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5), optimizer)
    >>> optimizer.step(); scheduler.step(); scheduler.get_last_lr()
    [0.5]
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False, **connections: Any
    ) -> None:
        from accelerate._gradient_state import GradientState

        self.optimizers = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.gradient_state = GradientState()
        super().__init__(scheduler, self.gradient_state, lambda optimizer: None, step_with_optimizer=step_with_optimizer, **connections)
        self._begun = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizers have made an update with this batch: once for each process, or once where batches are split."""
        if not self._begun:
            self._begun = True
            if self._on_first_step is not None:
                self._on_first_step(self)
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not all(_closes_update(optimizer, self.gradient_state) for optimizer in self.optimizers):
            if self.gradient_state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                self.scheduler._step_count += 1
            return
        if any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers):
            return
        if self._needs_metric:
            self._check_same(args[0] if args else kwargs.get("metrics"))
        for _ in range(1 if self.split_batches else _count_processes()):
            if self._is_over():
                return
            self.scheduler.step(*args, **kwargs)

    def _is_over(self) -> bool:
        """Return whether another step would raise: schedules of a fixed length do not count the updates of several processes."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler.last_epoch >= total

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Unpickle around the same scheduler and optimizers."""
        return AcceleratedScheduler, (self.scheduler, self.optimizers, self.step_with_optimizer, self.split_batches)


def _closes_update(optimizer: Any, gradient_state: Any) -> bool:
    """Return whether an optimizer, prepared or not, makes an update with the present batch."""
    return optimizer.closing if isinstance(optimizer, AcceleratedOptimizer) else gradient_state.sync_gradients


def _count_processes() -> int:
    from accelerate.state import AcceleratorState, PartialState

    shared = AcceleratorState._shared_state or PartialState._shared_state
    return shared["_runtime"].process.world_size if "_runtime" in shared else PartialState().num_processes
