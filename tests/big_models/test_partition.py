"""Into which modules an offloaded entry is cut."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from slipstream.big_models.device_map.partition import find_offload_blocks


class Layer(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.down(self.up(x))


class Model(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(4))
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x + self.position)
        return self.head(x)


def names(*arguments, **options):
    return list(find_offload_blocks(*arguments, **options))


def test_small_models_and_stacks():
    """What is small is one block but for the whole model and stacks."""
    assert list(find_offload_blocks(nn.ModuleDict({"inner": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}), "inner").items()) == [
        ("inner", True)
    ]
    assert list(find_offload_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "").items()) == [("0", True), ("1", True)]
    inside = nn.ModuleDict({"inner": Model()})
    assert names(inside, "inner") == ["inner", *(f"inner.{name}" for name in names(Model(), "")[1:])]


def test_large_modules_divided():
    """What is too large is divided and its own tensors come alone."""
    assert list(find_offload_blocks(Model(), "", largest=200).items()) == [
        ("", False),
        ("layers.0", True),
        ("layers.1", True),
        ("layers.2", True),
        ("head", True),
    ]


def test_module_list_always_divided():
    """A list of modules is always divided since nobody calls it."""
    assert names(Model(), "layers") == ["layers.0", "layers.1", "layers.2"]


def test_whole_classes_stay_whole():
    """Classes that are to be whole are."""
    assert names(Model(), "layers", largest=1) == [f"layers.{n}.{name}" for n in range(3) for name in ("up", "down")]
    assert names(Model(), "layers", largest=1, whole=["Layer"]) == ["layers.0", "layers.1", "layers.2"]


def test_other_entries_left_out():
    """What has another place is left out."""
    assert list(find_offload_blocks(Model(), "", apart=["layers.1", "head"]).items()) == [
        ("", False),
        ("layers.0", True),
        ("layers.2", True),
    ]


class WithList(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(4), torch.ones(4)])
        self.layer = Layer()

    def forward(self, x):
        return self.layer(x * self.scales[0]) * self.scales[1]


@pytest.mark.parametrize(
    "module",
    [
        nn.MultiheadAttention(4, 2),
        nn.TransformerEncoderLayer(4, 2, 8),
        WithList(),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_composites_stay_whole(module):
    """Modules that use the weights of their children stay whole."""
    assert list(find_offload_blocks(nn.Sequential(module), "", largest=1).items()) == [("0", True)]


def test_shared_module_is_one_block():
    """A module that stands twice is one block."""
    layer = nn.Linear(2, 2)
    assert names(nn.ModuleList([layer, layer]), "") == ["0"]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.lists(st.sampled_from(["layers.0", "layers.1.up", "head", "layers.2"]), unique=True))
def test_every_tensor_in_one_block(largest, apart):
    """Every tensor is in one block or has another place."""
    model = Model()
    found = []
    for name, whole in find_offload_blocks(model, "", largest=largest, apart=apart).items():
        module = model.get_submodule(name)
        found += [f"{name}.{parameter}" if name else parameter for parameter, _ in module.named_parameters(recurse=whole)]
    elsewhere = [name for name, _ in model.named_parameters() if any(name.startswith(f"{entry}.") for entry in apart)]
    assert sorted(found + elsewhere) == sorted(name for name, _ in model.named_parameters())
