"""Offload folders: weights written to disk with an `index.json`, as Accelerate's `<name>.dat` files or as safetensors files.

A `.dat` file contains only the elements; the index has dtype and shape by name. The format is that of Accelerate, in both directions.
Files are replaced atomically, so a process that has the old file mapped keeps it, and the index is merged under a lock. Names from an
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.big_models.hooks.module_tensors import set_module_tensor_to_device
from slipstream.big_models.hooks.weight_swap import ModuleTensor
from slipstream.big_models.weight_store.weights import INDEX_NAME, make_index_entry, parse_description, read_index
from slipstream.checkpoint.tensor_bytes import DTYPES, dtype_name, require_storable, tensor_bytes
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.atomic_files import AtomicFiles
from slipstream.files.disk import Disk
from slipstream.files.os_errors import explain_os_errors
from slipstream.files.paths import ConfinedFolder, check_name
from slipstream.files.safetensors_layout import plan_layout
from slipstream.files.strict_json import dump_lines

__all__ = [
    "extract_submodules_state_dict", "group_by_size", "load_offloaded_weight", "load_offloaded_weights", "offload_state_dict",
    "offload_weight", "save_offload_index", "write_offload_files",
]


_LOCK_SECONDS: Final = 20.0
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_STATISTICS: Final = "SCB"
_PathLike = str | os.PathLike[str]


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: _PathLike, index: MutableMapping[str, Any] | None = None
) -> MutableMapping[str, Any] | None:
    """Write one tensor to `<offload_folder>/<weight_name>.dat`, add it to `index`, and return the index.

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
    with explain_os_errors(f"Weights cannot be offloaded to {folder}"):
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
    """Return the tensor in a `.dat` file as a view of its pages; `weight_info` is its entry in the index."""
    path = Path(weight_file)
    dtype, shape = parse_description(weight_info, str(path))
    with ConfinedFolder(path.parent) as folder:
        fd = folder.open(path.name)
    try:
        size, wanted = os.fstat(fd).st_size, math.prod(shape) * dtype.itemsize
        if size != wanted:
            raise CheckpointError(
                f"{path} has {size:,} bytes, but a tensor of {dtype_name(dtype)} with shape {list(shape)}, as the index says, has "
                f"{wanted:,}. It belongs to a different index, or is incomplete: offload the weights again."
            )
        if not size:
            return torch.empty(shape, dtype=dtype)
        pages = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).reshape(shape)


def save_offload_index(index: Mapping[str, Any], offload_folder: _PathLike) -> None:
    """Merge entries into the `index.json` of a folder, under a lock, as several processes may do so at once."""
    if not index:
        return
    folder = Path(offload_folder)
    for name in index:
        _file_of(name, "the index to save")
    with explain_os_errors(f"Weights cannot be offloaded to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            merged = {**read_index(folder), **index}
            Disk().replace_text(folder / INDEX_NAME, dump_lines(merged).decode())


def offload_state_dict(save_dir: _PathLike, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every tensor of a state dict into a folder, with an index.

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


def load_offloaded_weights(model: torch.nn.Module, index: Mapping[str, Any] | None, offload_folder: _PathLike | None) -> None:
    """Load the weights that an index names from a folder into a model, in host memory; without an index there is nothing to do."""
    if not index:
        return
    if offload_folder is None:
        raise ConfigError(f"The index names {len(index)} weights, and offload_folder is None. Give the folder that they were written to.")
    folder = Path(offload_folder)
    for name, described in index.items():
        file = _file_of(name, "the index")
        above, _, key = name.rpartition(".")
        if key == _STATISTICS:
            continue
        statistics = f"{above}.{_STATISTICS}" if above else _STATISTICS
        beside = index.get(statistics) if key == "weight" else None
        scales = None if beside is None else load_offloaded_weight(folder / _file_of(statistics, "the index"), beside)
        value = load_offloaded_weight(folder / file, described)
        set_module_tensor_to_device(model, name, "cpu", value=value, fp16_statistics=scales)


def extract_submodules_state_dict(state_dict: Mapping[str, torch.Tensor], submodule_names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the part of a state dict that belongs to some modules, or tensors, by their names.

    >>> list(extract_submodules_state_dict({"a.w": 1, "ab.w": 2, "c": 3}, ["a", "c"]))
    ['a.w', 'c']
    """
    names = frozenset(submodule_names)
    return {key: tensor for key, tensor in state_dict.items() if not names.isdisjoint(_enclosing_names(key))}


def _enclosing_names(key: str) -> Iterator[str]:
    """Yield a name and the names of all enclosing modules."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _file_of(name: Any, where: str) -> str:
    """Return the file name of a weight; raise if the weight's name contains a folder."""
    file = f"{name}.dat" if isinstance(name, str) and name else name
    checked = check_name(file, where)
    if "/" in checked:
        raise CheckpointError(f"{where} has a weight {name!r}, whose file would be in a subfolder. Such names are not opened.")
    return checked


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    disk, path, until = Disk(), folder / f".{INDEX_NAME}.lock", time.monotonic() + _LOCK_SECONDS
    held = -1
    while held < 0:
        try:
            held = disk.lock(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise CheckpointError(
                    f"Another process has held {path} for more than {_LOCK_SECONDS:.0f} s. End it, or remove that file."
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


def group_by_size(groups: Iterable[Sequence[ModuleTensor]], largest: int) -> list[list[ModuleTensor]]:
    """Return the tensors of each file: groups stay together, and a file contains several groups up to `largest` bytes."""
    files: list[list[ModuleTensor]] = []
    room = -1
    for group in groups:
        size = sum(tensor.nbytes for tensor in group)
        if size > room:
            files.append([])
            room = max(largest, size)
        files[-1] += group
        room -= size
    return files


def write_offload_files(
    folder: Path,
    files: Sequence[Sequence[ModuleTensor]],
    *,
    done: Callable[[ModuleTensor], object] = lambda tensor: None,
    argument: str,
) -> dict[str, dict[str, Any]]:
    """Write the values of tensors to files in a folder, which is created if needed; return the index, with file names within the folder.

    `done` is called with every tensor after it was written. `argument` is the user's argument that names the folder.
    """
    index: dict[str, dict[str, Any]] = {}
    try:
        with AtomicFiles(folder, Disk()) as atomic:
            for tensors in filter(None, files):
                # Tensors of one layer stay side by side, unlike in `file_order_key`: they are read together.
                ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
                for tensor in ordered:
                    _check_writable(tensor)
                header, layout = plan_layout(
                    [(tensor.name, DTYPES[tensor.dtype], tuple(tensor.held.shape)) for tensor in ordered], {"format": "pt"}
                )
                file = f"weights-{hashlib.sha256(header).hexdigest()[:16]}.safetensors"
                atomic.add(file, _value_chunks(header, ordered, done), layout.size)
                index |= {tensor.name: make_index_entry(file, tensor.name, tensor.dtype, tensor.held.shape) for tensor in ordered}
            atomic.place()
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise CheckpointError(f"{argument} cannot be written. {error}") from error.__cause__
    return index


def _check_writable(tensor: ModuleTensor) -> None:
    assert tensor.value is not None
    require_storable(tensor.value, tensor.name)
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{tensor.name} is of {tensor.dtype}, which an offload folder does not support. Keep its module in memory.")


def _value_chunks(header: bytes, tensors: Sequence[ModuleTensor], done: Callable[[ModuleTensor], object]) -> Iterator[Any]:
    yield header
    for tensor in tensors:
        assert tensor.value is not None
        yield tensor_bytes(tensor.value.detach().to(tensor.dtype))
        done(tensor)
