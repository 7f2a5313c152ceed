"""Orders of both versions: a run that began with the first keeps it, bit for bit, and new runs have the second."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from data_twin import keep, prepared, ranks_of, real_samples, rounds
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from slipstream.data.fingerprint import describe_loader
from slipstream.data.loader import PreparedLoader

DATA = list(range(23))
STATE = {"epoch": 0, "batches": 2, "samples": 6, "left": 0, "ended": 0, "seed": 5, "kind": "samples", "batch": 3}
"""As positions were saved before orders had a version."""

# The sampler, how many samples it gives, and what followed that position in its epoch and the next one. Recorded with torch 2.13.
RECORDED: dict[str, tuple[Callable[[], Any], int, str]] = {
    "random": (
        lambda: RandomSampler(DATA),
        23,
        "4 1 19 16 3 8 20 18 15 10 13 14 22 9 7 17 0 1 17 2 3 11 12 4 9 10 6 8 21 18 0 22 20 5 7 19 15 13 16 14",
    ),
    "several": (
        lambda: RandomSampler(DATA, num_samples=40),
        40,
        "4 1 19 16 3 8 20 18 15 10 13 14 22 9 7 17 0 4 6 0 10 11 21 7 20 1 9 12 15 17 5 16 18 13 1 17 2 3 11 12 4 9 10 "
        "6 8 21 18 0 22 20 5 7 19 15 13 16 14 10 18 12 4 5 19 7 3 9 13 11 6 15 21 14 2 1",
    ),
    "fewer": (
        lambda: RandomSampler(DATA, num_samples=9),
        9,
        "4 1 19 1 17 2 3 11 12 4 9 10",
    ),
    "replacement": (
        lambda: RandomSampler(DATA, replacement=True, num_samples=30),
        30,
        "13 20 8 0 4 11 10 22 9 5 4 11 6 7 3 6 4 0 21 7 19 0 9 13 1 19 10 19 20 20 13 8 22 8 3 17 13 5 22 18 11 2 15 11 "
        "16 2 10 20 10 6 18 13 5 5",
    ),
    "subset": (
        lambda: SubsetRandomSampler(DATA[::2]),
        12,
        "18 8 2 6 0 22 2 12 6 8 16 10 20 4 0 22 18 14",
    ),
    "weighted": (
        lambda: WeightedRandomSampler([number % 5 + 0.1 for number in DATA], 21),
        21,
        "18 2 19 14 2 14 1 13 4 13 9 7 22 1 2 14 8 14 19 22 9 3 14 21 8 9 4 8 22 19 17 7 12 8 6 6",
    ),
}


def loader_of(sampler: Any, size: int = 3) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=size, sampler=sampler, collate_fn=keep)


def recorded(kind: str) -> tuple[Callable[[], Any], int, list[int]]:
    make, length, rest = RECORDED[kind]
    return make, length, [int(sample) for sample in rest.split()]


def two_epochs(loader: PreparedLoader) -> list[int]:
    return [sample for _ in range(2) for batch in loader for sample in batch]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", RECORDED)
def test_first_version_is_kept(kind: str, dispatch: bool) -> None:
    """A position without a version continues in the order of the first, in its epoch and in later ones."""
    make, length, rest = recorded(kind)
    options = {"dispatch_batches": True} if dispatch else {}
    loader = prepared(loader_of(make()), **options)
    loader.load_state_dict({**STATE, "length": length})
    assert loader.state_dict()["order_version"] == 1
    copied = copy.deepcopy(loader)
    assert two_epochs(loader) == two_epochs(copied) == rest
    saved = loader.state_dict()
    assert saved["order_version"] == 1
    again = prepared(loader_of(make()), **options)
    again.load_state_dict(saved)
    assert list(again) == list(loader), "and in a run that resumes the resumed one"


@pytest.mark.parametrize("kind", RECORDED)
def test_first_version_on_other_worlds(kind: str) -> None:
    """The first version is the same on any number of ranks, too."""
    make, length, rest = recorded(kind)
    loaders = ranks_of(lambda: loader_of(make(), 1), 3)
    for loader in loaders:
        loader.load_state_dict({**STATE, "length": length})
    assert [sample for _ in range(2) for batches, shares in rounds(loaders) for sample in real_samples(batches, shares)] == rest


@pytest.mark.parametrize("kind", RECORDED)
def test_new_runs_have_the_second_version(kind: str) -> None:
    """A new run computes its order; what a sampler draws is drawn as before, and receipts tell the versions apart where they differ."""
    make, length, rest = recorded(kind)
    loader = prepared(loader_of(make()), seed=5)
    drawn = kind == "weighted"
    old = prepared(loader_of(make()), seed=5)
    old.load_state_dict({**STATE, "length": length})
    assert (describe_loader(loader)["order"] == describe_loader(old)["order"]) == drawn
    assert loader.state_dict()["order_version"] == 2
    assert (two_epochs(loader)[6:] == rest) == drawn


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "random": lambda length: RandomSampler(range(length)),
    "several": lambda length: RandomSampler(range(length), num_samples=length + 5),
    "fewer": lambda length: RandomSampler(range(length), num_samples=max(1, length - 5)),
    "replacement": lambda length: RandomSampler(range(length), replacement=True),
    "subset": lambda length: SubsetRandomSampler(range(length)),
}


@given(st.sampled_from(sorted(SAMPLERS)), st.one_of(st.integers(1, 60), st.integers(4090, 4200)), st.integers(1, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_resumed_is_uninterrupted(kind: str, length: int, world: int, data: Any) -> None:
    """On any number of ranks the samples are those of one, also after a position was loaded on another number of them."""
    size = 12 if length < 100 else 1200
    make = lambda ranks: lambda: DataLoader(range(length), batch_size=size // ranks, sampler=SAMPLERS[kind](length), collate_fn=keep)  # noqa: E731
    alone = [batch for batch in prepared(make(1)())]
    loaders = ranks_of(make(world), world)
    assert [real_samples(batches, shares) for batches, shares in rounds(loaders)] == alone
    stop = data.draw(st.integers(0, len(alone) - 1))
    loader, state = prepared(make(1)()), None
    for number, _ in enumerate(loader):
        if number == stop:
            state = loader.state_dict()
    resumed = ranks_of(make(world), world)
    for other in resumed:
        other.load_state_dict(state or {})
    if stop < len(alone) - 1:
        assert [real_samples(batches, shares) for batches, shares in rounds(resumed)] == alone[stop + 1 :]
    else:
        assert [list(other) for other in resumed] == [[]] * world, "the rest of that epoch is nothing"
    assert [real_samples(batches, shares) for batches, shares in rounds(resumed)] == list(loader), "the next epoch"
