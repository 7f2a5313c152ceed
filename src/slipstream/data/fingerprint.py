"""A digest of data that is equal on two ranks exactly if they read the same: to notice a stream that shares itself out.

Plain data goes through the codec. Foreign objects count by what they hold (an array, their attributes), and at the very end by
their text without memory addresses, which differ between processes. Nothing is pickled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import numpy
import torch

from slipstream.comm import codec, tree

__all__ = ["fingerprint"]

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_DEEPEST = 12


def fingerprint(items: Iterable[Any]) -> bytes:
    """Sixteen bytes for these items, in this order.

    >>> fingerprint([{"a": 1}, "x"]) == fingerprint([{"a": 1}, "x"]), fingerprint([1, 2]) == fingerprint([2, 1])
    (True, False)
    """
    digest = blake2b(digest_size=16)
    for item in items:
        data = codec.encode(_plain(item, 0), plain_only=True)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def _plain(value: Any, depth: int) -> Any:
    """Data that the codec takes, different for different values as far as that can be told."""
    if depth > _DEEPEST:
        return _text(value)
    if type(value) in (str, int, float, bool, bytes, complex, type(None)):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value if value.dtype.kind in "biufcSUmM" and type(value).__module__ == "numpy" else _plain(value.tolist(), depth + 1)
    if isinstance(value, Mapping):
        return [(_plain(key, depth + 1), _plain(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(codec.encode(_plain(item, depth + 1), plain_only=True) for item in value)
    if isinstance(value, (list, tuple)) or tree.is_node(value):
        return [_plain(item, depth + 1) for _, item in tree.children(value)]
    return _foreign(value, depth)


def _tensor(value: torch.Tensor) -> Any:
    value = value.detach()
    if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        return _text(value)
    return value.as_subclass(torch.Tensor)


def _foreign(value: Any, depth: int) -> Any:
    kind = type(value).__qualname__
    if hasattr(value, "__array_interface__"):  # images
        return kind, numpy.asarray(value)
    held = getattr(value, "__dict__", None)
    if held:
        return kind, _plain(dict(held), depth + 1)
    return kind, _text(value)


def _text(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))
