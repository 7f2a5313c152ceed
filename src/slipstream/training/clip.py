"""Gradient clipping: once per update, on complete gradients: reduced over ranks, over the whole window, and without the loss scale.

Between updates nothing is clipped, because the gradients are incomplete. So clipping may be called after every batch; `norm` then
returns the norm of the last update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.observability.timing.meter import OPTIMIZER, mark_phase
from slipstream.training.optimizer import AcceleratedOptimizer
from slipstream.training.stepper import PreparedModel, Stepper

__all__ = ["GradientClipper"]


class GradientClipper:
    """Clips gradients of prepared models; one for each Accelerator."""

    def __init__(
        self, stepper: Stepper, optimizers: Callable[[], Iterable[AcceleratedOptimizer]]
    ) -> None:
        self._stepper = stepper
        self._optimizers = optimizers
        self._last: dict[tuple[int, ...], torch.Tensor] = {}
        self.before: Callable[[list[PreparedModel]], None] | None = None
        """Called with the models before clipping, because a non-finite gradient would make all of them NaN; see `observability/guards/`."""
        self.after: Callable[[torch.Tensor], None] | None = None
        """Called with each norm."""

    def norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the total norm of the gradients to `max_norm`, and return the norm before; between updates, that of the last one."""
        if not max_norm >= 0:
            raise ValueError(f"clip_grad_norm_(max_norm={max_norm!r}): max_norm must be a non-negative number")
        with mark_phase(self._stepper.meter, OPTIMIZER):
            group, models = self._group(parameters)
            key = tuple(map(id, models))
            if not self._complete(group, models):
                norm = self._last.get(key)
                return norm if norm is not None else torch.zeros((), device=group[0].device if group else None)
            self._last[key] = norm = self._stepper.strategy.clip(group, max_norm, norm_type)
            if self.after is not None:
                self.after(norm)
            return norm

    def value(self, parameters: Any, clip_value: float) -> None:
        """Clip each entry of the gradients to at most `clip_value`; between updates, do nothing."""
        with mark_phase(self._stepper.meter, OPTIMIZER):
            group, models = self._group(parameters)
            if self._complete(group, models):
                self._stepper.strategy.clip_value(group, clip_value)

    def unscale(self, optimizer: Any = None) -> None:
        """Divide the gradients of these optimizers (all by default) by the loss scale, if there is one."""
        chosen = self._optimizers() if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for prepared in chosen:
            if not isinstance(prepared, AcceleratedOptimizer):
                raise TypeError(f"unscale_gradients got a {type(prepared).__name__}: pass an optimizer that prepare returned")
            prepared.unscale()

    def state(self) -> list[dict[str, Any]]:
        """Return the norms of the last updates, by the indices of their models; `norm` returns them between updates."""
        indices = {id(model): index for index, model in enumerate(self._stepper.models)}
        known = {key: norm for key, norm in self._last.items() if all(model in indices for model in key)}
        return [{"models": [indices[model] for model in key], "norm": norm.detach()} for key, norm in known.items()]

    def check(self, state: Any) -> None:
        """Raise unless this is a result of `state` for the prepared models; change nothing."""
        count = len(self._stepper.models)
        for saved in state if isinstance(state, list) else [None]:
            indices, norm = (saved.get("models"), saved.get("norm")) if isinstance(saved, dict) else (None, None)
            fits = isinstance(indices, list) and all(type(index) is int and 0 <= index < count for index in indices)
            if not fits or not isinstance(norm, torch.Tensor) or norm.ndim:
                raise ConfigError(
                    f"not a state of the gradient clipper for {count} prepared models: {str(saved)[:80]}; pass a result of state()"
                )

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Restore the saved norms, which `norm` returns until the next update."""
        self.check(state)
        models = self._stepper.models
        self._last = {}
        for saved in state:
            of = [models[index] for index in saved["models"]]
            device = next((parameter.device for model in of for parameter in model.original.parameters()), None)
            self._last[tuple(map(id, of))] = saved["norm"].to(device)

    def _complete(self, parameters: list[torch.Tensor], models: list[PreparedModel]) -> bool:
        """Return whether these gradients are complete; if so, unscale them and call `before`."""
        if not all(model.accumulation.closing for model in models):
            return False
        if self._stepper.scaler.scales:
            wanted = {id(parameter) for parameter in parameters}
            for optimizer in self._optimizers():
                if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
                    optimizer.unscale()
        if self.before is not None:
            self.before(models)
        return True

    def _group(self, parameters: Any) -> tuple[list[torch.Tensor], list[PreparedModel]]:
        """Return the parameters as a list, and the prepared models that they belong to."""
        if isinstance(parameters, torch.nn.Module):
            raise TypeError(f"clipping takes parameters, not a {type(parameters).__name__}: write model.parameters()")
        group = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        group = self._stepper.strategy.current_parameters(group)
        return group, self._stepper.owners(group)[0]
