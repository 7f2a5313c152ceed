"""Weights written into an offload folder, as safetensors files that are mapped afterwards, and an index that says what is where.

Files are written beside their places and take them together: whoever has mapped an older file of the same name keeps it, and a crash
leaves no half of one. A name is made of what is inside (names, types and shapes), so that processes that write the same model do
not disturb each other, and writing it again leaves no garbage. Values are made one at a time, when they are written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slipstream.checkpoint.placing import Placing
from slipstream.checkpoint.raw import DTYPES, dtype_name, storable, tensor_bytes
from slipstream.errors import CheckpointError
from slipstream.files.disk import Disk
from slipstream.files.tensors import plan

__all__ = ["Entry", "Value", "entry", "write"]

Entry = dict[str, Any]
"""What an index says of a tensor."""


class Value(NamedTuple):
    """A tensor that is to be written, and the type that it is to have in the file."""

    tensor: torch.Tensor
    dtype: torch.dtype


def entry(file: str, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    """The entry of a tensor that stands as `name` in a safetensors file.

    >>> entry("/models/a.safetensors", "bias", torch.float16, (2,))
    {'safetensors_file': '/models/a.safetensors', 'weight_name': 'bias', 'dtype': 'float16', 'shape': [2]}
    """
    return {"safetensors_file": file, "weight_name": name, "dtype": dtype_name(dtype), "shape": list(shape)}


def write(
    folder: Path,
    blocks: Sequence[Mapping[str, Value]],
    *,
    disk: Disk | None = None,
    done: Callable[[str, int], object] = lambda name, size: None,
    argument: str = "the folder for weights on the disk",
) -> dict[str, Entry]:
    """Writes each block to a file of its own; the index of all of them, with names of files within the folder.

    `done` is told the name and the bytes of every tensor that has been handed to the disk. The folder is made if it is not there;
    `argument` is what the caller's user has named it by.
    """
    try:
        return _written(folder, blocks, disk or Disk(), done)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise CheckpointError(f"{argument} cannot take the weights. {error}") from error.__cause__


def _written(folder: Path, blocks: Sequence[Mapping[str, Value]], disk: Disk, done: Callable[[str, int], object]) -> dict[str, Entry]:
    index: dict[str, Entry] = {}
    with Placing(folder, disk) as files:
        for block in filter(None, blocks):
            # Tensors of one layer stay side by side, unlike in `file_order`: they are read together.
            values = dict(sorted(block.items(), key=lambda item: -item[1].dtype.itemsize))
            for name, value in values.items():
                _check(name, value)
            header, layout = plan([(name, DTYPES[one.dtype], tuple(one.tensor.shape)) for name, one in values.items()], {"format": "pt"})
            file = f"weights-{hashlib.sha256(header).hexdigest()[:16]}.safetensors"
            files.add(file, _chunks(header, values, done), layout.size)
            index |= {name: entry(file, name, one.dtype, one.tensor.shape) for name, one in values.items()}
        files.place()
    return index


def _check(name: str, value: Value) -> None:
    storable(value.tensor, name)
    if value.dtype not in DTYPES:
        raise CheckpointError(f"{name} is of {value.dtype}, which an offload folder cannot hold. Keep its module in memory.")


def _chunks(header: bytes, values: Mapping[str, Value], done: Callable[[str, int], object]) -> Iterator[Any]:
    yield header
    for name, (tensor, dtype) in values.items():
        yield tensor_bytes(tensor.detach().to(dtype))
        done(name, tensor.numel() * dtype.itemsize)
