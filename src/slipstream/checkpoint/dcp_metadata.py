"""The table of contents of a folder of `torch.distributed.checkpoint` (DCP), read without obeying it.

`FileSystemWriter` writes the file `.metadata`, a pickle, beside files `__0_0.distcp`, ... `read_dcp_metadata` takes the pickle apart with
`pickle_records.py` and accepts only what torch's own writer puts there: its classes with their fields, chunks that lie inside their
tensors, names of files inside the folder, and spans of bytes that lie inside the files and do not overlap. Anything else is an error that
names the file. Folders of `HuggingFaceStorageWriter` have no such file; `read_shards_metadata` makes the same table from their headers.
Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from slipstream.checkpoint.pickle_records import DICT, PickledCall, PickledName, disassemble
from slipstream.checkpoint.shard_layout import SHARDING, Box
from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files import strict_json
from slipstream.files.paths import ConfinedFolder, check_name, open_inside
from slipstream.files.safetensors_layout import ITEM_SIZE, SafetensorsLayout, TensorEntry, read_layout

__all__ = [
    "DCP_METADATA", "DCP_SHARD_FILE", "DTYPE_CODES", "DTYPE_SIZES", "DcpChunk", "DcpMetadata", "DcpTensor", "FileSpan",
    "SAVE_KEY", "STATE_SHARD_FILE", "is_dcp_folder",
    "find_shard", "parse_dcp_metadata", "read_dcp_metadata", "read_shard_header", "read_shards_metadata",
]


DCP_METADATA: Final = ".metadata"
DCP_SHARD_FILE: Final = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
"""Names of files with the shards that one rank has, as `HuggingFaceStorageWriter(save_distributed=True)` gives them."""
STATE_SHARD_FILE: Final = re.compile(r"shard-\d{5}-(model|optimizer)-\d{5}-of-\d{5}\.safetensors", re.ASCII)
"""Names of such files, with those of states of optimizers that Slipstream writes."""
SAVE_KEY: Final = "slipstream_save"
"""The key in the metadata of files of shards that Slipstream wrote: the same in all files of one save."""
DTYPE_CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "complex64": "C64",
    }
)
"""Types of elements as torch names them, and as a safetensors file does."""
DTYPE_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {**{name: ITEM_SIZE[code] for name, code in DTYPE_CODES.items()}, "complex128": 16, "complex32": 4}
)
"""Bytes of an element, by torch's name of its type."""

_OF_METADATA: Final = "torch.distributed.checkpoint.metadata"
_OF_SHARDS: Final = "torch.distributed._shard.sharded_tensor.metadata"
_CONTENTS: Final = f"{_OF_METADATA}.Metadata"
_TENSOR: Final = f"{_OF_METADATA}.TensorStorageMetadata"
_VALUE: Final = f"{_OF_METADATA}.BytesStorageMetadata"
_CHUNK: Final = f"{_OF_METADATA}.ChunkStorageMetadata"
_INDEX: Final = f"{_OF_METADATA}.MetadataIndex"
_STORED: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PROPERTIES: Final = (f"{_OF_METADATA}.TensorProperties", f"{_OF_SHARDS}.TensorProperties")
_SIZE: Final = "torch.Size"
_LAYOUT: Final = "torch.serialization._get_layout"
_KNOWN: Final = frozenset(
    {
        _CONTENTS, _TENSOR, _VALUE, _CHUNK, _INDEX, _STORED, *_PROPERTIES, _SIZE, _LAYOUT, DICT,
        f"{_OF_METADATA}.StorageMeta", f"{_OF_METADATA}._MEM_FORMAT_ENCODING", f"{_OF_SHARDS}.MEM_FORMAT_ENCODING",
        *(f"pathlib{local}.{kind}Path" for local in ("", "._local") for kind in ("Posix", "PurePosix", "Windows", "PureWindows")),
    }
)  # fmt: skip
"""Every class and function that a table of contents may name."""
_LARGEST_METADATA: Final = 256 << 20
_LARGEST: Final = 2**59
"""Elements of a tensor; its bytes can still be counted."""
_MOST_DIMS: Final = 64
_MOST_PARTS: Final = 64
_ZIP: Final = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of a file of the folder."""

    file: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A shard of a tensor, and where it is stored."""

    box: Box
    span: FileSpan
    archived: bool
    """Whether the span is a file of `torch.save`; else a safetensors file begins there."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor: its name as it is stored, its type by torch's name, and its shards, of which none is empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * DTYPE_SIZES[self.dtype]


@dataclass(frozen=True)
class DcpMetadata:
    """What a folder holds."""

    folder: Path
    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, FileSpan]
    """What is no tensor, by name: each a file of `torch.save`."""
    paths: Mapping[str, tuple[str | int, ...]]
    """By name, the keys that lead to it in the state that was saved."""
    has_no_table: bool = False
    """Whether it was put together from headers, as there is no `.metadata`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of tied weights, and the name under which each is stored, as far as the folder knows of them."""

    def files(self) -> list[str]:
        """Return the names of all files that hold something."""
        spans = [chunk.span for tensor in self.tensors.values() for chunk in tensor.chunks]
        return sorted({span.file for span in (*spans, *self.values.values())})

    def stored_files(self) -> list[str]:
        """Return the same, with the table of contents."""
        return self.files() if self.has_no_table else [DCP_METADATA, *self.files()]


def is_dcp_folder(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is one of torch.distributed.checkpoint, by the names in it: one that `read_dcp_metadata` is to read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     is_dcp_folder(folder)
    False
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return DCP_METADATA in names or any(name.endswith(DCP_METADATA) or DCP_SHARD_FILE.fullmatch(name) for name in names)


def read_dcp_metadata(folder: Path) -> DcpMetadata:
    """Return what a folder of torch.distributed.checkpoint holds, whichever of torch's writers wrote it."""
    with ConfinedFolder(folder) as opened:
        try:
            data = opened.read(DCP_METADATA, _LARGEST_METADATA)
        except MissingCheckpointError:
            names = opened.names([])
            if shards := [name for name in names if DCP_SHARD_FILE.fullmatch(name)]:
                return read_shards_metadata(folder, shards)
            alone = [name for name in names if name.endswith(DCP_METADATA) and "/" not in name]
            why = f"each rank wrote a table of contents of its own ({alone[0]}), which are not joined here" if alone else "it is missing"
            raise CheckpointError(
                f"{folder / DCP_METADATA} is the table of contents of a folder of torch.distributed.checkpoint: {why}. "
                "If its save did not come to its end, use another checkpoint."
            ) from None
        found = parse_dcp_metadata(data, str(folder / DCP_METADATA))
        heads = _Heads(opened)
        return _with_formats(folder, found, heads)


@dataclass(frozen=True)
class _Contents:
    """What `.metadata` says, before the other files are looked at."""

    tensors: dict[str, tuple[str, tuple[int, ...], list[tuple[Box, FileSpan]]]]
    values: dict[str, FileSpan]
    paths: dict[str, tuple[str | int, ...]]
    where: str


def parse_dcp_metadata(data: bytes, where: str) -> _Contents:
    """Return what the bytes of a `.metadata` say; `where` is its path, for messages."""
    record = disassemble(data, where, _LARGEST_METADATA)
    _check_classes(record, where)
    return _MetadataReader(where).read(record)


def _check_classes(record: Any, where: str) -> None:
    """Raise if something is named that no table of contents names."""
    waiting, seen = [record], set[int]()
    while waiting:
        node = waiting.pop()
        if type(node) not in (PickledCall, tuple, list) or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is PickledCall:
            if node.path not in _KNOWN:
                raise CheckpointError(
                    f"{where} names {node.path[:100]}, which no table of contents of torch.distributed.checkpoint does. It is not run, and "
                    "the folder is not read."
                )
            waiting += [node.arguments, node.state, node.items]
        else:
            waiting += node


class _MetadataReader:
    """Reads the records of one `.metadata`."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where} is damaged, or was made to deceive: {why}. Use another copy of the checkpoint.")

    def read(self, record: Any) -> _Contents:
        fields = self._fields(record, _CONTENTS)
        described = self._mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
        stored = self._stored(fields.get("storage_data"))
        tensors: dict[str, tuple[str, tuple[int, ...], list[tuple[Box, FileSpan]]]] = {}
        values: dict[str, FileSpan] = {}
        for name, entry in described.items():
            if type(entry) is PickledCall and entry.path == _VALUE:
                values[name] = self._take(stored, name, None)
            else:
                tensors[name] = self._tensor(name, entry, stored)
        if stored:
            raise self.wrong(f"something of {next(iter(stored))[0][:100]!r} is stored, and nothing says what it is")
        return _Contents(tensors, values, self._paths(fields.get("planner_data"), [*tensors, *values]), self.where)

    def _fields(self, record: Any, path: str) -> dict[str, Any]:
        """Return the fields of an object of a class."""
        if type(record) is not PickledCall or record.path != path or record.arguments != () or record.items:
            raise self.wrong(f"where {path} should be, there is something else")
        return self._mapping(record.state, path) if record.state is not None else {}

    def _mapping(self, record: Any, what: str) -> dict[str, Any]:
        if type(record) is not PickledCall or record.path != DICT:
            raise self.wrong(f"{what} is no mapping")
        if not all(type(pair) is tuple and len(pair) == 2 and type(pair[0]) is str for pair in record.items):
            raise self.wrong(f"{what} has a key that is no text")
        found = dict(record.items)
        if len(found) != len(record.items):
            raise self.wrong(f"{what} has a key twice")
        return found

    def _counts(self, record: Any, what: str) -> tuple[int, ...]:
        if type(record) is PickledCall and record.path == _SIZE and len(record.arguments) == 1:
            record = record.arguments[0]
        if type(record) not in (tuple, list) or len(record) > _MOST_DIMS:
            raise self.wrong(f"{what} is no size")
        if not all(type(count) is int and 0 <= count <= _LARGEST for count in record):
            raise self.wrong(f"{what} is {record!r:.80}")
        return tuple(record)

    def _stored(self, record: Any) -> dict[tuple[str, tuple[int, ...] | None], FileSpan]:
        """Return where everything is stored, by name and offset."""
        if type(record) is not PickledCall or record.path != DICT:
            raise self.wrong("storage_data is no mapping")
        found: dict[tuple[str, tuple[int, ...] | None], FileSpan] = {}
        for pair in record.items:
            if type(pair) is not tuple or len(pair) != 2:
                raise self.wrong("storage_data has something that is no key with a value")
            index, place = self._fields(pair[0], _INDEX), self._fields(pair[1], _STORED)
            name, offset = index.get("fqn"), index.get("offset")
            if type(name) is not str:
                raise self.wrong("something without a name is stored")
            key = (name, None if offset is None else self._counts(offset, f"the offset of {name[:100]!r}"))
            if key in found:
                raise self.wrong(f"a shard of {name[:100]!r} is stored twice")
            if place.get("transform_descriptors"):
                raise CheckpointError(
                    f"{self.where} says that {name[:100]!r} is stored through extensions ({place['transform_descriptors']!r:.80}), such as "
                    "compression. Those are not read here; save it again without them."
                )
            file, start, length = place.get("relative_path"), place.get("offset"), place.get("length")
            if type(start) is not int or type(length) is not int or not (0 <= start <= _LARGEST and 0 <= length <= _LARGEST):
                raise self.wrong(f"{name[:100]!r} is stored at {start!r:.40} with {length!r:.40} bytes")
            found[key] = FileSpan(check_name(file, self.where), start, length)
        return found

    def _take(self, stored: dict[Any, FileSpan], name: str, offset: tuple[int, ...] | None) -> FileSpan:
        span = stored.pop((name, offset), None)
        if span is None:
            raise self.wrong(f"nothing says where {name[:100]!r} is stored{'' if offset is None else f' from {list(offset)} on'}")
        return span

    def _tensor(self, name: str, record: Any, stored: dict[Any, FileSpan]) -> tuple[str, tuple[int, ...], list[tuple[Box, FileSpan]]]:
        fields = self._fields(record, _TENSOR)
        dtype, shape = self._dtype(name, fields.get("properties")), self._counts(fields.get("size"), f"the size of {name[:100]!r}")
        if math.prod(filter(None, shape)) > _LARGEST:  # a size of 0 hides the others
            raise self.wrong(f"{name[:100]!r} has the size {list(shape)!r:.80}")
        given = fields.get("chunks")
        if type(given) is not list:
            raise self.wrong(f"{name[:100]!r} has no list of chunks")
        chunks = []
        for entry in given:
            found = self._fields(entry, _CHUNK)
            box = Box(self._counts(found.get("offsets"), f"an offset of {name[:100]!r}"), self._counts(found.get("sizes"), "a chunk"))
            if not len(box.offset) == len(box.shape) == len(shape) or any(
                start + length > size for start, length, size in zip(box.offset, box.shape, shape, strict=True)
            ):
                raise self.wrong(f"a shard of {name[:100]!r} reaches beyond it")
            if not box.volume:  # ranks without a part of it have stored nothing, under one key or several
                stored.pop((name, box.offset), None)
                continue
            span = self._take(stored, name, box.offset)
            if span.length < box.volume * DTYPE_SIZES[dtype]:
                raise self.wrong(f"a shard of {name[:100]!r} of {list(box.shape)} is stored in {span.length} bytes")
            chunks.append((box, span))
        return dtype, shape, chunks

    def _dtype(self, name: str, record: Any) -> str:
        if type(record) is not PickledCall or record.path not in _PROPERTIES or type(record.state) is not tuple or len(record.state) != 5:
            raise self.wrong(f"the properties of {name[:100]!r} are missing")
        dtype, layout, *_ = record.state
        known = type(dtype) is PickledName and dtype.path.startswith("torch.") and dtype.path.removeprefix("torch.") in DTYPE_SIZES
        strided = type(layout) is PickledCall and layout.path == _LAYOUT and layout.arguments == ("torch.strided",)
        if not known or not strided:
            shown = dtype.path if type(dtype) is PickledName else type(dtype).__name__
            raise CheckpointError(f"{self.where}: {name[:100]!r} is a tensor of {shown[:80]} that cannot be read here, or a sparse one")
        return str(dtype.path.removeprefix("torch."))

    def _paths(self, record: Any, names: list[str]) -> dict[str, tuple[str | int, ...]]:
        if record is None:  # the state was not nested, or was saved as it is
            return {name: (name,) for name in names}
        said = self._mapping(record, "planner_data")
        paths: dict[str, tuple[str | int, ...]] = {}
        for name in names:
            path = said.get(name, (name,))
            if type(path) not in (tuple, list) or not 0 < len(path) <= _MOST_PARTS or type(path[0]) is not str:
                raise self.wrong(f"planner_data has no path for {name[:100]!r}")
            if not all(type(key) is str or (type(key) is int and 0 <= key < len(names) + _MOST_PARTS) for key in path):
                raise self.wrong(f"planner_data has the path {path!r:.100} for {name[:100]!r}")
            if ".".join(map(str, path)) != name:
                raise self.wrong(f"planner_data has the path {path!r:.100} for {name[:100]!r}, which is another name")
            paths[name] = tuple(path)
        return paths


class _Heads:
    """The sizes and first bytes of the files of a folder."""

    def __init__(self, folder: ConfinedFolder) -> None:
        self._folder = folder

    def look(self, file: str, starts: list[int]) -> tuple[int, dict[int, bool]]:
        """Return the size of a file, and whether a file of torch.save begins at each of these places."""
        fd = self._folder.open(file)
        try:
            return os.fstat(fd).st_size, {start: os.pread(fd, len(_ZIP), start) == _ZIP for start in starts}
        except OSError as error:
            raise CheckpointError(f"{self._folder.path / file} cannot be read: {error.strerror}.") from error
        finally:
            os.close(fd)


def _with_formats(folder: Path, contents: _Contents, heads: _Heads) -> DcpMetadata:
    """Return the same with the format of each shard, once sizes and overlaps were checked.

    Pieces are files of torch.save, one after the other; with `SerializationFormat.SAFETENSORS` those of a file are one safetensors file
    at its end, and the place that the table gives for each of them is where that file begins.
    """
    spans: dict[str, list[tuple[FileSpan, bool]]] = {}
    for span in contents.values.values():
        spans.setdefault(span.file, []).append((span, False))
    for _, _, chunks in contents.tensors.values():
        for _, span in chunks:
            spans.setdefault(span.file, []).append((span, True))
    archived: dict[FileSpan, bool] = {}
    for file, held in spans.items():
        where = str(folder / file)
        size, formats = heads.look(file, [span.start for span, is_tensor in held if is_tensor])
        _check_spans(held, formats, size, where)
        archived |= {span: not is_tensor or formats[span.start] for span, is_tensor in held}
    return DcpMetadata(
        folder,
        {
            name: DcpTensor(name, dtype, shape, tuple(DcpChunk(box, span, archived[span]) for box, span in chunks))
            for name, (dtype, shape, chunks) in contents.tensors.items()
        },
        contents.values,
        contents.paths,
    )


def _check_spans(held: list[tuple[FileSpan, bool]], formats: Mapping[int, bool], size: int, where: str) -> None:
    """Raise if spans of a file overlap, or reach beyond it."""
    end = joined = 0
    for span, is_tensor in sorted(held, key=lambda entry: (entry[0].start, entry[0].length)):
        if is_tensor and not formats[span.start]:
            if joined and joined != span.start + 1:
                raise CheckpointError(f"{where} holds two safetensors files, or something behind one; torch writes none so.")
            if not joined and span.start < end:
                raise CheckpointError(f"{where}: what is stored at byte {span.start:,} overlaps something else.")
            joined = span.start + 1
            end = max(end, span.start + 8) + span.length
        else:
            if joined or span.start < end:
                raise CheckpointError(f"{where}: what is stored at byte {span.start:,} overlaps something else.")
            end = span.end
        if end > size:
            raise CheckpointError(f"{where} has {size:,} bytes, and the table of contents places something at {span.start:,} to {end:,}.")


# -- folders of safetensors -------------------------------------------------------------------------------------------


def read_shards_metadata(folder: Path, names: list[str]) -> DcpMetadata:
    """Return what files of shards hold that have no table of contents: each header says which shard of which tensor is there.

    Torch does not store the shape of the whole: it is as large as the shards reach. Files that Slipstream wrote say it.
    """
    shards: dict[str, list[tuple[TensorEntry, Box, tuple[int, ...], DcpChunk]]] = {}
    aliases: dict[str, str] = {}
    saves: dict[str | None, str] = {}
    for file in names:
        layout, positions = read_shard_header(folder, file)
        saves[layout.metadata.get(SAVE_KEY)] = file
        aliases |= {other: kept for other, kept in layout.metadata.items() if kept in layout.entries}
        for name, (offset, shape) in positions.items():
            entry = layout.entries[name]
            box = Box(offset, entry.shape)
            span = FileSpan(file, 0, entry.end - entry.start)
            reach = tuple(start + length for start, length in zip(offset, entry.shape, strict=True))
            shards.setdefault(name, []).append((entry, box, shape or reach, DcpChunk(box, span, archived=False)))
    if len(saves) > 1:
        raise CheckpointError(f"{folder}: {' and '.join(sorted(saves.values())[:2])} are not of one save. Use another checkpoint.")
    codes = {code: name for name, code in DTYPE_CODES.items()}
    tensors = {}
    for name, held in shards.items():
        if len({(entry.dtype, len(entry.shape)) for entry, _, _, _ in held}) > 1:
            raise CheckpointError(f"{folder}: the shards of {name[:100]!r} differ in type, or in their number of dims.")
        shape = tuple(map(max, zip(*(reach for _, _, reach, _ in held), strict=True)))
        if math.prod(filter(None, shape)) > _LARGEST:
            raise CheckpointError(f"{folder}: the shards of {name[:100]!r} are said to reach to {list(shape)!r:.80}.")
        chunks = tuple(chunk for _, box, _, chunk in held if box.volume)
        tensors[name] = DcpTensor(name, codes[held[0][0].dtype], shape, chunks)
    ties = {other: kept for other, kept in aliases.items() if other not in tensors}
    return DcpMetadata(folder, tensors, {}, {name: (name,) for name in tensors}, True, ties)


_Positions = dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]]
"""Where the shard of each tensor begins, and the shape of the whole where the file says it."""


def read_shard_header(folder: Path, file: str, start: int = 0) -> tuple[SafetensorsLayout, _Positions]:
    """Return the header of the safetensors file that begins at a byte of a file and goes on to its end, and which shards are in it."""
    where = str(folder / file)
    fd = open_inside(folder, file)
    try:
        layout = read_layout(lambda offset, count: os.pread(fd, count, start + offset), os.fstat(fd).st_size - start, where)
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}.") from error
    finally:
        os.close(fd)
    return layout, _positions(layout, where)


def find_shard(header: tuple[SafetensorsLayout, _Positions], tensor: DcpTensor, chunk: DcpChunk, where: str) -> TensorEntry:
    """Return where the shard of a tensor lies in a safetensors file; raise if it is not there, or another one."""
    layout, positions = header
    entry = layout.entries.get(tensor.name)
    if entry is None or (entry.dtype, entry.shape) != (DTYPE_CODES.get(tensor.dtype), chunk.box.shape):
        there = "not there" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        expected = f"{tensor.dtype} {list(chunk.box.shape)}"
        raise CheckpointError(f"{where}: a shard of {tensor.name[:100]!r} should be {expected}, and is {there}.")
    if positions[tensor.name][0] != chunk.box.offset:
        raise CheckpointError(f"{where} holds another shard of {tensor.name[:100]!r} than the one from {list(chunk.box.offset)} on.")
    return entry


def _positions(layout: SafetensorsLayout, where: str) -> _Positions:
    said = strict_json.parse(layout.metadata.get(SHARDING, "null").encode(), f"The metadata of {where}")
    if not isinstance(said, dict) or said.keys() != layout.entries.keys():
        raise CheckpointError(f"{where} does not say of each of its tensors which shard it is.")
    return {name: _position(layout.entries[name], entry, where) for name, entry in said.items()}


def _position(entry: TensorEntry, said: Any, where: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    def counts(key: str) -> tuple[int, ...] | None:
        value = said.get(key) if isinstance(said, dict) else None
        if not isinstance(value, list) or len(value) != len(entry.shape):
            return None
        return tuple(value) if all(type(part) is int and 0 <= part <= _LARGEST for part in value) else None

    offset, shape = counts("saved_offsets"), counts("global_shape")
    inside = shape is None or all(
        start + length <= size for start, length, size in zip(offset or (), entry.shape, shape, strict=bool(offset))
    )
    if offset is None or not inside:
        raise CheckpointError(f"{where} does not say where the shard of {entry.name[:100]!r} begins, or that is beyond its tensor.")
    return offset, shape
