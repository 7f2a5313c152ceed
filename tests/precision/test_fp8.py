"""float8: linear layers are converted in place and train; what is not converted is told."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.precision.autocast import install_autocast
from slipstream.precision.fp8 import (
    convert_model_to_fp8_ao,
    convert_to_fp8,
    filter_first_and_last_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from slipstream.precision.policy import AORecipeKwargs, make_policy

float8 = pytest.importorskip("torchao.float8")
EMULATED = float8.Float8LinearConfig(emulate=True)


class Derived(nn.Linear):
    """Computes something of its own."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    inner = [nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 24), nn.Linear(24, 32), Derived(32, 32)]
    return nn.Sequential(nn.Linear(16, 32), *inner, nn.Linear(32, 16))


def converted(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if "Float8" in type(layer).__name__]


def test_converted_layers() -> None:
    """All but the first the last and odd layers are converted."""
    model = layers()
    assert not has_ao_layers(model)
    with pytest.warns(UserWarning, match="emulated on the CPU"):
        assert convert_to_fp8(model) is model
    assert converted(model) == ["1"]
    assert has_ao_layers(model)


def test_parameters_and_hooks_stay() -> None:
    """Parameters keys modes and hooks stay."""
    model, calls = layers().eval(), []
    handle = model[1].register_forward_hook(lambda *_: calls.append(1))
    parameters, keys = list(model.parameters()), list(model.state_dict())
    with pytest.warns(UserWarning, match="emulated"):
        convert_to_fp8(model, AORecipeKwargs(module_filter_func=lambda layer, name: name == "1"))
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert not model[1].training
    model(torch.ones(2, 16))
    handle.remove()
    model(torch.ones(2, 16))
    assert calls == [1]


def test_training_close_to_float32() -> None:
    """It trains close to float32 and computes around in bfloat16."""
    reference, model = layers(), layers()
    with pytest.warns(UserWarning, match="emulated"):
        convert_to_fp8(model)
    policy = make_policy("fp8")
    install_autocast(model, policy, "cpu")
    seen = []
    model[2].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    x = torch.randn(32, 16)
    for entry in (reference, model):
        entry(x).float().pow(2).mean().backward()
    assert seen == [policy.compute] == [torch.bfloat16]
    assert {parameter.grad.dtype for parameter in model.parameters()} == {policy.reduce} == {torch.float32}
    weight, expected = model[1].weight.grad, reference[1].weight.grad
    assert torch.nn.functional.cosine_similarity(weight.flatten(), expected.flatten(), dim=0) > 0.98
    assert not torch.equal(weight, expected)


def test_user_filter_and_config() -> None:
    """A choice and a config of the user are taken."""
    model = convert_model_to_fp8_ao(layers(), EMULATED, lambda layer, name: name in ("0", "6"))
    assert converted(model) == ["0", "6"]
    assert model[0].config is EMULATED


def test_the_named_default_is_the_default() -> None:
    with pytest.warns(UserWarning, match="emulated"):
        model = convert_to_fp8(layers(), AORecipeKwargs(module_filter_func=filter_first_and_last_linear_layers))
    assert converted(model) == ["1"]
    assert filter_first_and_last_linear_layers(nn.Linear(16, 16), "any")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)


def test_padding_is_passed_on() -> None:
    with pytest.warns(UserWarning, match="emulated"):
        assert convert_to_fp8(layers(), AORecipeKwargs(pad_inner_dim=True))[1].config.pad_inner_dim


@pytest.mark.parametrize(
    ("model", "recipe", "why"),
    [
        (nn.Sequential(nn.ReLU()), AORecipeKwargs(), "no linear layers"),
        (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), AORecipeKwargs(), "first and the last"),
        (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(8, 16)), AORecipeKwargs(), r"1 \(Linear 16 to 8\)"),
        (layers(), AORecipeKwargs(module_filter_func=lambda layer, name: False), "module_filter_func took none"),
    ],
)
def test_nothing_converted_warning(model, recipe, why) -> None:
    """A model in which nothing was converted says why."""
    with pytest.warns(UserWarning, match=why):
        convert_to_fp8(model, recipe)
    assert not has_ao_layers(model)


def test_single_layer_refused() -> None:
    """A layer alone cannot be converted in place."""
    with pytest.raises(ConfigError, match="Sequential"):
        convert_to_fp8(nn.Linear(16, 16), AORecipeKwargs(config=EMULATED, module_filter_func=lambda layer, name: True))


def test_missing_torchao(monkeypatch) -> None:
    """Without torchao it says what to install."""
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[fp8\]'"):
        convert_to_fp8(layers())
