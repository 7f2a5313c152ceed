"""The saved state of a training loop inside an open accumulation window: its counters and its gradients.

State and gradients belong to one rank and are restored as they are on the same number of processes. For another number of processes,
`redistribute_loop_state` computes what every new rank begins with, so that the update has the gradient of the same samples. Gradients are
saved by name ("0.weight" belongs to the first model; a sparse one as `::indices` and `::values`). Names and shapes are checked before any
gradient changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.training.accumulation import Accumulation

__all__ = [
    "SavedLoop", "check_gradients", "check_loop_state", "collect_gradients", "mean_gradients", "redistribute_loop_state",
    "reserve_gradients", "set_gradients",
]


_INDICES, _VALUES = "::indices", "::values"


def _named_parameters(models: Sequence[torch.nn.Module | None]) -> dict[str, torch.nn.Parameter]:
    """Return parameters by the place of their model and their name, compiled or not."""
    return {
        f"{place}.{name.replace('_orig_mod.', '')}": parameter
        for place, model in enumerate(models)
        if model is not None
        for name, parameter in model.named_parameters()
    }


def collect_gradients(models: Sequence[torch.nn.Module | None]) -> dict[str, torch.Tensor]:
    """Return the gradients of these models by name; the tensors themselves, not copies.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> collect_gradients([None, model])
    {'1.weight': tensor([[1., 1.]])}
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in _named_parameters(models).items():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout == torch.sparse_coo:
            found[name + _INDICES], found[name + _VALUES] = gradient._indices(), gradient._values()
        else:
            found[name] = gradient.detach()
    return found


def check_gradients(models: Sequence[torch.nn.Module], gradients: Mapping[str, torch.Tensor] | None) -> None:
    """Raise unless these are gradients of these models."""
    if gradients is None:
        return
    if not isinstance(gradients, Mapping) or not all(isinstance(gradient, torch.Tensor) for gradient in gradients.values()):
        raise ConfigError(
            f"gradients to resume with are tensors by name, not {type(gradients).__name__}: pass a result of open_gradients()"
        )
    parameters = _named_parameters(models)
    for name, gradient in gradients.items():
        parameter = parameters.get(_parameter_name(name))
        if parameter is None:
            raise ConfigError(
                f"a gradient of {name!r} was saved in an open accumulation window, but no prepared model has such a parameter (the "
                f"number is the index of the model in prepare, of {len(models)}): prepare the same models in the same order"
            )
        expected = tuple(parameter.shape)
        if _parameter_name(name) != name:
            if not _fits_sparse(name, gradients, parameter):
                raise ConfigError(f"the saved sparse gradient {_parameter_name(name)!r} does not fit its parameter, of shape {expected}")
        elif tuple(gradient.shape) != expected:
            raise ConfigError(
                f"the saved gradient of {name!r} has shape {tuple(gradient.shape)}, but the parameter has {expected}: it belongs to a "
                "different model"
            )


def set_gradients(models: Sequence[torch.nn.Module], gradients: Mapping[str, torch.Tensor] | None) -> None:
    """Restore gradients; clear those of all other parameters of these models."""
    check_gradients(models, gradients)
    given = gradients or {}
    for name, parameter in _named_parameters(models).items():
        if name in given:
            _reserve_gradient(parameter).copy_(given[name])
        elif name + _VALUES in given:
            indices, values = (given[name + end].to(parameter.device, copy=True) for end in (_INDICES, _VALUES))
            parameter.grad = torch.sparse_coo_tensor(indices, values.to(parameter.dtype), parameter.shape, check_invariants=True)
        else:
            parameter.grad = None


def reserve_gradients(models: Sequence[torch.nn.Module], gradients: Mapping[str, torch.Tensor] | None) -> Callable[[], None]:
    """Allocate what `set_gradients` needs, which may fail on a device with little memory; return a function that undoes it."""
    given = gradients or {}
    made = [parameter for name, parameter in _named_parameters(models).items() if name in given and parameter.grad is None]

    def undo() -> None:
        for parameter in made:
            parameter.grad = None

    try:
        for parameter in made:
            _reserve_gradient(parameter)
    except BaseException:
        undo()
        raise
    return undo


def _reserve_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter to copy another one into, made if there is none that can hold it."""
    present = parameter.grad
    if present is None or present.layout != parameter.layout or present.dtype != parameter.dtype or present.requires_grad:
        parameter.grad = torch.empty_like(parameter, requires_grad=False)
    assert parameter.grad is not None
    return parameter.grad


def mean_gradients(ranks: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float] | None = None) -> dict[str, torch.Tensor]:
    """Return the mean over ranks; a rank without a gradient counts as zero. `weights` multiplies those of each rank.

    >>> mean_gradients([{"0.weight": torch.tensor([1.0])}, {"0.weight": torch.tensor([2.0]), "0.bias": torch.tensor([4.0])}])
    {'0.weight': tensor([1.5000]), '0.bias': tensor([2.])}
    """
    factors = [weight / len(ranks) for weight in weights or [1.0] * len(ranks)]
    means: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        parts = [(rank[name], factor) for rank, factor in zip(ranks, factors, strict=True) if name in rank]
        if name.endswith(_INDICES):
            means[name] = torch.cat([indices for indices, _ in parts], 1)
        elif name.endswith(_VALUES):
            means[name] = torch.cat([values * factor for values, factor in parts])
        else:
            exact = torch.float64 if parts[0][0].dtype == torch.float64 else torch.float32
            summands = [gradient.to(exact) * factor for gradient, factor in parts]
            total = sum(summands[1:], summands[0])  # of sharded tensors too, which do not mix with a plain zero
            means[name] = total.to(parts[0][0].dtype)
    return means


def _parameter_name(name: str) -> str:
    return name.removesuffix(_INDICES).removesuffix(_VALUES)


def _fits_sparse(name: str, gradients: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> bool:
    indices: Any = gradients.get(_parameter_name(name) + _INDICES)
    values: Any = gradients.get(_parameter_name(name) + _VALUES)
    if indices is None or values is None or indices.ndim != 2 or indices.dtype != torch.int64 or values.ndim < 1:
        return False
    rows = indices.shape[0]
    inside = indices.shape[1] == values.shape[0] and 0 < rows <= parameter.ndim and tuple(values.shape[1:]) == tuple(parameter.shape[rows:])
    limits = torch.tensor(tuple(parameter.shape[:rows]))[:, None]
    return inside and bool(((indices.cpu() >= 0) & (indices.cpu() < limits)).all())


_STATE_KEYS = {"windows", "sync_gradients", "loose"}

SavedLoop = tuple[Mapping[str, Any], "Mapping[str, torch.Tensor] | None"]
"""What one rank saved: the state of its windows, and the gradients of open ones."""


def check_loop_state(state: Any, models: Sequence[str]) -> None:
    """Raise unless this is a loop state of these models."""
    if not isinstance(state, Mapping) or set(state) != _STATE_KEYS or not isinstance(state["windows"], list | tuple):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigError(
            f"not a state of a training loop: it has {found} instead of {sorted(_STATE_KEYS)}; pass a result of loop_state()"
        )
    windows = state["windows"]
    if len(windows) != len(models):
        raise ConfigError(
            f"the state of a training loop has windows of {len(windows)} models, but {len(models)} are prepared "
            f"({', '.join(models) or 'none'}): prepare the same models in the same order"
        )
    for window in windows:
        Accumulation.check(window)
    for name in ("sync_gradients", "loose"):
        if not isinstance(state[name], bool):
            raise ConfigError(f"the state of a training loop has {name}={state[name]!r}, instead of True or False: changed or damaged")


def redistribute_loop_state(
    saved: Sequence[SavedLoop],
    *,
    saved_by: int,
    world_size: int,
    batch_ratio: float = 1.0,
    reduced: Mapping[str, torch.Tensor] | None = None,
) -> tuple[dict[str, Any], dict[str, torch.Tensor] | None]:
    """Return the state and gradients that each of `world_size` ranks begins with, from those that `saved_by` ranks saved.

    `batch_ratio` is the size of a global batch of the saved run, divided by the present one. The position in an open window is rounded
    down to whole batches of the present size; a loader that resumes in between hands out a short batch first.
    `reduced` is the mean of the gradients over all ranks, where they were reduced before they were saved; then no rank has its own.

    >>> window = Accumulation()
    >>> closing = window.begin(4, None), window.begin(4, None), window.add_mean()
    >>> state = {"windows": [window.state()], "sync_gradients": False, "loose": False}
    >>> gradients = [{"0.weight": torch.tensor([1.0])}, {"0.weight": torch.tensor([3.0])}]
    >>> begun, mean = redistribute_loop_state([(state, own) for own in gradients], saved_by=2, world_size=1, batch_ratio=2.0)
    >>> begun["windows"][0]["index"], begun["windows"][0]["expected"], mean
    (4, 8.0, {'0.weight': tensor([2.])})
    """
    states = [state for state, _ in saved]
    first = states[0]
    if any(len(state["windows"]) != len(first["windows"]) for state in states):
        raise ConfigError("the ranks saved windows of different numbers of models: these states are not of one run")
    windows, weights = [], []
    for place in range(len(first["windows"])):
        window, factors = _redistribute_window([state["windows"][place] for state in states], saved_by, world_size, batch_ratio)
        windows.append(window)
        weights.append(factors)
    begun = {**first, "windows": windows}
    if reduced is not None:
        shares = [saved_by / world_size if not window["closing"] and window["kind"] == "sum" else 1.0 for window in windows]
        return begun, {name: gradient * shares[int(name.partition(".")[0])] for name, gradient in reduced.items()}
    if all(gradients is None for _, gradients in saved):
        return begun, None
    means: dict[str, torch.Tensor] = {}
    for place, factors in enumerate(weights):
        own = [{name: gradient for name, gradient in (gradients or {}).items() if name.startswith(f"{place}.")} for _, gradients in saved]
        means.update(mean_gradients(own, factors))
    return begun, means


def _redistribute_window(
    ranks: Sequence[Mapping[str, Any]], saved_by: int, world_size: int, ratio: float
) -> tuple[dict[str, Any], list[float]]:
    """Return the window of one model for every new rank, and the factor for the gradients of each old rank before the mean."""
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
    # Sums: all raw gradients and all weights are kept, so each new rank gets its share of both, with one divisor.
    share = saved_by / world_size
    first["total"] = sum(rank["total"] for rank in ranks) / len(ranks) * share
    first["estimate"] *= share / ratio
    divisor = first["carried"] = next((rank["carried"] for rank in ranks if rank["carried"]), None)
    return first, [share * (rank["carried"] or 0.0) / divisor if divisor else share for rank in ranks]
