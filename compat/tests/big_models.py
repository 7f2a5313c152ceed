"""A small language model for the tests of big models and hooks: tied, with buffers that are saved and that are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

TOKENS = torch.arange(6).view(2, 3)


class Block(nn.Module):
    """Two layers, a parameter of its own, a buffer that is saved and one that is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.ones(width))
        self.register_buffer("mask", torch.full((width,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        """Return the inputs with something added."""
        found: torch.Tensor = x + self.down(torch.relu(self.up(x))) * self.scale * self.mask + self.shift
        return found


class Language(nn.Module):
    """An embedding, blocks, a norm, and a head that may be the embedding."""

    def __init__(self, tied: bool = True, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(self.norm(x))
        return found


def language(tied: bool = True) -> Language:
    """Return a model with the same weights each time."""
    torch.manual_seed(0)
    return Language(tied)


DIVIDED = {"embed": "cpu", "blocks.0": "disk", "blocks.1": "cpu", "blocks.2": "disk", "norm": "cpu", "head": "cpu"}


def offloaded(model: nn.Module) -> set[str]:
    """Return the names of weights without values."""
    return {name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta}


def save_weights(state: Mapping[str, torch.Tensor], folder: Path, kind: str = "safetensors") -> Path:
    """Write weights as safetensors or as torch does; return the folder."""
    folder.mkdir(exist_ok=True)
    copied = {name: value.clone() for name, value in state.items()}
    if kind == "safetensors":
        safetensors.torch.save_file(copied, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(copied, folder / "pytorch_model.bin")
    return folder
