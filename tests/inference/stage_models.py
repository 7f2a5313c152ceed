"""Models for the tests of pipelines, and how to compare what they give."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.distributed import pytree


def fixed(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights that are the same wherever it is made, in float64 and eval mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model.double().eval()


def same(found: Any, expected: Any) -> bool:
    """Whether two outputs have the same leaves, up to the last bits of float64; the first may be on a device."""
    pairs = zip(pytree.flatten(found), pytree.flatten(expected), strict=True)
    return all(
        pair.shape == other.shape and torch.allclose(pair.cpu(), other.cpu(), rtol=1e-12, atol=1e-12)
        if isinstance(other, torch.Tensor)
        else pair == other
        for pair, other in pairs
    )


class Tower(torch.nn.Module):
    """Layers of one size; the last one looks up a row for each, and knows ten."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(6)])
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Lookup(Tower):
    """Fails in its last stage where a number is above nine."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 8)

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + self.table(numbers))


class Crossing(torch.nn.Module):
    """Inputs and outputs of all kinds, at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(5)])
        self.register_buffer("shift", torch.full((4,), 0.5), persistent=False)
        self.scale = torch.tensor(2.0, dtype=torch.float64)
        self.unused = torch.nn.Linear(4, 4)

    @staticmethod
    def arguments(rows: int, length: int = 3, flag: bool = True) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 4, length, generator=generator).double().transpose(1, 2)
        mask = torch.rand(rows, length, generator=generator) > 0.5
        bias = torch.arange(length * 4.0).view(length, 4).double()
        return {"pair": (x, {"mask": mask}), "bias": bias, "flag": flag, "name": None}

    def forward(self, bias: torch.Tensor, pair: Any, flag: bool, name: str | None = None) -> dict[str, Any]:
        x, mask = pair[0], pair[1]["mask"]
        x = early = self.first(x) * self.scale
        for layer in self.layers:
            x = x + torch.relu(layer(x)) * mask[..., None] + self.shift
        late = torch.where(mask[..., None], x + bias, x) if flag else x
        return {"late": late, "early": (early.transpose(1, 2), mask), "name": name, "rows": [x.sum(dim=(1, 2))], "count": 3}
