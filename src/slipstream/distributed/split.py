"""Which part of an input belongs to which process: the pure core of `split_between_processes(balance="static")`.

* **Slices.** Inputs with a length and positions (list, tuple, range, tensor, array, table, dataset, a mapping or named tuple of
  columns) are cut into one contiguous slice per rank. The first `length % world_size` ranks have one more item.
* **Strides.** A plain iterable has no length. Every rank iterates over its own copy and keeps item `i` when `i % world_size == rank`;
  nothing is read ahead.

Every item belongs to exactly one rank, counts differ by at most one, order is kept, and a part has the type of the whole. With
`apply_padding` the ranks that are one short repeat the last item, and `SplitPart` says how many trailing items that are. The argument is
not changed, and neither torch nor numpy is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from slipstream.distributed.pytree import copy_with_values, is_namedtuple
from slipstream.errors import StateError

__all__ = [
    "SplitPart", "SplitView", "StridedItems", "columns_of", "count_per_rank", "count_with_padding", "is_array", "is_instance_of",
    "restore_order", "split",
]


def split(inputs: Any, rank: int, world_size: int, apply_padding: bool = False) -> SplitPart:
    """Return the part of `inputs` that belongs to `rank`.

    >>> [split(["a", "b", "c"], rank, 2).value for rank in range(2)]
    [['a', 'b'], ['c']]
    >>> split(("a", "b", "c"), 1, 2, apply_padding=True).value
    ('c', 'c')
    >>> part = split((letter for letter in "abcde"), 1, 2)
    >>> list(part.value), part.real_count()
    (['b', 'd'], 2)
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks 0 to {world_size - 1}.")
    _refuse_unordered(inputs, "")
    if not _has_positions(inputs):
        return _split_strided(inputs, rank, world_size, apply_padding)
    total = _length(inputs, "")
    cut = _SlicePositions.of(total, rank, world_size, apply_padding)
    return SplitPart(_take(inputs, cut), rank, world_size, apply_padding, _ItemTotal(total))


def count_per_rank(total: int, world_size: int) -> list[int]:
    """Return how many of `total` items each rank gets, sliced or strided, without padding.

    >>> count_per_rank(10, 4)
    [3, 3, 2, 2]
    """
    each, extra = divmod(total, world_size)
    return [each + (rank < extra) for rank in range(world_size)]


def count_with_padding(total: int, world_size: int, apply_padding: bool = False) -> list[int]:
    """Return how many items each rank holds, padding included.

    >>> count_with_padding(10, 4, apply_padding=True), count_with_padding(0, 4, apply_padding=True)
    ([3, 3, 3, 3], [0, 0, 0, 0])
    """
    counts = count_per_rank(total, world_size)
    return [counts[0]] * world_size if apply_padding else counts


def restore_order(chunks: Sequence[Any], dealt: bool) -> Any:
    """Return the results of all ranks, one per item and without padding, in the order of the input.

    Chunks of sliced inputs follow each other; those of a strided iterable are interleaved. Tensors and arrays stay what they are.

    >>> restore_order([["a", "c", "e"], ["b", "d"]], dealt=True)
    ['a', 'b', 'c', 'd', 'e']
    """
    counts = [len(chunk) for chunk in chunks]
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    rows = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    order = [row for turn in zip_longest(*rows) for row in turn if row is not None] if dealt else list(range(sum(counts)))
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and all(isinstance(chunk, torch.Tensor) for chunk in chunks):
        return torch.cat(list(chunks))[order] if dealt else torch.cat(list(chunks))
    if numpy is not None and all(isinstance(chunk, numpy.ndarray) for chunk in chunks):
        return numpy.concatenate(chunks)[order] if dealt else numpy.concatenate(chunks)
    items = [item for chunk in chunks for item in chunk]
    return [items[row] for row in order]


@dataclass
class _ItemTotal:
    """The number of items of the whole input; unknown until a strided iterable is exhausted."""

    total: int | None = None


@dataclass(frozen=True)
class SplitPart:
    """The part of one rank, and what is needed to put the results of all ranks back together.

    >>> part = split(range(5), 1, 2, apply_padding=True)
    >>> part.value, part.indices, part.padding, part.real_count()
    ([3, 4, 4], [3, 4, 4], 1, 2)
    """

    value: Any
    """The rank's part; for a strided iterable, the lazy stream of its items."""
    rank: int
    world_size: int
    apply_padding: bool = False
    _tally: _ItemTotal = field(default_factory=_ItemTotal, repr=False)
    dealt: bool = False
    """Items were assigned in turn rather than sliced."""

    @property
    def used_up(self) -> bool:
        """Whether the counts are known: always for slices, and for a strided iterable once this rank has exhausted it."""
        return self._tally.total is not None

    @property
    def total(self) -> int:
        """The number of items of the whole input."""
        if self._tally.total is None:
            raise StateError(
                "The number of items is not known yet: an iterable without a length was split, and this process has not come to its end. "
                "Iterate over the whole part first, or pass a list to split_between_processes."
            )
        return self._tally.total

    def real_counts(self) -> list[int]:
        """Return how many items each rank got, without padding."""
        return count_per_rank(self.total, self.world_size)

    def real_count(self) -> int:
        """Return how many items this rank got, without padding."""
        return self.real_counts()[self.rank]

    @property
    def padding(self) -> int:
        """How many trailing items of this rank's part repeat another one."""
        return count_with_padding(self.total, self.world_size, self.apply_padding)[self.rank] - self.real_count()

    @property
    def indices(self) -> list[int]:
        """The position in the input of each item of the part; padding repeats a position."""
        if self.dealt:
            return [*range(self.rank, self.total, self.world_size), *[self.total - 1] * self.padding]
        return _SlicePositions.of(self.total, self.rank, self.world_size, self.apply_padding).indices


@dataclass(frozen=True)
class _SlicePositions:
    """Which positions of a sliced input a rank gets."""

    span: range
    repeated: tuple[int, ...]
    """The position that is repeated as padding; none or one."""
    padded_somewhere: bool
    """Whether some rank repeats an item, so that the part has to be of a type that can, on every rank."""

    @classmethod
    def of(cls, total: int, rank: int, world_size: int, apply_padding: bool) -> _SlicePositions:
        counts = count_per_rank(total, world_size)
        # Nothing is range(0), not an empty range at the end: a hub dataset refuses a start that it has no row for.
        start = sum(counts[:rank]) if counts[rank] else 0
        span = range(start, start + counts[rank])
        short = count_with_padding(total, world_size, apply_padding)[rank] - counts[rank]
        last = span[-1] if span else total - 1
        return cls(span, (last,) * short, apply_padding and total % world_size != 0)

    @property
    def indices(self) -> list[int]:
        return [*self.span, *self.repeated]

    @property
    def slice(self) -> slice:
        return slice(self.span.start, self.span.stop)


class SplitView(Sequence[Any]):
    """Some positions of something indexable, fetched when asked for; a dataset of its own for a DataLoader.

    >>> view = SplitView("abcdef", [2, 3, 4])
    >>> len(view), view[0], list(view), list(view[1:])
    (3, 'c', ['c', 'd', 'e'], ['d', 'e'])
    """

    def __init__(self, source: Any, indices: Sequence[int]) -> None:
        self.source = source
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return SplitView(self.source, self.indices[position])
        return self.source[self.indices[position]]

    def __iter__(self) -> Iterator[Any]:
        return (self.source[index] for index in self.indices)

    @property
    def __getitems__(self) -> Callable[[list[int]], Any] | None:
        """Fetch a whole batch at once where the dataset can; None, as a DataLoader expects, where not."""
        fetch = getattr(self.source, "__getitems__", None)
        return fetch and (lambda positions: fetch([self.indices[position] for position in positions]))

    def __repr__(self) -> str:
        return f"View of {len(self)} of {len(self.source)} items of {type(self.source).__name__}"


class StridedItems:
    """This rank's items of an iterable, one by one; can be walked over again if the iterable can."""

    def __init__(self, source: Iterable[Any], rank: int, world_size: int, apply_padding: bool, tally: _ItemTotal) -> None:
        self.source, self.rank, self.world_size, self.apply_padding, self.tally = source, rank, world_size, apply_padding, tally

    def __iter__(self) -> Iterator[Any]:
        self.tally.total = None
        total, item = 0, None
        for item in self.source:
            total += 1
            if (total - 1) % self.world_size == self.rank:
                yield item
        self.tally.total = total
        if self.apply_padding and 0 < total % self.world_size <= self.rank:
            yield item


def _split_strided(inputs: Any, rank: int, world_size: int, apply_padding: bool) -> SplitPart:
    try:
        iterator = iter(inputs)
    except TypeError:
        raise TypeError(
            f"split_between_processes was given {_a(inputs)}, which has neither positions nor items. "
            f"Give it a list, tuple, range, mapping of columns, tensor, array, dataset or any iterable."
        ) from None
    tally = _ItemTotal()
    dealt = StridedItems(inputs, rank, world_size, apply_padding, tally)
    # A generator can be walked over once and answers next(); so does its part.
    return SplitPart(iter(dealt) if iterator is inputs else dealt, rank, world_size, apply_padding, tally, dealt=True)


# What the inputs are ---------------------------------------------------------------------------------------------------


def _a(inputs: Any) -> str:
    name = type(inputs).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _at(where: str) -> str:
    return f" at inputs{where}" if where else ""


def _refuse_unordered(inputs: Any, where: str) -> None:
    if isinstance(inputs, str | bytes | bytearray):
        raise TypeError(
            f"split_between_processes was given {_a(inputs)}{_at(where)}, which would be split into single characters or bytes. "
            f"Put it into a list to treat it as one item, or write list(...) if the characters are what you want to split."
        )
    if isinstance(inputs, Set) and not isinstance(inputs, KeysView | ItemsView):
        raise TypeError(
            f"split_between_processes was given {_a(inputs)}{_at(where)}. A set has no order, so two processes may see its items in "
            f"different orders and share them wrongly. Write sorted(...) around it."
        )


def is_instance_of(value: Any, module: str, name: str) -> bool:
    """Return whether a value is an instance of a library's class, without importing the library."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def is_array(value: Any) -> bool:
    """Return whether a value is a torch tensor or a numpy array."""
    return is_instance_of(value, "torch", "Tensor") or is_instance_of(value, "numpy", "ndarray")


def _is_record(value: Any) -> bool:
    """Return whether a value is a mapping or a named tuple: columns side by side."""
    return isinstance(value, Mapping) or is_namedtuple(value)


def _is_hub_dataset(value: Any) -> bool:
    """Return whether a value is a Hugging Face dataset (data frames have a `select` of columns)."""
    return callable(getattr(value, "select", None)) and hasattr(value, "features") and hasattr(value, "column_names")


def _has_positions(value: Any) -> bool:
    # An IterableDataset may inherit a __getitem__ that only raises.
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not is_instance_of(value, "torch.utils.data", "IterableDataset")


def columns_of(record: Any) -> dict[Any, Any]:
    """Return the columns of a mapping or named tuple by name."""
    return dict(record.items()) if isinstance(record, Mapping) else dict(zip(record._fields, record, strict=True))


def _length(value: Any, where: str) -> int:
    """Return the number of items; of a record, the common length of its columns."""
    _refuse_unordered(value, where)
    if _is_record(value):
        return _common_length({f"{where}[{key!r}]": column for key, column in columns_of(value).items()})
    if not _has_positions(value):
        raise TypeError(
            f"split_between_processes cuts a mapping or named tuple into rows, but there is {_a(value)}{_at(where)}, which has none. "
            f"Use columns of equal length (lists, tensors, arrays), or pass a list to split whole items."
        )
    if is_array(value) and value.ndim == 0:
        raise TypeError(
            f"split_between_processes was given {_a(value)}{_at(where)} without dimensions, which has no rows to split. "
            f"Give it a dimension, for example with reshape(1)."
        )
    return len(value)


def _common_length(columns: dict[str, Any]) -> int:
    counts = {where: _length(column, where) for where, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            "split_between_processes cuts a mapping or named tuple into rows, so its columns need equal lengths, but "
            + ", ".join(f"inputs{where} has {count}" for where, count in counts.items())
            + ". Make them equal, or split a list of the rows."
        )
    return next(iter(counts.values()), 0)


# Taking a piece ---------------------------------------------------------------------------------------------------------


def _take_record(record: Any, cut: _SlicePositions) -> Any:
    taken = {key: _take(column, cut) for key, column in columns_of(record).items()}
    if isinstance(record, tuple):
        return type(record)._make(taken.values())  # type: ignore[attr-defined]
    if type(record) is dict or not isinstance(record, MutableMapping):
        return taken
    return copy_with_values(record, taken)


def _take_range(value: range, cut: _SlicePositions) -> Any:
    return [value[index] for index in cut.indices] if cut.padded_somewhere else value[cut.slice]


def _take_rows(value: Any, cut: _SlicePositions) -> Any:
    """Tensors and arrays: a view of the rows, or a copy where a row is repeated."""
    return value[cut.indices] if cut.repeated else value[cut.slice]


_TAKERS: tuple[tuple[Callable[[Any], bool], Callable[[Any, _SlicePositions], Any]], ...] = (
    (_is_record, _take_record),
    (lambda value: isinstance(value, list), lambda value, cut: value[cut.slice] + [value[index] for index in cut.repeated]),
    (lambda value: isinstance(value, tuple), lambda value, cut: value[cut.slice] + tuple(value[index] for index in cut.repeated)),
    (lambda value: isinstance(value, range), _take_range),
    (is_array, _take_rows),
    (lambda value: hasattr(value, "iloc"), lambda value, cut: _take_rows(value.iloc, cut)),
    (_is_hub_dataset, lambda value, cut: value.select(cut.indices if cut.repeated else cut.span)),
    (lambda value: True, lambda value, cut: SplitView(value, cut.indices if cut.repeated else cut.span)),
)
"""What a piece of each kind of input is; the first that fits."""


def _take(value: Any, cut: _SlicePositions) -> Any:
    return next(take for fits, take in _TAKERS if fits(value))(value, cut)
