"""The inputs of dynamic work: items by position, read when they are asked for, and a fingerprint of what they are.

* A list, tuple, range, tensor, array, data frame or dataset gives its items (rows) by position; a mapping or named tuple of columns
  gives rows of the same type. Nothing is read before a process has claimed it.
* An iterable without positions (a generator) is first collected into a list, on every process.
* The fingerprint covers what lies in memory as plain data (text, numbers, bytes, tensors and arrays on the host, containers of them).
  Of a dataset it covers the type and the length, because reading all of it is what dynamic work avoids.

Objects that are not plain count by their type alone: their attributes may hold addresses and times, which differ between processes.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slipstream.comm.tree import is_namedtuple
from slipstream.devices.table import CPU
from slipstream.files.digest import Digest
from slipstream.runtime.split import split

__all__ = ["Items", "fingerprint"]

_BLOCK = 4096
_DEEPEST = 100


class Items:
    """Some inputs as numbered items.

    >>> items = Items({"id": [1, 2], "text": ["a", "b"]})
    >>> len(items), items[1], items.several([0, 1])[0]
    (2, {'id': 2, 'text': 'b'}, {'id': 1, 'text': 'a'})
    >>> list(Items(number * 2 for number in range(3)))
    [0, 2, 4]
    """

    def __init__(self, inputs: Any, operation: str = "split_between_processes") -> None:
        try:
            part = split(inputs, 0, 1)  # refuses what has no order or no items, in the same words as the static split
        except (TypeError, ValueError) as error:
            if type(error) not in (TypeError, ValueError):  # one of a foreign class, which may not be made of a text
                raise
            raise type(error)(str(error).replace("split_between_processes", operation)) from None
        if part.dealt:
            inputs = list(inputs)
        self.inputs = inputs
        self._count = len(inputs) if part.dealt else part.total
        self._row = _reader(inputs)
        self._rows: Callable[[list[int]], Sequence[Any]] | None = getattr(inputs, "__getitems__", None)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> Any:
        if position >= self._count:
            raise IndexError(position)
        return self._row(position)

    def several(self, positions: Sequence[int]) -> list[Any]:
        """The items at these positions; in one request where the dataset can."""
        if self._rows is not None:
            return list(self._rows(list(positions)))
        return [self._row(position) for position in positions]

    @property
    def in_memory(self) -> bool:
        """Whether the items lie in memory, so that all of them can be looked at."""
        columns = _columns(self.inputs).values() if _is_record(self.inputs) else [self.inputs]
        return all(isinstance(column, list | tuple | range) or _is_array(column) for column in columns)

    def fingerprint(self) -> str:
        """The same on every process that has the same inputs; another for inputs that differ in what it covers."""
        digest = Digest()
        digest.update(f"{type(self.inputs).__name__} {self._count}".encode())
        if self.in_memory:
            for column in _columns(self.inputs).values() if _is_record(self.inputs) else [self.inputs]:
                _feed_column(digest, column)
        return digest.hexdigest()


def fingerprint(item: Any) -> str | None:
    """A short fingerprint of a plain item; None for one that is not plain.

    >>> fingerprint("a") == fingerprint("a"), fingerprint("a") == fingerprint("b"), fingerprint(object())
    (True, False, None)
    """
    digest = Digest()
    return digest.hexdigest()[:16] if _feed(digest, item) else None


# How items are read ------------------------------------------------------------------------------------------------------


def _is_record(value: Any) -> bool:
    return isinstance(value, Mapping) or is_namedtuple(value)


def _columns(record: Any) -> dict[Any, Any]:
    return dict(record.items()) if isinstance(record, Mapping) else dict(zip(record._fields, record, strict=True))


def _reader(inputs: Any) -> Callable[[int], Any]:
    if isinstance(inputs, Mapping):
        columns = {key: _reader(column) for key, column in inputs.items()}
        return lambda position: {key: read(position) for key, read in columns.items()}
    if is_namedtuple(inputs):
        readers = [_reader(column) for column in inputs]
        return lambda position: type(inputs)._make(read(position) for read in readers)
    if hasattr(inputs, "iloc"):
        return lambda position: inputs.iloc[position]
    return lambda position: inputs[position]


# Fingerprints ------------------------------------------------------------------------------------------------------------


def _of(value: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _is_array(value: Any) -> bool:
    return _of(value, "torch", "Tensor") or _of(value, "numpy", "ndarray")


def _feed_column(digest: Digest, column: Any) -> None:
    if isinstance(column, range) or _is_array(column):
        _feed(digest, column)
        return
    for start in range(0, len(column), _BLOCK):
        block = column[start : start + _BLOCK]
        if set(map(type, block)) == {str}:
            _feed_texts(digest, block)
        else:
            for item in block:
                _feed(digest, item)


def _feed_texts(digest: Digest, texts: Iterable[str]) -> None:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    digest.update(b"texts" + struct.pack(f"<{len(encoded)}q", *map(len, encoded)))
    digest.update(b"".join(encoded))


def _feed(digest: Digest, value: Any, depth: int = 0) -> bool:
    """Takes a value in; whether all of it is plain. What is not, or lies deeper than `_DEEPEST` levels, counts by its type."""
    kind = type(value)
    digest.update(kind.__qualname__.encode())
    if depth > _DEEPEST:
        return False
    if kind is str:
        _feed_texts(digest, [value])
    elif kind in (int, float, bool, complex, range) or value is None:
        digest.update(repr(value).encode())
    elif kind in (bytes, bytearray):
        digest.update(struct.pack("<q", len(value)))
        digest.update(value)
    elif kind in (list, tuple) or is_namedtuple(value):
        digest.update(struct.pack("<q", len(value)))
        return all([_feed(digest, item, depth + 1) for item in value])
    elif isinstance(value, Mapping):
        digest.update(struct.pack("<q", len(value)))
        return all([_feed(digest, part, depth + 1) for key in sorted(value, key=repr) for part in (key, value[key])])
    elif _is_array(value):
        return _feed_array(digest, value)
    else:
        return False
    return True


def _feed_array(digest: Digest, value: Any) -> bool:
    digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
    if _of(value, "torch", "Tensor"):
        torch = sys.modules["torch"]
        if value.device.type != CPU.type or value.layout is not torch.strided or value.is_quantized:
            return False
        value = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif value.dtype.hasobject:
        return False
    digest.update(value.tobytes() if value.nbytes < 1 << 16 else memoryview(sys.modules["numpy"].ascontiguousarray(value)).cast("B"))
    return True
