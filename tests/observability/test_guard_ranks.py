"""What only several ranks can show: where a NaN began, replicas that drift apart, batches that are the same everywhere."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_run import Poison, batch, guarded, network, own_words, window
from torch.utils.data import DataLoader, TensorDataset

from slipstream.observability.guards.replicas import next_comparison
from slipstream.observability.options import GuardKwargs, LedgerKwargs
from slipstream.parallel.local_sgd import LocalSGD

# -- a NaN -------------------------------------------------------------------------------------------------------------


def failing(steps: int, poison: Any = None, clip: bool = False, bad: int = 10) -> Any:
    """Two ranks that train for some steps, of which rank 1 has a batch, or a gradient, that is NaN in one."""
    accelerator, guards = guarded(GuardKwargs(starving=None, straggler=None), [LedgerKwargs(interval=0.01)])
    net = network()
    last = accelerator.process_index == 1
    if poison is not None and last:
        Poison(net[0].weight, [bad])
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for number in range(steps):
        x = batch(number, accelerator.process_index)
        spoilt = math.nan if last and number == bad and poison is None else 1.0
        accelerator.backward(net(x * spoilt).square().mean())
        if clip:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator._components.ledger.finish()
    return [(finding.step, finding.rank, finding.text.partition(";")[0]) for finding in guards.reporter.reported]


@pytest.mark.parametrize(("device", "clip"), [("cpu", False), ("cpu", True), ("standin", True)])
def test_nan_once(ranks: Any, device: str, clip: bool) -> None:
    """A NaN that stays is said once, for the rank and the step where it began, however long the run goes on."""
    main, other = ranks(2, device=device).outcomes(failing, 400, clip=clip)
    assert main.value == [(10, 1, "the loss is nan")]
    assert main.output.count("What to do") == 1
    assert "What to do" not in other.output


@pytest.mark.parametrize(("clip", "step", "told"), [
    (True, 10, "the norm of the gradients is nan, and the loss was finite until then"),
    (False, 11, "the loss is nan"),
])  # fmt: skip
def test_nan_of_all(ranks: Any, clip: bool, step: int, told: str) -> None:
    """A NaN that all ranks have at once, in an average or after it, is not called that of one rank."""
    main, _ = ranks(2).run(failing, 40, poison=True, clip=clip)
    assert main == [(step, None, f"on all 2 ranks at once, {told}")]


# -- replicas ---------------------------------------------------------------------------------------------------------


def test_drifting_replicas(ranks: Any) -> None:
    """Replicas that drift apart are told with the parameter and the rank."""
    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(drift_every=3, schedule=False))
        net = network()
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        said = []
        for number in range(7):
            accelerator.backward(net(batch(number, accelerator.process_index)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if number == 4 and accelerator.process_index == 1:
                with torch.no_grad():
                    net[2].weight[0, 1] += 1e-12
            accelerator.wait_for_everyone()
            guards.examine(window([]))
            said.append([(entry.kind, entry.step, entry.rank, entry.text) for entry in guards.reporter.reported])
        return said

    main, other = ranks(2).run(run)
    assert main[4] == []
    [(kind, step, rank, text)] = main[5]
    assert (kind, step, rank) == ("drift", 6, 1)
    assert "2.weight of rank 1 is not that of rank 0 (1 of 4 parameters differ)" in text
    assert not any(other)


def drifting(steps: int, at: int, where: str, folder: str = "") -> Any:
    """Two ranks, of which rank 1 changes a weight after some step; then a checkpoint, or the end of training."""
    accelerator, guards = guarded(GuardKwargs(starving=None, straggler=None))
    net = network()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for number in range(1, steps + 1):
        accelerator.backward(net(batch(number, accelerator.process_index)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == at and accelerator.process_index == 1:
            with torch.no_grad():
                net[2].weight[0, 1] += 1.0
    if where == "checkpoint":
        accelerator.save_state(f"{folder}/first")
        accelerator.wait_for_everyone()
        guards.examine(window([]))
    if where == "main alone" and accelerator.is_main_process:
        own = net[0].bias.detach().clone()
        with torch.no_grad():
            net[0].bias.zero_()  # as for an average of weights that is saved, and taken back
            accelerator.save_state(f"{folder}/second")
            net[0].bias.copy_(own)
    if where != "checkpoint":
        accelerator.end_training()
    return [(finding.kind, finding.step, finding.rank, finding.text) for finding in guards.reporter.reported]


@pytest.mark.parametrize(("at", "where", "step", "told"), [
    (5, "end", 8, "after update 8"),
    (17, "end", 20, "at the end of training (after update 20)"),
    (17, "checkpoint", 20, "in the checkpoint first, which has those of the main process (after update 20)"),
])  # fmt: skip
def test_drift(ranks: Any, tmp_path: Path, at: int, where: str, step: int, told: str) -> None:
    """Weights that one rank changed are told in a run of 20 steps: at doubling intervals, in a checkpoint, and at the end."""
    main, other = ranks(2).outcomes(drifting, 20, at, where, str(tmp_path))
    text = f"the replicas have different weights {told}: 2.weight of rank 1 is not that of rank 0 (1 of 4 parameters differ)"
    assert main.value == [("drift", step, 1, text)]
    assert text in main.output
    assert "and resume from a checkpoint that every rank loads" in main.output
    assert own_words(other.output) == ""


@pytest.mark.parametrize("where", ["main alone", "end"])
def test_no_drift(ranks: Any, tmp_path: Path, where: str) -> None:
    """Replicas that are equal are no finding, and the main process may save alone: it waits for nobody, and is compared with nobody."""
    assert ranks(2).run(drifting, 20, 0, where, str(tmp_path)) == [[], []]


@pytest.mark.parametrize(("first", "expected"), [(1, [1, 2, 4, 8, 16, 20, 40, 60]), (56, [56, 57, 59, 60, 68, 80, 100])])
def test_drift_intervals(first: int, expected: list[int]) -> None:
    """Weights are looked at 1, 2, 4, 8, ... updates apart and then at every multiple of `drift_every`, from wherever a run goes on."""
    looks = [first]
    while len(looks) < len(expected):
        looks.append(next_comparison(looks[-1], len(looks), 20))
    assert looks == expected


def test_replicas_that_may_differ(ranks: Any) -> None:
    """Replicas that may differ are not compared."""
    def run() -> Any:
        accelerator, guards = guarded(GuardKwargs(drift_every=1, schedule=False))
        net = network()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def step(number: int) -> None:
            accelerator.backward(net(batch(number, accelerator.process_index)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            guards.examine(window([]))

        with LocalSGD(accelerator, net, local_sgd_steps=4) as local:
            for number in range(4):
                step(number)
                local.step()
        with accelerator.join_uneven_inputs([net]):
            for number in range(2 + accelerator.process_index):
                step(number)
        for number in range(3):
            step(number)
        accelerator.wait_for_everyone()
        guards.examine(window([]))
        return guards.reporter.reported, optimizer.updates

    assert ranks(2).run(run) == [([], 9), ([], 10)]


def test_replicas_of_views(ranks: Any) -> None:
    """Weights that are views with gaps are compared as any others."""

    def run() -> list[Any]:
        accelerator, guards = guarded(GuardKwargs(drift_every=1, schedule=False))
        net = torch.nn.Linear(3, 4)
        net.weight = torch.nn.Parameter(torch.ones(4, 6)[:, ::2])
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for number in range(3):
            accelerator.backward(net(batch(number, accelerator.process_index, torch.float32)).square().mean())
            optimizer.step()
        return guards.reporter.reported

    assert ranks(2).run(run) == [[], []]


# -- batches ----------------------------------------------------------------------------------------------------------


def reading(kind: str) -> Any:
    """Two ranks with a seeded loader that was prepared or not; what is left in the model, and what was said."""
    accelerator, guards = guarded(GuardKwargs(starving=None, straggler=None))
    net = network(torch.float32)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
    seed = accelerator.process_index if kind == "own seed" else 0
    batches: Any = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(seed))
    if kind == "prepared":
        batches = accelerator.prepare(batches)
    if kind == "warm-up":
        batches = [[torch.ones(8, 3)]] * 8
    for (x,) in batches:
        accelerator.backward(net(x.to(accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator._components.ledger.finish()
    return len(net._forward_pre_hooks), [(finding.kind, finding.text) for finding in guards.reporter.reported]


def test_same_batches(ranks: Any) -> None:
    """A loader that was not prepared and gives every process the same batches is told once, with what to write."""
    main, other = ranks(2).outcomes(reading, "same seed")
    text = "all 2 processes train on the same batches, so they do the same work: the first 3 batches are equal"
    assert main.value == (0, [("batches", text)])
    assert other.value == (0, [])
    assert own_words(main.output).startswith(f"{text}. What to do: prepare the loader (loader = accelerator.prepare(loader))")
    assert (own_words(main.output).count("\n"), own_words(other.output)) == (1, "")


@pytest.mark.parametrize("kind", ["prepared", "own seed", "warm-up"])
def test_other_batches(ranks: Any, kind: str) -> None:
    """Loaders that give each process its own samples are no finding; nor is one input that is given again and again."""
    assert ranks(2).run(reading, kind) == [(0, [])] * 2


def test_watched_model_copies(ranks: Any) -> None:
    """A model whose first batches are still to come can be copied, and the copy says nothing."""

    def run() -> list[float]:
        accelerator, _ = guarded(GuardKwargs())
        net = accelerator.prepare(network())
        (hook,) = net._forward_pre_hooks.values()
        copied = copy.deepcopy(hook)
        assert copied(net, (), {}) is None
        return [net(batch(0)).sum().item(), copy.deepcopy(accelerator.unwrap_model(net))(batch(0)).sum().item()]

    for first, second in ranks(2).run(run):
        assert first == second
