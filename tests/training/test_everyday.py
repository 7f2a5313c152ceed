"""Loops as people write them, on 1, 2 and 3 processes, against plain PyTorch on one: several losses, parts of models, pieces of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import close, model, weights
from torch.utils.data import DataLoader

from slipstream import Accelerator, ConfigError, StateError
from slipstream.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, GradScalerKwargs

X = torch.randn(12, 12, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
"""Twelve global batches of twelve samples."""
WORLDS = (1, 2, 3)

Body = Callable[[Any, torch.Tensor, Callable[..., None]], None]


def two_losses(net: Any, x: torch.Tensor, backward: Callable[..., None]) -> None:
    out = net(x)
    backward(out.mean(), retain_graph=True)
    backward(out.square().mean())


def two_forwards(net: Any, x: torch.Tensor, backward: Callable[..., None]) -> None:
    first, second = net(x), net(-x)
    backward(first.square().mean())
    backward(second.mean())


def parts(net: Any, x: torch.Tensor, backward: Callable[..., None]) -> None:
    backward(net[2](net[1](net[0](x))).square().mean())


def plain(body: Body, steps: int) -> torch.Tensor:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, len(X), steps):
        for x in X[start : start + steps]:
            body(net, x, lambda loss, **kwargs: (loss / steps).backward(**kwargs))
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def ours(body: Body, steps: int, **options: Any) -> torch.Tensor:
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    original = model()
    net, optimizer = accelerator.prepare(original, torch.optim.SGD(original.parameters(), lr=0.1, momentum=0.9))
    for x in X.to(accelerator.device).chunk(accelerator.num_processes, dim=1)[accelerator.process_index]:
        with accelerator.accumulate(net):
            body(net, x, accelerator.backward)
            optimizer.step()
            optimizer.zero_grad()
    return weights(original)


@pytest.mark.parametrize("world", WORLDS)
def test_several_losses_averaged(ranks: Any, world: int) -> None:
    """Several losses and parts of a model are averaged too."""
    bodies = (two_losses, two_forwards, parts)
    expected = [plain(body, steps) for body in bodies for steps in (1, 3)]
    for found in ranks(world).run(lambda: [ours(body, steps) for body in bodies for steps in (1, 3)]):
        assert all(close(entry, other) for entry, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("world", WORLDS)
def test_model_under_any_name(ranks: Any, world: int) -> None:
    """Whatever name the model is trained by.

    The model itself, what unwrap_model gives, a compiled form: the gradients are averaged all the same.
    """

    def run() -> Any:
        found = []
        for way in ("original", "unwrapped", "compiled"):
            accelerator = Accelerator(gradient_accumulation_steps=3)
            original = model()
            prepared, optimizer = accelerator.prepare(original, torch.optim.SGD(original.parameters(), lr=0.1, momentum=0.9))
            compiled = torch.compile(prepared, backend="eager")
            nets = {"original": original, "unwrapped": accelerator.unwrap_model(prepared), "compiled": compiled}
            for x in X.to(accelerator.device).chunk(accelerator.num_processes, dim=1)[accelerator.process_index]:
                with accelerator.accumulate(nets[way] if way == "compiled" else prepared):
                    accelerator.backward(nets[way](x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(weights(original))
        torch._dynamo.reset()
        return found

    expected = plain(lambda net, x, backward: backward(net(x).square().mean()), 3)
    for outcome in ranks(world).run(run):
        assert all(close(entry, expected) for entry in outcome)


@pytest.mark.parametrize("world", WORLDS)
def test_second_pass_after_clearing(ranks: Any, world: int) -> None:
    """A second pass after clearing counts by itself.

    Sharpness-aware steps: gradients at a moved point take the place of the first ones, with a weight too.
    """

    def body(net: Any, x: torch.Tensor, backward: Callable[..., None], clear: Callable[[], None]) -> None:
        backward(net(x).square().sum(), weight=len(x))
        clear()
        backward(net(x * 1.1).square().sum(), weight=len(x))

    def run() -> torch.Tensor:
        accelerator = Accelerator()
        original = model()
        net, optimizer = accelerator.prepare(original, torch.optim.SGD(original.parameters(), lr=0.1))
        for x in X.to(accelerator.device).chunk(accelerator.num_processes, dim=1)[accelerator.process_index]:
            with accelerator.accumulate(net):
                body(net, x, accelerator.backward, optimizer.zero_grad)
                optimizer.step()
                optimizer.zero_grad()
        return weights(original)

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in X:
        net(x * 1.1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks(world).run(run):
        assert close(found, weights(net))


def uneven(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    """Parts of a batch, not the same number of samples for every rank."""
    return [piece[: len(piece) - rank] for rank, piece in enumerate(x.tensor_split(world))]


@pytest.mark.parametrize("world", WORLDS)
def test_sync_each_batch(ranks: Any, world: int) -> None:
    """Reducing in every batch changes nothing."""

    def run() -> Any:
        plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        original = model()
        net, optimizer = accelerator.prepare(original, torch.optim.SGD(original.parameters(), lr=0.1))
        for x in X:
            mine = uneven(x.to(accelerator.device), accelerator.num_processes)[accelerator.process_index]
            with accelerator.accumulate(net):
                accelerator.backward(net(mine).square().sum(), weight=len(mine))
                optimizer.step()
                optimizer.zero_grad()
        return weights(original), accelerator.num_processes

    found = ranks(world).run(run)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for start in range(0, len(X), 3):
        rows = []
        for x in X[start : start + 3]:
            rows += uneven(x, world)
        net(torch.cat(rows)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(close(entry, weights(net)) for entry, _ in found)


def updates(accelerator: Accelerator, net: Any, loader: Any, pieces: int = 1) -> list[int]:
    """After how many batches (or pieces of them) updates came."""
    seen, count = [], 0
    for x in loader:
        for piece in x.chunk(pieces):
            count += 1
            with accelerator.accumulate(net):
                accelerator.backward(net(piece.float().reshape(-1, 1)).sum())
                if accelerator.sync_gradients:
                    seen.append(count)
    return seen


def test_pieces_of_a_batch() -> None:
    """Pieces of a batch end with the last piece.

    The last batch of a loader, cut into pieces, does not update after each of them.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(range(12), batch_size=4))
    assert updates(accelerator, net, loader, pieces=2) == [4, 6]
    assert updates(accelerator, net, loader, pieces=4) == [4, 8, 12]


def test_second_source_of_data() -> None:
    """A second source of data does not set the pace."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net, first, second = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(range(8)), DataLoader(range(3)))
    again, seen = iter(second), []
    for number, x in enumerate(first, 1):
        if next(again, None) is None:
            again = iter(second)
            next(again)
        with accelerator.accumulate(net):
            accelerator.backward(net(x.float().reshape(-1, 1)).sum())
            if accelerator.sync_gradients:
                seen.append(number)
    assert seen == [4, 8]


@pytest.mark.parametrize("world", WORLDS)
def test_unnamed_model_follows(ranks: Any, world: int) -> None:
    """A model that is not named follows the one that is."""

    def run() -> Any:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        nets = [model(1), model(2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        first, second, *optimizers = accelerator.prepare(*nets, *optimizers)
        for x in X.to(accelerator.device).chunk(accelerator.num_processes, dim=1)[accelerator.process_index]:
            with accelerator.accumulate(first):
                accelerator.backward((first(x) * second(x)).sum(), weight=len(x))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        return [weights(net) for net in nets]

    nets = [model(1), model(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for start in range(0, len(X), 2):
        x = X[start : start + 2].reshape(-1, 3)
        (nets[0](x) * nets[1](x)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found in ranks(world).run(run):
        assert all(close(entry, weights(net)) for entry, net in zip(found, nets, strict=True))


def test_wrong_use_refused(ranks: Any) -> None:
    """What would be wrong is refused."""

    def run() -> list[str]:
        told = []

        def expect(kind: type[Exception], call: Callable[[], Any]) -> None:
            with pytest.raises(kind) as caught:
                call()
            told.append(str(caught.value))

        accelerator = Accelerator(gradient_accumulation_steps=2)
        original = model()
        original[0].requires_grad_(False)
        net, optimizer = accelerator.prepare(original, torch.optim.SGD(original.parameters(), lr=0.1))
        x = X[0].to(accelerator.device)
        with accelerator.accumulate(net):
            accelerator.backward(net(x).mean())
        with accelerator.accumulate(net):
            expect(StateError, optimizer.step)
            expect(StateError, lambda: accelerator.accumulate(net).__enter__())
        original[0].requires_grad_(True)
        accelerator.backward(net(x).mean())
        if accelerator.use_distributed:
            expect(StateError, optimizer.step)
            encoder = torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 1).double()})
            encoder.forward = lambda x: encoder["layer"](x)
            wrapped, stepping = accelerator.prepare(encoder, torch.optim.SGD(encoder.parameters(), lr=0.1))
            wrapped.layer = torch.nn.Linear(3, 1).double()
            assert encoder["layer"] is wrapped.layer
            expect(StateError, stepping.step)
        expect(TypeError, lambda: accelerator.backward(3.0))
        expect(TypeError, lambda: accelerator.clip_grad_norm_(net, 1.0))
        expect(TypeError, lambda: accelerator.accumulate([net]))
        expect(TypeError, lambda: accelerator.no_sync(5))
        expect(ConfigError, lambda: accelerator.prepare(torch.nn.Linear))
        return told

    for world in (1, 2):
        told = ranks(world).run(run)[0]
        assert "had no accelerator.backward(loss)" in told[0]
        assert "accumulate inside of accumulate" in told[1]
        assert ("prepare it again" in told[2]) == (world == 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gradient_acumulation_steps": 2}, "did you mean gradient_accumulation_steps"),
        ({"split_batches": "yes"}, "write True or False"),
        ({"kwargs_handlers": GradScalerKwargs()}, r"\[GradScalerKwargs\(\.\.\.\)\]"),
        ({"rng_types": "torch"}, "write a list"),
        ({"rng_types": ["foo"]}, "not a random state"),
        ({"dataloader_config": {}}, "DataLoaderConfiguration"),
        ({"gradient_accumulation_steps": 2, "kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True)]}, "static_graph"),
    ],
)
def test_arguments_that_cannot_be_meant(options: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, TypeError), match=told):
        Accelerator(cpu=True, **options)


def test_fp16_clip_between_backwards_refused() -> None:
    """Clipping between two backwards of fp16 is refused."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    net = torch.nn.Linear(1, 1)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(net(torch.ones(1, 1)).float().sum())
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    accelerator.backward(net(torch.ones(1, 1)).float().sum())
    with pytest.raises(StateError, match="clip after the last backward"):
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
