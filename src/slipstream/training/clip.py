"""Gradient clipping: once per update, on complete gradients: reduced over the ranks, over the whole window, and without the loss scale.

Between updates nothing is clipped, as a part of a gradient says nothing about the whole. So clipping may be called after every batch;
`norm` then returns the norm of the last update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.observability.timing.meter import OPTIMIZER
from slipstream.training.optimizer import AcceleratedOptimizer
from slipstream.training.stepper import PreparedModel, Stepper, run_timed

__all__ = ["GradientClipper"]


class GradientClipper:
    """Clips gradients of prepared models; one for each Accelerator."""

    def __init__(
        self, stepper: Stepper, optimizers: Callable[[], Iterable[AcceleratedOptimizer]], clip: Callable[..., torch.Tensor]
    ) -> None:
        self._stepper = stepper
        self._optimizers = optimizers
        self._clip = clip
        self._last: dict[tuple[int, ...], torch.Tensor] = {}
        self.before: Callable[[list[PreparedModel]], None] | None = None
        """What looks at gradients before they are clipped, as one that is not finite spreads to all: see `step/guards/`."""
        self.after: Callable[[torch.Tensor], None] | None = None
        """Where norms go."""

    def norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients together to `max_norm`, and gives the norm that they had; between updates, that of the last one."""
        if not max_norm >= 0:
            raise ValueError(f"clip_grad_norm_(max_norm={max_norm!r}): the largest norm is a number from 0")
        norm: torch.Tensor = run_timed(self._stepper.meter, OPTIMIZER, self._norm, parameters, max_norm, norm_type)
        return norm

    def _norm(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        group = _as_list(parameters)
        models, _ = self._stepper.owners(group)
        key = tuple(map(id, models))
        if not self._complete(group, models):
            return self._last.get(key, torch.zeros(()))
        if self.before is not None:
            self.before(models)
        self._last[key] = norm = self._clip(group, max_norm, norm_type)
        if self.after is not None:
            self.after(norm)
        return norm

    def value(self, parameters: Any, clip_value: float) -> None:
        """Clips each entry of the gradients to at most `clip_value`; between updates, nothing is done."""
        run_timed(self._stepper.meter, OPTIMIZER, self._value, parameters, clip_value)

    def _value(self, parameters: Any, clip_value: float) -> None:
        group = _as_list(parameters)
        models = self._stepper.owners(group)[0]
        if self._complete(group, models):
            if self.before is not None:
                self.before(models)
            if any(parameter.grad is not None for parameter in group):  # torch fails where there is nothing to clip
                torch.nn.utils.clip_grad_value_(group, clip_value)

    def unscale(self, optimizer: Any = None) -> None:
        """Divides the gradients of these optimizers (of all, if none is named) by the loss scale, where there is one."""
        chosen = self._optimizers() if optimizer is None else optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for entry in chosen:
            if not isinstance(entry, AcceleratedOptimizer):
                raise TypeError(f"unscale_gradients got a {type(entry).__name__}: pass an optimizer that prepare gave back")
            entry.unscale()

    def state(self) -> list[dict[str, Any]]:
        """The norms of the last updates, which `norm` gives between updates: by the places of the models."""
        places = {id(model): place for place, model in enumerate(self._stepper.models)}
        known = {key: norm for key, norm in self._last.items() if all(entry in places for entry in key)}
        return [{"models": [places[entry] for entry in key], "norm": norm.detach()} for key, norm in known.items()]

    def check(self, state: Any) -> None:
        """Raises unless this is what `state` gives, of models that are prepared here; changes nothing."""
        count = len(self._stepper.models)
        for entry in state if isinstance(state, list) else [None]:
            places, norm = (entry.get("models"), entry.get("norm")) if isinstance(entry, dict) else (None, None)
            fits = isinstance(places, list) and all(type(place) is int and 0 <= place < count for place in places)
            if not fits or not isinstance(norm, torch.Tensor) or norm.ndim:
                raise ConfigError(
                    f"this is no state of clipping for {count} prepared models: {str(entry)[:80]}; pass what its state() gave"
                )

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Gives the saved norms until there is an update."""
        self.check(state)
        models = self._stepper.models
        self._last = {tuple(id(models[place]) for place in entry["models"]): entry["norm"] for entry in state}

    def _complete(self, parameters: list[torch.Tensor], models: list[PreparedModel]) -> bool:
        """Whether these gradients, of these models, make an update now; if so, without the loss scale."""
        if not all(model.accumulation.closing for model in models):
            return False
        if self._stepper.scaler.scales:
            wanted = {id(parameter) for parameter in parameters}
            for optimizer in self._optimizers():
                if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
                    optimizer.unscale()
        return True


def _as_list(parameters: Any) -> list[torch.Tensor]:
    if isinstance(parameters, torch.nn.Module):
        raise TypeError(f"clipping takes parameters, and was given a {type(parameters).__name__}: write model.parameters()")
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
