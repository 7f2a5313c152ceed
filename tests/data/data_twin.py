"""What one process with plain PyTorch would read, and ranks that are simulated in one process: the yardstick of the tests of loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from slipstream.data.loader import PreparedLoader
from slipstream.data.options import DataLoaderConfiguration, DataRank, LoaderSettings
from slipstream.data.prepare import build_loader
from slipstream.distributed.gradient_state import GradientState
from slipstream.distributed.guard import Channel, Limits


def place(rank: int = 0, world_size: int = 1) -> DataRank:
    return DataRank(rank, world_size, Channel, Limits())


def prepared(
    loader: DataLoader[Any],
    rank: int = 0,
    world_size: int = 1,
    *,
    seed: int = 7,
    effective_batch_size: int | None = None,
    gradient_state: GradientState | None = None,
    **options: Any,
) -> PreparedLoader:
    """The loader of one rank."""
    settings = LoaderSettings(
        data_rank=place(rank, world_size),
        config=DataLoaderConfiguration(**options),
        seed=seed,
        gradient_state=gradient_state or GradientState(),
        effective_batch_size=effective_batch_size,
    )
    return build_loader(loader, settings)


def ranks_of(make: Callable[[], DataLoader[Any]], world_size: int, **options: Any) -> list[PreparedLoader]:
    """The loaders of all ranks of a world, each from a loader of its own, as in processes."""
    return [prepared(make(), rank, world_size, **options) for rank in range(world_size)]


def rounds(loaders: list[PreparedLoader]) -> Iterator[tuple[list[Any], Any]]:
    """Batches of all ranks side by side, and how they were shared; the ranks have to agree on everything that they tell."""
    for batches in zip(*loaders, strict=True):
        told = [(loader.shares, loader.end_of_dataloader, loader.current.left, loader.remainder) for loader in loaders]
        assert all(entry == told[0] for entry in told), "the ranks know the same of a batch"
        yield list(batches), loaders[0].shares


def real_samples(batches: list[Any], shares: Any) -> list[Any]:
    """The samples of a global batch that count, in the order of the ranks."""
    counts = [len(batch) for batch in batches] if shares is None else shares.real
    if shares is not None:
        assert tuple(len(batch) for batch in batches) == shares.given
    return [sample for batch, count in zip(batches, counts, strict=True) for sample in batch[:count]]


def chunks(order: list[Any], size: int, drop_last: bool = False) -> list[list[Any]]:
    """What one process with that batch size reads."""
    found = [order[start : start + size] for start in range(0, len(order), size)]
    return [entry for entry in found if len(entry) == size or not drop_last]


def keep(batch: list[Any]) -> list[Any]:
    """A collate function that keeps samples as they are."""
    return list(batch)
