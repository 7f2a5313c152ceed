"""The loss scale: gradients are divided once and by what they were multiplied with, and overflows leave parameters alone.

The oracle is `torch.amp.GradScaler`, used the way torch documents it.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from slipstream.errors import ConfigError, StateError
from slipstream.precision.policy import GradScalerKwargs
from slipstream.precision.scaler import LossScaler, NoScaler, make_scaler

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}
OPTIONS = GradScalerKwargs(init_scale=64.0, growth_interval=2)
OVERFLOW = float("inf")


def parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value))


def loss_of(parameter: nn.Parameter, factor: float = 1.0) -> torch.Tensor:
    return (parameter * factor).sum()


def one_update(scaler: LossScaler, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, factor: float = 1.0) -> bool:
    optimizer.zero_grad()
    scaler.scale(loss_of(parameter, factor)).backward()
    return scaler.step(optimizer)


def torch_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)


Iteration = tuple[float, float, bool, bool]
FACTORS = st.sampled_from([0.25, 1.0, 3.0, OVERFLOW])


@settings(max_examples=60, deadline=None)
@given(
    plan=st.lists(st.tuples(FACTORS, FACTORS, st.booleans(), st.booleans()), min_size=1, max_size=6),
    kinds=st.tuples(st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(sorted(OPTIMIZERS))),
)
def test_two_optimizers_of_one_scale_do_what_plain_torch_does(plan: list[Iteration], kinds: tuple[str, str]) -> None:
    ours, theirs = [parameter(1.0), parameter(2.0)], [parameter(1.0), parameter(2.0)]
    our_optimizers = [OPTIMIZERS[kind]([our]) for kind, our in zip(kinds, ours, strict=True)]
    their_optimizers = [OPTIMIZERS[kind]([their]) for kind, their in zip(kinds, theirs, strict=True)]
    scaler, oracle = LossScaler("cpu", OPTIONS), torch_scaler()
    for first, second, first_clips, second_clips in plan:
        for optimizer in (*our_optimizers, *their_optimizers):
            optimizer.zero_grad()
        for position, factor in enumerate((first, second)):
            scaler.scale(loss_of(ours[position], factor)).backward()
            oracle.scale(loss_of(theirs[position], factor)).backward()
        for position, clips in enumerate((first_clips, second_clips)):
            if clips:
                scaler.unscale(our_optimizers[position])
                scaler.unscale(our_optimizers[position])
                oracle.unscale_(their_optimizers[position])
                nn.utils.clip_grad_norm_(ours[position], 0.5)
                nn.utils.clip_grad_norm_(theirs[position], 0.5)
        for position, factor in enumerate((first, second)):
            before = ours[position].detach().clone()
            assert scaler.step(our_optimizers[position]) is (factor != OVERFLOW)
            assert torch.equal(before, ours[position]) is (factor == OVERFLOW)
            oracle.step(their_optimizers[position])
        oracle.update()
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert scaler.state_dict() == oracle.state_dict()


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_an_overflow_leaves_the_parameters_alone_and_halves_the_scale(kind: str) -> None:
    entry = parameter()
    optimizer, scaler = OPTIMIZERS[kind]([entry]), LossScaler("cpu", OPTIONS)
    assert one_update(scaler, optimizer, entry, OVERFLOW) is False
    assert entry.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 32.0
    assert one_update(scaler, optimizer, entry) is True
    assert entry.tolist() != [1.0, 1.0]


def test_accumulated_gradients_have_one_scale() -> None:
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    for _ in range(3):
        scaler.scale(loss_of(entry)).backward()
        assert not scaler.due
    scaler.step(optimizer)
    torch.testing.assert_close(entry.detach(), torch.full((2,), 1.0 - 0.1 * 3))


def test_the_scale_moves_when_the_next_loss_comes_and_not_before() -> None:
    entry, other = parameter(), parameter()
    first, second = OPTIMIZERS["sgd"]([entry]), OPTIMIZERS["sgd"]([other])
    scaler = LossScaler("cpu", GradScalerKwargs(init_scale=64.0, growth_interval=1))
    scaler.scale(loss_of(entry) + loss_of(other)).backward()
    scaler.step(first)
    assert scaler.due
    scaler.step(second)
    torch.testing.assert_close(other.detach(), entry.detach())
    assert scaler.flush(want_ratio=True) == 2.0
    assert not scaler.due
    assert scaler.flush(want_ratio=True) == 1.0
    assert scaler.get_scale() == 128.0


def test_gradients_that_wait_can_be_brought_to_the_new_scale() -> None:
    entry, other = parameter(), parameter()
    first, second = OPTIMIZERS["sgd"]([entry]), OPTIMIZERS["sgd"]([other])
    scaler = LossScaler("cpu", GradScalerKwargs(init_scale=64.0, growth_interval=1))
    scaler.scale(loss_of(entry) + loss_of(other)).backward()
    scaler.step(first)
    other.grad *= scaler.flush(want_ratio=True)
    scaler.scale(loss_of(other)).backward()
    scaler.step(second)
    torch.testing.assert_close(other.detach(), torch.full((2,), 1.0 - 0.1 * 2))


def test_a_loss_between_clipping_and_stepping_changes_nothing() -> None:
    entry, other = parameter(), parameter()
    first, second = OPTIMIZERS["sgd"]([entry]), OPTIMIZERS["sgd"]([other])
    scaler = LossScaler("cpu", GradScalerKwargs(init_scale=64.0, growth_interval=1))
    for update in (1, 2):
        first.zero_grad()
        second.zero_grad()
        scaler.scale(loss_of(entry)).backward()
        scaler.unscale(first)
        scaler.scale(loss_of(other)).backward()
        scaler.unscale(first)
        assert entry.grad.tolist() == [1.0, 1.0]
        assert scaler.step(first)
        assert scaler.step(second)
        torch.testing.assert_close(entry, other)
        assert scaler.get_scale() == 64.0 * 2**update


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_was_given_up_after_clipping_does_not_spoil_the_next(set_to_none: bool) -> None:
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    scaler.scale(loss_of(entry, 100.0)).backward()
    scaler.unscale(optimizer)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.cleared(optimizer)
        scaler.scale(loss_of(entry)).backward()
        scaler.unscale(optimizer)
        assert entry.grad.tolist() == [1.0, 1.0]
    nn.utils.clip_grad_norm_(entry, 100.0)
    assert scaler.step(optimizer)
    torch.testing.assert_close(entry.detach(), torch.full((2,), 0.9))


def test_an_optimizer_that_gave_up_does_not_hold_the_scale_of_another() -> None:
    entry, other = parameter(), parameter()
    first, second = OPTIMIZERS["sgd"]([entry]), OPTIMIZERS["sgd"]([other])
    scaler = LossScaler("cpu", GradScalerKwargs(init_scale=64.0, growth_interval=1))
    scaler.scale(loss_of(entry) + loss_of(other)).backward()
    scaler.unscale(second)
    second.zero_grad()
    scaler.step(first)
    for _ in range(3):
        assert one_update(scaler, first, entry)
    assert scaler.get_scale() == 64.0 * 2**4


def test_what_cannot_be_told_apart_is_an_error() -> None:
    entry, other = parameter(), parameter()
    first, second = OPTIMIZERS["sgd"]([entry]), OPTIMIZERS["adam"]([other])
    scaler = LossScaler("cpu", OPTIONS)
    scaler.scale(loss_of(entry) + loss_of(other)).backward()
    scaler.unscale(second)
    scaler.step(first)
    first.zero_grad()
    scaler.scale(loss_of(entry)).backward()
    with pytest.raises(StateError, match="AdamW"):
        scaler.step(first)
    assert scaler.step(second)
    assert scaler.step(first)
    assert entry.grad.tolist() == [1.0, 1.0]


def test_unscaling_after_the_step_changes_nothing() -> None:
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    one_update(scaler, optimizer, entry)
    scaler.unscale(optimizer)
    assert entry.grad.tolist() == [1.0, 1.0]


def test_stepping_without_gradients_is_as_in_plain_torch() -> None:
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    scaler.unscale(optimizer)
    assert scaler.step(optimizer)
    assert not scaler.due
    assert entry.tolist() == [1.0, 1.0]


def test_a_second_step_of_one_backward_is_refused() -> None:
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    one_update(scaler, optimizer, entry)
    with pytest.raises(StateError, match="twice"):
        scaler.step(optimizer)


def test_a_backward_past_the_scaler_is_refused() -> None:
    entry = parameter()
    loss_of(entry).backward()
    for call in (LossScaler("cpu").step, LossScaler("cpu").unscale):
        with pytest.raises(StateError, match=r"accelerator\.backward"):
            call(OPTIMIZERS["sgd"]([entry]))


def test_a_closure_is_refused_in_fp16_and_used_elsewhere() -> None:
    entry = parameter()
    optimizer = torch.optim.LBFGS([entry], lr=0.1, max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(entry * entry)
        loss.backward()
        return loss

    with pytest.raises(ConfigError, match="closure"):
        LossScaler("cpu").step(optimizer, closure)
    assert NoScaler().step(optimizer, closure) is True
    assert entry.tolist() != [1.0, 1.0]


def test_what_is_no_torch_optimizer_is_refused() -> None:
    class Foreign:
        param_groups = [{"params": [parameter()]}]  # noqa: RUF012

        def step(self) -> None:
            raise AssertionError("stepped")

    scaler, foreign = LossScaler("cpu"), Foreign()
    scaler.scale(loss_of(foreign.param_groups[0]["params"][0])).backward()
    with pytest.raises(ConfigError, match="Foreign"):
        scaler.step(foreign)  # type: ignore[arg-type]


def test_nothing_is_left_on_the_optimizer_and_it_is_not_kept() -> None:
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    one_update(scaler, optimizer, entry)
    seen: list[int] = []
    handle = optimizer.register_step_post_hook(lambda *_: seen.append(1))
    one_update(scaler, optimizer, entry)
    handle.remove()
    assert seen == [1]
    alive = weakref.ref(optimizer)
    del optimizer, handle
    gc.collect()
    assert alive() is None


def test_the_state_is_plain_and_goes_on() -> None:
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    one_update(scaler, optimizer, entry, OVERFLOW)
    one_update(scaler, optimizer, entry)
    state = scaler.state_dict()
    assert {type(value) for value in state.values()} <= {int, float}
    assert state["scale"] == 32.0
    fresh = LossScaler("cpu")
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    one_update(scaler, optimizer, entry)
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state
    assert one_update(scaler, optimizer, entry)


def test_a_state_of_another_precision_is_told() -> None:
    with pytest.warns(UserWarning, match="goes on with 64"):
        LossScaler("cpu", OPTIONS).load_state_dict({})
    with pytest.warns(UserWarning, match="scale 8"):
        NoScaler().load_state_dict({"scale": 8})
    NoScaler().load_state_dict(NoScaler().state_dict())


def test_the_null_object_does_what_plain_torch_does() -> None:
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), NoScaler()
    loss = loss_of(entry)
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale(optimizer)
    assert entry.grad.tolist() == [1.0, 1.0]
    assert scaler.step(optimizer) is True
    torch.testing.assert_close(entry.detach(), torch.full((2,), 0.9))
    assert (scaler.scales, scaler.due, scaler.flush(want_ratio=True), scaler.get_scale()) == (False, False, 1.0, 1.0)


def test_only_fp16_has_a_scale() -> None:
    assert [name for name in ("no", "fp16", "bf16", "fp8") if make_scaler(name, "cpu").scales] == ["fp16"]
    assert not make_scaler("fp16", "cpu", GradScalerKwargs(enabled=False)).scales
    assert LossScaler("cpu", GradScalerKwargs(init_scale=8.0)).get_scale() == 8.0


def test_gradients_of_float16_are_kept_from_vanishing() -> None:
    """What the scale is for: 2**-24 is the least that float16 holds, and this gradient is smaller."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer, results = OPTIMIZERS["sgd"](layer.parameters()), []
    for scaler in (NoScaler(), LossScaler("cpu", GradScalerKwargs(init_scale=1024.0))):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = layer(torch.full((1, 1), 2.0**-10))
        scaler.scale((outputs * 2.0**-16).float().sum()).backward()
        scaler.unscale(optimizer)
        results.append(layer.weight.grad.item())
    assert results == [0.0, 2.0**-26]
