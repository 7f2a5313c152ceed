"""Weights on a disk: files, safetensors or of `torch.save`, a checkpoint of Slipstream, or a folder of torch.distributed.checkpoint.

`find_weights` finds the weights at a path. Nothing is trusted: names stay inside the folder, an index must be right about every tensor,
and files of a checkpoint must have the checksums of its manifest. Files of `torch.save` are read as data by `pickle_reader.py`; old
formats and classes that torch allows go through `torch.load(weights_only=True)`. Files are memory-mapped, so only tensors that are used
take memory.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - the error of torch's restricted reader; nothing is unpickled here
from typing import Any, Final

import torch

from slipstream.checkpoint.dcp_metadata import is_dcp_folder
from slipstream.checkpoint.dcp_reader import DcpFolder, DcpWeights, open_dcp
from slipstream.checkpoint.deserialize import read_part
from slipstream.checkpoint.manifest import (
    FSDP_MODEL_NAME,
    MANIFEST,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    read_manifest,
)
from slipstream.checkpoint.pickle_reader import read_values
from slipstream.checkpoint.pickle_records import NotPlainError
from slipstream.checkpoint.sharded import open_shards
from slipstream.checkpoint.tensor_bytes import from_buffer
from slipstream.checkpoint.torch_archive import LegacyFormatError, read_archive
from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.checksum import digest
from slipstream.files.disk import FileEntry
from slipstream.files.mapped_file import MappedFile
from slipstream.files.paths import ConfinedFolder, check_name
from slipstream.files.safetensors_layout import SafetensorsLayout
from slipstream.logging import get_logger

__all__ = ["SHARDS_FILE", "WeightFile", "WeightSource", "find_weights", "is_safetensors", "is_torch_file", "read_index", "read_torch_file"]


_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
_GLOBAL: Final = re.compile(r"GLOBAL (\S{1,200})")
_OLD: Final = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled magic number at the start of torch.save files before torch 1.6."""


def is_torch_file(buffer: Any) -> bool:
    """Whether bytes look like the start of a torch.save file.

    >>> is_torch_file(b"PK\\x03\\x04..."), is_torch_file(b'{"step": 3}')
    (True, False)
    """
    return bytes(buffer[:4]) == _ZIP or (bytes(buffer[:1]) == _PICKLE and bytes(buffer[8:9]) != b"{")


def read_torch_file(buffer: Any, where: str, remedy: str, *, views: bool = False, map_location: Any = None, **options: Any) -> Any:
    """Return the value in a torch.save file; with `views`, tensors may share its bytes. `remedy` ends the error for more than data.

    With options of `torch.load`, torch reads it.
    """
    if map_location is None and not options:
        try:
            values = read_values(memoryview(buffer), where)
        except (LegacyFormatError, NotPlainError):
            if bytes(buffer[: len(_OLD)]) != _OLD and bytes(buffer[:4]) != _ZIP:
                raise
        else:
            if not values.unknown:
                return values.value if views else values.owned()
    if bytes(buffer[:4]) == _ZIP:
        read_archive(memoryview(buffer), where)  # refuses compressed entries, which torch would unpack to any size
    try:
        return torch.load(io.BytesIO(buffer), map_location=map_location or "cpu", weights_only=True, **options)
    except UnpicklingError as error:
        named = _GLOBAL.search(str(error))
        why = next((line.strip()[:200] for line in str(error).splitlines() if "nsupported" in line), "its pickle cannot be read")
        raise CheckpointError(f"{where} contains more than data, which is not run: {named[1] if named else why}. {remedy}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:  # torch raises these for damaged files
        raise CheckpointError(f"{where} is not a torch.save file, or is damaged: {str(error)[:300]}") from error


SHARDS_FILE: Final = "(shards)"
"""The name of the pseudo file with all tensors that are stored in shards."""

_INDEX: Final = ".index.json"
_SAFE: Final = ".safetensors"
_TORCH: Final = (".bin", ".pt", ".pth", ".ckpt")
_FSDP_FOLDER: Final = f"{FSDP_MODEL_NAME}_0"
_USUAL: Final = (
    SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME, f"{FSDP_MODEL_NAME}{_SAFE}", f"{FSDP_MODEL_NAME}.bin",
)


@dataclass(frozen=True)
class WeightFile:
    """A weight file: its tensors by name, and the layout if it is safetensors; `mapped` is None if it stands for many shards."""

    where: str
    mapped: MappedFile | None
    tensors: Mapping[str, torch.Tensor]
    layout: SafetensorsLayout | None
    aliases: Mapping[str, str]
    forms: Mapping[str, torch.Tensor] | None = None
    """Meta tensors by name, if the tensors are assembled on access."""


@dataclass(frozen=True)
class WeightSource:
    """The files with the weights of one model."""

    folder: Path
    files: tuple[str, ...]
    index: str | None = None
    weight_map: Mapping[str, str] | None = None
    """The file of each tensor, from the index."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    extra: str | None = None
    """The part with the values that are not tensors."""
    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    """Sizes and checksums, if there is a manifest."""
    links_within: Path | None = None
    shards: tuple[str, ...] = ()
    """Shard files, which are opened together as `SHARDS_FILE`."""
    dcp: DcpFolder | None = None
    """The folder, where it is one of torch.distributed.checkpoint; its weights are opened as `SHARDS_FILE`."""

    @cached_property
    def _dcp_weights(self) -> DcpWeights:
        assert self.dcp is not None
        return self.dcp.weights()

    def stored_files(self) -> list[str]:
        """Return the names of the files that hold the weights."""
        if self.dcp is not None:
            return self.dcp.metadata.stored_files()
        return [name for name in self.files if name != SHARDS_FILE] + list(self.shards)

    def open(self, name: str, *, verify: bool = True) -> WeightFile:
        """Return a file and its tensors; with an index, those that it lists for the file."""
        if name == SHARDS_FILE:
            return self._open_shards()
        file = self._map(name, verify=verify)
        buffer = file.buffer
        if name.endswith(_SAFE) or (not name.endswith(_TORCH) and is_safetensors(buffer, len(buffer))):
            layout = file.layout
            tensors = {
                entry.name: from_buffer(buffer, entry.dtype, entry.shape, *layout.span(entry)) for entry in layout.entries.values()
            }
            aliases = {other: kept for other, kept in layout.metadata.items() if kept in tensors and other not in tensors}
            return WeightFile(file.where, file, self._chosen(name, tensors), layout, aliases)
        return WeightFile(file.where, file, self._chosen(name, _torch_tensors(buffer, file.where)), None, {})

    def _open_shards(self) -> WeightFile:
        if self.dcp is not None:
            tensors = self._dcp_weights.tensors
            return WeightFile(str(self.folder), None, tensors, None, self._dcp_weights.aliases, tensors.placeholders)
        shards = open_shards(self.folder, self.shards, self.entries, self._mapped)
        return WeightFile(str(self.folder), None, shards, None, {}, shards.placeholders)

    def each(self) -> Iterator[WeightFile]:
        """Yield the opened files in order."""
        yield from map(self.open, self.files)

    def descriptor(self, name: str) -> int:
        """Open a file for reading; the caller closes the descriptor."""
        with ConfinedFolder(self.folder, links_within=self.links_within) as folder:
            return folder.open(name)

    def read_bytes(self, name: str) -> bytes:
        """Return the bytes of a small file."""
        return bytes(self._mapped(name))

    def read_extra(self) -> dict[str, Any]:
        """Return the values that are not tensors."""
        if self.dcp is not None:
            return dict(self._dcp_weights.extra)
        if self.extra is None:
            return {}
        found = read_part(self.extra, self._mapped(self.extra), str(self.folder / self.extra))
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.folder / self.extra} is not a mapping.")
        return found

    def _chosen(self, file: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if self.weight_map is None:
            return tensors
        wanted = [name for name, place in self.weight_map.items() if place == file]
        if absent := [name for name in wanted if name not in tensors]:
            raise CheckpointError(
                f"{self.folder / (self.index or '')} lists {absent[0]!r} in {file}, which does not contain it. "
                "The files belong to different saves, or one of them is damaged: fetch or save them again."
            )
        return {name: tensors[name] for name in wanted}

    def _map(self, name: str, *, verify: bool = True) -> MappedFile:
        where, fd = str(self.folder / name), self.descriptor(name)
        try:
            file = MappedFile(fd, where)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror}.") from error
        entry = self.entries.get(name) if verify else None
        if entry is not None and (file.size != entry.size or digest(file.buffer) != entry.checksum):
            raise CheckpointError(f"{where} is damaged: its checksum is not that in the manifest. Use another checkpoint.")
        return file

    def _mapped(self, name: str) -> Any:
        """Return the bytes of a mapped file."""
        return self._map(name).buffer


def is_safetensors(head: Any, size: int) -> bool:
    """Whether bytes look like the start of a safetensors file of this size."""
    return bytes(head[8:9]) == b"{" and int.from_bytes(head[:8], "little") <= size - 8


def _torch_tensors(buffer: Any, where: str) -> dict[str, torch.Tensor]:
    state = read_torch_file(buffer, where, "Save the state_dict() of the model instead.", views=True)
    if isinstance(state, Mapping) and isinstance(inner := state.get("state_dict"), Mapping):
        get_logger(__name__).warning(f"{where} contains more than weights; its entry 'state_dict' is used.")
        state = inner
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{where} contains a {type(state).__name__}, not a mapping of names to tensors.")
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    inside = [
        name
        for name, value in state.items()
        if isinstance(value, Mapping) and any(isinstance(entry, torch.Tensor) for entry in value.values())
    ]
    if inside and not tensors:
        raise CheckpointError(
            f"{where} contains several state dicts: {', '.join(map(repr, inside[:5]))}. Load it with slipstream.utils.load, and "
            f"pass one of them to load_state_dict: model.load_state_dict(loaded[{inside[0]!r}])."
        )
    return tensors


def find_weights(path: Path) -> WeightSource:
    """Find the weights at a path: a file, an index, a folder with one of the usual names, or a checkpoint of Slipstream."""
    if path.is_dir():
        return _in_folder(path)
    if not path.exists():
        near = sorted(entry.name for entry in path.parent.iterdir())[:8] if path.parent.is_dir() else []
        there = f" In {path.parent} there are: {', '.join(near)}." if near else ""
        if not near and not path.is_absolute() and len(path.parts) == 2:  # like the name of a model on a hub
            there = " If this names a model on a hub, download it first and pass the folder: nothing is downloaded here."
        raise CheckpointError(f"There is nothing at {path}.{there}")
    if path.name.endswith(_INDEX):
        return read_index(path.parent, path.name)
    if path.is_symlink() and _links_within(path.parent) is None:  # a link that the user names may lead anywhere
        path = Path(os.path.realpath(path))
    return _single(path.parent, path.name)


def _links_within(folder: Path) -> Path | None:
    """Return the folder that links may lead to: a download cache stores the files of a snapshot as links to its `blobs`."""
    parent = folder.absolute().parent
    return parent.parent if parent.name == "snapshots" and (parent.parent / "blobs").is_dir() else None


def _in_folder(folder: Path) -> WeightSource:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    if MANIFEST in names:
        return _in_checkpoint(folder)
    for name in _USUAL:
        if name in names:
            return read_index(folder, name) if name.endswith(_INDEX) else _single(folder, name)
    if is_dcp_folder(folder):
        return WeightSource(folder, (SHARDS_FILE,), dcp=open_dcp(folder))
    if (folder / _FSDP_FOLDER).is_dir():  # as Accelerate saves what is sharded
        return _in_folder(folder / _FSDP_FOLDER)
    for found in ([name for name in names if name.endswith(_INDEX)], [name for name in names if name.endswith((_SAFE, *_TORCH))]):
        if len(found) == 1:
            return read_index(folder, found[0]) if found[0].endswith(_INDEX) else _single(folder, found[0])
    there = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
    raise CheckpointError(
        f"{folder} has no weights under a usual name ({', '.join(_USUAL[:4])}), but {there}. Pass the path of a file or an index."
    )


def _in_checkpoint(folder: Path) -> WeightSource:
    manifest = read_manifest(folder)
    if not manifest.models:
        raise CheckpointError(f"{folder} is a checkpoint without a model.")
    if len(manifest.models) > 1:
        get_logger(__name__).warning(f"{folder} has {len(manifest.models)} models; the first one, {manifest.models[0].kind}, is used.")
    model = manifest.models[0]
    files = (*model.files, SHARDS_FILE) if model.shards else model.files
    return WeightSource(folder, files, model.index, None, model.aliases, model.extra, manifest.files, shards=model.shards)


def _single(folder: Path, name: str) -> WeightSource:
    return WeightSource(folder, (name,), extra=_extra_beside(folder, name), links_within=_links_within(folder))


def _extra_beside(folder: Path, name: str) -> str | None:
    """Return the file beside the weights in which `save_model` stores values that are not tensors."""
    base = name.partition(".")[0]
    names = [f"{base}_extra{suffix}" for suffix in (".json", _SAFE) if name.endswith((_SAFE, f"{_SAFE}{_INDEX}"))]
    return next((name for name in names if (folder / name).is_file()), None)


def read_index(folder: Path, index: str) -> WeightSource:
    """Return the weights that an index lists; its files must be beside it."""
    where = str(folder / index)
    links = _links_within(folder)
    with ConfinedFolder(folder, links_within=links) as held:
        content = strict_json.parse(held.read(index, strict_json.LARGEST), where)
    weight_map = content.get("weight_map", content) if isinstance(content, dict) else None  # Accelerate also reads the mapping alone
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where} is not an index of weights: it has no mapping 'weight_map' from names of tensors to files.")
    for file in weight_map.values():
        if "/" in check_name(file, where) or not file.endswith((_SAFE, *_TORCH)):
            raise CheckpointError(
                f"{where} lists the file {file!r}, and weights must be .safetensors or .bin files beside the index."
            )
    return WeightSource(
        folder, tuple(dict.fromkeys(weight_map.values())), index, weight_map, {}, _extra_beside(folder, index), links_within=links
    )
