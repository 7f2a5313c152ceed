"""Hooks of `accelerate.hooks`, as clients add, call, rebuild and remove them."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from accelerate import hooks
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from torch import nn

from big_models import TOKENS, language, offloaded

ONES = torch.ones(1, 2)


class AddBefore(ModelHook):
    """Adds one to the input."""

    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + 1, *args[1:]), kwargs


class AddAfter(ModelHook):
    """Adds one to the output."""

    def post_forward(self, module, output):
        return output + 1


def test_add_and_remove():
    """A hook wraps forward, and its removal leaves nothing."""
    linear = nn.Linear(2, 2)
    expected = linear(ONES + 1)
    assert add_hook_to_module(linear, AddBefore()) is linear
    assert (linear.forward.__name__, list(inspect.signature(linear.forward).parameters)) == ("forward", ["input"])
    assert torch.equal(linear(ONES), expected)
    assert torch.equal(linear._old_forward(ONES + 1), expected)
    assert remove_hook_from_module(linear) is linear
    assert not {"_hf_hook", "_old_forward"} & set(vars(linear))
    remove_hook_from_module(linear)


def test_replace_or_append():
    """A second hook replaces the first, or runs after it."""
    linear = nn.Linear(2, 2)
    expected = linear(ONES + 1)
    add_hook_to_module(linear, AddAfter())
    add_hook_to_module(linear, AddBefore())
    assert torch.equal(linear(ONES), expected)
    add_hook_to_module(linear, AddAfter(), append=True)
    assert isinstance(linear._hf_hook, SequentialHook)
    assert [type(hook) for hook in linear._hf_hook.hooks] == [AddBefore, AddAfter]
    assert torch.equal(linear(ONES), expected + 1)


def test_no_grad():
    """A hook may run the forward without a graph."""

    class Frozen(ModelHook):
        no_grad = True

    assert not add_hook_to_module(nn.Linear(2, 2), Frozen())(ONES).requires_grad
    assert nn.Linear(2, 2)(ONES).requires_grad


@pytest.mark.parametrize("kind", ["AlignDevicesHook", "CpuOffload"])
def test_rebuilt_by_class_name(kind):
    """peft, transformers and diffusers make a hook anew from its attributes, by the names of the constructor's parameters."""
    made = {"AlignDevicesHook": AlignDevicesHook("cpu", offload=True, skip_keys="cache"), "CpuOffload": CpuOffload("cpu")}[kind]
    cls = getattr(hooks, type(made).__name__)
    given = {name: value for name, value in vars(made).items() if name in inspect.signature(cls.__init__).parameters}
    assert set(given) == {name for name in inspect.signature(cls.__init__).parameters if name != "self"}
    again = cls(**given)
    assert {name: getattr(again, name) for name in given} == given


def test_called_without_arguments():
    """transformers and diffusers load the weights of a module by hand."""
    linear = nn.Linear(2, 2)
    expected = linear.weight.detach().clone()
    add_hook_to_module(linear, AlignDevicesHook("cpu", offload=True))
    assert linear._hf_hook.original_devices == {"weight": torch.device("cpu"), "bias": torch.device("cpu")}
    linear._hf_hook.pre_forward(linear)
    assert torch.equal(linear.weight, expected)
    linear._hf_hook.post_forward(linear, torch.tensor([]))
    assert linear.weight.is_meta
    assert linear._hf_hook.post_forward(linear, ()) == ()


def test_weights_map_assigned():
    """peft gives the hook a plain dict with merged weights."""
    linear = add_hook_to_module(nn.Linear(2, 2, bias=False), AlignDevicesHook("cpu", offload=True))
    linear._hf_hook.weights_map = {"weight": torch.eye(2)}
    assert torch.equal(linear(ONES), ONES)


def test_io_same_device_assigned():
    """transformers sets it on a hook that is attached."""
    linear = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu"))
    linear._hf_hook.io_same_device = True
    assert linear(ONES).device == torch.device("cpu")


def test_on_every_layer():
    """Offload with weights in memory or in a map; removed, everything is there again."""
    for weights in (None, language().state_dict()):
        model = language()
        attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
        assert offloaded(model) == {name for name, _ in model.named_parameters()}
        assert torch.equal(model(TOKENS), language()(TOKENS))
        remove_hook_from_submodules(model)
        assert not offloaded(model)


def test_on_blocks():
    """Some blocks are offloaded, others are not."""
    model = language()
    devices = dict.fromkeys(("embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"), "cpu")
    attach_align_device_hook_on_blocks(model, devices, {**dict.fromkeys(devices, False), "blocks.1": True})
    assert all(name.startswith("blocks.1.") for name in offloaded(model))
    assert offloaded(model)
    assert model._hf_hook.io_same_device
    assert torch.equal(model(TOKENS), language()(TOKENS))


def test_execution_device_only():
    """Hooks that move inputs; nothing below classes that are left whole."""
    model = language()
    attach_execution_device_hook(model, "cpu", preload_module_classes=["Block"])
    assert hasattr(model.blocks[0], "_hf_hook")
    assert not hasattr(model.blocks[0].up, "_hf_hook")


def test_copies():
    """A copy of a hooked model is hooked and independent."""
    model = language()
    attach_align_device_hook(model, execution_device="cpu", offload=True)
    copied = copy.deepcopy(model)
    remove_hook_from_submodules(model)
    assert torch.equal(copied(TOKENS), language()(TOKENS))
    assert offloaded(copied)
