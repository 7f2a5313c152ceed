"""One object in one file: `save` writes any plain state without pickle; `load` reads it and files of `torch.save`.

The file is safetensors with all other values in its metadata, or JSON if there is no tensor; a mapping of names to tensors is an ordinary
safetensors file. It is written under a temporary name and renamed when it is on the disk. `load` goes by the content, not the suffix, and
runs nothing in a file unless `weights_only=False`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from slipstream.checkpoint.deserialize import read_file, read_part
from slipstream.checkpoint.serialize import write_part
from slipstream.checkpoint.tensor_bytes import FileContent, LoadedTensorFile, read_tensor_file
from slipstream.checkpoint.weight_source import is_safetensors, is_torch_file, read_torch_file
from slipstream.config.sources import environment
from slipstream.distributed.cluster import Process, detect
from slipstream.distributed.current import current_or_none
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.atomic_files import AtomicFiles, check_local_path
from slipstream.files.disk import Disk
from slipstream.files.paths import ConfinedFolder
from slipstream.files.reader import read_whole
from slipstream.logging import get_logger

__all__ = ["load", "save"]

_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl")

_JSON_BEGINS: Final = frozenset(bytes([entry]) for entry in b'{["-0123456789tfn \t\r\n')


def save(
    obj: Any,
    f: str | os.PathLike[str] | BinaryIO,
    save_on_each_node: bool = False,
    safe_serialization: bool | None = None,
    *,
    disk: Disk | None = None,
) -> None:
    """Write an object to a file, on the main process (or the first of each machine) alone; the others return at once.

    The object is plain data with tensors in it, such as a state dict; what cannot be kept is an error that says where it is.
    `safe_serialization=False` writes by `torch.save` instead, which uses pickle.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"step": 3, "mean": torch.zeros(2)}, f"{folder}/state.safetensors")
    ...     load(f"{folder}/state.safetensors")
    {'step': 3, 'mean': tensor([0., 0.])}
    """
    if not isinstance(safe_serialization, (bool, type(None))):
        raise ConfigError(f"safe_serialization={safe_serialization!r}: pass True or False, or leave it out.")
    process = _process()
    if not (process.is_local_main if save_on_each_node else process.is_main):
        return
    if hasattr(f, "write"):
        _write_to(f, obj, safe_serialization)
        return
    path = check_local_path(f, "f")
    if path.is_dir():
        raise ConfigError(f"f={str(path)!r} is a folder. Pass the path of a file in it.")
    if path.is_file():
        path = Path(os.path.realpath(path))  # a link stays a link; its target is replaced
    with AtomicFiles(path.parent, disk or Disk()) as files:
        if safe_serialization is False:
            files.adopt(path.name, lambda beside: torch.save(obj, beside))
        else:
            write_part(lambda name, chunks, size: files.add(path.name, chunks, size), "object", obj, "the object")
        files.place()
    _warn_about_suffix(path, safe_serialization)


def _warn_about_suffix(path: Path, safe_serialization: bool | None) -> None:
    if path.suffix in _TORCH_SUFFIXES and safe_serialization is None:
        get_logger(__name__).warning(
            f"{path} is written without pickle, as safetensors or JSON: slipstream.utils.load reads it, torch.load does not. "
            "Pass safe_serialization=False for torch.save's format, or True for this one without a warning."
        )


def _write_to(file: Any, obj: Any, safe_serialization: bool | None) -> None:
    _check_binary(file, "wb")
    if safe_serialization is False:
        torch.save(obj, file)
        return

    write_part(lambda name, chunks, size: file.writelines(chunks), "object", obj, "the object")


def _check_binary(file: Any, mode: str) -> None:
    if isinstance(file, io.TextIOBase):
        raise ConfigError(f"f is a text file. Open it in binary mode, open(path, {mode!r}), or pass its path.")


def _process() -> Process:
    runtime = current_or_none()
    return runtime.process if runtime is not None else detect(environment())


def load(f: str | os.PathLike[str] | BinaryIO, map_location: Any = None, **kwargs: Any) -> Any:
    """Return the content of a file of `save`, `torch.save` or the safetensors package.

    Tensors are loaded to the CPU, each in its own memory, or to the device `map_location`. A file of `torch.save` is read as data; with
    `weights_only=False` it is unpickled, which runs code in it: only for files that you trust. Other keywords are passed to `torch.load`.

    >>> load(io.BytesIO(b'{"step": 3}'))
    {'step': 3}
    """
    weights_only = kwargs.pop("weights_only", True)
    if not isinstance(weights_only, bool):
        raise ConfigError(f"weights_only={weights_only!r}: pass True or False.")
    _check_device(map_location)
    where, content = _read(f)
    if isinstance(content, LoadedTensorFile):
        return read_file(content, where, _device(map_location, where, kwargs))
    buffer = memoryview(content)
    if is_torch_file(buffer):
        if kwargs.pop("mmap", None):
            raise ConfigError(f"mmap=True is not supported: {where} is read as a whole. Leave it out, or call torch.load.")
        if weights_only:
            remedy = "If you trust whoever wrote it, pass weights_only=False."
            return read_torch_file(buffer, where, remedy, map_location=map_location, **kwargs)
        place = "cpu" if map_location is None else map_location  # torch would take the device that it was saved on
        return torch.load(io.BytesIO(buffer), map_location=place, weights_only=False, **kwargs)
    device = _device(map_location, where, kwargs)
    if is_safetensors(buffer, len(buffer)):
        return read_file(buffer, where, device)
    if bytes(buffer[:1]) not in _JSON_BEGINS:
        what = "is empty" if not buffer else "is neither safetensors, nor a file of torch.save, nor JSON"
        raise CheckpointError(f"{where} {what}: it is damaged, or the wrong file.")
    return read_part("object.json", buffer, where)


def _read(f: Any) -> tuple[str, FileContent]:
    if hasattr(f, "read"):
        _check_binary(f, "rb")
        return "the file", memoryview(bytearray(f.read()))
    path = check_local_path(f, "f")
    if not path.exists():
        raise CheckpointError(f"There is no file {path}.")
    real = Path(os.path.realpath(path))  # a link that the user names may lead anywhere
    with ConfinedFolder(real.parent) as folder:
        fd = folder.open(real.name)
    try:
        size, head = os.fstat(fd).st_size, os.pread(fd, 9, 0)
        read = read_tensor_file if is_safetensors(head, size) and not is_torch_file(head) else read_whole
        return str(path), read(fd, size, digest=False, where=str(path))[0]
    finally:
        os.close(fd)


def _check_device(map_location: Any) -> None:
    if isinstance(map_location, (str, torch.device)):
        try:
            torch.empty(0, device=map_location)
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises any of these for a missing device
            why = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"map_location={str(map_location)!r} cannot be used here: {why[:200]}. Pass 'cpu', or leave it out."
            ) from error


def _device(map_location: Any, where: str, options: Mapping[str, Any]) -> torch.device | None:
    """Return the device for tensors of a file that torch.load does not read; options of torch.load are an error."""
    if options:
        raise ConfigError(f"{', '.join(options)}: only for files of torch.save, which {where} is not. Leave it out.")
    if map_location is None:
        return None
    try:
        return torch.device(map_location)
    except (TypeError, RuntimeError):
        raise ConfigError(
            f"map_location={map_location!r} is not a device, and {where} does not store devices. Pass one, such as 'cpu'."
        ) from None
