"""Models for tests of offloading, and what their runs on a device are compared with."""

from __future__ import annotations

import torch
from torch import nn

SIDE = 64
LAYER = SIDE * SIDE * 4
"""The bytes of one layer of `stack`."""


def stack(layers: int = 5) -> nn.Sequential:
    """Layers of one weight each: one copy and one product for each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)))


class Block(nn.Module):
    """Two layers, a buffer and a residual: its parts belong together."""

    def __init__(self, side: int = SIDE) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(side, 2 * side), nn.Linear(2 * side, side)
        self.register_buffer("scale", torch.full((side,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(torch.relu(self.up(x)))) * self.scale


class Words(nn.Module):
    """A small language model, with a weight that its two ends share."""

    _no_split_modules = ("Block",)

    def __init__(self, layers: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, SIDE)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(SIDE, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def words(layers: int = 4, tied: bool = True) -> Words:
    """The same model wherever it is made."""
    torch.manual_seed(0)
    return Words(layers, tied).eval()


IDS = torch.arange(12).view(3, 4)
SPREAD = {"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 2, "blocks.3": 3, "head": 0}
"""A device map of `words` over four devices."""
BLOCK = sum(tensor.nbytes for tensor in (*Block().parameters(), *Block().buffers()))
