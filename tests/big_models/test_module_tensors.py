"""Single tensors of a module: another device, type or value, and everything else as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.big_models.hooks.forward_hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from slipstream.big_models.hooks.module_tensors import (
    align_module_device,
    check_device_same,
    has_offloaded_params,
    set_module_tensor_to_device,
)
from slipstream.errors import ConfigError

META = torch.device("meta")


class Marked(nn.Parameter):
    pass


def model() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    made.register_buffer("table", torch.arange(3), persistent=False)
    return made


def test_value_takes_place_and_dtype() -> None:
    """A value takes the place and the type of the tensor."""
    entry = model()
    entry[0].weight.requires_grad_(False)
    set_module_tensor_to_device(entry, "0.weight", "cpu", value=torch.full((3, 2), 2.5, dtype=torch.float64))
    assert entry[0].weight.dtype is torch.float32
    assert (type(entry[0].weight), entry[0].weight.requires_grad) == (nn.Parameter, False)
    assert entry[0].weight.eq(2.5).all()
    set_module_tensor_to_device(entry, "1.running_mean", "cpu", value=torch.ones(3))
    assert "1.running_mean" in entry.state_dict()
    assert entry[1].running_mean.tolist() == [1, 1, 1]


def test_class_attributes_requires_grad() -> None:
    """Class attributes and requires grad are kept."""
    linear = nn.Linear(2, 2)
    linear.weight = Marked(linear.weight.detach())
    linear.weight.group = 7  # type: ignore[attr-defined]
    set_module_tensor_to_device(linear, "weight", "meta")
    assert (type(linear.weight), linear.weight.group, linear.weight.is_meta, linear.weight.requires_grad) == (Marked, 7, True, True)
    set_module_tensor_to_device(linear, "weight", "cpu", value=torch.ones(2, 2), dtype="bfloat16")
    assert (type(linear.weight), linear.weight.group, linear.weight.dtype) == (Marked, 7, torch.bfloat16)


def test_only_fractions_are_converted() -> None:
    """Only fractions are converted."""
    entry = model()
    set_module_tensor_to_device(entry, "table", "cpu", dtype=torch.float16)
    assert entry.table.dtype is torch.int64
    set_module_tensor_to_device(entry, "1.num_batches_tracked", "cpu", value=torch.tensor(5), dtype=torch.float16)
    assert entry[1].num_batches_tracked.dtype is torch.int64
    set_module_tensor_to_device(entry, "0.bias", "cpu", dtype=torch.float16)
    assert entry[0].bias.dtype is torch.float16
    assert "table" not in entry.state_dict()


def test_nothing_to_do() -> None:
    """Nothing to do leaves the very tensor."""
    linear = nn.Linear(2, 2)
    before = linear.weight
    set_module_tensor_to_device(linear, "weight", "cpu:0")
    assert linear.weight is before


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("0.weight", {"value": torch.ones(2, 3)}, r"0.weight of Sequential has shape \[3, 2\].*\[2, 3\]"),
        ("0.wait", {}, "'0.wait' names no parameter or buffer.*0 .Linear. has weight, bias"),
        ("7.weight", {}, "no module '7'"),
        ("0.weight", {"device": "disk"}, "0.weight cannot go to 'disk'"),
        ("0.weight", {"dtype": "float31"}, "dtype of 0.weight='float31'"),
        ("2.bias", {"device": "cpu"}, "2.bias.* is None"),
        ("0.weight", {"value": torch.ones(3, 2, device="meta")}, "the value given for it is on the meta device"),
    ],
)
def test_what_does_not_fit_is_named(name: str, arguments: dict[str, object], message: str) -> None:
    """What does not fit is named."""
    entry = model()
    entry.append(nn.Linear(2, 2, bias=False))
    with pytest.raises(ConfigError, match=message):
        set_module_tensor_to_device(entry, name, **{"device": "cpu", **arguments})  # type: ignore[arg-type]


def test_meta_without_a_value_says_so() -> None:
    """Meta without a value says so."""
    with pytest.raises(ConfigError, match="0.weight of Sequential cannot go to cpu: it is on the meta device.*Give `value=`"):
        set_module_tensor_to_device(model().to("meta"), "0.weight", "cpu")


def test_tied_copies_are_used_and_entered() -> None:
    """Tied copies are used and entered."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    value = torch.ones(2, 2)
    tied: dict[int, dict[torch.device, torch.Tensor]] = {value.data_ptr(): {}}
    set_module_tensor_to_device(first, "weight", "meta", value=value, tied_params_map=tied)
    entered = tied[value.data_ptr()][META]
    known = torch.zeros(2, 2)
    tied[value.data_ptr()][torch.device("cpu")] = known
    set_module_tensor_to_device(second, "weight", "cpu", value=value, tied_params_map=tied)
    assert second.weight.data_ptr() == known.data_ptr()
    assert entered.is_meta


def test_quantized_statistics_kept() -> None:
    """Statistics of quantized weights stay beside them."""
    linear = nn.Linear(2, 2)
    set_module_tensor_to_device(linear, "weight", "cpu", value=torch.ones(2, 2), fp16_statistics=torch.ones(2).half())
    assert linear.weight.SCB.dtype is torch.float16


def test_check_device_same_devices() -> None:
    """Devices are compared by what they are."""
    assert check_device_same(torch.device("cpu", 0), "cpu")
    assert check_device_same("meta", META)
    assert not check_device_same("cpu", META)


def test_has_offloaded_params_of_hook() -> None:
    """Offloaded params are those of a hook that offloads."""
    linear = nn.Linear(2, 2)
    add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu"))
    assert not has_offloaded_params(linear)
    add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu", offload=True))
    add_hook_to_module(linear, ModelHook(), append=True)
    assert has_offloaded_params(linear)


def test_align_moves_tensors() -> None:
    """Inside align module device tensors are on the device."""
    linear = nn.Linear(2, 2)
    before = linear.weight
    with align_module_device(linear, "meta"):
        assert linear.weight.is_meta
    assert linear.weight is before
    with align_module_device(linear):
        assert linear.weight is before


def test_align_brings_offloaded_weights() -> None:
    """Inside align module device offloaded weights have their values."""
    linear = nn.Linear(2, 2)
    expected = linear.weight.detach().clone()
    add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu", offload=True))
    with align_module_device(linear, "cpu"):
        assert torch.equal(linear.weight, expected)
    assert linear.weight.is_meta
    with align_module_device(linear, META):
        assert linear._hf_hook.execution_device == META
    assert linear._hf_hook.execution_device == "cpu"
    assert torch.equal(linear(torch.eye(2)), (torch.eye(2) @ expected.T) + linear.state_dict()["bias"])
