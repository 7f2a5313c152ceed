"""Checks when gradients are synchronized: `no_sync`, `accumulate`, and the end of a data loader."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.test_utils.scripts._checks import expect, expect_close, run_checks
from accelerate.test_utils.training import RegressionDataset, RegressionModel
from accelerate.utils import set_seed

_BATCH = 4


def _fresh() -> None:
    AcceleratorState._reset_state()
    GradientState._reset_state()


def _set_up(accelerator: Accelerator, length: int = 24):
    """Return a model alone, one that is prepared, its optimizer, and its loader."""
    set_seed(42)
    model = RegressionModel(1, 2)
    alone = deepcopy(model).to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(RegressionDataset(length=length, seed=1), batch_size=_BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return alone, model, optimizer, loader


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def _gradients(accelerator: Accelerator, model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([parameter.grad.detach().clone() for parameter in accelerator.unwrap_model(model).parameters()])


def check_no_sync() -> None:
    """no_sync: gradients stay apart, and the next backward pass brings them together"""
    _fresh()
    accelerator = Accelerator()
    _, model, _, loader = _set_up(accelerator)
    batches = iter(loader)
    with accelerator.no_sync(model):
        accelerator.backward(_loss(model, next(batches)))
    apart = accelerator.gather(_gradients(accelerator, model)[None])
    if accelerator.num_processes > 1:
        expect(bool(torch.equal(apart[0], apart[1])), False, "gradients are equal under no_sync")
    accelerator.backward(_loss(model, next(batches)))
    together = accelerator.gather(_gradients(accelerator, model)[None])
    expect(all(torch.allclose(together[0], row) for row in together), True, "gradients are equal after a synchronized pass")


def check_accumulate() -> None:
    """accumulate: an update per window, the same as one large batch, and a last window that may be shorter"""
    for steps in (2, 3, 4):
        _fresh()
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        alone, model, optimizer, loader = _set_up(accelerator, length=_BATCH * 6 * accelerator.num_processes)
        sgd = torch.optim.SGD(alone.parameters(), lr=0.05)
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            whole = {key: accelerator.gather(value) for key, value in batch.items()}
            (_loss(alone, whole) / steps).backward()
            ends = (number + 1) % steps == 0 or number + 1 == len(loader)
            expect(accelerator.sync_gradients, ends, f"sync_gradients at batch {number} of windows of {steps}")
            if ends:
                sgd.step()
                sgd.zero_grad()
            trained = accelerator.unwrap_model(model)
            if len(loader) % steps == 0:  # what a shorter window is divided by is a setting
                expect_close(trained.a, alone.a, f"the slope at batch {number}", 1e-5)
                expect_close(trained.b, alone.b, f"the offset at batch {number}", 1e-5)


def check_scheduler() -> None:
    """A scheduler steps with the optimizer: num_processes times for each update"""
    _fresh()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(42)
    model = RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(RegressionDataset(length=_BATCH * 4 * accelerator.num_processes, seed=1), batch_size=_BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, batch) * 0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    updates = len(loader) // 2
    expect(round(scheduler.get_last_lr()[0], 6), round(0.9 ** (updates * accelerator.num_processes), 6), "the learning rate")


def check_two_loaders() -> None:
    """Two data loaders, one within the other: the end of each is seen, and the outer one comes back"""
    _fresh()
    accelerator = Accelerator()
    outer = accelerator.prepare(DataLoader(RegressionDataset(length=8 * accelerator.num_processes), batch_size=4))
    inner = accelerator.prepare(DataLoader(RegressionDataset(length=12 * accelerator.num_processes), batch_size=4))
    state = accelerator.gradient_state
    expect(state.active_dataloader, None, "the loader before the loop")
    for number, _ in enumerate(outer):
        expect(state.end_of_dataloader, number == len(outer) - 1, "the end of the outer loader")
        for place, _ in enumerate(inner):
            expect(state.end_of_dataloader, place == len(inner) - 1, "the end of the inner loader")
        expect(state.active_dataloader is outer, True, "the outer loader is active again")
    expect(state.active_dataloader, None, "the loader after the loop")


def check_break() -> None:
    """Leaving a loop early leaves no loader behind"""
    _fresh()
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(RegressionDataset(length=16 * accelerator.num_processes), batch_size=4))
    for _ in loader:
        break
    seen = sum(1 for _ in loader)
    expect(seen, len(loader), "batches of the second loop")


CHECKS = (check_no_sync, check_accumulate, check_scheduler, check_two_loaders, check_break)


def main() -> None:
    """Run every check."""
    run_checks(CHECKS)
    _fresh()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
