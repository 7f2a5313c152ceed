"""`batch_size=None`: the items of the dataset are batches, or samples. Each is gathered once, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from slipstream import Accelerator
from slipstream.utils import DataLoaderConfiguration

SIZES = (4, 4, 2, 4, 1, 3, 4)


def batches() -> list[torch.Tensor]:
    return list(torch.arange(sum(SIZES)).split(SIZES))


class Stream(IterableDataset[Any]):
    """Items without positions."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


KINDS: dict[str, tuple[Callable[[], list[Any]], Callable[[Any], Any], list[Any]]] = {
    "batches": (batches, lambda batch: batch, list(range(sum(SIZES)))),
    "batches of text": (lambda: [list(map(str, batch.tolist())) for batch in batches()], list, list(map(str, range(sum(SIZES))))),
    "numbers": (lambda: list(range(7)), lambda number: number, list(range(7))),
    "tensors without dimensions": (lambda: list(torch.arange(7)), lambda number: number, list(range(7))),
    "text": (lambda: [str(number) for number in range(7)], lambda text: text, [str(number) for number in range(7)]),
    "one value of several features": (lambda: [torch.full((3,), row) for row in range(7)], lambda row: row[:1], list(range(7))),
    "a single value of several features": (lambda: [torch.full((3,), row) for row in range(7)], lambda row: row[0], list(range(7))),
}


def plain(result: Any) -> list[Any]:
    return result.tolist() if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("even", [True, False])
def test_every_item_once(ranks: Any, world: int, kind: str, even: bool) -> None:
    """Whatever an item is, and whatever reads it."""
    items, result, expected = KINDS[kind]

    def run() -> list[Any]:
        found = []
        for dataset, dispatch in ((items(), None), (items(), True), (Stream(items()), None)):
            config = DataLoaderConfiguration(even_batches=even, dispatch_batches=dispatch)
            accelerator = Accelerator(cpu=True, dataloader_config=config)
            loader = accelerator.prepare(DataLoader(dataset, batch_size=None, collate_fn=lambda item: item))
            inside = [value for item in loader for value in plain(accelerator.gather_for_metrics(result(item)))]
            objects = [value for item in loader for value in plain(accelerator.gather_for_metrics([result(item)], use_gather_object=True))]
            found.append((inside, len(objects)))
        return found

    for found in ranks(world).run(run):
        assert found == [(expected, 7)] * 3


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("even", [True, False])
def test_after_the_loop(ranks: Any, world: int, even: bool) -> None:
    """Kept and gathered afterwards: one row per sample, or one per item."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
        loader = accelerator.prepare(DataLoader(batches(), batch_size=None))
        kept = list(loader)
        rows = accelerator.gather_for_metrics(torch.cat(kept)).tolist()
        return rows, accelerator.gather_for_metrics(torch.stack([batch[0] for batch in kept])).tolist()

    firsts = [batch[0].item() for batch in batches()]
    assert ranks(world).run(run) == [(list(range(sum(SIZES))), firsts)] * world


@pytest.mark.parametrize("even", [True, False])
def test_squeezed(ranks: Any, even: bool) -> None:
    """A single row that `squeeze()` has left without dimensions on one rank is a row like those of the others, on every rank."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
        loader = accelerator.prepare(DataLoader(list(torch.arange(9).split(4)), batch_size=None))
        return [accelerator.gather_for_metrics(batch.reshape(-1, 1).squeeze()).tolist() for batch in loader]

    assert ranks(2).run(run) == [[list(range(8)), [8]]] * 2
