"""What stands in a module for a weight that is away: it has a shape and a type, and refuses to be computed with.

torch itself does not: a product of numbers and a tensor without memory can come out as whatever was in memory before, without a word.
So a stand-in looks at every operation that it is part of. What concerns it alone (its shape, a transposed view, a conversion) gives another
stand-in; together with a tensor that has values it is an error that names the weight and says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from slipstream.errors import StateError

__all__ = ["NAME", "StandIn", "StandInBuffer", "is_stand_in", "stand_in"]

NAME: Final = "_slipstream_name"
"""The attribute of a stand-in that says which weight it stands for."""


def _apply(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        everything = list(_tensors([*args, *kwargs.values()]))
        away = [one for one in everything if isinstance(one, (StandIn, StandInBuffer)) and one.is_meta]
        if away and any(not one.is_meta and one.dim() for one in everything):
            raise StateError(_refusal(next((one for one in away if hasattr(one, NAME)), away[0])))
        result = function(*args, **kwargs)
        if function in torch.overrides.get_default_nowrap_functions() or not isinstance(result, torch.Tensor) or not result.is_meta:
            return result
        return result if isinstance(result, (StandIn, StandInBuffer)) else result.as_subclass(StandInBuffer)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _refusal(tensor: torch.Tensor) -> str:
    name = getattr(tensor, NAME, "a weight")
    return (
        f"{name} is offloaded, and was used while it is away: its values are there while the block that it is part of runs. Call that "
        "block as a whole; or bring the weights with `with slipstream.utils.align_module_device(module):`; or, if a module uses the weights "
        "of its children itself, name its class in preload_module_classes when you dispatch the model."
    )


class StandIn(torch.nn.Parameter):
    """For a Parameter."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _apply(func, args, kwargs or {})


class StandInBuffer(torch.Tensor):
    """For a buffer, and for what is made of a stand-in alone."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _apply(func, args, kwargs or {})


def stand_in(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The same tensor, which is on the meta device, as a stand-in for the weight `name`; kinds of tensors of others stay what they are.

    >>> torch.ones(2, 3) @ stand_in(torch.empty(3, 3, device="meta"), "head.weight")
    Traceback (most recent call last):
    slipstream.errors.StateError: head.weight is offloaded, and was used while it is away: ...
    """
    if type(tensor) is torch.nn.Parameter:  # changed in place: others may hold it, and ties are known by identity
        tensor.__class__ = StandIn
    elif type(tensor) is torch.Tensor:
        tensor.__class__ = StandInBuffer
    if is_stand_in(tensor):
        setattr(tensor, NAME, name)
    return tensor


def is_stand_in(tensor: Any) -> bool:
    """Whether a tensor stands for one that is away."""
    return isinstance(tensor, (StandIn, StandInBuffer))
