"""Tensors in pieces: which part of a tensor a piece is, what two of them have in common, and where that lies in a file. Without torch.

A tensor that is sharded over ranks is stored as the pieces that they hold, each a box of it: where it begins in every dim and how far it
goes. A file of pieces is a safetensors file with one entry for each piece, under the name of its tensor; its metadata say of every entry
the shape of the whole tensor and where the piece begins. The key and the form are those of torch's own sharded safetensors files
(`HuggingFaceStorageWriter(save_distributed=True)`), with the shape besides, so torch's reader reads them too.

Whoever wants a box of a tensor asks every piece for what they have in common. Pieces of one tensor neither overlap nor leave holes;
`gathered` finds out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.tensors import Entry, Layout

__all__ = ["SHARDING", "Box", "Place", "common", "describe", "gathered", "places_in", "spans", "whole"]

SHARDING: Final = "DCP_SHARDING_INFO"
"""The key in the metadata of a file of pieces."""

_OFFSETS: Final = "saved_offsets"
_SHAPE: Final = "global_shape"
_LARGEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins in each dim, and how far it goes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def relative_to(self, other: Box) -> Box:
        """The same box, counted from where the other begins.

        >>> Box((4, 1), (2, 2)).relative_to(Box((3, 0), (9, 9)))
        Box(offset=(1, 1), shape=(2, 2))
        """
        return Box(tuple(mine - its for mine, its in zip(self.offset, other.offset, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """What takes this box out of a tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Place:
    """A piece: which box it is of a tensor of which shape."""

    shape: tuple[int, ...]
    box: Box


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor.

    >>> whole((2, 3))
    Box(offset=(0, 0), shape=(2, 3))
    """
    return Box((0,) * len(shape), tuple(shape))


def common(one: Box, other: Box) -> Box | None:
    """What two boxes of a tensor have in common; None if that is nothing.

    >>> common(Box((0, 0), (4, 4)), Box((2, 3), (4, 4)))
    Box(offset=(2, 3), shape=(2, 1))
    >>> common(Box((0,), (2,)), Box((2,), (2,))) is None
    True
    """
    offset = tuple(map(max, one.offset, other.offset))
    ends = (
        min(start + length, begin + long)
        for start, length, begin, long in zip(one.offset, one.shape, other.offset, other.shape, strict=True)
    )
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return Box(offset, shape) if all(length > 0 for length in shape) else None


def spans(part: Box, shape: Sequence[int], gap: int = 0) -> list[tuple[int, int]]:
    """Which elements of a tensor of this shape, stored row by row, belong to a part of it: (first, end) of every run, in order.

    Runs with at most `gap` other elements between them are one.

    >>> spans(Box((1, 1), (2, 2)), (4, 4))
    [(5, 7), (9, 11)]
    >>> spans(Box((1, 1), (2, 2)), (4, 4), gap=2)
    [(5, 11)]
    >>> spans(Box((1, 0), (2, 4)), (4, 4))
    [(4, 12)]
    """
    if not part.volume:
        return []
    runs, stride = [(0, 1)], 1
    for start, length, size in zip(reversed(part.offset), reversed(part.shape), reversed(tuple(shape)), strict=True):
        first, last = runs[0][0], runs[-1][1]
        if len(runs) == 1 and (length == 1 or stride - (last - first) <= gap):
            runs = [(start * stride + first, (start + length - 1) * stride + last)]
        else:
            runs = [(row * stride + begin, row * stride + end) for row in range(start, start + length) for begin, end in runs]
        stride *= size
    return runs


# -- in a file --------------------------------------------------------------------------------------------------------


def describe(places: Mapping[str, Place]) -> dict[str, str]:
    """What the metadata of a file of these pieces say.

    >>> describe({"weight": Place((4, 2), Box((2, 0), (2, 2)))})
    {'DCP_SHARDING_INFO': '{"weight":{"saved_offsets":[2,0],"global_shape":[4,2]}}'}
    """
    told = {name: {_OFFSETS: list(place.box.offset), _SHAPE: list(place.shape)} for name, place in places.items()}
    return {SHARDING: strict_json.dump(told).decode()}


def places_in(layout: Layout, where: str) -> dict[str, Place]:
    """Which pieces a file holds, by the names of their tensors; `where` names it in errors."""
    said = strict_json.parse(layout.metadata.get(SHARDING, "null").encode(), f"The metadata of {where}")
    if not isinstance(said, dict) or said.keys() != layout.entries.keys():
        raise CheckpointError(f"{where} does not say of each of its tensors which piece it is.")
    return {name: _place(entry, said[name], where) for name, entry in layout.entries.items()}


def _place(entry: Entry, said: Any, where: str) -> Place:
    offset, shape = (_counts(said.get(key) if isinstance(said, dict) else None) for key in (_OFFSETS, _SHAPE))
    if offset is None or shape is None or not len(offset) == len(shape) == len(entry.shape):
        raise CheckpointError(f"{where} does not say where the piece of {entry.name[:100]!r} begins, and in what.")
    count = math.prod(filter(None, shape))  # a size of 0 hides the others, which nobody can count
    if count > _LARGEST // 8 or any(start + length > size for start, length, size in zip(offset, entry.shape, shape, strict=True)):
        raise CheckpointError(f"{where}: the piece of {entry.name[:100]!r} reaches beyond its tensor.")
    return Place(shape, Box(offset, entry.shape))


def _counts(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one <= _LARGEST for one in value):
        return None
    return tuple(value)


def gathered(boxes: Iterable[Box], wanted: Box) -> Iterator[tuple[int, Box]]:
    """What each of these boxes has of a wanted one, by its number; ValueError if that is not all of it, or some of it twice.

    >>> list(gathered([Box((0,), (2,)), Box((2,), (2,))], Box((1,), (2,))))
    [(0, Box(offset=(1,), shape=(1,))), (1, Box(offset=(2,), shape=(1,)))]
    """
    found = [(number, part) for number, box in enumerate(boxes) if (part := common(box, wanted)) is not None]
    if sum(part.volume for _, part in found) != wanted.volume:
        raise ValueError("the pieces are not the whole")
    if any(common(one, other) for place, (_, one) in enumerate(found) for _, other in found[:place]):
        raise ValueError("two pieces overlap")
    yield from found
