"""Skipping seeks: it starts later in the present epoch, once, and reads nothing to get there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data_twin import keep, prepared, ranks_of, real_samples, rounds
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from slipstream.data.prepare import skip_first_batches
from slipstream.distributed.gradient_state import GradientState
from slipstream.errors import ConfigError


class Counted(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __getitem__(self, position: int) -> int:
        self.read.append(position)
        return position

    def __len__(self) -> int:
        return self.length


class Unsized(Sampler[int]):
    """Neither its length nor its order is known beforehand."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield random.randrange(self.length)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 8), st.sampled_from(["shuffle", "drawn", "batches"]))
@settings(max_examples=100, deadline=None)
def test_prepared_loader_starts_later(length: int, size: int, world: int, skipped: int, kind: str) -> None:
    """A prepared loader starts later and reads nothing before."""
    data = Counted(length)

    def make() -> DataLoader[Any]:
        if kind == "batches":
            batches = [list(range(start, min(start + size, length))) for start in range(0, length, size)]
            return DataLoader(data, batch_sampler=batches, collate_fn=keep)
        how: dict[str, Any] = {"shuffle": True} if kind == "shuffle" else {"sampler": Unsized(length)}
        return DataLoader(data, batch_size=size, collate_fn=keep, **how)

    twins, loaders = ranks_of(make, world), ranks_of(make, world)
    epochs = [[real_samples(*entry) for entry in rounds(twins)] for _ in range(3)]
    later = [skip_first_batches(loader, skipped) for loader in loaders]
    data.read.clear()
    batches = list(rounds(later))
    assert [real_samples(*batch) for batch in batches] == epochs[0][skipped:]
    assert data.read == [sample for together, _ in batches for batch in together for sample in batch]
    assert [real_samples(*entry) for entry in rounds(loaders)] == epochs[1], "both count the same epochs"
    assert [real_samples(*entry) for entry in rounds(later)] == epochs[2], "it skips once"


def test_length_of_skipping_loader() -> None:
    """The length is what is left until the first pass is over."""
    loader = skip_first_batches(prepared(DataLoader(range(10), batch_size=2)), 3)
    assert len(loader) == 2
    assert [loader.current.left for _ in loader] == [1, 0]
    assert len(loader) == 5


def test_set_epoch_and_position_shared() -> None:
    """Set epoch and position go for both."""
    loader = prepared(DataLoader(range(10), batch_size=2, shuffle=True, collate_fn=keep))
    epochs = [list(loader) for _ in range(4)]
    later = skip_first_batches(loader, 2)
    later.set_epoch(2)
    for number, batch in enumerate(later):
        assert batch == epochs[2][2 + number]
        state = loader.state_dict()
        assert [state[name] for name in ("epoch", "batches", "samples", "seed", "left")] == [2, 3 + number, 6 + 2 * number, 7, 0]
    assert list(loader) == epochs[3]


def test_present_epoch_of_skip() -> None:
    """The epoch that was left or is being read is the present one."""
    loader = prepared(DataLoader(range(10), batch_size=2, shuffle=True, collate_fn=keep))
    epochs = [list(loader) for _ in range(3)]
    loader.set_epoch(0)
    for number, _ in enumerate(loader, 1):
        if number == 3:
            assert list(skip_first_batches(loader, 1)) == epochs[0][1:], "inside of a loop"
            break
    assert list(skip_first_batches(loader, 3)) == epochs[0][3:], "after a break"
    assert list(loader) == epochs[1]
    assert list(skip_first_batches(loader, 3)) == epochs[2][3:], "that epoch was over"


def test_position_saved_after_break() -> None:
    """A position saved after a break continues where it was left with skipping and with the next epoch without."""

    def make() -> Any:
        return prepared(DataLoader(range(10), batch_size=2, shuffle=True, collate_fn=keep))

    loader = make()
    epochs = [list(loader) for _ in range(3)]
    loader.set_epoch(1)
    for number, _ in enumerate(loader, 1):
        if number == 2:
            break
    state = loader.state_dict()
    again, skipping = make(), make()
    again.load_state_dict(state)
    assert list(again) == epochs[2]
    skipping.load_state_dict(state)
    assert list(skip_first_batches(skipping, 2)) == epochs[1][2:]
    assert list(skipping) == epochs[2]


def test_gradient_state_of_skipping_loader() -> None:
    """The gradient state is told of a loader that skips."""
    state = GradientState()
    later = skip_first_batches(prepared(DataLoader(range(10), batch_size=2), gradient_state=state), 4)
    for _ in later:
        assert state.active is later
        assert state.end_of_dataloader
    assert state.metrics.finished is later


@pytest.mark.parametrize("skipped", [5, 6, 100])
def test_skip_whole_epoch(skipped: int) -> None:
    """Skipping an epoch or more is an empty pass."""
    for loader in (DataLoader(range(10), batch_size=2), prepared(DataLoader(range(10), batch_size=2))):
        later = skip_first_batches(loader, skipped)
        assert len(later) == 0
        assert list(later) == []
        assert len(list(later)) == 5


@pytest.mark.parametrize("number", [-1, True, 1.5])
def test_invalid_skip_refused(number: Any) -> None:
    """What cannot be skipped is refused."""
    with pytest.raises(ConfigError, match="whole number from 0"):
        skip_first_batches(DataLoader(range(10)), number)
    with pytest.raises(ConfigError, match="islice"):
        skip_first_batches(iter([1, 2]), 1)  # type: ignore[arg-type]


# -- plain loaders ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["size", "none", "sampler"])
def test_plain_loader_seeks(kind: str) -> None:
    """A plain loader seeks in the order of its own."""
    data = Counted(9)
    options: dict[str, dict[str, Any]] = {
        "size": {"batch_size": 2, "shuffle": True},
        "none": {"batch_size": None, "shuffle": True},
        "sampler": {"batch_sampler": [[0, 1], [2], [3, 4, 5], [6]]},
    }
    loader = DataLoader(data, **options[kind])
    torch.manual_seed(3)
    whole = [list(loader), list(loader)]
    later = skip_first_batches(loader, 2)
    data.read.clear()
    torch.manual_seed(3)
    assert len(later) == len(loader) - 2
    first = list(later)
    assert data.read
    assert len(data.read) == sum(torch.as_tensor(batch).numel() for batch in first), "what is skipped is not read"
    again = [first, list(later)]
    assert [[torch.as_tensor(batch).tolist() for batch in entry] for entry in again] == [
        [torch.as_tensor(batch).tolist() for batch in entry] for entry in (whole[0][2:], whole[1])
    ]
    assert type(skip_first_batches(loader)) is DataLoader


class Stream(IterableDataset[int]):
    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for sample in range(self.start, 10):
            self.read += 1
            yield sample


class Seeking(Stream):
    def skip(self, number: int) -> Seeking:
        return Seeking(self.start + number)


def test_plain_stream_skips_or_reads(caplog: pytest.LogCaptureFixture) -> None:
    """A plain stream is asked to skip or read with a word about it."""
    for stream, words in ((Seeking(), ""), (Stream(), "reads 3 batches to skip them: Stream has no skip(n)")):
        caplog.clear()
        later = skip_first_batches(DataLoader(stream, batch_size=2, collate_fn=keep), 3)
        assert isinstance(later, DataLoader)
        assert list(later) == [[6, 7], [8, 9]]
        assert stream.read == (10 if words else 0)
        assert words in caplog.text
        assert bool(caplog.text) == bool(words)
        assert len(list(later)) == 5


def test_skipping_twice_adds_up() -> None:
    assert list(skip_first_batches(skip_first_batches(prepared(DataLoader(range(10), batch_size=2, collate_fn=keep)), 1), 2)) == [
        [6, 7],
        [8, 9],
    ]
