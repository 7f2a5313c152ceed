"""The plan against a slow twin: the global batches of one process, and what the three policies make of the last one."""

from __future__ import annotations

import pytest
from data_twin import chunks
from hypothesis import given, settings, strategies as st

from slipstream.data.plan import BatchPlan, BatchSplitPlan, LastBatchPolicy, RoundRobinPlan, SampleOrder
from slipstream.distributed.gradient_state import BatchShares
from slipstream.errors import ConfigError


def spread(length: int) -> list[int]:
    return [(7 * position) % (10 * length + 1) + 100 for position in range(length)]


small = st.integers(min_value=0, max_value=40)
worlds = st.integers(min_value=1, max_value=5)


@given(small, worlds, st.integers(1, 6), st.sampled_from(["even", "exact"]), st.booleans(), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_plan_matches_one_process(
    length: int, world: int, each: int, policy: LastBatchPolicy, drop_last: bool, skipped: int
) -> None:
    """Ranks together read the batches of one process."""
    order = spread(length)
    plan = BatchPlan(world, world * each, policy, drop_last)
    start = skipped * plan.size
    expected = chunks(order[start:], plan.size, drop_last)
    told = [list(plan.pieces(iter(order), rank, start)) for rank in range(world)]
    known = [list(plan.iterate_listed(SampleOrder(order), rank, start)) for rank in range(world)]
    assert known == [[piece for piece, _, _ in rank] for rank in told], "both ways of reading agree"
    assert [len(rank) for rank in told] == [plan.count(max(0, length - start))] * world == [len(expected)] * world
    for number, (together, batch) in enumerate(zip(zip(*told, strict=True), expected, strict=True)):
        pieces, (shares, *same), ends = zip(*together, strict=True)
        assert all(entry == shares for entry in same)
        assert set(ends) == {number == len(expected) - 1}
        real = tuple(map(len, pieces)) if shares is None else shares.real
        assert [sample for piece, count in zip(pieces, real, strict=True) for sample in piece[:count]] == batch
        assert all(piece for piece in pieces), "every rank has something to do"
        if shares is None:
            assert real == (each,) * world
        else:
            assert shares.full == plan.size
            assert shares.given == tuple(map(len, pieces))
            assert shares.weighed == (policy == "exact")
            assert len(batch) < plan.size, "a full batch needs no telling"
            assert real == tuple(min(each, max(0, len(batch) - rank * each)) for rank in range(world)), "pieces as in a full batch"
        if policy == "even" and world > 1:
            assert [len(piece) for piece in pieces] == [each] * world


@given(small, worlds, st.integers(1, 6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_ragged_reads_every_sample_once(length: int, world: int, size: int, drop_last: bool) -> None:
    """Ragged ranks read every sample once and nothing else."""
    order = spread(length)
    plan = BatchPlan(world, size, "ragged", drop_last)
    told = [list(plan.pieces(iter(order), rank)) for rank in range(world)]
    listed = [list(plan.iterate_listed(SampleOrder(order), rank)) for rank in range(world)]
    assert listed == [[piece for piece, _, _ in rank] for rank in told]
    assert sorted(sample for rank in told for piece, _, _ in rank for sample in piece) == sorted(sum(chunks(order, size, drop_last), []))
    for rank, pieces in enumerate(told):
        assert [end for _, _, end in pieces] == [number == len(pieces) - 1 for number in range(len(pieces))]
        assert len(pieces) == plan.count(length, rank)


@given(small, st.integers(1, 3), st.sampled_from(["even", "exact"]))
@settings(max_examples=100, deadline=None)
def test_same_global_batches_any_ranks(length: int, each: int, policy: LastBatchPolicy) -> None:
    """The global batches are the same on any number of ranks."""
    order = spread(length)

    def read(world: int) -> list[list[int]]:
        plan = BatchPlan(world, 12 * each, policy)
        ranks = [list(plan.pieces(iter(order), rank)) for rank in range(world)]
        return [
            [sample for (piece, shares, _), rank in zip(together, range(world), strict=True)
             for sample in (piece if shares is None else piece[: shares.real[rank]])]
            for together in zip(*ranks, strict=True)
        ]  # fmt: skip

    assert read(1) == read(2) == read(3) == read(4)


def test_even_completes_from_start() -> None:
    """A short batch is completed from the start of the order."""
    plan = BatchPlan(3, 6, "even")
    assert [list(plan.iterate_listed(SampleOrder(list("abcdefgh")), rank)) for rank in range(3)] == [
        [["a", "b"], ["g", "h"]],
        [["c", "d"], ["a", "b"]],
        [["e", "f"], ["c", "d"]],
    ]
    assert plan.share_last_batch(2) == BatchShares((2, 2, 2), (2, 0, 0), False, 6)


def test_even_with_few_samples() -> None:
    """Completing goes round where there are fewer samples than that."""
    plan = BatchPlan(4, 8, "even")
    together = [list(plan.iterate_listed(SampleOrder(["a", "b", "c"]), rank)) for rank in range(4)]
    assert together == [[["a", "b"]], [["c", "a"]], [["b", "c"]], [["a", "b"]]]


def test_exact_shares() -> None:
    """A short batch is dealt out as a full one is; a rank without any is handed a batch that counts nothing."""
    plan = BatchPlan(4, 8, "exact")
    assert plan.share_last_batch(5) == BatchShares((2, 2, 1, 2), (2, 2, 1, 0), True, 8)
    assert plan.share_last_batch(2) == BatchShares((2, 2, 2, 2), (2, 0, 0, 0), True, 8)
    last = [list(plan.iterate_listed(SampleOrder(list("abcdefghi")), rank))[-1] for rank in range(4)]
    assert last == [["i"], ["a", "b"], ["a", "b"], ["a", "b"]]


def test_short_batch_on_one_process() -> None:
    """One process reads a short batch as it is."""
    assert BatchPlan(1, 4, "even").share_last_batch(3) == BatchShares((3,), (3,), False, 4)
    assert BatchPlan(1, 4, "exact").share_last_batch(3) == BatchShares((3,), (3,), True, 4)


def test_uneven_pieces_weighed() -> None:
    """Uneven pieces of full batches are weighed."""
    assert BatchPlan(2, 5, "exact").full == BatchShares((3, 2), (3, 2), True, 5)
    assert BatchPlan(4, 2, "exact").full == BatchShares((1, 1, 1, 1), (1, 1, 0, 0), True, 2)


@pytest.mark.parametrize(("size", "near"), [(10, "batch_size=8 or 12"), (3, "batch_size=4")])
def test_uneven_split_refused(size: int, near: str) -> None:
    """A batch that cannot be split evenly is refused with sizes that can."""
    with pytest.raises(ConfigError, match=near):
        BatchPlan(4, size, "even")


sizes = st.lists(st.integers(1, 4), max_size=14)


def batches_of(lengths: list[int]) -> list[list[int]]:
    return [[100 * number + position for position in range(length)] for number, length in enumerate(lengths)]


@given(sizes, worlds, st.sampled_from(["even", "exact", "ragged"]), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_round_robin(lengths: list[int], world: int, policy: LastBatchPolicy, skipped: int) -> None:
    """Dealt batches go round the ranks."""
    batches = batches_of(lengths)
    dealing = RoundRobinPlan(world, None, policy)
    told = [list(dealing.pieces(iter(batches), rank, skipped * world)) for rank in range(world)]
    rest = batches[skipped * world :]
    assert [len(rank) for rank in told] == [dealing.count(len(rest), rank) for rank in range(world)]
    for number, round_ in enumerate(chunks(rest, world)):
        here = [(rank, *pieces[number]) for rank, pieces in enumerate(told) if number < len(pieces)]
        assert [piece for rank, piece, _, _ in here if rank < len(round_)] == round_
        assert policy == "ragged" or len(here) == world
        for rank, piece, shares, end in here:
            assert end == (number == len(told[rank]) - 1)
            if rank >= len(round_):
                assert piece == (batches[(rank - len(round_)) % min(world, len(batches))] if policy == "even" else batches[0])
            if shares is None:
                assert {len(entry) for entry in round_} == {lengths[0]}
                assert len(round_) == world
                continue
            assert shares.real == tuple(len(entry) for entry in round_) + (0,) * (world - len(round_))
            assert shares.given[rank] == len(piece)
            assert shares.weighed == (policy != "even")
            assert shares.full == world * lengths[0]


@given(sizes, worlds, st.sampled_from(["even", "exact"]), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_cut_batches_join_again(
    lengths: list[int], world: int, policy: LastBatchPolicy, skipped: int
) -> None:
    """Cut batches are whole again when the pieces are joined."""
    batches = batches_of(lengths)
    cutting = BatchSplitPlan(world, None, policy)
    told = [list(cutting.pieces(iter(batches), rank, skipped)) for rank in range(world)]
    rest = batches[skipped:]
    assert [len(rank) for rank in told] == [len(rest)] * world
    for number, (together, batch) in enumerate(zip(zip(*told, strict=True), rest, strict=True)):
        pieces, (shares, *same), ends = zip(*together, strict=True)
        assert all(entry == shares for entry in same)
        assert set(ends) == {number == len(rest) - 1}
        real = tuple(map(len, pieces)) if shares is None else shares.real
        assert [sample for piece, count in zip(pieces, real, strict=True) for sample in piece[:count]] == batch
        assert all(pieces)
        assert (shares is None) == (len(batch) == lengths[0] and len(batch) % world == 0)
        if policy == "even":
            assert len({len(piece) for piece in pieces}) == 1
