"""Gathered results are those of the dataset: every sample once, in order, in the structure that was passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, IterableDataset

from slipstream import Accelerator
from slipstream.utils import DataLoaderConfiguration


class Stream(IterableDataset):
    """Numbers, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))


def evaluate(count: int, batch_size: int, *, drop_last: bool, kind: str, even: bool, split: bool) -> dict[str, Any]:
    config = DataLoaderConfiguration(
        even_batches=even, split_batches=split, dispatch_batches=True if kind == "dispatch" else None
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    dataset: Any = Stream(count) if kind == "stream" else list(range(count))
    if split:
        batch_size *= accelerator.num_processes
    loader = accelerator.prepare(DataLoader(dataset, batch_size=batch_size, drop_last=drop_last))
    found: dict[str, Any] = {"numbers": [], "texts": [], "pairs": [], "losses": [], "busy": [], "kept": []}
    for batch in loader:
        texts = [str(number) for number in batch.tolist()]
        inner = accelerator.prepare(DataLoader([1, 2, 3], batch_size=2 * accelerator.num_processes))
        nested = [accelerator.gather_for_metrics(entry).tolist() for entry in inner]
        assert sum(nested, []) == [1, 2, 3], "a loader inside of the loop has its own end"
        told = accelerator.gather_for_metrics({"numbers": batch, "texts": texts, "loss": batch.float().mean()})
        left, right = accelerator.gather_for_metrics((texts, [text * 2 for text in texts]))
        assert right == [text * 2 for text in left]
        found["numbers"] += told["numbers"].tolist()
        found["texts"] += told["texts"]
        found["pairs"] += left
        found["losses"].append(len(told["loss"]))
        found["busy"].append(accelerator.num_processes if loader.shares is None else sum(real > 0 for real in loader.shares.real))
    for batch in loader:
        found["kept"] += batch.tolist()
    after = accelerator.gather_for_metrics(torch.tensor(found.pop("kept"), dtype=torch.long))
    found["after"] = after.tolist()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_sample_once_and_in_order(ranks: Any, world: int) -> None:
    @settings(max_examples=12, deadline=None)
    @given(
        count=st.integers(1, 23),
        batch_size=st.integers(1, 4),
        drop_last=st.booleans(),
        kind=st.sampled_from(["map", "stream", "dispatch"]),
        even=st.booleans(),
        split=st.booleans(),
    )
    def check(**case: Any) -> None:
        whole = case["count"] if not case["drop_last"] else case["count"] // (case["batch_size"] * world) * case["batch_size"] * world
        numbers = list(range(whole))
        for found in ranks(world).run(lambda: evaluate(case["count"], **{k: v for k, v in case.items() if k != "count"})):
            assert found["numbers"] == numbers
            assert found["texts"] == found["pairs"] == [str(number) for number in numbers]
            assert found["losses"] == found["busy"], "a scalar is one value per process that has samples"
            if len(found["losses"]) > 1 and world > 1:
                assert found["after"] == numbers, "gathered after the loop, too"

    check()


def test_nothing_dropped_without_loader(ranks: Any) -> None:
    """Without a loader nothing is dropped."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(range(5), batch_size=2))
        for _ in loader:
            break
        rank = accelerator.process_index
        return accelerator.gather_for_metrics([f"{rank}"]), accelerator.gather_for_metrics(torch.tensor([rank])).tolist()

    assert ranks(2).run(run) == [(["0", "1"], [0, 1])] * 2


@pytest.mark.parametrize(("even", "size"), [(False, 4), (True, 1), (False, 1)])
def test_squeezed(ranks: Any, even: bool, size: int) -> None:
    """Predictions of a batch of one sample that `squeeze()` has left without dimensions are those of one sample, and gathered once."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
        loader = accelerator.prepare(DataLoader(torch.arange(9).reshape(9, 1), batch_size=size))
        return [row for batch in loader for row in accelerator.gather_for_metrics(batch.squeeze()).tolist()]

    assert ranks(2).run(run) == [list(range(9))] * 2


def test_loss_of_an_idle_rank(ranks: Any) -> None:
    """A single value of a process whose batch only keeps it busy is left out."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        loader = accelerator.prepare(DataLoader(torch.arange(5.0), batch_size=2))
        return [
            (accelerator.gather_for_metrics(batch.mean()).tolist(), accelerator.gather_for_metrics({"step": 1, "text": "a"}))
            for batch in loader
        ]

    full, last = ([0.5, 2.5], {"step": [1, 1], "text": ["a", "a"]}), ([4.0], {"step": [1], "text": ["a"]})
    assert ranks(2).run(run) == [[full, last]] * 2
