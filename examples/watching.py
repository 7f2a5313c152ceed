"""Monitoring a run: curves, images and tables, where the time went, and guards that report problems and remedies.

    python examples/watching.py
    slipstream launch --cpu --num_processes 2 examples/watching.py

Two things are wrong on purpose. The loader is slow, and a guard suggests a number of workers. One batch holds a NaN, and its
update is skipped. Nothing in the loop checks for either. The run folder is in outputs/watching/runs, and
`slipstream watch outputs/watching` shows it live.
"""

import json
import time

import torch
from torch.utils.data import DataLoader, Dataset

from slipstream import Accelerator
from slipstream.utils import LedgerKwargs, set_seed

SAMPLES, BATCH, EPOCHS = 320, 16, 3


class SlowParabola(Dataset):
    """Points of a parabola, each as slow to load as an encoded image; one is NaN."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.002)
        x = torch.tensor([2 * place / SAMPLES - 1])
        return x, torch.tensor([float("nan")]) if place == 100 else x**2


def curve(model: torch.nn.Module, device: torch.device, size: int = 48) -> torch.Tensor:
    """Return what the model has learned as an image: white below its curve, and black above."""
    with torch.no_grad():
        heights = model(torch.linspace(-1, 1, size, device=device)[:, None]).squeeze(1)
    return (torch.linspace(1.1, -0.1, size)[:, None] < heights[None, :].cpu()).float()


def main() -> None:
    accelerator = Accelerator(
        project_dir="outputs/watching",  # creates a run folder, and at the end a report
        on_nan="skip",
        kwargs_handlers=[LedgerKwargs(interval=0.1)],  # the default is a second: this run takes three
        effective_batch_size=BATCH,
    )
    accelerator.init_trackers("parabola", config={"epochs": EPOCHS, "batch": BATCH})
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(SlowParabola(), batch_size=BATCH, shuffle=True))

    left_out = 0
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            left_out += accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()}, step=optimizer.updates)
        accelerator.log_images({"curve": curve(accelerator.unwrap_model(model), accelerator.device)}, step=optimizer.updates)
    with torch.no_grad():
        learned = accelerator.unwrap_model(model)(torch.tensor([[-0.5], [0.0], [0.5]], device=accelerator.device))
        rows = [[x, x**2, y] for x, y in zip((-0.5, 0.0, 0.5), learned.flatten().tolist(), strict=True)]
    accelerator.log_table("some points", columns=["x", "right", "learned"], data=rows, step=optimizer.updates)

    folder = accelerator.run_dir  # None on every process but the main one
    accelerator.end_training()  # prints where the time went, and the path of the report, to stderr
    if folder is not None:
        report = accelerator.ledger()
        print(f"{left_out} updates of {report.steps} were left out, {report.shares['data']:.0%} of the time went into waiting for data")
        for line in (folder / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            if event["kind"] == "guard":
                print(f"{event['guard']}: step {event['step']}, rank {event['rank']}: {event['text']}\n    {event['remedy']}")
        print(f"{folder} has {', '.join(sorted(path.name for path in folder.iterdir()))}")
    assert left_out == EPOCHS


if __name__ == "__main__":
    main()
