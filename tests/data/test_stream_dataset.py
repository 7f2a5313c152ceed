"""How datasets are asked to share themselves out, the fingerprint that notices those that did, and random numbers of a reader's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from slipstream.data.fingerprint import fingerprint
from slipstream.data.plan import ItemSplitPlan, slice_rows
from slipstream.data.random_state import RandomStateScope
from slipstream.data.stream_dataset import iterate_blocks, prepare_datapipe, shard_dataset


class Stream(IterableDataset[int]):
    def __init__(self, items: Any = (), **attributes: Any) -> None:
        self.items = items
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


class Sharded(Stream):
    """The protocol of Hugging Face datasets, in small."""

    def __init__(self, shards: list[list[int]], name: str = "num_shards") -> None:
        super().__init__([item for shard in shards for item in shard], **{name: len(shards)})
        self.shards = shards

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.shards[index::num_shards])


class ByRank(Stream):
    def split_by_rank(self, rank: int, world_size: int) -> Stream:
        return Stream(self.items[rank::world_size])


# -- asking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("rank", "world_size"), ("process_index", "num_replicas"), ("rank", "num_processes")])
def test_rank_attributes_mean_sharded(names: tuple[str, str]) -> None:
    """Rank and world of a dataset say that it is shared out."""
    dataset = Stream(**dict(zip(names, (1, 2), strict=True)))
    answer = shard_dataset(dataset, 1, 2)
    assert answer.own
    assert answer.dataset is dataset
    assert answer.doubt == ""


def test_split_by_node() -> None:
    """A dataset split by node is shared out."""
    answer = shard_dataset(Stream(_distributed=SimpleNamespace(rank=0, world_size=2)), 0, 2)
    assert answer.own
    assert "split by node" in answer.reason


@pytest.mark.parametrize("attributes", [{"rank": 0}, {"world_size": 2}, {"rank": 0, "world_size": 1}, {"rank": "x", "world_size": 2}, {}])
def test_half_an_answer_is_none(attributes: dict[str, Any]) -> None:
    assert not shard_dataset(Stream(**attributes), 0, 2).own


def test_foreign_shard_is_doubted() -> None:
    """A dataset shared out for others is doubted."""
    assert "set up for rank 3 of 4, but this is rank 1 of 2" in shard_dataset(Stream(rank=3, world_size=4), 1, 2).doubt


@pytest.mark.parametrize("name", ["num_shards", "n_shards"])
def test_shards_given_to_ranks(name: str) -> None:
    """Shards are given to the ranks."""
    shards = [[1, 2], [3], [4, 5, 6], []]
    answers = [shard_dataset(Sharded(shards, name), rank, 2) for rank in range(2)]
    assert all(answer.own for answer in answers)
    assert [list(answer.dataset) for answer in answers] == [[1, 2, 4, 5, 6], [3]]


@pytest.mark.parametrize("count", [1, 3])
def test_uneven_shards(count: int) -> None:
    """Shards that the ranks cannot share evenly are reported and not used."""
    dataset = Sharded([[1, 2]] * count)
    answer = shard_dataset(dataset, 0, 2)
    assert not answer.own
    assert answer.dataset is dataset
    assert f"num_shards={count}, which 2 processes cannot share evenly" in answer.doubt


def test_split_by_rank() -> None:
    """A dataset can split itself by rank."""
    answers = [shard_dataset(ByRank(range(5)), rank, 2) for rank in range(2)]
    assert [list(answer.dataset) for answer in answers] == [[0, 2, 4], [1, 3]]


def test_sharding_filter_after_shuffle() -> None:
    """A pipeline with a sharding filter is shared out after its shuffle."""
    parts = []
    for rank in range(2):
        pipe = IterableWrapper(range(10)).shuffle().sharding_filter()
        answer = shard_dataset(pipe, rank, 2)
        assert answer.own
        prepare_datapipe(answer.dataset, 5, rank, 2)
        parts.append(list(answer.dataset))
    assert sorted(parts[0] + parts[1]) == list(range(10))
    assert parts[0] + parts[1] != [*range(0, 10, 2), *range(1, 10, 2)], "shuffled, alike on both ranks"
    assert not shard_dataset(IterableWrapper(range(10)).shuffle(), 0, 2).own


# -- the fingerprint --------------------------------------------------------------------------------------------------


class Foreign:
    def __init__(self, value: Any) -> None:
        self.value = value


class Image:
    def __init__(self, value: int) -> None:
        self.__array_interface__ = numpy.full((2, 2), value).__array_interface__
        self._kept = numpy.full((2, 2), value)
        self.__array_interface__ = self._kept.__array_interface__

    def __repr__(self) -> str:
        return f"<Image 2x2 at {id(self):#x}>"


class Slotted:
    __slots__ = ()


@dataclass
class Record:
    text: str
    tensor: torch.Tensor


VALUES = [
    lambda: 1,
    lambda: 1.0,
    lambda: "1",
    lambda: b"1",
    lambda: None,
    lambda: torch.tensor([1, 2]),
    lambda: torch.tensor([1.0, 2.0]),
    lambda: torch.tensor([2, 1]),
    lambda: torch.eye(2).to_sparse(),
    lambda: numpy.array([1, 2], dtype=numpy.int32),
    lambda: numpy.array(["a", "b"]),
    lambda: numpy.array([{"a": 1}, None], dtype=object),
    lambda: {"a": 1, "b": [1, 2]},
    lambda: {"a": 1, "b": [1, 3]},
    lambda: {1, 2, 3},
    lambda: Record("a", torch.ones(2)),
    lambda: Record("a", torch.zeros(2)),
    lambda: Foreign(Foreign(torch.ones(1))),
    lambda: Foreign(Foreign(torch.zeros(1))),
    lambda: Image(1),
    lambda: Image(2),
    lambda: Slotted(),
    lambda: object,
]


def test_fingerprints() -> None:
    """Equal items have equal fingerprints and others have not.

    Made anew each time, so addresses and identities differ, as they do between processes.
    """
    digests = [fingerprint([make()]) for make in VALUES]
    assert digests == [fingerprint([make()]) for make in VALUES]
    assert len(set(digests)) == len(VALUES)


def test_fingerprint_of_item_ends() -> None:
    """The fingerprint knows where items end."""
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint([]) != fingerprint([[]])


# -- random numbers ---------------------------------------------------------------------------------------------------


def draw() -> tuple[float, float, float, float]:
    return random.random(), float(numpy.random.rand()), float(numpy.random.randn()), float(torch.rand(()))


def test_random_state_scope() -> None:
    """Numbers inside follow the seed and those outside are as if nothing was drawn."""
    inside, outside = [], []
    for seed, blocks in [(3, 0), (3, 2), (4, 2), (3, 2)]:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        own = RandomStateScope(seed)
        outside.append([])
        inside.append([])
        for _ in range(3):
            outside[-1].append(draw())
            for _ in range(blocks):
                with own:
                    inside[-1].append(draw())
    assert outside[0] == outside[1] == outside[2]
    assert inside[1] == inside[3]
    assert inside[1] != inside[2]
    assert len(set(inside[1])) == 6, "a block goes on where the one before ended"


def test_states_restored_after_error() -> None:
    """The states come back when reading fails."""
    before = random.getstate()
    with pytest.raises(IndexError), RandomStateScope(1):
        random.choice([random.random()][1:])
    assert random.getstate() == before


@pytest.mark.parametrize("drawing", [random.random, numpy.random.rand, lambda: torch.rand(())])
def test_scope_used(drawing: Any) -> None:
    """It knows whether numbers were drawn."""
    own = RandomStateScope(1)
    with own:
        pass
    assert not own.used
    with own:
        drawing()
    assert own.used


@pytest.mark.parametrize("careful", [False, True])
def test_blocks_cover_all_items(careful: bool) -> None:
    """Items in blocks are all the items."""
    for length in range(8):
        assert list(iterate_blocks(range(length), 3, RandomStateScope(1), careful=careful)) == list(range(length))


def test_shuffling_stream() -> None:
    """A shuffling stream is read with numbers of the reader's own."""

    class Shuffling(Stream):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(20), 20))

    random.seed(1)
    before = random.getstate()
    first, second, third = (list(iterate_blocks(Shuffling(), 4, RandomStateScope(seed))) for seed in (5, 5, 6))
    assert first == second != third
    assert random.getstate() == before


# -- cutting ----------------------------------------------------------------------------------------------------------


def test_slice_rows() -> None:
    """Cutting takes samples of tensors arrays and lists."""
    ragged = [torch.arange(length) for length in (1, 2, 3, 4)]
    texts = ["a", "b", "c", "d"]
    batch = {"x": torch.arange(8).view(4, 2), "n": numpy.arange(4), "text": texts, "ragged": ragged, "scale": 0.5, "name": "abcd"}
    got = slice_rows(batch, slice(1, 3))
    assert got["x"].tolist() == [[2, 3], [4, 5]]
    assert got["n"].tolist() == [1, 2]
    assert got["text"] == ["b", "c"]
    assert [entry.tolist() for entry in got["ragged"]] == [[0, 1], [0, 1, 2]]
    assert (got["scale"], got["name"]) == (0.5, "abcd")


def test_slice_rows_and_parts() -> None:
    """Cutting keeps the parts of a batch apart from samples."""
    images, labels = slice_rows([torch.arange(4).view(2, 2), torch.arange(2)], slice(1, 2))
    assert (images.tolist(), labels.tolist()) == ([[2, 3]], [1])


def test_uncuttable_batch_refused() -> None:
    """What cannot be cut is reported."""
    with pytest.raises(ValueError, match="a batch of 4 samples is to be cut .* holds a Tensor of length 7, .* slice_fn_for_dispatch"):
        slice_rows({"features": torch.ones(4), "links": torch.ones(7)}, slice(0, 2))


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), world=st.integers(1, 4))
def test_ready_made_batches_cut(sizes: list[int], world: int) -> None:
    """Ready made batches are cut without loss."""
    batches = [torch.arange(size) + 10 * number for number, size in enumerate(sizes)]
    pieces = [list(ItemSplitPlan(world, lambda item: item).pieces(iter(batches), rank)) for rank in range(world)]
    for number, batch in enumerate(batches):
        _, shares, end = pieces[0][number]
        real = [len(batch) // world] * world if shares is None else shares.real
        kept = [row for rank in range(world) for row in pieces[rank][number][0].tolist()[: real[rank]]]
        assert kept == batch.tolist()
        assert end == (number == len(batches) - 1)
