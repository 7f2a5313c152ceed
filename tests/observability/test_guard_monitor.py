"""Guards that look while a run goes on: curves, rates, times, and replicas that drift apart."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch
from guarded_run import batch, guarded, network, window
from hypothesis import given, settings, strategies as st

from slipstream import ConfigError
from slipstream.observability.guards.findings import FindingReporter, GuardFinding
from slipstream.observability.guards.loss_spikes import LossSpikeGuard
from slipstream.observability.guards.throughput import DataWaitGuard, StragglerGuard
from slipstream.observability.options import GuardKwargs

STEPS = 20_000


# -- loss curves ------------------------------------------------------------------------------------------------------


def curves() -> dict[str, Any]:
    """Ordinary ones, each in its own way unruly."""
    random = numpy.random.default_rng(0)
    fall = 2 + 8 * numpy.exp(-numpy.arange(STEPS) / 2000)
    normal = random.standard_normal(STEPS)
    return {
        "smooth": fall,
        "hardly any noise": fall * (1 + 1e-4 * normal),
        "small batches": fall * numpy.exp(0.5 * normal),
        "very small batches": fall * numpy.exp(normal),
        "squares": normal**2,
        "rewards around zero": random.laplace(0, 1, STEPS),
        "heavy tails": random.standard_t(5, STEPS),
        "a hard batch in a hundred": numpy.where(random.random(STEPS) < 0.01, 6, 2) + 0.1 * normal,
        "an easier half of every epoch": fall * (1 + 0.1 * normal) * (1 - 0.15 * (numpy.arange(STEPS) % 500 > 250)),
        "learnt by heart": numpy.exp(-numpy.arange(STEPS) / 1000 + 0.3 * normal),
        "half of them zero": numpy.where(random.random(STEPS) < 0.5, 0, random.exponential(1, STEPS)),
        "mostly zero": numpy.where(random.random(STEPS) < 0.003, 1.0, 0.0),
        "nearly zero": 1e-6 * numpy.abs(normal) + 1e-9 + numpy.where(random.random(STEPS) < 0.01, 0.5, 0),
        "warm restarts": (1 + 0.03 * normal) * (1 + numpy.maximum(0, 1 - (numpy.arange(STEPS) + 500) % 1000 / 100)),
        "cycles": 1 + 0.8 * (numpy.arange(STEPS) % 500 < 20) + 0.05 * normal,
        "a rare second task": numpy.where(numpy.arange(STEPS) % 500, 0.1, 5) + 0.01 * normal,
        "rare hard batches": (1 + 0.1 * normal) * numpy.where(random.random(STEPS) < 0.002, 20, 1),
        "a slow ramp": 1 + numpy.maximum(0, numpy.arange(STEPS) - 800) / 20 + 0.02 * normal,
        "rewards of many sizes": 0.01 * normal * numpy.exp(1.2 * random.standard_normal(STEPS)),
        "constant": numpy.zeros(STEPS),
    }


@pytest.mark.parametrize("name", list(curves()))
def test_ordinary_curves(name: str) -> None:
    """Ordinary curves are no finding."""
    spikes = LossSpikeGuard(10.0)
    found = [finding for step, loss in enumerate(curves()[name].tolist()) if (finding := spikes.look(step, loss))]
    assert not found, found[0]


@settings(max_examples=30)
@given(
    noise=st.floats(0.0, 0.1),
    at=st.integers(150, 700),
    times=st.floats(4.0, 1000.0),
    lasting=st.integers(2, 40),
    scale=st.floats(1e-3, 1e3),
)
def test_spike_reported_once(noise: float, at: int, times: float, lasting: int, scale: float) -> None:
    """A jump is found where it is and said once."""
    random = numpy.random.default_rng(at)
    losses = scale * numpy.exp(noise * random.standard_normal(1000))
    losses[at : at + lasting] *= times
    spikes = LossSpikeGuard(10.0, rank=3)
    found = [finding for step, loss in enumerate(losses.tolist()) if (finding := spikes.look(step, loss))]
    assert [finding.rank for finding in found] == [3]
    assert at <= (found[0].step or 0) <= at + 1


@pytest.mark.parametrize(("at", "times", "told"), [(30, 100.0, 45), (1500, 1.5, 1699)])
def test_lasting_spike(at: int, times: float, told: int) -> None:
    """A jump that is early or small is told once it has stayed."""
    losses = 1 + 0.05 * numpy.random.default_rng(0).standard_normal(3000)
    losses[at:] *= times
    spikes = LossSpikeGuard(10.0)
    [finding] = [finding for step, loss in enumerate(losses.tolist()) if (finding := spikes.look(step, loss))]
    assert told <= (finding.step or 0) <= told + 10
    assert "and has been up for" in finding.text


def test_single_extreme_value() -> None:
    """One value out of this world is found and a fall is not."""
    spikes = LossSpikeGuard(10.0)
    losses = [2.0 + 0.01 * (step % 5) for step in range(100)] + [2e6] + [2.0] * 100 + [1e-3] * 50
    assert [finding.step for step, loss in enumerate(losses) if (finding := spikes.look(step, loss))] == [100]


# -- what is not finite, as it is told when nothing is looked at in a step --------------------------------------------


def test_non_finite_loss() -> None:
    """A loss that is not finite is told with its step and the parameter."""
    accelerator, guards = guarded(GuardKwargs())
    net = network()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(net(batch(0)).mean())
    net[0].bias.grad[0] = math.inf
    guards.examine(window([1.0, 0.9, math.nan, 0.8], first=40))
    [finding] = guards.reporter.reported
    assert (finding.kind, finding.step, finding.rank) == ("nan", 42, 0)
    assert "the loss is nan; the gradient nearest to the loss that is infinite now is 0.bias (1 of 4 are)" in finding.text
    guards.examine(window([math.nan] * 50, first=44))
    assert len(guards.reporter.reported) == 1


def test_non_finite_norm() -> None:
    """A norm that is not finite is told before the loss is."""
    accelerator, guards = guarded(GuardKwargs())
    net = network()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(net(batch(0)).mean())
    net[0].weight.grad[0] = math.nan
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    guards.examine(window([1.0, math.nan]))
    [finding] = guards.reporter.reported
    assert finding.step == 0
    assert "the norm of the gradients is nan, and the loss was finite until then" in finding.text
    assert "every gradient is nan" in finding.text


def test_ordinary_run() -> None:
    """An ordinary run is left in peace."""
    accelerator, guards = guarded(GuardKwargs())
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    losses = curves()["small batches"]
    for first in range(0, STEPS, 500):
        optimizer.updates = scheduler.scheduler.last_epoch = first
        for group, rate in zip(optimizer.param_groups, scheduler.scheduler._get_closed_form_lr(), strict=True):
            group["lr"] = rate
        guards.examine(window(losses[first : first + 500].tolist(), first))
        times = {"data": [0.2], "forward": [0.3], "backward": [0.4], "waiting": [0.0]}
        guards.interval({"seconds": 1.0, "first": first, "last": first + 499, "steps": 500, "phases": times, "slowest": [500]})
    assert not guards.reporter.reported


# -- how it is said ---------------------------------------------------------------------------------------------------


def test_warnings_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    """Each kind is said three times with growing distance."""
    told: list[dict[str, Any]] = []
    reporter = FindingReporter(told.append)
    said = [step for step in range(5000) if reporter.report(GuardFinding("spike", step, 0, "it jumped", "look"))]
    assert said == [0, 100, 1100]
    assert reporter.report(GuardFinding("drift", 7, None, "apart", "look", {"ranks": [1]}))
    assert [(entry["guard"], entry["step"]) for entry in told] == [("spike", 0), ("spike", 100), ("spike", 1100), ("drift", 7)]
    assert told[3] == {"kind": "guard", "guard": "drift", "step": 7, "rank": None, "text": "apart", "remedy": "look", "ranks": [1]}
    lines = caplog.messages
    assert lines[1] == "step 100, rank 0: it jumped. What to do: look. (Found 99 times more since the last report.)"
    assert lines[2].endswith("(Not reported again in this run.)")
    for step in (8, 110):
        reporter.report(GuardFinding("drift", step, None, "apart", "look"))
    assert caplog.messages[-1].endswith("(Found once more since the last report.)")


def test_events_per_kind() -> None:
    """The run has some events of a kind and not those of a thousand ranks."""
    accelerator, _ = guarded(GuardKwargs())
    ledger, kept = accelerator._components.ledger, []
    ledger.event_sinks.append(kept.append)
    for rank in range(30):
        ledger.tell(GuardFinding("spike", 5, rank, "it jumped", "look").event())
        ledger.tell({"kind": "warning", "text": "other"})
    assert [sum(event["kind"] == kind for event in kept) for kind in ("guard", "warning")] == [20, 30]


def test_earliest_rank_reported(ranks: Any) -> None:
    """All ranks speak through the main process and the earliest is heard."""
    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs())
        ledger, rank = accelerator._components.ledger, accelerator.process_index
        accelerator.wait_for_everyone()
        guards.examine(window([1.0] * (9 - rank) + [math.nan] * 3))
        for turn in (1, 0):
            if turn == rank:
                ledger.settle()
            accelerator.wait_for_everyone()
        held = not guards.reporter.reported
        ledger.finish()
        return held, [(entry.step, entry.rank) for entry in guards.reporter.reported]

    first, second = ranks(2).outcomes(run)
    assert first.value == (True, [(8, 1)]), "the other is a consequence"
    assert second.value == (False, [(8, 1)])
    assert "step 8, rank 1: the loss is nan" in first.output
    assert "step 9" not in first.output
    assert "the loss is nan" not in second.output


def test_nan_again() -> None:
    """A NaN that comes again after finite losses is told again; one that lasts over many looks is not."""
    _, guards = guarded(GuardKwargs())
    guards.examine(window([1.0, math.nan]))
    for first in range(2, 1000, 10):
        guards.examine(window([math.nan] * 10, first=first))
    assert [finding.step for finding in guards.reporter.reported] == [1]
    guards.examine(window([1.0, math.nan], first=2000))
    assert [finding.step for finding in guards.reporter.reported] == [1, 2001]


SHORT = """
import torch
from slipstream import Accelerator

def main():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(5):
        accelerator.backward(model(torch.full((1, 2), float("nan") if number == 3 else 1.0)).mean())
        optimizer.step()

main()
"""


def test_nan_short_loop() -> None:
    """A NaN in a script of five steps, which never calls end_training, is said when it ends."""
    done = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=90)
    assert done.stderr.startswith("step 3, rank 0: the loss is nan; ")
    assert done.stderr.count("\n") == 1


def test_silent_ranks_not_awaited() -> None:
    """The main process does not wait forever for ranks that tell nothing."""
    accelerator, guards = guarded(GuardKwargs())
    guards.reporter.held_kinds = frozenset(("nan",))
    guards.examine(window([1.0, math.nan]))
    looks = 0
    while not guards.reporter.reported and looks < 100:
        guards.examine(window([1.0], first=2 + looks))
        looks += 1
    assert ([entry.step for entry in guards.reporter.reported], looks) == ([1], 6)
    guards.examine(window([math.nan], first=300))
    guards.interval({"seconds": 1.0, "first": 0, "last": 299, "steps": 300, "phases": {}, "slowest": [300]})
    assert len(guards.reporter.reported) == 1
    guards.interval({"seconds": 1.0, "first": 300, "last": 300, "steps": 1, "phases": {}, "slowest": [1]})
    assert [entry.step for entry in guards.reporter.reported] == [1, 300]


# -- times ------------------------------------------------------------------------------------------------------------


def interval(**phases: list[float]) -> dict[str, Any]:
    return {"seconds": 1.0, "first": 0, "last": 9, "steps": 10, "phases": phases, "slowest": [9, 1]}


def test_data_wait_remedy() -> None:
    """Steps that starve are told with the number of workers to try."""
    starving = DataWaitGuard(0.3, processors=16, local_ranks=2)
    hungry, fed = interval(data=[0.7, 0.1]), interval(data=[0.1, 0.1])
    assert not any(starving.look(hungry) for _ in range(6)), "the first intervals are left out, and one alone says nothing"
    finding = starving.look(hungry, workers=2, pinned=False)
    assert finding is not None
    assert (finding.rank, finding.details["share"]) == (0, 0.7)
    assert finding.remedy == "num_workers=7 instead of 2, and prefetch_factor=4, pin_memory=True"
    remedy = getattr(starving.look(hungry, workers=4), "remedy", "")
    assert "4 workers are too few and 14 would be more than the 8 processors" in remedy
    assert [starving.look(fed, workers=2) for _ in range(5)][-1] is None


def test_straggler_named() -> None:
    """A rank that is always the last is named with what takes it longer."""
    straggler = StragglerGuard(0.3)
    slow = interval(waiting=[0.0, 0.5], data=[0.6, 0.1], forward=[0.2, 0.2])
    finding = [straggler.look(slow) for _ in range(7)][-1]
    assert finding is not None
    assert finding.rank == 0
    assert "its data takes 0.6 of each second and that of the others 0.1" in finding.remedy
    changing = {**slow, "slowest": [5, 5]}
    assert not any(StragglerGuard(0.3).look(changing) for _ in range(10))
    straggler = StragglerGuard(0.3)
    assert not any([straggler.look(interval(waiting=[0.0, 0.2])) for _ in range(10)])


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nan": "ignore"}, "on_nan='ignore'.*'warn', 'skip', 'raise', 'off'"),
        ({"on_nan": None}, "on_nan=None"),
        ({"loss_spike": 1}, "loss_spike=1.*from 3"),
        ({"loss_spike": math.inf}, "loss_spike=inf"),
        ({"loss_spike": "10"}, "loss_spike='10'"),
        ({"drift_every": 0}, "drift_every=0.*from 1.*None"),
        ({"drift_every": True}, "drift_every=True"),
        ({"drift_every": 2.5}, "drift_every=2.5"),
        ({"starving": 30}, "starving=30.*between 0 and 1"),
        ({"straggler": 0}, "straggler=0.*between 0 and 1"),
        ({"straggler": math.nan}, "straggler=nan"),
        ({"schedule": 1}, "schedule=1"),
        ({"same_batches": None}, "same_batches=None"),
    ],
)
def test_invalid_guard_options(options: dict[str, Any], message: str) -> None:
    """Options that cannot be meant are refused."""
    with pytest.raises(ConfigError, match=message):
        GuardKwargs(**options)
