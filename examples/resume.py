"""Exact resume: a run that is interrupted in the middle of an epoch and resumed ends with the same bits.

    slipstream launch --cpu --num_processes 2 examples/resume.py

One run trains to the end, and saves a checkpoint. Another begins with other random numbers, loads that checkpoint, and trains the rest.
Shuffled data, dropout, accumulation, a schedule and a custom object resume exactly, also in the middle of an update.
"""

import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import broadcast_object_list, set_seed

EPOCHS = 3


class Record:
    """The losses so far; `register_for_checkpointing` adds it to the checkpoint."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict) -> None:
        self.losses = list(state["losses"])


def run(seed: int, folder: str, *, save_after: int | None = None) -> tuple[list[float], torch.Tensor]:
    """Return the final losses and weights of a run that saves after the given number of batches, or else loads."""
    accelerator = Accelerator(gradient_accumulation_steps=4)
    set_seed(seed)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))  # the data is always the same
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True).sin()), batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    record = Record()
    accelerator.register_for_checkpointing(record)

    if save_after is None:
        accelerator.load_state(folder)  # the next loop over the loader continues at the position of the checkpoint
        accelerator.print(f"goes on after {len(record.losses)} batches, in epoch {loader.epoch}")

    for _ in range(loader.epoch, EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            record.losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if len(record.losses) == save_after:
                accelerator.save_state(folder)

    weights = torch.cat([one.detach().flatten() for one in accelerator.unwrap_model(model).parameters()])
    accelerator.print("last losses " + "  ".join(f"{loss:.6f}" for loss in record.losses[-4:]))
    return record.losses, weights


def main() -> None:
    accelerator = Accelerator()
    with tempfile.TemporaryDirectory() as mine:
        folder = broadcast_object_list([f"{mine}/middle"])[0]  # that of the main process, for all of them
        losses, weights = run(1, folder, save_after=17)
        again, ended = run(2, folder)
        accelerator.wait_for_everyone()

    assert again == losses
    assert torch.equal(ended, weights)
    accelerator.print("the same losses and the same weights, bit for bit")
    accelerator.end_training()


if __name__ == "__main__":
    main()
