"""The order is a function of (seed, epoch), the same for any number of ranks, and the user's random states are where they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy
import pytest
import torch
from data_twin import keep, prepared, ranks_of, real_samples, rounds
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from slipstream.data.permutation import Permutation
from slipstream.data.random_state import derive_seed
from slipstream.devices import rng
from slipstream.errors import ConfigError


class GloballyShuffled(Sampler[int]):
    """Draws from all three global states, one sample at a time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield (random.randrange(1000) + int(numpy.random.randint(1000)) + int(torch.randint(1000, ()))) % self.length

    def __len__(self) -> int:
        return self.length


class WithGenerator(Sampler[int]):
    """A sampler of the user's own that follows torch's habit of a generator."""

    def __init__(self, length: int, generator: Any = None) -> None:
        self.length = length
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, (), generator=self.generator))


class TokenBudget(Sampler[list[int]]):
    """Batches of sizes of their own."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for sample in self.sampler:
            batch.append(sample)
            if sum(batch) > 20 or len(batch) == 4:
                yield batch
                batch = []
        if batch:
            yield batch


DATA = list(range(17))
WEIGHTS = [float(sample % 5) + 0.1 for sample in DATA]
SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(DATA),
    "random": lambda: RandomSampler(DATA),
    "random with generator": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(3)),
    "replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=40),
    "several times": lambda: RandomSampler(DATA, num_samples=40),
    "subset": lambda: SubsetRandomSampler(DATA[::2]),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 21),
    "list": lambda: DATA[::-1],
    "global": lambda: GloballyShuffled(17),
    "with generator": lambda: WithGenerator(17),
    "with its own generator": lambda: WithGenerator(17, torch.Generator().manual_seed(3)),
}


def loader_of(sampler: Any, size: int = 2) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=size, sampler=sampler, collate_fn=keep)


def epochs(make: Callable[[], Any], world: int, size: int, number: int = 2, **options: Any) -> list[list[Any]]:
    loaders = ranks_of(lambda: loader_of(make(), size), world, **options)
    return [[real_samples(batches, shares) for batches, shares in rounds(loaders)] for _ in range(number)]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_global_batches_independent_of_ranks(kind: str) -> None:
    """The global batches do not depend on the number of ranks."""
    make = SAMPLERS[kind]
    epoch = epochs(make, 1, 12)
    random.seed(99)  # and not on the script's own random state
    torch.manual_seed(99)
    assert epoch == epochs(make, 2, 6) == epochs(make, 3, 4) == epochs(make, 4, 3, even_batches=False)
    assert kind in ("sequential", "list") or epoch[0] != epoch[1], "every epoch has its own order"


@pytest.mark.parametrize("kind", SAMPLERS)
def test_user_random_state_untouched(kind: str) -> None:
    """Random states of the user are left alone."""
    sampler = SAMPLERS[kind]()
    own = getattr(sampler, "generator", None)
    before, generator_before = rng.fingerprint(), None if own is None else own.get_state()
    loader = prepared(loader_of(sampler), 1, 2)
    for _ in loader:
        assert rng.fingerprint() == before
    assert next(iter(loader)) is not None
    assert rng.fingerprint() == before
    assert getattr(sampler, "generator", None) is own
    assert own is None or torch.equal(own.get_state(), generator_before)


def test_shuffle_is_computed() -> None:
    """A shuffled order is the permutation whose key is made of seed and epoch."""
    loader = prepared(loader_of(RandomSampler(DATA)), seed=5)
    for epoch in range(2):
        permutation = Permutation(len(DATA), derive_seed(5, epoch, "order"))
        assert sum(loader, []) == permutation.look_up(numpy.arange(len(DATA), dtype=numpy.uint64))


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_seed_and_epoch_mixed(seed: int, epoch: int, other: int) -> None:
    """Seed and epoch are mixed and not added."""
    assert (derive_seed(seed, epoch) == derive_seed(seed, other)) == (epoch == other)
    assert derive_seed(seed + 1, epoch) != derive_seed(seed, epoch + 1)


def test_another_seed_is_another_order() -> None:
    make = SAMPLERS["random"]
    assert epochs(make, 1, 4, seed=1) != epochs(make, 1, 4, seed=2)


class Endless(Sampler[int]):
    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for number in count():
            self.drawn += 1
            yield (number + random.randrange(17)) % 17


def test_endless_sampler_one_batch_ahead() -> None:
    """Endless samplers are drawn one batch ahead and no further."""
    samplers = [Endless() for _ in range(2)]
    loaders = [prepared(loader_of(sampler), rank, 2) for rank, sampler in enumerate(samplers)]
    single = prepared(loader_of(Endless(), size=4))
    for number, (first, second, both) in enumerate(islice(zip(*loaders, single, strict=True), 20)):
        assert first + second == both
        assert [sampler.drawn for sampler in samplers] == [4 * (number + 2)] * 2
        assert loaders[0].current.left is None
        assert not loaders[0].end_of_dataloader
    with pytest.raises(TypeError):
        len(loaders[0])


def test_sampler_with_wrong_length() -> None:
    """A sampler that promises a wrong length ends where it ends."""

    class Boasting(GloballyShuffled):
        def __len__(self) -> int:
            return self.length + 8

    loader = prepared(loader_of(Boasting(10)))
    told = [(loader.current.left, loader.end_of_dataloader) for _ in loader]
    assert told == [(8, False), (7, False), (6, False), (5, False), (0, True)]


def test_listed_order_counts_batches_left() -> None:
    """An order that a sampler has in whole tells how many batches are left."""

    class AtOnce(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(DATA, 10))

    make: Callable[[], Any] = AtOnce
    assert epochs(make, 1, 4) == epochs(make, 2, 2)
    loader = prepared(loader_of(AtOnce()))
    assert [loader.current.left for _ in loader] == [4, 3, 2, 1, 0]


def test_user_batch_sampler_same_everywhere() -> None:
    """Batch samplers of the user's own draw the same on every rank."""

    def make() -> DataLoader[Any]:
        return DataLoader(DATA, batch_sampler=TokenBudget(RandomSampler(DATA)), collate_fn=keep)

    single = prepared(make())
    for world in (2, 3):
        loaders = ranks_of(make, world)
        single.set_epoch(0)
        for _ in range(2):
            dealt = [batch for batches, shares in rounds(loaders) for batch, real in
                     zip(batches, shares.real if shares else [1] * world, strict=True) if real]  # fmt: skip
            assert dealt == list(single)


def test_set_epoch_is_called() -> None:
    """The epoch is told to those that want to know it."""

    class Counting(Sampler[int]):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

        def __len__(self) -> int:
            return 4

    class Data(list[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data, sampler = Data(DATA), Counting()
    loader = prepared(DataLoader(data, batch_size=2, sampler=sampler))
    list(loader)
    next(iter(loader))
    loader.set_epoch(7)
    list(loader)
    assert sampler.epochs == [0, 1, 7]
    assert data.epoch == 7


@pytest.mark.parametrize("within", [False, True])
def test_a_distributed_sampler_is_refused(within: bool) -> None:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0)
    batches = BatchSampler(sampler, 2, False)
    loader = DataLoader(DATA, batch_sampler=batches) if within else DataLoader(DATA, sampler=sampler)
    with pytest.raises(ConfigError, match="a part of a part.*shuffle=True"):
        prepared(loader)


@pytest.mark.parametrize("replacement", [False, True])
def test_nothing_to_draw(replacement: bool) -> None:
    """Samples to be drawn of an empty dataset are an error that says so."""
    sampler = RandomSampler([], replacement=replacement, num_samples=5)
    with pytest.raises(ConfigError, match="num_samples=5.* over a list without samples"):
        list(prepared(loader_of(sampler)))


class Reusing(Sampler[list[int]]):
    """Fills the same list again."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for position in range(9):
            batch.append(position)
            if len(batch) == 2:
                yield batch
                batch.clear()
        yield batch


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("split", [False, True])
def test_batch_sampler_reuses_list(world: int, split: bool) -> None:
    """A batch sampler may fill its list again."""
    loaders = ranks_of(lambda: DataLoader(range(9), batch_sampler=Reusing(), collate_fn=keep), world, split_batches=split)
    assert sum((real_samples(*entry) for entry in rounds(loaders)), []) == list(range(9))


@pytest.mark.parametrize("kind", [numpy.array, torch.tensor, list])
@pytest.mark.parametrize("split", [False, True])
def test_array_batches_of_positions(kind: Any, split: bool) -> None:
    """Batches of positions may be arrays."""

    def make() -> DataLoader[Any]:
        return DataLoader(range(7), batch_sampler=[kind([0, 1, 2, 3]), kind([4, 5, 6])], collate_fn=keep)  # type: ignore[list-item]

    read = [real_samples(*entry) for entry in rounds(ranks_of(make, 2, split_batches=split))]
    assert [[int(position) for position in batch] for batch in read] == ([[0, 1, 2, 3], [4, 5, 6]] if split else [list(range(7))])
