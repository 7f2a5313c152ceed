"""Schedules that do not fit the training: too short, too long, or counted in other units than they move by."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from guarded_run import guarded, network
from torch.utils.data import DataLoader, TensorDataset

from slipstream.observability.guards.findings import GuardFinding
from slipstream.observability.guards.schedules import ScheduleGuard, ScheduleLength, find_unfinished
from slipstream.observability.options import GuardKwargs


def scheduled(make: Any, per_update: int, updates: int) -> list[GuardFinding]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = make(optimizer)
    schedule, found = ScheduleGuard(processes=per_update), []
    for update in range(1, updates + 1):
        optimizer.step()
        for _ in range(per_update):
            scheduler.step()
        if update % 7 == 0:
            rates = [group["lr"] for group in optimizer.param_groups]
            found.append(schedule.look(update, rates, moves=scheduler.last_epoch, length=ScheduleLength.of(scheduler), per_process=True))
    return [finding for finding in found if finding]


def linear(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda move: min(move / 20, max(0.0, (400 - move) / 380)))


def test_rate_ended_early() -> None:
    """A rate that ended early is told with the reason."""
    found = scheduled(linear, per_update=4, updates=400)
    assert "reached 0 between update 98 and 105, and training continues (the scheduler has moved 504 times in 126 updates)" in found[0].text
    assert "it moves 4 times per update, once for each process" in found[0].remedy
    [finding, *_] = scheduled(lambda entry: torch.optim.lr_scheduler.CosineAnnealingLR(entry, 100, eta_min=0.01), 1, 200)
    assert "rises again, to 0.0242 by now: its schedule of 100 steps was over between update 98 and 105" in finding.text
    assert "as long as training" in finding.remedy


@pytest.mark.parametrize(
    "make",
    [
        linear,
        lambda entry: torch.optim.lr_scheduler.CosineAnnealingLR(entry, 400),
        lambda entry: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(entry, 50),
        lambda entry: torch.optim.lr_scheduler.CyclicLR(entry, 0.0, 0.1, step_size_up=50),
        lambda entry: torch.optim.lr_scheduler.OneCycleLR(entry, 0.1, total_steps=401),
        lambda entry: torch.optim.lr_scheduler.StepLR(entry, 100),
        lambda entry: torch.optim.lr_scheduler.ConstantLR(entry, 0.5, 10),
        lambda entry: torch.optim.lr_scheduler.LambdaLR(entry, lambda move: 0.0),
    ],
)
def test_rates_that_last(make: Any) -> None:
    """Rates that last are no finding."""
    assert not scheduled(make, per_update=1, updates=400)


def training(
    total: Any, *, batches: int = 16, steps: int = 1, epochs: int = 2, make: Any = None, after: bool = False, **settings: Any
) -> list[str]:
    """What is said of a schedule in a training over a loader of so many batches."""
    accelerator, guards = guarded(GuardKwargs(starving=None, straggler=None), gradient_accumulation_steps=steps, **settings)
    net = network(torch.float32)
    data = TensorDataset(torch.randn(4 * batches, 3, generator=torch.Generator().manual_seed(0)))
    plain = torch.optim.SGD(net.parameters(), lr=0.01)
    make = make or (lambda optimizer, length: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=length))
    loader = DataLoader(data, batch_size=4)
    if after:
        net, optimizer, loader = accelerator.prepare(net, plain, loader)
        scheduler = accelerator.prepare(make(optimizer, total(loader) if callable(total) else total))
    else:
        length = total(loader) if callable(total) else total
        net, optimizer, loader, scheduler = accelerator.prepare(net, plain, loader, make(plain, length))
    for _ in range(epochs):
        for (x,) in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(x).square().mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator._components.ledger.finish()
    return [str(finding) for finding in guards.reporter.reported if finding.kind == "schedule"]


def test_length_before_prepare(ranks: Any) -> None:
    """A schedule of as many steps as the loader had batches before prepare is told at its first step, with what to write."""
    (begin,), other = ranks(2).run(training, lambda loader: 2 * len(loader))
    assert other == []
    assert begin.startswith(
        "OneCycleLR has 32 steps, as many as 2 passes over the 16 batches that the loader had before prepare; but a pass of the prepared "
        "loader is 8 batches on each of 2 processes and 8 updates, so the schedule takes 4 passes. What to do: for 2 passes, build the "
        "schedule after prepare, for math.ceil(len(loader) / accelerator.gradient_accumulation_steps) updates per pass of the prepared "
        "loader: 16 steps, or pass Accelerator(scheduler_steps_per_process=True) for Accelerate's rule"
    )


@pytest.mark.parametrize("length", [lambda loader: 3 * len(loader) // 2, lambda loader: 3 * -(-len(loader) // 2)])
def test_updates_before_prepare(ranks: Any, length: Any) -> None:
    """So is one that counts the updates of a single process, as scripts written for Accelerate do."""
    (begin,), _ = ranks(2).run(training, length, batches=17, steps=2, epochs=3)
    assert "passes in updates of 2 of the 17 batches that the loader had before prepare" in begin
    assert "9 batches on each of 2 processes and 5 updates of 2 batches each" in begin
    assert ": 15 steps, or pass Accelerator(scheduler_steps_per_process=True)" in begin


@pytest.mark.parametrize(("batches", "steps"), [(10, 4), (64, 16)])
def test_length_before_accumulation(batches: int, steps: int) -> None:
    """A schedule that counts batches where an update takes several is told, where it cannot, or hardly, count updates of whole passes."""
    (begin, *_) = training(len, batches=batches, steps=steps, epochs=1)
    assert begin.startswith(f"OneCycleLR has {batches} steps, as many as 1 pass over the {batches} batches of the loader; but a pass")


UNFINISHED = "training has ended and {} has made {} of its {} steps, in {} updates, so the learning rate has not reached its end"


def by_lambda(optimizer: Any, num_training_steps: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_training_steps))


def by_partial(optimizer: Any, length: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(falling, num_training_steps=length))


def falling(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


def in_turn(optimizer: Any, length: int) -> Any:
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length - 4)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [4])


@pytest.mark.parametrize(("make", "name"), [
    (None, "OneCycleLR"),
    (torch.optim.lr_scheduler.CosineAnnealingLR, "CosineAnnealingLR"),
    (lambda optimizer, length: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=length), "LinearLR"),
    (lambda optimizer, length: torch.optim.lr_scheduler.PolynomialLR(optimizer, length), "PolynomialLR"),
    (by_lambda, "LambdaLR"),
    (by_partial, "LambdaLR"),
    (in_turn, "SequentialLR"),
])  # fmt: skip
def test_unfinished_schedule(make: Any, name: str) -> None:
    """A schedule of a known length that is far from its end when training ends is told, with both numbers and the likely reason."""
    (end,) = training(lambda loader: 2 * len(loader), steps=4, make=make)
    assert UNFINISHED.format(name, 8, 32, 8) in end
    assert "the schedule seems to count batches, and an update takes 4 of them: build the schedule after prepare" in end


def test_unfinished_schedule_of_transformers() -> None:
    """The length of a schedule that transformers makes is known too."""
    optimization = pytest.importorskip("transformers.optimization")
    for get in (optimization.get_linear_schedule_with_warmup, optimization.get_cosine_schedule_with_warmup):
        (end,) = training(64, make=lambda optimizer, length, get=get: get(optimizer, 4, length))
        assert UNFINISHED.format("LambdaLR", 32, 64, 32) in end


def test_unfinished_schedule_of_ranks(ranks: Any) -> None:
    """A schedule that was counted over all processes, and made after prepare, is told at the end."""
    (end,), _ = ranks(2).run(training, 32, after=True)
    assert UNFINISHED.format("OneCycleLR", 16, 32, 16) in end
    assert "the schedule seems to count the batches of all 2 processes" in end


def test_unmoved_schedule() -> None:
    """A schedule that moves once per epoch, and has as many steps as updates, is told with what to call."""
    finding = find_unfinished("CosineAnnealingLR", 1000, 10, 1000)
    assert finding is not None
    assert "call scheduler.step() once after each optimizer.step()" in finding.remedy


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("after", [True, False])
def test_schedules_that_fit(steps: int, after: bool) -> None:
    """A schedule that is as long as training is no finding on one process, with accumulation too; nor is one that was cut a bit short."""
    right = lambda loader: 4 * (len(loader) // steps)  # noqa: E731
    assert training(right, steps=steps, epochs=4, after=after) == []
    assert training(right, steps=steps, epochs=3, after=after) == []
    assert training(10_000, steps=steps, epochs=1, after=after) == [], "a try of some steps"
    assert training(1, steps=steps, epochs=1, make=lambda optimizer, _: torch.optim.lr_scheduler.StepLR(optimizer, 1000), after=after) == []


def test_schedules_that_fit_ranks(ranks: Any) -> None:
    """Nor is one of the right length on several processes, or one that counts by Accelerate's rule."""

    def run() -> Any:
        return [
            training(lambda loader: 3 * len(loader), epochs=3, after=True),
            training(lambda loader: 3 * len(loader) // 2, epochs=3),
            training(lambda loader: 2 * len(loader), scheduler_steps_per_process=True),
            training(lambda loader: 2 * len(loader), split_batches=True),
        ]

    assert ranks(2).run(run) == [[[]] * 4] * 2


