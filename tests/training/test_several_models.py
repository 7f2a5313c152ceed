"""Several models and optimizers of one Accelerator: each counts by itself, and communicates where its own updates end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from problems import Net, close
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator, StateError
from slipstream.utils import GradientAccumulationPlugin

WORLDS = (1, 2, 3)


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "forward": lambda net, x: net(x),
    "method": lambda net, x: net.score(x),
    "parts": lambda net, x: net.outer(torch.tanh(net.inner(x))),
}


def data(batches: int) -> torch.Tensor:
    return torch.randn(batches, 6, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def mine(x: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    return x.to(accelerator.device).chunk(accelerator.num_processes)[accelerator.process_index]


def flat(nets: list[torch.nn.Module]) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for net in nets for parameter in net.parameters()])


def joint_plain(way: str, steps: int) -> torch.Tensor:
    nets = [Net(4, 1), Net(7, 2)]
    optimizer = torch.optim.SGD([parameter for net in nets for parameter in net.parameters()], lr=0.1)
    for number, x in enumerate(data(6), 1):
        first, second = (WAYS[way](net, x) for net in nets)
        (first.square().mean() / steps).backward(retain_graph=True)
        ((first * second).mean() / steps).backward()
        if number % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return flat(nets)


def joint_ours(way: str, steps: int) -> torch.Tensor:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    nets = [Net(4, 1), Net(7, 2)]
    optimizer = torch.optim.SGD([parameter for net in nets for parameter in net.parameters()], lr=0.1)
    entry, two, optimizer = accelerator.prepare(*nets, optimizer)
    for x in data(6):
        x = mine(x, accelerator)
        with accelerator.accumulate(entry, two):
            first, second = WAYS[way](entry, x), WAYS[way](two, x)
            accelerator.backward(first.square().mean(), retain_graph=True)
            accelerator.backward((first * second).mean())
            optimizer.step()
            optimizer.zero_grad()
    return flat(nets)


@pytest.mark.parametrize("way", WAYS)
def test_joint_losses(ranks: Any, way: str, rounds: Callable[..., int]) -> None:
    """Two models of different sizes, two losses, reached in every way: no race between their reductions."""
    expected = [joint_plain(way, steps) for steps in (1, 2)]
    for world in (2, 3):
        for _ in range(rounds(ci=9, soak=50)):
            for found in ranks(world).run(lambda: [joint_ours(way, steps) for steps in (1, 2)]):
                assert all(close(ours, plain) for ours, plain in zip(found, expected, strict=True))


def counted(accelerator: Accelerator, model: Any, counts: list[int]) -> None:
    """Counts the reductions of a model's buckets."""
    if accelerator.num_processes == 1:
        return

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, of its own kinds only
        state.append(1)
        size = torch.distributed.get_world_size()
        work = torch.distributed.all_reduce(bucket.buffer().div_(size), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(counts, hook)


@pytest.mark.parametrize("world", WORLDS)
def test_weights_per_model_block(ranks: Any, world: int) -> None:
    """Weights in a block for each model.

    A closing batch of one model does not reduce the open window of another.
    """

    def run() -> Any:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        nets = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]
        *models, first, second = accelerator.prepare(*nets, *optimizers)
        counts: list[list[int]] = [[], []]
        for model, count in zip(models, counts, strict=True):
            counted(accelerator, model, count)
        found = []
        with accelerator.accumulate(models[0]):  # one batch ahead of the other model
            accelerator.backward(models[0](torch.ones(1, 1, device=accelerator.device)).sum(), weight=1)
            first.zero_grad()
        for number in range(1, 8):
            weight = number + 3 * accelerator.process_index
            for model, optimizer in zip(models, (first, second), strict=True):
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.full((weight, 1), float(number), device=accelerator.device)).sum(), weight=weight)
                    if accelerator.sync_gradients:
                        found.append(round(accelerator.unwrap_model(model).weight.grad.item(), 6))
                    optimizer.step()
                    optimizer.zero_grad()
        return found, [len(count) for count in counts]

    def update(numbers: list[int]) -> float:
        pairs = [(number, number + 3 * rank) for number in numbers for rank in range(world)]
        return round(sum(number * weight for number, weight in pairs) / sum(weight for _, weight in pairs), 6)

    lone = round((world + sum(1 + 3 * rank for rank in range(world))) / (world + sum(1 + 3 * rank for rank in range(world))), 6)
    expected = [lone, update([1, 2]), update([2, 3]), update([3, 4]), update([4, 5]), update([5, 6]), update([6, 7])]
    for found, counts in ranks(world).run(run):
        assert found == pytest.approx(expected)
        assert counts == ([4, 3] if world > 1 else [0, 0])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("block", [True, False])
def test_weights_of_two_models(ranks: Any, world: int, block: bool) -> None:
    """Weights of two models in one block.

    Each model is divided by the weight of the losses that reach it.
    """

    def run() -> list[float]:
        accelerator = Accelerator()
        entry, two = accelerator.prepare(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
        x = torch.ones(4, 1, device=accelerator.device)
        if block:
            with accelerator.accumulate(entry, two):
                accelerator.backward(entry(x).sum(), weight=4)
                accelerator.backward(two(x).sum(), weight=4)
        else:
            accelerator.backward(entry(x).sum(), weight=4)
            accelerator.backward(two(x).sum(), weight=4)
        return [accelerator.unwrap_model(net).weight.grad.item() for net in (entry, two)]

    assert ranks(world).run(run) == [[1.0, 1.0]] * world


def adversaries_plain(steps: int, weighs: bool) -> torch.Tensor:
    """By hand: every loss is divided by the number of batches of an update."""
    judge, maker = nets = [Net(4, 1), torch.nn.Linear(3, 3).double()]
    torch.nn.init.ones_(maker.weight)
    torch.nn.init.zeros_(maker.bias)
    judging, making = (torch.optim.SGD(net.parameters(), lr=0.05) for net in nets)
    for number, x in enumerate(data(8), 1):
        closing = number % steps == 0
        ((judge(maker(x).detach()) - judge(x)).mean() / steps).backward()
        if closing:
            judging.step()
            judging.zero_grad()
        (-judge(maker(x)).mean() / steps).backward()
        if closing:
            making.step()
            making.zero_grad()
    return flat(nets)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("steps", [1, 2])
def test_adversaries_in_one_block(ranks: Any, world: int, steps: int) -> None:
    """Clearing the gradients of one model does not change what another one's are divided by."""

    def run() -> torch.Tensor:
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        nets = [Net(4, 1), torch.nn.Linear(3, 3).double()]
        torch.nn.init.ones_(nets[1].weight)
        torch.nn.init.zeros_(nets[1].bias)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
        judge, maker, judging, making = accelerator.prepare(*nets, *optimizers)
        for x in data(8):
            x = mine(x, accelerator)
            with accelerator.accumulate(judge, maker):
                accelerator.backward((judge(maker(x).detach()) - judge(x)).mean())
                judging.step()
                judging.zero_grad()
                accelerator.backward(-judge(maker(x)).mean())
                making.step()
                making.zero_grad()
        return flat(nets)

    expected = adversaries_plain(steps, False)
    for found in ranks(world).run(run):
        assert close(found, expected)


ACTIONS = ("backward", "clip", "step", "clear")


def orders(models: int) -> st.SearchStrategy[list[tuple[str, int]]]:
    """Every order of what is done in a batch, as far as each model has its backward before its clipping and step."""
    whole = [(action, number) for number in range(models) for action in ACTIONS]

    def is_sensible(order: list[tuple[str, int]]) -> bool:
        place = {entry: position for position, entry in enumerate(order)}
        return all(place["backward", number] < place["clip", number] < place["step", number] for number in range(models))

    def repaired(order: list[tuple[str, int]]) -> list[tuple[str, int]]:
        for number in range(models):
            spots = sorted(order.index((action, number)) for action in ("backward", "clip", "step"))
            for spot, action in zip(spots, ("backward", "clip", "step"), strict=True):
                order[spot] = (action, number)
        assert is_sensible(order)
        return order

    return st.permutations(whole).map(list).map(repaired)


@given(models=st.integers(1, 3), steps=st.integers(1, 3), weighs=st.booleans(), values=st.data())
@settings(max_examples=120, deadline=None)
def test_every_order_of_calls(models: int, steps: int, weighs: bool, values: st.DataObject) -> None:
    """1 to 3 models and optimizers; step, zero_grad, clip and backward in any order: as by hand in plain PyTorch."""
    order = values.draw(orders(models))
    sizes = values.draw(st.lists(st.integers(1, 4), min_size=steps * 2, max_size=steps * 2))
    reaches = [sorted({number, *values.draw(st.sets(st.integers(0, models - 1)))}) for number in range(models)]
    ours, plain = ([torch.nn.Linear(2, 1, bias=False).double() for _ in range(models)] for _ in range(2))
    for mine_, theirs in zip(ours, plain, strict=True):
        theirs.load_state_dict(mine_.state_dict())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in ours]
    prepared = list(accelerator.prepare(*ours, *optimizers))
    nets, optimizers = prepared[:models], prepared[models:]
    by_hand = [torch.optim.SGD(net.parameters(), lr=0.1) for net in plain]
    for start in range(0, len(sizes), steps):
        window = sizes[start : start + steps]
        for position, size in enumerate(window):
            x = torch.randn(size, 2, dtype=torch.float64)
            closing = position == steps - 1
            total = float(sum(window)) if weighs else float(steps)

            def loss(of: list[Any], number: int, x: torch.Tensor = x) -> torch.Tensor:
                value = torch.stack([of[other](x) for other in reaches[number]]).sum(0).square()
                return value.sum() if weighs else value.mean()

            with accelerator.accumulate(*nets):
                for action, number in order:
                    if action == "backward":
                        accelerator.backward(loss(nets, number), **({"weight": size} if weighs else {}))
                    elif action == "clip":
                        accelerator.clip_grad_value_(nets[number].parameters(), 0.5)
                    elif action == "step":
                        optimizers[number].step()
                    else:
                        optimizers[number].zero_grad()
            _by_hand(order, plain, by_hand, loss, total, closing, is_first=position == 0, reaches=reaches)
        if weighs and not _is_plain_sum(order, reaches):
            return  # what a weight counts for once gradients were cleared between two losses is not defined by hand
        for net, other in zip(ours, plain, strict=True):
            assert torch.allclose(net.weight, other.weight, atol=1e-9), (order, reaches, sizes)


def _by_hand(
    order: list[tuple[str, int]],
    nets: list[Any],
    optimizers: list[Any],
    loss: Any,
    total: float,
    closing: bool,
    is_first: bool,
    reaches: list[list[int]],
) -> None:
    """One batch in plain PyTorch. `zero_grad` acts unless it would drop what belongs to the coming update."""
    reached: set[int] = set()
    for action, number in order:
        if action == "backward":
            (loss(nets, number) / total).backward()
            reached |= set(reaches[number])
        elif action == "clip" and closing and nets[number].weight.grad is not None:
            torch.nn.utils.clip_grad_value_(nets[number].parameters(), 0.5)
        elif action == "step" and closing:
            optimizers[number].step()
        elif action == "clear" and ((closing and number in reached) or (is_first and number not in reached)):
            optimizers[number].zero_grad()


def _is_plain_sum(order: list[tuple[str, int]], reaches: list[list[int]]) -> bool:
    """Whether every model's losses are counted before its gradients are cleared, and only its own."""
    return all(reached == [number] for number, reached in enumerate(reaches))


def test_two_optimizers_of_one_model() -> None:
    """One that clears its part does not change what the other part is divided by."""
    for order in permutations(("first", "second")):
        nets = [Net(4, 1), Net(4, 1)]
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        groups = {"first": "inner", "second": "outer"}
        optimizers = {name: torch.optim.SGD(getattr(nets[0], part).parameters(), lr=0.1) for name, part in groups.items()}
        by_hand = {name: torch.optim.SGD(getattr(nets[1], part).parameters(), lr=0.1) for name, part in groups.items()}
        net, *prepared = accelerator.prepare(nets[0], *optimizers.values())
        optimizers = dict(zip(groups, prepared, strict=True))
        for number, x in enumerate(data(4), 1):
            with accelerator.accumulate(net):
                for name in order:
                    accelerator.backward(net(x).square().mean())
                    optimizers[name].step()
                    optimizers[name].zero_grad()
            for name in order:
                (nets[1](x).square().mean() / 2).backward()
                if number % 2 == 0:
                    by_hand[name].step()
                    by_hand[name].zero_grad()
        assert close(flat(nets[:1]), flat(nets[1:]))


def test_no_sync_after_other_loss(ranks: Any) -> None:
    """No sync after a loss of another model.

    A loss that does not reach a model does not arm it: `no_sync` holds.
    """

    def run() -> list[float]:
        accelerator = Accelerator()
        other = torch.nn.Linear(1, 1, bias=False, device=accelerator.device)
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), 1.0 + accelerator.process_index, device=accelerator.device)
        found = []
        for block in (lambda: accelerator.no_sync(model), model.no_sync):
            with pytest.warns(UserWarning, match="reaches no parameter") if not found else nullcontext():
                accelerator.backward(other(x).sum())
            with block():
                accelerator.backward(model(x).sum())
            found.append(accelerator.unwrap_model(model).weight.grad.item())
            model.zero_grad()
        accelerator.backward(model(x).sum())
        found.append(accelerator.unwrap_model(model).weight.grad.item())
        return found

    assert ranks(2).run(run) == [[1.0, 1.0, 1.5], [2.0, 2.0, 1.5]]


def test_forward_without_backward(ranks: Any) -> None:
    """A forward without backward before an open batch.

    What a forward pass prepared for averaging does not average the next open window early.
    """

    def run() -> Any:
        accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), 1.0 + accelerator.process_index, device=accelerator.device)
        found = []
        for _ in range(2):
            model(x)
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                found.append(accelerator.unwrap_model(model).weight.grad.item())
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                found.append(accelerator.unwrap_model(model).weight.grad.item())
            model.zero_grad()
        return found

    assert ranks(2).run(run) == [[0.5, 1.5, 0.5, 1.5], [1.0, 1.5, 1.0, 1.5]]


def test_nothing_prepared_on_several_processes(ranks: Any) -> None:
    """`backward` says that no prepared model takes part."""

    def run() -> str:
        accelerator = Accelerator()
        model = torch.nn.Linear(1, 1)
        try:
            accelerator.backward(model(torch.ones(1, 1)).sum())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    for told in ranks(2).run(run):
        assert told.startswith("StateError")
        assert "no model was prepared" in told
        assert "accelerator.prepare(model, optimizer)" in told
    assert ranks(1).run(run) == ["nothing"]


def test_loss_outside_blocks() -> None:
    """A loose loss leaves other windows alone.

    A model trained without `accumulate` does not close the window of one that is.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    nets = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    entry, two = accelerator.prepare(*nets)
    found = []
    for _ in range(4):
        with accelerator.accumulate(entry):
            accelerator.backward(entry(torch.ones(1, 1)).sum())
            found.append(accelerator.sync_gradients)
        with pytest.warns(UserWarning, match="outside of") if len(found) == 1 else nullcontext():
            accelerator.backward(two(torch.ones(1, 1)).sum())
    assert found == [False, True, False, True]
    assert nets[0].weight.grad.item() == 2.0
    assert nets[1].weight.grad.item() == 4.0



@pytest.mark.parametrize("weighs", [False, True])
def test_a_parameter_of_two_models(weighs: bool) -> None:
    """Tied weights are corrected once, also where a short batch or weights change what a window is divided by."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    encoder, decoder = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    decoder.weight = encoder.weight
    torch.nn.init.ones_(encoder.weight)
    data = DataLoader(TensorDataset(torch.tensor([[1.0], [1.0], [10.0]])), batch_size=2)
    entry, two, loader = accelerator.prepare(encoder, decoder, data)
    for (x,) in loader:
        with accelerator.accumulate(entry, two):
            out = two(entry(x))
            accelerator.backward(out.sum(), weight=len(x)) if weighs else accelerator.backward(out.mean())
    assert encoder.weight.grad.item() == pytest.approx(8.0)


@pytest.mark.parametrize("world", WORLDS)
def test_mean_and_weight_in_block(ranks: Any, world: int) -> None:
    """A mean and a weight in one block.

    Each model has losses of its own kind.
    """

    def run() -> list[float]:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        entry, two = accelerator.prepare(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
        for number in (1.0, 3.0):
            x = torch.full((2, 1), number, device=accelerator.device)
            with accelerator.accumulate(entry, two):
                accelerator.backward(entry(x).mean())
                accelerator.backward(two(x).sum(), weight=2)
        return [accelerator.unwrap_model(net).weight.grad.item() for net in (entry, two)]

    assert ranks(world).run(run) == [[2.0, 2.0]] * world


def test_block_that_fails() -> None:
    """A block that does not begin.

    Models at different positions of their windows: an error, and the loop's state is as outside of a block.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    entry, two, loader = accelerator.prepare(*(torch.nn.Linear(1, 1) for _ in range(2)), DataLoader(torch.ones(3, 1)))
    for _ in loader:
        with accelerator.accumulate(entry):
            pass
        with pytest.raises(StateError, match="different positions of their windows"), accelerator.accumulate(entry, two):
            pass
        assert accelerator.gradient_state.batch is None
        break
