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


def test_what_is_small_is_one_block_but_for_the_whole_model_and_stacks():
    assert list(find_offload_blocks(nn.ModuleDict({"inner": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}), "inner").items()) == [
        ("inner", True)
    ]
    assert list(find_offload_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "").items()) == [("0", True), ("1", True)]
    inside = nn.ModuleDict({"inner": Model()})
    assert names(inside, "inner") == ["inner", *(f"inner.{name}" for name in names(Model(), "")[1:])]


def test_what_is_too_large_is_divided_and_its_own_tensors_come_alone():
    assert list(find_offload_blocks(Model(), "", largest=200).items()) == [
        ("", False),
        ("layers.0", True),
        ("layers.1", True),
        ("layers.2", True),
        ("head", True),
    ]


def test_a_list_of_modules_is_always_divided_since_nobody_calls_it():
    assert names(Model(), "layers") == ["layers.0", "layers.1", "layers.2"]


def test_classes_that_are_to_be_whole_are():
    assert names(Model(), "layers", largest=1) == [f"layers.{n}.{name}" for n in range(3) for name in ("up", "down")]
    assert names(Model(), "layers", largest=1, whole=["Layer"]) == ["layers.0", "layers.1", "layers.2"]


def test_what_has_another_place_is_left_out():
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
def test_modules_that_use_the_weights_of_their_children_stay_whole(module):
    assert list(find_offload_blocks(nn.Sequential(module), "", largest=1).items()) == [("0", True)]


def test_a_module_that_stands_twice_is_one_block():
    layer = nn.Linear(2, 2)
    assert names(nn.ModuleList([layer, layer]), "") == ["0"]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.lists(st.sampled_from(["layers.0", "layers.1.up", "head", "layers.2"]), unique=True))
def test_every_tensor_is_in_one_block_or_has_another_place(largest, apart):
    model = Model()
    found = []
    for name, whole in find_offload_blocks(model, "", largest=largest, apart=apart).items():
        module = model.get_submodule(name)
        found += [f"{name}.{parameter}" if name else parameter for parameter, _ in module.named_parameters(recurse=whole)]
    elsewhere = [name for name, _ in model.named_parameters() if any(name.startswith(f"{entry}.") for entry in apart)]
    assert sorted(found + elsewhere) == sorted(name for name, _ in model.named_parameters())
