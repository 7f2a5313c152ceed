"""Plain data to bytes and back, without pickle.

Text, numbers, bytes, None, lists, tuples, dicts (any plain keys), sets, arrays and tensors travel as JSON plus one area of raw
bytes; decoding them runs no code. What is exactly JSON already takes the short way. Only objects of foreign classes are
pickled, one by one, where they stand: there the bytes of another process of the same job are trusted, as they are by
`torch.distributed`. `plain_only=True` refuses them instead.

Layout: one byte of kind (`J` plain JSON, `T` tagged JSON), eight bytes of length, the JSON, the raw area.
"""

from __future__ import annotations

import json
import math
import pickle  # noqa: TID251 - only for objects of foreign classes, see above
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

import numpy
import torch

from slipstream.comm.tensor_memory import copied

__all__ = ["decode", "encode"]

_TAG = "\0"
"""The key that marks an escaped value; a dict of the user's that has this key is escaped itself."""
_BIG = 1 << 64
_ATOMS = frozenset({str, float, bool, type(None)})
_JSON_TYPES = _ATOMS | {int, list, dict}
_TEXT = frozenset({str})
_DEEPEST = 64
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(value: Any, *, plain_only: bool = False) -> bytes:
    """Bytes from which `decode` makes an equal value.

    >>> decode(encode([{"text": "a", 1: (2.5, b"x")}, None]))
    [{'text': 'a', 1: (2.5, b'x')}, None]
    """
    if _is_json(value):
        return b"J" + _to_json(value).encode()
    raw: list[bytes] = []
    text = _to_json(_Encoder(raw, plain_only).convert(value)).encode()
    return b"".join([b"T", len(text).to_bytes(8, "little"), text, *raw])


def decode(data: Any) -> Any:
    """The value that was encoded, from bytes or an array of them. Raises ValueError for bytes that `encode` did not write."""
    view = memoryview(data)
    kind = bytes(view[:1])
    if kind == b"J":
        return json.loads(bytes(view[1:]).decode())
    if kind != b"T":
        raise ValueError(f"these bytes begin with {kind!r}: not written by this codec")
    end = 9 + int.from_bytes(view[1:9], "little")
    return _Decoder(view[end:]).restore(json.loads(bytes(view[9:end]).decode()))


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
    return False


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
        if kind is torch.Tensor and value.layout is torch.strided and not (value.is_quantized or value.is_meta or value.is_nested):
            return {_TAG: "tensor", **self._tensor(value)}
        if isinstance(value, (numpy.ndarray, numpy.generic)) and kind.__module__ == "numpy" and value.dtype.kind in "biufcSUmM":
            data = self._store(numpy.ascontiguousarray(value).tobytes())
            return {
                _TAG: "array",
                "dtype": value.dtype.str,
                "shape": list(value.shape),
                "scalar": isinstance(value, numpy.generic),
                "at": data,
            }
        if self._plain_only:
            raise TypeError(
                f"a {kind.__module__}.{kind.__qualname__} is not plain data: pass text, numbers, bytes, arrays or containers of them"
            )
        return {_TAG: "foreign", "at": self._store(pickle.dumps(value))}

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
        if flat.numel() == 1:  # one element may have any stride and still count as contiguous, but cannot be viewed as bytes then
            flat = flat.as_strided((1,), (1,))
        data = self._store(flat.view(torch.uint8).numpy().tobytes())
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "at": data}


class _Decoder:
    def __init__(self, raw: memoryview) -> None:
        self._raw = raw

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
        make = self._MAKERS.get(value[_TAG])
        if make is None:
            raise ValueError(f"{value[_TAG]!r} is not a kind of value that this codec writes")
        return make(self, value)

    def _make_dict(self, node: dict[str, Any]) -> Any:
        return {self.restore(key): self.restore(item) for key, item in node["v"]}

    def _make_tuple(self, node: dict[str, Any]) -> Any:
        return tuple(self.restore(item) for item in node["v"])

    def _make_set(self, node: dict[str, Any]) -> Any:
        return {self.restore(item) for item in node["v"]}

    def _make_frozenset(self, node: dict[str, Any]) -> Any:
        return frozenset(self.restore(item) for item in node["v"])

    def _make_int(self, node: dict[str, Any]) -> Any:
        return int(node["v"], 16)

    def _make_complex(self, node: dict[str, Any]) -> Any:
        return complex(*node["v"])

    def _make_bytes(self, node: dict[str, Any]) -> Any:
        return bytes(self._bytes(node["at"]))

    def _make_bytearray(self, node: dict[str, Any]) -> Any:
        return bytearray(self._bytes(node["at"]))

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
        return copied(data, dtype, shape)

    def _make_foreign(self, node: dict[str, Any]) -> Any:
        return pickle.loads(self._bytes(node["at"]))

    _MAKERS: ClassVar[dict[str, Callable[[_Decoder, dict[str, Any]], Any]]] = {
        "dict": _make_dict,
        "tuple": _make_tuple,
        "set": _make_set,
        "frozenset": _make_frozenset,
        "int": _make_int,
        "complex": _make_complex,
        "bytes": _make_bytes,
        "bytearray": _make_bytearray,
        "array": _make_array,
        "tensor": _make_tensor,
        "foreign": _make_foreign,
    }
