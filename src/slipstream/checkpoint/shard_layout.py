"""The geometry of sharded tensors: the box that each shard covers, how boxes intersect, and where their elements lie in a file.

Each rank stores the shards that it holds in shard files: safetensors files with one entry per shard, under the name of its tensor. The
metadata give the shape of the full tensor and the offset of each shard, in the format of torch's own sharded safetensors files
(`HuggingFaceStorageWriter(save_distributed=True)`) with the shape added, so torch reads them too. The shards of a tensor neither overlap
nor leave gaps; `cover_box` verifies that. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
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
    "ShardPosition",
    "intersect",
    "describe_positions",
    "cover_box",
    "read_positions",
    "element_runs",
    "whole_box",
]

SHARDING: Final = "DCP_SHARDING_INFO"
"""The key in the metadata of a shard file."""

_OFFSETS: Final = "saved_offsets"
_SHAPE: Final = "global_shape"
_LARGEST: Final = 2**63 - 1
_MOST_CORNERS: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: its offset and its length in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def relative_to(self, other: Box) -> Box:
        """Return this box with offsets relative to those of `other`.

        >>> Box((4, 1), (2, 2)).relative_to(Box((3, 0), (9, 9)))
        Box(offset=(1, 1), shape=(2, 2))
        """
        return Box(tuple(start - origin for start, origin in zip(self.offset, other.offset, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box from a tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class ShardPosition:
    """Where a shard lies: the shape of the full tensor, and the box of it that the shard holds."""

    shape: tuple[int, ...]
    box: Box


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of this shape.

    >>> whole_box((2, 3))
    Box(offset=(0, 0), shape=(2, 3))
    """
    return Box((0,) * len(shape), tuple(shape))


def intersect(box: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor, or None if it is empty.

    >>> intersect(Box((0, 0), (4, 4)), Box((2, 3), (4, 4)))
    Box(offset=(2, 3), shape=(2, 1))
    >>> intersect(Box((0,), (2,)), Box((2,), (2,))) is None
    True
    """
    offset = tuple(map(max, box.offset, other.offset))
    ends, other_ends = ([start + length for start, length in zip(each.offset, each.shape, strict=True)] for each in (box, other))
    shape = tuple(min(end, other_end) - start for start, end, other_end in zip(offset, ends, other_ends, strict=True))
    return Box(offset, shape) if all(length > 0 for length in shape) else None


def element_runs(box: Box, shape: Sequence[int], gap: int = 0) -> list[tuple[int, int]]:
    """Return the runs of consecutive elements, as (first, end), that a box covers in a row-major tensor of this shape.

    Runs with at most `gap` other elements between them are joined.

    >>> element_runs(Box((1, 1), (2, 2)), (4, 4))
    [(5, 7), (9, 11)]
    >>> element_runs(Box((1, 1), (2, 2)), (4, 4), gap=2)
    [(5, 11)]
    >>> element_runs(Box((1, 0), (2, 4)), (4, 4))
    [(4, 12)]
    """
    if not box.volume:
        return []
    runs, stride = [(0, 1)], 1
    for start, length, size in zip(reversed(box.offset), reversed(box.shape), reversed(tuple(shape)), strict=True):
        first, last = runs[0][0], runs[-1][1]
        if len(runs) == 1 and (length == 1 or stride - (last - first) <= gap):
            runs = [(start * stride + first, (start + length - 1) * stride + last)]
        else:
            runs = [(row * stride + begin, row * stride + end) for row in range(start, start + length) for begin, end in runs]
        stride *= size
    return runs


# -- in a file --------------------------------------------------------------------------------------------------------


def describe_positions(positions: Mapping[str, ShardPosition]) -> dict[str, str]:
    """Return the metadata of a shard file with these shards.

    >>> describe_positions({"weight": ShardPosition((4, 2), Box((2, 0), (2, 2)))})
    {'DCP_SHARDING_INFO': '{"weight":{"saved_offsets":[2,0],"global_shape":[4,2]}}'}
    """
    entries = {name: {_OFFSETS: list(position.box.offset), _SHAPE: list(position.shape)} for name, position in positions.items()}
    return {SHARDING: strict_json.dump(entries).decode()}


def read_positions(layout: SafetensorsLayout, where: str) -> dict[str, ShardPosition]:
    """Return the positions of the shards in a file, by the name of their tensor; `where` names the file in errors."""
    content = strict_json.parse(layout.metadata.get(SHARDING, "null").encode(), f"The metadata of {where}")
    if not isinstance(content, dict) or content.keys() != layout.entries.keys():
        raise CheckpointError(f"{where} does not give the position of every shard in it.")
    return {name: _read_position(entry, content[name], where) for name, entry in layout.entries.items()}


def _read_position(entry: TensorEntry, content: Any, where: str) -> ShardPosition:
    offset, shape = (_counts(content.get(key) if isinstance(content, dict) else None) for key in (_OFFSETS, _SHAPE))
    if offset is None or shape is None or not len(offset) == len(shape) == len(entry.shape):
        raise CheckpointError(f"{where} does not give a valid offset and full shape for the shard of {entry.name[:100]!r}.")
    count = math.prod(filter(None, shape))  # a size of 0 would hide sizes that overflow
    if count > _LARGEST // 8 or any(start + length > size for start, length, size in zip(offset, entry.shape, shape, strict=True)):
        raise CheckpointError(f"{where}: the shard of {entry.name[:100]!r} extends beyond its tensor.")
    return ShardPosition(shape, Box(offset, entry.shape))


def _counts(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(
        isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= _LARGEST for entry in value
    ):
        return None
    return tuple(value)


def cover_box(boxes: Iterable[Box], wanted: Box) -> Iterator[tuple[int, Box]]:
    """Yield the part of `wanted` that each box covers, with the index of the box; ValueError unless they cover it exactly once.

    >>> list(cover_box([Box((0,), (2,)), Box((2,), (2,))], Box((1,), (2,))))
    [(0, Box(offset=(1,), shape=(1,))), (1, Box(offset=(2,), shape=(1,)))]
    """
    found = [(index, part) for index, box in enumerate(boxes) if (part := intersect(box, wanted)) is not None]
    if sum(part.volume for _, part in found) != wanted.volume:
        raise ValueError("the shards do not cover it")
    if found and not _tile([part for _, part in found], wanted):
        raise ValueError("two shards overlap")
    yield from found


def _tile(parts: Sequence[Box], wanted: Box) -> bool:
    """Whether parts of a box, which together have its volume, cover it without overlap.

    They do if, corner by corner, an even number of the boxes and the wanted one have a corner at each point: then every element of the
    wanted box is in an odd number of them, and with the volumes equal that is one. So no two of them have to be compared.
    """
    cut = [dim for dim in range(len(wanted.shape)) if any(part.shape[dim] != wanted.shape[dim] for part in parts)]
    if (len(parts) + 1) << len(cut) > _MOST_CORNERS:
        raise ValueError(f"{len(parts)} shards, cut in {len(cut)} dims, are more than can be compared")
    odd: set[tuple[int, ...]] = set()
    for box in (wanted, *parts):
        odd.symmetric_difference_update(itertools.product(*((box.offset[dim], box.offset[dim] + box.shape[dim]) for dim in cut)))
    return not odd
