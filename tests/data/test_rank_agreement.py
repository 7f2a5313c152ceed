"""Ranks that would read different passes, or parts of parts, raise before the first batch instead of losing samples."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Sampler, Subset, random_split

from log_capture import captured_log
from slipstream import Accelerator
from slipstream.data.prepare import prepare_data_loader
from slipstream.errors import DistributedOperationException, MismatchError


class Part(Sampler[int]):
    """Takes the positions of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter(range(self.rank, 8, 2))

    def __len__(self) -> int:
        return 4


class Free(Sampler[int]):
    """Draws from a generator that nobody knows of."""

    def __init__(self, rank: int) -> None:
        self.numbers = numpy.random.default_rng(rank)

    def __iter__(self) -> Any:
        yield from self.numbers.permutation(64).tolist()

    def __len__(self) -> int:
        return 64


class Broken(Part):
    """Fails on one rank."""

    def __iter__(self) -> Any:
        if self.rank:
            raise ValueError("no positions here")
        return super().__iter__()


def split_before_seeding(rank: int) -> Any:
    return random_split(range(64), [32, 32], torch.Generator().manual_seed(rank))[0]


MISTAKES: dict[str, tuple[Any, str]] = {
    "subset": (lambda rank: DataLoader(Subset(range(8), range(rank, 8, 2))), "selected different samples"),
    "random_split": (lambda rank: DataLoader(split_before_seeding(rank), shuffle=True), "selected different samples"),
    "sampler of a part": (lambda rank: DataLoader(range(8), sampler=Part(rank)), "draw different positions"),
    "generator of its own": (lambda rank: DataLoader(range(64), batch_size=8, sampler=Free(rank)), "draw different positions"),
    "lengths": (lambda rank: DataLoader(range(8 + rank)), r"different numbers of samples.*rank 0: 8, rank 1: 9"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_different_data_is_an_error(ranks: Any, mistake: str) -> None:
    """Data that is shared out or drawn differently is an error on every rank."""
    make, expected = MISTAKES[mistake]

    def run() -> None:
        accelerator = Accelerator(cpu=True)
        with pytest.raises(MismatchError, match=expected):
            next(iter(accelerator.prepare(make(accelerator.process_index))))

    ranks(2).run(run)


def test_different_epochs_named(ranks: Any) -> None:
    """Epochs that differ are named."""

    def run() -> None:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(range(8), batch_size=2, shuffle=True))
        loader.set_epoch(accelerator.process_index)
        with pytest.raises(MismatchError, match=r"different epochs.*rank 0: 0, rank 1: 1.*set_epoch"):
            next(iter(loader))

    ranks(2).run(run)


def test_batch_read_by_one_rank(ranks: Any) -> None:
    """A rank that reads a batch alone is found out."""

    def run() -> list[str]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))

        def read() -> None:
            if accelerator.is_main_process:
                next(iter(loader))
            for batch in loader:
                accelerator.gather_for_metrics(batch)

        with captured_log() as texts, pytest.raises(MismatchError, match="begin of a pass"):
            read()
        return texts

    texts = ranks(2).run(run)[0]
    assert len(texts) == 1
    assert "at different lines (rank 0 at test_rank_agreement.py" in texts[0]


def test_sampler_error_on_all_ranks(ranks: Any) -> None:
    """A sampler that fails on one rank fails on all."""

    def run() -> None:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(range(8), sampler=Broken(accelerator.process_index)))
        kind: Any = ValueError if accelerator.process_index else DistributedOperationException
        with pytest.raises(kind, match="no positions here"):
            next(iter(loader))

    ranks(2).run(run)


def test_different_samples_warned_once(ranks: Any) -> None:
    """Samples that differ are reported once and read.

    One line of the main process for the whole run, with its level and the line of the loop.
    """

    def run() -> Any:
        with captured_log() as texts:
            accelerator = Accelerator(cpu=True)
            paths = [f"{number}.txt" for number in range(8)][accelerator.process_index :: 2]
            loaders = [accelerator.prepare(DataLoader(paths, batch_size=1)) for _ in range(2)]
            counts = [len(list(loader)) for loader in loaders for _ in range(2)]
            return counts, texts, run.__code__.co_firstlineno + 5

    (counts, texts, line), (_, others, _) = ranks(2).run(run)
    assert counts == [2, 2, 2, 2]
    assert (len(texts), others) == (1, [])
    assert texts[0].startswith(f"WARNING: test_rank_agreement.py:{line} in ")
    assert ": processes hold different samples in list. Give every process the whole data" in texts[0]
    assert len(texts[0].split(" in ", 1)[1]) < 180
    assert "\n" not in texts[0]


def test_equal_data_from_different_lines(ranks: Any) -> None:
    """Equal data is read from different lines and a place given by hand asks nobody."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        loader = accelerator.prepare(DataLoader([object() for _ in range(6)], batch_size=1, collate_fn=len))
        count = 0
        if rank:
            for _ in loader:
                count += 1
        else:
            count += sum(loader)
        by_hand = prepare_data_loader(DataLoader(range(8), batch_size=2), num_processes=2, process_index=0, data_seed=1)
        return count, len(list(by_hand)) if rank else None

    assert ranks(2).run(run) == [(3, None), (3, 2)]
