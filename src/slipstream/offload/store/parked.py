"""Folders of offloaded weights in the form that users know: one `<name>.dat` for each tensor, and an `index.json` that describes them.

A `.dat` file is nothing but the elements, row after row; the index has `{"dtype": ..., "shape": [...]}` by name, with bfloat16 named as
such (its bytes are those of int16, as numpy has no such type). Folders that other libraries wrote are read, and they can read ours.

Promised: a file is replaced as a whole, so that whoever has the old one mapped keeps it; the index is merged under a lock; names that come
from an index or a state dict cannot lead out of the folder, links are not followed, and pipes and devices are not opened. Weights are read
by mapping the file: nothing is copied until it is used, and nothing that is written to the tensor gets into the file.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.checkpoint.raw import DTYPES, VIEWED, dtype_name, storable, tensor_bytes
from slipstream.errors import CheckpointError, MissingCheckpointError
from slipstream.files.disk import Disk
from slipstream.files.inside import Folder
from slipstream.files.names import check_name
from slipstream.files.strict_json import dump, parse
from slipstream.files.trouble import remedy, told
from slipstream.offload.hooking.tensors import set_module_tensor_to_device

__all__ = [
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]

_INDEX: Final = "index.json"
_LARGEST_INDEX: Final = 64 << 20
_LOCK_SECONDS: Final = 20.0
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_TYPES: Final[Mapping[str, torch.dtype]] = {**{dtype_name(dtype): dtype for dtype in DTYPES}, **VIEWED}
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
    weight = storable(weight.detach() if type(weight) in (torch.Tensor, torch.nn.Parameter) else weight, weight_name)
    data = tensor_bytes(weight)
    folder = Path(offload_folder)
    temporary = folder / f".{secrets.token_hex(8)}.writing"
    with _explained(folder):
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
    dtype, shape = _described(weight_info, str(path))
    with Folder(path.parent) as folder:
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
    with _explained(folder):
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
    return {key: tensor for key, tensor in state_dict.items() if not names.isdisjoint(_above(key))}


def _above(key: str) -> Iterator[str]:
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


def _described(info: Mapping[str, Any], where: str) -> tuple[torch.dtype, tuple[int, ...]]:
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
    with Folder(folder) as held:
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
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"Weights cannot be offloaded to {folder}: {told(error)}. {remedy(error)}") from error
