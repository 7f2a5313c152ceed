"""One script, several strategies: a model and its optimizer move between replicas and shards, with the results of one strategy alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_training import Net, adamw, batches, loss_of, net, same
from torch.distributed.tensor import DTensor

from slipstream import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from slipstream.errors import ConfigError

Ranks = Any
STAGES = {
    "ddp": {},
    "fsdp": {"fsdp_plugin": True},
    "hsdp": {"fsdp_plugin": True, "parallelism_config": True},
}


def options(stage: str) -> dict[str, Any]:
    given = dict(STAGES[stage])
    if "fsdp_plugin" in given:
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    if "parallelism_config" in given:
        given["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    return given


def stages(*names: str, releases: bool = True, keeps: bool = False) -> dict[str, torch.Tensor]:
    """Train an epoch in each stage with one model and one optimizer, and return the weights; `keeps` one Accelerator for all stages."""
    model = net()
    optimizer: Any = adamw(model)
    accelerator = Accelerator(**options(names[0]))
    for name in names:
        accelerator = accelerator if keeps else Accelerator(**options(name))
        prepared, stepped, loader = accelerator.prepare(model, optimizer, batches(accelerator))
        for words, following in loader:
            accelerator.backward(loss_of(prepared(words), following))
            stepped.step()
            stepped.zero_grad()
        if releases:
            accelerator.state.destroy_process_group()
    state = accelerator.get_state_dict(model)  # also after its group was released
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("names", [("ddp", "fsdp"), ("fsdp", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp", "ddp")])
@pytest.mark.parametrize("releases", [True, False])
def test_two_ranks(ranks: Ranks, names: tuple[str, ...], releases: bool) -> None:
    """The optimizer goes on with its state, whether the group is released between stages or not."""
    expected = ranks(1).run(stages, *["ddp"] * len(names))[0]
    for found in ranks(2).run(stages, *names, releases=releases):
        same(found, expected)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_one_accelerator(ranks: Ranks, name: str) -> None:
    """The same Accelerator prepares its model and optimizer again after it has released the group."""
    expected = ranks(1).run(stages, "ddp", "ddp", "ddp")[0]
    for found in ranks(2).run(stages, name, name, name, keeps=True):
        same(found, expected)


def test_four_ranks(ranks: Ranks) -> None:
    """From replicas to shards, to replicated shards, and back to shards."""
    names = ("ddp", "fsdp", "hsdp", "fsdp")
    expected = ranks(1).run(stages, *["ddp"] * len(names))[0]
    for found in ranks(4).run(stages, *names):
        same(found, expected)


def test_evaluation_on_one_process(ranks: Ranks) -> None:
    """After sharded training one process evaluates the whole model by itself."""

    def run() -> float:
        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
        model = net()
        prepared = accelerator.prepare(model)
        state = accelerator.get_state_dict(prepared)
        accelerator.state.destroy_process_group()
        if not accelerator.is_main_process:
            return 0.0
        plain = Net()
        plain.load_state_dict(state)
        assert not any(isinstance(parameter, DTensor) for parameter in plain.parameters())
        return float(plain(torch.arange(10).view(2, 5)).sum().detach())

    expected = float(net()(torch.arange(10).view(2, 5)).sum().detach())
    assert ranks(2).run(run)[0] == pytest.approx(expected, abs=1e-4)


def test_sharded_by_hand_without_plugin(ranks: Ranks) -> None:
    """A model that the script has sharded is refused by replicas, which would not average it; so is a tensor-parallel one."""

    def run() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        accelerator = Accelerator()
        accelerator.wait_for_everyone()
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        sharded = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        with pytest.raises(ConfigError, match="fsdp_plugin"):
            accelerator.prepare(sharded)
        split = parallelize_module(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})
        for strategy in (accelerator, Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())):
            with pytest.raises(ConfigError, match="tensor parallelism"):
                strategy.prepare(split)

    ranks(2).run(run)
