"""Tensors as bytes and bytes as tensors, without a copy where possible.

Everything that is written to a file goes through `tensor_bytes`. Tensors without bytes of their own (sparse, quantized, nested and meta
tensors, subclasses of other tensors) are an error; nothing is converted silently. `read_tensor_file` reads a safetensors
file into tensors that each own memory from torch's allocator: aligned as in a live run, independent of each other, and resizable.
`from_buffer` returns a view, for values that are copied into a model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, starmap
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from slipstream.distributed.codec import byte_view, empty_host_tensor, tensor_from_bytes
from slipstream.errors import CheckpointError
from slipstream.files.reader import check_fits_memory, read_into, read_whole
from slipstream.files.safetensors_layout import LARGEST_HEADER, SafetensorsLayout, plan_layout, read_layout

__all__ = [
    "BYTE_VIEWED_DTYPES", "DTYPES", "EncodedFile", "FileContent", "LoadedTensorFile", "TORCH_DTYPES", "TensorReader", "dtype_name",
    "encode_tensors", "explain_unstorable", "from_buffer", "is_utf8", "load_tensors", "memory_identity", "pack_bytes",
    "read_own_bytes", "read_tensor_file", "require_storable", "tensor_bytes", "unpack_bytes",
]


DTYPES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.float8_e8m0fnu: "F8_E8M0",
        torch.complex64: "C64",
    }
)
"""The dtypes of safetensors files, by torch's."""
TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType({name: dtype for dtype, name in DTYPES.items()})
_VIEWED_NAMES: Final = ("complex128", "complex32", "float4_e2m1fn_x2")
BYTE_VIEWED_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {name: found for name in _VIEWED_NAMES if isinstance(found := getattr(torch, name, None), torch.dtype)}
)
"""Dtypes that safetensors files do not (generally) support: stored as bytes, with dtype and shape beside them."""
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_ALL: Final[Mapping[torch.dtype, str]] = MappingProxyType({**DTYPES, **{dtype: name for name, dtype in BYTE_VIEWED_DTYPES.items()}})


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.".

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def require_storable(tensor: Any, where: str) -> torch.Tensor:
    """Return the tensor if it can be stored; else raise a CheckpointError that says why not, and what to do.

    >>> require_storable(torch.ones(2).to_sparse(), "custom object 0")
    Traceback (most recent call last):
    slipstream.errors.CheckpointError: custom object 0 is a sparse tensor (torch.sparse_coo), which cannot be stored. Store ...
    """
    problem = explain_unstorable(tensor)
    if problem:
        raise CheckpointError(f"{where} {problem}")
    given: torch.Tensor = tensor
    return given


def explain_unstorable(tensor: Any) -> str:
    """Return why a tensor cannot be stored, and what to do; "" if it can."""
    if type(tensor) not in _PLAIN:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            return (
                "belongs to a lazy module that has not seen data yet: it has no shape and no values. "
                "Run one forward with a batch before saving or loading."
            )
        return (
            f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor subclass with more than its elements. "
            "Store a plain tensor: its full or local values, e.g. tensor.full_tensor(), tensor.to_local() or torch.Tensor(tensor)."
        )
    problem, remedy = _unstorable_kind(tensor)
    return f"is {problem}, which cannot be stored. {remedy}" if problem else ""


def _unstorable_kind(tensor: torch.Tensor) -> tuple[str, str]:
    if tensor.is_meta:
        return (
            "a tensor on the meta device, without values",
            "Give it values first: load weights, or model.to_empty(device=...) and initialise.",
        )
    if tensor.is_nested:
        return "a nested tensor", "Store its parts: list(tensor.unbind())."
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})", "Store tensor.int_repr() with its scale and zero point."
    if tensor.layout is not torch.strided:
        kind = "sparse tensor" if "sparse" in str(tensor.layout) else "tensor"
        return f"a {kind} ({tensor.layout})", "Store tensor.to_dense(), or its indices and values."
    if tensor.dtype not in _ALL:
        return f"a tensor of {tensor.dtype}", "Convert it, e.g. tensor.to(torch.float32), or store tensor.view(torch.uint8)."
    return "", ""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a tensor as bytes, row after row; the tensor's own memory where it lies so on the CPU already.

    >>> bytes(tensor_bytes(torch.tensor([1, 2], dtype=torch.int16).flip(0)))
    b'\\x02\\x00\\x01\\x00'
    """
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
    if flat.numel() == 1:  # one element may have any stride and still count as contiguous, but cannot be viewed as bytes then
        flat = flat.as_strided((1,), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # arrays are buffers, which numpy's stubs say from 3.12 on


EncodedFile: TypeAlias = tuple[Iterable[Any], int]
"""The bytes of a file in chunks, and their total."""


TensorReader: TypeAlias = Callable[[str, torch.Tensor], memoryview]
"""Returns the bytes of a tensor of this name."""


def read_own_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor that this process holds whole."""
    return tensor_bytes(tensor)


def encode_tensors(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], read: TensorReader = read_own_bytes
) -> EncodedFile:
    """Return a safetensors file with these tensors, in their order; their bytes are read when the chunks are, by `read`."""
    items = [(name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    header, layout = plan_layout(items, {"format": "pt", **metadata})
    return chain([header], starmap(read, tensors.items())), layout.size


def from_buffer(buffer: Any, dtype: str, shape: Iterable[int], start: int, end: int) -> torch.Tensor:
    """Return the bytes from `start` to `end` of a buffer as a tensor that shares its memory.

    If the buffer is read-only or the elements are not aligned, it is a copy.

    >>> from_buffer(bytearray(b"\\x02\\x00\\x01\\x00"), "I16", (2,), 0, 4)
    tensor([2, 1], dtype=torch.int16)
    """
    kind, shape = TORCH_DTYPES.get(dtype), tuple(shape)
    view = memoryview(buffer)
    count = math.prod(shape)
    if kind is None or min(shape, default=0) < 0 or not 0 <= start <= end <= view.nbytes or count * kind.itemsize != end - start:
        raise CheckpointError(f"A tensor of {dtype} with shape {list(shape)} cannot be bytes {start} to {end} of {view.nbytes}.")
    if not count:
        return torch.empty(shape, dtype=kind, device="cpu")
    data = view if view.contiguous and view.format == "B" and view.ndim == 1 else view.cast("B")
    if data.readonly:
        return tensor_from_bytes(data[start:end], kind, shape)
    found = torch.frombuffer(data, dtype=kind, count=count, offset=start)
    if found.data_ptr() % kind.itemsize:
        return tensor_from_bytes(data[start:end], kind, shape)
    return found if len(shape) == 1 else found.view(shape)


def memory_identity(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for two tensors with the same memory, dtype and strides; unique for a tensor without memory.

    >>> weight = torch.ones(2, 2)
    >>> memory_identity(weight) == memory_identity(weight.detach()), memory_identity(weight) == memory_identity(weight.t())
    (True, False)
    """
    if type(tensor) not in _PLAIN and isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return id(tensor)
    if tensor.is_meta or not tensor.numel() or not (address := tensor.data_ptr()):
        return id(tensor)
    return (address, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.device)


def is_utf8(text: str) -> bool:
    """Whether a string can be encoded as UTF-8: Python's strings may contain lone surrogates."""
    return text.isascii() or text.encode(errors="replace").decode() == text


def pack_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a one-dimensional tensor of bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def unpack_bytes(stored: torch.Tensor, dtype: str, shape: Iterable[int]) -> torch.Tensor:
    """Invert `pack_bytes` for a dtype in `BYTE_VIEWED_DTYPES`; ValueError if the bytes do not fit."""
    kind, shape = BYTE_VIEWED_DTYPES.get(dtype), tuple(shape)
    if kind is None or stored.dtype is not torch.uint8 or stored.dim() != 1:
        raise ValueError(f"{stored.dtype} with {stored.dim()} dimensions does not store a tensor of {dtype!r}")
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * kind.itemsize != stored.numel():
        raise ValueError(f"{stored.numel()} bytes are not a tensor of {dtype} with shape {list(shape)}")
    if not stored.numel():
        return torch.empty(shape, dtype=kind, device="cpu")
    return stored.clone().view(kind).reshape(shape)


@dataclass(frozen=True)
class LoadedTensorFile:
    """The tensors of a safetensors file by name, in the order of the file."""

    layout: SafetensorsLayout
    tensors: dict[str, torch.Tensor]


FileContent = LoadedTensorFile | Any
"""The content of a file: tensors, or a buffer with all bytes."""


def read_tensor_file(
    fd: int,
    size: int,
    *,
    digest: bool = True,
    where: str = "the file",
    alone: bool = False,
    advance: Callable[[int], object] = lambda count: None,
) -> tuple[FileContent, str]:
    """Return the tensors of an open safetensors file of `size` bytes, and its checksum. The keywords are those of `read_whole`.

    If the header is invalid, the raw bytes are returned: the caller compares the checksum, and `load_tensors` reports what is wrong.
    """
    check_fits_memory(size, where)
    try:
        header = bytearray(os.pread(fd, 8, 0))
        length = int.from_bytes(header, "little")
        if length > min(LARGEST_HEADER, size - 8):
            raise CheckpointError(f"{where} has a header of {length:,} bytes")
        header += os.pread(fd, length, 8)
        layout = read_layout(lambda offset, count: memoryview(header)[offset : offset + count], size, where)
    except (CheckpointError, OSError):
        return read_whole(fd, size, digest=digest, where=where, alone=alone, advance=advance)
    try:
        tensors = {entry.name: empty_host_tensor(TORCH_DTYPES[entry.dtype], entry.shape) for entry in layout.entries.values()}
    except RuntimeError as error:  # from torch's allocator
        raise CheckpointError(f"There is no memory for the {size:,} bytes of {where}: {str(error)[:200]}") from error
    parsed = bytes(header)
    parts = [memoryview(header), *map(byte_view, tensors.values())]
    checksum = read_into(fd, parts, digest=digest, where=where, alone=alone, advance=advance)
    if header != parsed:
        raise CheckpointError(f"{where} was changed while it was read.")
    return LoadedTensorFile(layout, tensors), checksum


def load_tensors(content: FileContent, where: str) -> LoadedTensorFile:
    """Return the tensors of a safetensors file from its content; `where` names it in errors."""
    if isinstance(content, LoadedTensorFile):
        return content
    view = memoryview(content)
    layout = read_layout(lambda offset, count: view[offset : offset + count], view.nbytes, where)
    at = layout.data_start
    tensors = {
        entry.name: tensor_from_bytes(view[at + entry.start : at + entry.end], TORCH_DTYPES[entry.dtype], entry.shape)
        for entry in layout.entries.values()
    }
    return LoadedTensorFile(layout, tensors)
