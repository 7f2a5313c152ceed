"""The models of `offload.py`: feed-forward blocks, a small language model with a KV cache, and a large number of tiny layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH = 1024
VOCABULARY = 1000


class FeedForward(nn.Module):
    """`x + down(relu(up(x)))`."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tower(nn.Module):
    """Head, blocks, tail."""

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(FeedForward(hidden) for _ in range(blocks))
        self.tail = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


Cache = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of every layer."""


class Layer(nn.Module):
    """Grouped-query attention and a feed-forward part."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.both = nn.Linear(width, 2 * shared * self.size)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cache: Cache, layer: int) -> torch.Tensor:
        rows, steps, _ = x.shape
        seen = self.before(x)
        queries = self.query(seen).view(rows, steps, self.heads, self.size).transpose(1, 2)
        keys, values = self.both(seen).view(rows, steps, 2 * self.shared, self.size).transpose(1, 2).chunk(2, dim=1)
        if layer < len(cache):
            keys, values = torch.cat([cache[layer][0], keys], 2), torch.cat([cache[layer][1], values], 2)
            cache[layer] = (keys, values)
        else:
            cache.append((keys, values))
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=steps > 1, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, steps, -1))
        return x + self.down(torch.relu(self.up(self.between(x))))


class Writer(nn.Module):
    """A language model: tokens in, logits for the next token out."""

    def __init__(self, layers: int, width: int = 768, heads: int = 12, shared: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width, heads, shared) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, cache, number)
        return self.head(x[:, -1])

    def write(self, prompts: torch.Tensor, count: int) -> list[list[int]]:
        """Return `count` tokens for each prompt, by greedy decoding."""
        cache: Cache = []
        found = [self(prompts, cache).argmax(-1, keepdim=True)]
        while len(found) < count:
            found.append(self(found[-1], cache).argmax(-1, keepdim=True))
        written: list[list[int]] = torch.cat(found, 1).tolist()
        return written


class Crowd(nn.Module):
    """Many small tensors, two in a layer, a hundred layers in a group."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        layers = tensors // 2
        groups = [min(100, layers - start) for start in range(0, layers, 100)]
        self.groups = nn.ModuleList(nn.ModuleList(nn.Linear(16, 16) for _ in range(count)) for count in groups)


def made(kind: str, *sizes: int, empty: bool = True) -> Any:
    """Return a model of one of the kinds; without values if it is `empty`, else with the same values every time."""
    make = {"tower": Tower, "writer": Writer, "crowd": Crowd}[kind]
    with torch.device("meta"):
        model = make(*sizes)
    if not empty:
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.uniform_(-0.04, 0.04)
    return model.eval()
