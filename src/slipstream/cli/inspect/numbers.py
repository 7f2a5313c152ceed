"""Two tensors compared piece by piece: how many elements are not the same bits, and how far apart the farthest two are.

Nothing is converted that need not be: pieces with equal bytes cost one comparison. Types that numpy does not know are taken apart here
(bfloat16) or compared by their bits alone (eight-bit floats).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy

from slipstream.files.tensors import ITEM_SIZE

__all__ = ["Difference", "compare"]

_Array = numpy.ndarray[Any, Any]

_PLAIN: Final[Mapping[str, str]] = MappingProxyType(
    {"F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
    | {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "u1"}
)


@dataclass(frozen=True)
class Difference:
    """How two tensors of one type and shape differ."""

    elements: int
    changed: int
    largest: float | None = None
    """The largest absolute difference; None where there is none to tell: equal tensors, or values that cannot be subtracted."""
    special: bool = False
    """Whether changed elements are NaN on a side."""

    @property
    def share(self) -> float:
        """The share of changed elements."""
        return self.changed / self.elements if self.elements else 0.0


def compare(dtype: str, one: Iterable[bytes], other: Iterable[bytes]) -> Difference:
    """The difference of two tensors given as pieces of the same lengths.

    >>> compare("F32", [numpy.float32([1, 2, 3]).tobytes()], [numpy.float32([1, 2, 5]).tobytes()])
    Difference(elements=3, changed=1, largest=2.0, special=False)
    """
    width = ITEM_SIZE[dtype]
    distance = _DISTANCES.get(dtype, _floats if dtype in _PLAIN else None)
    elements = changed = 0
    largest: float | None = None
    special = False
    for left, right in zip(one, other, strict=True):
        if len(left) != len(right):
            raise ValueError(f"pieces of {len(left)} and {len(right)} bytes cannot be compared")
        elements += len(left) // width
        if left == right:
            continue
        places = _changed(left, right, width)
        changed += int(places.size)
        if distance is None:
            continue
        apart = distance(_elements(dtype, left)[places], _elements(dtype, right)[places])
        known = apart[~numpy.isnan(apart)]
        special = special or known.size < apart.size
        if known.size:
            largest = max(largest if largest is not None else -math.inf, float(known.max()))
    return Difference(elements, changed, largest, special)


def _changed(left: bytes, right: bytes, width: int) -> _Array:
    """The places of elements whose bits differ."""
    kind = f"<u{width}"
    return numpy.flatnonzero(numpy.frombuffer(left, kind) != numpy.frombuffer(right, kind))


def _elements(dtype: str, data: bytes) -> _Array:
    if dtype == "BF16":
        return (numpy.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return numpy.frombuffer(data, _PLAIN[dtype])


def _floats(left: _Array, right: _Array) -> _Array:
    wide: Any = numpy.complex128 if left.dtype.kind == "c" else numpy.float64
    with numpy.errstate(all="ignore"):
        apart: _Array = numpy.abs(left.astype(wide) - right.astype(wide))
    return apart


def _integers(left: _Array, right: _Array) -> _Array:
    """Exact also where a difference does not fit into the type: it always fits into 64 bits without a sign."""
    low, high = numpy.minimum(left, right), numpy.maximum(left, right)
    apart: _Array = (high.astype("<u8") - low.astype("<u8")).astype(numpy.float64)
    return apart


_DISTANCES: Final[Mapping[str, Callable[[_Array, _Array], _Array]]] = MappingProxyType(
    {name: _integers for name in ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")} | {"BF16": _floats}
)
