"""What stands in a module for a weight that is away: it has a shape and a type, and no values of its own.

torch computes with tensors without memory all the same: a product of numbers and such a tensor can come out as whatever was in memory
before, without a word. So a stand-in looks at every operation that it is part of. What concerns it alone (its shape, a transposed view, a
conversion) gives another stand-in. Together with a tensor that has values, its own are brought for that one operation, which is right
but slow, and said once for each weight. Where they cannot be brought, or would be written to, it is an error that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, Protocol

import torch

from slipstream.errors import StateError

__all__ = ["KEEPER", "NAME", "Keeper", "StandIn", "StandInBuffer", "is_stand_in", "stand_in"]

KEEPER: Final = "_slipstream_keeper"
"""The attribute of a stand-in that gives who brings its values, or None where nobody does."""
NAME: Final = "_slipstream_name"
"""The attribute of a stand-in that says which weight it stands for."""


class Keeper(Protocol):
    """Who brings the values of a weight that is away."""

    def values_of(self, stand_in: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """The values, inside of the block."""


def _apply(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        everything = list(_tensors([*args, *kwargs.values()]))
        away = [one for one in everything if isinstance(one, (StandIn, StandInBuffer)) and one.is_meta]
        if away and any(not one.is_meta and one.dim() for one in everything):
            return _with_values(function, args, kwargs, away)
        result = function(*args, **kwargs)
        if function in torch.overrides.get_default_nowrap_functions() or not isinstance(result, torch.Tensor) or not result.is_meta:
            return result
        return result if isinstance(result, (StandIn, StandInBuffer)) else result.as_subclass(StandInBuffer)


def _with_values(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], away: Sequence[torch.Tensor]) -> Any:
    """The operation with the weights themselves in the places of their stand-ins."""
    name = getattr(function, "__name__", "")
    if name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
        raise StateError(_refusal(away[0], "written to"))
    with ExitStack() as stack:
        values: dict[int, torch.Tensor] = {}
        for one in away:
            keeper: Keeper | None = getattr(one, KEEPER, lambda: None)()
            if keeper is None:
                raise StateError(_refusal(one, "used"))
            if id(one) not in values:
                values[id(one)] = stack.enter_context(keeper.values_of(one))
        return function(*_replaced(args, values), **{key: _replaced([value], values)[0] for key, value in kwargs.items()})


def _replaced(given: Iterable[Any], values: Mapping[int, torch.Tensor]) -> list[Any]:
    return [type(one)(_replaced(one, values)) if type(one) in (list, tuple) else values.get(id(one), one) for one in given]


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _refusal(tensor: torch.Tensor, done: str) -> str:
    name = getattr(tensor, NAME, "something made of an offloaded weight")
    return (
        f"{name} is away (it is offloaded), and was {done}: its values are there while the block that it is part of runs. Call that block "
        "as a whole; or bring the weights with `with slipstream.utils.align_module_device(module):`; or, if a module uses the weights of "
        "its children itself, name its class in preload_module_classes when you dispatch the model."
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
    slipstream.errors.StateError: head.weight is away (it is offloaded), and was used: its values are there while ...
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
