"""Data that does not divide: 13 samples, batches of 2, any number of processes.

    slipstream launch --cpu --num_processes 2 examples/uneven_data.py

By default the last batch stays short. Losses are weighted by samples, so each update has exactly the gradient that one process
would compute on the whole batch; this script compares them. A process without a share of the last batch gets a batch of weight
zero, so that it keeps step.

`even_batches=True` completes the last batch with samples from the start, so that all batches have the same size. Those samples count
twice in training; in gathered metrics every sample counts once either way.
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.utils import DataLoaderConfiguration, set_seed

SAMPLES, BATCH = 13, 2


def problem() -> tuple[TensorDataset, torch.nn.Module]:
    set_seed(0)
    x = torch.randn(SAMPLES, 3, dtype=torch.float64)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    return TensorDataset(x, x.sum(dim=1, keepdim=True), torch.arange(SAMPLES)), model


def prepared(even_batches: bool) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the weights after an epoch, the samples that were read, and those that were gathered for metrics."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even_batches))
    data, model = problem()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=BATCH))
    handed: list[int] = []
    measured: list[int] = []
    for x, y, numbers in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))  # a mean, as always
        optimizer.step()
        optimizer.zero_grad()
        handed += accelerator.gather(numbers).tolist()
        measured += accelerator.gather_for_metrics(numbers).tolist()
    return accelerator.unwrap_model(model).weight.detach().flatten(), handed, measured


def plain(batch_size: int) -> torch.Tensor:
    """One process, plain PyTorch."""
    data, model = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y, _ in DataLoader(data, batch_size=batch_size):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.weight.detach().flatten()


def main() -> None:
    accelerator = Accelerator()
    expected = plain(batch_size=BATCH * accelerator.num_processes)
    for even_batches in (False, True):
        weights, handed, measured = prepared(even_batches)
        far = (weights.cpu() - expected).abs().max().item()
        accelerator.print(f"even_batches={even_batches}: {len(handed)} samples were handed out for {SAMPLES}: {handed}")
        accelerator.print(f"  {len(measured)} were measured; the weights differ from those of one process by {far:.1e}")
        assert measured == list(range(SAMPLES))
        assert even_batches or far < 1e-12
    accelerator.end_training()


if __name__ == "__main__":
    main()
