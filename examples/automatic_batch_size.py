"""The largest batch that fits into memory, found by trial, with a constant effective batch size.

    slipstream launch --cpu --num_processes 2 examples/automatic_batch_size.py

The function is called with smaller and smaller batches until no process runs out of memory; all of them use the same size.
With `effective_batch_size` the number of batches per update grows as the batch shrinks, so training stays the same.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import find_executable_batch_size, set_seed

EFFECTIVE = 64  # samples per update, over all processes


def device_memory(batch_size: int, process: int) -> None:
    """Simulate small devices: 20 samples fit on the first one, and 10 on the others."""
    if batch_size > (20 if process == 0 else 10):
        raise MemoryError(f"a batch of {batch_size} does not fit")


# Everything is built inside, so that a failed attempt keeps nothing. 256 exceeds the 64 samples per update: the search starts lower.
@find_executable_batch_size(starting_batch_size=256, effective_batch_size=EFFECTIVE)
def train(batch_size: int, gradient_accumulation_steps: int, epochs: int) -> tuple[int, int, float]:
    accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
    accelerator.print(f"trying batches of {batch_size} and {gradient_accumulation_steps} step(s)")
    set_seed(0)
    x = torch.randn(256, 4)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=batch_size, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss = torch.zeros(())
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                device_memory(len(inputs), accelerator.process_index)
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    loss = accelerator.reduce(loss.detach(), reduction="mean").item()
    accelerator.print(f"batches of {batch_size} fit: loss {loss:.4f}")
    assert batch_size * gradient_accumulation_steps * accelerator.num_processes == EFFECTIVE
    accelerator.end_training()
    return batch_size, gradient_accumulation_steps, loss


def main() -> None:
    batch_size, steps, loss = train(epochs=5)
    assert batch_size <= 20
    assert loss < 0.1, loss


if __name__ == "__main__":
    main()
