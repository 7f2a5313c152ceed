"""Tensors put together from pieces: of each file only what a rank needs, and that verified.

`Pieces` opens the files of pieces of one model or state and knows which box of which tensor lies where. Before it is known who wants which
part, a tensor is a stand-in: a tensor on the meta device with its type and shape, which can be compared and not be used. `placed` takes
a state with stand-ins in it, and gives one in which every tensor is what belongs to this rank: the part that the target there holds if that
is sharded, and all of it if not. So it does not matter how, or over how many ranks, the tensors were sharded when they were saved.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.format import FileEntry
from slipstream.checkpoint.pieces import Box, Place, gathered, places_in, spans, whole
from slipstream.checkpoint.raw import TORCH_DTYPES, from_buffer
from slipstream.checkpoint.shares import is_sharded, like, replicated_like, wanted
from slipstream.comm.tensor_memory import empty
from slipstream.errors import CheckpointError
from slipstream.files.blocks import BLOCK, BlockFile, sums_name
from slipstream.files.inside import open_inside
from slipstream.files.tensors import Entry, read_layout

__all__ = ["Assembled", "BrokenPieces", "Pieces", "StandIns", "open_pieces", "placed"]


class BrokenPieces(CheckpointError):
    """Pieces that cannot be used, of the checkpoint in `folder`. Not every rank need know: each looks at those that it needs."""

    def __init__(self, problem: object, folder: str) -> None:
        super().__init__(str(problem))
        self.folder = folder


@dataclass(frozen=True)
class _Piece:
    """A piece, and where its bytes lie."""

    file: BlockFile
    entry: Entry
    start: int
    """Where in the file its data begins."""
    place: Place

    def read(self, part: Box) -> torch.Tensor:
        """The elements of a part of it: a view of what was read."""
        inner, shape = part.relative_to(self.place.box), self.place.box.shape
        item = TORCH_DTYPES[self.entry.dtype].itemsize
        runs = spans(inner, shape, gap=BLOCK // item)
        for first, end in runs:
            self.file.view(self.start + first * item, self.start + end * item)
        first, end = runs[0][0], runs[-1][1]
        row = from_buffer(self.file.memory(), self.entry.dtype, (end - first,), self.start + first * item, self.start + end * item)
        return row.as_strided(inner.shape, _strides(shape))


class Pieces:
    """The tensors whose pieces are in these files of a checkpoint; the headers are read and verified now, the pieces when asked for."""

    def __init__(self, files: Sequence[BlockFile], where: str) -> None:
        self.where = where
        self._pieces: dict[str, list[_Piece]] = {}
        self._files = files
        for file in self._files:
            layout = read_layout(lambda offset, count, file=file: file.view(offset, offset + count), file.size, file.where)  # type: ignore[misc]
            places = places_in(layout, file.where)
            for name, entry in layout.entries.items():
                self._pieces.setdefault(name, []).append(_Piece(file, entry, layout.data_start + entry.start, places[name]))
        for name, pieces in self._pieces.items():
            if len({(piece.entry.dtype, piece.place.shape) for piece in pieces}) > 1:
                raise CheckpointError(f"{self.where}: the pieces of {name[:100]!r} differ in type, or in what they are pieces of.")
        self.stand_ins: dict[str, torch.Tensor] = {name: _stand_in(pieces[0]) for name, pieces in self._pieces.items()}

    @property
    def fetched(self) -> int:
        """Bytes that were read so far."""
        return sum(file.fetched for file in self._files)

    def release(self) -> None:
        """Forgets what was read; tensors that were handed out keep theirs."""
        for file in self._files:
            file.release()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, in memory of its own."""
        pieces = self._pieces[name]
        if not box.volume:
            return empty(TORCH_DTYPES[pieces[0].entry.dtype], box.shape)
        try:
            found = list(gathered([piece.place.box for piece in pieces], box))
        except ValueError as error:
            raise CheckpointError(f"{self.where}: {name[:100]!r} cannot be put together: {error}") from None
        made = empty(TORCH_DTYPES[pieces[0].entry.dtype], box.shape)
        for number, part in found:
            made[part.relative_to(box).slices()] = pieces[number].read(part)
        return made


class Assembled(Mapping[str, torch.Tensor]):
    """The tensors in pieces, each put together when it is asked for, and kept by nobody here."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def __getitem__(self, name: str) -> torch.Tensor:
        self._pieces.release()
        return self._pieces.read(name, whole(self._pieces.stand_ins[name].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces.stand_ins)

    def __len__(self) -> int:
        return len(self._pieces.stand_ins)


class StandIns:
    """Where the tensors are that stand-ins stand for."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Pieces, str, torch.Tensor]] = {}

    def add(self, pieces: Pieces) -> dict[str, torch.Tensor]:
        """The stand-ins for all tensors in these pieces, by name."""
        self._known |= {id(tensor): (pieces, name, tensor) for name, tensor in pieces.stand_ins.items()}
        return pieces.stand_ins

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def fetched(self) -> int:
        """Bytes of pieces that were read so far."""
        return sum(pieces.fetched for pieces in {id(one): one for one, _, _ in self._known.values()}.values())

    def read(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """A box of a tensor, or of what it stands for."""
        if not tensor.is_meta:
            return tensor if box == whole(tensor.shape) else tensor[box.slices()].clone(memory_format=torch.contiguous_format)
        known = self._known.get(id(tensor))
        if known is None:
            raise CheckpointError("A tensor of the checkpoint is in pieces, and something else than a tensor is made of it.")
        pieces, name, _ = known
        try:
            return pieces.read(name, box)
        except CheckpointError as error:
            raise BrokenPieces(error, pieces.where) from error


def open_pieces(folder: Path, names: Sequence[str], files: Mapping[str, FileEntry], sums: Callable[[str], Any]) -> Pieces:
    """The pieces in these files of a checkpoint; `sums` gives the verified bytes of a file of sums."""
    try:
        return Pieces([_open(folder, name, files[name].size, sums(sums_name(name))) for name in names], str(folder))
    except CheckpointError as error:
        raise BrokenPieces(error, str(folder)) from error


def _open(folder: Path, name: str, size: int, sums: Any) -> BlockFile:
    try:
        descriptor = open_inside(folder, name)
    except FileNotFoundError:
        raise CheckpointError(f"{folder / name} is missing, and the manifest lists it") from None
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
    try:
        file = BlockFile(descriptor, size, sums, str(folder / name))
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(file, os.close, descriptor)
    return file


def placed(value: Any, target: Any, stand_ins: StandIns) -> Any:
    """The same state with every tensor as this rank needs it, going by what stands at its place in `target`.

    A target that is a tensor holds for everything inside of the value: if it is sharded, tensors of its shape are sharded alike, those of
    other shapes are held whole by every rank that shares it.
    """
    if isinstance(value, torch.Tensor):
        return _placed(value, target, stand_ins)
    if isinstance(value, Mapping):
        pairs = [(key, placed(item, _inside(target, key), stand_ins)) for key, item in value.items()]
        return _mapping_like(value, pairs)
    if type(value) in (list, tuple):
        return type(value)(placed(item, _inside(target, place), stand_ins) for place, item in enumerate(value))
    if isinstance(value, deque):
        return deque((placed(item, _inside(target, place), stand_ins) for place, item in enumerate(value)), value.maxlen)
    return value


def _placed(value: torch.Tensor, target: Any, stand_ins: StandIns) -> Any:
    if not is_sharded(target):
        return stand_ins.read(value, whole(value.shape)) if value.is_meta else value
    if value.shape == target.shape:
        return like(target, stand_ins.read(value, wanted(target)))
    full = stand_ins.read(value, whole(value.shape))
    return replicated_like(target, full) if full.dim() else full


def _inside(target: Any, key: Any) -> Any:
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


def _stand_in(piece: _Piece) -> torch.Tensor:
    return torch.empty(piece.place.shape, dtype=TORCH_DTYPES[piece.entry.dtype], device="meta")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a tensor that is stored row by row."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
