"""Guards on a device: what they cost it, that they read it late, and that they still name step, rank and parameter."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from guarded_run import batch, delayed, guarded, network
from test_guard_non_finite import QUIET, STEPS, same, train

from slipstream import Accelerator
from slipstream.observability.guards.findings import NonFiniteError
from slipstream.observability.options import GuardKwargs, LedgerKwargs
from slipstream.testing import standin


def four_steps(accelerator: Accelerator) -> None:
    """Train a small network for four steps."""
    net = network()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for number in range(4):
        accelerator.backward(net(batch(number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def costs(on_nan: str, clip: bool, steps: int = 9) -> list[tuple[int, int, int]]:
    """Of each step with ledger and all guards: copies to the device, copies to the host, and how often the host waited."""
    accelerator, guards = guarded(GuardKwargs(on_nan=on_nan, drift_every=3), [LedgerKwargs(interval=60.0, summary=False)])
    net = network()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    inputs = [batch(number, accelerator.process_index) for number in range(steps)]
    for x in inputs[:3]:  # the first batches are hashed, which reads them, and DDP arranges its buckets
        accelerator.backward(net(x).square().mean())
        optimizer.zero_grad()
    found = []
    for x in inputs:
        torch.standin.reset_counters()
        accelerator.backward(net(x).square().mean())
        if clip:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        counted = torch.standin.counters()
        found.append((counted.copies_to_device, counted.copies_to_host, counted.synchronizations))
    accelerator._components.ledger.finish()
    assert not guards.reporter.reported
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("on_nan", "clip", "expected"), [("warn", True, (0, 0, 0)), ("skip", False, (0, 1, 1)), ("skip", True, (0, 1, 1))])
def test_costs(ranks: Any, world: int, on_nan: str, clip: bool, expected: tuple[int, int, int]) -> None:
    """A step waits for the device once where the host must decide on the update, and else never; also where weights are compared."""
    assert ranks(world, device="standin").run(costs, on_nan, clip) == [[expected] * 9] * world


def test_skip_names_parameter(ranks: Any) -> None:
    """An update is left out with the parameter where it began, also if clipping has spread the NaN, and the rest of the run is the same."""

    def run(clip: bool) -> Any:
        accelerator, guards = guarded(GuardKwargs(on_nan="skip", **QUIET))
        skipped = train(accelerator, passes=[2], clip=clip)
        without = train(Accelerator(), leave_out=[2], clip=clip)
        [finding] = guards.reporter.reported
        return same(skipped, without), skipped["skipped"], finding.step, finding.details["parameter"], finding.text.partition(" (")[0]

    for clip in (False, True):
        [(equal, skipped, step, parameter, text)] = ranks(1, device="standin").run(run, clip)
        assert equal
        assert skipped == [number == 2 for number in range(STEPS)]
        assert (step, parameter, text) == (2, "0.weight", "the gradient of 0.weight is nan")


def test_large_gradients_are_not_blamed(ranks: Any) -> None:
    """A rank whose gradients are large but finite is not named beside the one with the NaN: their squares overflow, not they."""

    def run() -> str:
        accelerator, _ = guarded(GuardKwargs(on_nan="raise", **QUIET))
        net = torch.nn.Linear(3, 1, bias=False)
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        factor = 1e38 if accelerator.process_index == 0 else math.nan
        accelerator.backward(net(torch.full((1, 3), factor, device=accelerator.device)).sum())
        with pytest.raises(NonFiniteError) as raised:
            optimizer.step()
        return str(raised.value).partition(" (loss")[0]

    assert ranks(2, device="standin").run(run) == ["step 0, rank 1: the gradient of weight is nan on rank 1"] * 2


def test_read_beside_queue(ranks: Any) -> None:
    """What the device has computed is examined while it is busy with later work, and the host does not wait for that."""

    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(), [LedgerKwargs(interval=60.0, summary=False)])
        ledger, seen = accelerator._components.ledger, []
        ledger.examiners.append(lambda window: seen.append([step for step, _ in window.losses]))
        four_steps(accelerator)
        torch.standin.synchronize()
        slow = torch.ones(4).pin_memory()
        with delayed(copies=1.0):
            arriving = slow.to(accelerator.device, non_blocking=True)
            began = time.perf_counter()
            torch.standin.reset_counters()
            ledger.settle()
            took, counted = time.perf_counter() - began, torch.standin.counters()
        assert not guards.reporter.reported
        assert not torch.standin.current_stream().query(), "the copy is still under way"
        assert arriving.sum().item() == 4
        return took, counted.copies_to_host, seen[0]

    [(took, copies, seen)] = ranks(1, device="standin").run(run)
    assert seen == [0, 1, 2, 3]
    assert took < 0.5, "the device was busy for a second"
    assert copies == 1, "the losses of four steps are fetched together"


def test_loss_is_kept_as_it_was(ranks: Any) -> None:
    """A loss that a script changes after backward, or whose memory the device uses again, is examined as it was."""

    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(**QUIET), [LedgerKwargs(interval=60.0, summary=False)])
        net = network()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for number in range(3):
            loss = net(batch(number)).square().mean()
            accelerator.backward(loss)
            loss.detach().fill_(math.nan)
            optimizer.step()
            optimizer.zero_grad()
        accelerator._components.ledger.finish()
        return guards.reporter.reported

    assert ranks(1, device="standin").run(run) == [[]]


def test_end_reads_all(ranks: Any) -> None:
    """The end of a run waits for the device: a loss that was NaN in the last step is named, with its rank, on four ranks."""

    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(starving=None, straggler=None), [LedgerKwargs(interval=60.0, summary=False)])
        net = network()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        assert standin.is_enabled()
        assert accelerator.device == torch.device("standin", accelerator.process_index)
        for number in range(3):
            factor = math.nan if number == 2 and accelerator.process_index == 3 else 1.0
            accelerator.backward(net(batch(number, accelerator.process_index) * factor).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator._components.ledger.finish()
        return [(finding.step, finding.rank, finding.text.partition(";")[0]) for finding in guards.reporter.reported]

    main, *_ = ranks(4, device="standin").run(run)
    assert main == [(2, 3, "the loss is nan")]


@pytest.mark.parametrize(("patient", "limit"), [(False, 0.5), (True, 3.0)])
def test_end_does_not_wait_long(ranks: Any, patient: bool, limit: float) -> None:
    """A process that fails leaves at once, however much is queued on its device, and a script that ends after a moment: that work may
    wait for ranks that are gone.
    """

    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(), [LedgerKwargs(interval=60.0, summary=False)])
        ledger = accelerator._components.ledger
        four_steps(accelerator)
        with delayed(copies=3.5 if patient else 1.0):
            arriving = torch.ones(4).pin_memory().to(accelerator.device, non_blocking=True)
            began = time.perf_counter()
            ledger.leave(patient=patient)
            took = time.perf_counter() - began
        return took, ledger.report().steps, arriving.sum().item(), guards.reporter.reported

    [(took, steps, _, reported)] = ranks(1, device="standin").run(run)
    assert took < limit, "the device was busy for longer"
    assert steps == 4, "what it had passed is in the report"
    assert reported == []


def test_finding_asks_once(ranks: Any) -> None:
    """To say where a NaN is, a device is asked once for all gradients, and once for all weights."""

    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(**QUIET), [LedgerKwargs(interval=60.0, summary=False)])
        net = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(20)))
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        accelerator.backward(net(torch.full((1, 3), math.nan, device=accelerator.device)).mean())
        torch.standin.reset_counters()
        clause = guards._where()
        return clause, torch.standin.counters().synchronizations

    assert ranks(1, device="standin").run(run) == [
        ("; the gradient nearest to the loss that is nan now is 19.weight (20 of 40 are)", 1)
    ]
