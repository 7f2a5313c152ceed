"""The header of a safetensors file: which bytes belong to which tensor.

A file is the length of the header (8 bytes, little endian), the header (JSON: name -> dtype, shape, offsets counted from its end; texts
under `__metadata__`), and the data. `plan_layout` makes a header. `read_layout` reads one and trusts nothing: tensors that overlap, leave
holes, reach beyond the file, have a shape that does not fit their bytes or occur twice are refused before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from slipstream.errors import CheckpointError
from slipstream.files import strict_json

__all__ = ["ALIGNMENT", "ITEM_SIZE", "LARGEST_HEADER", "TensorEntry", "SafetensorsLayout", "file_order_key", "plan_layout", "read_layout"]

ITEM_SIZE: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element, by the name of its dtype in a header."""

LARGEST_HEADER: Final = 100_000_000
"""Most bytes of a header: the limit of the format."""

ALIGNMENT: Final = 64
"""The alignment of torch's own memory for tensors, in bytes."""

_PAGE: Final = 4096
"""Where the data of large files begins: kernels read rows of mapped weights about 10 % slower that cross the boundaries of pages."""
_LARGE: Final = 1 << 20
"""Bytes of data from which on a file can spare part of a page."""

_METADATA: Final = "__metadata__"
_MOST_DIMS: Final = 64
_LARGEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `start` and `end` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """All tensors of a file, in the order of their bytes; `data_start` is the position of offset 0, `size` that of the whole file."""

    entries: dict[str, TensorEntry]
    data_start: int
    size: int
    metadata: dict[str, str] = field(default_factory=dict)

    def span(self, entry: TensorEntry) -> tuple[int, int]:
        """Return where the bytes of a tensor begin and end in the file."""
        return self.data_start + entry.start, self.data_start + entry.end


def file_order_key(size: int, item_size: int) -> tuple[bool, int]:
    """Return a key to sort tensors by for a file: their bytes, and those of an element.

    Tensors whose sizes are multiples of 64 come first and begin at such multiples, so in a mapped file they are aligned as in torch's own
    memory; the others follow, larger elements first, each at a multiple of its element.

    >>> sorted([(4, 4), (64, 4), (16, 8), (128, 2)], key=lambda sizes: file_order_key(*sizes))
    [(64, 4), (128, 2), (16, 8), (4, 4)]
    """
    return (size % ALIGNMENT != 0, -item_size if size % ALIGNMENT else 0)


def plan_layout(
    items: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, SafetensorsLayout]:
    """Return the header (with its length) for tensors given as (name, dtype, shape), stored in the order given, and their layout.

    The data begins at a multiple of 64 bytes of the file, of 4096 from 1 MiB on. Between tensors the format allows no gap: `file_order_key`
    puts them into an order in which almost all begin at a multiple of 64 too.

    >>> header, layout = plan_layout([("weight", "F32", (2, 3)), ("bias", "F32", (2,))], {"format": "pt"})
    >>> layout.entries["bias"]
    TensorEntry(name='bias', dtype='F32', shape=(2,), start=24, end=32)
    >>> len(header) == layout.data_start, layout.size - layout.data_start
    (True, 32)
    """
    entries: dict[str, TensorEntry] = {}
    end = 0
    for name, dtype, shape in items:
        if name == _METADATA or name in entries:
            raise CheckpointError(f"A file of tensors cannot hold {'two tensors' if name in entries else 'a tensor'} of the name {name!r}.")
        if dtype not in ITEM_SIZE:
            raise CheckpointError(f"The tensor {name!r} has the type {dtype}, which a safetensors file cannot hold.")
        start, end = end, end + math.prod(shape) * ITEM_SIZE[dtype]
        entries[name] = TensorEntry(name, dtype, tuple(shape), start, end)
    content: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    for entry in entries.values():
        content[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [entry.start, entry.end]}
    text = strict_json.dump(content)
    text += b" " * (-(8 + len(text)) % (ALIGNMENT if end < _LARGE else _PAGE))
    if len(text) > LARGEST_HEADER:
        raise CheckpointError(
            f"The header of a file with {len(entries):,} tensors would have {len(text):,} bytes, more than the {LARGEST_HEADER:,} "
            "of the format; store them in several files."
        )
    if why := strict_json.explain_too_large(text.decode(), beside=end):
        raise CheckpointError(f"A file with {len(entries):,} tensors could not be read again: {why}; store them in several files.")
    header = len(text).to_bytes(8, "little") + text
    return header, SafetensorsLayout(entries, len(header), len(header) + end, dict(metadata or {}))


def read_layout(read: Callable[[int, int], bytes | bytearray | memoryview], size: int, where: str) -> SafetensorsLayout:
    """Return the layout of a file of `size` bytes; `read(offset, count)` returns bytes of it, `where` names it in errors.

    >>> header, layout = plan_layout([("weight", "F32", (2, 3))])
    >>> file = header + bytes(24)
    >>> read_layout(lambda offset, count: file[offset : offset + count], len(file), "model.safetensors") == layout
    True
    """
    if size < 8:
        raise _refusal(where, f"it has {size} bytes, and a header alone takes 8")
    length = int.from_bytes(bytes(read(0, 8)), "little")
    if length > min(LARGEST_HEADER, size - 8):
        raise _refusal(where, f"it says that its header has {length:,} bytes, in a file of {size:,}")
    text = read(8, length)
    if len(text) != length:
        raise _refusal(where, f"its header ends after {len(text):,} of {length:,} bytes")
    content = strict_json.parse(text, f"The header of {where}", largest=LARGEST_HEADER, deepest=4, beside=size - 8 - length)
    if not isinstance(content, dict):
        raise _refusal(where, "its header is not a mapping")
    metadata = _metadata(content.pop(_METADATA, {}), where)
    found = sorted((_entry(name, described, where) for name, described in content.items()), key=lambda entry: (entry.start, entry.end))
    _check_order(found, size - 8 - length, where)
    return SafetensorsLayout({entry.name: entry for entry in found}, 8 + length, size, metadata)


def _metadata(described: Any, where: str) -> dict[str, str]:
    if not isinstance(described, dict) or not all(isinstance(value, str) for value in described.values()):
        raise _refusal(where, f"its {_METADATA} is not a mapping of texts")
    return described


def _entry(name: str, described: Any, where: str) -> TensorEntry:
    shown = name if len(name) <= 100 else name[:97] + "..."
    if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
        raise _refusal(where, f"the tensor {shown!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise _refusal(where, f"the tensor {shown!r} has the type {str(dtype)[:40]!r}, which is not supported")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not all(map(_is_count, shape)):
        raise _refusal(where, f"the shape of the tensor {shown!r} is not a list of at most {_MOST_DIMS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)) or offsets[0] > offsets[1]:
        raise _refusal(where, f"the offsets of the tensor {shown!r} are not a beginning and an end")
    start, end = offsets
    if math.prod(shape) * ITEM_SIZE[dtype] != end - start:
        raise _refusal(where, f"the tensor {shown!r} has {end - start:,} bytes, which is not what the shape {shape} of {dtype} takes")
    if start == end and math.prod(filter(None, shape)) > _LARGEST // ITEM_SIZE[dtype]:  # a size of 0 hides the others from the check above
        raise _refusal(where, f"the shape of the tensor {shown!r} has sizes that are too large")
    return TensorEntry(name, dtype, tuple(shape), start, end)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _check_order(entries: list[TensorEntry], size: int, where: str) -> None:
    reached = 0
    for entry in entries:
        if entry.start != reached:
            how = "overlaps the one before it" if entry.start < reached else "leaves a hole before it"
            raise _refusal(where, f"the tensor {entry.name[:100]!r} {how}")
        reached = entry.end
    if reached != size:
        raise _refusal(where, f"its tensors end after {reached:,} bytes of data, and the file has {size:,}")


def _refusal(where: str, why: str) -> CheckpointError:
    return CheckpointError(f"{where} is not a safetensors file that can be trusted: {why}.")
