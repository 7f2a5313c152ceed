"""Sharded tensors (torch's `DTensor`): the shard that this rank holds, and tensors assembled from stored shards.

`ShardFiles` opens shard files and finds the boxes of each tensor in them. A loaded state first has placeholders on the meta device;
`reshard` replaces them by what this rank needs and reads and verifies only those bytes, so a checkpoint loads under any sharding and
world size. Nothing here communicates, and torch's DTensor package is not imported unless the script has done so.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checkpoint.manifest import open_listed_file
from slipstream.checkpoint.shard_layout import Box, ShardPosition, cover_box, element_runs, read_positions, whole_box
from slipstream.checkpoint.tensor_bytes import DTYPES, TORCH_DTYPES, from_buffer, require_storable
from slipstream.distributed.codec import byte_view, empty_host_tensor
from slipstream.errors import CheckpointError
from slipstream.files.checksum import BLOCK_SIZE, VerifiedBlockFile, checksums_name
from slipstream.files.disk import FileEntry
from slipstream.files.reader import fill_span, read_span
from slipstream.files.safetensors_layout import SafetensorsLayout, TensorEntry, read_layout

if TYPE_CHECKING:
    from slipstream.checkpoint.remote import RemoteFiles

__all__ = [
    "BrokenShardError", "LocalShard", "ShardFiles", "StoredTensors", "TensorPlaceholders", "WholeTensorFile", "is_sharded", "local_box",
    "local_shard", "local_shards", "open_shards", "replicate_like", "reshard", "shard_like",
]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class LocalShard:
    """The part of a sharded tensor that this rank holds."""

    tensor: torch.Tensor
    """The local elements, not a copy."""
    position: ShardPosition
    owned: bool
    """Whether this rank stores the shard: exactly one of the ranks that hold the same elements does."""


def is_sharded(value: Any) -> bool:
    """Whether a value is a `DTensor`.

    >>> is_sharded(torch.ones(2)), is_sharded(3)
    (False, False)
    """
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor):
        return False
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def local_shard(tensor: Any, where: str) -> LocalShard:
    """Return the shard of a tensor that this rank holds; `where` begins the error messages."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{where} is a partial sum on every rank ({tensor.placements}). Reduce it before it is saved.")
    coordinate = tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    if coordinate is None:  # this rank is not part of the mesh
        nothing = torch.empty((0,) * len(shape), dtype=tensor.dtype, device="cpu")
        return LocalShard(nothing, ShardPosition(shape, Box(shape, (0,) * len(shape))), False)
    box = local_box(tensor)
    local = require_storable(tensor.to_local().detach(), where)
    if local.dtype not in DTYPES:
        raise CheckpointError(f"{where} is a sharded tensor of {local.dtype}, which shard files cannot store. Convert it.")
    if tuple(local.shape) != box.shape:
        raise CheckpointError(f"{where} has the shape {list(local.shape)} on this rank, and its placements give {list(box.shape)}.")
    first_replica = all(index == 0 for index, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
    stores_empty = 0 in shape and not any(coordinate)  # a tensor without elements is stored by the first rank
    return LocalShard(local, ShardPosition(shape, box), first_replica and (box.volume > 0 or stores_empty))


def local_box(tensor: Any) -> Box:
    """Return the box of the full tensor that this rank holds: all of it, unless it is sharded.

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
    """Return a tensor that is sharded like `target`, with these local elements."""
    return sys.modules["torch.distributed.tensor"].DTensor.from_local(
        local.to(target.device), target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def replicate_like(target: Any, full: torch.Tensor) -> Any:
    """Return a tensor that is replicated on the mesh of `target`."""
    package = sys.modules["torch.distributed.tensor"]
    placements = [package.Replicate() for _ in target.placements]
    return package.DTensor.from_local(full.to(target.device), target.device_mesh, placements, run_check=False)


def local_shards(tensors: Mapping[str, Any], where: str) -> dict[str, LocalShard]:
    """Return the local shards of the sharded tensors among these, by name; `where` names the state in errors."""
    return {name: local_shard(value, f"{name!r} of {where}") for name, value in tensors.items() if is_sharded(value)}


class BrokenShardError(CheckpointError):
    """Damaged shards of the checkpoint in `folder`. Other ranks may not notice: each reads only the shards that it needs."""

    def __init__(self, problem: object, folder: str) -> None:
        super().__init__(str(problem))
        self.folder = folder


@dataclass(frozen=True)
class _StoredShard:
    """A shard and its place in a file."""

    file: VerifiedBlockFile
    entry: TensorEntry
    start: int
    """The offset of its data in the file."""
    position: ShardPosition

    def copy_into(self, target: torch.Tensor, box: Box) -> None:
        """Copy the elements of a box of the full tensor that lies within this shard; rows are read into the target itself."""
        inner, item_size = box.relative_to(self.position.box), TORCH_DTYPES[self.entry.dtype].itemsize
        runs = element_runs(inner, self.position.box.shape)
        if len(runs) == 1 and target.is_contiguous():
            (first, end) = runs[0]
            self.file.read_into(self.start + first * item_size, self.start + end * item_size, byte_view(target))
        else:
            target.copy_(self._view(box))
            self.file.trim()

    def _view(self, box: Box) -> torch.Tensor:
        """Return the elements of a box, as a view of the bytes that were read."""
        inner, shape = box.relative_to(self.position.box), self.position.box.shape
        item_size = TORCH_DTYPES[self.entry.dtype].itemsize
        runs = element_runs(inner, shape, gap=BLOCK_SIZE // item_size)
        for first, end in runs:
            self.file.view(self.start + first * item_size, self.start + end * item_size)
        first, end = runs[0][0], runs[-1][1]
        span = (self.start + first * item_size, self.start + end * item_size)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return from_buffer(self.file.memory(), self.entry.dtype, (end - first,), *span).as_strided(inner.shape, strides)


class StoredTensors(Mapping[str, torch.Tensor]):
    """Tensors of which parts can be read: in our files (`ShardFiles`, `WholeTensorFile`), or in torch's (`dcp_reader.DcpTensors`).

    As a mapping it assembles each full tensor on access and keeps none. Readers implement `read`.
    """

    where: str
    placeholders: dict[str, torch.Tensor]
    """Shapes and dtypes by name, on the meta device."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor in new memory."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name, whole_box(self.placeholders[name].shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.placeholders)

    def __len__(self) -> int:
        return len(self.placeholders)


class ShardFiles(StoredTensors):
    """The sharded tensors in some shard files of a checkpoint. Headers are read and verified now, shards when they are needed."""

    def __init__(self, files: Sequence[VerifiedBlockFile], where: str) -> None:
        self.where = where
        self._shards: dict[str, list[_StoredShard]] = {}
        self._files = files
        for file in files:
            layout = read_layout(lambda offset, count, file=file: file.view(offset, offset + count), file.size, file.where)  # type: ignore[misc]
            positions = read_positions(layout, file.where)
            for name, entry in layout.entries.items():
                self._shards.setdefault(name, []).append(_StoredShard(file, entry, layout.data_start + entry.start, positions[name]))
        for name, shards in self._shards.items():
            if len({(shard.entry.dtype, shard.position.shape) for shard in shards}) > 1:
                raise CheckpointError(f"{self.where}: the shards of {name[:100]!r} differ in dtype or full shape.")
        self.placeholders: dict[str, torch.Tensor] = {
            name: torch.empty(shards[0].position.shape, dtype=TORCH_DTYPES[shards[0].entry.dtype], device="meta")
            for name, shards in self._shards.items()
        }

    def release(self) -> None:
        """Release the bytes that were read; tensors that were returned keep theirs."""
        for file in self._files:
            file.release()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.release()
        return super().__getitem__(name)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor in new memory."""
        shards = self._shards[name]
        try:
            found = list(cover_box([shard.position.box for shard in shards], box)) if box.volume else []
        except ValueError as error:
            raise CheckpointError(f"{self.where}: {name[:100]!r} cannot be assembled: {error}") from None
        assembled = empty_host_tensor(TORCH_DTYPES[shards[0].entry.dtype], box.shape)
        for index, part in found:
            shards[index].copy_into(assembled[part.relative_to(box).slices()], part)
        return assembled


class WholeTensorFile(StoredTensors):
    """The tensors of a safetensors file, of which boxes are read when they are needed. Whoever opens it has verified the file."""

    def __init__(self, descriptor: int, layout: SafetensorsLayout, where: str) -> None:
        self.where = where
        self._descriptor, self._layout = descriptor, layout
        weakref.finalize(self, os.close, descriptor)
        self.placeholders: dict[str, torch.Tensor] = {
            name: torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype], device="meta") for name, entry in layout.entries.items()
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor in new memory."""
        entry = self._layout.entries[name]
        dtype, start = TORCH_DTYPES[entry.dtype], self._layout.data_start + entry.start
        assembled = empty_host_tensor(dtype, box.shape)
        if not box.volume:
            return assembled
        runs = element_runs(box, entry.shape)
        first, end = start + runs[0][0] * dtype.itemsize, start + runs[-1][1] * dtype.itemsize
        if len(runs) == 1:
            fill_span(self._descriptor, first, byte_view(assembled), where=self.where)
            return assembled
        span = read_span(self._descriptor, first, end, where=self.where)
        strides = [math.prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
        count = runs[-1][1] - runs[0][0]
        return assembled.copy_(from_buffer(span, entry.dtype, (count,), 0, len(span)).as_strided(box.shape, strides))


class TensorPlaceholders:
    """The stored tensors behind placeholders."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StoredTensors, str, torch.Tensor]] = {}

    def add(self, files: StoredTensors) -> dict[str, torch.Tensor]:
        """Return placeholders for all tensors in these shard files, by name."""
        self._known |= {id(tensor): (files, name, tensor) for name, tensor in files.placeholders.items()}
        return files.placeholders

    def __bool__(self) -> bool:
        return bool(self._known)

    def read(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """Return a box of a tensor, or of the stored tensor if it is a placeholder."""
        if not tensor.is_meta:
            return tensor if box == whole_box(tensor.shape) else tensor[box.slices()].clone(memory_format=torch.contiguous_format)
        known = self._known.get(id(tensor))
        if known is None:
            raise CheckpointError("A value other than a tensor was stored in shards.")
        files, name, _ = known
        try:
            return files.read(name, box)
        except CheckpointError as error:
            raise BrokenShardError(error, files.where) from error


def open_shards(
    folder: Path,
    names: Sequence[str],
    files: Mapping[str, FileEntry],
    read_checksums: Callable[[str], Any],
    store: RemoteFiles | None = None,
) -> ShardFiles:
    """Open shard files of a checkpoint; `read_checksums` returns the verified bytes of a file of block checksums.

    With `store` they are read where they are stored, and only what is needed of them.
    """
    where = str(folder) if store is None else store.url
    try:
        opened = [
            _open(folder, name, files[name].size, read_checksums(checksums_name(name)))
            if store is None
            else VerifiedBlockFile(store.open(name), files[name].size, read_checksums(checksums_name(name)), store.show(name))
            for name in names
        ]
        return ShardFiles(opened, where)
    except CheckpointError as error:
        raise BrokenShardError(error, where) from error


def _open(folder: Path, name: str, size: int, checksums: Any) -> VerifiedBlockFile:
    descriptor = open_listed_file(folder, name)
    try:
        file = VerifiedBlockFile(descriptor, size, checksums, str(folder / name))
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(file, os.close, descriptor)
    return file


def reshard(value: Any, target: Any, placeholders: TensorPlaceholders) -> Any:
    """Return a state with every tensor laid out for this rank like its counterpart in `target`.

    A target that is a tensor applies to everything inside the value. If it is sharded, tensors of its shape are sharded in the same way,
    and tensors of other shapes are replicated on its mesh.
    """
    if isinstance(value, torch.Tensor):
        return _reshard(value, target, placeholders)
    if isinstance(value, Mapping):
        pairs = [(key, reshard(item, _target_child(target, key), placeholders)) for key, item in value.items()]
        return _mapping_like(value, pairs)
    if type(value) in (list, tuple):
        return type(value)(reshard(item, _target_child(target, index), placeholders) for index, item in enumerate(value))
    if isinstance(value, deque):
        return deque((reshard(item, _target_child(target, index), placeholders) for index, item in enumerate(value)), value.maxlen)
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
    made: Any = value.copy() if hasattr(value, "copy") else dict(value)  # keeps the factory of a defaultdict
    made.update(pairs)
    if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
        made._metadata = value._metadata
    return made
