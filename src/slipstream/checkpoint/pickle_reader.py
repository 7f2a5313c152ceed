"""Read the pickle in a file of `torch.save` as data: nothing in it is ever run.

`pickle_records.py` takes the pickle apart. Values are then built from one fixed table of kinds (`_BUILDERS`), each checked first: a tensor
lies inside its storage and has no more elements, so shapes and strides cannot exceed the file. Objects of other classes stay records,
listed in `TorchFileValues.unknown`. Tensors are views of the file; `TorchFileValues.owned()` gives them memory of their own.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy
import torch

from slipstream.checkpoint.pickle_records import DICT, FROZENSET, SET, STORAGE, NotPlainError, PickledCall, PickledName, disassemble
from slipstream.checkpoint.tensor_bytes import BYTE_VIEWED_DTYPES, DTYPES
from slipstream.checkpoint.torch_archive import Archive, read_archive
from slipstream.distributed.codec import tensor_from_bytes
from slipstream.errors import CheckpointError
from slipstream.files.reader import release_memory

__all__ = ["TorchFileValues", "read_values"]


_DEEPEST = 60
_DEEPEST_KEY = 4
_LARGEST_WHEN_WRITTEN_OUT = 20_000_000
_SAME_HASH = 16
_ALIGNMENT = 16
_PLAIN = (type(None), bool, int, float, str, bytes, bytearray)
_KEYS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_ELEMENTS: Final[Mapping[str, torch.dtype]] = MappingProxyType({str(dtype): dtype for dtype in (*DTYPES, *BYTE_VIEWED_DTYPES.values())})
_STORAGES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
        "ComplexFloatStorage": torch.complex64,
        "ComplexDoubleStorage": torch.complex128,
        "UntypedStorage": torch.uint8,
    }
)
_FACTORIES: Final[Mapping[str, Callable[[], Any]]] = MappingProxyType(
    {entry.__name__: entry for entry in (int, float, str, list, dict, set)}
)
_ARRAY_KIND = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16)", re.ASCII)


@dataclass(frozen=True)
class TorchFileValues:
    """The content of a torch.save file."""

    value: Any
    unknown: tuple[str, ...]
    """Classes and functions in the file that are not built here; empty if it is only data."""
    make_owned: Callable[[], Any] = field(default=lambda: None, repr=False)

    def owned(self) -> Any:
        """Return the values with tensors that own their memory. The bytes of the file are released: call it once, and last."""
        return self.make_owned()


def read_values(data: memoryview, where: str) -> TorchFileValues:
    """Return the values in the bytes of a file that torch.save wrote. Tensors share the memory if it is writable and aligned."""
    archive = read_archive(data, where)
    if "byteorder" in archive.spans and bytes(archive.entry("byteorder")) != b"little":
        raise CheckpointError(f"{where} was written on a big-endian machine; save it again on a little-endian one")
    records = disassemble(bytes(archive.entry("data.pkl")), where)
    builder = _Builder(archive, where, _shared)
    value, _ = builder.build(records, 0)
    return TorchFileValues(value, tuple(sorted(builder.unknown)), lambda: _Builder(archive, where, _moved).build(records, 0)[0])


def _shared(data: memoryview) -> torch.Tensor:
    """Return bytes as a tensor that shares their memory if possible."""
    if data.readonly or not data:
        return tensor_from_bytes(data, torch.uint8, (len(data),))
    raw = torch.frombuffer(data, dtype=torch.uint8)
    return tensor_from_bytes(data, torch.uint8, (len(data),)) if raw.data_ptr() % _ALIGNMENT else raw


def _moved(data: memoryview) -> torch.Tensor:
    """Return a copy of bytes as a tensor, and release their memory."""
    made = tensor_from_bytes(data, torch.uint8, (len(data),))
    release_memory(data)
    return made


class _Builder:
    """Builds values from records; values that are shared in the file stay shared."""

    def __init__(self, archive: Archive, where: str, storage: Callable[[memoryview], torch.Tensor]) -> None:
        self.where = where
        self._make_storage = storage
        self.unknown: set[str] = set()
        self._archive = archive
        self._made: dict[int, tuple[Any, int]] = {}
        self._making: set[int] = set()
        self._storages: dict[str, torch.Tensor] = {}

    def wrong(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where} is damaged or malicious: {why}. Use another copy of the checkpoint.")

    def build(self, record: Any, depth: int) -> tuple[Any, int]:
        """Return a value and its size with shared values counted each time: a few bytes can share their way to billions."""
        if type(record) in _PLAIN:
            return record, 1
        key = id(record)  # records stay alive as long as this object
        if key in self._made:
            return self._made[key]
        if key in self._making or depth > _DEEPEST:
            raise NotPlainError(f"{self.where} has a value that contains itself or is nested deeper than {_DEEPEST}")
        self._making.add(key)
        made = self._made[key] = self._make(record, depth + 1)
        self._making.discard(key)
        if made[1] > _LARGEST_WHEN_WRITTEN_OUT:
            raise NotPlainError(
                f"{self.where} has more than {_LARGEST_WHEN_WRITTEN_OUT:,} values, counting those that are shared each time"
            )
        return made

    def _make(self, record: Any, depth: int) -> tuple[Any, int]:
        if type(record) is PickledName:
            if record.path not in _ELEMENTS:
                self.unknown.add(record.path)
            return _ELEMENTS.get(record.path, record), 1
        if type(record) is not PickledCall:
            values, weight = self._several(record, depth)
            return (tuple(values) if type(record) is tuple else values), weight
        if record.path == STORAGE:
            return record, 1
        # A name among the arguments is part of the call.
        named = [type(argument) is PickledName and argument.path not in _ELEMENTS for argument in record.arguments]
        built, weight = self._several([None if name else argument for argument, name in zip(record.arguments, named, strict=True)], depth)
        arguments = tuple(raw if name else entry for raw, entry, name in zip(record.arguments, built, named, strict=True))
        state, state_weight = self.build(record.state, depth)
        items, items_weight = self._several(record.items, depth)
        call = PickledCall(record.path, arguments, state, items)
        kind = _BUILDERS.get(record.path)
        try:
            made = NotImplemented if kind is None else kind(self, call)
        except (TypeError, ValueError, OverflowError) as problem:  # arguments that no real file has
            raise self.wrong(f"{record.path} cannot be made ({type(problem).__name__}: {problem!s:.200})") from None
        if made is NotImplemented:
            self.unknown.add(record.path)
            made = call
        return made, weight + state_weight + items_weight

    def _several(self, records: Any, depth: int) -> tuple[list[Any], int]:
        built = [self.build(record, depth) for record in records]
        return [value for value, _ in built], 1 + sum(weight for _, weight in built)

    # -- mappings and sets

    def checked_keys(self, keys: list[Any]) -> list[Any]:
        """Return the keys if they are plain and were not chosen to collide, which would take forever."""
        seen: dict[int, int] = {}
        for key in keys:
            if type(key) is str:  # hashes of strings differ in every process
                continue
            self._check_key(key, 0)
            number = hash(key)
            seen[number] = seen.get(number, 0) + 1
            if seen[number] > _SAME_HASH:
                raise self.wrong("the keys of a mapping or set were chosen to have the same hash")
        return keys

    def _check_key(self, key: Any, depth: int) -> None:
        if type(key) in (tuple, frozenset) and depth < _DEEPEST_KEY:
            for part in key:
                self._check_key(part, depth + 1)
        elif type(key) not in _KEYS:
            kind = key.path if isinstance(key, (PickledCall, PickledName)) else type(key).__name__
            raise NotPlainError(
                f"{self.where} has a {kind:.80} as a key of a mapping or member of a set, which is not read as data"
            )

    def mapping(self, pairs: Any) -> dict[Any, Any]:
        if not all(type(pair) is tuple and len(pair) == 2 for pair in pairs):
            raise self.wrong("a mapping has an item that is not a pair")
        self.checked_keys([key for key, _ in pairs])
        made = dict(pairs)
        if len(made) != len(pairs):
            raise self.wrong("a mapping has a key twice")
        return made

    # -- tensors

    def _storage(self, record: Any) -> tuple[torch.UntypedStorage, torch.dtype, int]:
        """Return a storage, its dtype by the file, and its size in bytes."""
        fields = record.arguments if type(record) is PickledCall and record.path == STORAGE else None
        if type(fields) is not tuple or len(fields) != 5 or fields[0] != "storage" or type(fields[1]) is not PickledName:
            raise self.wrong("a tensor has no storage")
        key, count = fields[2], fields[4]
        dtype = _STORAGES.get(fields[1].path.rpartition(".")[2])
        if dtype is None or type(key) is not str or type(count) is not int:
            raise self.wrong(f"a storage of {fields[1].path:.80} cannot be read")
        start, end = self._archive.spans.get(f"data/{key}", (0, -1))
        if end - start != count * dtype.itemsize:
            raise self.wrong(f"its storage {key!r:.80} should be {count} elements of {dtype} and has {max(end - start, 0)} bytes")
        if key not in self._storages:
            self._storages[key] = self._make_storage(self._archive.data[start:end])
        return self._storages[key].untyped_storage(), dtype, end - start

    def tensor(self, stored: Any, offset: Any, shape: Any, strides: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a view of a storage that stays inside it and has no more elements."""
        storage, elements, size = self._storage(stored)
        dtype = dtype or elements
        shapes = type(shape) in (tuple, torch.Size) and type(strides) in (tuple, torch.Size) and len(shape) == len(strides) <= 64
        if not shapes or not all(type(number) is int and 0 <= number < 2**60 for number in (offset, *shape, *strides)):
            raise self.wrong(f"a tensor cannot have the shape {shape!r:.80}, the strides {strides!r:.80} and the offset {offset!r:.80}")
        count, room = math.prod(shape), size // dtype.itemsize
        last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) if count else 0
        if count > room > last >= 0:
            raise CheckpointError(
                f"{self.where} has a tensor {shape!r:.80} that repeats the {room} elements of its storage, as expand() does. It is "
                "not read, because a small file could need a lot of memory: save tensor.contiguous() instead."
            )
        if count > room or (count and last >= room) or offset > room:
            raise self.wrong(f"a tensor {shape!r:.80} with the strides {strides!r:.80} does not fit into its storage of {room} elements")
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, tuple(shape), tuple(strides))


# -- builders: each takes a call with built arguments, and returns NotImplemented for a form that it does not support


def _encoded(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case (str() as text, "latin1" | "latin-1"):
            try:
                return text.encode("latin1")
            except UnicodeEncodeError:
                raise builder.wrong("bytes are stored as a string that is not latin-1") from None
    return NotImplemented


def _complex(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case (int() | float() as real, int() | float() as imaginary):
            return complex(real, imaginary)
    return NotImplemented


def _set(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case ():
            members = call.items
        case (list() as members,) if not call.items:
            pass
        case _:
            return NotImplemented
    return (frozenset if call.path.endswith("frozenset") else set)(builder.checked_keys(members))


def _ordered(builder: _Builder, call: PickledCall) -> Any:
    if call.arguments or (call.state is not None and (type(call.state) is not dict or call.state.keys() - {"_metadata"})):
        return NotImplemented
    made = OrderedDict(builder.mapping(call.items))
    if call.state:  # layer versions of a module's state dict
        made._metadata = call.state["_metadata"]  # type: ignore[attr-defined]
    return made


def _defaults(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case ():
            return defaultdict(None, builder.mapping(call.items))
        case (PickledName(path=path),) if path.partition(".")[0] in _BUILTINS and path.partition(".")[2] in _FACTORIES:
            return defaultdict(_FACTORIES[path.partition(".")[2]], builder.mapping(call.items))
    return NotImplemented


def _counter(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case (dict() as counts,) if not call.items:
            return Counter(counts)
    return NotImplemented


def _deque(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case () | ([],):
            return deque(call.items)
        case ([], None | int() as longest) if longest is None or 0 <= longest < 2**60:
            return deque(call.items, longest)
    return NotImplemented


def _size(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case (tuple() as sizes,) if all(type(size) is int and abs(size) < 2**60 for size in sizes):
            return torch.Size(sizes)
    return NotImplemented


def _device(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case (str(),) | (str(), int()):
            try:
                return torch.device(*call.arguments)
            except RuntimeError:
                raise builder.wrong(f"there is no device {call.arguments!r:.80}") from None
    return NotImplemented


def _tensor(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case (stored, offset, shape, strides):
            return builder.tensor(stored, offset, shape, strides)
        case (stored, offset, shape, strides, bool() as wants_gradient, hooks) if _empty(hooks):
            return _marked(builder.tensor(stored, offset, shape, strides), wants_gradient)
    return NotImplemented


def _typed_tensor(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case (stored, offset, shape, strides, bool() as wants_gradient, hooks, torch.dtype() as dtype) if _empty(hooks):
            return _marked(builder.tensor(stored, offset, shape, strides, dtype), wants_gradient)
    return NotImplemented


def _parameter(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case (torch.Tensor() as data, bool() as wants_gradient, hooks, *_) if _empty(hooks):  # custom attributes are dropped
            return torch.nn.Parameter(data.detach(), requires_grad=wants_gradient and _differentiable(data))
    return NotImplemented


def _tagged(builder: _Builder, call: PickledCall) -> Any:
    """Return a tensor with custom attributes, without them."""
    match call.arguments:
        case (PickledName(path=path), PickledName(path=kind), tuple() as arguments, *_) if path in _TENSORS and kind in _TENSOR_CLASSES:
            made = _TENSORS[path](builder, PickledCall(path, arguments))
            plain = made is NotImplemented or not kind.endswith("Parameter")
            return made if plain else torch.nn.Parameter(made.detach(), made.requires_grad)
    return NotImplemented


def _marked(tensor: torch.Tensor, wants_gradient: bool) -> torch.Tensor:
    return tensor.requires_grad_(wants_gradient and _differentiable(tensor))


def _empty(hooks: Any) -> bool:
    return hooks is None or (isinstance(hooks, dict) and not hooks)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _array_kind(builder: _Builder, call: PickledCall) -> Any:
    order = "="
    match call.state:
        case None:
            pass
        case (int(), "<" | ">" | "|" | "=" as order, None, None, None, *_):
            pass
        case _:
            return NotImplemented
    match call.arguments:
        case (str() as name, *_) if _ARRAY_KIND.fullmatch(name):
            return numpy.dtype(order + name.lstrip("<>|=")) if order in "<>" else numpy.dtype(name)
    return NotImplemented


def _array(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments, call.state:
        case (PickledName(path="numpy.ndarray"), _, _), (
            int(),
            tuple() as shape,
            numpy.dtype() as dtype,
            bool() as by_columns,
            bytes() as data,
        ):
            sizes = all(type(size) is int and size >= 0 for size in shape) and len(shape) <= 32
            if not sizes or math.prod(shape) * dtype.itemsize != len(data):
                raise builder.wrong(f"an array of shape {shape!r:.80} does not have {len(data)} bytes")
            return numpy.frombuffer(data, dtype).reshape(shape, order="F" if by_columns else "C").copy(order="K")
    return NotImplemented


def _array_scalar(builder: _Builder, call: PickledCall) -> Any:
    match call.arguments:
        case (numpy.dtype() as dtype, bytes() as data):
            if len(data) != dtype.itemsize:
                raise builder.wrong(f"a number of {dtype} does not have {len(data)} bytes")
            return numpy.frombuffer(data, dtype)[0]
    return NotImplemented


_TENSORS: Final[Mapping[str, Callable[[_Builder, PickledCall], Any]]] = MappingProxyType(
    {
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _typed_tensor,
    }
)
_TENSOR_CLASSES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_BUILTINS = ("builtins", "__builtin__")
_MULTIARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_BUILDERS: Final[Mapping[str, Callable[[_Builder, PickledCall], Any]]] = MappingProxyType(
    {
        DICT: lambda builder, call: builder.mapping(call.items),
        SET: _set,
        FROZENSET: _set,
        **{f"{module}.{name}": _set for module in _BUILTINS for name in ("set", "frozenset")},
        **{f"{module}.bytes": lambda _, call: b"" if call.arguments == () else NotImplemented for module in _BUILTINS},
        **{f"{module}.complex": _complex for module in _BUILTINS},
        "_codecs.encode": _encoded,
        "collections.OrderedDict": _ordered,
        "collections.defaultdict": _defaults,
        "collections.Counter": _counter,
        "collections.deque": _deque,
        "torch.Size": _size,
        "torch.device": _device,
        **_TENSORS,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _tagged,
        "numpy.dtype": _array_kind,
        **{f"{module}._reconstruct": _array for module in _MULTIARRAYS},
        **{f"{module}.scalar": _array_scalar for module in _MULTIARRAYS},
    }
)
"""The builders, by the name of the function or class in the pickle."""
