"""A training run that holds every kind of state: dropout, shuffled data, accumulation, a scaler, a schedule, draws of the script's own."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import set_seed

SAMPLES = 160


def rows(count: int = SAMPLES) -> TensorDataset:
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(count))


class Counter:
    """An object of the script's own that is saved with the rest."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


@dataclass
class Run:
    """What was prepared, and what came out so far."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    counter: Counter

    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.accelerator.unwrap_model(self.model).parameters()])


def begin(batch_size: int = 4, workers: int = 0, seed: int = 3, **options: Any) -> Run:
    """A fresh run; the same on every call with one seed."""
    accelerator = Accelerator(**options)
    set_seed(seed, device_specific=True)  # each rank has dropout of its own
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.7)
    data = DataLoader(rows(), batch_size=batch_size, shuffle=True, num_workers=workers)
    run = Run(accelerator, *accelerator.prepare(model, optimizer, data, scheduler), Counter())
    accelerator.register_for_checkpointing(run.counter)
    return run


def steps(run: Run, batches: Iterable[Any]) -> Iterable[tuple[float, float, float]]:
    """Trains on each batch: its loss, the norm of gradients, and a number that depends on every random state."""
    accelerator = run.accelerator
    for x, y, index in batches:
        with accelerator.accumulate(run.model):
            loss = torch.nn.functional.mse_loss(run.model(x).float(), y)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(run.model.parameters(), 1.0)  # between updates, that of the last one
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad()
        run.counter.seen += index.tolist()
        yield loss.item(), norm.item(), random.random() + float(numpy.random.rand()) + torch.rand(1).item()
