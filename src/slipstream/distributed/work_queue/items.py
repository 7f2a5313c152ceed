"""The items of a work queue, their fingerprint, the order in which they are handed out, and how many at a time.

Items are read by position, when a process has claimed them; an iterable without positions is first collected into a list. The fingerprint
covers plain data in memory, and of a dataset its type and length. With costs (`key=len`) the most expensive items come first, so that no
long item is started last and neighbours need little padding. A unit is one item or one batch; a claim is the number of units that one
request takes, worth about ten milliseconds of work and shrinking to single units towards the end.

Nothing here communicates.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from slipstream.devices.table import CPU
from slipstream.distributed.pytree import is_namedtuple
from slipstream.distributed.split import is_array, is_instance_of, is_record, record_columns, split
from slipstream.errors import ConfigError
from slipstream.files.checksum import Digest

__all__ = ["ClaimSize", "WorkItems", "WorkUnits", "check_cost", "find_least_padding", "fingerprint", "order_by_cost"]


_FINGERPRINT_BLOCK = 4096
_MAX_DEPTH = 100


class WorkItems:
    """Some inputs as numbered items.

    >>> items = WorkItems({"id": [1, 2], "text": ["a", "b"]})
    >>> len(items), items[1], items.several([0, 1])[0]
    (2, {'id': 2, 'text': 'b'}, {'id': 1, 'text': 'a'})
    >>> list(WorkItems(number * 2 for number in range(3)))
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
        self._row = _make_reader(inputs)
        self._rows: Callable[[list[int]], Sequence[Any]] | None = getattr(inputs, "__getitems__", None)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> Any:
        if position >= self._count:
            raise IndexError(position)
        return self._row(position)

    def several(self, positions: Sequence[int]) -> list[Any]:
        """Return the items at these positions, in one request if the dataset supports that."""
        if self._rows is not None:
            return list(self._rows(list(positions)))
        return [self._row(position) for position in positions]

    @property
    def in_memory(self) -> bool:
        """Whether the items lie in memory, so that all of them can be looked at."""
        columns = record_columns(self.inputs).values() if is_record(self.inputs) else [self.inputs]
        return all(isinstance(column, list | tuple | range) or is_array(column) for column in columns)

    def fingerprint(self) -> str:
        """Return a digest that is the same on every process with the same inputs."""
        digest = Digest()
        digest.update(f"{type(self.inputs).__name__} {self._count}".encode())
        if self.in_memory:
            for column in record_columns(self.inputs).values() if is_record(self.inputs) else [self.inputs]:
                _feed_column(digest, column)
        return digest.hexdigest()


def fingerprint(item: Any) -> str | None:
    """Return a short fingerprint of a plain item; None for an item that is not plain.

    >>> fingerprint("a") == fingerprint("a"), fingerprint("a") == fingerprint("b"), fingerprint(object())
    (True, False, None)
    """
    digest = Digest()
    return digest.hexdigest()[:16] if _feed(digest, item) else None


# How items are read ------------------------------------------------------------------------------------------------------


def _make_reader(inputs: Any) -> Callable[[int], Any]:
    if isinstance(inputs, Mapping):
        columns = {key: _make_reader(column) for key, column in inputs.items()}
        return lambda position: {key: read(position) for key, read in columns.items()}
    if is_namedtuple(inputs):
        readers = [_make_reader(column) for column in inputs]
        return lambda position: type(inputs)._make(read(position) for read in readers)
    if hasattr(inputs, "iloc"):
        return lambda position: inputs.iloc[position]
    return lambda position: inputs[position]


# Fingerprints ------------------------------------------------------------------------------------------------------------


def _feed_column(digest: Digest, column: Any) -> None:
    if isinstance(column, range) or is_array(column):
        _feed(digest, column)
        return
    for start in range(0, len(column), _FINGERPRINT_BLOCK):
        block = column[start : start + _FINGERPRINT_BLOCK]
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
    """Add a value to the digest; return whether all of it is plain. Other values, and those nested too deeply, count by their type."""
    kind = type(value)
    digest.update(kind.__qualname__.encode())
    if depth > _MAX_DEPTH:
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
    elif is_array(value):
        return _feed_array(digest, value)
    else:
        return False
    return True


def _feed_array(digest: Digest, value: Any) -> bool:
    digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
    if is_instance_of(value, "torch", "Tensor"):
        torch = sys.modules["torch"]
        if value.device.type != CPU.type or value.layout is not torch.strided or value.is_quantized:
            return False
        value = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    elif value.dtype.hasobject:
        return False
    digest.update(value.tobytes() if value.nbytes < 1 << 16 else memoryview(sys.modules["numpy"].ascontiguousarray(value)).cast("B"))
    return True


def check_cost(value: Any, position: int) -> float:
    """Return the number that `key` gave for an item; raise an error that names the item if it is none.

    >>> check_cost(3, 0)
    3.0
    """
    try:
        cost = float(value)
    except (TypeError, ValueError):
        cost = math.nan
    if isinstance(value, str | bytes) or not math.isfinite(cost):
        raise ConfigError(
            f"key gave {value!r} for item {position}, which is no finite number: a key says what an item costs, for example "
            "key=len, or key=lambda row: len(row['text'])"
        )
    return cost


def order_by_cost(costs: Sequence[float]) -> list[int]:
    """Return the positions by falling cost; equal ones in order.

    >>> order_by_cost([1.0, 5.0, 5.0, 2.0])
    [1, 2, 3, 0]
    """
    return sorted(range(len(costs)), key=lambda position: -costs[position])


def find_least_padding(costs: Sequence[float], size: int) -> int:
    """Return which unit should be the short one, if these falling costs are cut into units of `size` that are padded to their first.

    >>> find_least_padding([9.0, 5.0, 5.0], 2), find_least_padding([2.0, 2.0, 1.0, 1.0], 3)
    (0, 1)
    """
    count, missing = -(-len(costs) // size), -len(costs) % size
    if not missing:
        return 0
    behind = sum(size * costs[number * size - missing] for number in range(1, count))
    best, least, before = 0, math.inf, 0.0
    for number in range(count):
        padded = before + (size - missing) * costs[number * size] + behind
        if padded < least:
            best, least = number, padded
        before += size * costs[number * size]
        behind -= size * costs[(number + 1) * size - missing] if number + 1 < count else 0
    return best


class WorkUnits(Sequence[Sequence[int]]):
    """The positions of the input in the order of handing out, cut into units of so many.

    >>> units = WorkUnits([4, 2, 0, 1, 3], 2)
    >>> list(units), units.items
    ([[4, 2], [0, 1], [3]], 5)
    >>> WorkUnits(range(4), 3, without={1}).order
    [0, 2, 3]
    >>> list(WorkUnits([4, 2, 0, 1, 3], 2, costs=[7.0, 7.0, 8.0, 6.0, 20.0]))
    [[4], [2, 0], [1, 3]]
    """

    def __init__(
        self, order: Sequence[int], size: int = 1, without: Collection[int] = (), *, costs: Sequence[float] | None = None
    ) -> None:
        self.order: Sequence[int] = [position for position in order if position not in without] if without else order
        self.size = size
        self._missing = -len(self.order) % size
        self._short = len(self) - 1 if costs is None else find_least_padding([costs[position] for position in self.order], size)

    @property
    def items(self) -> int:
        """How many items all units have together."""
        return len(self.order)

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __getitem__(self, number: Any) -> Any:
        start = number * self.size - (self._missing if number > self._short else 0)
        found = self.order[start : start + self.size - (self._missing if number == self._short else 0)]
        if not found:
            raise IndexError(number)
        return found


class ClaimSize:
    """How many units a process takes at a time.

    >>> pace = ClaimSize(world_size=2)
    >>> pace.wanted(left=1000, elapsed=0.0)
    1
    >>> pace.took(units=1, seconds=0.001)
    >>> [pace.wanted(left, elapsed=0.1) for left in (1000, 16, 3)]
    [10, 4, 1]
    """

    LEAST = 0.01
    """Seconds of work that a request should bring: some hundred times what it costs itself."""
    MOST = 1.0
    TIMES = 50
    """How much more work than the request itself takes."""
    SHARE = 1 / 100
    """Of the time that has passed, what a claim may be worth in long runs; so much may be lost at the end."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._seconds = math.inf
        """A moving average of the seconds per unit."""
        self._request = 0.0
        """A moving average of the seconds per request."""

    def took(self, units: int, seconds: float) -> None:
        """Record how long some units took."""
        now = seconds / max(1, units)
        self._seconds = now if math.isinf(self._seconds) else (self._seconds + now) / 2

    def waited(self, seconds: float) -> None:
        """Record how long a request took."""
        self._request = (3 * self._request + seconds) / 4

    def wanted(self, left: int, elapsed: float) -> int:
        """Return how many units to claim, given how many are left for all processes and how many seconds have passed."""
        worth = min(self.MOST, max(self.LEAST, elapsed * self.SHARE, self.TIMES * self._request))
        fair = left // (2 * self._world_size)
        return max(1, min(fair, int(worth / max(self._seconds, 1e-9))))
