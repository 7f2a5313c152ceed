"""Tensors and states in folders of `torch.distributed.checkpoint` (DCP), read without obeying their pickles.

`open_dcp` reads the table of contents (`dcp_metadata.py`); the rest is read when it is asked for. `DcpTensors` puts together the box of a
tensor that a rank needs, as `PieceFiles` does for our own checkpoints, and reads only the shards that the box touches. `DcpFolder.state`
gives the nested state back with placeholders for the tensors, `DcpFolder.weights` the weights of a model in it. Files of `torch.save` are
read as data by `pickle_reader.py`: their checksums are verified, and a class that it does not know is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from slipstream.checkpoint.dcp_metadata import (
    DCP_METADATA,
    DTYPE_CODES,
    STATE_SHARD_FILE,
    DcpChunk,
    DcpMetadata,
    DcpTensor,
    FileSpan,
    find_shard,
    read_dcp_metadata,
    read_shard_header,
    read_shards_metadata,
)
from slipstream.checkpoint.deserialize import read_part
from slipstream.checkpoint.pickle_reader import read_values
from slipstream.checkpoint.pickle_records import NotPlainError
from slipstream.checkpoint.shard_layout import Box, cover_box, element_runs
from slipstream.checkpoint.sharded import StoredTensors
from slipstream.checkpoint.tensor_bytes import BYTE_VIEWED_DTYPES, TORCH_DTYPES, dtype_name, from_buffer
from slipstream.distributed.codec import empty_host_tensor
from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files import strict_json
from slipstream.files.checksum import BLOCK_SIZE
from slipstream.files.paths import ConfinedFolder, open_inside
from slipstream.files.reader import read_span
from slipstream.logging import get_logger

__all__ = ["DcpFolder", "DcpTensors", "DcpWeights", "nest", "open_dcp", "read_shard_state"]


_TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {**{name: TORCH_DTYPES[code] for name, code in DTYPE_CODES.items()}, **BYTE_VIEWED_DTYPES}
)
_MODEL_KEYS: Final = ("model", "state_dict", "module")
"""Keys under which scripts save the weights of a model beside other states."""
_LARGEST_FILE: Final = 1 << 50
_EXTRA: Final = ("model_extra.json", "model_extra.safetensors")


class _Files:
    """The files of a folder; headers of safetensors files are read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._headers: dict[tuple[str, int], Any] = {}

    def read(self, file: str, start: int, end: int) -> memoryview:
        """Return bytes of a file, in memory of their own."""
        fd = open_inside(self.folder, file)
        try:
            return read_span(fd, start, end, where=str(self.folder / file))
        finally:
            os.close(fd)

    def header(self, file: str, start: int) -> Any:
        """Return the header of the safetensors file that begins there, and which shards are in it."""
        if (file, start) not in self._headers:
            self._headers[file, start] = read_shard_header(self.folder, file, start)
        return self._headers[file, start]

    def value(self, span: FileSpan) -> Any:
        """Return what a file of torch.save in a file holds."""
        where = str(self.folder / span.file)
        values = read_values(self.read(span.file, span.start, span.end), where)
        if values.unknown:
            raise NotPlainError(
                f"{where} holds more than data from byte {span.start:,} on: {', '.join(name[:80] for name in values.unknown[:5])}. "
                "Making those would run code that the file names."
            )
        return values.value


class DcpTensors(StoredTensors):
    """The tensors of a folder, by name; each is put together when it is asked for, and none is kept."""

    def __init__(self, files: _Files, tensors: Mapping[str, DcpTensor]) -> None:
        self.where = str(files.folder)
        self._files = files
        self._tensors = tensors
        self.placeholders: dict[str, torch.Tensor] = {
            name: torch.empty(tensor.shape, dtype=_TORCH_DTYPES[tensor.dtype], device="meta") for name, tensor in tensors.items()
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, in memory of its own."""
        tensor = self._tensors[name]
        try:
            found = list(cover_box([chunk.box for chunk in tensor.chunks], box))
        except ValueError as error:
            raise CheckpointError(f"{self.where}: {name[:100]!r} cannot be put together: {error}") from None
        made = empty_host_tensor(_TORCH_DTYPES[tensor.dtype], box.shape)
        for number, part in found:
            chunk = tensor.chunks[number]
            read = self._read_archived if chunk.archived else self._read_safetensors
            made[part.relative_to(box).slices()] = read(tensor, chunk, part.relative_to(chunk.box))
        return made

    def _read_archived(self, tensor: DcpTensor, chunk: DcpChunk, inner: Box) -> torch.Tensor:
        """Return a part of a shard that torch.save wrote; all of the shard is read and compared with its checksum."""
        value = self._files.value(chunk.span)
        self._check(tensor, chunk, value)
        found: torch.Tensor = value.detach()[inner.slices()]
        return found

    def _check(self, tensor: DcpTensor, chunk: DcpChunk, value: Any) -> None:
        expected = f"{tensor.dtype} {list(chunk.box.shape)}"
        there = f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        if there != expected:
            where = Path(self.where, chunk.span.file)
            raise CheckpointError(f"{where}: a shard of {tensor.name[:100]!r} should be {expected}, and is {there[:200]}.")

    def _read_safetensors(self, tensor: DcpTensor, chunk: DcpChunk, inner: Box) -> torch.Tensor:
        """Return a part of a shard in a safetensors file; of the shard, the bytes from its first element to its last are read."""
        file, start = chunk.span.file, chunk.span.start
        header = self._files.header(file, start)
        entry = find_shard(header, tensor, chunk, str(Path(self.where, file)))
        item = _TORCH_DTYPES[tensor.dtype].itemsize
        runs = element_runs(inner, entry.shape, gap=BLOCK_SIZE // item)
        first, end, at = runs[0][0], runs[-1][1], start + header[0].data_start + entry.start
        row = self._files.read(file, at + first * item, at + end * item)
        return from_buffer(row, entry.dtype, (end - first,), 0, len(row)).as_strided(inner.shape, _strides(entry.shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of a tensor that is stored row by row."""
    return torch.empty(shape, device="meta").stride()


@dataclass(frozen=True)
class DcpWeights:
    """The weights of a model in a folder."""

    tensors: DcpTensors
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the state dict that are no tensors."""


@dataclass(frozen=True)
class DcpFolder:
    """A folder whose table of contents was read."""

    metadata: DcpMetadata
    tensors: DcpTensors
    """All tensors, under the names in the table."""
    _files: _Files

    def value(self, name: str) -> Any:
        """Return what is stored under a name that is no tensor."""
        return self._files.value(self.metadata.values[name])

    def state(self, under: str | None = None) -> dict[str, Any]:
        """Return the state that was saved, nested as it was, or what is in it under a key; tensors are the placeholders.

        Numbers that are keys of mappings have become texts, and empty mappings are gone: DCP does not store them.
        """
        wanted = [name for name, path in self.metadata.paths.items() if under is None or (path[0] == under and len(path) > 1)]
        values = {name: self.tensors.placeholders[name] if name in self.tensors else self.value(name) for name in wanted}
        state = nest({name: self.metadata.paths[name] for name in wanted}, values, self.tensors.where)
        return state if under is None else state.get(under, {})

    def weights(self) -> DcpWeights:
        """Return the weights of a model: what is under the key of a model, or at the top, or in the only mapping that there is."""
        under = self._find_model()
        depth = 1 if under is None else 2
        names = [name for name, path in self.metadata.paths.items() if len(path) >= depth and path[0] == (under or name)]
        prefix = "" if under is None else f"{under}."
        tensors = {
            name.removeprefix(prefix): self.metadata.tensors[name]
            for name in names
            if name in self.metadata.tensors and len(self.metadata.paths[name]) == depth
        }
        state = self.state(under) if under is not None else {name: self.value(name) for name in names if name in self.metadata.values}
        extra = {name: _read_all(value, self.tensors) for name, value in state.items() if name not in tensors}
        if self.metadata.has_no_table:
            extra = self._extra_beside()
        taken = set(names)
        left_out = dict.fromkeys(str(path[0]) for name, path in self.metadata.paths.items() if name not in taken)
        if left_out:
            get_logger(__name__).warning(
                f"{self.tensors.where} holds more than weights; {f'its entry {under!r} is' if under else 'the tensors at its top are'} "
                f"taken, without {', '.join(list(left_out)[:5])}."
            )
        if self.metadata.tensors and not tensors:
            held = ", ".join(map(repr, list(self.metadata.tensors)[:3]))
            raise CheckpointError(f"{self.tensors.where} holds no weights of a model, but other tensors such as {held}.")
        return DcpWeights(DcpTensors(self._files, tensors), self.metadata.aliases, extra)

    def _extra_beside(self) -> dict[str, Any]:
        """Return what is no tensor, from the file beside the shards that `save_fsdp_model` writes."""
        for name in _EXTRA:
            with ConfinedFolder(self.metadata.folder) as opened, suppress(MissingCheckpointError):
                where = str(self.metadata.folder / name)
                found = read_part(name, bytearray(opened.read(name, strict_json.LARGEST)), where)
                if not isinstance(found, dict):
                    raise CheckpointError(f"{where} holds no entries of a state dict.")
                return found
        return {}

    def _find_model(self) -> str | None:
        nested = dict.fromkeys(str(path[0]) for path in self.metadata.paths.values() if len(path) > 1)
        if known := [key for key in _MODEL_KEYS if key in nested]:
            return known[0]
        if not nested or any(len(path) == 1 and name in self.metadata.tensors for name, path in self.metadata.paths.items()):
            return None
        if len(nested) == 1:
            return next(iter(nested))
        raise CheckpointError(
            f"{self.tensors.where} holds several states ({', '.join(map(repr, list(nested)[:5]))}), and none of them is called 'model'. "
            "Save the weights of the model under that key, or alone."
        )


def open_dcp(folder: str | os.PathLike[str]) -> DcpFolder:
    """Return the folder of torch.distributed.checkpoint at a path; of its files, the table of contents is read."""
    metadata = read_dcp_metadata(Path(folder))
    files = _Files(metadata.folder)
    return DcpFolder(metadata, DcpTensors(files, metadata.tensors), files)


def read_shard_state(folder: Path, base: str) -> tuple[Any, DcpTensors]:
    """Return a state that `save_fsdp_optimizer` wrote, and the tensors in shards that its placeholders stand for."""
    with ConfinedFolder(folder) as opened:
        names = opened.names()
        tree = next((name for name in (f"{base}.safetensors", f"{base}.json") if name in names), None)
        if tree is None:
            raise CheckpointError(f"{folder} holds no state of an {base}: it has neither {DCP_METADATA} nor {base}.safetensors.")
        data = bytearray(opened.read(tree, _LARGEST_FILE))
    shards = [name for name in names if STATE_SHARD_FILE.fullmatch(name)]
    tensors = DcpTensors(_Files(folder), read_shards_metadata(folder, shards).tensors)
    return read_part(tree, data, str(folder / tree), tensors.placeholders), tensors


def nest(paths: Mapping[str, tuple[str | int, ...]], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return nested mappings and lists with each value at its path; texts are keys of mappings, numbers are places in lists.

    >>> nest({"a.b": ("a", "b"), "a.c.0": ("a", "c", 0)}, {"a.b": 1, "a.c.0": 2}, "a folder")
    {'a': {'b': 1, 'c': [2]}}
    """
    root = _Branch()
    for name, path in paths.items():
        node = root
        for key in path[:-1]:
            inner = node.setdefault(key, _Branch())
            if type(inner) is not _Branch:
                raise CheckpointError(f"{where}: {name[:100]!r} lies inside of something that is no mapping.")
            node = inner
        if path[-1] in node:
            raise CheckpointError(f"{where}: {name[:100]!r} is there twice.")
        node[path[-1]] = values[name]
    return {key: _with_lists(value, where) for key, value in root.items()}


class _Branch(dict[Any, Any]):
    """A mapping or list that is being put together; mappings that were stored as one value are none."""


def _with_lists(node: Any, where: str) -> Any:
    if type(node) is not _Branch:
        return node
    made = {key: _with_lists(value, where) for key, value in node.items()}
    places = [key for key in made if type(key) is int]
    if not places:
        return made
    if len(places) != len(made):
        raise CheckpointError(f"{where} has a mapping with texts and places of a list as keys.")
    return [made.get(place) for place in range(max(places) + 1)]


def _read_all(value: Any, tensors: DcpTensors) -> Any:
    """Return a value with the tensors that its placeholders stand for."""
    if isinstance(value, torch.Tensor):
        name = next((name for name, placeholder in tensors.placeholders.items() if placeholder is value), None)
        return value if name is None else tensors[name]
    if isinstance(value, dict):
        return {key: _read_all(item, tensors) for key, item in value.items()}
    return [_read_all(item, tensors) for item in value] if isinstance(value, list) else value
