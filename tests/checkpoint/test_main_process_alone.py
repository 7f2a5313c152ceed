"""`if accelerator.is_main_process: accelerator.save_state(...)`: nobody waits, nothing is lost unsaid, and the ranks stay together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from slipstream import Accelerator


def begin() -> tuple[Any, ...]:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.arange(24.0).reshape(24, 1), batch_size=2)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)


def updates(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> list[bool]:
    found = []
    for inputs in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(accelerator.sync_gradients)
    return found


def cut_and_go_on(folder: Path, cut: int) -> list[bool]:
    accelerator, model, optimizer, loader = begin()
    batches = iter(loader)
    updates(accelerator, model, optimizer, (next(batches) for _ in range(cut)))
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator, model, optimizer, loader = begin()
    accelerator.load_state(folder, resume=True)
    return updates(accelerator, model, optimizer, loader)


def test_open_update_dropped_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    """An update that was under way is dropped on all ranks."""
    main, other = ranks(2).outcomes(cut_and_go_on, tmp_path / "first", 2)
    assert main.value == other.value == [False, False, False, True]
    assert "gradients of rank 1 are not in it" in main.output
    assert "has no random state of rank 1" in other.output


def test_between_updates_nothing_dropped(ranks: Any, tmp_path: Path) -> None:
    """Between updates nothing is dropped."""
    main, other = ranks(2).outcomes(cut_and_go_on, tmp_path / "first", 4)
    assert main.value == other.value == [False, True]
    assert "gradients" not in main.output
