"""The policy says in one line what runs, and what cannot run is refused."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from torch import nn

from slipstream.devices import packages
from slipstream.devices.table import CPU
from slipstream.errors import ConfigError
from slipstream.precision import policy as policies
from slipstream.precision.policy import PrecisionType, check_device, check_parameters, make_policy


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mixed_precision": "no"}, "no: parameters float32, compute float32, gradients reduced in float32, outputs as computed"),
        ({"mixed_precision": "bf16"}, "bf16: parameters float32, compute bfloat16, gradients reduced in float32, outputs cast to float32"),
        (
            {"mixed_precision": "bf16", "outputs_to_fp32": False},
            "bf16: parameters float32, compute bfloat16, gradients reduced in float32, outputs as computed",
        ),
        (
            {"mixed_precision": PrecisionType.FP16, "outputs_to_fp32": True, "reduce": torch.bfloat16},
            "fp16: parameters float32, compute float16, gradients reduced in bfloat16, outputs cast to float32",
        ),
        (
            {"mixed_precision": "fp8"},
            "fp8: parameters float32, compute float8 in converted linear layers and bfloat16 elsewhere, "
            "gradients reduced in float32, outputs cast to float32",
        ),
        (
            {"mixed_precision": "bf16", "autocast": False},
            "bf16: parameters float32, compute float32 (autocast is turned off), gradients reduced in float32, outputs cast to float32",
        ),
    ],
)
def test_a_policy_is_one_line(options, line) -> None:
    assert str(make_policy(**options)) == line


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_policy("bf16").compute = torch.float32  # type: ignore[misc]


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'tf32'.*bf16"):
        make_policy("tf32")


@pytest.mark.parametrize(
    ("precision", "dtype", "expected"),
    [
        ("no", torch.bfloat16, (torch.bfloat16, torch.bfloat16, torch.bfloat16)),
        ("bf16", torch.bfloat16, (torch.bfloat16, torch.bfloat16, torch.bfloat16)),
        ("fp16", torch.bfloat16, (torch.bfloat16, torch.float16, torch.bfloat16)),
        ("bf16", torch.float64, (torch.float64, torch.float64, torch.float64)),
    ],
)
def test_policy_of_model(precision, dtype, expected) -> None:
    """The policy of a model is what its parameters and gradients are."""
    model = nn.Linear(4, 4, dtype=dtype)
    policy = make_policy(precision).for_model(model)
    assert (policy.param, policy.compute, policy.reduce) == expected
    with torch.autocast("cpu", dtype=policy.autocast_dtype, enabled=policy.autocast_dtype is not None):
        outputs = model(torch.ones(1, 4, dtype=dtype))
    outputs.sum().backward()
    assert outputs.dtype is policy.compute
    assert {parameter.grad.dtype for parameter in model.parameters()} == {policy.reduce}


def test_chosen_reduce_dtype() -> None:
    """A format of reduction that was chosen stays with a model."""
    policy = make_policy("bf16", reduce=torch.float16).for_model(nn.Linear(2, 2, dtype=torch.bfloat16))
    assert policy.reduce is torch.float16


def test_model_without_parameters() -> None:
    """A model without parameters leaves the policy as it is."""
    assert make_policy("bf16").for_model(nn.ReLU()) == make_policy("bf16")


def test_float16_parameters_refused() -> None:
    """Float16 parameters with a loss scale are refused by name."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float16))
    with pytest.raises(ConfigError, match=r"1\.weight.*float32"):
        check_parameters(make_policy("fp16"), model, scales=True)
    check_parameters(make_policy("fp16"), model, scales=False)
    model[1].requires_grad_(False)
    check_parameters(make_policy("fp16"), model, scales=True)


def test_bfloat16_parameters_are_fine() -> None:
    check_parameters(make_policy("fp16"), nn.Linear(2, 2, dtype=torch.bfloat16), scales=True)


def test_float64_warning() -> None:
    """Mixed precision on float64 warns that it has no effect."""
    with pytest.warns(UserWarning, match="no effect"):
        check_parameters(make_policy("bf16"), nn.Linear(2, 2, dtype=torch.float64), scales=False)


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16", "fp8"])
def test_cpu_supports_every_precision(precision: str) -> None:
    """The CPU computes in every precision."""
    if precision == "fp8":
        pytest.importorskip("torchao.float8")
    check_device(precision, "cpu")


def test_unsupported_device_refused(monkeypatch) -> None:
    """A device that cannot is refused."""
    old = dataclasses.replace(CPU, bf16=lambda _: False)
    monkeypatch.setattr(policies, "family_of", lambda _: old)
    check_device("fp16", "cpu")
    for precision in ("bf16", "fp8"):
        with pytest.raises(ConfigError, match=f"{precision}.*bfloat16"):
            check_device(precision, "cpu")
    other = dataclasses.replace(CPU, type="other")
    monkeypatch.setattr(policies, "family_of", lambda _: other)
    monkeypatch.setattr(policies, "is_fp16_available", lambda: False)
    with pytest.raises(ConfigError, match="float16"):
        check_device("fp16", "cpu")


def test_format_outside_autocast_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that the autocast of a device does not list is refused: torch would warn, and compute in float32."""
    namespace = types.SimpleNamespace(get_amp_supported_dtype=lambda: [torch.float16])
    monkeypatch.setattr(policies, "family_of", lambda _: dataclasses.replace(CPU, module=lambda: namespace))
    check_device("fp16", "cpu")
    with pytest.raises(ConfigError, match="bf16.*autocast computes in float16 only"):
        check_device("bf16", "cpu")


def test_device_without_autocast_refused() -> None:
    """A device without autocast is refused."""
    with pytest.raises(ConfigError, match="no autocast"):
        check_device("bf16", "meta")


def test_missing_float8_package(monkeypatch) -> None:
    """Float8 without its package says what to install."""
    monkeypatch.setitem(packages.PACKAGES, "torchao", packages.Package(("no_such_package",), ("no-such-package",)))
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[fp8\]'"):
        check_device("fp8", "cpu")
