"""Learning rates follow updates: the same curve on any number of processes, whatever is skipped in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import Accelerator, DistributedOperationException
from slipstream.utils import GradientAccumulationPlugin, GradScalerKwargs


def curve(updates: int, steps: int = 1, **options: Any) -> list[float]:
    """The learning rates of the updates of a run whose scheduler is stepped after every batch."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10))
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    rates = []
    for _ in range(updates * steps):
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(1, 1, device=accelerator.device)).sum())
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return rates


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_schedule_independent_of_world_size(ranks: Any, world: int) -> None:
    """The curve does not depend on the number of processes or batches."""
    expected = [1 - step / 10 for step in range(6)]
    for plain, accumulated in ranks(world).run(lambda: (curve(6), curve(6, steps=3))):
        assert plain == pytest.approx(expected)
        assert accumulated == pytest.approx(expected)


def test_rule_of_accelerate(ranks: Any) -> None:
    """The rule of Accelerate is an option."""

    def run() -> Any:
        return curve(4, scheduler_steps_per_process=True), curve(4, scheduler_steps_per_process=True, split_batches=True)

    for repeated, split in ranks(2).run(run):
        assert repeated == pytest.approx([1.0, 0.8, 0.6, 0.4])
        assert split == pytest.approx([1.0, 0.9, 0.8, 0.7])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's own, and right: it is called before any update
def test_independent_scheduler() -> None:
    """A scheduler of its own moves at every call."""
    assert curve(3, steps=2, step_scheduler_with_optimizer=False) == pytest.approx([0.9, 0.7, 0.5])


def test_skipped_calls_counted() -> None:
    """Skipped calls are counted if asked for."""
    for adjust, expected in ((True, 4), (False, 2)):
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, adjust_scheduler=adjust)
        )
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        net, optimizer, scheduler = accelerator.prepare(net, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
        for _ in range(3):
            with accelerator.accumulate(net):
                accelerator.backward(net(torch.ones(1, 1)).sum())
                optimizer.step()
                scheduler.step()
        assert scheduler.scheduler._step_count == expected


def test_overflow_skips_schedule(ranks: Any) -> None:
    """An overflow skips the step and the schedule."""

    def run() -> Any:
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0)])
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        net, optimizer, scheduler = accelerator.prepare(net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        seen = []
        for number in range(3):
            bad = number == 1 and accelerator.process_index == 0
            before = accelerator.unwrap_model(net).weight.item()
            accelerator.backward(net(torch.ones(1, 1, device=accelerator.device)).float().sum() * (float("inf") if bad else 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            moved = accelerator.unwrap_model(net).weight.item() != before
            seen.append((accelerator.optimizer_step_was_skipped, moved, scheduler.get_last_lr()[0]))
        return seen, accelerator.scaler.get_scale()

    for world in (1, 2):
        for seen, scale in ranks(world).run(run):
            assert seen == [(False, True, 0.5), (True, False, 0.5), (False, True, 0.25)]
            assert scale == 2.0


def test_plateau_same_everywhere(ranks: Any) -> None:
    """A plateau has to be the same for everyone."""

    def run(same: bool) -> float:
        accelerator = Accelerator()
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
        for _ in range(2):
            scheduler.step(1.0 if same else float(accelerator.process_index))
        return optimizer.param_groups[0]["lr"]

    assert ranks(2).run(lambda: run(True)) == [0.5, 0.5]
    for outcome in ranks(2).outcomes(lambda: run(False)):
        assert isinstance(outcome.error, DistributedOperationException) or "metric" in str(outcome.error)


def test_scheduler_after_prepare() -> None:
    """Schedulers made after prepare work too."""
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(1, 1)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4))
    rates = []
    for _ in range(3):
        accelerator.backward(net(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
        rates.append(round(scheduler.get_last_lr()[0], 3))
    inner = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    plain = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=1.0, total_steps=4)
    expected = []
    for _ in range(3):
        inner.step()
        plain.step()
        expected.append(round(plain.get_last_lr()[0], 3))
    assert rates == expected
