"""What is not finite: in losses, in norms and in gradients; and which parameter is nearest to the loss.

A gradient that is not finite makes those of everything below it so too, since backward runs from the loss towards the input. So the
first one in the order of the backward pass is where to look. Checks are one pass over the memory; only what fails is looked at closely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["BackwardOrder", "all_finite", "bad_word", "first_bad", "spell_value", "to_numbers"]


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every entry of these is finite. Waits for the device.

    >>> all_finite([torch.ones(2), torch.zeros(0)]), all_finite([torch.tensor([1.0, float("nan")])]), all_finite([torch.full((2,), 3e38)])
    (True, False, True)
    """
    dense = [one for one in map(_entries, tensors) if one.numel()]
    if not dense:
        return True
    norms = torch._foreach_norm(dense)
    if len({(one.device, one.dtype) for one in norms}) > 1:
        norms = tuple(one.to(dense[0].device, torch.float64) for one in norms)
    # a sum of squares overflows long before an entry does: then the entries themselves are looked at
    return bool(torch.stack(list(norms)).isfinite().all()) or all(bool(one.isfinite().all()) for one in dense)


def first_bad(named: Iterable[tuple[str, torch.Tensor | None]]) -> tuple[str, str] | None:
    """The first name whose tensor is not finite, and "nan" or "infinite".

    >>> first_bad([("weight", torch.ones(1)), ("bias", torch.tensor([float("inf")]))])
    ('bias', 'infinite')
    """
    for name, tensor in named:
        if tensor is not None and (word := bad_word(tensor)):
            return name, word
    return None


def bad_word(tensor: torch.Tensor) -> str:
    """"nan" or "infinite" for a tensor that is so somewhere, else "".

    >>> bad_word(torch.tensor([float("nan"), float("inf")])), bad_word(torch.ones(1))
    ('nan', '')
    """
    entries = _entries(tensor)
    if bool(entries.isfinite().all()):
        return ""
    return "nan" if bool(entries.isnan().any()) else "infinite"


def spell_value(value: float) -> str:
    """How a number is told.

    >>> spell_value(float("-inf")), spell_value(2.3456789)
    ('-inf', '2.346')
    """
    return f"{value:.4g}"


def to_numbers(values: Sequence[Any]) -> list[float]:
    """Tensors, or numbers, as numbers: the mean of one with several values. Those on a device are fetched together.

    >>> to_numbers([torch.tensor(1.0), 2.5, torch.tensor([1.0, 2.0])])
    [1.0, 2.5, 1.5]
    """
    if all(type(value) is float for value in values):
        return list(values)
    single = [value if isinstance(value, torch.Tensor) and not value.ndim else torch.as_tensor(value).mean() for value in values]
    if len({(one.dtype, one.device) for one in single}) > 1:
        single = [one.to("cpu", torch.float64) for one in single]
    numbers: list[float] = torch.stack(single).tolist() if single else []
    return numbers


class BackwardOrder:
    """In which order the gradients of a model come, found out in its first backward pass.

    It holds names alone, so that it keeps no model alive.

    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    >>> order = BackwardOrder(model)
    >>> model(torch.ones(1)).backward()
    >>> [name for name, _ in order.named(model)]
    ['1.weight', '0.weight']
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._came: dict[str, int] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(_note, self._came, name))  # type: ignore[no-untyped-call]
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.is_leaf
        ]

    def end(self) -> None:
        """Stops listening, once there is something known."""
        if self._handles and self._came:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def named(self, model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters, the one nearest to the loss first; those that had no gradient last."""
        return sorted(reversed(list(model.named_parameters())), key=lambda entry: self._came.get(entry[0], math.inf))


def _note(came: dict[str, int], name: str, parameter: torch.Tensor) -> None:
    came.setdefault(name, len(came))


def _entries(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):  # sharded: what this process holds of it
        tensor = tensor.to_local()
    return tensor if tensor.layout == torch.strided else tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
