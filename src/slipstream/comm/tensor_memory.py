"""Tensors in host memory of torch's own allocator, made of bytes that came from a file or from another process.

A tensor that is kept (restored, gathered, received) should lie in memory as one that the program made itself: at a multiple of 64 bytes,
because kernels round and run differently elsewhere; in a storage of its own, so that it keeps no larger buffer alive; and one that torch
can resize. Views of a received buffer are none of that, so their bytes are copied here once, or read straight into the memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch

from slipstream.files.direct import copy_bytes

__all__ = ["byte_view", "concatenated", "copied", "empty"]


def empty(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor without values in host memory, whatever the default device and mode are.

    >>> empty(torch.int8, (2, 3)).data_ptr() % 64
    0
    """
    if not torch.is_inference_mode_enabled():
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    with torch.inference_mode(False):  # a tensor of that mode could not be used outside of it
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor that `empty` made, to be written while the tensor lives.

    By its address: after `numpy()`, which would do it too, torch no longer resizes the storage of a tensor.
    """
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def copied(data: memoryview, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor of these elements.

    >>> copied(memoryview(b"\\x02\\x00\\x01\\x00"), torch.int16, (2,))
    tensor([2, 1], dtype=torch.int16)
    """
    made = empty(dtype, shape)
    copy_bytes(byte_view(made), data)
    return made


def concatenated(chunks: Iterable[Any], dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """A tensor of the elements in several buffers of bytes, one after the other.

    >>> concatenated([bytes([1, 0]), bytes([2, 0, 3, 0])], torch.int16, (3,))
    tensor([1, 2, 3], dtype=torch.int16)
    """
    made = empty(dtype, shape)
    target, done = byte_view(made), 0
    for chunk in chunks:
        data = memoryview(chunk)
        copy_bytes(target[done : done + data.nbytes], data)
        done += data.nbytes
    return made
