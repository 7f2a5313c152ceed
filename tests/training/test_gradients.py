"""The number of processes and the way that batches are cut up never change an update: it is that of one process and one big batch."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from problems import close, mean_loss, model, rows, train_plain, weights
from torch.utils.data import DataLoader

from slipstream import Accelerator
from slipstream.utils import DataLoaderConfiguration, GradientAccumulationPlugin

WORLDS = (1, 2, 3, 4)


def train(
    count: int, batch_size: int, steps: int, epochs: int = 1, zero_first: bool = False, **options: Any
) -> tuple[torch.Tensor, list[list[int]]]:
    """Weights after training, and the row numbers that went into each update on this rank."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(rows(count), batch_size=batch_size, shuffle=True))
    updates: list[list[int]] = [[]]
    for _ in range(epochs):
        for x, y, numbers in loader:
            with accelerator.accumulate(net):
                if zero_first:
                    optimizer.zero_grad()
                shares = accelerator.gradient_state.active_dataloader.shares
                real = len(numbers) if shares is None else shares.real[accelerator.process_index]
                updates[-1] += numbers.tolist()[:real]
                accelerator.backward(mean_loss(net, x, y))
                optimizer.step()
                if not zero_first:
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    updates.append([])
    return weights(accelerator.unwrap_model(net)), updates[:-1]


@pytest.mark.parametrize(("world", "device"), [*((world, None) for world in WORLDS), (2, "standin")])
def test_uneven_data_matches_one_process(ranks: Any, world: int, device: str | None) -> None:
    """Uneven data gives the updates of one process.

    Every sample counts once, however many ranks, batches and windows share them.
    """
    cases = [(13, 2, 1), (13, 2, 3), (9, 4, 2), (5, 2, 1), (24, 2, 2), (1, 2, 2)]

    def run() -> Any:
        config = DataLoaderConfiguration(even_batches=False, data_seed=5)
        return [train(*case, epochs=2, zero_first=bool(i % 2), dataloader_config=config) for i, case in enumerate(cases)]

    outcomes = ranks(world, device=device).run(run)
    for number, (count, _, _) in enumerate(cases):
        per_rank = [outcome[number] for outcome in outcomes]
        batches = [list(itertools.chain.from_iterable(parts)) for parts in zip(*(updates for _, updates in per_rank), strict=True)]
        assert sorted(itertools.chain.from_iterable(batches)) == sorted(list(range(count)) * 2), "every sample once an epoch"
        expected = train_plain(batches, rows(count))
        for found, _ in per_rank:
            assert close(found, expected), (world, cases[number])


@pytest.mark.parametrize("world", WORLDS)
def test_effective_batch_matches_one_process(ranks: Any, world: int) -> None:
    """The same effective batch gives the same training on any number of processes."""

    def run() -> Any:
        config = DataLoaderConfiguration(even_batches=False, data_seed=5)
        fixed = train(50, 12 // Accelerator().num_processes, 1, 3, dataloader_config=config)
        derived = train(50, 6, 1, 2, dataloader_config=config, effective_batch_size=12)
        return fixed[0], derived[0]

    alone = ranks(1).run(run)[0]
    for fixed, derived in ranks(world).run(run):
        assert close(fixed, alone[0])
        assert close(derived, alone[1])


@pytest.mark.parametrize("world", WORLDS)
def test_last_short_window(ranks: Any, world: int) -> None:
    """The last short window is divided by its real size.

    Accumulation over 2, three equal batches: both updates have the gradient 1.
    """

    def run() -> list[float]:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        net = torch.nn.Linear(1, 1, bias=False)
        data = DataLoader(torch.ones(3 * accelerator.num_processes, 1), batch_size=1)
        net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0), data)
        gradients = []
        for x in data:
            with accelerator.accumulate(net):
                accelerator.backward(net(x).mean())
                if accelerator.sync_gradients:
                    gradients.append(accelerator.unwrap_model(net).weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
        return gradients

    assert ranks(world).run(run) == [[1.0, 1.0]] * world


@pytest.mark.parametrize(("world", "device"), [*((world, None) for world in WORLDS), (2, "standin")])
def test_weighted_loss_matches_big_batch(ranks: Any, world: int, device: str | None) -> None:
    """A loss with its weight gives the gradient of one big batch.

    Sums over tokens, of different numbers on every rank and in every batch.
    """

    def tokens(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(1 + (3 * step + 5 * rank) % 9, 3, generator=generator, dtype=torch.float64)

    def run() -> list[torch.Tensor]:
        found = []
        for steps, batches in ((1, 2), (3, 7), (2, 4)):
            accelerator = Accelerator(gradient_accumulation_steps=steps)
            net = model()
            net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for step in range(batches):
                with accelerator.accumulate(net):
                    x = tokens(step, accelerator.process_index).to(accelerator.device)
                    accelerator.backward(net(x).square().sum(), weight=torch.tensor(len(x), device=accelerator.device))
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(weights(accelerator.unwrap_model(net)))
        return found

    expected = []
    for steps, batches in ((1, 2), (3, 7), (2, 4)):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for start in range(0, batches - steps + 1, steps):
            x = torch.cat([tokens(step, rank) for step in range(start, start + steps) for rank in range(world)])
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        expected.append(weights(net))
    for outcome in ranks(world, device=device).run(run):
        assert all(close(entry, other) for entry, other in zip(outcome, expected, strict=True))


def test_weights_outside_accumulate(ranks: Any) -> None:
    """Weights outside of accumulate and on several losses."""

    def run() -> list[float]:
        accelerator = Accelerator()
        net = torch.nn.Linear(1, 1, bias=False)
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        inner = accelerator.unwrap_model(net)
        rank = accelerator.process_index
        accelerator.backward(net(torch.full((rank + 1, 1), float(rank))).sum(), weight=rank + 1)
        first = inner.weight.grad.item()
        optimizer.zero_grad()
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.full((2, 1), 3.0)).sum(), weight=2)
            accelerator.backward(net(torch.full((1, 1), 9.0)).sum(), weight=1)
        return [first, inner.weight.grad.item()]

    for outcome in ranks(2).run(run):
        assert outcome == pytest.approx([2 / 3, 5.0])


def test_user_division_warned_once() -> None:
    """A division by the steps that the user made already is noticed once."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = accelerator.prepare(torch.nn.Linear(1, 1))

    def batch() -> None:
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.ones(1, 1)).mean() / 4)

    with pytest.warns(UserWarning, match="divided by 4. If that is the number of batches per update"):
        batch()
    batch()  # a second warning would be an error
    for factor in (1.0, 2.0):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        net = accelerator.prepare(torch.nn.Linear(1, 1))
        with warnings.catch_warnings(), accelerator.accumulate(net):
            warnings.simplefilter("error")
            accelerator.backward(net(torch.ones(1, 1)).mean() / factor)


def test_backward_outside_accumulate() -> None:
    """Backward outside of accumulate counts in full.

    And says that where an update ends is not known.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    with pytest.warns(UserWarning, match="outside of"):
        accelerator.backward(net(torch.ones(1, 1)).mean())
    assert accelerator.unwrap_model(net).weight.grad.item() == 1.0


@given(steps=st.integers(1, 4), batches=st.integers(1, 9), sync=st.booleans(), zero_first=st.booleans())
@settings(max_examples=30, deadline=None)
def test_updates_at_window_ends(steps: int, batches: int, sync: bool, zero_first: bool) -> None:
    """Updates happen where windows close."""
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_with_dataloader=sync)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    values = torch.arange(1.0, batches + 1).reshape(-1, 1)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0), DataLoader(values, batch_size=1))
    seen = []
    for _ in range(2):
        for x in loader:
            with accelerator.accumulate(net):
                if zero_first:
                    optimizer.zero_grad()
                accelerator.backward(net(x).mean())
                before = net.weight.item()
                optimizer.step()
                if accelerator.sync_gradients:
                    seen.append(round(before - net.weight.item(), 4))
                else:
                    assert net.weight.item() == before
                if not zero_first:
                    optimizer.zero_grad()
    flow = list(values.flatten().tolist()) * 2
    if sync:
        windows = [entry for epoch in range(2) for entry in _cut(flow[epoch * batches : (epoch + 1) * batches], steps)]
    else:
        windows = [entry for entry in _cut(flow, steps) if len(entry) == steps]
    assert seen == pytest.approx([sum(window) / len(window) for window in windows], abs=1e-3)


def _cut(values: list[float], size: int) -> list[list[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _adversaries() -> tuple[torch.nn.Module, torch.nn.Module]:
    return model(1), torch.nn.Sequential(torch.nn.Linear(1, 3), model(2)[1], torch.nn.Linear(3, 3)).double()


def _adversarial_loss(judge: Any, maker: Any, x: torch.Tensor, which: int) -> torch.Tensor:
    made = maker(x[:, :1])
    return (judge(made.detach()) - judge(x)).mean() if which == 0 else -judge(made).mean()


def _adversarial_data() -> torch.Tensor:
    return torch.randn(8, 12, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("world", WORLDS)
def test_window_per_model(ranks: Any, world: int) -> None:
    """Several models have windows of their own.

    A GAN with accumulation 2: each network is updated every second time that it is accumulated.
    """

    def run() -> list[torch.Tensor]:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        torch.manual_seed(0)
        nets = _adversaries()
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
        judge, maker, *prepared = accelerator.prepare(*nets, *optimizers)
        for x in _adversarial_data().to(accelerator.device).chunk(accelerator.num_processes, dim=1)[accelerator.process_index]:
            for which, (net, optimizer) in enumerate(zip((judge, maker), prepared, strict=True)):
                judge.requires_grad_(which == 0)
                with accelerator.accumulate(net):
                    accelerator.backward(_adversarial_loss(judge, maker, x, which))
                    optimizer.step()
                    optimizer.zero_grad()
        return [weights(accelerator.unwrap_model(net)) for net in (judge, maker)]

    torch.manual_seed(0)
    judge, maker = nets = _adversaries()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
    kept: list[list[Any]] = [[], []]
    for x in _adversarial_data():
        for which, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            kept[which].append(torch.autograd.grad(_adversarial_loss(judge, maker, x, which), list(net.parameters())))
            if len(kept[which]) == 2:
                for parameter, entry, two in zip(net.parameters(), *kept[which], strict=True):
                    parameter.grad = (entry + two) / 2
                optimizer.step()
                kept[which] = []
    for found in ranks(world).run(run):
        assert close(found[0], weights(judge))
        assert close(found[1], weights(maker))
