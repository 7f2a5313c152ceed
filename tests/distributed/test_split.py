"""Every item belongs to one rank, in order, of the same type, and the argument stays as it was."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slipstream.distributed.split import SplitView, count_per_rank, count_with_padding, restore_order, split

Batch = namedtuple("Batch", ["ids", "names"])  # noqa: PYI024
WORLDS = st.integers(1, 7)
TOTALS = st.integers(0, 25)


class Rows(Dataset[dict[str, int]]):
    """A map-style dataset that counts what it is asked for."""

    def __init__(self, total: int) -> None:
        self.total, self.fetched = total, 0

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, int]:
        if not 0 <= index < self.total:
            raise IndexError(index)
        self.fetched += 1
        return {"id": index}


class HubRows:
    """What is used of a Hugging Face dataset."""

    features: dict[str, str] = {}
    column_names = ["id"]

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": self.ids[index]}

    def select(self, indices: Any) -> HubRows:
        if isinstance(indices, range) and indices.start > max(len(self.ids) - 1, 0):
            raise IndexError(f"no row {indices.start}")  # the real one does, even for an empty range
        return HubRows([self.ids[index] for index in indices])


class Frame:
    """What is used of a data frame: rows by position through `iloc`, while its own [] means columns."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, column: str) -> Any:
        raise KeyError(column)

    @property
    def iloc(self) -> Any:
        frame = self

        class Rows:
            def __getitem__(self, rows: Any) -> Frame:
                return Frame(frame.ids[rows] if isinstance(rows, slice) else [frame.ids[row] for row in rows])

        return Rows()


class Stream(IterableDataset[int]):
    """An iterable dataset with a length, which still has no positions."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Any:
        return iter(range(self.total))


def names(total: int) -> list[str]:
    return [f"n{index}" for index in range(total)]


# name -> (make inputs of n items, the items of a piece as plain ids)
SLICED: dict[str, tuple[Callable[[int], Any], Callable[[Any], list[int]]]] = {
    "list": (lambda n: list(range(n)), list),
    "tuple": (lambda n: tuple(range(n)), list),
    "range": (range, list),
    "stepped range": (lambda n: range(0, -n, -1), lambda piece: [-item for item in piece]),
    "dict": (lambda n: {"id": list(range(n)), "name": names(n)}, lambda piece: piece["id"]),
    "ordered dict": (lambda n: OrderedDict(id=range(n), name=names(n)), lambda piece: list(piece["id"])),
    "default dict": (lambda n: defaultdict(list, id=list(range(n))), lambda piece: piece["id"]),
    "user dict": (lambda n: UserDict(id=list(range(n))), lambda piece: piece["id"]),
    "nested dict": (lambda n: {"x": {"id": torch.arange(n)}, "name": tuple(names(n))}, lambda piece: piece["x"]["id"].tolist()),
    "named tuple": (lambda n: Batch(torch.arange(n), names(n)), lambda piece: piece.ids.tolist()),
    "tensor": (lambda n: torch.arange(n * 6).reshape(n, 2, 3), lambda piece: (piece[:, 0, 0] // 6).tolist()),
    "array": (lambda n: np.arange(n * 2).reshape(n, 2), lambda piece: (piece[:, 0] // 2).tolist()),
    "dataset": (Rows, lambda piece: [row["id"] for row in piece]),
    "hub dataset": (lambda n: HubRows(list(range(n))), lambda piece: piece.ids),
    "frame": (lambda n: Frame(list(range(n))), lambda piece: piece.ids),
    "deque": (lambda n: deque(range(n)), list),
}
DEALT: dict[str, Callable[[int], Any]] = {
    "generator": lambda n: (item for item in range(n)),
    "iterator": lambda n: iter(list(range(n))),
    "map": lambda n: map(int, names_as_numbers(n)),
    "dict keys": lambda n: dict.fromkeys(range(n)).keys(),
    "iterable dataset": Stream,
}


def names_as_numbers(total: int) -> list[str]:
    return [str(index) for index in range(total)]


@pytest.mark.parametrize("kind", SLICED)
@given(total=TOTALS, world=WORLDS, pad=st.booleans())
def test_slices_cover_input_in_order(kind: str, total: int, world: int, pad: bool) -> None:
    """Slices cover the input once and in order."""
    make, ids = SLICED[kind]
    parts = [split(make(total), rank, world, pad) for rank in range(world)]
    pieces = [ids(part.value) for part in parts]
    real = [piece[:count] for piece, count in zip(pieces, count_per_rank(total, world), strict=True)]
    assert [item for piece in real for item in piece] == list(range(total))
    assert [len(piece) for piece in pieces] == count_with_padding(total, world, pad)
    assert [len(piece) for piece in real] == count_per_rank(total, world)
    assert {part.total for part in parts} == {total}


@given(total=TOTALS, world=WORLDS)
def test_counts_differ_by_one(total: int, world: int) -> None:
    """Counts differ by at most one and the first ranks have more."""
    counts = count_per_rank(total, world)
    assert sum(counts) == total
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@given(total=TOTALS, world=WORLDS)
def test_padding_equalises_counts(total: int, world: int) -> None:
    """Padding makes counts equal unless there is nothing to repeat."""
    assert len(set(count_with_padding(total, world, apply_padding=True))) == 1
    assert sum(count_with_padding(0, world, apply_padding=True)) == 0


@given(total=st.integers(1, 25), world=WORLDS)
def test_padding_repeats_last_item(total: int, world: int) -> None:
    """Padding repeats the ranks last item or the last of all."""
    for rank in range(world):
        part = split(list(range(total)), rank, world, apply_padding=True)
        own = part.value[: count_per_rank(total, world)[rank]]
        padding = count_with_padding(total, world, True)[rank] - len(own)
        assert part.value == own + [own[-1] if own else total - 1] * padding


@pytest.mark.parametrize("kind", [kind for kind in SLICED if kind not in ("dataset", "hub dataset", "frame")])
@pytest.mark.parametrize("pad", [False, True])
def test_the_argument_is_not_changed(kind: str, pad: bool) -> None:
    inputs = SLICED[kind][0](5)
    before = copy.deepcopy(inputs)
    for rank in range(3):
        list(split(inputs, rank, 3, pad).value)
    assert repr(inputs) == repr(before)
    assert type(inputs) is type(before)


@pytest.mark.parametrize("kind", [kind for kind in SLICED if kind not in ("dataset", "deque")])
@pytest.mark.parametrize("total", [0, 2, 7])
@pytest.mark.parametrize("pad", [False, True])
def test_piece_keeps_type(kind: str, total: int, pad: bool) -> None:
    """A piece is of the type of the whole."""
    inputs = SLICED[kind][0](total)
    types = {type(split(inputs, rank, 3, pad).value) for rank in range(3)}
    cannot_repeat = isinstance(inputs, range) and pad and total % 3
    assert types == {list if cannot_repeat else type(inputs)}


def test_columns_keep_their_types_too() -> None:
    piece = split({"ids": torch.arange(3), "rows": np.arange(3), "names": ("a", "b", "c"), "span": range(3)}, 0, 2).value
    assert {key: type(column) for key, column in piece.items()} == {
        "ids": torch.Tensor,
        "rows": np.ndarray,
        "names": tuple,
        "span": range,
    }


def test_a_default_dict_keeps_its_factory() -> None:
    assert split(defaultdict(list, a=[1, 2]), 0, 2).value["new"] == []


def test_a_read_only_mapping_becomes_a_dict() -> None:
    assert split(MappingProxyType({"a": [1, 2]}), 1, 2).value == {"a": [2]}


@pytest.mark.parametrize("pad", [False, True])
def test_empty_tensor_part_keeps_shape(pad: bool) -> None:
    """An empty part of a tensor keeps shape and type."""
    inputs = torch.zeros(0, 4, 5, dtype=torch.float16)
    part = split(inputs, 1, 2, pad)
    assert (part.value.shape, part.value.dtype) == ((0, 4, 5), torch.float16)
    fewer = split(torch.zeros(1, 4, dtype=torch.int8), 2, 3)
    assert (fewer.value.shape, fewer.value.dtype) == ((0, 4), torch.int8)


def test_gradients_flow_through_slice() -> None:
    """Gradients flow through the slice of a tensor."""
    inputs = torch.ones(3, requires_grad=True)
    split(inputs, 1, 2, apply_padding=True).value.sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.tolist() == [0, 0, 2]


def test_split_does_not_read_dataset() -> None:
    """A dataset is not read when it is split."""
    rows = Rows(1000)
    part = split(rows, 3, 4).value
    assert (rows.fetched, len(part)) == (0, 250)
    assert part[-1] == {"id": 999}
    assert part[2:4][1] == {"id": 753}
    assert rows.fetched == 2
    with pytest.raises(IndexError):
        part[250]


def test_dataset_view_feeds_loader() -> None:
    """The view of a dataset feeds a data loader."""
    view = split(Rows(7), 1, 2).value
    assert [batch["id"].tolist() for batch in DataLoader(view, batch_size=2)] == [[4, 5], [6]]


def test_dataset_view_fetches_batches() -> None:
    """The view fetches batches at once where the dataset can."""

    class Batched(Rows):
        asked: list[list[int]] = []

        def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
            self.asked.append(indices)
            return [self[index] for index in indices]

    list(DataLoader(split(Batched(7), 1, 2).value, batch_size=2))
    assert Batched.asked == [[4, 5], [6]]


def test_empty_view_is_falsy() -> None:
    """An empty view is falsy and describes itself."""
    view = split(Rows(1), 1, 2).value
    assert isinstance(view, SplitView)
    assert not view
    assert repr(view) == "View of 0 of 1 items of Rows"


# Dealing


@pytest.mark.parametrize("kind", DEALT)
@given(total=TOTALS, world=WORLDS, pad=st.booleans())
def test_strided_items_restore_order(kind: str, total: int, world: int, pad: bool) -> None:
    """Dealing covers the input once and interleaving restores it."""
    parts = [split(DEALT[kind](total), rank, world, pad) for rank in range(world)]
    pieces = [list(part.value) for part in parts]
    counts = count_per_rank(total, world)
    assert [len(piece) for piece in pieces] == count_with_padding(total, world, pad)
    assert {part.total for part in parts} == {total}
    real = [piece[:count] for piece, count in zip(pieces, counts, strict=True)]
    assert restore_order(real, dealt=True) == list(range(total))
    assert all(item == total - 1 for piece, count in zip(pieces, counts, strict=True) for item in piece[count:])


def test_generator_read_lazily() -> None:
    """A generator is read only as far as needed."""
    read: list[int] = []

    def endless() -> Any:
        number = 0
        while True:
            read.append(number)
            yield number
            number += 1

    part = split(endless(), 1, 3)
    assert read == []
    assert [next(part.value), next(part.value)] == [1, 4]
    assert read == [0, 1, 2, 3, 4]


def test_iterable_total_unknown_before_end() -> None:
    """Counts of an iterable are unknown before its end."""
    part = split(iter("abc"), 0, 2)
    next(part.value)
    assert part.total == -1
    list(part.value)
    assert part.total == 3


def test_reiterable_part_stays_reiterable() -> None:
    """What can be walked over twice still can."""
    part = split({"a": 1, "b": 2, "c": 3}.items(), 0, 2)
    assert list(part.value) == list(part.value) == [("a", 1), ("c", 3)]


@given(total=TOTALS, world=WORLDS)
def test_tensor_order_restored(total: int, world: int) -> None:
    """Order of tensors and arrays is restored."""
    dealt = [torch.arange(total)[rank::world] for rank in range(world)]
    sliced = [split(torch.arange(total), rank, world).value for rank in range(world)]
    assert torch.equal(restore_order(dealt, dealt=True), torch.arange(total))
    assert torch.equal(restore_order(sliced, dealt=False), torch.arange(total))
    assert np.array_equal(restore_order([chunk.numpy() for chunk in dealt], dealt=True), np.arange(total))
    assert restore_order([chunk.tolist() for chunk in sliced], dealt=False) == list(range(total))


# Refusals


@pytest.mark.parametrize("inputs", ["prompt", b"prompt", bytearray(b"prompt"), {"text": "prompt"}])
def test_text_is_refused(inputs: Any) -> None:
    with pytest.raises(TypeError, match="Put it into a list"):
        split(inputs, 0, 2)


@pytest.mark.parametrize("inputs", [{1, 2}, frozenset("ab"), {"ids": {1, 2}}])
def test_sets_are_refused(inputs: Any) -> None:
    with pytest.raises(TypeError, match="no order.*sorted"):
        split(inputs, 0, 2)


@pytest.mark.parametrize("inputs", [3, None, object(), 1.5])
def test_what_has_no_items_is_refused(inputs: Any) -> None:
    with pytest.raises(TypeError, match=f"{type(inputs).__name__}, which has neither positions nor items"):
        split(inputs, 0, 2)


@pytest.mark.parametrize("inputs", [torch.tensor(3), np.array(3), {"x": torch.tensor(3)}])
def test_no_dimensions_no_rows(inputs: Any) -> None:
    with pytest.raises(TypeError, match="without dimensions"):
        split(inputs, 0, 2)


def test_unequal_columns_named() -> None:
    """Columns of unequal lengths are named with their lengths."""
    with pytest.raises(ValueError, match=r"inputs\['ids'\] has 3, inputs\['names'\] has 2"):
        split({"ids": [1, 2, 3], "names": ["a", "b"]}, 0, 2)
    with pytest.raises(ValueError, match=r"inputs\['x'\]\['a'\] has 1, inputs\['x'\]\['b'\] has 2"):
        split({"x": {"a": [1], "b": [1, 2]}}, 0, 2)


@pytest.mark.parametrize("column", [3, (item for item in "ab")])
def test_a_column_without_rows_is_named(column: Any) -> None:
    with pytest.raises(TypeError, match=r"inputs\['b'\], which has none"):
        split({"a": [1, 2], "b": column}, 0, 2)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of the 2 ranks"):
        split([1], rank, 2)


class Table(MutableMapping[str, Any]):
    """Columns by name, of which a shallow copy holds the very same dict."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = columns

    def __getitem__(self, key: str) -> Any:
        return self.columns[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.columns[key] = value

    def __delitem__(self, key: str) -> None:
        del self.columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def test_shared_mapping_not_changed() -> None:
    """A mapping whose copy shares its columns stays as it was."""
    table = Table({"ids": [1, 2, 3], "names": ["a", "b", "c"]})
    pieces = [split(table, rank, 2).value for rank in range(2)]
    assert table.columns == {"ids": [1, 2, 3], "names": ["a", "b", "c"]}
    assert [type(piece) for piece in pieces] == [Table, Table]
    assert [piece.columns for piece in pieces] == [{"ids": [1, 2], "names": ["a", "b"]}, {"ids": [3], "names": ["c"]}]
