"""A prepared optimizer steps without torch's profiler range, unless somebody would notice."""

from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from slipstream import Accelerator
from slipstream.training.optimizer import UnmarkedStep


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the profiler ranges that are opened."""
    opened: list[str] = []
    real = torch.autograd.profiler.record_function

    class Recording(real):  # type: ignore[misc, valid-type]
        def __init__(self, name: str, *args: Any) -> None:
            opened.append(name)
            super().__init__(name, *args)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Recording)
    return opened


def trained(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return weight, kind([weight], lr=0.1, **options)


KINDS = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_same_updates_without_range(ranges: list[str], kind: Any, scheduled: bool) -> None:
    """The weights are those of torch's own calls, and from the second step on no range is opened."""
    weight, optimizer = trained(kind)
    other, plain = trained(kind)
    schedulers = [torch.optim.lr_scheduler.StepLR(found, 2) for found in (optimizer, plain)] if scheduled else []
    step = UnmarkedStep(optimizer)
    for _ in range(5):
        ranges.clear()
        step.run()
        opened = list(ranges)
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
    assert opened == []
    assert torch.equal(weight, other)


def test_range_with_profiler(ranges: list[str]) -> None:
    """A profiler sees the range of every step."""
    _, optimizer = trained()
    step = UnmarkedStep(optimizer)
    step.run()
    with torch.autograd.profiler.profile() as found:
        step.run()
    assert any("Optimizer.step#AdamW.step" in event.name for event in found.function_events or ())
    ranges.clear()
    step.run()
    assert not ranges


def test_hooks_are_called() -> None:
    """Hooks of the optimizer and of all optimizers run, whenever they were registered."""
    _, optimizer = trained()
    step = UnmarkedStep(optimizer)
    step.run()
    step.run()
    called: list[str] = []
    for register, name in (
        (optimizer.register_step_pre_hook, "before"),
        (optimizer.register_step_post_hook, "after"),
        (register_optimizer_step_pre_hook, "before all"),
        (register_optimizer_step_post_hook, "after all"),
    ):
        handle = register(lambda *args, name=name: called.append(name))
        step.run()
        handle.remove()
        step.run()
    assert called == ["before", "after", "before all", "after all"]


def test_replaced_step_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `step` that somebody put in place of torch's is called: on the object or on the class, before or later."""
    weight, optimizer = trained()
    step = UnmarkedStep(optimizer)
    step.run()
    step.run()
    called = []
    real = optimizer.step
    optimizer.step = lambda: called.append("own") or real()  # type: ignore[func-returns-value, method-assign]
    step.run()
    step.run()
    del optimizer.step
    step.run()
    assert called == ["own", "own"]
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: called.append("class"))
    step.run()
    step.run()
    assert called[2:] == ["class", "class"]


def test_subclass_with_step_of_its_own() -> None:
    """An optimizer of the user, whose `step` calls that of its base class, makes both."""
    called = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            called.append(1)
            return super().step(closure)

    weight, optimizer = trained(Counting)
    step = UnmarkedStep(optimizer)
    for _ in range(3):
        step.run()
    assert len(called) == 3
    assert torch.allclose(weight, torch.full((3,), 0.7))


def test_prepared_step_opens_no_range(ranges: list[str]) -> None:
    """A whole prepared step with a scheduler opens no range, and the scheduler does not complain about its order."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    for _ in range(3):
        ranges.clear()
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert ranges == []
