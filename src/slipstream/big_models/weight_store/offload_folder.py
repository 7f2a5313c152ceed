"""Offload folders: weights written to disk with an `index.json`, as Accelerate's `<name>.dat` files or as safetensors files.

A `.dat` file holds the elements alone; the index has dtype and shape by name. Folders of Accelerate are read, and Accelerate reads ours.
Files are replaced as a whole, so that a process that has the old one mapped keeps it, and the index is merged under a lock. Names from an
index cannot lead out of the folder, links are not followed, and only regular files are opened.
"""

from __future__ import annotations

import errno
import hashlib
import math
import mmap
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from slipstream.big_models.hooks.module_tensors import set_module_tensor_to_device
from slipstream.checkpoint.tensor_bytes import BYTE_VIEWED_DTYPES, DTYPES, dtype_name, require_storable, tensor_bytes
from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files.atomic_files import AtomicFiles
from slipstream.files.disk import Disk
from slipstream.files.os_errors import describe_os_error, suggest_remedy
from slipstream.files.paths import ConfinedFolder, check_name
from slipstream.files.safetensors_layout import plan_layout
from slipstream.files.strict_json import dump, parse

__all__ = [
    "IndexEntry", "OffloadValue", "extract_submodules_state_dict", "load_offloaded_weight", "load_offloaded_weights", "make_index_entry",
    "offload_state_dict", "offload_weight", "save_offload_index", "write_offload_files",
]


_INDEX: Final = "index.json"
_LARGEST_INDEX: Final = 64 << 20
_LOCK_SECONDS: Final = 20.0
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_TYPES: Final[Mapping[str, torch.dtype]] = {**{dtype_name(dtype): dtype for dtype in DTYPES}, **BYTE_VIEWED_DTYPES}
_STATISTICS: Final = "SCB"
_PathLike = str | os.PathLike[str]


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: _PathLike, index: MutableMapping[str, Any] | None = None
) -> MutableMapping[str, Any] | None:
    """Write one tensor to `<offload_folder>/<weight_name>.dat`, and enter it in `index`, which comes back.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     index = offload_weight(torch.ones(2, dtype=torch.bfloat16), "scale", folder, {})
    ...     load_offloaded_weight(f"{folder}/scale.dat", index["scale"])
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    name = _file_of(weight_name, "offload_weight")
    weight = require_storable(weight.detach() if type(weight) in (torch.Tensor, torch.nn.Parameter) else weight, weight_name)
    data = tensor_bytes(weight)
    folder = Path(offload_folder)
    temporary = folder / f".{secrets.token_hex(8)}.writing"
    with _explain_os_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            with os.fdopen(fd, "wb", buffering=0) as file:
                while data:
                    data = data[file.write(data[: 1 << 30]) :]
            os.replace(temporary, folder / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    if index is not None:
        index[weight_name] = {"dtype": dtype_name(weight.dtype), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: _PathLike, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """The tensor in a `.dat` file, on the pages of the file itself; `weight_info` is its entry in the index."""
    path = Path(weight_file)
    dtype, shape = _check_description(weight_info, str(path))
    with ConfinedFolder(path.parent) as folder:
        fd = folder.open(path.name)
    try:
        size, wanted = os.fstat(fd).st_size, math.prod(shape) * dtype.itemsize
        if size != wanted:
            raise CheckpointError(
                f"{path} has {size:,} bytes, but a tensor of {dtype_name(dtype)} with shape {list(shape)}, as the index says, has "
                f"{wanted:,}. It belongs to another index, or was not written to its end: offload the weights again."
            )
        if not size:
            return torch.empty(shape, dtype=dtype)
        pages = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).reshape(shape)


def save_offload_index(index: Mapping[str, Any], offload_folder: _PathLike) -> None:
    """Write `index.json` of a folder; what is in it already stays, unless it has the same name. Several processes may do so at once."""
    if not index:
        return
    folder = Path(offload_folder)
    for name in index:
        _file_of(name, "the index to save")
    with _explain_os_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            merged = {**_read_index(folder), **index}
            Disk().replace_text(folder / _INDEX, dump(merged, indent=2).decode())


def offload_state_dict(save_dir: _PathLike, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every tensor of a state dict into a folder, and its index.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     offload_state_dict(folder, {"a": torch.ones(1), "b.c": torch.tensor(3)})
    ...     sorted(os.listdir(folder))
    ['a.dat', 'b.c.dat', 'index.json']
    """
    index: MutableMapping[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)


def load_offloaded_weights(model: torch.nn.Module, index: Mapping[str, Any] | None, offload_folder: _PathLike) -> None:
    """Give a model the weights that an index names, from a folder, in host memory."""
    folder = Path(offload_folder)
    for name, described in (index or {}).items():
        file = _file_of(name, "the index")
        above, _, key = name.rpartition(".")
        if key == _STATISTICS:
            continue
        statistics = f"{above}.{_STATISTICS}" if above else _STATISTICS
        beside = (index or {}).get(statistics) if key == "weight" else None
        scales = None if beside is None else load_offloaded_weight(folder / _file_of(statistics, "the index"), beside)
        value = load_offloaded_weight(folder / file, described)
        set_module_tensor_to_device(model, name, "cpu", value=value, fp16_statistics=scales)


def extract_submodules_state_dict(state_dict: Mapping[str, torch.Tensor], submodule_names: Collection[str]) -> dict[str, torch.Tensor]:
    """The part of a state dict that belongs to some modules, or tensors, by their names.

    >>> list(extract_submodules_state_dict({"a.w": 1, "ab.w": 2, "c": 3}, ["a", "c"]))
    ['a.w', 'c']
    """
    names = frozenset(submodule_names)
    return {key: tensor for key, tensor in state_dict.items() if not names.isdisjoint(_enclosing_names(key))}


def _enclosing_names(key: str) -> Iterator[str]:
    """A name and those of all modules around it."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _file_of(name: Any, where: str) -> str:
    """The file of a weight. Names of weights have dots, not folders."""
    file = f"{name}.dat" if isinstance(name, str) and name else name
    checked = check_name(file, where)
    if "/" in checked:
        raise CheckpointError(f"{where} has a weight {name!r}, whose file would lie in a folder of its own. Such a name is not opened.")
    return checked


def _check_description(info: Mapping[str, Any], where: str) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype = _TYPES.get(str(info.get("dtype")))
    shape = info.get("shape")
    fits = isinstance(shape, (list, tuple)) and all(type(size) is int and size >= 0 for size in shape)
    if dtype is None or not fits:
        raise CheckpointError(
            f"The index describes {where} as {dict(info)!r:.200}, which is no tensor. "
            "It takes a dtype such as 'float32' and a shape such as [2, 3]."
        )
    return dtype, tuple(shape or ())


def _read_index(folder: Path) -> dict[str, Any]:
    with ConfinedFolder(folder) as held:
        try:
            data = held.read(_INDEX, _LARGEST_INDEX)
        except MissingCheckpointError:
            return {}
    known = parse(data, str(folder / _INDEX))
    if not isinstance(known, dict):
        raise CheckpointError(f"{folder / _INDEX} is no index of weights, but a {type(known).__name__}. Remove it, or use another folder.")
    return known


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    disk, path, until = Disk(), folder / f".{_INDEX}.lock", time.monotonic() + _LOCK_SECONDS
    held = -1
    while held < 0:
        try:
            held = disk.lock(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise CheckpointError(
                    f"Another process holds {path} for more than {_LOCK_SECONDS:.0f} s. End it, or remove that file."
                ) from None
            time.sleep(0.02)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            break
    try:
        yield
    finally:
        if held >= 0:
            disk.unlock(path, held)


@contextmanager
def _explain_os_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"Weights cannot be offloaded to {folder}: {describe_os_error(error)}. {suggest_remedy(error)}") from error


IndexEntry = dict[str, Any]
"""What an index says of a tensor."""


class OffloadValue(NamedTuple):
    """A tensor that is to be written, and the type that it is to have in the file."""

    tensor: torch.Tensor
    dtype: torch.dtype


def make_index_entry(file: str, name: str, dtype: torch.dtype, shape: Sequence[int]) -> IndexEntry:
    """The entry of a tensor that stands as `name` in a safetensors file.

    >>> make_index_entry("/models/a.safetensors", "bias", torch.float16, (2,))
    {'safetensors_file': '/models/a.safetensors', 'weight_name': 'bias', 'dtype': 'float16', 'shape': [2]}
    """
    return {"safetensors_file": file, "weight_name": name, "dtype": dtype_name(dtype), "shape": list(shape)}


def write_offload_files(
    folder: Path,
    blocks: Sequence[Mapping[str, OffloadValue]],
    *,
    disk: Disk | None = None,
    done: Callable[[str, int], object] = lambda name, size: None,
    argument: str = "the folder for weights on the disk",
) -> dict[str, IndexEntry]:
    """Writes each block to a file of its own; the index of all of them, with names of files within the folder.

    `done` is told the name and the bytes of every tensor that has been handed to the disk. The folder is made if it is not there;
    `argument` is what the caller's user has named it by.
    """
    try:
        return _write_file(folder, blocks, disk or Disk(), done)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise CheckpointError(f"{argument} cannot take the weights. {error}") from error.__cause__


def _write_file(
    folder: Path, blocks: Sequence[Mapping[str, OffloadValue]], disk: Disk, done: Callable[[str, int], object]
) -> dict[str, IndexEntry]:
    index: dict[str, IndexEntry] = {}
    with AtomicFiles(folder, disk) as files:
        for block in filter(None, blocks):
            # Tensors of one layer stay side by side, unlike in `file_order_key`: they are read together.
            values = dict(sorted(block.items(), key=lambda item: -item[1].dtype.itemsize))
            for name, value in values.items():
                _check_writable(name, value)
            header, layout = plan_layout(
                [(name, DTYPES[value.dtype], tuple(value.tensor.shape)) for name, value in values.items()], {"format": "pt"}
            )
            file = f"weights-{hashlib.sha256(header).hexdigest()[:16]}.safetensors"
            files.add(file, _value_chunks(header, values, done), layout.size)
            index |= {name: make_index_entry(file, name, value.dtype, value.tensor.shape) for name, value in values.items()}
        files.place()
    return index


def _check_writable(name: str, value: OffloadValue) -> None:
    require_storable(value.tensor, name)
    if value.dtype not in DTYPES:
        raise CheckpointError(f"{name} is of {value.dtype}, which an offload folder cannot hold. Keep its module in memory.")


def _value_chunks(header: bytes, values: Mapping[str, OffloadValue], done: Callable[[str, int], object]) -> Iterator[Any]:
    yield header
    for name, (tensor, dtype) in values.items():
        yield tensor_bytes(tensor.detach().to(dtype))
        done(name, tensor.numel() * dtype.itemsize)
