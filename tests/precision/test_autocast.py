"""Autocast is installed once, and the model stays what it was in every other way."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from slipstream.errors import StateError
from slipstream.precision.autocast import autocast_context, install_autocast, remove_autocast
from slipstream.precision.policy import AutocastKwargs, make_policy

X = torch.ones(2, 4)
Point = namedtuple("Point", "x y")
BF16, FP16, NO = make_policy("bf16", outputs_to_fp32=False), make_policy("fp16", outputs_to_fp32=False), make_policy("no")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> dict[str, torch.Tensor]:
        """What the model computes."""
        out = self.layer(x)
        self.seen.append(out.dtype)
        return {"out": out * factor}


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> dict[str, torch.Tensor]:
        return {"out": self.layer(x) * factor}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("policy", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)])
def test_the_policy_is_what_ran(model: Model, policy, dtype) -> None:
    install_autocast(model, policy, "cpu")
    outputs = model(X)["out"]
    outputs.float().sum().backward()
    assert model.seen == [policy.compute] == [dtype]
    assert {parameter.dtype for parameter in model.parameters()} == {policy.param} == {torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {policy.reduce}
    assert outputs.dtype is dtype
    assert policy.output is None


@dataclass
class Outputs(dict):  # as the outputs of transformers are: a mapping and a dataclass
    loss: torch.Tensor
    inner: object

    def __post_init__(self) -> None:
        self["loss"], self["inner"] = self.loss, self.inner

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        setattr(self, key, value)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_outputs_float32_by_default(model: Model, precision: str) -> None:
    """Outputs are float32 by default.

    Wherever they are in nested outputs; integers, and tensors that are float64, stay.
    """
    kind = make_policy(precision).autocast_dtype
    install_autocast(model, make_policy(precision), "cpu")
    assert model(X)["out"].dtype is torch.float32
    assert model.seen == [kind]

    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            low = x.to(kind)
            return Outputs(low.sum(), [(low, torch.arange(2)), {"wide": x.double(), "text": "a"}, Point(low, None)])

    nested = Nested()
    install_autocast(nested, make_policy(precision), "cpu")
    found = nested(X)
    assert type(found) is Outputs
    assert found.loss.dtype is found["loss"].dtype is torch.float32
    assert [found.inner[0][0].dtype, found.inner[0][1].dtype, found.inner[1]["wide"].dtype] == [torch.float32, torch.int64, torch.float64]
    assert type(found.inner[2]) is Point
    assert found.inner[2].x.dtype is torch.float32


def test_half_weights_give_float32_outputs(model: Model) -> None:
    """Outputs of half precision weights are float32 without mixed precision too."""
    model.bfloat16()
    install_autocast(model, make_policy("no", outputs_to_fp32=True), "cpu")
    assert model(X.bfloat16())["out"].dtype is torch.float32
    assert model.seen == [torch.bfloat16]


def test_nothing_installed_without_precision(model: Model) -> None:
    """Without mixed precision nothing is installed."""
    before = dict(vars(model))
    install_autocast(model, NO, "cpu")
    assert "forward" not in vars(model)
    assert vars(model) == before


def test_autocast_turned_off(model: Model) -> None:
    """Autocast can be turned off."""
    install_autocast(model, make_policy("bf16", autocast=False), "cpu", AutocastKwargs(enabled=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(X)["out"].dtype is torch.float32


def test_class_and_signature_stay(model: Model) -> None:
    """Class keys signature and docstring stay."""
    signature, keys = inspect.signature(model.forward), list(model.state_dict())
    install_autocast(model, BF16, "cpu")
    assert type(model) is Model
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature
    assert inspect.getfullargspec(model.forward).kwonlyargs == ["factor"]
    assert inspect.unwrap(model.forward) == Model.forward.__get__(model)
    assert model.forward.__name__ == "forward"
    assert inspect.getdoc(model.forward) == "What the model computes."


def test_install_twice_and_remove(model: Model) -> None:
    """Installing again replaces and removing restores."""
    install_autocast(model, BF16, "cpu")
    install_autocast(model, FP16, "cpu")
    assert (model.forward.policy, model(X)["out"].dtype) == (FP16, torch.float16)
    install_autocast(model, NO, "cpu")
    assert ("forward" in vars(model), model(X)["out"].dtype) == (False, torch.float32)
    remove_autocast(model)
    assert "forward" not in vars(model)


def test_instance_forward_restored(model: Model) -> None:
    """A forward that stood in the instance is used and comes back."""
    own = model.forward

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return own(x)["out"] * 2

    model.forward = doubled
    expected = model(X)
    install_autocast(model, BF16, "cpu")
    install_autocast(model, BF16, "cpu")
    assert model(X).dtype is torch.bfloat16
    torch.testing.assert_close(model(X).float(), expected, rtol=0.02, atol=0.02)
    assert inspect.signature(model.forward) == inspect.signature(doubled)
    remove_autocast(model)
    assert model.forward is doubled


@pytest.mark.parametrize("kind", ["deepcopy", "deepcopy of a parent", "pickle"])
def test_copy_uses_own_weights(model: Model, kind: str) -> None:
    """A copy computes with its own weights."""
    install_autocast(model, BF16, "cpu")
    if kind == "pickle":
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    else:
        twin = copy.deepcopy(model) if kind == "deepcopy" else copy.deepcopy(nn.Sequential(model))[0]
    before = model(X)["out"]
    with torch.no_grad():
        twin.layer.weight.zero_()
        twin.layer.bias.fill_(7.0)
    assert twin(X)["out"].tolist() == [[7.0] * 3] * 2
    assert twin(X)["out"].dtype is (torch.float32 if kind == "pickle" else torch.bfloat16)
    assert torch.equal(model(X)["out"], before)
    del model
    gc.collect()
    assert twin(X)["out"].tolist() == [[7.0] * 3] * 2


def test_copy_of_forward(model: Model) -> None:
    """A copy of the forward alone stays with its model."""
    install_autocast(model, BF16, "cpu")
    assert torch.equal(copy.deepcopy(model.forward)(X)["out"], model(X)["out"])


def test_model_freed_without_gc(model: Model, request: pytest.FixtureRequest) -> None:
    """The model is freed without the garbage collector."""
    held = Model()
    install_autocast(held, BF16, "cpu")
    held(X)
    gc.disable()
    try:
        alive = weakref.ref(held)
        del held
        assert alive() is None
    finally:
        gc.enable()


def test_forward_without_model() -> None:
    """A forward whose model is gone is reported."""
    held = Model()
    install_autocast(held, BF16, "cpu")
    forward = held.forward
    del held
    with pytest.raises(StateError, match="deepcopy"):
        forward(X)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_compiler_traces_through(dynamo: None, backend: str, in_place: bool) -> None:
    model = Traced()
    install_autocast(model, make_policy("bf16"), "cpu")
    expected = model(X, factor=2.0)["out"]
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    if in_place:
        model.compile(backend=backend, fullgraph=True)
    outputs = (model if in_place else torch.compile(model, backend=backend, fullgraph=True))(X, factor=2.0)["out"]
    outputs.sum().backward()
    assert torch.equal(outputs, expected)
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), gradients, strict=True))


def test_autocast_installed_after_compile(dynamo: None) -> None:
    """A compiled model computes in what is installed later."""
    model = Traced()
    model.compile(backend="eager", fullgraph=True)
    kinds = [model(X)["out"].dtype]
    install_autocast(model, BF16, "cpu")
    kinds.append(model(X)["out"].dtype)
    remove_autocast(model)
    kinds.append(model(X)["out"].dtype)
    assert kinds == [torch.float32, torch.bfloat16, torch.float32]


def test_recursive_model() -> None:
    """A model that calls itself keeps its precision."""

    class Recursive(nn.Linear):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return super().forward(self(x, depth - 1) if depth else x)

    model = Recursive(4, 4)
    install_autocast(model, BF16, "cpu")
    assert model(X).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("policy", "handler", "dtype"),
    [
        (NO, None, torch.float32),
        (BF16, None, torch.bfloat16),
        (FP16, None, torch.float16),
        (make_policy("fp8"), None, torch.bfloat16),
        (BF16, AutocastKwargs(enabled=False), torch.float32),
    ],
)
def test_autocast_context(policy, handler, dtype) -> None:
    """The context computes as the policy says."""
    with autocast_context(policy, "cpu", handler):
        assert (X @ X.T).dtype is dtype


def test_context_inside_autocast() -> None:
    """The context without mixed precision leaves an outer autocast alone unless turned off."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with autocast_context(NO, "cpu"):
            assert (X @ X.T).dtype is torch.bfloat16
        with autocast_context(NO, "cpu", AutocastKwargs(enabled=False)):
            assert (X @ X.T).dtype is torch.float32


def test_weight_cache(model: Model) -> None:
    """The weight cache is as asked."""
    seen = []
    model.layer.register_forward_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    for wanted in (True, False):
        install_autocast(model, BF16, "cpu", AutocastKwargs(cache_enabled=wanted))
        model(X)
    assert seen == [True, False]
