"""What the ends of nested data are to a collective, and how they become bytes.

A leaf is a tensor or array (gathered along its first dimension), a number, a list of entries (texts, ids, records: concatenated), or any
other object (one per rank). Structure is everything above the leaves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy
import torch

from slipstream.comm.tree import children, flatten, is_namedtuple, is_node, map_leaves
from slipstream.devices.table import CPU

__all__ = [
    "Entries",
    "Packed",
    "as_tensor",
    "is_entries",
    "is_items",
    "is_tensor_leaf",
    "numbers_as_tensors",
    "pack_object",
    "spell_tensor",
    "unpack_object",
]


def is_tensor_leaf(value: object) -> bool:
    """Whether this leaf has a first dimension and a type that all processes can share."""
    return isinstance(value, torch.Tensor) or (isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc")


def _holds_tensor(value: object) -> bool:
    if is_tensor_leaf(value):
        return True
    return is_node(value) and any(_holds_tensor(item) for _, item in children(value))


def is_items(node: object) -> bool:
    """Whether a container is a batch of items rather than structure: texts, ids, records, without tensors.

    >>> is_items(["a", "b"]), is_items(("a", "b")), is_items((["a"], ["b"])), is_items([torch.ones(2)]), is_items([])
    (True, True, False, False, True)
    """
    if isinstance(node, list):
        return not any(_holds_tensor(item) for item in node)
    if isinstance(node, tuple) and not is_namedtuple(node):
        return not any(is_node(item) or is_tensor_leaf(item) for item in node)
    return False


class Entries(list[Any]):
    """A list that is one of entries, whatever it holds."""


def _holds_other(value: object) -> bool:
    """Whether there is anything in it that is not a tensor."""
    return any(_holds_other(item) for _, item in children(value)) if is_node(value) else not is_tensor_leaf(value)


def is_entries(node: object) -> bool:
    """Whether a container is joined entry by entry, rather than structure whose leaves are joined.

    A list is, unless it has tensors among its entries, or holds nothing but tensors. A tuple is, if its entries are single values.

    >>> is_entries(["a", "b"]), is_entries([{"prompt": "a", "embedding": torch.ones(2)}]), is_entries([])
    (True, True, True)
    >>> is_entries([torch.ones(2), "a"]), is_entries([{"logits": torch.ones(2)}]), is_entries(({"a": 1},))
    (False, False, False)
    """
    if isinstance(node, Entries) or is_items(node):
        return True
    return isinstance(node, list) and not any(is_tensor_leaf(entry) for entry in node) and any(_holds_other(entry) for entry in node)


def pack_object(value: Any) -> list[Any]:
    """A value that is sent whole, as it travels: its tensors in host memory, and beside it where they were, unless all were there."""
    if not _holds_tensor(value):
        return [value, None]
    kinds = [leaf.device.type for leaf in flatten(value) if isinstance(leaf, torch.Tensor)]
    return [map_leaves(_at_rest, value), None if all(kind == _HOST for kind in kinds) else kinds]


def unpack_object(packed: list[Any], own: Any) -> Any:
    """A value that came from some rank, its tensors on the kind of device where they were; `own`: that of this rank.

    >>> unpack_object(pack_object([{"text": "a", "row": torch.ones(1)}]), [])
    [{'text': 'a', 'row': tensor([1.])}]
    """
    value, kinds = packed
    if kinds is None:
        return value
    devices = {leaf.device.type: leaf.device for leaf in flatten(own) if isinstance(leaf, torch.Tensor)}
    supply = iter(kinds)

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        kind = next(supply)
        return leaf.to(devices.get(kind) or torch.device(kind))

    return map_leaves(place, value)


def _at_rest(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def spell_tensor(value: Any, *, ragged: bool = False) -> str:
    """`float32(2, 3)`; with `ragged`, the first dimension may differ between processes and is left open.

    >>> spell_tensor(torch.ones(2, 3)), spell_tensor(torch.ones(2, 3), ragged=True), spell_tensor(numpy.zeros(4))
    ('float32(2, 3)', 'float32(*, 3)', 'array float64(4,)')
    """
    shape = tuple(value.shape)
    kind = str(value.dtype.newbyteorder("=") if isinstance(value, numpy.ndarray) else value.dtype).removeprefix("torch.")
    where = f" on {value.device.type}" if isinstance(value, torch.Tensor) and value.device.type != _HOST else ""
    prefix = "" if isinstance(value, torch.Tensor) else "array "
    if not ragged:
        return f"{prefix}{kind}{shape}{where}"
    rest = "".join(f", {size}" for size in shape[1:])
    return f"{prefix}{kind}(*{rest}){where}"


_HOST = CPU.type


class Packed:
    """A tensor or array leaf, ready to travel: its rows, what a row is, and its bytes."""

    __slots__ = ("dtype", "is_array", "is_scalar", "on_host", "row_bytes", "row_shape", "rows", "shape", "tensor")

    def __init__(self, leaf: Any) -> None:
        self.is_array = not isinstance(leaf, torch.Tensor)
        tensor = as_tensor(leaf)
        self.is_scalar = tensor.dim() == 0
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        shape = self.shape = tensor.shape
        if tensor.numel() == 1:  # one element may have any stride and still count as contiguous, but cannot be viewed as bytes then
            tensor = tensor.as_strided((1,), (1,))
        self.tensor = tensor
        self.dtype = tensor.dtype
        self.rows = 1 if self.is_scalar else shape[0]
        self.row_shape = shape[1:]
        self.row_bytes = tensor.element_size() * math.prod(self.row_shape)
        self.on_host = tensor.device.type == _HOST

    def bytes(self) -> Any:
        """The contents of host memory as a numpy array of bytes, without a copy."""
        return self.tensor.view(-1).view(torch.uint8).numpy() if self.rows * self.row_bytes else _NOTHING

    def as_rows(self, data: torch.Tensor, rows: int) -> torch.Tensor:
        """Bytes of any process as rows of this leaf's type: a view."""
        if not data.numel():
            return torch.empty((rows, *self.row_shape), dtype=self.dtype, device=data.device)
        return data.view(self.dtype).view((rows, *self.row_shape))

    def finish(self, tensor: torch.Tensor) -> Any:
        """A result in the form that the leaf had."""
        return tensor.numpy() if self.is_array else tensor


_NOTHING = numpy.empty(0, dtype=numpy.uint8)


def as_tensor(leaf: Any) -> torch.Tensor:
    """A tensor or array leaf as a plain tensor without gradient; TypeError for what has no rows that could travel.

    An array shares its memory with the tensor where that can be: not if it is read-only, turned round or of foreign byte order.

    >>> as_tensor(numpy.arange(3)[::-1])
    tensor([2, 1, 0])
    """
    return _checked(leaf) if isinstance(leaf, torch.Tensor) else _from_array(leaf)


def _from_array(array: Any) -> torch.Tensor:
    if isinstance(array, numpy.ma.MaskedArray):
        raise TypeError("a masked array would lose its mask on the way: fill it first with .filled(value), or send .data and .mask")
    if array.dtype.kind in "fc" and array.dtype.itemsize > (8 if array.dtype.kind == "f" else 16):
        smaller = "float64" if array.dtype.kind == "f" else "complex128"
        raise TypeError(f"an array of {array.dtype} has no counterpart among tensors: convert it first with .astype({smaller!r})")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = numpy.array(array, order="C")  # unlike ascontiguousarray, leaves an array without dimensions as it is
    return torch.from_numpy(array)


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        raise TypeError(
            "a nested tensor has no rows of one shape to send: pass torch.nested.to_padded_tensor(tensor, 0.0), or the list tensor.unbind()"
        )
    if tensor.is_quantized:
        raise TypeError(f"a quantized tensor ({tensor.dtype}) cannot be sent as rows: call .dequantize() first")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device holds no data to send: load or materialise it first")
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout} cannot be sent as rows: convert it first with .to_dense()")
    if type(tensor) is not torch.Tensor and hasattr(tensor, "full_tensor"):
        raise TypeError("a sharded tensor is already spread over the processes: call .full_tensor() first")
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def numbers_as_tensors(leaf: Any) -> Any:
    """Python and numpy numbers as tensors without dimensions; everything else as it is."""
    if isinstance(leaf, (bool, int, float, complex, numpy.number, numpy.bool_)):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    return leaf
