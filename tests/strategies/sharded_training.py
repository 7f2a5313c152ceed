"""A model with what sharding finds hard, training of it in a few lines, and the comparison of results."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator, init_empty_weights

WORDS, TOKENS, GLOBAL = 11, 5, 12


class Block(torch.nn.Module):
    """Sizes that no number of ranks divides, and a scalar parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(width, 2 * width + 1)
        self.narrow = torch.nn.Linear(2 * width + 1, width)
        self.scale = torch.nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.narrow(torch.tanh(self.wide(x)))


class Net(torch.nn.Module):
    """Blocks between an embedding and a head whose weights are tied; a buffer."""

    def __init__(self, width: int = 7, depth: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, WORDS, bias=False)
        self.register_buffer("temperature", torch.tensor(0.9))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.score(self.encode(words))

    def encode(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden)) / self.temperature


def net(seed: int = 0, **sizes: Any) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**sizes)


def net_on_main_process(accelerator: Accelerator) -> Net:
    """The model with its weights on the main process, and without any on the others."""
    if accelerator.is_main_process:
        return net()
    with init_empty_weights(include_buffers=True):
        model = Net()
    model.head.weight = model.embed.weight
    return model


def sentences(count: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (count, TOKENS + 1), generator=generator)
    return TensorDataset(words[:, :-1], words[:, 1:])


def batches(accelerator: Accelerator, count: int = 22) -> DataLoader[Any]:
    return DataLoader(sentences(count), batch_size=GLOBAL // accelerator.num_processes)


def loss_of(outputs: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), words.flatten())


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.AdamW:
    """Two groups: weights decay, biases and scales do not."""
    named = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in named if parameter.ndim > 1]},
        {"params": [parameter for parameter in named if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, **options)


def train(
    steps: int = 1, epochs: int = 2, model: torch.nn.Module | None = None, call: Any = None, **options: Any
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train with clipping; return the global losses, the norms of the updates, and the weights."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    model = model or net()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator))
    losses, norms = [], []
    for _ in range(epochs):
        for words, following in loader:
            with accelerator.accumulate(model):
                loss = loss_of((call or type(model).__call__)(model, words), following)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                if accelerator.sync_gradients:
                    norms.append(float(norm))
                optimizer.step()
                optimizer.zero_grad()
            shares = accelerator.gather(torch.tensor([float(loss), float(len(words))], device=accelerator.device)).view(-1, 2)
            losses.append(float((shares[:, 0] * shares[:, 1]).sum() / shares[:, 1].sum()))
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return losses, norms, state


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    """Fail unless these weights are the same, under the same names, plain and in host memory."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is torch.Tensor, name
        assert found[name].is_cpu, name
        assert torch.allclose(found[name], value, atol=atol, rtol=1e-5), (name, (found[name] - value).abs().max())


def same_run(found: Any, expected: Any, atol: float = 1e-5) -> None:
    """Fail unless two results of `train` agree in norms and weights (and in losses, where no batch was padded)."""
    assert torch.allclose(torch.tensor(found[1]), torch.tensor(expected[1]), atol=atol), (found[1], expected[1])
    same(found[2], expected[2], atol)
