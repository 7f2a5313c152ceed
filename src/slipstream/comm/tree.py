"""Nested data: any mix of dict, Mapping, list, tuple, namedtuple and dataclass with leaves at the ends.

Everything that the library does to nested data (send, gather, slice, convert) goes through `flatten` or `map_leaves`, so one
place knows how a container is taken apart and put together again. The result has the types, the key order and the
attributes of the input, and the input is never changed. Mappings are walked in the sorted order of their keys, so that two
processes whose dicts were filled in another order still mean the same leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, TypeGuard

__all__ = [
    "children",
    "flatten",
    "honor_type",
    "is_dataclass_instance",
    "is_namedtuple",
    "is_node",
    "map_leaves",
    "rebuild",
    "refilled",
    "spell",
    "unflatten",
]

_Leaf = Any
_Tree = Any


def is_namedtuple(data: object) -> bool:
    """Whether this is an instance of a namedtuple class.

    >>> from collections import namedtuple
    >>> is_namedtuple(namedtuple("P", "x y")(1, 2)), is_namedtuple((1, 2))
    (True, False)
    """
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_dataclass_instance(data: object) -> bool:
    """Whether this is an instance (not the class) of a dataclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def is_node(data: Any) -> TypeGuard[Any]:
    """Whether this is a container that is taken apart, rather than a leaf."""
    return _is_node_type(type(data))  # type: ignore[arg-type]  # mypy does not take a class for hashable


@lru_cache(maxsize=1024)
def _is_node_type(kind: type) -> bool:
    return issubclass(kind, (list, tuple, Mapping)) or dataclasses.is_dataclass(kind)


def _sorted_keys(data: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(data)
    except TypeError:  # keys of several types have no order of their own
        return sorted(data, key=lambda key: (type(key).__name__, repr(key)))


def children(node: Any) -> list[tuple[Any, Any]]:
    """The (key, value) pairs of a container in the order in which every process walks them.

    >>> children({"b": 1, "a": 2})
    [('a', 2), ('b', 1)]
    """
    if isinstance(node, Mapping):
        return [(key, node[key]) for key in _sorted_keys(node)]
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node) if hasattr(node, field.name)]


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """A list, tuple or namedtuple of the type of `obj` with the items of `generator`.

    >>> honor_type((1, 2), [3, 4])
    (3, 4)
    """
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def rebuild(node: Any, values: list[Any]) -> Any:
    """A container like `node` that holds `values`, given in the order of `children(node)`.

    Where a class of the user's cannot be made anew with other items, the result is a plain list, tuple or dict.
    """
    if type(node) is list:
        return list(values)
    if isinstance(node, list):
        return _rebuild_list(node, values)
    if isinstance(node, tuple):
        return _rebuild_tuple(node, values)
    if isinstance(node, Mapping):
        return _rebuild_mapping(node, dict(zip(_sorted_keys(node), values, strict=True)))
    new = copy.copy(node)
    for (name, _), value in zip(children(node), values, strict=True):
        object.__setattr__(new, name, value)  # frozen dataclasses too
    return new


_CONSTRUCTOR_REFUSED = (TypeError, ValueError, AttributeError, LookupError)
"""What the constructor of a class raises that takes something else than its items."""


def _rebuild_list(node: list[Any], values: list[Any]) -> Any:
    try:
        new = copy.copy(node)  # keeps attributes, and asks nothing of a constructor that takes other arguments
    except _CONSTRUCTOR_REFUSED:
        return list(values)
    if new is node or not isinstance(new, list):
        return list(values)
    list.__setitem__(new, slice(None), values)
    return new


def _rebuild_tuple(node: tuple[Any, ...], values: list[Any]) -> Any:
    if is_namedtuple(node):
        return type(node)._make(values)  # type: ignore[attr-defined]  # a subclass may have a constructor of its own
    try:
        new = honor_type(node, values)
    except _CONSTRUCTOR_REFUSED:
        return tuple(values)
    return new if _same_items(new, values) else tuple(values)


def _same_items(new: Any, values: list[Any]) -> bool:
    """Whether a constructor took the values for its items, and not for something else."""
    return len(new) == len(values) and all(one is other for one, other in zip(new, values, strict=True))


def _rebuild_mapping(node: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    ordered = {key: values[key] for key in node}
    if type(node) is dict:
        return ordered
    if isinstance(node, types.MappingProxyType):
        return types.MappingProxyType(ordered)
    return refilled(node, ordered) if isinstance(node, MutableMapping) else _constructed(node, ordered)


def refilled(mapping: MutableMapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping like this one with other values for its keys; the one that was given stays as it is.

    A copy keeps default factories and attributes of subclasses. A copy that shares its storage with the original cannot be written to:
    then a new one is made from the values, or a plain dict, if the class does not take them.

    >>> from collections import OrderedDict
    >>> refilled(OrderedDict(a=1), {"a": 2})
    OrderedDict([('a', 2)])
    """
    new = copy.copy(mapping)
    for key, value in values.items():
        before = mapping[key]
        if mapping[key] is not before:  # values that are made when asked for: a change could not be told
            return _constructed(mapping, values)
        new[key] = value
        if mapping[key] is not before:
            mapping[key] = before
            return _constructed(mapping, values)
    return new


def _constructed(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    try:
        new = type(mapping)(values)  # type: ignore[call-arg]
    except _CONSTRUCTOR_REFUSED:
        return values
    return new if new.keys() == values.keys() else values


def map_leaves(function: Callable[[_Leaf], Any], data: _Tree, stop: Callable[[Any], bool] | None = None) -> _Tree:
    """The same structure with `function` applied to every leaf; `stop(node)` makes a container count as a leaf.

    >>> map_leaves(str, {"a": [1, (2, 3)]})
    {'a': ['1', ('2', '3')]}
    """
    if is_node(data) and not (stop is not None and stop(data)):
        return rebuild(data, [map_leaves(function, value, stop) for _, value in children(data)])
    return function(data)


def flatten(data: _Tree, stop: Callable[[Any], bool] | None = None) -> list[_Leaf]:
    """All leaves in the order in which every process walks them.

    >>> flatten({"b": [1, 2], "a": 3})
    [3, 1, 2]
    """
    leaves: list[_Leaf] = []
    _collect(data, stop, leaves)
    return leaves


def _collect(data: _Tree, stop: Callable[[Any], bool] | None, leaves: list[_Leaf]) -> None:
    if is_node(data) and not (stop is not None and stop(data)):
        for _, value in children(data):
            _collect(value, stop, leaves)
    else:
        leaves.append(data)


def unflatten(data: _Tree, leaves: Iterable[_Leaf], stop: Callable[[Any], bool] | None = None) -> _Tree:
    """The structure of `data` with other leaves, given in the order of `flatten`.

    >>> unflatten({"b": [1, 2], "a": 3}, ["x", "y", "z"])
    {'b': ['y', 'z'], 'a': 'x'}
    """
    supply = iter(leaves)
    return map_leaves(lambda _: next(supply), data, stop)


def spell(data: _Tree, leaf: Callable[[_Leaf], str], stop: Callable[[Any], bool] | None = None) -> str:
    """The structure as text, with `leaf` spelling the leaves: what processes compare and what messages show.

    >>> spell({"b": [1, 2], "a": 3}, lambda value: type(value).__name__)
    '{a: int, b: [int, int]}'
    """
    if not is_node(data) or (stop is not None and stop(data)):
        return leaf(data)
    inner = [(key, spell(value, leaf, stop)) for key, value in children(data)]
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key}: {text}" for key, text in inner) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(text for _, text in inner) + "]"
    if isinstance(data, tuple) and not is_namedtuple(data):
        return "(" + ", ".join(text for _, text in inner) + ")"
    fields = ", ".join(f"{key}={text}" for key, text in inner)
    return f"{type(data).__name__}({fields})"
