"""One rank of `lightning_strategy.py`: runs of Lightning with its DDP strategy and with ours, in turns; rank 0 writes the times of both."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
import lightning as L  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from turns import Rounds, joined  # noqa: E402

import slipstream.integrations.lightning  # noqa: E402, F401 - registers the strategy

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

BATCH = 8


Spent = tuple[float, float]
"""Seconds by the clock, and of the processor."""


def now() -> Spent:
    return time.perf_counter(), time.process_time()


def since(begun: Spent) -> Spent:
    clock, processor = now()
    return clock - begun[0], processor - begun[1]


class Net(L.LightningModule):
    """Two small layers."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logs = logs
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Times what is between the first and the last batch."""

    spent = (0.0, 0.0)

    def on_train_start(self, *args: Any) -> None:
        self.begun = now()

    def on_train_end(self, *args: Any) -> None:
        self.spent = since(self.begun)

    on_validation_start, on_validation_end = on_train_start, on_train_end


def loader(steps: int, ranks: int) -> DataLoader[Any]:
    inputs = torch.randn(steps * BATCH * ranks, 32, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)


def make_trainer(strategy: str, ranks: int, clock: Clock, **options: Any) -> L.Trainer:
    usual = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "num_sanity_val_steps": 0}
    return L.Trainer(
        strategy=strategy, devices=ranks, accelerator="cpu", enable_model_summary=False, callbacks=[clock], **{**usual, **options}
    )


def fit(strategy: str, steps: int, ranks: int, *, logs: bool = False, **options: Any) -> Spent:
    clock = Clock()
    make_trainer(strategy, ranks, clock, **options).fit(Net(logs), loader(steps, ranks))
    return clock.spent


def validate(strategy: str, steps: int, ranks: int) -> Spent:
    clock = Clock()
    make_trainer(strategy, ranks, clock).validate(Net(False), loader(steps, ranks), verbose=False)
    return clock.spent


def fabric(strategy: str, steps: int, ranks: int) -> Spent:
    made = L.Fabric(strategy=strategy, devices=ranks, accelerator="cpu")
    made.launch()
    net = Net(False).net
    model, optimizer = made.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    batches = made.setup_dataloaders(loader(steps, ranks))
    made.barrier()
    begun = now()
    for inputs, targets in batches:
        made.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return since(begun)


CASES: dict[str, Callable[[str, int, int], Spent]] = {
    "Trainer: step": fit,
    "Trainer: step, loss logged with sync_dist": lambda *words: fit(*words, logs=True),
    "Trainer: step, clipped, 4 batches accumulated": lambda *words: fit(*words, accumulate_grad_batches=4, gradient_clip_val=1.0),
    "Trainer: validation step": validate,
    "Fabric: step": fabric,
}


def measured(run: Callable[[str, int, int], Spent], strategy: str, steps: int, ranks: int) -> Spent:
    """Return the seconds per step of one run; garbage of the run before is not collected in it."""
    gc.collect()
    gc.disable()
    try:
        clock, processor = run(strategy, steps, ranks)
    finally:
        gc.enable()
    return clock / steps, processor / steps


def main() -> None:
    output, rounds, steps, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    found: Rounds = {case: {strategy: {"cpu": [], "wall": []} for strategy in ("slipstream", "ddp")} for case in CASES}
    for number in range(rounds + 1):
        for case, run in CASES.items():
            for strategy in sorted(found[case], reverse=bool(number % 2)):
                clock, processor = measured(run, strategy, steps, ranks)
                if number:  # the first round warms up
                    found[case][strategy]["cpu"].append(processor)
                    found[case][strategy]["wall"].append(clock)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        output.write_text(json.dumps({case: joined(rank[case] for rank in everyone) for case in found}))


if __name__ == "__main__":
    main()
