"""A checkpoint that ranks write together, because each holds a part of the state: what every one of them adds to it.

Every rank writes the pieces that it holds of sharded tensors, with the sums of their blocks, and what is its own, into the same stage, and
tells the writing rank what it wrote. That one writes everything else, finds out whether the pieces are the whole, and commits; see
`save.py`. How they tell each other is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from slipstream.checkpoint.format import FileEntry, ModelEntry
from slipstream.checkpoint.pieces import Place, describe
from slipstream.checkpoint.raw import DTYPES, tensor_bytes
from slipstream.checkpoint.snapshot import PiecesPart
from slipstream.checkpoint.weights import shard_names, shards
from slipstream.errors import CheckpointError
from slipstream.files.blocks import BlockSums, sums_name
from slipstream.files.tensors import plan

__all__ = ["Contribution", "Told", "check_whole", "pieces_name", "tied", "with_pieces", "write_pieces"]

Told = dict[str, Any]
"""What a rank tells of its contribution: plain data."""


@dataclass
class Contribution:
    """The files that one rank has written."""

    rank: int
    own: str
    """The part that belongs to this rank alone."""
    files: dict[str, FileEntry] = field(default_factory=dict)
    pieces: dict[str, list[str]] = field(default_factory=dict)
    """Files of pieces, by the model or part whose they are."""
    elements: dict[str, int] = field(default_factory=dict)
    """How many elements are in them."""
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)

    def told(self) -> Told:
        """The same as plain data."""
        return {**vars(self), "files": {name: [entry.size, entry.checksum] for name, entry in self.files.items()}}

    @staticmethod
    def of(told: Told) -> Contribution:
        """What a rank told.

        >>> one = Contribution(1, "rank_1.json", {"rank_1.json": FileEntry(3, "00")}, {"model": []})
        >>> Contribution.of(one.told()) == one
        True
        """
        return Contribution(**{**told, "files": {name: FileEntry(*entry) for name, entry in told["files"].items()}})


_Add = Callable[[str, Callable[[], tuple[Iterable[Any], int]]], None]


def pieces_name(base: str, rank: int, world: int) -> str:
    """What the files of one rank's pieces begin with.

    >>> pieces_name("model", 0, 4)
    'model-rank-00001-of-00004'
    """
    return f"{base}-rank-{rank + 1:05d}-of-{world:05d}"


def write_pieces(
    part: PiecesPart, name: str, max_shard_size: int | None, *, apart: bool, add: _Add, add_bytes: Callable[[str, bytes], None]
) -> list[str]:
    """Writes what this rank stores of a model or part, in files whose names begin with `name`; gives them back."""
    groups = [group for group in shards(part.tensors, max_shard_size, part.frozen if apart else frozenset()) if group]
    names = shard_names(name, len(groups)) if groups else []
    for file, group in zip(names, groups, strict=True):
        sums = BlockSums()

        def make(group: Sequence[str] = group) -> tuple[Iterable[Any], int]:
            nonlocal sums
            sums = BlockSums()
            chunks, size = _file(part.tensors, part.places, group)
            return sums.passing(chunks), size

        add(file, make)
        add_bytes(sums_name(file), sums.taken())
    return names


def _file(tensors: Mapping[str, torch.Tensor], places: Mapping[str, Place], names: Sequence[str]) -> tuple[Iterable[Any], int]:
    metadata = {"format": "pt", **describe({name: places[name] for name in names})}
    header, layout = plan([(name, DTYPES[tensors[name].dtype], tuple(tensors[name].shape)) for name in names], metadata)
    return chain([header], (tensor_bytes(tensors[name]) for name in names)), layout.size


def tied(contributions: Sequence[Contribution], base: str) -> dict[str, str]:
    """Names of tied weights. A rank that holds no element of a tensor cannot tell that it is tied, so all of them are asked."""
    return {name: kept for one in contributions for name, kept in one.aliases.get(base, {}).items()}


def check_whole(parts: Sequence[PiecesPart], contributions: Sequence[Contribution], where: str) -> None:
    """An error if the pieces that were written are not all of what is sharded."""
    for part in parts:
        aliases = tied(contributions, part.base)
        wanted = sum(math.prod(shape) for name, shape in part.shapes.items() if name not in aliases)
        counts = {one.rank: one.elements.get(part.base, 0) for one in contributions}
        if sum(counts.values()) != wanted:
            told = ", ".join(f"rank {rank}: {count:,}" for rank, count in counts.items())
            raise CheckpointError(
                f"{where} was not saved: the sharded tensors of {part.base} have {wanted:,} elements, and the ranks have stored "
                f"{sum(counts.values()):,} of them ({told}). Every rank has to save the same objects, prepared in the same order."
            )


def with_pieces(model: ModelEntry, base: str, contributions: Sequence[Contribution]) -> ModelEntry:
    """The entry of a model with the pieces that ranks have stored."""
    pieces = tuple(name for one in contributions for name in one.pieces.get(base, ()))
    return replace(model, aliases={**model.aliases, **tied(contributions, base)}, pieces=pieces)
