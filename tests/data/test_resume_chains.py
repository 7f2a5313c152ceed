"""A run that is stopped and resumed several times, each time on other numbers of ranks and batch sizes, reads what one process reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from data_twin import keep, prepared, ranks_of, real_samples, rounds
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler


class Shuffled(Sampler[int]):
    """A sampler of the script's own that draws from Python's global state, one sample at a time."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(self.length), self.length)

    def __len__(self) -> int:
        return self.length


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "in order": lambda length: SequentialSampler(range(length)),
    "shuffled": lambda length: RandomSampler(range(length)),
    "more": lambda length: RandomSampler(range(length), num_samples=2 * length + 3),
    "fewer": lambda length: RandomSampler(range(length), num_samples=(length + 1) // 2),
    "replacement": lambda length: RandomSampler(range(length), replacement=True, num_samples=length + 4),
    "subset": lambda length: SubsetRandomSampler(range(length)[::-1]),
    "tensor subset": lambda length: SubsetRandomSampler(torch.arange(length)),  # type: ignore[arg-type]  # which torch takes as well
    "weighted": lambda length: WeightedRandomSampler([1.0 + sample for sample in range(length)], length + 2),
    "own": Shuffled,
}
SEGMENTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6)), min_size=2, max_size=5)
"""Runs of one job: the number of ranks, the batch size of each, and the most batches that are read before the run is stopped."""


def loader_of(kind: str, length: int, size: int) -> DataLoader[Any]:
    return DataLoader(range(length), batch_size=size, sampler=SAMPLERS[kind](length), collate_fn=keep)


def numbers(samples: list[Any]) -> list[int]:
    return [int(sample) for sample in samples]


@given(st.sampled_from(sorted(SAMPLERS)), st.integers(1, 45), SEGMENTS, st.booleans(), st.booleans(), st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_stopped_and_resumed(kind: str, length: int, segments: list[tuple[int, int, int]], even: bool, split: bool, seed: int) -> None:
    """Every run goes on with the next sample of the epoch that one process reads, in batches that begin at multiples of their size."""
    alone = prepared(loader_of(kind, length, 7), seed=seed)
    epochs = [numbers([sample for batch in alone for sample in batch]) for _ in segments]
    state: Any = None
    epoch, position = 0, 0
    for world, size, most in segments:
        whole = world * size
        make = partial(loader_of, kind, length, whole if split else size)
        loaders = ranks_of(make, world, seed=seed if state is None else 99, even_batches=even, split_batches=split)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        read = 0
        for batches, shares in islice(rounds(loaders), most):
            batch = numbers(real_samples(batches, shares))
            wanted = epochs[epoch][position : position + whole - position % whole]
            assert batch == wanted
            position, read = position + len(batch), read + 1
            state = loaders[-1].state_dict()  # any rank may save
        assert read == most or position == len(epochs[epoch])
        if read < most:  # the epoch was read to its end, and the next one comes
            state, epoch, position = loaders[0].state_dict(), epoch + 1, 0
        assert (state["epoch"], state["samples"]) == (epoch, position)
