"""Sharded tensors (torch's `DTensor`): the part that this rank holds, and tensors assembled from stored pieces.

`PieceFiles` opens the files of pieces and knows which box of which tensor lies where. Until its target is known a tensor is a placeholder
on the meta device. `reshard` replaces the placeholders in a state by what this rank needs, reading and verifying only those bytes, so a
checkpoint loads under another sharding or world size. Nothing here communicates, and torch's DTensor package is not imported unless the
script has done so.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.manifest import open_listed_file
from slipstream.checkpoint.shard_layout import Box, PiecePosition, cover_box, element_runs, read_positions, whole_box
from slipstream.checkpoint.tensor_bytes import DTYPES, TORCH_DTYPES, from_buffer, require_storable
from slipstream.distributed.codec import empty_host_tensor
from slipstream.errors import CheckpointError
from slipstream.files.checksum import BLOCK_SIZE, VerifiedBlockFile, checksums_name
from slipstream.files.disk import FileEntry
from slipstream.files.safetensors_layout import TensorEntry, read_layout

__all__ = [
    "BrokenPiecesError", "LocalShard", "PieceFiles", "TensorPlaceholders", "is_sharded", "local_box", "local_shard",
    "local_shards", "open_pieces", "replicate_like", "reshard", "shard_like",
]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class LocalShard:
    """What a rank holds of a tensor."""

    tensor: torch.Tensor
    """The rank's own elements: no copy."""
    place: PiecePosition
    owned: bool
    """Whether it is this rank that stores them: one of those that hold the same."""


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor of which other ranks may hold parts.

    >>> is_sharded(torch.ones(2)), is_sharded(3)
    (False, False)
    """
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor):
        return False
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def local_shard(tensor: Any, where: str) -> LocalShard:
    """Return what this rank holds of a sharded tensor; `where` begins the messages."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{where} is a sum of which every rank has a summand ({tensor.placements}). Reduce it before it is saved.")
    coordinate = tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    if coordinate is None:  # this rank is not one of those that share it
        return LocalShard(torch.empty((0,) * len(shape), dtype=tensor.dtype), PiecePosition(shape, Box(shape, (0,) * len(shape))), False)
    box = local_box(tensor)
    local = require_storable(tensor.to_local().detach(), where)
    if local.dtype not in DTYPES:
        raise CheckpointError(f"{where} is a sharded tensor of {local.dtype}, which a file of pieces cannot hold. Convert it.")
    if tuple(local.shape) != box.shape:
        raise CheckpointError(f"{where} should have the shape {list(box.shape)} on this rank, by its placements, not {list(local.shape)}.")
    first = all(place == 0 for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
    empty = 0 in shape and all(place == 0 for place in coordinate)  # somebody has to say that it is there
    return LocalShard(local, PiecePosition(shape, box), first and (box.volume > 0 or empty))


def local_box(tensor: Any) -> Box:
    """Return which part of the whole a tensor holds on this rank: all of it, unless it is sharded.

    >>> local_box(torch.ones(2, 3))
    Box(offset=(0, 0), shape=(2, 3))
    """
    if not is_sharded(tensor):
        return whole_box(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        return Box((0,) * tensor.dim(), (0,) * tensor.dim())
    # torch internals: `__create_chunk_list__` is how torch's own checkpoints ask a DTensor for its local part, and no public function
    # gives offsets for every placement (torch 2.13). tests/checkpoint/test_sharded.py notices; it can go when a public one does.
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def shard_like(target: Any, local: torch.Tensor) -> Any:
    """Return a tensor that is sharded as `target` is, of which this rank holds these elements."""
    kind = sys.modules["torch.distributed.tensor"].DTensor
    local = local.to(target.device)
    return kind.from_local(
        local, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def replicate_like(target: Any, full: torch.Tensor) -> Any:
    """Return a tensor that every rank which shares `target` holds whole."""
    package = sys.modules["torch.distributed.tensor"]
    placements = [package.Replicate() for _ in target.placements]
    return package.DTensor.from_local(full.to(target.device), target.device_mesh, placements, run_check=False)


def local_shards(tensors: Mapping[str, Any], where: str) -> dict[str, LocalShard]:
    """Return what this rank holds of those that are sharded, by name; `where` says whose they are."""
    return {name: local_shard(value, f"{name!r} of {where}") for name, value in tensors.items() if is_sharded(value)}


class BrokenPiecesError(CheckpointError):
    """Pieces that cannot be used, of the checkpoint in `folder`. Not every rank need know: each looks at those that it needs."""

    def __init__(self, problem: object, folder: str) -> None:
        super().__init__(str(problem))
        self.folder = folder


@dataclass(frozen=True)
class _Piece:
    """A piece, and where its bytes lie."""

    file: VerifiedBlockFile
    entry: TensorEntry
    start: int
    """Where in the file its data begins."""
    place: PiecePosition

    def read(self, part: Box) -> torch.Tensor:
        """Return the elements of a part of it: a view of what was read."""
        inner, shape = part.relative_to(self.place.box), self.place.box.shape
        item = TORCH_DTYPES[self.entry.dtype].itemsize
        runs = element_runs(inner, shape, gap=BLOCK_SIZE // item)
        for first, end in runs:
            self.file.view(self.start + first * item, self.start + end * item)
        first, end = runs[0][0], runs[-1][1]
        row = from_buffer(self.file.memory(), self.entry.dtype, (end - first,), self.start + first * item, self.start + end * item)
        return row.as_strided(inner.shape, _strides(shape))


class PieceFiles(Mapping[str, torch.Tensor]):
    """The tensors whose pieces are in these files of a checkpoint; the headers are read and verified now, the pieces when asked for.

    As a mapping it puts each tensor together when it is asked for, and keeps none.
    """

    def __init__(self, files: Sequence[VerifiedBlockFile], where: str) -> None:
        self.where = where
        self._pieces: dict[str, list[_Piece]] = {}
        self._files = files
        for file in self._files:
            layout = read_layout(lambda offset, count, file=file: file.view(offset, offset + count), file.size, file.where)  # type: ignore[misc]
            places = read_positions(layout, file.where)
            for name, entry in layout.entries.items():
                self._pieces.setdefault(name, []).append(_Piece(file, entry, layout.data_start + entry.start, places[name]))
        for name, pieces in self._pieces.items():
            if len({(piece.entry.dtype, piece.place.shape) for piece in pieces}) > 1:
                raise CheckpointError(f"{self.where}: the pieces of {name[:100]!r} differ in type, or in what they are pieces of.")
        self.placeholders: dict[str, torch.Tensor] = {name: _placeholder(pieces[0]) for name, pieces in self._pieces.items()}

    def release(self) -> None:
        """Forget what was read; tensors that were handed out keep theirs."""
        for file in self._files:
            file.release()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.release()
        return self.read(name, whole_box(self.placeholders[name].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.placeholders)

    def __len__(self) -> int:
        return len(self.placeholders)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, in memory of its own."""
        pieces = self._pieces[name]
        if not box.volume:
            return empty_host_tensor(TORCH_DTYPES[pieces[0].entry.dtype], box.shape)
        try:
            found = list(cover_box([piece.place.box for piece in pieces], box))
        except ValueError as error:
            raise CheckpointError(f"{self.where}: {name[:100]!r} cannot be put together: {error}") from None
        made = empty_host_tensor(TORCH_DTYPES[pieces[0].entry.dtype], box.shape)
        for number, part in found:
            made[part.relative_to(box).slices()] = pieces[number].read(part)
        return made


class TensorPlaceholders:
    """Where the tensors are that placeholders stand for."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[PieceFiles, str, torch.Tensor]] = {}

    def add(self, pieces: PieceFiles) -> dict[str, torch.Tensor]:
        """Return the placeholders for all tensors in these pieces, by name."""
        self._known |= {id(tensor): (pieces, name, tensor) for name, tensor in pieces.placeholders.items()}
        return pieces.placeholders

    def __bool__(self) -> bool:
        return bool(self._known)

    def read(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """Return a box of a tensor, or of what it stands for."""
        if not tensor.is_meta:
            return tensor if box == whole_box(tensor.shape) else tensor[box.slices()].clone(memory_format=torch.contiguous_format)
        known = self._known.get(id(tensor))
        if known is None:
            raise CheckpointError("A tensor of the checkpoint is in pieces, and something else than a tensor is made of it.")
        pieces, name, _ = known
        try:
            return pieces.read(name, box)
        except CheckpointError as error:
            raise BrokenPiecesError(error, pieces.where) from error


def open_pieces(folder: Path, names: Sequence[str], files: Mapping[str, FileEntry], sums: Callable[[str], Any]) -> PieceFiles:
    """Return the pieces in these files of a checkpoint; `sums` gives the verified bytes of a file of sums."""
    try:
        return PieceFiles([_open(folder, name, files[name].size, sums(checksums_name(name))) for name in names], str(folder))
    except CheckpointError as error:
        raise BrokenPiecesError(error, str(folder)) from error


def _open(folder: Path, name: str, size: int, sums: Any) -> VerifiedBlockFile:
    descriptor = open_listed_file(folder, name)
    try:
        file = VerifiedBlockFile(descriptor, size, sums, str(folder / name))
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(file, os.close, descriptor)
    return file


def reshard(value: Any, target: Any, placeholders: TensorPlaceholders) -> Any:
    """Return the same state with every tensor as this rank needs it, going by what stands at its place in `target`.

    A target that is a tensor holds for everything inside of the value: if it is sharded, tensors of its shape are sharded alike, those of
    other shapes are held whole by every rank that shares it.
    """
    if isinstance(value, torch.Tensor):
        return _reshard(value, target, placeholders)
    if isinstance(value, Mapping):
        pairs = [(key, reshard(item, _target_child(target, key), placeholders)) for key, item in value.items()]
        return _mapping_like(value, pairs)
    if type(value) in (list, tuple):
        return type(value)(reshard(item, _target_child(target, place), placeholders) for place, item in enumerate(value))
    if isinstance(value, deque):
        return deque((reshard(item, _target_child(target, place), placeholders) for place, item in enumerate(value)), value.maxlen)
    return value


def _reshard(value: torch.Tensor, target: Any, placeholders: TensorPlaceholders) -> Any:
    if not is_sharded(target):
        return placeholders.read(value, whole_box(value.shape)) if value.is_meta else value
    if value.shape == target.shape:
        return shard_like(target, placeholders.read(value, local_box(target)))
    full = placeholders.read(value, whole_box(value.shape))
    return replicate_like(target, full) if full.dim() else full


def _target_child(target: Any, key: Any) -> Any:
    if isinstance(target, Mapping):
        return target.get(key)
    if isinstance(target, (list, tuple, deque)):
        return target[key] if key < len(target) else None
    return target


def _mapping_like(value: Mapping[Any, Any], pairs: list[tuple[Any, Any]]) -> Any:
    if type(value) is dict:
        return dict(pairs)
    made: Any = value.copy() if hasattr(value, "copy") else dict(value)  # keeps what an OrderedDict or defaultdict has besides
    made.update(pairs)
    if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
        made._metadata = value._metadata
    return made


def _placeholder(piece: _Piece) -> torch.Tensor:
    return torch.empty(piece.place.shape, dtype=TORCH_DTYPES[piece.entry.dtype], device="meta")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of a tensor that is stored row by row."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
