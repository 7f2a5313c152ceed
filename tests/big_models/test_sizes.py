"""What models weigh."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.big_models.device_map.sizes import (
    CustomDtype,
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_module_leaves,
    get_module_size_with_ties,
    get_non_persistent_buffers,
    id_tensor_storage,
    make_sizer,
    named_module_tensors,
)
from slipstream.errors import ConfigError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5)
        self.register_buffer("ids", torch.arange(6), persistent=False)
        self.register_buffer("mask", torch.ones(10, dtype=torch.bool))


def test_sizes_add_up_at_every_level() -> None:
    """Sizes add up at every level."""
    sizes = compute_module_sizes(Model())
    wanted = {"scale": 28, "body.0": 64, "body.1": 4 * 4 * 4 + 8, "head": 100, "ids": 48, "mask": 10, "body.0.bias": 16}
    assert {name: sizes[name] for name in wanted} == wanted
    assert sizes["body"] == 64 + 72
    assert sizes[""] == 28 + 136 + 100 + 48 + 10
    assert sizes["nothing"] == 0
    assert compute_module_sizes(Model(), buffers_only=True)[""] == compute_module_total_buffer_size(Model()) == 48 + 10 + 40


def test_dtype_changes_sizes() -> None:
    """Types change sizes of numbers that can be converted."""
    sizes = compute_module_sizes(Model(), dtype="float16", special_dtypes={"head.weight": torch.float32, "scale": CustomDtype.INT4})
    assert (sizes["body.0"], sizes["head"], sizes["scale"], sizes["ids"], sizes["mask"]) == (32, 80 + 10, 4, 48, 10)
    assert compute_module_sizes(Model().half(), dtype=torch.float32)["head"] == 100
    quantized = torch.zeros(8).to(torch.float8_e4m3fn)
    assert make_sizer(torch.bfloat16)("weight", quantized) == 8
    with pytest.raises(ConfigError, match=r"special_dtypes\['head'\]='float17'"):
        compute_module_sizes(Model(), special_dtypes={"head": "float17"})


def test_tied_weights_count_once() -> None:
    """Tied weights count once."""
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4))
    model[1].weight = model[0].weight
    assert compute_module_sizes(model)[""] == 32 + 16


def test_largest_layer() -> None:
    """The largest layer is one that cannot be divided."""
    model = Model()
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(model.named_children(), sizes, []) == (100, ["head"])
    assert get_max_layer_size(model.named_children(), sizes, ["Sequential"]) == (136, ["body"])
    assert get_max_layer_size([("scale", model.scale), ("again", model.scale)], {"scale": 28, "again": 28}, None) == (
        28,
        ["scale", "again"],
    )
    assert calculate_maximum_sizes(model) == (322, (100, ["head"]))
    model._no_split_modules = ["Sequential"]
    assert calculate_maximum_sizes(model) == (322, (136, ["body"]))


def test_leaves() -> None:
    """Leaves are the names without others below."""
    assert get_module_leaves({"": 3, "a": 2, "a.b": 2, "ab": 1}) == ["a.b", "ab"]


def test_size_with_ties() -> None:
    """Size with ties counts what is shared once."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)})
    sizes = {"embed": 32, "embed.weight": 32, "head": 48, "head.weight": 32}
    assert get_module_size_with_ties(["head.weight"], 32, sizes, [("head", model["head"])]) == (48, ["head"], [model["head"]])
    with pytest.raises(ConfigError, match="'gone.weight' is not in the given modules"):
        get_module_size_with_ties(["gone.weight"], 32, sizes, [("head", model["head"])])


def test_named_tensors_and_unsaved_buffers() -> None:
    """Named tensors and buffers that are not saved."""
    model = Model()
    assert [name for name, _ in named_module_tensors(model)] == ["scale", "ids", "mask"]
    assert [name for name, _ in named_module_tensors(model, include_buffers=False)] == ["scale"]
    every = {name for name, _ in named_module_tensors(nn.Sequential(model), recurse=True, remove_non_persistent=True)}
    assert every == {f"0.{name}" for name in model.state_dict()}
    assert get_non_persistent_buffers(nn.Sequential(model), recurse=True) == {"ids"}
    assert get_non_persistent_buffers(nn.Sequential(model), recurse=True, fqns=True) == {"0.ids"}


def test_storage_tells_what_shares_memory() -> None:
    """Storage tells what shares memory."""
    zero = torch.zeros(4)
    assert id_tensor_storage(zero) == id_tensor_storage(zero[2:])
    assert id_tensor_storage(zero) != id_tensor_storage(zero.clone())
    empty = torch.zeros(4, device="meta")
    assert id_tensor_storage(empty) == id_tensor_storage(empty.view(2, 2))
    assert id_tensor_storage(empty) != id_tensor_storage(torch.zeros(4, device="meta"))
