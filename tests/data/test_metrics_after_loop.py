"""What is gathered after a loop is taken for results of the loop only where it can be: nothing of that pass was gathered inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from log_capture import captured_log
from slipstream import Accelerator
from slipstream.utils import DataLoaderConfiguration


def start(even: bool = True) -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))


def test_cross_validation(ranks: Any) -> None:
    """Rows that are gathered after an evaluation whose results were gathered inside its loop are gathered as they are."""

    def run() -> Any:
        accelerator = start()
        loader = accelerator.prepare(DataLoader(range(11), batch_size=4))
        found = []
        for _ in range(2):
            predictions = [accelerator.gather_for_metrics(batch) for batch in loader]
            found.append(torch.cat(predictions).tolist())
        rows = torch.arange(8) + 8 * accelerator.process_index  # as many as the loader handed out to this rank
        return found, accelerator.gather_for_metrics(rows).tolist()

    assert ranks(2).run(run) == [([list(range(11))] * 2, list(range(16)))] * 2


@pytest.mark.parametrize("what", ["scalar", "object", "other rows"])
def test_gathered_inside(ranks: Any, what: str) -> None:
    """Anything that was gathered inside the loop counts, whatever it was."""

    def run() -> Any:
        accelerator = start()
        for batch in accelerator.prepare(DataLoader(range(11), batch_size=4)):
            if what == "scalar":
                accelerator.gather_for_metrics(batch.float().mean())
            elif what == "object":
                accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
            else:
                accelerator.gather_for_metrics(torch.ones(7))
        return len(accelerator.gather_for_metrics(torch.arange(8)))

    assert ranks(2).run(run) == [16] * 2


@pytest.mark.parametrize("even", [True, False])
def test_two_calls(ranks: Any, even: bool) -> None:
    """Predictions, then references: every call after the loop is about the pass, and what was left out is said once."""

    def run() -> Any:
        accelerator = start(even)
        kept = [batch for batch in accelerator.prepare(DataLoader(range(9), batch_size=4))]
        with captured_log() as texts:
            rows = torch.cat(kept)
            calls = [accelerator.gather_for_metrics(rows * times).tolist() for times in (1, 2)]
            calls.append(accelerator.gather_for_metrics({"texts": [str(row) for row in rows.tolist()], "rows": rows * 3})["rows"].tolist())
        return calls, texts

    expected = [[times * sample for sample in range(9)] for times in (1, 2, 3)]
    (calls, texts), (other, silent) = ranks(2).run(run)
    left = 7 if even else 4
    assert calls == other == expected
    assert silent == []
    assert len(texts) == 1
    assert f"{9 + left} rows are taken as the results of the loader of range" in texts[0]
    assert f"{left} rows of repeated samples are dropped" in texts[0]


def test_another_loader(ranks: Any) -> None:
    """It ends when another loader begins."""

    def run() -> Any:
        accelerator = start()
        first, second = accelerator.prepare(DataLoader(range(11), batch_size=4), DataLoader(range(4), batch_size=2))
        for _ in first:
            pass
        for _ in second:
            break
        return len(accelerator.gather_for_metrics(torch.arange(8)))

    assert ranks(2).run(run) == [16] * 2


def test_an_update(ranks: Any) -> None:
    """It ends with an update."""

    def run() -> Any:
        accelerator = start()
        model = torch.nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(range(11), batch_size=4)
        )
        for _ in loader:
            pass
        before = len(accelerator.gather_for_metrics(torch.arange(8)))
        accelerator.backward(model(torch.ones(2, 1)).sum())
        optimizer.step()
        return before, len(accelerator.gather_for_metrics(torch.arange(8)))

    assert ranks(2).run(run) == [(11, 16)] * 2


def test_inner_loop(ranks: Any) -> None:
    """Results of an evaluation that are gathered after its loop do not count as gathered in the loop around it."""

    def run() -> Any:
        accelerator = start()
        outer, inner = accelerator.prepare(DataLoader(range(7), batch_size=2), DataLoader(range(9), batch_size=2))
        found, kept = [], []
        for batch in outer:
            found.append(accelerator.gather_for_metrics(torch.cat(list(inner))).tolist())
            kept.append(batch)
        return found, accelerator.gather_for_metrics(torch.cat(kept)).tolist()

    assert ranks(2).run(run) == [([list(range(9))] * 2, list(range(7)))] * 2


def test_an_earlier_split(ranks: Any) -> None:
    """Inputs that were split before a loop have no say in what is gathered inside of it."""

    def run() -> Any:
        accelerator = start()
        with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as mine:
            split = accelerator.gather_for_metrics(torch.tensor(mine)).tolist()
        found, inside = [], []
        for batch in accelerator.prepare(DataLoader(range(8), batch_size=2)):
            found += accelerator.gather_for_metrics(batch).tolist()
            with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as mine:
                inside.append(accelerator.gather_for_metrics(torch.tensor(mine)).tolist())
        return split, found, inside

    assert ranks(2).run(run) == [([1, 2, 3], list(range(8)), [[1, 2, 3]] * 2)] * 2
