"""Guards and the ledger under sharding: a NaN of one rank's rows, and a slow rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from sharded_training import adamw, net, same

from slipstream import Accelerator, FullyShardedDataParallelPlugin
from slipstream.observability.guards.findings import NonFiniteError


def step(accelerator: Accelerator, model: Any, optimizer: Any, factor: float = 1.0) -> None:
    words = torch.arange(10, device=accelerator.device).view(2, 5) % 11
    accelerator.backward(model(words).square().mean() * factor)
    optimizer.step()
    optimizer.zero_grad()


def test_nan_of_one_rank_is_skipped(ranks: Any) -> None:
    """The update is skipped on every rank, weights stay finite and equal to those without it, and the finding names a parameter."""

    def run(spoils: bool) -> Any:
        accelerator = Accelerator(on_nan="skip", fsdp_plugin=FullyShardedDataParallelPlugin())
        model = net()
        model, optimizer = accelerator.prepare(model, adamw(model))
        skipped = []
        for number in range(3):
            bad = spoils and number == 1 and accelerator.process_index == 1
            if spoils or number != 1:
                step(accelerator, model, optimizer, float("nan") if bad else 1.0)
                skipped.append(accelerator.optimizer_step_was_skipped)
        reported = [(found.rank, found.step, found.details.get("parameter")) for found in accelerator._guards.reporter.reported]
        return skipped, reported, accelerator.get_state_dict(model)

    expected = ranks(2).run(run, False)[0][2]
    results = ranks(2).run(run, True)
    for skipped, reported, weights in results:
        assert skipped == [False, True, False]
        assert [found[1] for found in reported] == [1]
        assert reported[0][2] in expected
        same(weights, expected)


def test_nan_raises_on_all_ranks(ranks: Any) -> None:
    """With on_nan="raise" every rank raises, though the NaN is in the rows of one."""

    def run() -> bool:
        accelerator = Accelerator(on_nan="raise", fsdp_plugin=FullyShardedDataParallelPlugin())
        model = net()
        model, optimizer = accelerator.prepare(model, adamw(model))
        step(accelerator, model, optimizer)
        with pytest.raises(NonFiniteError):
            step(accelerator, model, optimizer, float("nan") if accelerator.process_index == 1 else 1.0)
        return True

    assert ranks(2).run(run) == [True, True]


def test_slow_rank_in_the_ledger(ranks: Any) -> None:
    """All-gather and reduce-scatter are communication; what the others wait for a slow rank is not their forward or backward."""

    def run() -> Any:
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
        model = net()

        def nap(module: Any, args: Any) -> None:
            if accelerator.process_index == 1:
                time.sleep(0.05)

        model.norm.register_forward_pre_hook(nap)
        model, optimizer = accelerator.prepare(model, adamw(model))
        for _ in range(6):
            step(accelerator, model, optimizer)
        ledger = accelerator._components.ledger
        ledger.settle()
        accelerator.wait_for_everyone()
        report = ledger.finish()
        return report.phases, report.slowest_rank, report.steps

    phases, slowest, steps = ranks(2, device="cpu").run(run)[0]  # the host does not wait for collectives of a device
    assert steps == 6
    assert slowest == 1
    assert phases["waiting"][0] > phases["waiting"][1]
    assert phases["forward"][1] > phases["forward"][0]
    assert min(phases["communication"]) > 0.0
