"""The saved state of a loop's windows: what it has to look like, and how it is dealt out to another number of processes.

A state (`Stepper.loop_state`) and the gradients beside it (`Stepper.open_gradients`) belong to one rank: between updates each rank adds
up its own. On the same number of processes each takes its own back. On another, `redistribute` makes of all of them what every new rank
begins with, so that the update that the open window ends with has the gradient of the same samples. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.step.accumulation import Accumulation
from slipstream.step.gradients import mean_gradients

__all__ = ["Saved", "check_state", "redistribute"]

_ENTRIES = {"windows", "sync_gradients", "loose"}
"""Earlier versions also wrote `latest`: the model whose window was followed by those that were never named."""

Saved = tuple[Mapping[str, Any], "Mapping[str, torch.Tensor] | None"]
"""What one rank saved: the state of its windows, and gradients of those that were open."""


def check_state(state: Any, models: Sequence[str]) -> None:
    """Raises unless this is a state of windows of so many models."""
    if not isinstance(state, Mapping) or set(state) - {"latest"} != _ENTRIES or not isinstance(state["windows"], list | tuple):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigError(f"this is no state of a training loop: it has {found} instead of {sorted(_ENTRIES)}; pass what loop_state() gave")
    windows = state["windows"]
    if len(windows) != len(models):
        raise ConfigError(
            f"the state of a training loop has windows of {len(windows)} models, and {len(models)} are prepared "
            f"({', '.join(models) or 'none'}): prepare the same models in the same order"
        )
    for window in windows:
        Accumulation.check(window)
    latest = state.get("latest")
    if latest is not None and (type(latest) is not int or not 0 <= latest < len(windows)):
        raise ConfigError(f"the state of a training loop has latest={latest!r}, and it has {len(windows)} models")
    for name in ("sync_gradients", "loose"):
        if not isinstance(state[name], bool):
            raise ConfigError(f"the state of a training loop has {name}={state[name]!r}, which is True or False: it was changed or damaged")


def redistribute(
    saved: Sequence[Saved], *, saved_by: int, world_size: int, batch_ratio: float = 1.0
) -> tuple[dict[str, Any], dict[str, torch.Tensor] | None]:
    """What every one of `world_size` ranks begins with, of what `saved_by` ranks (or those of them that are here) saved.

    `batch_ratio` is how many full batches of all ranks, as they are now, one of the saved run is: samples of a batch then, over now. The
    place in an open window is rounded down to whole batches as they are now: a loader that goes on in between hands out a short one first.

    >>> window = Accumulation()
    >>> closing = window.begin(4, None), window.begin(4, None), window.add_mean()
    >>> state = {"windows": [window.state()], "sync_gradients": False, "loose": False}
    >>> gradients = [{"0.weight": torch.tensor([1.0])}, {"0.weight": torch.tensor([3.0])}]
    >>> begun, mean = redistribute([(state, one) for one in gradients], saved_by=2, world_size=1, batch_ratio=2.0)
    >>> begun["windows"][0]["index"], begun["windows"][0]["expected"], mean
    (4, 8.0, {'0.weight': tensor([2.])})
    """
    states = [state for state, _ in saved]
    first = states[0]
    if any(len(state["windows"]) != len(first["windows"]) for state in states):
        raise ConfigError("the ranks saved windows of different numbers of models: these are no states of one run")
    windows, weights = [], []
    for place in range(len(first["windows"])):
        window, factors = _one_window([state["windows"][place] for state in states], saved_by, world_size, batch_ratio)
        windows.append(window)
        weights.append(factors)
    begun = {**first, "windows": windows}
    if all(gradients is None for _, gradients in saved):
        return begun, None
    means: dict[str, torch.Tensor] = {}
    for place, factors in enumerate(weights):
        own = [{name: one for name, one in (gradients or {}).items() if name.startswith(f"{place}.")} for _, gradients in saved]
        means.update(mean_gradients(own, factors))
    return begun, means


def _one_window(ranks: Sequence[Mapping[str, Any]], saved_by: int, world_size: int, ratio: float) -> tuple[dict[str, Any], list[float]]:
    """The window of one model for every new rank, and what the gradients of each old rank are multiplied with before the mean."""
    first = dict(ranks[0])
    same = [1.0] * len(ranks)
    if first["closing"]:
        return first, same
    first["index"] = math.floor(first["index"] * ratio + 1e-9)
    first["expected"] = first["expected"] * ratio
    if first["kind"] != "sum":  # counted in full batches of all ranks; gradients are means
        first["total"] *= ratio
        first["carried"] = None if first["carried"] is None else first["carried"] * ratio
        return first, same
    # Sums: all raw gradients and all weights stay, so each new rank has its part of both, under one divisor.
    share = saved_by / world_size
    first["total"] = sum(one["total"] for one in ranks) / len(ranks) * share
    first["estimate"] *= share / ratio
    divisor = first["carried"] = next((one["carried"] for one in ranks if one["carried"]), None)
    return first, [share * (one["carried"] or 0.0) / divisor if divisor else share for one in ranks]
