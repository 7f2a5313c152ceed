"""The worker of `fsdp.py`: the same sharded step by hand and by `prepare`, in the same processes, interleaved; or the memory of a rank.

Both have their own model with the same initial weights; before timing, the weights after some steps are compared. Rank 0 writes all
figures as JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import logging
import pstats
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from turns import Times, in_turns, joined

from slipstream import Accelerator, FullyShardedDataParallelPlugin, PartialState

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

WIDTH, DEPTH, BATCH = 256, 8, 32
LARGE = 1024
"""The width of the model whose memory is measured."""
mse = torch.nn.functional.mse_loss


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.relu(self.wide(x)))


class Parts:
    """A model, its optimizer and its scheduler, the same for all."""

    def __init__(self, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(*(Block(width) for _ in range(DEPTH)), torch.nn.Linear(width, 1))
        rank = dist.get_rank() if dist.is_initialized() else 0
        random = torch.Generator().manual_seed(1 + rank)
        self.x = torch.randn(BATCH, width, generator=random)
        self.y = torch.randn(BATCH, 1, generator=random)

    def optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 1e-4 * step))


Step = Callable[[], None]


def by_hand(parts: Parts) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, x, y = parts.model, parts.x, parts.y
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, scheduler = parts.optimizer()

    def step() -> None:
        mse(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


def prepared(accumulates: bool) -> Callable[[Parts], Step]:
    def build(parts: Parts) -> Step:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        model, optimizer, scheduler = accelerator.prepare(parts.model, *parts.optimizer())
        x, y = parts.x, parts.y

        def step() -> None:
            accelerator.backward(mse(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        def accumulating() -> None:
            with accelerator.accumulate(model):
                step()

        return accumulating if accumulates else step

    return build


BUILDS: dict[str, Callable[[Parts], Step]] = {
    "plain": by_hand,
    "ours": prepared(False),
    "ours, accumulate": prepared(True),
    "plain, again": by_hand,
}


def repeated(step: Step) -> Callable[[int], None]:
    def call(calls: int) -> None:
        for _ in range(calls):
            step()

    return call


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return the weights of this rank in one row."""
    held = [parameter.detach() for parameter in model.parameters()]
    return torch.cat([(tensor.to_local() if isinstance(tensor, DTensor) else tensor).flatten() for tensor in held])


def check() -> None:
    """Check that after some steps all contenders have the same weights."""
    found = {}
    for name, build in BUILDS.items():
        parts = Parts()
        repeated(build(parts))(3)
        found[name] = weights(parts.model)
    for name, held in found.items():
        assert torch.allclose(held, found["plain"], rtol=0, atol=1e-6), f"{name} trains another model"


def measure_steps(options: Any, state: PartialState) -> dict[str, Any]:
    """Return the times of all contenders, and of the preparation."""
    check()
    times = {name: Times() for name in BUILDS}
    prepares: dict[str, list[float]] = {name: [] for name in BUILDS}
    for number in range(options.builds):
        turned = list(BUILDS)[number % len(BUILDS) :] + list(BUILDS)[: number % len(BUILDS)]
        contenders = {}
        for name in turned:
            parts = Parts()
            dist.barrier()
            begun = time.perf_counter()
            contenders[name] = repeated(BUILDS[name](parts))
            prepares[name].append(time.perf_counter() - begun)
        for name, more in in_turns(contenders, options.rounds, 1, dist.barrier).items():
            times[name].extend(more)
    everyone = state.gather_object([{name: asdict(entry) for name, entry in times.items()}])
    if options.profile:
        for name in ("plain", "ours"):
            profile(name, options.profile, state.is_main_process)
    return {"step": joined(everyone), "prepare": {name: 1e3 * min(found) for name, found in prepares.items()}}


def profile(name: str, path: Path, writes: bool) -> None:
    step = repeated(BUILDS[name](Parts()))
    step(5)
    profiler = cProfile.Profile()
    profiler.runcall(step, 100)
    if writes:
        with path.open("a") as file:
            print(f"\n{name}: 100 steps", file=file)
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(40)


def resident() -> int:
    """Return the peak of resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_memory(state: PartialState) -> dict[str, Any]:
    """Return the bytes of weights, gradients and optimizer state after two steps, and the peak beyond the imports: the largest rank's."""
    if state.num_processes > 1:
        dist.barrier()
    begun = resident()
    with torch.device("cpu" if state.is_main_process else "meta"):  # as cpu_ram_efficient_loading: rank 0 has the weights
        parts = Parts(LARGE)
    if not state.is_main_process:
        parts.x, parts.y = torch.randn(BATCH, LARGE), torch.randn(BATCH, 1)
    shards = state.num_processes > 1
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True) if shards else None)
    model, optimizer, _ = accelerator.prepare(parts.model, *parts.optimizer())
    for _ in range(2):
        accelerator.backward(mse(model(parts.x), parts.y))
        optimizer.step()
    held = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    held += [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)]
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in held if tensor is not None]
    found = state.gather_object([(sum(tensor.nbytes for tensor in own), resident() - begun)])
    return {"state": max(size for size, _ in found), "peak": max(peak for _, peak in found[1:] or found)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--builds", type=int, help="how often the models are made anew")
    parser.add_argument("--rounds", type=int, help="rounds of each")
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    if state.num_processes > 1:
        state.wait_for_everyone()
    found = measure_memory(state) if options.memory else measure_steps(options, state)
    if state.is_main_process:
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
