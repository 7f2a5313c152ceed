"""Convert leaves of nested data to bytes and back.

Tensors and arrays travel as raw bytes and arrive in memory of torch's own allocator: aligned to 64 bytes, in a storage of their own,
resizable. Plain Python data (text, numbers, bytes, containers, arrays, tensors) is written as JSON plus one area of raw bytes, without
pickle; decoding it runs no code. What is `transient`, read at once by another process of the same job and never kept, is written in the
interpreter's own format where it holds nothing but builtin types: that takes a fraction of the time, and runs no code either. Only
objects of other classes are pickled, where the bytes of another process of the same job are trusted as `torch.distributed` trusts them;
`plain_only=True` refuses them. Tensors in device memory travel through host memory, also those inside such objects, and stay there unless
`decode` is asked to put them on a device of this process. `is_entries` says which lists are joined entry by entry rather than treated as
structure.
"""

from __future__ import annotations

import ctypes
import io
import json
import marshal
import math
import pickle  # noqa: TID251 - only for objects of foreign classes, see above
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy
import torch

from slipstream.devices.table import CPU
from slipstream.distributed.pytree import children, flatten, is_namedtuple, is_node, map_leaves

__all__ = [
    "Entries", "PackedTensor", "as_tensor", "byte_view", "convert_number", "decode", "describe_tensor", "empty_host_tensor",
    "encode", "is_entries", "is_items", "is_plain_tensor", "is_tensor_leaf", "pack_object", "tensor_from_bytes", "tensor_from_chunks",
    "unpack_object",
]


def empty_host_tensor(dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Return a tensor without values in host memory, whatever the default device and mode are.

    >>> empty_host_tensor(torch.int8, (2, 3)).data_ptr() % 64
    0
    """
    if not torch.is_inference_mode_enabled():
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    with torch.inference_mode(False):  # a tensor of that mode could not be used outside of it
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor that `empty_host_tensor` made, to be written while the tensor lives.

    It uses the address: after `numpy()` torch no longer resizes the storage of a tensor.
    """
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def tensor_from_chunks(chunks: Iterable[Any], dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Return a tensor of the elements in several buffers of bytes, one after the other.

    >>> tensor_from_chunks([bytes([1, 0]), bytes([2, 0, 3, 0])], torch.int16, (3,))
    tensor([1, 2, 3], dtype=torch.int16)
    """
    made = empty_host_tensor(dtype, shape)
    target, done = numpy.frombuffer(byte_view(made), dtype=numpy.uint8), 0
    for chunk in chunks:
        data = numpy.frombuffer(chunk, dtype=numpy.uint8)  # numpy copies large arrays without holding the GIL
        target[done : done + data.size] = data
        done += data.size
    return made


def tensor_from_bytes(data: memoryview, dtype: torch.dtype, shape: Iterable[int]) -> torch.Tensor:
    """Return a tensor of the elements in one buffer of bytes."""
    return tensor_from_chunks([data], dtype, shape)


_TAG = "\0"
"""The key that marks an escaped value; a dict of the user's that has this key is escaped itself."""
_BIG = 1 << 64
_ATOMS = frozenset({str, float, bool, type(None)})
_JSON_TYPES = _ATOMS | {int, list, dict}
_TEXT = frozenset({str})
_DEEPEST = 64
_LARGE_LEVEL = 1 << 12
"""Values of a level of nesting from which on those that are there several times are looked at once."""
_NESTED = frozenset({list, tuple, dict})
_MARSHALLED = _JSON_TYPES | {tuple, bytes}
_MARSHAL_VERSION = 2
"""The last version that does not make one object of equal ones."""
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(value: Any, *, plain_only: bool = False, transient: bool = False) -> bytes:
    """Return bytes from which `decode` makes an equal value; those of a `transient` value are for another process of the same job.

    >>> decode(encode([{"text": "a", 1: (2.5, b"x")}, None]))
    [{'text': 'a', 1: (2.5, b'x')}, None]
    """
    if transient and _is_builtin(value):
        return b"M" + marshal.dumps(value, _MARSHAL_VERSION)
    if _is_json(value):
        return b"J" + _to_json(value).encode()
    raw: list[bytes] = []
    text = _to_json(_Encoder(raw, plain_only).convert(value)).encode()
    return b"".join([b"T", len(text).to_bytes(8, "little"), text, *raw])


def decode(data: Any, *, place: bool = False, transient: bool = False) -> Any:
    """Return the value that was encoded, from bytes or an array of them. Raises ValueError for bytes that `encode` did not write.

    Only with `transient` are values taken that were encoded so.

    Tensors are in host memory; with `place`, those that were in the memory of a device are on this process's current device of that type.
    """
    view = memoryview(data)
    kind = bytes(view[:1])
    if kind == b"J":
        return json.loads(bytes(view[1:]).decode())
    if kind == b"M" and transient:
        return marshal.loads(view[1:])
    if kind != b"T":
        raise ValueError(f"these bytes begin with {kind!r}: not written by this codec")
    end = 9 + int.from_bytes(view[1:9], "little")
    return _Decoder(view[end:], place).restore(json.loads(bytes(view[9:end]).decode()))


def _is_json(value: Any) -> bool:
    """Whether JSON gives back exactly this value: only the exact types, text as keys, and not our tag.

    Looks at one level of nesting at a time, so that the loops over items are those of the interpreter.
    """
    level = [value]
    for _ in range(_DEEPEST):
        if not _JSON_TYPES.issuperset(map(type, level)):
            return False
        lists = [item for item in level if type(item) is list]
        dicts = [item for item in level if type(item) is dict]
        if not lists and not dicts:
            return True
        keys = set(chain.from_iterable(dicts))
        if _TAG in keys or not _TEXT.issuperset(map(type, keys)):
            return False
        level = list(chain(chain.from_iterable(lists), chain.from_iterable(map(dict.values, dicts))))
        if len(level) > _LARGE_LEVEL:
            level = _distinct(level)
    return False


def _is_builtin(value: Any) -> bool:
    """Whether the value holds nothing but the exact builtin types that `marshal` gives back; it would write others as their bytes."""
    level = [value]
    for _ in range(_DEEPEST):
        kinds = set(map(type, level))
        if not kinds <= _MARSHALLED:
            return False
        if kinds.isdisjoint(_NESTED):
            return True
        dicts = [item for item in level if type(item) is dict]
        rows = [item for item in level if type(item) is list or type(item) is tuple]
        level = list(chain(*rows, *dicts, *map(dict.values, dicts)))
        if len(level) > _LARGE_LEVEL:
            level = _distinct(level)
    return False


def _distinct(values: list[Any]) -> list[Any]:
    """Return each object once: the levels of data that refers to itself would grow without end."""
    return list(dict(zip(map(id, values), values, strict=True)).values())


class _Encoder:
    def __init__(self, raw: list[bytes], plain_only: bool) -> None:
        self._raw = raw
        self._size = 0
        self._plain_only = plain_only

    def _store(self, data: bytes) -> list[int]:
        place = [self._size, len(data)]
        self._raw.append(data)
        self._size += len(data)
        return place

    def convert(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS or (kind is int and -_BIG < value < _BIG):
            return value
        if kind is list:
            return [self.convert(item) for item in value]
        if kind is dict:
            if all(type(key) is str for key in value) and _TAG not in value:
                return {key: self.convert(item) for key, item in value.items()}
            return {_TAG: "dict", "v": [[self.convert(key), self.convert(item)] for key, item in value.items()]}
        return self._special(value, kind)

    def _special(self, value: Any, kind: type) -> dict[str, Any]:
        if kind in (tuple, set, frozenset):
            return {_TAG: kind.__name__, "v": [self.convert(item) for item in value]}
        if kind is int:
            return {_TAG: "int", "v": hex(value)}
        if kind is complex:
            return {_TAG: "complex", "v": [value.real, value.imag]}
        if kind is bytes or kind is bytearray:
            return {_TAG: kind.__name__, "at": self._store(bytes(value))}
        if kind is torch.Tensor and is_plain_tensor(value):
            return {_TAG: "tensor", **self._tensor(value)}
        if isinstance(value, (numpy.ndarray, numpy.generic)) and kind.__module__ == "numpy" and value.dtype.kind in "biufcSUmM":
            scalar, data = isinstance(value, numpy.generic), self._store(numpy.ascontiguousarray(value).tobytes())
            return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "scalar": scalar, "at": data}
        if self._plain_only:
            raise TypeError(
                f"a {kind.__module__}.{kind.__qualname__} is not plain data: pass text, numbers, bytes, arrays or containers of them"
            )
        return {_TAG: "foreign", "at": self._store(_pickle(value))}

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        data = self._store(PackedTensor(value.cpu()).bytes().tobytes())
        node = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "at": data}
        return node if value.device.type == _CPU else {**node, "on": value.device.type}


def _pickle(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles tensors in device memory as tensors of the host: torch's own way leads to the number of the device that the sender used."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        """What has a number, so that no other object gets its identity."""

    def persistent_id(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type == _CPU or not is_plain_tensor(value):
            return None
        known = self._numbers.get(id(value))
        if known is not None:
            return known, None
        number = self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        return number, (value.detach().cpu(), value.device.type, type(value) is torch.nn.Parameter, value.requires_grad)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: memoryview, place: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._place = place
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        number, held = pid
        if held is not None:
            tensor, kind, is_parameter, requires_grad = held
            tensor = tensor.to(kind) if self._place else tensor
            self._tensors[number] = torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)
        return self._tensors[number]


class _Decoder:
    def __init__(self, raw: memoryview, place: bool) -> None:
        self._raw = raw
        self._place = place

    def _bytes(self, place: list[int]) -> memoryview:
        start, length = place
        if start < 0 or length < 0 or start + length > len(self._raw):
            raise ValueError(f"a value claims bytes {start} to {start + length} of {len(self._raw)}")
        return self._raw[start : start + length]

    def restore(self, value: Any) -> Any:
        if type(value) is list:
            return [self.restore(item) for item in value]
        if type(value) is not dict:
            return value
        if _TAG not in value:
            return {key: self.restore(item) for key, item in value.items()}
        kind = value[_TAG]
        if kind == "dict":
            return {self.restore(key): self.restore(item) for key, item in value["v"]}
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self.restore(item) for item in value["v"])
        if kind == "int":
            return int(value["v"], 16)
        if kind == "complex":
            return complex(*value["v"])
        make = {"array": self._make_array, "tensor": self._make_tensor}.get(kind)
        if make is not None:
            return make(value)
        if kind == "foreign":
            return _Unpickler(self._bytes(value["at"]), self._place).load()
        from_bytes = _FROM_BYTES.get(kind)
        if from_bytes is None:
            raise ValueError(f"{kind!r} is not a kind of value that this codec writes")
        return from_bytes(self._bytes(value["at"]))

    def _make_array(self, node: dict[str, Any]) -> Any:
        dtype, shape = numpy.dtype(node["dtype"]), node["shape"]
        if not dtype.itemsize:  # nothing but empty texts, of which no bytes were written
            return dtype.type() if node["scalar"] else numpy.ndarray(shape, dtype=dtype)
        array = numpy.frombuffer(self._bytes(node["at"]), dtype=dtype).reshape(shape).copy()
        return array[()] if node["scalar"] else array

    def _make_tensor(self, node: dict[str, Any]) -> Any:
        dtype = getattr(torch, node["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{node['dtype']!r} is not a type of tensor")
        data, shape = self._bytes(node["at"]), node["shape"]
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"{len(data)} bytes are not a tensor of {dtype} with shape {shape}")
        tensor = tensor_from_chunks([data], dtype, shape)
        return tensor.to(node["on"]) if self._place and "on" in node else tensor


_CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_FROM_BYTES: dict[str, Callable[[memoryview], Any]] = {"bytes": bytes, "bytearray": bytearray}


def is_tensor_leaf(value: object) -> bool:
    """Whether this leaf has a first dimension and a type that all processes can share."""
    return isinstance(value, torch.Tensor) or (isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc")


def is_plain_tensor(leaf: Any) -> bool:
    """Whether a tensor or array travels as raw bytes of numbers; others keep their class on the way through `encode`."""
    if isinstance(leaf, torch.Tensor):
        return leaf.layout is torch.strided and not (leaf.is_quantized or leaf.is_meta or leaf.is_nested)
    kind = leaf.dtype.kind
    return kind in "biufc" and leaf.dtype.isnative and leaf.dtype.itemsize <= (8 if kind == "f" else 16)


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
    """Return a value that is sent whole with its tensors in host memory, and the devices they were on (None if all were on the host)."""
    if not _holds_tensor(value):
        return [value, None]
    kinds = [leaf.device.type for leaf in flatten(value) if isinstance(leaf, torch.Tensor)]
    return [map_leaves(_to_host, value), None if all(kind == _CPU for kind in kinds) else kinds]


def unpack_object(packed: list[Any], own: Any) -> Any:
    """Return a value that came from another rank, its tensors on the type of device where they were; `own` is that of this rank.

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


def _to_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def describe_tensor(value: Any, *, ragged: bool = False) -> str:
    """`float32(2, 3)`; with `ragged`, the first dimension may differ between processes and is left open.

    >>> describe_tensor(torch.ones(2, 3)), describe_tensor(torch.ones(2, 3), ragged=True), describe_tensor(numpy.zeros(4))
    ('float32(2, 3)', 'float32(*, 3)', 'array float64(4,)')
    """
    shape = tuple(value.shape)
    kind = str(value.dtype.newbyteorder("=") if isinstance(value, numpy.ndarray) else value.dtype).removeprefix("torch.")
    where = f" on {value.device.type}" if isinstance(value, torch.Tensor) and value.device.type != _CPU else ""
    prefix = "" if isinstance(value, torch.Tensor) else "array "
    if not ragged:
        return f"{prefix}{kind}{shape}{where}"
    rest = "".join(f", {size}" for size in shape[1:])
    return f"{prefix}{kind}(*{rest}){where}"


_CPU = CPU.type


class PackedTensor:
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
        self.on_host = tensor.device.type == _CPU

    def bytes(self) -> Any:
        """Return the contents in host memory as a numpy array of bytes, without a copy."""
        return self.tensor.view(-1).view(torch.uint8).numpy() if self.rows * self.row_bytes else _NO_BYTES

    def as_rows(self, data: torch.Tensor, rows: int) -> torch.Tensor:
        """View bytes of any process as rows of this leaf's type."""
        if not data.numel():
            return torch.empty((rows, *self.row_shape), dtype=self.dtype, device=data.device)
        return data.view(self.dtype).view((rows, *self.row_shape))

    def finish(self, tensor: torch.Tensor) -> Any:
        """Return a result in the form of the leaf."""
        return tensor.numpy() if self.is_array else tensor


_NO_BYTES = numpy.empty(0, dtype=numpy.uint8)


def as_tensor(leaf: Any) -> torch.Tensor:
    """Return a tensor or array leaf as a plain tensor without gradient; TypeError for what has no rows that could travel.

    An array shares its memory with the tensor unless it is read-only, reversed or of foreign byte order.

    >>> as_tensor(numpy.arange(3)[::-1])
    tensor([2, 1, 0])
    """
    return _check_tensor(leaf) if isinstance(leaf, torch.Tensor) else _from_array(leaf)


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


def _check_tensor(tensor: torch.Tensor) -> torch.Tensor:
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


def convert_number(leaf: Any) -> Any:
    """Return Python and numpy numbers as tensors without dimensions, and everything else as it is."""
    if isinstance(leaf, (bool, int, float, complex, numpy.number, numpy.bool_)):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None, device="cpu")
    return leaf
