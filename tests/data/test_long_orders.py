"""The start of a pass and a place in the middle cost the same for 10^9 samples as for 10^4: nothing of that length is made."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from data_twin import keep, prepared
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, SubsetRandomSampler

from slipstream.data.fingerprint import describe_loader, digest_selection_and_samples
from slipstream.data.loader import PreparedLoader
from slipstream.data.prepare import skip_first_batches

LONG = range(10**9)
BATCH = 32
LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(LONG, batch_size=BATCH, collate_fn=keep),
    "shuffled": lambda: DataLoader(LONG, batch_size=BATCH, shuffle=True, collate_fn=keep),
    "dropping the last": lambda: DataLoader(LONG, batch_size=BATCH, shuffle=True, drop_last=True, collate_fn=keep),
    "batch sampler": lambda: DataLoader(LONG, batch_sampler=BatchSampler(RandomSampler(LONG), BATCH, False), collate_fn=keep),
    "without batches": lambda: DataLoader(LONG, batch_size=None, shuffle=True),
    "replacement": lambda: DataLoader(LONG, batch_size=BATCH, sampler=RandomSampler(LONG, replacement=True), collate_fn=keep),
    "some": lambda: DataLoader(LONG, batch_size=BATCH, sampler=RandomSampler(LONG, num_samples=10**9 // 3), collate_fn=keep),
    "several rounds": lambda: DataLoader(LONG, batch_size=BATCH, sampler=RandomSampler(LONG, num_samples=10**10), collate_fn=keep),
    "selected": lambda: DataLoader(LONG, batch_size=BATCH, sampler=SubsetRandomSampler(LONG), collate_fn=keep),
    "subset": lambda: DataLoader(Subset(LONG, LONG), batch_size=BATCH, shuffle=True, collate_fn=keep),
}
MOST = 4 * 2**20
"""Bytes: an order of 10^9 numbers would have 8 * 10^9."""


def peak_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """Return the most memory that a call held at once, and its result."""
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def first_batch(loader: Any) -> Any:
    return next(iter(loader))


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=["own part", "dispatched"])
@pytest.mark.parametrize("kind", LOADERS)
def test_nothing_of_the_length_is_made(kind: str, options: dict[str, Any]) -> None:
    """Preparing, the first batch, skipping to the middle, resuming there and the receipt need no memory that grows with the data."""
    make = lambda: prepared(LOADERS[kind](), **options)  # noqa: E731

    def begin_and_skip() -> tuple[PreparedLoader, Any, Any]:
        loader = make()
        first = first_batch(loader)
        middle = len(loader) // 2
        skipped = first_batch(skip_first_batches(make(), middle))
        position = {**loader.state_dict(), "epoch": 0, "batches": middle, "samples": middle * loader._stride}
        resumed = make()
        resumed.load_state_dict(position)
        assert first_batch(resumed) == skipped != first
        assert describe_loader(loader)["order"]
        digest_selection_and_samples(loader.original.dataset)
        return loader, first, skipped

    peak, (loader, first, _) = peak_of(begin_and_skip)
    assert peak < MOST
    loader.set_epoch(0)
    assert first_batch(loader) == first


@pytest.mark.parametrize("world", [1, 3])
def test_last_batch_of_a_long_order(world: int) -> None:
    """The end of an order is found as quickly: the last batches of all ranks are what one process reads there."""
    loaders = [prepared(DataLoader(LONG, batch_size=60 // world, shuffle=True, collate_fn=keep), rank, world) for rank in range(world)]
    ends = [list(skip_first_batches(loader, len(loader) - 2)) for loader in loaders]
    assert [len(batches) for batches in ends] == [2] * world
    alone = prepared(DataLoader(LONG, batch_size=60, shuffle=True, collate_fn=keep))
    expected = list(skip_first_batches(alone, len(alone) - 2))
    assert sum((batches[0] for batches in ends), []) == expected[0]
    assert sum((batches[1] for batches in ends), [])[: len(expected[1])] == expected[1]
    assert len(expected[1]) == 10**9 % 60


def test_ranks_compute_their_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank computes as many positions as it reads, on any number of ranks, in blocks."""
    from slipstream.data.permutation import Permutation

    computed: list[int] = []
    compute = Permutation.samples_at
    monkeypatch.setattr(Permutation, "samples_at", lambda self, positions: computed.append(positions.size) or compute(self, positions))
    loader = prepared(DataLoader(range(10**6), batch_size=10, shuffle=True, collate_fn=keep), 3, 100)
    assert sum(len(batch) for batch in loader) == 10**4
    whole = [size for size in computed if size > 100]  # besides those that walked once more
    assert sum(whole) == 10**4
    assert len(whole) == 3, "of up to 4096 positions"
