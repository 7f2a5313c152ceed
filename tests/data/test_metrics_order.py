"""Results of all ranks come back in dataset order, each sample once: of one batch, and of a whole pass."""

from __future__ import annotations

from typing import Any

import pytest
from data_twin import keep, ranks_of, rounds
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader

from slipstream.data.metrics import make_batch_order, make_pass_order


def joined(arrange: Any, parts: list[list[Any]]) -> list[Any]:
    together = sum(parts, [])
    order = None if arrange is None else arrange.order([len(part) for part in parts])
    return together if order is None else [together[position] for position in order]


kinds = st.sampled_from(["size", "none", "batches"])


def loader_of(kind: str, length: int, size: int, drop_last: bool) -> DataLoader[Any]:
    if kind == "none":
        return DataLoader(range(length), batch_size=None, collate_fn=lambda sample: [sample])
    if kind == "batches":
        bounds = sorted({*range(0, length, size), length, length // 2})  # one that is smaller in the middle, and maybe the last
        batches = [list(range(start, stop)) for start, stop in zip(bounds, bounds[1:], strict=False)]
        return DataLoader(range(length), batch_sampler=batches, collate_fn=keep)
    return DataLoader(range(length), batch_size=size, drop_last=drop_last, collate_fn=keep)


@given(kinds, st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_sample_once_in_order(kind: str, length: int, size: int, world: int, drop_last: bool, even: bool) -> None:
    """Every sample comes back once and in order."""
    drop_last = drop_last and kind == "size"
    loaders: list[Any] = ranks_of(lambda: loader_of(kind, length, size, drop_last), world, even_batches=even)
    kept: list[list[list[Any]]] = [[] for _ in loaders]
    seen: list[Any] = []
    for batches, _ in rounds(loaders):
        for rank, batch in enumerate(batches):
            kept[rank].append(batch)
        arranges = [make_batch_order(loader) for loader in loaders]
        assert len({None if arrange is None else arrange.total for arrange in arranges}) == 1, "every rank knows the same"
        seen += joined(arranges[0], list(batches))
    expected = list(range(length - length % (size * world))) if drop_last else list(range(length))
    assert seen == expected
    whole = make_pass_order(loaders[-1])
    assert joined(whole, [sum(rank, []) for rank in kept]) == expected
    if whole is not None:
        twice = [[(sample, row) for batch in rank for sample in batch for row in range(2)] for rank in kept]
        assert joined(whole, twice) == sum(twice, []), "twice as many rows may be those of another loader"
        assert whole.total == len(expected)


def test_other_values_left_alone() -> None:
    """Values that are not of samples are left alone."""
    loaders = ranks_of(lambda: loader_of("size", 9, 2, False), 3, even_batches=True)
    for _ in rounds(loaders):
        pass
    arrange = make_batch_order(loaders[0])
    assert arrange is not None
    assert loaders[0].shares is not None
    assert loaders[0].shares.given == (2, 2, 2)
    assert arrange.order([2, 2, 2]) == [0, 1, 2]
    assert arrange.order([4, 4, 4]) == [0, 1, 2, 3, 4, 5]
    for other in ([1, 1, 1], [2, 2, 1], [3, 3, 3], [0, 0, 0], [2, 2]):
        assert arrange.order(other) is None


def test_full_batches_keep_their_order() -> None:
    """Full batches and a single process need no arranging."""
    for world, length in ((1, 9), (3, 12)):
        loaders = ranks_of(lambda: loader_of("size", length, 2, False), world)  # noqa: B023
        for batches, _ in rounds(loaders):
            counts = [len(batch) for batch in batches]
            arrange = make_batch_order(loaders[0])
            assert arrange is None or arrange.order(counts) == list(range(sum(counts)))
    assert make_batch_order(None) is None
    assert make_pass_order(None) is None


def test_left_pass_keeps_earlier_order() -> None:
    """A pass that was left has no arrangement and does not forget the one before."""
    loader = ranks_of(lambda: loader_of("size", 9, 2, False), 2)[0]
    assert make_pass_order(loader) is None
    list(loader)
    before = make_pass_order(loader)
    assert before is not None
    for _ in loader:
        break
    after = make_pass_order(loader)
    assert after is not None
    assert after.total == before.total == 9


@pytest.mark.parametrize("even", [True, False])
def test_order_of_skipped_pass(even: bool) -> None:
    """A pass that skipped has an arrangement of the rest."""
    loaders = [rank.skipping(1) for rank in ranks_of(lambda: loader_of("size", 11, 2, False), 2, even_batches=even)]
    kept = [[sample for batch in loader for sample in batch] for loader in loaders]
    assert joined(make_pass_order(loaders[0]), kept) == list(range(4, 11))
