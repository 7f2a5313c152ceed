"""Gradients as something that can be saved: by name ("0.weight" is of the first model), and put back where they were.

A sparse gradient is kept as two tensors, `...::indices` and `...::values`, as it is added up. Nothing here knows of windows or files.
What it promises: names and shapes are compared before any gradient changes; what is put back is a copy, laid out as its parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.errors import ConfigError

__all__ = ["check_gradients", "mean_gradients", "open_gradients", "set_gradients"]

_INDICES, _VALUES = "::indices", "::values"


def _named(models: Sequence[torch.nn.Module | None]) -> dict[str, torch.nn.Parameter]:
    """Parameters by the place of their model and their name, compiled or not."""
    return {
        f"{place}.{name.replace('_orig_mod.', '')}": parameter
        for place, model in enumerate(models)
        if model is not None
        for name, parameter in model.named_parameters()
    }


def open_gradients(models: Sequence[torch.nn.Module | None]) -> dict[str, torch.Tensor]:
    """The gradients that are there, of the models that are given; the tensors themselves, not copies.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> open_gradients([None, model])
    {'1.weight': tensor([[1., 1.]])}
    """
    found: dict[str, torch.Tensor] = {}
    for name, parameter in _named(models).items():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout == torch.sparse_coo:
            found[name + _INDICES], found[name + _VALUES] = gradient._indices(), gradient._values()
        else:
            found[name] = gradient.detach()
    return found


def check_gradients(models: Sequence[torch.nn.Module], gradients: Mapping[str, torch.Tensor] | None) -> None:
    """Raises unless these are gradients of these models."""
    if gradients is None:
        return
    if not isinstance(gradients, Mapping) or not all(isinstance(one, torch.Tensor) for one in gradients.values()):
        raise ConfigError(
            f"gradients to go on with are tensors by name, and not {type(gradients).__name__}: pass what open_gradients() gave"
        )
    parameters = _named(models)
    for name, gradient in gradients.items():
        parameter = parameters.get(_base(name))
        if parameter is None:
            raise ConfigError(
                f"a gradient of {name!r} was saved in an open window of accumulation, and no prepared model has such a parameter (the "
                f"number is the place of the model in prepare, of {len(models)}): prepare the same models in the same order"
            )
        expected = tuple(parameter.shape)
        if _base(name) != name:
            if not _fits_sparsely(name, gradients, parameter):
                raise ConfigError(f"the sparse gradient {_base(name)!r} that was saved does not fit its parameter, of shape {expected}")
        elif tuple(gradient.shape) != expected:
            raise ConfigError(
                f"the gradient of {name!r} that was saved has shape {tuple(gradient.shape)}, and the parameter has {expected}: it is of "
                "another model"
            )


def set_gradients(models: Sequence[torch.nn.Module], gradients: Mapping[str, torch.Tensor] | None) -> None:
    """Puts gradients back; every other parameter of these models has none afterwards."""
    check_gradients(models, gradients)
    given = gradients or {}
    for name, parameter in _named(models).items():
        if name in given:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(given[name])
        elif name + _VALUES in given:
            indices, values = (given[name + end].to(parameter.device, copy=True) for end in (_INDICES, _VALUES))
            parameter.grad = torch.sparse_coo_tensor(indices, values.to(parameter.dtype), parameter.shape, check_invariants=True)
        else:
            parameter.grad = None


def mean_gradients(ranks: Sequence[Mapping[str, torch.Tensor]], weights: Sequence[float] | None = None) -> dict[str, torch.Tensor]:
    """The mean over ranks; a rank without a gradient counts as zero. `weights` multiplies those of each rank.

    >>> mean_gradients([{"0.weight": torch.tensor([1.0])}, {"0.weight": torch.tensor([2.0]), "0.bias": torch.tensor([4.0])}])
    {'0.weight': tensor([1.5000]), '0.bias': tensor([2.])}
    """
    factors = [weight / len(ranks) for weight in weights or [1.0] * len(ranks)]
    means: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for one in ranks for name in one):
        parts = [(one[name], factor) for one, factor in zip(ranks, factors, strict=True) if name in one]
        if name.endswith(_INDICES):
            means[name] = torch.cat([indices for indices, _ in parts], 1)
        elif name.endswith(_VALUES):
            means[name] = torch.cat([values * factor for values, factor in parts])
        else:
            exact = torch.float64 if parts[0][0].dtype == torch.float64 else torch.float32
            total = sum((gradient.to(exact) * factor for gradient, factor in parts), torch.zeros((), dtype=exact))
            means[name] = total.to(parts[0][0].dtype)
    return means


def _base(name: str) -> str:
    return name.removesuffix(_INDICES).removesuffix(_VALUES)


def _fits_sparsely(name: str, gradients: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> bool:
    indices: Any = gradients.get(_base(name) + _INDICES)
    values: Any = gradients.get(_base(name) + _VALUES)
    if indices is None or values is None or indices.ndim != 2 or indices.dtype != torch.int64 or values.ndim < 1:
        return False
    rows = indices.shape[0]
    inside = indices.shape[1] == values.shape[0] and 0 < rows <= parameter.ndim and tuple(values.shape[1:]) == tuple(parameter.shape[rows:])
    limits = torch.tensor(tuple(parameter.shape[:rows]))[:, None]
    return inside and bool(((indices.cpu() >= 0) & (indices.cpu() < limits)).all())
