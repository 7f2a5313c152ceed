"""`prepare` takes anything in any order and gives it back in order; models keep their names, and mistakes are named."""

from __future__ import annotations

import copy
import itertools
import pickle  # noqa: TID251  # users copy models so
from typing import Any

import pytest
import torch
from problems import close, mean_loss, model, rows, weights
from torch.utils.data import DataLoader

from slipstream import Accelerator, ConfigError, DistributedDataParallelKwargs, PartialState, StateError
from slipstream.training.optimizer import AcceleratedOptimizer
from slipstream.training.scheduler import AcceleratedScheduler


def objects() -> list[Any]:
    net = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return [net, optimizer, DataLoader(rows(8), batch_size=2), torch.optim.lr_scheduler.StepLR(optimizer, 1), "anything"]


def test_any_order_of_prepare() -> None:
    """Every order in one call or several."""
    for order in itertools.permutations(range(5)):
        given = objects()
        back = Accelerator(cpu=True).prepare(*(given[place] for place in order))
        found = dict(zip(order, back, strict=True))
        assert found[0] is given[0], "one process gives back the model itself"
        assert isinstance(found[1], AcceleratedOptimizer)
        assert isinstance(found[2], DataLoader)
        assert isinstance(found[3], AcceleratedScheduler)
        assert found[4] == "anything"
    accelerator = Accelerator(cpu=True)
    net, optimizer, loader, scheduler, _ = objects()
    scheduler, loader, optimizer = (accelerator.prepare(entry) for entry in (scheduler, loader, optimizer))
    net = accelerator.prepare(net)
    for x, y, _ in loader:
        accelerator.backward(mean_loss(net, x, y))
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.1 * 0.1**4])


def test_prepare_twice(ranks: Any) -> None:
    """Preparing twice gives the same."""

    def run() -> bool:
        accelerator = Accelerator()
        given = objects()
        once = accelerator.prepare(*given)
        assert accelerator.prepare(*once) == once
        assert accelerator.prepare(*given)[:2] == once[:2]
        return isinstance(once[0], torch.nn.parallel.DistributedDataParallel)

    assert ranks(1).run(run) == [False]
    assert ranks(2).run(run) == [True, True]


def test_state_dict_names(ranks: Any) -> None:
    """State dicts have the names of the model."""

    def run() -> Any:
        accelerator = Accelerator()
        own = list(model().state_dict())
        net = accelerator.prepare(torch.compile(model(), backend="eager"))
        after = torch.compile(accelerator.prepare(model(3)), backend="eager")
        assert list(net.state_dict()) == list(accelerator.get_state_dict(net)) == list(accelerator.get_state_dict(after)) == own
        net.load_state_dict(model(5).state_dict())
        assert close(weights(accelerator.unwrap_model(net)).cpu(), weights(model(5)))
        if accelerator.use_distributed:
            net.load_state_dict({f"module.{name}": value for name, value in model(6).state_dict().items()})
        assert type(accelerator.unwrap_model(net)) is torch.nn.Sequential
        x = torch.ones(2, 3, dtype=torch.float64, device=accelerator.device)
        assert torch.equal(net(x), accelerator.unwrap_model(net)(x))
        torch._dynamo.reset()
        return True

    for world in (1, 2):
        assert all(ranks(world).run(run))


def test_copies_of_prepared_model() -> None:
    """Copies of a prepared model are their own."""
    for precision in ("no", "bf16"):
        net = Accelerator(cpu=True, mixed_precision=precision).prepare(torch.nn.Linear(2, 2))
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            torch.nn.init.zeros_(other.weight)
            torch.nn.init.zeros_(other.bias)
            assert not other(torch.ones(1, 2)).any()
            assert net(torch.ones(1, 2)).any()


class Encoder(torch.nn.Module):
    """A model with an attribute, a method that computes, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2, bias=False)
        self.temperature = 1.0
        torch.nn.init.ones_(self.net.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.temperature

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).sum()

    def describe(self) -> str:
        return "an encoder"


def test_model_visible_through_wrapper(ranks: Any) -> None:
    """The model shows through its wrapper.

    Attributes, methods that synchronise, assignments, and an answer for what neither has.
    """

    def run() -> Any:
        accelerator = Accelerator()
        net = accelerator.prepare(Encoder())
        inner = accelerator.unwrap_model(net)
        assert net.temperature == 1.0
        assert net.describe() == "an encoder"
        layers = accelerator.prepare(model())
        assert layers[0] is accelerator.unwrap_model(layers)[0]
        net.temperature = 2.0
        assert inner.temperature == 2.0
        with pytest.raises(AttributeError, match="nothing_of_the_kind") as missing:
            net.nothing_of_the_kind  # noqa: B018
        accelerator.backward(net.encode(torch.full((1, 2), float(accelerator.process_index), device=accelerator.device)))
        return inner.net.weight.grad[0, 0].item(), "unwrap_model" in str(missing.value)

    assert ranks(1).run(run)[0][0] == 0.0
    assert ranks(2).run(run) == [(0.5, True)] * 2


class Idle(torch.nn.Module):
    """A model with a layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_unused_parameters_named(ranks: Any) -> None:
    """Unused parameters are named before the first update."""

    def run() -> str:
        accelerator = Accelerator()
        net = Idle()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        accelerator.backward(net(torch.ones(1, 1)).sum())
        before = weights(net)
        with pytest.raises(StateError) as caught:
            optimizer.step()
        assert torch.equal(before, weights(net))
        return str(caught.value)

    for text in ranks(2).run(run):
        assert "idle.weight, idle.bias got none" in text
        assert "find_unused_parameters=True" in text

    def allowed() -> bool:
        accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
        net = Idle()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
        for _ in range(2):
            accelerator.backward(net(torch.ones(1, 1)).sum())
            optimizer.step()
        return True

    assert all(ranks(2).run(allowed))


def test_rewrapped_after_group_release(ranks: Any) -> None:
    """A model is wrapped again after the group was released."""

    def run() -> Any:
        accelerator = Accelerator()
        net = model()
        first, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.destroy_process_group()
        with pytest.raises(StateError, match="prepare it again"):
            first(torch.ones(1, 3, dtype=torch.float64))
        second = accelerator.prepare(first)
        assert second is not first
        assert accelerator.unwrap_model(second) is net
        accelerator.backward(second(torch.full((1, 3), float(accelerator.process_index), dtype=torch.float64)).sum())
        optimizer.step()
        PartialState().verify_replicas(weights=weights(net))
        return True

    assert all(ranks(2).run(run))


def test_rewrapped_after_unfreezing(ranks: Any) -> None:
    """A model whose frozen part changed is wrapped again."""

    def run() -> bool:
        accelerator = Accelerator()
        net = model()
        net[0].requires_grad_(False)
        first = accelerator.prepare(net)
        net[0].requires_grad_(True)
        second = accelerator.prepare(net)
        accelerator.backward(second(torch.full((1, 3), float(accelerator.process_index + 1), dtype=torch.float64)).sum())
        PartialState().verify_replicas(gradient=net[0].weight.grad)
        return second is not first

    assert ranks(2).run(run) == [True, True]


def test_mistakes_are_named() -> None:
    accelerator = Accelerator(cpu=True)
    net, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"pass the objects themselves, e\.g\. prepare\(\*objects\)"):
        accelerator.prepare([net])
    with pytest.raises(ConfigError, match="share a parameter"):
        accelerator.prepare(net, *(torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2)))
    with pytest.raises(ConfigError, match="made by hand"):
        accelerator.prepare(torch.nn.DataParallel(net))
    with pytest.raises(ConfigError, match="on the meta device"):
        accelerator.prepare(torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(ConfigError, match="one entry for each of the 1 objects"):
        accelerator.prepare(net, device_placement=[True, False])
    with pytest.raises(ConfigError, match="device_map"):
        accelerator.prepare(net, device_map="somehow")
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(other.parameters(), lr=0.1))
    accelerator.backward(net(torch.ones(1, 1)).sum())
    with pytest.raises(StateError, match="2 of 2 parameters .* belong to no model prepared"):
        optimizer.step()
    with pytest.raises(StateError, match="prepared by another Accelerator"):
        Accelerator(cpu=True).prepare(optimizer)
    with pytest.raises(StateError, match="was not prepared by this Accelerator"):
        accelerator.accumulate(torch.nn.Linear(1, 1))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters(), lr=0.1), 1))
    with pytest.raises(StateError, match="Prepare that optimizer too"):
        scheduler.step()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fsdp_plugin": object()}, "fsdp_plugin"),
        ({"kwargs_handlers": [object()]}, "not a handler"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"effective_batch_size": 0}, "samples per update"),
        ({"effective_batch_size": 8, "gradient_accumulation_steps": 2}, "leave one of them out"),
        ({"mixed_precision": "fp12"}, "fp12"),
        ({"log_with": "nothing_known"}, "nothing_known"),
    ],
)
def test_unusable_arguments_refused(options: dict[str, Any], told: str) -> None:
    """Arguments that cannot be used are refused."""
    with pytest.raises((ConfigError, TypeError), match=told):
        Accelerator(cpu=True, **options)


def test_two_accelerators() -> None:
    """Two accelerators keep their own settings.

    A second Accelerator does not change the precision or accumulation of the first.
    """
    first = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    second = Accelerator(cpu=True, gradient_accumulation_steps=8)
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 8)
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    low, full = first.prepare(torch.nn.Linear(1, 1)), second.prepare(torch.nn.Linear(1, 1))
    with first.autocast():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is torch.bfloat16
    with second.autocast():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is torch.float32
    closing = []
    for _ in range(2):
        with first.accumulate(low), second.accumulate(full):
            closing.append((first.sync_gradients, second.sync_gradients))
    assert closing == [(False, False), (True, False)]


def test_free_memory() -> None:
    """Free memory lets everything go."""
    import weakref

    accelerator = Accelerator(cpu=True)
    net, optimizer, loader, scheduler, _ = accelerator.prepare(*objects())
    for x, y, _ in loader:
        with accelerator.accumulate(net):
            accelerator.backward(mean_loss(net, x, y))
            optimizer.step()
    seen = [weakref.ref(entry) for entry in (net, optimizer, loader, scheduler)]
    net, optimizer, loader, scheduler = accelerator.free_memory(net, optimizer, loader, scheduler)
    assert [reference() for reference in seen] == [None] * 4
