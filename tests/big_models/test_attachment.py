"""Which modules of a tree get a hook, and of which kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.big_models.hooks.attachment import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from slipstream.big_models.hooks.forward_hooks import AlignDevicesHook, remove_hook_from_module
from slipstream.big_models.weight_store.weights import PrefixedDataset
from slipstream.errors import ConfigError


class Pair(nn.Module):
    """Uses the weight of a child that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.called = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x @ self.used.weight) * self.scale


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


IDS = torch.tensor([[0, 3, 4]])


def hooked(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")}


def test_execution_hooks_placed() -> None:
    """Execution hooks go where tensors are and no hook is."""
    model = Called()
    attach_execution_device_hook(model.embed, "meta", skip_keys="cache")
    kept = model.embed._hf_hook
    attach_execution_device_hook(model, "cpu", preload_module_classes=["Sequential"])
    assert hooked(model) == {"", "embed", "body", "head"}
    assert model.embed._hf_hook is kept
    assert not any(module._hf_hook.offload for module in model.modules() if hasattr(module, "_hf_hook"))


@pytest.mark.parametrize("given", [True, False])
def test_offload_every_module(given: bool) -> None:
    """Every module that holds tensors is offloaded."""
    model = Called()
    expected, weights = model(IDS), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights if given else None)
    assert hooked(model) == {"embed", "body.0", "body.2", "head"}
    assert all(parameter.is_meta for parameter in model.parameters())
    assert isinstance(model.body[0]._hf_hook.weights_map, PrefixedDataset) is given
    for _ in range(2):
        assert torch.equal(model(IDS), expected)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(IDS), expected)


def test_preloaded_classes() -> None:
    """Preloaded classes bring all that is below them."""
    model, x = nn.Sequential(Pair(), nn.Linear(3, 3)), torch.randn(2, 3)
    expected = model(x)
    attach_align_device_hook(model, execution_device="cpu", offload=True, preload_module_classes=["Pair"], offload_buffers=True)
    assert hooked(model) == {"0", "1"}
    assert model[0]._hf_hook.place_submodules
    assert model[0].scale.is_meta
    assert torch.equal(model(x), expected)


def test_blocks_follow_mapping() -> None:
    """Blocks run where the mapping says."""
    model = Called()
    expected, weights = model(IDS), model.state_dict()
    devices = {"embed": "cpu", "body": "cpu", "head": "cpu"}
    attach_align_device_hook_on_blocks(model, devices, {"embed": True, "body": False, "head": True}, weights_map=weights)
    assert model.embed.weight.is_meta
    assert model.head.weight.is_meta
    assert not model.body[0].weight.is_meta
    assert hooked(model) == {"", "embed", "body", "body.0", "body.2", "head"}
    assert model._hf_hook.io_same_device
    assert model.body._hf_hook.place_submodules
    assert torch.equal(model(IDS), expected)


def test_single_value_for_all_blocks() -> None:
    """One device or one flag holds for every block."""
    model = Called()
    expected = model(IDS)
    attach_align_device_hook_on_blocks(model, "cpu", {"body": True, "embed": False, "head": False}, weights_map=model.state_dict())
    assert model.body[0].weight.is_meta
    assert torch.equal(model(IDS), expected)
    other = Called()
    attach_align_device_hook_on_blocks(other, {"body": "cpu"}, True, weights_map=other.state_dict())
    assert other.body[0].weight.is_meta
    assert not other.embed.weight.is_meta


@pytest.mark.parametrize("offload", [True, False])
def test_no_mapping_is_one_block(offload: bool) -> None:
    """A model without mappings is one block."""
    model = Called()
    expected, weights = model(IDS), model.state_dict()
    attach_align_device_hook_on_blocks(model, "cpu", offload, weights_map=weights)
    assert isinstance(model._hf_hook, AlignDevicesHook)
    assert model._hf_hook.io_same_device
    assert model.embed.weight.is_meta is offload
    assert torch.equal(model(IDS), expected)


def test_unknown_blocks_refused() -> None:
    """Unknown blocks and texts for lists are refused."""
    with pytest.raises(ConfigError, match="'bodi', which this Called does not have"):
        attach_align_device_hook_on_blocks(Called(), {"bodi": "cpu"}, False)
    with pytest.raises(ConfigError, match=r"write a list of class names: \['Pair'\]"):
        attach_execution_device_hook(Called(), "cpu", preload_module_classes="Pair")  # type: ignore[arg-type]
