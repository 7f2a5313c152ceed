"""Which part of an input belongs to which process: the pure core of `split_between_processes(balance="static")`.

* **Slices.** Inputs with a length and positions (list, tuple, range, tensor, array, table, dataset, a mapping or named tuple of
  columns) are cut into one contiguous slice per rank. The first `length % world_size` ranks have one more item.
* **Strides.** A plain iterable has no length. Every rank iterates over its own copy and keeps item `i` when `i % world_size == rank`;
  nothing is read ahead.

Every item belongs to exactly one rank, counts differ by at most one, order is kept, and a part has the type of the whole. With
`apply_padding` the ranks that are one short repeat the last item. The argument is not changed, and neither torch nor numpy is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from slipstream.distributed.pytree import copy_with_values, is_namedtuple

__all__ = [
    "SplitPart", "SplitView", "StridedItems", "count_per_rank", "count_with_padding", "is_array", "is_instance_of", "is_record",
    "record_columns", "restore_order", "split",
]


def split(inputs: Any, rank: int, world_size: int, apply_padding: bool = False) -> SplitPart:
    """Return the part of `inputs` that belongs to `rank`.

    >>> [split(["a", "b", "c"], rank, 2).value for rank in range(2)]
    [['a', 'b'], ['c']]
    >>> split(("a", "b", "c"), 1, 2, apply_padding=True).value
    ('c', 'c')
    >>> part = split((letter for letter in "abcde"), 1, 2)
    >>> list(part.value), part.total
    (['b', 'd'], 5)
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks 0 to {world_size - 1}.")
    _refuse_unordered(inputs, "")
    if not _has_positions(inputs):
        return _split_strided(inputs, rank, world_size, apply_padding)
    total = _length(inputs, "")
    cut = _SlicePositions.of(total, rank, world_size, apply_padding)
    return SplitPart(_take(inputs, cut), world_size, apply_padding, total)


def count_per_rank(total: int, world_size: int) -> list[int]:
    """Return how many of `total` items each rank gets, sliced or dealt, without padding.

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
    """Return what every rank made of its part, one result per item and padding dropped, in the order of the input.

    Chunks of sliced inputs follow each other; those of a dealt-out iterable are interleaved. Tensors and arrays stay what they are.

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
class SplitPart:
    """What one rank got, and what is needed to put the results of all ranks back together.

    >>> part = split(range(5), 1, 2, apply_padding=True)
    >>> part.value, part.total
    ([3, 4, 4], 5)
    """

    value: Any
    """The rank's piece; for an iterable without positions, the lazy stream of its items."""
    world_size: int
    apply_padding: bool = False
    total: int = -1
    """The number of items of the whole input; -1 until this rank has come to the end of an iterable without positions."""
    dealt: bool = False
    """Items were dealt out in turn rather than sliced."""

    # As the order of results (`ResultOrder` in collectives.py), for one result per item:
    leaf_by_leaf = False
    ranks = None
    batch_total = 0

    def order(self, counts: Sequence[int]) -> list[int] | None:
        """Return the positions of the results in their concatenation; None if a rank has another count than items.

        >>> part = split(["a", "b", "c"], 0, 2, apply_padding=True)
        >>> part.order([2, 2]), part.order([1, 1])
        ([0, 1, 2], None)
        """
        if list(counts) != count_with_padding(self.total, self.world_size, self.apply_padding):
            return None
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        real = [list(range(start, start + count)) for start, count in zip(starts, count_per_rank(self.total, self.world_size), strict=True)]
        order: list[int] = restore_order(real, self.dealt)
        return order


@dataclass(frozen=True)
class _SlicePositions:
    """Which positions of a sliced input a rank gets."""

    span: range
    repeated: tuple[int, ...]
    """The position that is repeated as padding; none or one."""
    padded_somewhere: bool
    """Some rank repeats an item, so the piece has to be of a type that can, on every rank."""

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
        """Fetching a whole batch at once, where the dataset can; a DataLoader asks for it and takes None for no."""
        fetch = getattr(self.source, "__getitems__", None)
        return fetch and (lambda positions: fetch([self.indices[position] for position in positions]))

    def __repr__(self) -> str:
        return f"View of {len(self)} of {len(self.source)} items of {type(self.source).__name__}"


class StridedItems:
    """This rank's items of an iterable; can be iterated again if the iterable can."""

    def __init__(self, source: Iterable[Any], rank: int, part: SplitPart) -> None:
        self.source, self.rank, self.part = source, rank, part

    def __iter__(self) -> Iterator[Any]:
        part, total, item = self.part, 0, None
        part.total = -1
        for item in self.source:
            total += 1
            if (total - 1) % part.world_size == self.rank:
                yield item
        part.total = total
        if part.apply_padding and 0 < total % part.world_size <= self.rank:
            yield item


def _split_strided(inputs: Any, rank: int, world_size: int, apply_padding: bool) -> SplitPart:
    try:
        iterator = iter(inputs)
    except TypeError:
        raise TypeError(
            f"split_between_processes was given {_a(inputs)}, which has neither positions nor items. "
            f"Give it a list, tuple, range, mapping of columns, tensor, array, dataset or any iterable."
        ) from None
    part = SplitPart(None, world_size, apply_padding, dealt=True)
    items = StridedItems(inputs, rank, part)
    part.value = iter(items) if iterator is inputs else items  # a generator is consumed once and has next(); so has its part
    return part


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
    """Whether this is an instance of a class of a library, which it can be only if the library is loaded."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def is_array(value: Any) -> bool:
    """Whether this is a tensor or a numpy array."""
    return is_instance_of(value, "torch", "Tensor") or is_instance_of(value, "numpy", "ndarray")


def is_record(value: Any) -> bool:
    """Whether this is a mapping or named tuple of columns."""
    return isinstance(value, Mapping) or is_namedtuple(value)


def _is_hub_dataset(value: Any) -> bool:
    """Whether this is a Hugging Face dataset, whose rows `select` takes. Data frames have a `select` that takes columns."""
    return callable(getattr(value, "select", None)) and hasattr(value, "features") and hasattr(value, "column_names")


def _has_positions(value: Any) -> bool:
    # An IterableDataset may inherit a __getitem__ that only raises.
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not is_instance_of(value, "torch.utils.data", "IterableDataset")


def record_columns(record: Any) -> dict[Any, Any]:
    """Return the columns of a mapping or named tuple by name."""
    return dict(record.items()) if isinstance(record, Mapping) else dict(zip(record._fields, record, strict=True))


def _length(value: Any, where: str) -> int:
    """Return the number of items; of a record, the length that all its columns share."""
    _refuse_unordered(value, where)
    if is_record(value):
        return _common_length({f"{where}[{key!r}]": column for key, column in record_columns(value).items()})
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
    taken = {key: _take(column, cut) for key, column in record_columns(record).items()}
    if isinstance(record, tuple):
        return type(record)._make(taken.values())  # type: ignore[attr-defined]
    if type(record) is dict or not isinstance(record, MutableMapping):
        return taken
    return copy_with_values(record, taken)


def _take_range(value: range, cut: _SlicePositions) -> Any:
    return [value[index] for index in cut.indices] if cut.padded_somewhere else value[cut.slice]


def _take_rows(value: Any, cut: _SlicePositions) -> Any:
    """Take rows of a tensor or array: a view, or a copy where a row is repeated."""
    return value[cut.indices] if cut.repeated else value[cut.slice]


_TAKERS: tuple[tuple[Callable[[Any], bool], Callable[[Any, _SlicePositions], Any]], ...] = (
    (is_record, _take_record),
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
