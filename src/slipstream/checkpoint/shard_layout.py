"""Pieces of sharded tensors: which box of a tensor a piece is, what two boxes share, and where that lies in a file.

Without torch.

A sharded tensor is stored as the pieces that ranks hold. A file of pieces is a safetensors file with one entry per piece under the name
of its tensor; its metadata give the shape of the whole tensor and the offset of each piece. Key and form are those of torch's own sharded
safetensors files (`HuggingFaceStorageWriter(save_distributed=True)`), with the shape added, so torch reads them too. Pieces of one tensor
neither overlap nor leave holes; `cover_box` verifies that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.safetensors_layout import SafetensorsLayout, TensorEntry

__all__ = [
    "SHARDING",
    "Box",
    "PiecePosition",
    "intersect",
    "describe_positions",
    "cover_box",
    "read_positions",
    "element_runs",
    "whole_box",
]

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
        """Return the same box, counted from where the other begins.

        >>> Box((4, 1), (2, 2)).relative_to(Box((3, 0), (9, 9)))
        Box(offset=(1, 1), shape=(2, 2))
        """
        return Box(tuple(mine - its for mine, its in zip(self.offset, other.offset, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return what takes this box out of a tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class PiecePosition:
    """A piece: which box it is of a tensor of which shape."""

    shape: tuple[int, ...]
    box: Box


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor.

    >>> whole_box((2, 3))
    Box(offset=(0, 0), shape=(2, 3))
    """
    return Box((0,) * len(shape), tuple(shape))


def intersect(box: Box, other: Box) -> Box | None:
    """Return what two boxes of a tensor have in common; None if that is nothing.

    >>> intersect(Box((0, 0), (4, 4)), Box((2, 3), (4, 4)))
    Box(offset=(2, 3), shape=(2, 1))
    >>> intersect(Box((0,), (2,)), Box((2,), (2,))) is None
    True
    """
    offset = tuple(map(max, box.offset, other.offset))
    ends = (
        min(start + length, begin + long)
        for start, length, begin, long in zip(box.offset, box.shape, other.offset, other.shape, strict=True)
    )
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return Box(offset, shape) if all(length > 0 for length in shape) else None


def element_runs(part: Box, shape: Sequence[int], gap: int = 0) -> list[tuple[int, int]]:
    """Return which elements of a tensor of this shape, stored row by row, belong to a part of it: (first, end) of every run, in order.

    Runs with at most `gap` other elements between them are one.

    >>> element_runs(Box((1, 1), (2, 2)), (4, 4))
    [(5, 7), (9, 11)]
    >>> element_runs(Box((1, 1), (2, 2)), (4, 4), gap=2)
    [(5, 11)]
    >>> element_runs(Box((1, 0), (2, 4)), (4, 4))
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


def describe_positions(places: Mapping[str, PiecePosition]) -> dict[str, str]:
    """Return what the metadata of a file of these pieces say.

    >>> describe_positions({"weight": PiecePosition((4, 2), Box((2, 0), (2, 2)))})
    {'DCP_SHARDING_INFO': '{"weight":{"saved_offsets":[2,0],"global_shape":[4,2]}}'}
    """
    told = {name: {_OFFSETS: list(place.box.offset), _SHAPE: list(place.shape)} for name, place in places.items()}
    return {SHARDING: strict_json.dump(told).decode()}


def read_positions(layout: SafetensorsLayout, where: str) -> dict[str, PiecePosition]:
    """Return which pieces a file holds, by the names of their tensors; `where` names it in errors."""
    said = strict_json.parse(layout.metadata.get(SHARDING, "null").encode(), f"The metadata of {where}")
    if not isinstance(said, dict) or said.keys() != layout.entries.keys():
        raise CheckpointError(f"{where} does not say of each of its tensors which piece it is.")
    return {name: _read_position(entry, said[name], where) for name, entry in layout.entries.items()}


def _read_position(entry: TensorEntry, said: Any, where: str) -> PiecePosition:
    offset, shape = (_counts(said.get(key) if isinstance(said, dict) else None) for key in (_OFFSETS, _SHAPE))
    if offset is None or shape is None or not len(offset) == len(shape) == len(entry.shape):
        raise CheckpointError(f"{where} does not say where the piece of {entry.name[:100]!r} begins, and in what.")
    count = math.prod(filter(None, shape))  # a size of 0 hides the others, which nobody can count
    if count > _LARGEST // 8 or any(start + length > size for start, length, size in zip(offset, entry.shape, shape, strict=True)):
        raise CheckpointError(f"{where}: the piece of {entry.name[:100]!r} reaches beyond its tensor.")
    return PiecePosition(shape, Box(offset, entry.shape))


def _counts(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(
        isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= _LARGEST for entry in value
    ):
        return None
    return tuple(value)


def cover_box(boxes: Iterable[Box], wanted: Box) -> Iterator[tuple[int, Box]]:
    """Yield what each of these boxes has of a wanted one, by its number; ValueError if that is not all of it, or some of it twice.

    >>> list(cover_box([Box((0,), (2,)), Box((2,), (2,))], Box((1,), (2,))))
    [(0, Box(offset=(1,), shape=(1,))), (1, Box(offset=(2,), shape=(1,)))]
    """
    found = [(number, part) for number, box in enumerate(boxes) if (part := intersect(box, wanted)) is not None]
    if sum(part.volume for _, part in found) != wanted.volume:
        raise ValueError("the pieces are not the whole")
    if any(intersect(entry, other) for place, (_, entry) in enumerate(found) for _, other in found[:place]):
        raise ValueError("two pieces overlap")
    yield from found
