"""Weights in many files become weights in one: `merge_weights`, piece by piece, without ever holding more than a piece.

The one file is written beside its place and takes it when it is on the disk. The many are left alone, or, if that is asked for, removed
after the one has been read back and has the checksum of what was written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.checkpoint.format import MANIFEST
from slipstream.checkpoint.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from slipstream.checkpoint.placing import Placing, local_path
from slipstream.checkpoint.raw import DTYPES, tensor_bytes
from slipstream.checkpoint.sources import Source, find
from slipstream.checkpoint.weights import split
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.disk import Disk
from slipstream.files.tensors import file_order, plan
from slipstream.runtime.progress import bar, waiting

__all__ = ["Progress", "merge_weights"]

Progress = Callable[[int, int], None]
"""Is told how many bytes are done, of how many."""

_PIECE: Final = 4 << 20


@dataclass(frozen=True)
class _Tensor:
    """A tensor that will be copied: from which file, and from where in it (None: the file has to be asked)."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    span: tuple[int, int] | None


def merge_weights(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    remove: bool = False,
    safe_serialization: bool = True,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> Path:
    """Writes the weights in a folder (or those of an index) as one file, and gives back its path.

    `output` is a folder, in which the file is `model.safetensors`, or the path of a file. `remove` deletes the files that were merged,
    once the new one has been verified. With `safe_serialization=False` the file is `pytorch_model.bin`, by `torch.save`. `progress` is told
    how far it is, in the place of a bar.

    >>> import tempfile
    >>> from slipstream.checkpoint.models import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(8, 8), f"{folder}/parts", max_shard_size=100)
    ...     len(os.listdir(f"{folder}/parts")), merge_weights(f"{folder}/parts", f"{folder}/whole").name
    (3, 'model.safetensors')
    """
    path = local_path(folder, "folder")
    _refuse_sharded_state(path)
    source = find(path)
    target = _target(local_path(output, "output"), safe_serialization)
    _check(source, target, remove=remove)
    disk = disk or Disk()
    with Placing(target.parent, disk) as files:
        if safe_serialization:
            with bar(None, "merging", "B", wanted=None if progress is None else False) as shown:
                checksum = _merge(files, source, target, progress or shown.to)
        else:
            with waiting("merging"):
                checksum = files.adopt(target.name, lambda beside: torch.save(_everything(source), beside)).checksum
        files.place()
    if remove:
        _remove(source, target, checksum, disk)
    return target


def _refuse_sharded_state(path: Path) -> None:
    folder = path if path.is_dir() else path.parent
    if (folder / ".metadata").exists() and any(folder.glob("*.distcp")):
        raise ConfigError(
            f"{folder} was written by torch.distributed.checkpoint, whose table of contents is a pickle; it is not read here. "
            "Convert it with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch` if you trust it."
        )


def _target(output: Path, safe_serialization: bool) -> Path:
    name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    if output.is_dir():
        return output / name
    if output.suffix == Path(name).suffix:
        return output
    if output.exists():
        raise ConfigError(
            f"output={str(output)!r} is a file that does not end in {Path(name).suffix}. Write a folder, or a file that does."
        )
    if output.suffix in (".safetensors", ".bin"):
        raise ConfigError(f"output={str(output)!r} does not fit safe_serialization={safe_serialization}: that writes {Path(name).suffix}.")
    return output / name


def _check(source: Source, target: Path, *, remove: bool) -> None:
    sources = [source.folder / name for name in source.files]
    if target.exists() and any(one.exists() and one.samefile(target) for one in sources):
        raise ConfigError(f"output={str(target)!r} is one of the files that would be merged. Write to another folder.")
    if (target.parent / MANIFEST).exists():
        raise ConfigError(f"{target.parent} is a checkpoint of save_state, whose files are not to be changed. Write to another folder.")
    if remove and (source.entries or source.links_within):
        what = "a checkpoint of save_state" if source.entries else "a cache of downloads"
        raise ConfigError(
            f"{source.folder} is {what}, of which no files are removed. Merge without removing, or delete the folder yourself."
        )


def _merge(files: Placing, source: Source, target: Path, progress: Progress) -> str:
    tensors, aliases = _contents(source)
    told = {other: kept for other, kept in aliases.items() if other != "format"}
    header, layout = plan([(one.name, DTYPES[one.dtype], one.shape) for one in tensors], {"format": "pt", **told})
    checksum = files.add(target.name, _pieces(source, tensors, header, layout.size, progress), layout.size).checksum
    if source.extra is not None:
        data = source.read_bytes(source.extra)
        files.add(f"{target.name.partition('.')[0]}_extra{Path(source.extra).suffix}", [data], len(data))
    return checksum


def _contents(source: Source) -> tuple[list[_Tensor], dict[str, str]]:
    """All tensors in the order of a file (`file_order`) and else file by file, and the other names of those that have several."""
    found: dict[str, _Tensor] = {}
    aliases = dict(source.aliases)
    for name, file in zip(source.files, source.each(), strict=True):
        weights = split(file.tensors, f"the weights in {file.where}") if file.layout is None and file.forms is None else None
        kept = (file.forms or file.tensors) if weights is None else weights.tensors
        aliases |= file.aliases if weights is None else weights.aliases
        if weights is not None and weights.extra:
            raise CheckpointError(f"{file.where} has {next(iter(weights.extra))!r}, whose type of elements a safetensors file cannot hold.")
        for key, tensor in kept.items():
            if key in found:
                raise CheckpointError(
                    f"{source.folder} has {key!r} in two files, {found[key].file} and {name}. Remove one, or write an index."
                )
            span = None
            if file.layout is not None:
                entry = file.layout.entries[key]
                span = (file.layout.data_start + entry.start, file.layout.data_start + entry.end)
            found[key] = _Tensor(key, name, tensor.dtype, tuple(tensor.shape), span)
    return sorted(found.values(), key=lambda one: file_order(math.prod(one.shape) * one.dtype.itemsize, one.dtype.itemsize)), aliases


def _pieces(source: Source, tensors: list[_Tensor], header: bytes, total: int, progress: Progress) -> Iterator[Any]:
    yield header
    done, opened, fd, held = len(header), "", -1, None
    try:
        for one in tensors:
            if one.file != opened:
                fd, held = _closed(fd), None
                opened = one.file
                if one.span is None:
                    held = source.open(one.file, verify=False)
                else:
                    fd = source.descriptor(one.file)
            pieces = _read(fd, *one.span, source.folder / one.file) if one.span is not None else _cut(held, one.name)
            for piece in pieces:
                yield piece
                done += len(piece)
                progress(done, total)
    finally:
        _closed(fd)


def _closed(fd: int) -> int:
    if fd >= 0:
        os.close(fd)
    return -1


def _read(fd: int, start: int, end: int, where: Path) -> Iterator[bytes]:
    while start < end:
        piece = os.pread(fd, min(_PIECE, end - start), start)
        if not piece:
            raise CheckpointError(f"{where} became shorter while it was read.")
        start += len(piece)
        yield piece


def _cut(held: Any, name: str) -> Iterator[memoryview]:
    data = tensor_bytes(held.tensors[name])
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]


def _everything(source: Source) -> Mapping[str, Any]:
    """All weights under all their names; the files stay mapped, so they take no memory."""
    aliases = dict(source.aliases)
    state: dict[str, Any] = {}
    for file in source.each():
        state |= file.tensors
        aliases |= file.aliases
    return {**state, **{other: state[kept] for other, kept in aliases.items() if kept in state}, **source.read_extra()}


def _remove(source: Source, target: Path, checksum: str, disk: Disk) -> None:
    if disk.sync_file(target).digest != checksum:
        raise CheckpointError(f"{target} is not what was written: the disk may be failing. Nothing was removed from {source.folder}.")
    merged = [name for name in (source.index, *source.files, source.extra) if name is not None]
    try:
        for name in merged:
            if not (source.folder / name).samefile(target):
                disk.remove(source.folder / name)
        with suppress(OSError):  # something else is in it, and stays
            disk.remove_folder(source.folder)
    except OSError as error:
        raise CheckpointError(f"{target} is whole, but what it was merged from could not be removed: {error}.") from error
