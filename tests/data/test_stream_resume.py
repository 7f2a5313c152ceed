"""Streams that order themselves by epoch, or keep a position of their own, go on where they were."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from slipstream import Accelerator, prepare_data_loader
from slipstream.utils import DataLoaderConfiguration


class Shards(IterableDataset[int]):
    """Its shards come in another order in later epochs; what it skips keeps the order of the first, as that of datasets does."""

    def __init__(self, skipped: int = 0) -> None:
        self.epoch, self.skipped = 0, skipped

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def skip(self, count: int) -> "Shards":
        return Shards(self.skipped + count)

    def __iter__(self) -> Iterator[int]:
        shards = [range(first, first + 5) for first in (0, 5, 10, 15)]
        turned = shards[self.epoch :] + shards[: self.epoch]
        yield from [entry for shard in turned for entry in shard][self.skipped :]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("epoch", [0, 2])
def test_later_epoch_resumes(workers: int, dispatched: bool, epoch: int) -> None:
    """A later epoch continues in its own order."""

    def fresh() -> "DataLoader[int]":
        return prepare_data_loader(DataLoader(Shards(), batch_size=4, num_workers=workers), dispatch_batches=dispatched)

    loader = fresh()
    loader.set_epoch(epoch)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(2)]
    position = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    assert sorted(sum(seen + rest, [])) == list(range(20))

    loader = fresh()
    loader.load_state_dict(position, resume=True)
    assert [batch.tolist() for batch in loader] == rest


def test_datasets_stream_later_epoch() -> None:
    """Streams of datasets continue in a later epoch."""
    datasets = pytest.importorskip("datasets")

    def fresh() -> "DataLoader[int]":
        stream = datasets.Dataset.from_dict({"number": list(range(40))}).to_iterable_dataset(num_shards=4)
        return prepare_data_loader(DataLoader(stream.shuffle(seed=3, buffer_size=8).with_format("torch"), batch_size=4))

    loader = fresh()
    loader.set_epoch(2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    position = loader.state_dict()
    rest = [batch["number"].tolist() for batch in batches]

    loader = fresh()
    loader.load_state_dict(position, resume=True)
    assert [batch["number"].tolist() for batch in loader] == rest


class Lines(IterableDataset[int]):
    """Goes on at a position of its own, which reading moves."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 13:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_stateful_stream_completes_last_batch(ranks: Any) -> None:
    """A last batch is completed from the start of a stream that keeps its position."""

    def run() -> tuple[list[Any], list[Any]]:
        config = DataLoaderConfiguration(even_batches=True)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(Lines(), batch_size=2))
        batches = iter(loader)
        next(batches)
        position = loader.state_dict()
        rest = [batch.tolist() for batch in batches]
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(Lines(), batch_size=2))
        loader.load_state_dict(position, resume=True)
        return rest, [batch.tolist() for batch in loader]

    results = ranks(2).run(run)
    assert [rest[-1] for rest, _ in results] == [[12, 0], [1, 2]]
    assert all(again == rest for rest, again in results)
