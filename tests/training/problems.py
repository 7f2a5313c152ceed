"""Small problems in float64, and how one process of plain PyTorch solves them: the oracle of the training tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def model(seed: int = 0) -> torch.nn.Module:
    """A small network; the same on every call with one seed, and the caller's random state is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def rows(count: int, seed: int = 1) -> torch.utils.data.TensorDataset:
    """Inputs, targets and the number of each row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(count))


def mean_loss(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(net(x), y)


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def train_plain(batches: Sequence[Sequence[int]], data: torch.utils.data.TensorDataset, lr: float = 0.1, seed: int = 0) -> torch.Tensor:
    """The weights after one step of SGD with momentum on each of these batches of row numbers."""
    net = model(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for batch in batches:
        x, y, _ = data[list(batch)]
        optimizer.zero_grad()
        mean_loss(net, x, y).backward()
        optimizer.step()
    return weights(net)


def close(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(tensor, other, rtol=1e-9, atol=1e-11)


class Net(torch.nn.Module):
    """A small model that can be called in three ways."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.inner = torch.nn.Linear(3, width).double()
            self.outer = torch.nn.Linear(width, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class Batches:
    """A batch sampler whose batches have these sizes."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)
