"""Weights stored in one type and computed with in another."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from slipstream.big_models.hooks.attachment import LayerwiseCastingHook, attach_layerwise_casting_hooks
from slipstream.big_models.hooks.forward_hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from slipstream.errors import ConfigError


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Sequential(nn.Linear(3, 3), nn.Embedding(2, 3)), nn.Conv1d(2, 2, 1))


def test_casting_result() -> None:
    """The result is that of the stored weights."""
    linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    rounded = copy.deepcopy(linear).to(torch.float8_e4m3fn).to(torch.float32)
    attach_layerwise_casting_hooks(linear, torch.float8_e4m3fn, torch.float32)
    for _ in range(2):
        assert torch.equal(linear(x), rounded(x))
        assert linear.weight.dtype is torch.float8_e4m3fn
    remove_hook_from_module(linear)
    assert torch.equal(linear.weight.float(), rounded.weight)


def test_skipped_patterns_and_classes() -> None:
    """Patterns and classes are left alone."""
    entry = model()
    attach_layerwise_casting_hooks(entry, torch.bfloat16, torch.float32, skip_modules_pattern=("^2",), skip_modules_classes=(nn.Conv1d,))
    types = {name: parameter.dtype for name, parameter in entry.named_parameters()}
    assert {name for name, dtype in types.items() if dtype is torch.bfloat16} == {"0.weight", "0.bias"}
    other = model()
    attach_layerwise_casting_hooks(other, torch.bfloat16, torch.float32, skip_modules_classes=())
    assert {name for name, p in other.named_parameters() if p.dtype is torch.float32} == {"1.weight", "1.bias", "2.1.weight"}


def test_exception_restores_storage() -> None:
    """An exception in forward stores again and copies work."""
    linear = nn.Linear(3, 3)
    attach_layerwise_casting_hooks(linear, torch.bfloat16, torch.float32)
    twin = copy.deepcopy(linear)
    for entry in (linear, twin):
        with pytest.raises(RuntimeError, match="shapes"):
            entry(torch.ones(1, 2))
        assert entry.weight.dtype is torch.bfloat16
        assert entry(torch.ones(1, 3)).dtype is torch.float32


def test_training_after_inference_mode() -> None:
    """Training continues after inference mode."""
    linear, x = nn.Linear(3, 3).requires_grad_(False), torch.ones(1, 3, requires_grad=True)
    attach_layerwise_casting_hooks(linear, torch.bfloat16, torch.float32)
    with torch.inference_mode():
        linear(x.detach())
    linear(x).sum().backward()
    assert x.grad is not None


def test_casting_goes_together_with_offloading(caplog: pytest.LogCaptureFixture) -> None:
    """Casting goes together with offloading."""
    linear, x = nn.Linear(3, 3).requires_grad_(False), torch.randn(2, 3)
    rounded = copy.deepcopy(linear).to(torch.bfloat16).to(torch.float32)
    add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu", offload=True))
    add_hook_to_module(linear, LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False), append=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(linear(x), rounded(x))
            assert linear.weight.is_meta
    assert not caplog.records


def test_wrong_dtypes_and_patterns() -> None:
    """Types and patterns that cannot be used are refused."""
    with pytest.raises(ConfigError, match="storage_dtype=torch.int8 is not a floating point type"):
        attach_layerwise_casting_hooks(nn.Linear(2, 2), torch.int8, torch.float32)
    with pytest.raises(ConfigError, match="compute_dtype='float32'"):
        LayerwiseCastingHook(torch.bfloat16, "float32", False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not a regular expression"):
        attach_layerwise_casting_hooks(nn.Linear(2, 2), torch.bfloat16, torch.float32, skip_modules_pattern="(")
