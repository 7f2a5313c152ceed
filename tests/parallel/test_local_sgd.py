"""Local SGD equals a hand-written one: replicas that train apart and are averaged every few updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import Accelerator
from slipstream.errors import ConfigError, PeerLostError, StateError
from slipstream.parallel.local_sgd import LocalSGD


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).double()


def batch_of(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + number))


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_hand(world: int, batches: int, every: int, accumulated: int = 1) -> list[dict[str, torch.Tensor]]:
    """The weights of every replica, with nothing but PyTorch."""
    replicas = [make_model() for _ in range(world)]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9) for replica in replicas]
    updates = 0

    def average() -> None:
        states = [replica.state_dict() for replica in replicas]
        for name in states[0]:
            if states[0][name].is_floating_point():
                mean = torch.stack([state[name] for state in states]).mean(0)
                for state in states:
                    state[name].copy_(mean)

    for number in range(batches):
        closes = (number + 1) % accumulated == 0
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            (replica(batch_of(rank, number)).square().mean() / accumulated).backward()
            if closes:
                optimizer.step()
                optimizer.zero_grad()
        updates += closes
        if closes and updates % every == 0:
            average()
    if updates % every:
        average()
    return [weights(replica) for replica in replicas]


def trained(batches: int, every: int, accumulated: int = 1, enabled: bool = True) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=accumulated)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    with LocalSGD(accelerator, model, local_sgd_steps=every, enabled=enabled) as local_sgd:
        for number in range(batches):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch_of(accelerator.process_index, number)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    assert local_sgd.num_steps == batches // accumulated
    return weights(accelerator.unwrap_model(model))


@pytest.mark.parametrize("world", [2, 3])
def test_matches_hand_averaged_replicas(ranks: Any, world: int) -> None:
    """It equals replicas that are averaged by hand."""
    cases = [(7, 3, 1), (6, 3, 1), (4, 1, 1), (2, 5, 1), (12, 2, 3)]

    def run() -> Any:
        return [trained(*case) for case in cases]

    results = ranks(world).run(run)
    for case, *replicas in zip(cases, *results, strict=True):
        for found, expected in zip(replicas, by_hand(world, *case), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        first = {name: value for name, value in replicas[0].items() if value.is_floating_point()}
        for other in replicas[1:]:
            assert all(torch.equal(value, other[name]) for name, value in first.items())


def test_disabled_is_plain_training(ranks: Any) -> None:
    """One process and a block that is not enabled are plain training."""
    assert_same = torch.testing.assert_close
    assert_same(trained(5, 2), by_hand(1, 5, 2)[0], rtol=0, atol=0)

    def run() -> Any:
        def plain() -> dict[str, torch.Tensor]:
            accelerator = Accelerator()
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            model, optimizer = accelerator.prepare(model, optimizer)
            for number in range(3):
                accelerator.backward(model(batch_of(accelerator.process_index, number)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            return weights(accelerator.unwrap_model(model))

        return plain(), trained(3, 2, enabled=False)

    for plain, off in ranks(2).run(run):
        assert_same(plain, off, rtol=0, atol=0)


def test_collectives_per_dtype(ranks: Any) -> None:
    """One collective for each number format and none between."""

    def run() -> Any:
        accelerator = Accelerator()
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(200, 200), "b": torch.nn.Linear(200, 200).double()})
        model["tied"] = model["a"]
        model["frozen"] = torch.nn.Linear(2, 2).requires_grad_(False)
        model = accelerator.prepare(model)
        reduced = []
        channel = accelerator.state.channel()
        turn = type(channel.guard(None, None))  # type: ignore[arg-type]
        real = turn.all_reduce

        def counting(self: Any, tensor: torch.Tensor, operation: str) -> None:
            reduced.append((tensor.dtype, tensor.numel()))
            real(self, tensor, operation)

        turn.all_reduce = counting  # type: ignore[method-assign]
        try:
            with LocalSGD(accelerator, model, 2) as local_sgd:
                local_sgd.step()
                before = len(reduced)
                local_sgd.step()
        finally:
            turn.all_reduce = real  # type: ignore[method-assign]
        return before, reduced

    size = 200 * 200 + 200
    assert ranks(2).run(run) == [(0, [(torch.float32, size), (torch.float64, size)])] * 2


def test_error_in_block(ranks: Any) -> None:
    """An error in the block is raised without averaging."""

    def run() -> None:
        accelerator = Accelerator()
        model = accelerator.prepare(make_model())
        with LocalSGD(accelerator, model, 4) as local_sgd:
            local_sgd.step()
            if accelerator.process_index == 1:
                raise ValueError("bad batch")

    main, other = ranks(2).outcomes(run)
    assert isinstance(other.error, ValueError)
    assert isinstance(main.error, PeerLostError)


def test_wrong_arguments_refused() -> None:
    """What makes no sense is refused."""
    accelerator = Accelerator()
    model = make_model()
    for steps in (0, -1, 2.0, True, None):
        with pytest.raises(ConfigError, match="local_sgd_steps="):
            LocalSGD(accelerator, model, steps)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the model that prepare gave back"):
        LocalSGD(accelerator, model.parameters(), 2)  # type: ignore[arg-type]
    local_sgd = LocalSGD(accelerator, model, 2)
    with pytest.raises(StateError, match="outside of its block"):
        local_sgd.step()
    with local_sgd, pytest.raises(StateError, match="running already"):
        local_sgd.__enter__()
