"""Values of any kind as what can be written down: numbers, texts, lists and dicts. Never an error: what is unknown becomes its text."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import count
from typing import Any

__all__ = ["flat", "number", "plain"]

_MANY = 1000
"""Tensors with more elements are described and not written out."""
_DEEPEST = 50
"""Levels of nested data that are written out; what is deeper is three dots."""


def plain(value: Any) -> Any:
    """The value as data that JSON and YAML know; numbers that they do not know (nan, inf) become texts.

    >>> import torch
    >>> plain({"lr": torch.tensor(0.5), "dtype": torch.float32, "betas": (0.9, float("inf")), "layers": {3, 1}, 4: None})
    {'lr': 0.5, 'dtype': 'torch.float32', 'betas': [0.9, 'inf'], 'layers': [1, 3], '4': None}
    """
    return _plain(value, ())


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Enum):
        return _plain(value.value, above)
    if isinstance(value, int | float):
        return _finite(value)
    if id(value) in above:
        return "(the same again)"
    if len(above) >= _DEEPEST:
        return "..."
    above = (*above, id(value))
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return {name: _plain(one, above) for name, one in vars(value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name, None), above) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(_plain(key, above)): _plain(one, above) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(one, above) for one in value), key=lambda one: (str(type(one)), str(one)))
    if isinstance(value, list | tuple):
        return [_plain(one, above) for one in value]
    return _from_array(value, above)


def _finite(value: float) -> Any:
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(value) else str(float(value))


def _from_array(value: Any, above: tuple[int, ...]) -> Any:
    """Tensors and arrays, and numbers of numpy, as their elements; anything else as its text."""
    size = _count(value)
    if size is None:
        return _text(value)
    if size > _MANY:
        return f"{type(value).__name__} of {tuple(value.shape)}"
    try:
        elements = value.tolist()
    except Exception:  # without data (the meta device), or of a kind whose elements cannot be had
        return f"{type(value).__name__} of {tuple(value.shape)}"
    return _plain(elements, above)


def _text(value: Any) -> str:
    """What stands for an object: the name of a class or function, which is the same in every run; else what str() says."""
    if isinstance(value, functools.partial):
        return f"partial of {_text(value.func)}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return value.__qualname__
    try:
        return str(value)
    except Exception as error:  # an object of the user's whose text is broken; the settings of a run are no place to find out
        return f"({type(value).__name__}, whose text fails with {type(error).__name__})"


def _count(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    if not hasattr(value, "tolist") or not isinstance(shape, tuple):
        return None
    return math.prod(shape)


def number(value: Any) -> Any:
    """A number where the value is one in another form (a tensor or array of one element); any other value as it is.

    >>> import torch
    >>> number(torch.tensor([3])), number("text"), number(True)
    (3, 'text', True)
    """
    return value.item() if _count(value) == 1 and hasattr(value, "item") else value


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with names that are joined by slashes; a name that comes again gets a number, so that both values are kept.

    >>> flat({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "b/c": 4})
    {'a': 1, 'b/c': 2, 'b/d/e': 3, 'b/c-2': 4}
    """
    found: dict[str, Any] = {}
    for name, value in _flat(values, prefix, _DEEPEST):
        if name in found:
            name = next(again for number in count(2) if (again := f"{name}-{number}") not in found)
        found[name] = value
    return found


def _flat(values: Mapping[str, Any], prefix: str, levels: int) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and levels:
            yield from _flat(value, f"{prefix}{name}/", levels - 1)
        else:
            yield f"{prefix}{name}", value
