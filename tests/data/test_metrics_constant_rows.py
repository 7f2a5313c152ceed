"""`gather_for_metrics(loss.repeat(batch_size))` with a constant batch size, and then a mean over everything, is a mean over samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from slipstream import Accelerator
from slipstream.utils import DataLoaderConfiguration


def data(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float64).square()


def start(even: bool, split: bool = False) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even, split_batches=split))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("split", [False, True])
def test_mean(ranks: Any, world: int, split: bool) -> None:
    """It is the mean of plain PyTorch over all samples, also where sizes do not divide."""
    counts = [1, 2, 3, 7, 9, 12, 13, 18, 23, 24, 30, 36, 37]

    def run() -> Any:
        accelerator = start(even=False, split=split)
        found = []
        size = 6 * accelerator.num_processes if split else 6  # of a script that repeats by the number that it gave to the loader
        for count in counts:
            losses = []
            for batch in accelerator.prepare(DataLoader(data(count), batch_size=size)):
                losses.append(accelerator.gather_for_metrics(batch.mean().repeat(size)))
            found.append((len(torch.cat(losses)), torch.cat(losses).mean().item()))
        return found

    times = world if split else 1
    for found in ranks(world).run(run):
        rows, means = zip(*found, strict=True)
        torch.testing.assert_close(torch.tensor(means), torch.tensor([data(count).mean().item() for count in counts]))
        for count, number in zip(counts, rows, strict=True):
            if count > 6 * world:  # a single batch that is a whole fraction of a full one may be of several rows per sample
                assert number == count * times


def test_one_process_with_even_batches(ranks: Any) -> None:
    """A short last batch on one process, where nothing completes it."""

    def run() -> Any:
        accelerator = start(even=True)
        loader = accelerator.prepare(DataLoader(data(10), batch_size=4))
        losses = [accelerator.gather_for_metrics(batch.mean().repeat(4)) for batch in loader]
        return torch.cat(losses).tolist()

    assert ranks(1).run(run) == [[3.5] * 4 + [31.5] * 4 + [72.5] * 2]


@pytest.mark.parametrize("even", [True, False])
def test_batch_sampler(ranks: Any, even: bool) -> None:
    """Batches of a sampler of the script's own, some of them smaller."""

    def run() -> Any:
        accelerator = start(even)
        batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14]]
        loader = accelerator.prepare(DataLoader(data(15), batch_sampler=batches))
        return torch.cat([accelerator.gather_for_metrics(batch.mean().repeat(4)) for batch in loader]).mean().item()

    assert ranks(2).run(run) == [pytest.approx(data(15).mean().item())] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_several_rows_per_sample(ranks: Any, world: int) -> None:
    """Rows of a short batch that are as many as a full batch has are told apart by what the same line gathered before."""

    def run() -> Any:
        accelerator = start(even=False)
        pairs, losses, beside = [], [], []
        loader = accelerator.prepare(DataLoader(torch.arange(6 * accelerator.num_processes), batch_size=4))
        for batch in loader:  # full batches of 4 samples for each process, and then of 2
            pairs += accelerator.gather_for_metrics(batch.repeat_interleave(2)).tolist()
            losses += accelerator.gather_for_metrics(batch.double().mean().repeat(4)).tolist()
            told = accelerator.gather_for_metrics({"loss": batch.double().mean().repeat(4), "pairs": batch.repeat_interleave(2)})
            beside += told["pairs"].tolist()
            assert told["loss"].tolist() == losses[-len(told["loss"]) :]
        return pairs, beside, len(losses), sum(losses) / len(losses)

    count = 6 * world
    samples = [sample for sample in range(count) for _ in range(2)]
    assert ranks(world).run(run) == [(samples, samples, count, (count - 1) / 2)] * world
