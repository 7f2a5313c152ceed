"""Train a little, save a checkpoint or load one, and write down what this process then has. It runs on Accelerate and on the drop-in.

    python checkpoint_program.py '{"action": "save", "folder": "ckpt", "report": "report", ...}'

The report of a process (`report-<rank>.pt`) has weights, optimizer, learning rate, random numbers, the registered object, and the samples
and losses of the batches that follow. Two runs that agree in all of it are at the same place.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed

STEPS, MORE, WORDS, WIDTH = 3, 3, 12, 6


class Net(torch.nn.Module):
    """A model with tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(words))) * self.scale)


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"count": 0, "sum": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make_accelerator(spec: dict[str, Any]) -> Accelerator:
    shuffled, stateful = spec.get("shuffled", False), spec.get("stateful", False)
    config = DataLoaderConfiguration(
        use_stateful_dataloader=stateful, use_seedable_sampler=shuffled, data_seed=3 if shuffled else None
    )
    version, kind = spec.get("fsdp") or (None, None)
    if version is None:
        return Accelerator(cpu=True, dataloader_config=config)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type=kind,
        auto_wrap_policy="no_wrap",
        cpu_ram_efficient_loading=False,
        use_orig_params=True if version == 1 else None,
    )
    if hasattr(Accelerator, "_save_in_accelerate_format"):
        return Accelerator(cpu=True, dataloader_config=config, fsdp_plugin=plugin)
    # Accelerate shards on accelerators only, and takes DDP on the CPU without a word. Its code for FSDP runs there, once it is told to.
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True, dataloader_config=config)
    for shared in (AcceleratorState._shared_state, PartialState._shared_state):
        shared |= {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def whole(value: Any) -> Any:
    """Return a tree with whole tensors and plain containers."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list | tuple) else value


def optimizer_state(model: Any, optimizer: Any) -> Any:
    """Return the state of the optimizer by the names of parameters; nothing under FSDP1, where the losses that follow have to do."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    if type(model).__name__ == "FullyShardedDataParallel":
        return None
    plain = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    return whole(get_optimizer_state_dict(plain, optimizer.optimizer, options=StateDictOptions(full_state_dict=True)))


def model_state(model: Any) -> Any:
    if type(model).__name__ != "FullyShardedDataParallel":
        return {name.removeprefix("module."): value for name, value in whole(dict(model.state_dict())).items()}
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):  # FULL_STATE_DICT crashes on the CPU
        return {name: gather_shards(value) for name, value in model.state_dict().items()}


def gather_shards(value: Any) -> torch.Tensor:
    """Put the pieces of a sharded tensor of FSDP1 together."""
    import torch.distributed as dist

    if not hasattr(value, "local_shards"):
        return whole(value)
    pieces = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    result = torch.zeros(value.size())
    for offsets, tensor in (piece for pieces in everyone for piece in pieces):
        result[tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))] = tensor
    return result


def main(spec: dict[str, Any]) -> None:
    accelerator = make_accelerator(spec)
    set_seed(1 if spec["action"] == "save" else 2, device_specific=True)
    model = Net()
    if spec["action"] == "save":
        torch.manual_seed(5)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    samples = [(index, index * index % 11, index * index * 5 % WORDS) for index in range(40)]
    loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=spec.get("shuffled", False))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    loader.set_epoch(1)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    report: dict[str, Any] = {"losses": [], "samples": []}

    def step(batch: Any) -> None:
        index, words, targets = batch
        loss = torch.nn.functional.cross_entropy(model(words), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.state["count"] += 1
        counter.state["sum"] += 0.5
        report["losses"].append(loss.item())
        report["samples"].append(index.tolist())

    def look() -> None:
        report["random"] = [random.random(), numpy.random.rand(), torch.rand(1).item()]
        report["model"] = model_state(model)
        report["optimizer"] = optimizer_state(model, optimizer)
        report["scheduler"] = dict(scheduler.state_dict())
        report["rate"] = optimizer.param_groups[0]["lr"]
        report["counter"] = whole(counter.state)
        report["losses"], report["samples"] = [], []

    if spec["action"] == "save":
        for number, batch in enumerate(loader):
            step(batch)
            if number + 1 == STEPS:
                accelerator.save_state(spec["folder"], safe_serialization=spec.get("safe", True), **spec.get("options", {}))
                look()
            if number + 1 == STEPS + MORE:
                break
    else:
        accelerator.load_state(spec["folder"], **spec.get("options", {}))
        look()
        rest = loader if spec.get("stateful") else accelerator.skip_first_batches(loader, STEPS)
        for number, batch in enumerate(rest):
            step(batch)
            if number + 1 == MORE:
                break
    torch.save(report, f"{spec['report']}-{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


# -- functions --------------------------------------------------------------------------------------------------------


def save_parts(spec: dict[str, Any]) -> None:
    """Save weights in shards with `save_model`, and a loss scaler with `save_accelerator_state`, neither of which a CPU run has."""
    from accelerate.checkpointing import save_accelerator_state

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = Net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(model(torch.arange(4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(128.0)
    accelerator.save_model(model, f"{spec['folder']}/shards", max_shard_size=200, safe_serialization=spec.get("safe", True))
    optimizers = [accelerator.prepare_optimizer(optimizer)]
    Path(spec["folder"], "state").mkdir()
    save_accelerator_state(f"{spec['folder']}/state", [model.state_dict()], optimizers, [], [], 0, 7, scaler, False, spec.get("safe", True))
    momentum = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    torch.save({"model": model.state_dict(), "scale": scaler.get_scale(), "momentum": momentum, "step": 7}, f"{spec['report']}-0.pt")


def load_parts(spec: dict[str, Any]) -> None:
    """Load both."""
    from accelerate import load_checkpoint_in_model
    from accelerate.checkpointing import load_accelerator_state

    accelerator = Accelerator(cpu=True)
    model = Net()
    load_checkpoint_in_model(model, f"{spec['folder']}/shards")
    sharded = whole(dict(model.state_dict()))
    other, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    prepared = [accelerator.prepare_optimizer(optimizer)]
    found = load_accelerator_state(f"{spec['folder']}/state", [other], prepared, [], [], 0, scaler, "cpu")
    assert all(torch.equal(sharded[name], value) for name, value in other.state_dict().items())
    momentum = [optimizer.state[parameter]["momentum_buffer"] for parameter in other.parameters()]
    torch.save({"model": sharded, "scale": scaler.get_scale(), "momentum": momentum, "step": found["step"]}, f"{spec['report']}-0.pt")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    {"save": main, "load": main, "save_parts": save_parts, "load_parts": load_parts}[given["action"]](given)
