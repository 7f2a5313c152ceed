"""`effective_batch_size`: the batch of the textbook, on any number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from data_twin import keep, prepared, ranks_of, real_samples, rounds
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from slipstream.data.plan import split_effective_batch
from slipstream.errors import ConfigError


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_largest_even_size(effective: int, most: int, world: int) -> None:
    """The largest size that fits and comes out even is taken."""
    if effective % world:
        with pytest.raises(ConfigError, match=f"effective_batch_size={effective} cannot be shared evenly"):
            split_effective_batch(effective, most, world)
        return
    each, steps = split_effective_batch(effective, most, world)
    assert each * steps * world == effective
    assert 1 <= each <= most
    assert not any(effective % (larger * world) == 0 for larger in range(each + 1, most + 1))


def test_errors_name_what_would_work() -> None:
    with pytest.raises(ConfigError, match="effective_batch_size=9 or 12"):
        split_effective_batch(10, 4, 3)
    with pytest.raises(ConfigError, match="effective_batch_size=3,"):
        split_effective_batch(2, 4, 3)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        prepared(DataLoader(range(4), batch_size=None), effective_batch_size=4)
    with pytest.raises(ConfigError, match="batch sampler of its own"):
        prepared(DataLoader(range(4), batch_sampler=[[0], [1]]), effective_batch_size=4)
    for wrong in (0, True, 2.5):
        with pytest.raises(ConfigError, match="whole number of samples"):
            split_effective_batch(wrong, 4, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [False, True])
def test_updates_independent_of_world_size(split: bool) -> None:
    """Updates are of the same samples on any number of processes."""

    def updates(world: int, size: int) -> list[list[Any]]:
        loaders = ranks_of(
            lambda: DataLoader(range(50), batch_size=size, shuffle=True, collate_fn=keep),
            world,
            effective_batch_size=12,
            split_batches=split,
        )
        steps = loaders[0].steps_per_update
        assert steps is not None
        assert loaders[0].total_batch_size * steps == 12
        batches = [real_samples(*entry) for entry in rounds(loaders)]
        return [sorted(sum(batches[start : start + steps], [])) for start in range(0, len(batches), steps)]

    expected = updates(1, 12)
    for world in (1, 2, 3, 4):
        for size in (4, 5, 12, 100):
            assert updates(world, size) == expected


def test_torch_batch_sampler_has_size() -> None:
    """A batch sampler of torch given by hand has a size."""
    loader = prepared(DataLoader(range(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, False)), effective_batch_size=4)
    assert (loader.batch_size, loader.steps_per_update) == (2, 2)
    assert prepared(DataLoader(range(8))).steps_per_update is None


class Numbers(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


def drawn(length: int) -> Iterator[int]:
    yield from range(length)


class Lazy(Sampler[int]):
    """A sampler whose order is drawn while it is read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return drawn(self.length)

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("length", [100, 96, 23, 0])
@pytest.mark.parametrize("kind", ["known", "drawn", "stream"])
def test_drop_last_drops_short_updates(kind: str, length: int) -> None:
    """With drop last short updates are dropped on any number of processes."""
    whole = length - length % 24

    def make() -> DataLoader[Any]:
        data: Any = Numbers(length) if kind == "stream" else range(length)
        sampler = Lazy(length) if kind == "drawn" else None
        return DataLoader(data, batch_size=5, drop_last=True, sampler=sampler, collate_fn=keep)

    for world in (1,) if kind == "stream" else (1, 2, 3):
        loaders = ranks_of(make, world, effective_batch_size=24)
        read = [(real_samples(*entry), loaders[0].end_of_dataloader) for entry in rounds(loaders)]
        assert sum((batch for batch, _ in read), []) == list(range(whole))
        assert [len(loader) for loader in loaders] == [len(read)] * world
        assert [end for _, end in read] == [False] * (len(read) - 1) + [True] * bool(read)
        assert len(read) * loaders[0].total_batch_size == whole


@pytest.mark.parametrize("stream", [False, True])
def test_rank_0_drops_short_updates_too(stream: bool) -> None:
    data: Any = Numbers(100) if stream else range(100)
    loader = DataLoader(data, batch_size=5, drop_last=True, collate_fn=keep)
    built = prepared(loader, effective_batch_size=24, dispatch_batches=True)
    assert len(built) == 24
    assert sum(built, []) == list(range(96))
    built = prepared(loader, effective_batch_size=24, dispatch_batches=True)
    built.load_state_dict({"epoch": 0, "batches": 3, "samples": 12, "seed": 7}, resume=True)
    assert sum(built, []) == list(range(12, 96))


def test_tiny_batch_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A batch that becomes tiny is reported with a number that keeps it."""
    assert split_effective_batch(62, 30, 2) == (1, 31)
    assert "effective_batch_size=60 keeps batches of 30" in caplog.text
    caplog.clear()
    assert split_effective_batch(64, 24, 2) == (16, 2)
    assert split_effective_batch(64, 1000, 2) == (32, 1)
    assert not caplog.text
