"""A fixed effective batch size: 24 samples per update, on any number of processes, whatever fits on one device.

    slipstream launch --cpu --num_processes 2 examples/effective_batch.py

`batch_size` of the loader is the largest that fits on a device. The batch size that is used, and the number of batches per update, follow
from the number of processes: 24 = samples per device x processes x batches per update. The printed losses do not change.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import set_seed

EFFECTIVE = 24


def train(fits: int) -> list[float]:
    """Return the loss of every epoch, for a loader whose batches are the largest that fit."""
    accelerator = Accelerator(effective_batch_size=EFFECTIVE)
    set_seed(0)
    x = torch.randn(100, 3, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True).sin()), batch_size=fits, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), loader)

    losses = []
    for _ in range(4):
        errors = []
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                error = (model(inputs) - targets).square()
                accelerator.backward(error.mean())
                optimizer.step()
                optimizer.zero_grad()
                steps = accelerator.gradient_accumulation_steps
            errors.append(accelerator.gather_for_metrics(error.detach()))
        losses.append(torch.cat(errors).mean().item())
    used = loader.batch_size
    accelerator.print(f"fits {fits:2d}: {used} samples x {accelerator.num_processes} process(es) x {steps} batch(es) per update")
    assert used * accelerator.num_processes * steps == EFFECTIVE
    return losses


def main() -> None:
    accelerator = Accelerator()
    runs = [train(fits) for fits in (24, 8, 5)]
    for losses in runs:
        accelerator.print("losses " + "  ".join(f"{loss:.8f}" for loss in losses))
    assert all(abs(one - other) < 1e-9 for losses in runs for one, other in zip(losses, runs[0], strict=True))
    accelerator.end_training()


if __name__ == "__main__":
    main()
