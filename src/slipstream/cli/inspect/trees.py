"""Two states compared: where the values in their trees differ, and how the tensors that they name do.

Trees are those of `docs/checkpoint-format.md`: JSON with objects of one key that begins with "$". Both are walked side by side, by
the keys that the states have for their users; every difference is a line with the place and both values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from slipstream.cli.inspect.numbers import Difference, compare
from slipstream.cli.inspect.parts import Stored

__all__ = ["Apart", "compare_stored", "compare_trees"]

_PAIRS: Final = ("$dict", "$ordered", "$counter", "$defaultdict")
_ITEMS: Final = ("$tuple", "$set", "$frozenset", "$deque")
_TENSORS: Final = ("$tensor", "$array", "$numbers")
_ABSENT: Final = object()


@dataclass(frozen=True)
class Apart:
    """One place in which two checkpoints differ; `one` and `other` are None where it is missing on that side."""

    place: str
    one: str | None
    other: str | None
    difference: Difference | None = None
    """For two tensors of one type and shape."""


def compare_trees(
    one: tuple[Any, Mapping[str, Stored]], other: tuple[Any, Mapping[str, Stored]], ignored: frozenset[str] = frozenset()
) -> Iterator[Apart]:
    """Where two parts differ; places in `ignored` do not count."""
    for apart in _Walk(one[1], other[1]).nodes(one[0], other[0], ""):
        if apart.place not in ignored:
            yield apart


def compare_stored(place: str, one: Stored, other: Stored) -> Apart | None:
    """How two tensors differ; None if they are equal."""
    if one.entry.dtype != other.entry.dtype or one.entry.shape != other.entry.shape:
        return Apart(place, one.described(), other.described())
    difference = compare(one.entry.dtype, one.pieces(), other.pieces())
    return Apart(place, one.described(), other.described(), difference) if difference.changed else None


class _Walk:
    def __init__(self, one: Mapping[str, Stored], other: Mapping[str, Stored]) -> None:
        self._one = one
        self._other = other

    def nodes(self, one: Any, other: Any, place: str) -> Iterator[Apart]:
        if one is _ABSENT or other is _ABSENT:
            yield Apart(place or "value", self._text(one, self._one), self._text(other, self._other))
            return
        left, right = _children(one), _children(other)
        if left is not None and right is not None and _tag(one) == _tag(other):
            for key in dict.fromkeys([*left, *right]):
                yield from self.nodes(left.get(key, _ABSENT), right.get(key, _ABSENT), f"{place}{key}".lstrip("."))
        elif _tag(one) in _TENSORS and _tag(one) == _tag(other):
            yield from self._tensors(one, other, place or "value")
        elif one != other or type(one) is not type(other):
            yield Apart(place or "value", self._text(one, self._one), self._text(other, self._other))

    def _tensors(self, one: dict[str, Any], other: dict[str, Any], place: str) -> Iterator[Apart]:
        tag = _tag(one)
        left, right = self._one.get(str(one[tag])), self._other.get(str(other[tag]))
        if left is None or right is None or {**one, tag: ""} != {**other, tag: ""}:
            yield Apart(place, self._text(one, self._one), self._text(other, self._other))
        elif (apart := compare_stored(place, left, right)) is not None:
            yield apart

    def _text(self, node: Any, tensors: Mapping[str, Stored]) -> str | None:
        if node is _ABSENT:
            return None
        tag = _tag(node)
        if tag not in _TENSORS:
            return json.dumps(node)
        stored = tensors.get(str(node[tag]))
        held = "a tensor that is not there" if stored is None else stored.described()
        rest = {key: value for key, value in node.items() if key != tag}
        return f"{held} {json.dumps(rest)}" if rest else held


def _tag(node: Any) -> str:
    """What kind of value a node stands for."""
    if isinstance(node, dict):
        return next((key for key in node if key.startswith("$")), "object")
    return "list" if isinstance(node, list) else ""


def _children(node: Any) -> dict[str, Any] | None:
    """What a container holds, by the words that come after its own place; None if it is no container."""
    if isinstance(node, list):
        return {f"[{number}]": item for number, item in enumerate(node)}
    if not isinstance(node, dict):
        return None
    tag = _tag(node)
    if tag == "object":
        return {f".{key}": item for key, item in node.items()}
    held: Any = node[tag]
    if tag in ("$defaultdict", "$deque") and isinstance(held, list) and len(held) == 2:
        held = held[1]
    if not isinstance(held, list):
        return None
    if tag in _PAIRS and all(isinstance(pair, list) and len(pair) == 2 for pair in held):
        return {f"[{json.dumps(key)}]": item for key, item in held}
    return {f"[{number}]": item for number, item in enumerate(held)} if tag in _ITEMS else None
