"""Local SGD: processes train independently for some updates, and then average their weights.

Gradients are not exchanged inside the block. After every `local_sgd_steps` updates, and at the end of the block, trained parameters and
floating-point buffers become their mean over the processes, in one all-reduce per dtype. Other buffers and optimizer states stay local.
Nothing is averaged after an error, as the other processes may be elsewhere; the guard of the next collective says so.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from slipstream.config.handlers import check_count
from slipstream.errors import ConfigError, StateError

if TYPE_CHECKING:
    from slipstream.accelerator import Accelerator

__all__ = ["LocalSGD"]


class LocalSGD:
    """A block in which processes train on their own; `step()` comes after every `optimizer.step()`.

        with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    While gradients are accumulated, only the calls that end an update count. With `enabled=False`, or with one process, the block is
    plain training.
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        where = f"LocalSGD(local_sgd_steps={local_sgd_steps!r})"
        check_count(local_sgd_steps, f"{where}: weights are averaged after a whole number of updates, from 1; write e.g. 8")
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"LocalSGD(model={type(model).__name__}): pass the model that prepare gave back")
        self.enabled = enabled and accelerator.num_processes > 1
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        """Updates inside of the block so far."""
        self._accelerator = accelerator
        self._model = model
        self._block: AbstractContextManager[None] | None = None

    def __enter__(self) -> LocalSGD:
        if self._block is not None:
            raise StateError("this LocalSGD block is running already: make another for a block inside of it, or leave the inner one out")
        self.num_steps = 0
        self._block = self._accelerator.no_sync(self._model) if self.enabled else nullcontext()
        self._block.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        block, self._block = self._block, None
        assert block is not None
        try:
            if error is None and self.enabled and self.num_steps % self.local_sgd_steps:
                self._average()
        finally:
            block.__exit__(kind, error, trace)

    def step(self) -> None:
        """Count an update; every `local_sgd_steps` of them, average the weights."""
        if self._block is None:
            raise StateError("LocalSGD.step() outside of its block: write `with LocalSGD(...) as local_sgd:` around the loop")
        if not self._accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        own = _averaged_tensors(self._accelerator.unwrap_model(self._model))
        if own:
            means = self._accelerator.reduce([tensor.detach() for tensor in own], reduction="mean")
            with torch.no_grad():
                torch._foreach_copy_(own, means)


def _averaged_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return what is averaged, tied tensors once, in the order of the model: the same on all processes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*trained, *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
