"""A safetensors file in memory: where its tensors lie in the file, and the tensors.

Every tensor has memory of its own from torch's allocator. So it begins where the tensors of a live run begin (at a multiple of 64 bytes:
kernels round and run the same on it), it does not keep the memory of the others alive, and its storage can be resized. A file on a disk is
read straight into that memory, which costs no copy; of a file that is in memory already, the tensors are copied.

Weights of a model that only pass on their way into its parameters need none of that: `sources.py` maps their file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.checkpoint.raw import TORCH_DTYPES
from slipstream.comm.tensor_memory import byte_view, copied, empty
from slipstream.errors import CheckpointError
from slipstream.files.reading import check_memory, read_into, read_whole
from slipstream.files.tensors import LARGEST_HEADER, Layout, read_layout

__all__ = ["Content", "TensorFile", "read_tensor_file", "tensors_in"]


@dataclass(frozen=True)
class TensorFile:
    """The tensors of a safetensors file by name, in the order of the file."""

    layout: Layout
    tensors: dict[str, torch.Tensor]


Content = TensorFile | Any
"""What a file held: tensors, or a buffer of all its bytes."""


def read_tensor_file(
    fd: int,
    size: int,
    *,
    digest: bool = True,
    where: str = "the file",
    alone: bool = False,
    advance: Callable[[int], object] = lambda count: None,
) -> tuple[Content, str]:
    """Read an open safetensors file of `size` bytes; gives back its tensors and its checksum. Keywords as those of `read_whole`.

    Of a file whose header is no header the bytes come back: whoever compares the checksum can say that the file is damaged, and
    `tensors_in` says of one that was written so what is wrong with it.
    """
    check_memory(size, where)
    try:
        header = bytearray(os.pread(fd, 8, 0))
        length = int.from_bytes(header, "little")
        if length > min(LARGEST_HEADER, size - 8):
            raise CheckpointError(f"{where} says that its header has {length:,} bytes")
        header += os.pread(fd, length, 8)
        layout = read_layout(lambda offset, count: memoryview(header)[offset : offset + count], size, where)
    except (CheckpointError, OSError):
        return read_whole(fd, size, digest=digest, where=where, alone=alone, advance=advance)
    try:
        tensors = {entry.name: empty(TORCH_DTYPES[entry.dtype], entry.shape) for entry in layout.entries.values()}
    except RuntimeError as error:  # of torch's allocator
        raise CheckpointError(f"There is no memory for the {size:,} bytes of {where}: {str(error)[:200]}") from error
    parsed = bytes(header)
    parts = [memoryview(header), *map(byte_view, tensors.values())]
    checksum = read_into(fd, parts, digest=digest, where=where, alone=alone, advance=advance)
    if header != parsed:
        raise CheckpointError(f"{where} was changed while it was read.")
    return TensorFile(layout, tensors), checksum


def tensors_in(content: Content, where: str) -> TensorFile:
    """The tensors of a safetensors file that was read, or whose bytes are given; `where` names it in errors."""
    if isinstance(content, TensorFile):
        return content
    view = memoryview(content)
    layout = read_layout(lambda offset, count: view[offset : offset + count], view.nbytes, where)
    at = layout.data_start
    tensors = {one.name: copied(view[at + one.start : at + one.end], TORCH_DTYPES[one.dtype], one.shape) for one in layout.entries.values()}
    return TensorFile(layout, tensors)
