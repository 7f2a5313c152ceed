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
def test_two_optimizers_match_torch(plan: list[Iteration], kinds: tuple[str, str]) -> None:
    """Two optimizers of one scale do what plain torch does."""
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
def test_overflow(kind: str) -> None:
    """An overflow leaves the parameters alone and halves the scale."""
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
        assert not scaler.update_pending
    scaler.step(optimizer)
    torch.testing.assert_close(entry.detach(), torch.full((2,), 1.0 - 0.1 * 3))


def test_scale_moves_with_next_loss() -> None:
    """The scale moves when the next loss comes and not before."""
    entry, other = parameter(), parameter()
    first, second = OPTIMIZERS["sgd"]([entry]), OPTIMIZERS["sgd"]([other])
    scaler = LossScaler("cpu", GradScalerKwargs(init_scale=64.0, growth_interval=1))
    scaler.scale(loss_of(entry) + loss_of(other)).backward()
    scaler.step(first)
    assert scaler.update_pending
    scaler.step(second)
    torch.testing.assert_close(other.detach(), entry.detach())
    assert scaler.apply_pending_update(want_ratio=True) == 2.0
    assert not scaler.update_pending
    assert scaler.apply_pending_update(want_ratio=True) == 1.0
    assert scaler.get_scale() == 128.0


def test_waiting_gradients_rescaled() -> None:
    """Gradients that wait can be brought to the new scale."""
    entry, other = parameter(), parameter()
    first, second = OPTIMIZERS["sgd"]([entry]), OPTIMIZERS["sgd"]([other])
    scaler = LossScaler("cpu", GradScalerKwargs(init_scale=64.0, growth_interval=1))
    scaler.scale(loss_of(entry) + loss_of(other)).backward()
    scaler.step(first)
    other.grad *= scaler.apply_pending_update(want_ratio=True)
    scaler.scale(loss_of(other)).backward()
    scaler.step(second)
    torch.testing.assert_close(other.detach(), torch.full((2,), 1.0 - 0.1 * 2))


def test_loss_between_clip_and_step() -> None:
    """A loss between clipping and stepping changes nothing."""
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
def test_abandoned_step_after_clip(set_to_none: bool) -> None:
    """A step that was given up after clipping does not spoil the next."""
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    scaler.scale(loss_of(entry, 100.0)).backward()
    scaler.unscale(optimizer)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        scaler.on_zero_grad(optimizer)
        scaler.scale(loss_of(entry)).backward()
        scaler.unscale(optimizer)
        assert entry.grad.tolist() == [1.0, 1.0]
    nn.utils.clip_grad_norm_(entry, 100.0)
    assert scaler.step(optimizer)
    torch.testing.assert_close(entry.detach(), torch.full((2,), 0.9))


def test_abandoned_optimizer() -> None:
    """An optimizer that gave up does not hold the scale of another."""
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


def test_ambiguous_gradients_refused() -> None:
    """What cannot be told apart is an error."""
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


def test_unscale_after_step() -> None:
    """Unscaling after the step changes nothing."""
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    one_update(scaler, optimizer, entry)
    scaler.unscale(optimizer)
    assert entry.grad.tolist() == [1.0, 1.0]


def test_step_without_gradients() -> None:
    """Stepping without gradients is as in plain torch."""
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    scaler.unscale(optimizer)
    assert scaler.step(optimizer)
    assert not scaler.update_pending
    assert entry.tolist() == [1.0, 1.0]


def test_second_step_refused() -> None:
    """A second step of one backward is refused."""
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), LossScaler("cpu", OPTIONS)
    one_update(scaler, optimizer, entry)
    with pytest.raises(StateError, match="twice"):
        scaler.step(optimizer)


def test_unscaled_backward_refused() -> None:
    """A backward past the scaler is refused."""
    entry = parameter()
    loss_of(entry).backward()
    for call in (LossScaler("cpu").step, LossScaler("cpu").unscale):
        with pytest.raises(StateError, match=r"accelerator\.backward"):
            call(OPTIMIZERS["sgd"]([entry]))


def test_closure() -> None:
    """A closure is refused in fp16 and used elsewhere."""
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


def test_foreign_optimizer_refused() -> None:
    """What is no torch optimizer is refused."""

    class Foreign:
        param_groups = [{"params": [parameter()]}]  # noqa: RUF012

        def step(self) -> None:
            raise AssertionError("stepped")

    scaler, foreign = LossScaler("cpu"), Foreign()
    scaler.scale(loss_of(foreign.param_groups[0]["params"][0])).backward()
    with pytest.raises(ConfigError, match="Foreign"):
        scaler.step(foreign)  # type: ignore[arg-type]


def test_nothing_left_on_optimizer() -> None:
    """Nothing is left on the optimizer and it is not kept."""
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


def test_state_dict() -> None:
    """The state is plain and continues."""
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


def test_state_of_other_precision() -> None:
    """A state of another precision is reported."""
    with pytest.warns(UserWarning, match="goes on with 64"):
        LossScaler("cpu", OPTIONS).load_state_dict({})
    with pytest.warns(UserWarning, match="scale 8"):
        NoScaler().load_state_dict({"scale": 8})
    NoScaler().load_state_dict(NoScaler().state_dict())


def test_no_scaler_matches_torch() -> None:
    """The null object does what plain torch does."""
    entry = parameter()
    optimizer, scaler = OPTIMIZERS["sgd"]([entry]), NoScaler()
    loss = loss_of(entry)
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale(optimizer)
    assert entry.grad.tolist() == [1.0, 1.0]
    assert scaler.step(optimizer) is True
    torch.testing.assert_close(entry.detach(), torch.full((2,), 0.9))
    assert (scaler.scales, scaler.update_pending) == (False, False)
    assert (scaler.apply_pending_update(want_ratio=True), scaler.get_scale()) == (1.0, 1.0)


def test_only_fp16_has_a_scale() -> None:
    assert [name for name in ("no", "fp16", "bf16", "fp8") if make_scaler(name, "cpu").scales] == ["fp16"]
    assert not make_scaler("fp16", "cpu", GradScalerKwargs(enabled=False)).scales
    assert LossScaler("cpu", GradScalerKwargs(init_scale=8.0)).get_scale() == 8.0


def test_small_gradients_kept() -> None:
    """Gradients of float16 are kept from vanishing.

    What the scale is for: 2**-24 is the least that float16 holds, and this gradient is smaller.
    """
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
