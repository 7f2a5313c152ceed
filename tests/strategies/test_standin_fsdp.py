"""Sharded training on a device whose memory the host cannot read: where things are, what a rank holds, and what a step waits for."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_training import adamw, batches, loss_of, net, net_on_main_process, same_run, sentences, train
from torch.distributed.tensor import DTensor

from slipstream import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from slipstream.utils import GradScalerKwargs

sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoint"))
from fsdp_runs import Run, differences

Ranks = Any
Plugin = FullyShardedDataParallelPlugin
GRID = {"dp_replicate_size": 2, "dp_shard_size": 2}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "offload": {"cpu_offload": True},
    "ignored": {"ignored_modules": r"norm|blocks\.1"},
    "checkpointing": {"activation_checkpointing": True},
    "offloaded activations": {"activation_checkpointing": True, "activation_checkpointing_offload": True},
}


def module_of(accelerator: Accelerator) -> Any:
    """The namespace of the device: counters, delays, memory."""
    return torch.get_device_module(accelerator.device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_all(names: list[str], hybrid: bool = False, delay: float = 0.0) -> dict[str, Any]:
    """Train in some of the ways to shard, with late copies and collectives if asked for."""
    module = module_of(Accelerator())
    module.set_delay(copies=delay)
    mesh = {"parallelism_config": ParallelismConfig(**GRID)} if hybrid else {}
    try:
        return {name: train(2, epochs=1, fsdp_plugin=Plugin(**OPTIONS[name]), **mesh) for name in names}
    finally:
        module.set_delay(copies=0.0)


def test_equals_one_process(ranks: Ranks) -> None:
    """Losses, norms and weights are those of one process of the CPU, in every way to shard, also where copies and collectives are late."""
    expected = ranks(1, device="cpu").run(train, 2, epochs=1)[0]
    few = ["offload", "offloaded activations"]
    for found in (
        *ranks(1, device="standin").run(train_all, few),
        *(early := ranks(2, device="standin").run(train_all, list(OPTIONS))),
        *(late := ranks(2, device="standin").run(train_all, few, delay=0.002)),
        *ranks(4, device="standin").run(train_all, few, hybrid=True),
    ):
        for result in found.values():
            same_run(result, expected)
    for name in few:
        assert early[0][name][1] == late[0][name][1], name
        assert all(torch.equal(late[0][name][2][key], value) for key, value in early[0][name][2].items()), name


def test_mixed_precision(ranks: Ranks) -> None:
    """Blocks compute in half precision on float32 shards, close to what the CPU gives: its list of operations in half precision differs."""

    def run() -> Any:
        handlers = [GradScalerKwargs(init_scale=64.0)]
        if Accelerator().device.type != "cpu":
            module_of(Accelerator()).set_delay(copies=0.002)  # the loss scale reaches offloaded gradients late
        return [
            train(2, epochs=1, mixed_precision="bf16", fsdp_plugin=Plugin()),
            train(2, epochs=1, mixed_precision="fp16", fsdp_plugin=Plugin(cpu_offload=True), kwargs_handlers=handlers),
        ]

    expected = ranks(2, device="cpu").run(run)[0]
    found_on_ranks = ranks(2, device="standin").run(run)
    ranks(2, device="standin").run(lambda: module_of(Accelerator()).set_delay(copies=0.0))
    for found in found_on_ranks:
        for result, wanted in zip(found, expected, strict=True):
            same_run(result, wanted, atol=3e-2)


def test_fused_optimizer_of_offloaded_shards(ranks: Ranks) -> None:
    """In fp16 a fused optimizer on the host takes the loss scale, and whether it overflowed, after they have arrived from the device."""

    def run(device: str) -> list[float]:
        accelerator = Accelerator(
            mixed_precision="fp16", fsdp_plugin=Plugin(cpu_offload=True), kwargs_handlers=[GradScalerKwargs(init_scale=64.0)]
        )
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
        if device == "standin":
            module_of(accelerator).set_delay(copies=0.03)
        losses = []
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(accelerator.device)
            loss = model(x).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    there, here = (ranks(2, device=device).run(run, device) for device in ("standin", "cpu"))
    assert there[0] == pytest.approx(here[0], rel=1e-3)


@pytest.mark.parametrize("offloads", [False, True])
def test_where_things_are(ranks: Ranks, offloads: bool) -> None:
    """Shards, gradients and moments are on the device of the rank, or in pinned memory if offloaded; rank 0 alone may have weights."""

    def run() -> Any:
        plugin = Plugin(cpu_offload=offloads, cpu_ram_efficient_loading=True)
        accelerator = Accelerator(fsdp_plugin=plugin)
        model = net_on_main_process(accelerator)
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator))
        for words, following in loader:
            accelerator.backward(loss_of(model(words), following))
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        places: dict[str, set[str]] = {"norm": {str(norm.device)}}
        for name, parameter in model.named_parameters():
            kind = "sharded" if isinstance(parameter, DTensor) else "whole"
            moments = [value for key, value in optimizer.state[parameter].items() if key.startswith("exp_avg")]
            assert len(moments) == 2, name
            for tensor in (parameter, parameter.grad, *moments):
                places.setdefault(kind, set()).add(str(local(tensor).device))
            if offloads and kind == "sharded":
                assert local(parameter.detach()).is_pinned(), name
        places["buffers"] = {str(buffer.device) for buffer in model.buffers()}
        state = accelerator.get_state_dict(model)
        places["full"] = {str(value.device) for value in state.values()}
        places["own"] = {str(local(value).device) for name, value in model.state_dict().items() if isinstance(value, DTensor)}
        return places, state

    def plain() -> Any:
        accelerator = Accelerator()
        model = net()
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator))
        for words, following in loader:
            accelerator.backward(loss_of(model(words), following))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return model.state_dict()

    expected = ranks(1, device="cpu").run(plain)[0]
    for rank, (places, state) in enumerate(ranks(2, device="standin").run(run)):
        own = {f"standin:{rank}"}
        shards = {"cpu"} if offloads else own
        assert places == {"norm": own, "sharded": shards, "whole": own, "buffers": own, "full": {"cpu"}, "own": shards}
        assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in expected.items())


def test_state_of_one_process(ranks: Ranks) -> None:
    """One process with a plugin gets copies in host memory, as several do; the model's own state stays on the device."""

    def run() -> None:
        accelerator = Accelerator(fsdp_plugin=Plugin())
        model = accelerator.prepare(net())
        best = accelerator.get_state_dict(model)
        assert {value.device.type for value in best.values()} == {"cpu"}
        assert {value.device for value in model.state_dict().values()} == {accelerator.device}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        assert not torch.equal(best["norm.weight"], accelerator.get_state_dict(model)["norm.weight"])
        model.load_state_dict(best)
        assert torch.equal(accelerator.get_state_dict(model)["norm.weight"], net().norm.weight)

    ranks(1, device="standin").run(run)
    ranks(1, device="cpu").run(run)


def test_memory_of_a_rank(ranks: Ranks) -> None:
    """A device holds its share of parameters, gradients and moments; offloaded, next to nothing of them, and the rest comes back."""

    def run(plugin: Plugin | None, width: int = 96) -> tuple[int, int]:
        accelerator = Accelerator(fsdp_plugin=plugin)
        module = module_of(accelerator)
        before = module.memory_allocated(accelerator.device)
        model = net(width=width)
        model, optimizer, loader = accelerator.prepare(model, adamw(model), batches(accelerator))
        for words, following in loader:
            accelerator.backward(loss_of(model(words), following))
            optimizer.step()
        del words, following
        accelerator.wait_for_everyone()
        held = module.memory_allocated(accelerator.device) - before
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
        gc.collect()  # torch's sharded modules are cycles, and this function held them until now
        return held, module.memory_allocated(accelerator.device) - before

    whole, left = ranks(1, device="standin").run(run, None)[0]
    assert whole > 4 * 4 * sum(parameter.numel() for parameter in net(width=96).parameters())
    assert left < 0.02 * whole
    for held, left in ranks(4, device="standin").run(run, Plugin()):
        assert 0.2 * whole < held < 0.3 * whole
        assert left < 0.02 * whole
    for held, left in ranks(2, device="standin").run(run, Plugin(cpu_offload=True)):
        assert held < 0.05 * whole
        assert left < 0.02 * whole


def count(kind: str, offloads: bool, steps: int = 3) -> list[tuple[int, int, int]]:
    """Waits of the host, copies to the device and to the host of each step of a prepared model, or of bare `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    accelerator = Accelerator(fsdp_plugin=Plugin(cpu_offload=offloads))
    module, model = module_of(accelerator), net()
    words, following = (rows.to(accelerator.device) for rows in sentences(12)[:])
    if kind == "prepared":
        model, optimizer = accelerator.prepare(model, adamw(model))
    else:
        accelerator.wait_for_everyone()
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        model.to(accelerator.device)
        scalars = {block.scale for block in model.blocks}
        for part in (*model.blocks, model):
            policy = CPUOffloadPolicy() if offloads else OffloadPolicy()
            fully_shard(part, mesh=mesh, ignored_params=scalars, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    counted = []
    for _ in range(steps):
        module.reset_counters()
        loss = loss_of(model(words), following)
        if kind == "prepared":
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = module.counters()
        counted.append((found.synchronizations, found.copies_to_device, found.copies_to_host))
    return counted


def test_waits_of_a_step(ranks: Ranks) -> None:
    """A prepared step with clipping waits for the device once, and copies nothing more than torch; offloaded, the norm and its factor."""
    for offloads, extra in ((False, (1, 0, 1)), (True, (3, 1, 2))):
        bare = ranks(2, device="standin").run(count, "bare", offloads)[0][-1]
        for found in ranks(2, device="standin").run(count, "prepared", offloads):
            for step in found[1:]:
                assert all(own <= torch_own + more for own, torch_own, more in zip(step, bare, extra, strict=True)), (step, bare)


def test_nan_of_one_rank(ranks: Ranks) -> None:
    """An update with a NaN of one rank is skipped on every rank, and one with an unused parameter is made."""

    def run() -> Any:
        accelerator = Accelerator(on_nan="skip", fsdp_plugin=Plugin(ignored_modules="norm"))
        model = net()
        model, optimizer = accelerator.prepare(model, adamw(model))
        words = torch.arange(10, device=accelerator.device).view(2, 5) % 11
        skipped = []
        for number in range(3):
            bad = number == 1 and accelerator.process_index == 1
            outputs = model(words) if number < 2 else model.blocks[0](model.embed(words))
            accelerator.backward(outputs.square().mean() * (float("nan") if bad else 1.0))
            optimizer.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            unused = model.norm.weight.grad
            optimizer.zero_grad()
        assert unused is None
        return skipped, accelerator.get_state_dict(model)

    results = ranks(2, device="standin").run(run)
    for skipped, weights in results:
        assert skipped == [False, True, False]
        assert all(bool(value.isfinite().all()) for value in weights.values())
        assert all(torch.equal(value, results[0][1][name]) for name, value in weights.items())


# -- checkpoints ------------------------------------------------------------------------------------------------------


class Dropping(torch.nn.Module):
    """Layers with dropout, whose random numbers come from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.net.score(self.dropout(self.net.encode(words)))


KINDS = {"sharded": {}, "full": {"state_dict_type": "FULL_STATE_DICT"}, "offload": {"cpu_offload": True}}


def save(folder: Path, model: type[torch.nn.Module] | None = None) -> dict[str, Any]:
    """Train and save in every kind, also while training goes on; return what was saved, and where training came to."""
    states = {}
    for name, plugin in KINDS.items():
        run = Run("fsdp", steps=2, plugin=plugin, model=model() if model else None)
        run.train(3)
        run.accelerator.save_state(folder / name, async_save=name != "full")
        saved = run.state()
        run.train(2)
        states[name] = {"saved": saved, "later": run.state()}
        run.accelerator.end_training()
    return states


def load(folder: Path, strategy: str, model: type[torch.nn.Module] | None = None) -> dict[str, Any]:
    states = {}
    for name, plugin in KINDS.items():
        run = Run(strategy, steps=2, plugin=plugin, model=model() if model else None, seed=5)
        run.accelerator.load_state(folder / name)
        for parameter, moments in run.optimizer.state.items():
            devices = {local(value).device for key, value in moments.items() if key.startswith("exp_avg")}
            assert devices == {local(parameter).device}, (name, devices)
        saved = run.state()
        run.train(2)
        states[name] = {"saved": saved, "later": run.state()}
    return states


def test_checkpoints_between_devices(ranks: Ranks, tmp_path: Path) -> None:
    """What shards on a device saved is loaded on the CPU and the other way round, by the same number of ranks to the bit."""
    for source, target in (("standin", "cpu"), ("cpu", "standin")):
        folder = tmp_path / source
        saved = ranks(2, device=source).run(save, folder)
        for loaded in (ranks(2, device=target).run(load, folder, "fsdp"), ranks(2, device=source).run(load, folder, "fsdp")):
            assert not differences(loaded[0], saved[0], 0.0)
            assert not differences(loaded[1], saved[1], 0.0)
        for found in ranks(1, device=target).run(load, folder, "single"):
            assert not differences(found, saved[0], 1e-5)


def test_resumed_with_dropout(ranks: Ranks, tmp_path: Path) -> None:
    """Random numbers of every rank's device go on where they were, while copies are late."""

    def late(function: Any, *args: Any) -> Any:
        module = module_of(Accelerator())
        module.set_delay(copies=0.002)
        try:
            return function(*args)
        finally:
            module.set_delay(copies=0.0)

    saved = ranks(2, device="standin").run(late, save, tmp_path, Dropping)
    for found in ranks(2, device="standin").run(late, load, tmp_path, "fsdp", Dropping):
        assert not differences(found, saved[0], 0.0)
