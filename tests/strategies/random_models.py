"""Random small models with what users put into models, as data that builds the same model anywhere, and plain training of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

WIDTH, ROWS, GLOBAL = 5, 18, 6


class Scale(torch.nn.Module):
    """A scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Shift(torch.nn.Module):
    """A buffer, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("factor", torch.tensor(0.9), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.shift


class Unused(torch.nn.Module):
    """A layer that no forward pass uses, beside one that every pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Linear(WIDTH, WIDTH)
        self.used = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Empty(torch.nn.Module):
    """No parameters, a parameter without entries, and a nested list of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Sequential()])
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nothing[1](self.nothing[0](x))


class Block(torch.nn.Module):
    """Layers, and a way around them; layers may appear twice."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, *, factor: float = 0.5) -> torch.Tensor:
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden)
        return x + factor * hidden


class Root(torch.nn.Module):
    """Blocks and layers in a row, a parameter of its own, and a head."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.start = torch.nn.Parameter(torch.zeros(1, WIDTH))
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + self.start
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def _transposed() -> torch.nn.Module:
    layer = torch.nn.Linear(WIDTH, WIDTH)
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone().t())
    return layer


LAYERS: dict[str, Any] = {
    "linear": lambda: torch.nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "norm": lambda: torch.nn.LayerNorm(WIDTH),
    "batch norm": lambda: torch.nn.BatchNorm1d(WIDTH).eval(),
    "tanh": torch.nn.Tanh,
    "dropout": lambda: torch.nn.Dropout(0.0),
    "scale": Scale,
    "shift": Shift,
    "unused": Unused,
    "empty": Empty,
    "transposed": _transposed,
    "wide": lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, 3), torch.nn.Tanh(), torch.nn.Linear(3, WIDTH, bias=False)),
}


@dataclass(frozen=True)
class Model:
    """A model as data: names of layers, ("again" | "tied", place) for an earlier one, or a tuple of these for a block."""

    layers: tuple[Any, ...]
    frozen_bias: bool = False

    def build(self) -> Root:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Root(_layers(self.layers)).double()
        if self.frozen_bias:
            model.head.bias.requires_grad_(False)
        return model


def _layers(described: tuple[Any, ...]) -> list[torch.nn.Module]:
    layers: list[torch.nn.Module] = []
    for entry in described:
        if isinstance(entry, str):
            layers.append(LAYERS[entry]())
        elif entry[0] == "again":
            layers.append(layers[entry[1] % len(layers)] if layers else torch.nn.Identity())
        elif entry[0] == "tied":
            owners = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
            layer = torch.nn.Linear(WIDTH, WIDTH)
            if owners:
                layer.weight = owners[entry[1] % len(owners)].weight
            layers.append(layer)
        else:
            layers.append(Block(_layers(entry[1])))
    return layers


@dataclass(frozen=True)
class Training:
    """How a model is trained, and how it is sharded."""

    optimizer: str = "AdamW"
    steps: int = 1
    clips: bool = True
    weighs: bool = False
    plugin: dict[str, Any] = field(default_factory=dict)


_names = st.sampled_from(list(LAYERS))
_again = st.tuples(st.sampled_from(["again", "tied"]), st.integers(0, 5))
_flat = st.lists(_names | _again, min_size=1, max_size=4).map(tuple)
_block = st.tuples(st.just("block"), _flat)
_nested = st.tuples(st.just("block"), st.lists(_names | _again | _block, min_size=1, max_size=4).map(tuple))
_twice = _flat.map(lambda layers: (("block", layers), ("block", layers)))


@st.composite
def models(draw: st.DrawFn) -> Model:
    parts = draw(st.lists((_names | _again | _nested).map(lambda entry: (entry,)) | _twice, min_size=1, max_size=4))
    return Model(tuple(entry for part in parts for entry in part), draw(st.booleans()))


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    plugin: dict[str, Any] = {}
    policy = draw(st.sampled_from([None, None, "no_wrap", "size_based_wrap", "function", "transformer_based_wrap"]))
    if policy is not None:
        plugin["auto_wrap_policy"] = policy
    if policy == "size_based_wrap":
        plugin["min_num_params"] = draw(st.sampled_from([1, 10, 60]))
    if policy == "transformer_based_wrap":
        plugin["transformer_cls_names_to_wrap"] = [draw(st.sampled_from(["Block", "Linear", "LayerNorm"]))]
    plugin["reshard_after_forward"] = draw(st.booleans())
    plugin["activation_checkpointing"] = draw(st.booleans())
    if draw(st.sampled_from([False, False, True])):
        plugin["ignored_modules"] = r"layers\.\d+"
    return Training(
        draw(st.sampled_from(["AdamW", "SGD"])), draw(st.integers(1, 3)), draw(st.booleans()), draw(st.booleans()), plugin
    )


def rows() -> torch.Tensor:
    return torch.randn(ROWS - 2, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def optimizer_of(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.AdamW(parameters, lr=0.01) if kind == "AdamW" else torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def train_plain(described: Model, training: Training) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Two passes in plain PyTorch: the norms of the updates, and the weights."""
    model = described.build()
    optimizer = optimizer_of(model, training.optimizer)
    norms = []
    whole = rows()
    for _ in range(2):
        for window in whole.split(GLOBAL * training.steps):
            model(window).square().mean().backward()
            if training.clips:
                norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, {name: value.detach().clone() for name, value in model.state_dict().items()}
