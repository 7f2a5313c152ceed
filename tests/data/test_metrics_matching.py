"""Results are matched to the loader that they are of: read inside another, filtered, several rows, or a list with one entry per sample."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from log_capture import captured_log
from slipstream import Accelerator
from slipstream.data.prepare import prepare_data_loader
from slipstream.utils import DataLoaderConfiguration


def test_evaluation_inside_training(ranks: Any) -> None:
    """Results of an evaluation inside of a training loop are gathered after its loop."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True)
        train, val = accelerator.prepare(DataLoader(range(5), batch_size=2), DataLoader(range(9), batch_size=2))
        found, own = [], []
        for batch in train:
            predictions = torch.cat(list(val))
            found.append(accelerator.gather_for_metrics(predictions).tolist())
            own += accelerator.gather_for_metrics(batch).tolist()  # the batch of the loop itself, also afterwards
        held = iter(train)
        next(held)
        found.append(accelerator.gather_for_metrics(torch.cat(list(val))).tolist())
        return found, own

    assert ranks(2).run(run) == [([list(range(9))] * 3, list(range(5)))] * 2


def test_finished_loader_until_outer_moves(ranks: Any) -> None:
    """A finished loader counts until the one around it continues."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True)
        state = accelerator.gradient_state
        train, val = accelerator.prepare(DataLoader(range(8), batch_size=2), DataLoader(range(9), batch_size=2))
        seen = []
        for step, _ in enumerate(train):
            seen.append(state.metrics.finished is val)
            if step == 0:
                list(val)
                seen.append(state.metrics.finished is val)
        seen.append(state.metrics.finished is train)
        return seen

    assert ranks(2).run(run) == [[False, True, False, True]] * 2


def test_ambiguous_one_batch_pass(ranks: Any) -> None:
    """A pass of one batch that fits as well as the present batch is reported."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True))
        train, val = accelerator.prepare(DataLoader(range(8), batch_size=2), DataLoader(range(3), batch_size=2))
        with captured_log() as texts:
            for batch in train:
                list(val)
                own = accelerator.gather_for_metrics(batch)
        return own.tolist(), len(texts), "inside its loop" in texts[0] if texts else None

    assert ranks(2).run(run)[0] == ([4, 5, 6, 7], 1, True)


def test_unmatched_rows_warned_once(ranks: Any) -> None:
    """Rows that fit no sample are reported once."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True))
        with captured_log() as texts:
            for batch in accelerator.prepare(DataLoader(range(9), batch_size=4)):
                for _ in range(2):
                    accelerator.gather_for_metrics(batch[batch % 2 == 0])
                accelerator.gather_for_metrics(torch.ones(1))  # one value per process is not of samples
        return texts

    texts = ranks(2).run(run)[0]
    assert len(texts) == 1
    assert "7 repeated samples may be in the result" in texts[0]
    assert "even_batches=False" in texts[0]


def test_rows_of_idle_rank_dropped(ranks: Any) -> None:
    """Rows of a rank without samples are left out whatever their number."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        even, rows = [], []
        with captured_log() as texts:
            for batch in accelerator.prepare(DataLoader(range(9), batch_size=4)):
                even += accelerator.gather_for_metrics(batch[batch % 2 == 0]).tolist()
                rows += accelerator.gather_for_metrics(torch.cat([entry.repeat(int(entry) % 3 + 1) for entry in batch])).tolist()
        return even, rows, texts

    rows = [number for number in range(9) for _ in range(number % 3 + 1)]
    assert ranks(2).run(run) == [([0, 2, 4, 6, 8], rows, [])] * 2


def busy(loader: Any) -> int:
    """How many ranks have samples that count."""
    return loader.data_rank.world_size if loader.shares is None else sum(real > 0 for real in loader.shares.real)


def detections(batch: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"id": entry.reshape(1), "boxes": torch.full((int(entry) % 3, 4), float(entry))} for entry in batch]


@pytest.mark.parametrize(("world", "even"), [(1, True), (2, True), (2, False), (3, False)])
def test_per_sample_list_joined(ranks: Any, world: int, even: bool) -> None:
    """A list with one entry per sample is joined as a list."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
        found: list[Any] = []
        for size in (1, 2, 3):
            dicts, plain, inner, kept = [], [], [], []
            loader = accelerator.prepare(DataLoader(range(8), batch_size=size))
            for batch in loader:
                for record in accelerator.gather_for_metrics(detections(batch)):
                    assert record["boxes"].tolist() == [[float(record["id"])] * 4] * (int(record["id"]) % 3)
                    dicts.append(int(record["id"]))
                told = accelerator.gather_for_metrics({"out": [entry.repeat(2, 5) for entry in batch], "ids": batch, "loss": batch.sum()})
                plain += [int(entry[0, 0]) for entry in told["out"]] if size > 2 else told["ids"].tolist()
                assert len(told["loss"]) == busy(loader)
                texts, records = accelerator.gather_for_metrics(([str(entry) for entry in batch.tolist()], detections(batch)))
                assert texts == [str(int(record["id"])) for record in records]
                inner += [int(record["id"]) for record in records]
            for batch in loader:
                kept += detections(batch)
            after = [int(record["id"]) for record in accelerator.gather_for_metrics(kept)]
            found.append(dicts == plain == inner == after == list(range(8)))
        return found

    assert ranks(world).run(run) == [[True] * 3] * world


def test_batch_lists_stay_structure(ranks: Any) -> None:
    """Lists and tuples of batches stay structure."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        found = []
        for batch in accelerator.prepare(DataLoader(range(7), batch_size=2)):
            answers = accelerator.gather_for_metrics([batch, batch * 2])
            pair = accelerator.gather_for_metrics((batch.float(), batch.sum()))
            mixed = accelerator.gather_for_metrics([batch, batch.sum()])
            found.append((len(answers), answers[1].tolist(), pair[0].tolist() == answers[0].tolist(), len(pair[1]), len(mixed[1])))
        return found

    assert ranks(2).run(run) == [[(2, [0, 2, 4, 6], True, 2, 2), (2, [8, 10, 12], True, 2, 2)]] * 2


def test_lists_of_short_batch(ranks: Any) -> None:
    """Lists of a short batch are joined as those before."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        found = []
        for batch in accelerator.prepare(DataLoader(range(6), batch_size=2)):
            found.append([entry.tolist() for entry in accelerator.gather_for_metrics(list(batch))])
        return found

    assert ranks(2).run(run) == [[[0, 1, 2, 3], [4, 5]]] * 2


def test_unknown_loaders_bound_by_prepare(ranks: Any) -> None:
    """Loaders that an accelerator does not know are bound by prepare or by its gradient state."""

    def run() -> Any:
        accelerator = Accelerator(cpu=True)

        def numbers(loader: Any) -> list[int]:
            return sum((accelerator.gather_for_metrics(batch).tolist() for batch in loader), [])

        script = DataLoader(range(9), batch_size=2)
        return [
            numbers(accelerator.prepare(prepare_data_loader(script))),
            numbers(prepare_data_loader(script, gradient_state=accelerator.gradient_state)),
            numbers(accelerator.prepare(copy.deepcopy(accelerator.prepare(script)))),
        ]

    assert ranks(2).run(run) == [[list(range(9))] * 3] * 2
