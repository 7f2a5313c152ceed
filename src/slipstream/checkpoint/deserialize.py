"""Rebuild a value from the JSON tree and the tensors of `serialize.flatten`.

The tree comes from a file and is not trusted: every tag must have exactly the form that `serialize` writes, every tensor it names must be
present, and anything else is an error. Names in the file are looked up only in the tables here, nothing is run or imported, and nothing is
allocated beyond the size of the tree and its tensors.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy
import torch

from slipstream.checkpoint.manifest import shorten_repr as _shown
from slipstream.checkpoint.tensor_bytes import (
    BYTE_VIEWED_DTYPES,
    TORCH_DTYPES,
    FileContent,
    LoadedTensorFile,
    dtype_name,
    load_tensors,
    unpack_bytes,
)
from slipstream.errors import CheckpointError
from slipstream.files import strict_json
from slipstream.files.safetensors_layout import SafetensorsLayout

__all__ = ["read_file", "read_part", "rebuild"]

_TREE: Final = "tree"
"""The key in the metadata of a safetensors file under which `serialize` stores the tree."""
_DEEPEST: Final = 200
_DEEPEST_JSON: Final = 256
"""Nesting of the JSON: one level of a value takes up to three."""
_FLOATS: Final = frozenset({"nan", "inf", "-inf"})
_FACTORIES: Final[Mapping[str | None, Any]] = MappingProxyType(
    {None: None, **{entry.__name__: entry for entry in (int, float, str, bool, bytes, list, dict, set, tuple)}}
)
_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {dtype_name(entry): entry for entry in (*TORCH_DTYPES.values(), *BYTE_VIEWED_DTYPES.values())}
)
_NUMPY_DTYPE: Final = re.compile(r"[<>|=][biufcSUmM][0-9]{1,6}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?", re.ASCII)
_LARGEST_CHARACTER: Final = 0x10FFFF
_MANY: Final = 1000

_Maker = Callable[["_Rebuilder", Any, int], Any]


def rebuild(tree: Any, tensors: Mapping[str, torch.Tensor], where: str, device: torch.device | None = None) -> Any:
    """Return the value that `flatten` split into this tree and these tensors; `where` names the file in messages.

    Tensors are not copied, except to a device, if one is given; arrays stay on the host.

    >>> rebuild({"step": 3, "betas": {"$tuple": [0.9, 0.999]}, "mean": {"$tensor": "mean"}}, {"mean": torch.zeros(2)}, "state.safetensors")
    {'step': 3, 'betas': (0.9, 0.999), 'mean': tensor([0., 0.])}
    >>> rebuild({"$tensor": "mean"}, {}, "state.safetensors")
    Traceback (most recent call last):
    slipstream.errors.CheckpointError: state.safetensors refers to a tensor 'mean' that is not in it; it ...
    """
    return _Rebuilder(tensors, where, device).value(tree, 0)


def read_part(name: str, content: FileContent, where: str | None = None, elsewhere: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Return the state in a file of `serialize.write_part`; each tensor owns its memory. Messages name `where`, or the file.

    `elsewhere` are tensors of the state that are not in the file.
    """
    where, elsewhere = where or name, elsewhere or {}
    if name.endswith(".json"):
        assert not isinstance(content, LoadedTensorFile)
        return rebuild(strict_json.parse(memoryview(content), where, deepest=_DEEPEST_JSON), elsewhere, where)
    file = load_tensors(content, where)
    if twice := file.tensors.keys() & elsewhere.keys():
        raise CheckpointError(f"{where}: the tensor {min(twice)[:100]!r} is in this file and in shards.")
    if _TREE not in file.layout.metadata:
        raise CheckpointError(f"{where} has tensors but no state: there is no {_TREE!r} in its metadata. It was not written by slipstream.")
    return _rebuild_with(file.layout, {**file.tensors, **elsewhere}, where)


def read_file(content: FileContent, where: str, device: torch.device | None = None) -> Any:
    """Return the state in a safetensors file, or its tensors by name if it has none; on a device, if given."""
    file = load_tensors(content, where)
    if _TREE in file.layout.metadata:
        return _rebuild_with(file.layout, file.tensors, where, device)
    return file.tensors if device is None else {name: tensor.to(device) for name, tensor in file.tensors.items()}


def _rebuild_with(
    layout: SafetensorsLayout, tensors: Mapping[str, torch.Tensor], where: str, device: torch.device | None = None
) -> Any:
    beside = layout.size - layout.data_start
    return rebuild(strict_json.parse(layout.metadata[_TREE], where, deepest=_DEEPEST_JSON, beside=beside), tensors, where, device)


class _Rebuilder:
    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str, device: torch.device | None) -> None:
        self._tensors = tensors
        self._where = where
        self._device = device
        self._moved: dict[Any, torch.Tensor] = {}
        self._made: dict[Any, Any] = {}

    def value(self, node: Any, depth: int) -> Any:
        kind = type(node)
        if kind is list:
            return self.items(node, depth)
        if kind is not dict:
            if kind in (str, int, float, bool) or node is None:
                return node
            raise self._wrong(f"{kind.__name__} is not allowed in a tree")
        if depth > _DEEPEST:
            raise self._wrong("it is nested too deep")
        tags = [key for key in node if key.startswith("$")]
        if not tags:
            return {key: self.value(item, depth + 1) for key, item in node.items()}
        make = _MAKERS.get(tags[0])
        allowed = _BESIDE.get(tags[0], frozenset())
        if make is None or len(tags) > 1 or not set(node) - set(tags) <= allowed:
            raise self._wrong(f"it has an object with the keys {', '.join(map(_shown, node))}, which is not a known kind of value")
        try:
            return make(self, node, depth + 1)
        except (TypeError, ValueError, LookupError, OverflowError, RuntimeError) as error:  # binascii.Error is a ValueError
            if isinstance(error, CheckpointError):
                raise
            raise self._wrong(f"{tags[0]} is malformed: {str(error)[:200]}") from None

    def _wrong(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._where} cannot be read: {why}. It was changed after it was written, or not written by slipstream.")

    def items(self, node: Any, depth: int) -> list[Any]:
        if type(node) is not list:
            raise ValueError(f"a list is expected, not {_shown(node)}")
        if depth > _DEEPEST:
            raise self._wrong("it is nested too deep")
        return [self.value(item, depth + 1) for item in node]

    def pairs(self, node: Any, depth: int) -> list[tuple[Any, Any]]:
        if type(node) is not list or not all(type(pair) is list and len(pair) == 2 for pair in node):
            raise ValueError("a list of pairs is expected")
        pairs = [(self.value(key, depth + 1), self.value(item, depth + 1)) for key, item in node]
        _check_hashes([key for key, _ in pairs])
        if any(isinstance(key, torch.Tensor) for key, _ in pairs) or len(dict(pairs)) != len(pairs):
            raise ValueError("a key is a tensor or occurs twice")
        return pairs

    def to_ordered(self, node: Any, depth: int) -> Any:
        made = OrderedDict(self.pairs(node["$ordered"], depth))
        if "metadata" in node:
            made._metadata = self.value(node["metadata"], depth)  # type: ignore[attr-defined]
        return made

    def to_default(self, node: Any, depth: int) -> Any:
        factory, pairs = node["$defaultdict"]
        if factory is not None and type(factory) is not str or factory not in _FACTORIES:
            raise ValueError(f"{_shown(factory)} is not a known factory")
        return defaultdict(_FACTORIES[factory], self.pairs(pairs, depth))

    def to_deque(self, node: Any, depth: int) -> Any:
        longest, items = node["$deque"]
        if longest is not None and type(longest) is not int or (longest is not None and len(items) > longest):
            raise ValueError(f"{_shown(longest)} is not a valid maxlen")
        return deque(self.items(items, depth), longest)

    def to_set(self, node: Any, depth: int) -> Any:
        name = "$set" if "$set" in node else "$frozenset"
        items = self.items(node[name], depth)
        _check_hashes(items)
        made = set(items) if name == "$set" else frozenset(items)
        if len(made) != len(items) or any(isinstance(item, torch.Tensor) for item in items):
            raise ValueError("an element is a tensor or occurs twice")
        return made

    def to_integer(self, node: Any, depth: int) -> Any:
        text = node["$int"]
        if type(text) is not str or hex(made := int(text, 16)) != text:
            raise ValueError("it is not a hexadecimal integer")
        return made

    def to_float(self, node: Any, depth: int) -> Any:
        if node["$float"] not in _FLOATS:
            raise ValueError(f"{_shown(node['$float'])} is not nan, inf or -inf")
        return float(node["$float"])

    def to_complex(self, node: Any, depth: int) -> Any:
        real, imaginary = self.items(node["$complex"], depth)
        if type(real) is not float or type(imaginary) is not float:
            raise ValueError("two floats are expected")
        return complex(real, imaginary)

    def to_dtype(self, node: Any, depth: int) -> Any:
        if type(node["$dtype"]) is not str or node["$dtype"] not in _DTYPES:
            raise ValueError(f"{_shown(node['$dtype'])} is not a dtype")
        return _DTYPES[node["$dtype"]]

    def to_device(self, node: Any, depth: int) -> Any:
        if type(node["$device"]) is not str:
            raise ValueError(f"{_shown(node['$device'])} is not a device")
        try:
            return torch.device(node["$device"])
        except RuntimeError:  # a device from outside of torch, or none at all
            raise CheckpointError(
                f"{self._where} holds torch.device({_shown(node['$device'])}), which this torch does not know. If a package adds it to "
                "torch, import that first; or store the name of the device, str(device), in the state."
            ) from None

    def _tensor_named(self, name: Any) -> torch.Tensor:
        found = self._tensors.get(name) if type(name) is str else None
        if found is None:
            raise CheckpointError(
                f"{self._where} refers to a tensor {_shown(name)} that is not in it; it was changed after it was written, or is incomplete."
            )
        return found

    def to_tensor(self, node: Any, depth: int) -> Any:
        """Return the tensor, converted if needed; equal references get the same object."""
        stored = self._tensor_named(node["$tensor"])
        identity = repr(sorted(node.items()))
        if identity not in self._made:
            self._made[identity] = self._tensor_as(node, stored)
        return self._made[identity]

    def _tensor_as(self, node: Any, stored: torch.Tensor) -> torch.Tensor:
        if ("dtype" in node) is not ("shape" in node):
            raise ValueError("a dtype without a shape")
        made = unpack_bytes(stored, str(node["dtype"]), _sizes(node["shape"])) if "dtype" in node else stored
        if self._device is not None:
            key = (node["$tensor"], repr(node.get("dtype")), repr(node.get("shape")))
            if key not in self._moved:
                self._moved[key] = made.to(self._device)
            made = self._moved[key]  # references to one tensor share its memory there too
        parameter, wants_grad = node.get("parameter"), node.get("requires_grad", False)
        if type(wants_grad) is not bool or (parameter is not None and (type(parameter) is not bool or wants_grad)):
            raise ValueError("parameter and requires_grad must be booleans, and not both given")
        if parameter is not None:
            return torch.nn.Parameter(made.detach(), requires_grad=parameter)
        return made.detach().requires_grad_() if wants_grad else made

    def to_array(self, node: Any, depth: int) -> Any:
        stored = self._tensor_named(node["$array"])
        identity = repr(sorted(node.items()))
        if identity not in self._made:
            dtype, shape = _numpy_dtype(node["dtype"]), _sizes(node["shape"])
            if stored.dtype is not torch.uint8 or stored.dim() != 1 or math.prod(shape) * dtype.itemsize != stored.numel():
                raise ValueError(f"{stored.numel()} bytes are not an array of {dtype} with shape {shape}")
            self._made[identity] = _array(stored, dtype, shape)
        return self._made[identity]

    def to_numbers(self, node: Any, depth: int) -> Any:
        stored = self._tensor_named(node["$numbers"])
        if stored.dim() != 1 or stored.dtype not in (torch.int64, torch.float64):
            raise ValueError(f"{stored.dtype} with {stored.dim()} dimensions is not a list of numbers")
        return stored.tolist()

    def to_scalar(self, node: Any, depth: int) -> Any:
        name, held = self.items(node["$scalar"], depth)
        dtype = _numpy_dtype(name)
        if type(held) is bytes:
            if len(held) != dtype.itemsize:
                raise ValueError(f"{len(held)} bytes are not a {dtype}")
            return numpy.frombuffer(held, dtype=dtype)[0] if held else dtype.type()
        if type(held) not in _HELD.get(dtype.kind, ()):
            raise ValueError(f"{_shown(held)} is not a {dtype}")
        if dtype.kind in "iu" and not numpy.iinfo(dtype).min <= held <= numpy.iinfo(dtype).max:  # numpy 1 takes it, wrapped around
            raise ValueError(f"{_shown(held)} is not a {dtype}")
        return dtype.type(held)


_HELD: Final[Mapping[str, tuple[type, ...]]] = MappingProxyType({"b": (bool,), "i": (int,), "u": (int,), "f": (float,), "U": (str,)})

_MAKERS: Final[Mapping[str, _Maker]] = MappingProxyType(
    {
        "$array": _Rebuilder.to_array,
        "$bytearray": lambda walk, node, depth: bytearray(_from_base64(node["$bytearray"])),
        "$bytes": lambda walk, node, depth: _from_base64(node["$bytes"]),
        "$complex": _Rebuilder.to_complex,
        "$counter": lambda walk, node, depth: Counter(dict(walk.pairs(node["$counter"], depth))),
        "$defaultdict": _Rebuilder.to_default,
        "$deque": _Rebuilder.to_deque,
        "$device": _Rebuilder.to_device,
        "$dict": lambda walk, node, depth: dict(walk.pairs(node["$dict"], depth)),
        "$dtype": _Rebuilder.to_dtype,
        "$float": _Rebuilder.to_float,
        "$frozenset": _Rebuilder.to_set,
        "$int": _Rebuilder.to_integer,
        "$numbers": _Rebuilder.to_numbers,
        "$ordered": _Rebuilder.to_ordered,
        "$scalar": _Rebuilder.to_scalar,
        "$set": _Rebuilder.to_set,
        "$size": lambda walk, node, depth: torch.Size(_sizes(node["$size"])),
        "$str": lambda walk, node, depth: _from_base64(node["$str"]).decode("utf-8", "surrogatepass"),
        "$tensor": _Rebuilder.to_tensor,
        "$tuple": lambda walk, node, depth: tuple(walk.items(node["$tuple"], depth)),
    }
)
_BESIDE: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "$tensor": frozenset({"dtype", "shape", "parameter", "requires_grad"}),
        "$array": frozenset({"dtype", "shape"}),
        "$ordered": frozenset({"metadata"}),
    }
)
"""Keys that may accompany a tag."""


def _check_hashes(keys: list[Any]) -> None:
    """Raise for keys that were chosen to collide, which makes building a dict take forever; a few collide by chance."""
    if len(keys) > _MANY and len(keys) - len({hash(key) for key in keys}) > _MANY:
        raise ValueError("its keys were chosen to collide")


def _sizes(node: Any) -> tuple[int, ...]:
    if type(node) is not list or len(node) > 64 or not all(type(size) is int and 0 <= size < 2**62 for size in node):
        raise ValueError(f"{_shown(node)} is not a shape")
    return tuple(node)


def _from_base64(text: Any) -> bytes:
    if type(text) is not str:
        raise ValueError(f"{_shown(text)} is not a string")
    return base64.b64decode(text, validate=True)


def _numpy_dtype(name: Any) -> numpy.dtype[Any]:
    if type(name) is not str or not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"{_shown(name)} is not a dtype")
    return numpy.dtype(name)


def _array(stored: torch.Tensor, dtype: numpy.dtype[Any], shape: tuple[int, ...]) -> Any:
    if not stored.numel():
        return numpy.ndarray(shape, dtype=dtype)
    flat = stored.clone().numpy()
    if dtype.kind == "U" and int(flat.view(f"{dtype.str[0]}u4").max()) > _LARGEST_CHARACTER:
        raise ValueError("it has invalid characters")
    return flat.view(dtype).reshape(shape)
