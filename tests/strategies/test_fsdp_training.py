"""Training loops of users under sharding: what they rely on under replicas holds, and what goes wrong is said on every rank."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from sharded_training import adamw, batches, loss_of, net, same, same_run, train

from slipstream import Accelerator, FullyShardedDataParallelPlugin
from slipstream.utils import GradientAccumulationPlugin, TorchDynamoPlugin

Ranks = Any
Plugin = FullyShardedDataParallelPlugin


def accelerate(shards: bool, **options: Any) -> Accelerator:
    return Accelerator(fsdp_plugin=Plugin() if shards else None, **options)


def equal_on(ranks: Ranks, run: Any, worlds: tuple[int, ...] = (2,)) -> None:
    """Fail unless `run(shards)` gives (losses, norms, weights) of one process."""
    expected = ranks(1).run(run, False)[0]
    for world in worlds:
        for found in ranks(world).run(run, True):
            same_run(found, expected)


def test_sums_schedulers_evaluation(ranks: Ranks) -> None:
    """Sums with weights over a short last update, a schedule, and an evaluation whose outputs are gathered."""

    def run(shards: bool) -> Any:
        accelerator = accelerate(shards, gradient_accumulation_steps=2)
        model = net()
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, batches(accelerator, 25), scheduler)
        evaluation = accelerator.prepare(batches(accelerator, 25))
        outputs = []
        for _ in range(2):
            for words, following in loader:
                with accelerator.accumulate(model):
                    scores = model(words).flatten(0, 1)
                    loss = torch.nn.functional.cross_entropy(scores, following.flatten(), reduction="sum")
                    accelerator.backward(loss, weight=following.numel())
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                outputs += [accelerator.gather_for_metrics(model(words)) for words, _ in evaluation]
            model.train()
        return accelerator.get_state_dict(model), torch.cat(outputs), scheduler.get_last_lr()

    weights, outputs, rates = ranks(1).run(run, False)[0]
    for world in (2, 3):
        for found in ranks(world).run(run, True):
            same(found[0], weights)
            assert torch.allclose(found[1], outputs, atol=1e-5)
            assert found[2] == rates


@pytest.mark.parametrize("clears", [False, True])
def test_no_sync(ranks: Ranks, clears: bool) -> None:
    """Gradients that were not reduced are part of the next update, unless `zero_grad` has cleared them."""

    def run(shards: bool) -> Any:
        accelerator = accelerate(shards)
        model = net()
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator, 36))
        norms = []
        for number, (words, following) in enumerate(loader):
            if number == 2:
                accelerator.backward(loss_of(model(words), following) / 3)
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
            else:
                with accelerator.no_sync(model):
                    accelerator.backward(loss_of(model(words), following) / 3)
            if clears or number == 2:
                optimizer.zero_grad()
        return [], norms, accelerator.get_state_dict(model)

    equal_on(ranks, run)


def test_sync_each_batch(ranks: Ranks) -> None:
    """Reducing the gradients of every batch changes no result."""

    def run(shards: bool) -> Any:
        accelerator = accelerate(
            shards, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_each_batch=shards)
        )
        model = net()
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator, 58))
        norms = []
        for words, following in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(words), following))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        return [], norms, accelerator.get_state_dict(model)

    equal_on(ranks, run, (2, 3))


@pytest.mark.parametrize("regional", [True, False])
@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}], ids=["plain", "checkpointing"])
def test_compiled(ranks: Ranks, regional: bool, options: dict[str, Any]) -> None:
    """Compiled by block or as a whole, with checkpointed activations too."""

    def run(shards: bool) -> Any:
        if not shards:
            return train(2)
        torch._dynamo.reset()
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        return train(2, fsdp_plugin=Plugin(**options), dynamo_plugin=plugin)

    equal_on(ranks, run)


def test_compiled_half_precision(ranks: Ranks) -> None:
    """Compiled blocks with checkpointed activations in bfloat16 are close to those that are not compiled."""

    def run(compiles: bool) -> Any:
        torch._dynamo.reset()
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True) if compiles else None
        return train(2, mixed_precision="bf16", fsdp_plugin=Plugin(activation_checkpointing=True), dynamo_plugin=plugin)

    expected = ranks(2).run(run, False)[0]
    for found in ranks(2).run(run, True):
        same_run(found, expected, atol=3e-2)


def test_two_accelerators(ranks: Ranks) -> None:
    """Two accelerators in one script, each with its model and its windows."""

    def run(shards: bool) -> Any:
        first, second = accelerate(shards), accelerate(shards, gradient_accumulation_steps=2)
        trained = []
        for accelerator, seed in ((first, 0), (second, 1)):
            model = net(seed=seed)
            trained.append((accelerator, *accelerator.prepare(model, adamw(model), batches(accelerator))))
        for pair in zip(trained[0][3], trained[1][3], strict=True):
            for (accelerator, model, optimizer, _), (words, following) in zip(trained, pair, strict=True):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model(words), following))
                    optimizer.step()
                    optimizer.zero_grad()
        return [accelerator.get_state_dict(model) for accelerator, model, _, _ in trained]

    expected = ranks(1).run(run, False)[0]
    for found in ranks(2).run(run, True):
        for weights, wanted in zip(found, expected, strict=True):
            same(weights, wanted)


def test_free_memory(ranks: Ranks) -> None:
    """Nothing of ours keeps a sharded model or its shards alive, and the next model trains as the first."""

    def run() -> Any:
        accelerator = accelerate(True)
        states = []
        for _ in range(2):
            model = net()
            model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator))
            for words, following in loader:
                accelerator.backward(loss_of(model(words), following))
                optimizer.step()
                optimizer.zero_grad()
            states.append(accelerator.get_state_dict(model))
            held = weakref.ref(model), weakref.ref(model.embed.weight), weakref.ref(model.blocks[0].scale)
            model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
            del words, following
            gc.collect()
            assert [reference() is None for reference in held] == [True] * 3
        same(states[1], states[0])

    ranks(2).run(run)


def test_batch_norm(ranks: Ranks) -> None:
    """Running statistics are those of rank 0 on every rank, as under DistributedDataParallel."""

    def run(shards: bool) -> Any:
        accelerator = accelerate(shards)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(10 + accelerator.process_index)
        for _ in range(3):
            accelerator.backward(model(torch.randn(6, 4).to(accelerator.device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            return model(torch.ones(2, 4, device=accelerator.device)), accelerator.get_state_dict(model)

    for found, expected in zip(ranks(2).run(run, True), ranks(2).run(run, False), strict=True):
        assert torch.allclose(found[0], expected[0], atol=1e-6)
        same(found[1], expected[1])


# -- what fails -------------------------------------------------------------------------------------------------------


class Faulty(torch.nn.Module):
    """A model whose middle block fails when it is told to, in a forward or a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.fails = ""
        self.net.blocks[1].register_forward_pre_hook(lambda module, args: self._fail("forward"))
        self.net.blocks[1].register_full_backward_hook(lambda module, *_: self._fail("backward"))

    def _fail(self, where: str) -> None:
        if where == self.fails:
            raise ArithmeticError(f"in {where}")

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.net(words)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failure_on_all_ranks(ranks: Ranks, where: str) -> None:
    """A script that catches an exception of a pass goes on as if there had been none; after one of a backward pass it prepares again."""

    def run(shards: bool) -> Any:
        accelerator = accelerate(shards)
        model = Faulty()
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator, 24))
        norms = []
        for epoch in range(2):
            for number, (words, following) in enumerate(loader):
                model.fails = where if (epoch, number) == (0, 1) else ""
                try:
                    accelerator.backward(loss_of(model(words), following))
                except ArithmeticError:
                    optimizer.zero_grad()
                    if where == "backward":
                        model = accelerator.prepare(model)
                    continue
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        return [], norms, accelerator.get_state_dict(model)

    equal_on(ranks, run, (2, 3))


def test_failure_on_one_rank(ranks: Ranks) -> None:
    """A rank that goes on after an exception which the others have not had: an error on every rank, and no wrong gathering."""

    def run() -> None:
        accelerator = accelerate(True, timeout=4)
        model = accelerator.prepare(Faulty())
        words = torch.zeros(2, 5, dtype=torch.long, device=accelerator.device)
        model(words)
        model.fails = "forward" if accelerator.process_index == 0 else ""
        try:
            model(words)
        except ArithmeticError:
            model.fails = ""
            model(words)

    for outcome in ranks(2, device="cpu").outcomes(run):  # collectives of a device fail later, wherever the host waits for it
        assert re.search("MismatchError|PeerLostError|WaitTimeoutError", outcome.summary)
        assert re.search(r"rank 1 .* in forward number \d+ at sharded_training.py", outcome.traceback or "")


@pytest.mark.parametrize("skips", ["forward", "backward", "block"])
def test_rank_that_stays_away(ranks: Ranks, skips: str) -> None:
    """A rank that skips a pass is named on every rank, with the lines where all of them are."""

    def run() -> None:
        accelerator = accelerate(True, timeout=20)
        model = accelerator.prepare(net())
        words = torch.zeros(2, 5, dtype=torch.long, device=accelerator.device)
        here = accelerator.process_index == 0
        if skips == "backward":
            loss = model(words).sum()
            if here:
                accelerator.backward(loss)
        elif here:
            model(words) if skips == "forward" else model.blocks[0](torch.ones(2, 7, device=accelerator.device))
        accelerator.wait_for_everyone()

    outcomes = ranks(2, device="cpu").outcomes(run)  # on a device the host does not wait in a pass
    place = "backward" if skips == "backward" else "forward"
    for outcome in outcomes:
        assert outcome.failed
        text = outcome.traceback or ""
        assert re.search("MismatchError|PeerLostError|WaitTimeoutError", text), text  # by who saw it first
        assert f"{place} number" in text, text
        assert "wait_for_everyone" in text, text

