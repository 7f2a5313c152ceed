"""The worker of `sharded_checkpoint.py` on each rank: the same state saved and loaded by us and by torch's DCP, in turns."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import forget_files, read_files
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slipstream import Accelerator, FullyShardedDataParallelPlugin

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

WIDTH = 1024


class Block(torch.nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)


def blocks(megabytes: float) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(Block() for _ in range(max(1, round(megabytes * 1e6 / (8 * WIDTH * WIDTH * 4))))))


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


class Ours:
    """save_state and load_state."""

    def __init__(self, megabytes: float) -> None:
        model = blocks(megabytes)
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        step(self.optimizer)

    def save(self, folder: str) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: str) -> None:
        self.accelerator.load_state(folder)


class Dcp:
    """dcp.save, which syncs files, and dcp.load, as the documentation of torch shows them."""

    def __init__(self, megabytes: float) -> None:
        self.model = blocks(megabytes)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        step(self.optimizer)

    def _state(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self.model), "optimizer": get_optimizer_state_dict(self.model, self.optimizer)}

    def save(self, folder: str) -> None:
        dcp.save(self._state(), storage_writer=dcp.FileSystemWriter(folder, sync_files=True))

    def load(self, folder: str) -> None:
        state = self._state()
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))  # into the weights of the model
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])


def timed(call: Callable[[str], object], folder: str) -> float:
    """Return the seconds of the slowest rank."""
    gc.collect()
    dist.barrier()
    began = time.perf_counter()
    call(folder)
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main() -> None:
    place, megabytes, rounds = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    contenders = {"ours": Ours(megabytes)}
    contenders["dcp"] = Dcp(megabytes)  # type: ignore[assignment]
    first = dist.get_rank() == 0
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first one warms up
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            contender, folder = contenders[name], f"{place}/{name}-{number}"
            if first:
                os.sync()
            found = {f"{name}: save": timed(contender.save, folder)}
            for kind, prepare in (("cold", forget_files), ("warm", read_files)):
                if first:
                    os.sync()
                    prepare(folder)
                found[f"{name}: {kind} load"] = timed(contender.load, folder)
            times["size"] = [float(sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()))]
            dist.barrier()
            if first:
                shutil.rmtree(folder)
            for what, seconds in found.items():
                if number:
                    times.setdefault(what, []).append(seconds)
    if first:
        Path(place, "times.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
