"""Random sequences of collective calls with data of all sizes: each rank gets what one process computes from the data of all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream import MismatchError, PartialState

BORDERS = (1, 64, 1 << 16, 1 << 18, 1 << 20)
"""Bytes at which data takes another way: with the fingerprints, read ahead or straight into its place, a sum in one piece or in several."""
ANY_DTYPE = (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64, torch.uint16, torch.float8_e4m3fn)
SUMMED_DTYPE = (torch.int16, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64)


def count_near_border(choose: random.Random, dtype: torch.dtype, world: int) -> int:
    """Return a number of elements whose bytes, or whose bytes on all ranks, are about those of a border."""
    size = choose.choice(BORDERS) // choose.choice((1, world)) + choose.choice((-16, -1, 0, 1, 16))
    return max(0, size) // dtype.itemsize


def make_tensor(choose: random.Random, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return small whole numbers, which any type holds, and whose sums are exact."""
    numbers = torch.arange(count) * choose.randrange(1, 5) + choose.randrange(5)
    return (numbers % (2 if dtype == torch.bool else 5)).float().to(dtype)


def lay_out(choose: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor: as it is, with gaps between its elements, or one that needs a gradient."""
    kind = choose.randrange(3)
    if kind == 1:
        return torch.stack([tensor, tensor], dim=1)[:, 0]
    return tensor.clone().requires_grad_() if kind == 2 and tensor.dtype in (torch.float32, torch.float64) else tensor


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    same_kind = found.dtype == wanted.dtype and found.shape == wanted.shape
    return same_kind and torch.cat([found]).view(torch.uint8).equal(torch.cat([wanted]).view(torch.uint8))


def gather(state: PartialState, choose: random.Random, own: random.Random) -> None:
    """A tree of tensors of uneven length, one of which may be large on a single rank."""
    world, leaves = state.num_processes, {}
    for name in "abc"[: choose.randrange(1, 4)]:
        dtype = choose.choice(ANY_DTYPE)
        same = count_near_border(choose, dtype, world)
        counts = [same if choose.random() < 0.5 else count_near_border(choose, dtype, world) for _ in range(world)]
        leaves[name] = [make_tensor(choose, dtype, count) for count in counts]
    wanted = {name: torch.cat(tensors) for name, tensors in leaves.items()}
    given = {name: lay_out(own, tensors[state.process_index]) for name, tensors in leaves.items()}
    found = state.gather(given)
    for name, tensors in leaves.items():
        lengths = [len(tensor) for tensor in tensors]
        assert equal(found[name], wanted[name]), (name, tensors[0].dtype, lengths)
        found[name].zero_()  # it is memory of its own: what was given stays
        assert equal(given[name].detach(), wanted[name].split(lengths)[state.process_index])


def reduce(state: PartialState, choose: random.Random, own: random.Random) -> None:
    """Sums and means, each rounded once."""
    world, dtype, reduction = state.num_processes, choose.choice(SUMMED_DTYPE), choose.choice(("sum", "mean"))
    if not dtype.is_floating_point:
        reduction = "sum"
    counts = [count_near_border(choose, dtype, world) for _ in range(choose.randrange(1, 4))]
    leaves = [[make_tensor(choose, dtype, count) for _ in range(world)] for count in counts]
    found = state.reduce([lay_out(own, tensors[state.process_index]) for tensors in leaves], reduction)
    for result, tensors in zip(found, leaves, strict=True):
        total = torch.stack(tensors).to(torch.complex128 if dtype.is_complex else torch.float64).sum(dim=0)
        wanted = (total / world if reduction == "mean" else total).to(dtype)
        torch.testing.assert_close(result, wanted, rtol=1e-3 if reduction == "mean" else 0, atol=0)


def broadcast(state: PartialState, choose: random.Random, own: random.Random) -> None:
    world, sender = state.num_processes, choose.randrange(state.num_processes)
    dtypes = [choose.choice(ANY_DTYPE) for _ in range(choose.randrange(1, 4))]
    counts = [count_near_border(choose, dtype, world) for dtype in dtypes]
    by_rank = [[make_tensor(choose, dtype, count) for dtype, count in zip(dtypes, counts, strict=True)] for _ in range(world)]
    found = state.broadcast([lay_out(own, tensor) for tensor in by_rank[state.process_index]], from_process=sender)
    assert all(equal(result, wanted) for result, wanted in zip(found, by_rank[sender], strict=True))


def gather_object(state: PartialState, choose: random.Random, own: random.Random) -> None:
    """Records, of which those of one rank may be much larger."""
    records = [{"rank": rank, "text": "x" * count_near_border(choose, torch.uint8, 1)} for rank in range(state.num_processes)]
    assert state.gather_object(records[state.process_index]) == records


def refuse(state: PartialState, choose: random.Random, own: random.Random) -> None:
    """Data that differ between the ranks, small on one and large on another, are refused everywhere, and the group goes on."""
    odd, count = choose.randrange(state.num_processes), count_near_border(choose, torch.float32, 1) + 1
    data = torch.ones(count)
    if state.process_index == odd:
        data = choose.choice([torch.ones(1 << 19), torch.ones(count + 1), torch.ones(count, dtype=torch.int32), torch.ones(2, count)])
    with pytest.raises(MismatchError):
        state.reduce(data)


OPERATIONS: tuple[Callable[[PartialState, random.Random, random.Random], None], ...] = (
    gather, gather, reduce, reduce, broadcast, gather_object, refuse,
)  # fmt: skip


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_collectives(ranks: Any, rounds: Any, world: int) -> None:
    """Any calls in any order, on data of all types and sizes around those at which it takes another way."""
    seeds = range(rounds(ci=2, soak=50))

    def run() -> None:
        state = PartialState()
        for seed in seeds:
            for number in range(12):
                choose = random.Random(f"{world} {seed} {number}")  # the same on all ranks
                choose.choice(OPERATIONS)(state, choose, random.Random(f"{seed} {number} {state.process_index}"))

    ranks(world).run(run)


def test_random_collectives_on_more_ranks(ranks: Any) -> None:
    """Numbers of ranks that are no power of two, and whose last hop is cut."""

    def run() -> None:
        state = PartialState()
        for number in range(10):
            choose = random.Random(f"7 {number}")
            choose.choice(OPERATIONS)(state, choose, random.Random(f"{number} {state.process_index}"))

    ranks(7).run(run)
