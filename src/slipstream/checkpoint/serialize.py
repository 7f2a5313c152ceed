"""Serialize states of objects as JSON and tensors, exactly and without pickle.

`flatten` splits a value into a JSON tree and its tensors by name. A state with tensors becomes one safetensors file with the tree in its
metadata; a state without becomes one JSON file. Values that JSON cannot express are objects with a key that begins with "$", listed in
`docs/checkpoint-format.md`. `deserialize` returns the same types, key order and bits, and shared tensors are shared again. A value that
cannot be stored is an error that says where in the state it is and what to store instead.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy
import torch

from slipstream.checkpoint.manifest import shorten_repr as _shown
from slipstream.checkpoint.sharded import is_sharded
from slipstream.checkpoint.tensor_bytes import (
    BYTE_VIEWED_DTYPES,
    DTYPES,
    TORCH_DTYPES,
    EncodedFile,
    dtype_name,
    encode_tensors,
    explain_unstorable,
    is_utf8,
    memory_identity,
    pack_bytes,
)
from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.safetensors_layout import file_order_key

__all__ = ["encode_tree", "flatten", "write_part"]

_TREE: Final = "tree"

_DEEPEST: Final = 60
_LARGEST_INTEGER: Final = 2**63
_LONG: Final = 4096
"""Lists with at least so many numbers, such as the order of a dataset, are stored as tensors."""
_LONGEST_NAME: Final = 1000
_FACTORIES: Final[Mapping[Any, str | None]] = MappingProxyType(
    {None: None, **{entry: entry.__name__ for entry in (int, float, str, bool, bytes, list, dict, set, tuple)}}
)
_DTYPES: Final = frozenset([*TORCH_DTYPES.values(), *BYTE_VIEWED_DTYPES.values()])
_HALF_CHARACTER: Final = re.compile("[\\ud800-\\udfff]")

_Result = TypeVar("_Result")
_Node = Any
_Place = tuple[Any, ...]
"""The path to a value: () or (path of its container, its key or index)."""
_Maker = Callable[["_Flattener", Any, _Place, int], _Node]


def flatten(value: Any, where: str, sharded: dict[str, Any] | None = None) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a JSON tree and the tensors of the value, by the names that the tree refers to.

    The tensors are those of the value, not copies, in the order of a file (`file_order_key`). `where` begins the path that an error
    names. Sharded tensors are put into `sharded`; without it they are an error.

    >>> flatten({"step": 3, "ratio": (float("nan"), 0.5), "mean": torch.zeros(2)}, "the state")
    ({'step': 3, 'ratio': {'$tuple': [{'$float': 'nan'}, 0.5]}, 'mean': {'$tensor': 'mean'}}, {'mean': tensor([0., 0.])})
    >>> flatten({"scale": [abs]}, "custom object 0")
    Traceback (most recent call last):
    slipstream.errors.CheckpointError: custom object 0['scale'][0] is a function (abs), which ...
    """
    flattener = _Flattener(where, sharded)
    tree = flattener.node(value, (), 0)
    return tree, dict(sorted(flattener.tensors.items(), key=lambda item: file_order_key(item[1].nbytes, item[1].element_size())))


def encode_tree(name: str, tree: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[str, EncodedFile]:
    """Return the file name of a flattened state, NAME.json or with tensors NAME.safetensors, and its bytes."""
    data = strict_json.dump(tree)
    text = data.decode()
    if why := strict_json.explain_too_large(text, beside=sum(tensor.nbytes for tensor in tensors.values())):
        raise CheckpointError(f"{name} would be unreadable: {why}. Store long lists and strings as tensors or arrays.")
    if not tensors:
        return f"{name}.json", ([data], len(data))
    return f"{name}.safetensors", encode_tensors(tensors, {_TREE: text})


def write_part(add: Callable[[str, Iterable[Any], int], _Result], name: str, value: Any, where: str) -> tuple[str, _Result]:
    """Write a state as one file through `add(name, chunks, size)`; return the file name and the result of `add`."""
    file, encoded = encode_tree(name, *flatten(value, where))
    return file, add(file, *encoded)


class _Flattener:
    """One walk through a value."""

    def __init__(self, where: str, sharded: dict[str, Any] | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._sharded = sharded
        self._where = where
        self._names: dict[Any, str] = {}
        self._keep: list[Any] = []
        """Keeps every tensor alive, so that no other one gets its address."""
        self._open: set[int] = set()

    def at(self, place: _Place) -> str:
        """Return the path as a Python expression."""
        steps = [str(step) if type(step) is _PathWords else f"[{_shown(step)}]" for step in _format_path(place)]
        return self._where + "".join(steps if len(steps) <= 12 else [*steps[:6], " ... ", *steps[-4:]])

    def node(self, value: Any, place: _Place, depth: int) -> _Node:
        kind = type(value)
        if kind is str:
            return value if is_utf8(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
        if kind is bool or value is None:
            return value
        if kind is int:
            return value if -_LARGEST_INTEGER <= value < _LARGEST_INTEGER else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is torch.Tensor:
            return self._tensor(value, place)
        make = _MAKERS.get(kind)
        if make is not None:
            return self._within(make, value, place, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, numpy.generic):
            return self._scalar(value, place, depth)
        raise CheckpointError(f"{self.at(place)} is {_described(value)}, which a checkpoint cannot store. {_remedy(value)}")

    def _within(self, make: _Maker, value: Any, place: _Place, depth: int) -> _Node:
        if id(value) in self._open:
            raise CheckpointError(f"{self.at(place)} contains itself. Store a value without cycles, such as names instead of references.")
        if depth >= _DEEPEST:
            raise CheckpointError(f"{self.at(place)} is nested more than {_DEEPEST} levels deep. Store a flatter state.")
        self._open.add(id(value))
        try:
            return make(self, value, place, depth + 1)
        finally:
            self._open.discard(id(value))

    def items(self, values: Iterable[Any], place: _Place, depth: int) -> list[_Node]:
        return [self.node(item, (place, position), depth) for position, item in enumerate(values)]

    def pairs(self, value: Mapping[Any, Any], place: _Place, depth: int) -> list[_Node]:
        return [[self._key(key, place, depth), self.node(item, (place, key), depth)] for key, item in value.items()]

    def _key(self, key: Any, place: _Place, depth: int) -> _Node:
        if isinstance(key, torch.Tensor):
            raise CheckpointError(
                f"{self.at(place)} has a tensor as a key, which cannot be restored. Use a name or a number."
            )
        return self.node(key, (place, _PathWords(f" (its key {_shown(key)})")), depth)

    def of_dict(self, value: dict[Any, Any], place: _Place, depth: int) -> _Node:
        if all(type(key) is str and not key.startswith("$") and (is_utf8(key)) for key in value):
            return {key: self.node(item, (place, key), depth) for key, item in value.items()}
        return {"$dict": self.pairs(value, place, depth)}

    def of_list(self, value: list[Any], place: _Place, depth: int) -> _Node:
        if len(value) >= _LONG and (numbers := _numbers(value)) is not None:
            return {"$numbers": self._store(numbers, id(numbers), place, torch.from_numpy)}
        if all([type(item) is int and -_LARGEST_INTEGER <= item < _LARGEST_INTEGER for item in value]):  # a random state has hundreds
            return list(value)
        return self.items(value, place, depth)

    def of_ordered(self, value: OrderedDict[Any, Any], place: _Place, depth: int) -> _Node:
        node: dict[str, Any] = {"$ordered": self.pairs(value, place, depth)}
        if attributes := dict(vars(value)):  # layer versions are an attribute of a module's state dict
            metadata = attributes.pop("_metadata", None)
            if attributes:
                raise CheckpointError(f"{self.at(place)} has extra attributes ({', '.join(attributes)}). Store them as entries.")
            node["metadata"] = self.node(metadata, (place, _PathWords("._metadata")), depth)
        return node

    def of_default(self, value: defaultdict[Any, Any], place: _Place, depth: int) -> _Node:
        factory = value.default_factory
        if not any(factory is known for known in _FACTORIES):
            raise CheckpointError(
                f"{self.at(place)} is a defaultdict with the factory {_described(factory)}, which a checkpoint cannot store. "
                "Store dict(...) of it, or use the factory int, float, list, dict or set."
            )
        return {"$defaultdict": [_FACTORIES[factory], self.pairs(value, place, depth)]}

    def of_deque(self, value: deque[Any], place: _Place, depth: int) -> _Node:
        return {"$deque": [value.maxlen, self.items(value, place, depth)]}

    def of_set(self, value: set[Any] | frozenset[Any], place: _Place, depth: int) -> _Node:
        nodes = [self._key(item, place, depth) for item in value]
        return {"$set" if type(value) is set else "$frozenset": sorted(nodes, key=repr)}  # sets have a different order in every run

    def of_complex(self, value: complex, place: _Place, depth: int) -> _Node:
        return {"$complex": [self.node(value.real, place, depth), self.node(value.imag, place, depth)]}

    def of_dtype(self, value: torch.dtype, place: _Place, depth: int) -> _Node:
        if value not in _DTYPES:
            raise CheckpointError(f"{self.at(place)} is {value}, a dtype that a checkpoint does not support. Store its name.")
        return {"$dtype": dtype_name(value)}

    def _tensor(self, value: torch.Tensor, place: _Place) -> _Node:
        node: dict[str, Any]
        if self._sharded is not None and is_sharded(value):
            return {"$tensor": self._store_sharded(value, place, self._sharded)}
        if problem := explain_unstorable(value):
            raise CheckpointError(f"{self.at(place)} {problem}")
        if value.dtype in DTYPES:
            node = {"$tensor": self._store(value, memory_identity(value), place, torch.Tensor.detach)}
        else:
            name = self._store(value, memory_identity(value), place, pack_bytes)
            node = {"$tensor": name, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        if type(value) is torch.nn.Parameter:
            node["parameter"] = value.requires_grad
        elif value.requires_grad:
            node["requires_grad"] = True
        return node

    def of_array(self, value: numpy.ndarray[Any, Any], place: _Place, depth: int) -> _Node:
        if value.dtype.kind not in "biufcSUmM":
            raise CheckpointError(
                f"{self.at(place)} is an array of {value.dtype}, which a checkpoint cannot store. "
                "Store an array of numbers or strings for each field, or a list."
            )
        name = self._store(value, ("array", id(value)), place, _array_bytes)
        return {"$array": name, "dtype": value.dtype.str, "shape": list(value.shape)}

    def _scalar(self, value: numpy.generic, place: _Place, depth: int) -> _Node:
        kind = value.dtype.kind
        if type(value).__module__ != "numpy" or kind not in "biufcSUmM":
            raise CheckpointError(f"{self.at(place)} is a scalar of {value.dtype}, which cannot be stored. Store a number or string.")
        readable = kind in "biuU" or (kind == "f" and value.dtype.itemsize <= 8 and value == value)  # the bits of a nan would be lost
        return {"$scalar": [value.dtype.str, self.node(value.item() if readable else value.tobytes(), place, depth)]}

    def _store(self, value: Any, identity: Any, place: _Place, convert: Callable[[Any], torch.Tensor]) -> str:
        """Store a tensor once, and return its name."""
        if identity not in self._names:
            self._keep.append(value)
            self._names[identity] = name = self._name(place)
            self.tensors[name] = convert(value)
        return self._names[identity]

    def _store_sharded(self, value: torch.Tensor, place: _Place, sharded: dict[str, Any]) -> str:
        """Put a sharded tensor into `sharded`, and return its name, which is the same on every rank."""
        if id(value) not in self._names:
            self._keep.append(value)
            self._names[id(value)] = name = self._name(place)
            sharded[name] = value
        return self._names[id(value)]

    def _name(self, place: _Place) -> str:
        plain = ".".join(map(str, _format_path(place)))[:_LONGEST_NAME] or "value"
        if not plain.isascii():
            plain = _HALF_CHARACTER.sub("_", plain)
        name, number = plain, 2
        while name in self.tensors or name in (self._sharded or ()) or name == "__metadata__":
            name, number = f"{plain}~{number}", number + 1
        return name


_MAKERS: Final[Mapping[type, _Maker]] = MappingProxyType(
    {
        dict: _Flattener.of_dict,
        list: _Flattener.of_list,
        tuple: lambda walk, value, place, depth: {"$tuple": walk.items(value, place, depth)},
        torch.Size: lambda walk, value, place, depth: {"$size": [int(size) for size in value]},
        OrderedDict: _Flattener.of_ordered,
        defaultdict: _Flattener.of_default,
        Counter: lambda walk, value, place, depth: {"$counter": walk.pairs(value, place, depth)},
        deque: _Flattener.of_deque,
        set: _Flattener.of_set,
        frozenset: _Flattener.of_set,
        complex: _Flattener.of_complex,
        bytes: lambda walk, value, place, depth: {"$bytes": _base64(value)},
        bytearray: lambda walk, value, place, depth: {"$bytearray": _base64(value)},
        torch.dtype: _Flattener.of_dtype,
        torch.device: lambda walk, value, place, depth: {"$device": str(value)},
        numpy.ndarray: _Flattener.of_array,
    }
)


class _PathWords(str):
    """A step of a path that is not a key of a container."""


def _format_path(place: _Place) -> list[Any]:
    found = []
    while place:
        place, step = place
        found.append(step)
    return found[::-1]


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _numbers(value: list[Any]) -> numpy.ndarray[Any, Any] | None:
    """Return a list of only 64-bit integers or only floats as an array, else None."""
    kinds = set(map(type, value))
    if kinds == {float}:
        return numpy.array(value, dtype=numpy.float64)
    if kinds == {int} and min(value) >= -_LARGEST_INTEGER and max(value) < _LARGEST_INTEGER:
        return numpy.array(value, dtype=numpy.int64)
    return None


def _array_bytes(array: numpy.ndarray[Any, Any]) -> torch.Tensor:
    """Return the elements as a one-dimensional tensor of bytes, without a copy where possible."""
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    row = numpy.ascontiguousarray(array).reshape(-1)
    raw = row.view(numpy.uint8)
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy())


def _described(value: Any) -> str:
    kind = type(value)
    if callable(value) and not isinstance(value, (type, torch.nn.Module)) and hasattr(value, "__name__"):
        return f"a function ({value.__name__})"
    if isinstance(value, type):
        return f"a class ({value.__module__}.{value.__qualname__})"
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _remedy(value: Any) -> str:
    """Return what to store instead."""
    if isinstance(value, (torch.Generator, numpy.random.Generator)):
        return "Store its state: generator.get_state(), or generator.bit_generator.state for numpy's."
    if hasattr(value, "state_dict"):
        return "Store its state_dict(), and restore it with load_state_dict()."
    if isinstance(value, tuple):
        return "Store value._asdict() or tuple(value): the class of a named tuple is not stored."
    if callable(value):
        return "Leave it out of state_dict(), or store a name by which load_state_dict() can find it."
    return (
        "Store plain data in state_dict(): numbers, strings, bytes, None, tensors, arrays, and lists, tuples, dicts and sets of them. "
        "A path becomes str(path), an enum its .value, a dataclass dataclasses.asdict(...)."
    )
