"""A stream that orders itself by epoch goes on in a later epoch where it was."""

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, IterableDataset

from slipstream import prepare_data_loader


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
        yield from [one for shard in turned for one in shard][self.skipped :]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_later_epoch_goes_on_in_its_own_order(workers: int, dispatched: bool, epoch: int) -> None:
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


def test_streams_of_datasets_go_on_in_a_later_epoch() -> None:
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
