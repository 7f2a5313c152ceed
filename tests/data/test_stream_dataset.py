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
def test_rank_and_world_of_a_dataset_say_that_it_is_shared_out(names: tuple[str, str]) -> None:
    dataset = Stream(**dict(zip(names, (1, 2), strict=True)))
    answer = shard_dataset(dataset, 1, 2)
    assert answer.own
    assert answer.dataset is dataset
    assert answer.doubt == ""


def test_a_dataset_split_by_node_is_shared_out() -> None:
    answer = shard_dataset(Stream(_distributed=SimpleNamespace(rank=0, world_size=2)), 0, 2)
    assert answer.own
    assert "split by node" in answer.reason


@pytest.mark.parametrize("attributes", [{"rank": 0}, {"world_size": 2}, {"rank": 0, "world_size": 1}, {"rank": "x", "world_size": 2}, {}])
def test_half_an_answer_is_none(attributes: dict[str, Any]) -> None:
    assert not shard_dataset(Stream(**attributes), 0, 2).own


def test_a_dataset_shared_out_for_others_is_doubted() -> None:
    assert "set up for rank 3 of 4, but this is rank 1 of 2" in shard_dataset(Stream(rank=3, world_size=4), 1, 2).doubt


@pytest.mark.parametrize("name", ["num_shards", "n_shards"])
def test_shards_are_given_to_the_ranks(name: str) -> None:
    shards = [[1, 2], [3], [4, 5, 6]]
    answers = [shard_dataset(Sharded(shards, name), rank, 2) for rank in range(2)]
    assert all(answer.own for answer in answers)
    assert [list(answer.dataset) for answer in answers] == [[1, 2, 4, 5, 6], [3]]


def test_too_few_shards_are_said_and_not_used() -> None:
    dataset = Sharded([[1, 2]])
    answer = shard_dataset(dataset, 0, 2)
    assert not answer.own
    assert answer.dataset is dataset
    assert "num_shards=1 for 2 processes" in answer.doubt


def test_a_dataset_can_split_itself_by_rank() -> None:
    answers = [shard_dataset(ByRank(range(5)), rank, 2) for rank in range(2)]
    assert [list(answer.dataset) for answer in answers] == [[0, 2, 4], [1, 3]]


def test_a_pipeline_with_a_sharding_filter_is_shared_out_after_its_shuffle() -> None:
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


def test_equal_items_have_equal_fingerprints_and_others_have_not() -> None:
    """Made anew each time, so addresses and identities differ, as they do between processes."""
    digests = [fingerprint([make()]) for make in VALUES]
    assert digests == [fingerprint([make()]) for make in VALUES]
    assert len(set(digests)) == len(VALUES)


def test_the_fingerprint_knows_where_items_end() -> None:
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint([]) != fingerprint([[]])


# -- random numbers ---------------------------------------------------------------------------------------------------


def draw() -> tuple[float, float, float, float]:
    return random.random(), float(numpy.random.rand()), float(numpy.random.randn()), float(torch.rand(()))


def test_numbers_inside_follow_the_seed_and_those_outside_are_as_if_nothing_was_drawn() -> None:
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


def test_the_states_come_back_when_reading_fails() -> None:
    before = random.getstate()
    with pytest.raises(IndexError), RandomStateScope(1):
        random.choice([random.random()][1:])
    assert random.getstate() == before


@pytest.mark.parametrize("drawing", [random.random, numpy.random.rand, lambda: torch.rand(())])
def test_it_knows_whether_numbers_were_drawn(drawing: Any) -> None:
    own = RandomStateScope(1)
    with own:
        pass
    assert not own.used
    with own:
        drawing()
    assert own.used


@pytest.mark.parametrize("careful", [False, True])
def test_items_in_blocks_are_all_the_items(careful: bool) -> None:
    for length in range(8):
        assert list(iterate_blocks(range(length), 3, RandomStateScope(1), careful=careful)) == list(range(length))


def test_a_shuffling_stream_is_read_with_numbers_of_the_readers_own() -> None:
    class Shuffling(Stream):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(20), 20))

    random.seed(1)
    before = random.getstate()
    first, second, third = (list(iterate_blocks(Shuffling(), 4, RandomStateScope(seed))) for seed in (5, 5, 6))
    assert first == second != third
    assert random.getstate() == before


# -- cutting ----------------------------------------------------------------------------------------------------------


def test_cutting_takes_samples_of_tensors_arrays_and_lists() -> None:
    ragged = [torch.arange(length) for length in (1, 2, 3, 4)]
    texts = ["a", "b", "c", "d"]
    batch = {"x": torch.arange(8).view(4, 2), "n": numpy.arange(4), "text": texts, "ragged": ragged, "scale": 0.5, "name": "abcd"}
    got = slice_rows(batch, slice(1, 3))
    assert got["x"].tolist() == [[2, 3], [4, 5]]
    assert got["n"].tolist() == [1, 2]
    assert got["text"] == ["b", "c"]
    assert [entry.tolist() for entry in got["ragged"]] == [[0, 1], [0, 1, 2]]
    assert (got["scale"], got["name"]) == (0.5, "abcd")


def test_cutting_keeps_the_parts_of_a_batch_apart_from_samples() -> None:
    images, labels = slice_rows([torch.arange(4).view(2, 2), torch.arange(2)], slice(1, 2))
    assert (images.tolist(), labels.tolist()) == ([[2, 3]], [1])


def test_what_cannot_be_cut_is_said() -> None:
    with pytest.raises(ValueError, match="a batch of 4 samples is to be cut .* holds a Tensor of length 7, .* slice_fn_for_dispatch"):
        slice_rows({"features": torch.ones(4), "links": torch.ones(7)}, slice(0, 2))


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), world=st.integers(1, 4))
def test_ready_made_batches_are_cut_without_loss(sizes: list[int], world: int) -> None:
    batches = [torch.arange(size) + 10 * number for number, size in enumerate(sizes)]
    pieces = [list(ItemSplitPlan(world, lambda item: item).pieces(iter(batches), rank)) for rank in range(world)]
    for number, batch in enumerate(batches):
        _, shares, end = pieces[0][number]
        real = [len(batch) // world] * world if shares is None else shares.real
        kept = [row for rank in range(world) for row in pieces[rank][number][0].tolist()[: real[rank]]]
        assert kept == batch.tolist()
        assert end == (number == len(batches) - 1)
