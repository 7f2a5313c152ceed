"""The worker of `training.py` on one rank or on two: the same training step by every contender, in the same processes, interleaved.

Every contender has its own model, all with the same initial weights; before timing, the weights after some steps are
compared. Models are rebuilt several times, because their place in memory has a lasting effect. Rank 0 writes all times as JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import logging
import pstats
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _no_work import NoLoss, NoOptimizer
from torch.nn.parallel import DistributedDataParallel
from turns import Contender, Times, has_fabric, in_turns, joined

from slipstream import Accelerator, PartialState

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

WIDTH, BATCH = 32, 8
mse = torch.nn.functional.mse_loss


class Parts:
    """A model, its optimizer and its scheduler, the same for all contenders."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
        self.weights = list(self.model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.weights, lr=1e-3)
        self.scheduler: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1.0 + 1e-4 * step))
        rank = dist.get_rank() if dist.is_initialized() else 0
        random = torch.Generator().manual_seed(1 + rank)
        self.x = torch.randn(BATCH, WIDTH, generator=random)
        self.y = torch.randn(BATCH, 1, generator=random)


Build = Callable[[Parts], Callable[[], None]]
"""Makes the step of a contender; it may be called any number of times."""


def plain(parts: Parts) -> Callable[[], None]:
    model, optimizer, scheduler, x, y = parts.model, parts.optimizer, parts.scheduler, parts.x, parts.y
    if dist.is_initialized():
        model = DistributedDataParallel(model)

    def step() -> None:
        mse(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


def plain_accumulating(parts: Parts, steps: int = 4) -> Callable[[], None]:
    optimizer, scheduler, x, y = parts.optimizer, parts.scheduler, parts.x, parts.y
    model = DistributedDataParallel(parts.model)

    def update() -> None:
        with model.no_sync():
            for _ in range(steps - 1):
                (mse(model(x), y) / steps).backward()
        (mse(model(x), y) / steps).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return update


def prepared(kind: type) -> Build:
    """Return a step with an Accelerator (ours or the other), without `accumulate`."""

    def build(parts: Parts) -> Callable[[], None]:
        accelerator = kind(cpu=True)
        model, optimizer, scheduler = accelerator.prepare(parts.model, parts.optimizer, parts.scheduler)
        x, y = parts.x, parts.y

        def step() -> None:
            accelerator.backward(mse(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        return step

    return build


def logging_each(folder: Path) -> Build:
    """Return our step that also logs its loss to the local tracker, as a tensor."""

    def build(parts: Parts) -> Callable[[], None]:
        accelerator = Accelerator(cpu=True, project_dir=str(folder))
        accelerator.init_trackers("bench")
        model, optimizer, scheduler = accelerator.prepare(parts.model, parts.optimizer, parts.scheduler)
        x, y, numbers = parts.x, parts.y, itertools.count()

        def step() -> None:
            loss = mse(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss}, step=next(numbers))

        return step

    return build


def under_accumulate(kind: type, steps: int = 1, **options: Any) -> Build:
    """Return a step with an Accelerator, each batch in `with accelerator.accumulate(model):`; a call is a window."""

    def build(parts: Parts) -> Callable[[], None]:
        accelerator = kind(cpu=True, gradient_accumulation_steps=steps, **options)
        model, optimizer, scheduler = accelerator.prepare(parts.model, parts.optimizer, parts.scheduler)
        x, y = parts.x, parts.y

        def window() -> None:
            for _ in range(steps):
                with accelerator.accumulate(model):
                    accelerator.backward(mse(model(x), y))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

        return window

    return build


def fabric(parts: Parts) -> Callable[[], None]:
    made = _fabric()
    model, optimizer = made.setup(parts.model, parts.optimizer)
    scheduler, x, y = parts.scheduler, parts.x, parts.y

    def step() -> None:
        made.backward(mse(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


def fabric_accumulating(parts: Parts, steps: int = 4) -> Callable[[], None]:
    made = _fabric()
    model, optimizer = made.setup(parts.model, parts.optimizer)
    scheduler, x, y = parts.scheduler, parts.x, parts.y

    def update() -> None:
        for number in range(1, steps + 1):
            with made.no_backward_sync(model, enabled=number < steps):
                made.backward(mse(model(x), y) / steps)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return update


def _fabric() -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    if not dist.is_initialized():
        return Fabric(accelerator="cpu", devices=1)
    made = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", plugins=[TorchElasticEnvironment()])
    made.launch()
    return made


class _NoScheduler(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: Any = None) -> None: ...


def bare(accumulates: bool | None) -> Build:
    """Return a step in which torch does nothing: only our calls remain (None: no wrappers either)."""

    def build(parts: Parts) -> Callable[[], None]:
        model, optimizer = parts.model, NoOptimizer(parts.weights)
        loss = torch.ones((), requires_grad=True).as_subclass(NoLoss)
        scheduler = _NoScheduler(optimizer)

        def plain_step() -> None:
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        if accumulates is None:
            return plain_step
        accelerator = Accelerator(cpu=True)
        model, ours, our_scheduler = accelerator.prepare(model, optimizer, scheduler)

        def step() -> None:
            accelerator.backward(loss)
            ours.step()
            our_scheduler.step()
            ours.zero_grad()

        def accumulating() -> None:
            with accelerator.accumulate(model):
                accelerator.backward(loss)
                ours.step()
                our_scheduler.step()
                ours.zero_grad()

        return accumulating if accumulates else step

    return build


def cases(folder: Path) -> dict[str, dict[str, Build]]:
    """Return the contenders of each case; all of them reach the same weights."""
    from accelerate import Accelerator as Theirs

    step: dict[str, Build] = {
        "plain": plain,
        "ours": prepared(Accelerator),
        "ours, accumulate": under_accumulate(Accelerator),
        "ours, logged": logging_each(folder),
        "accelerate": prepared(Theirs),
        "accelerate, accumulate": under_accumulate(Theirs),
        **({"fabric": fabric} if has_fabric() else {}),
        "plain, again": plain,
    }
    if not dist.is_initialized():
        return {"step": step, "bare": {"plain": bare(None), "ours": bare(False), "ours, accumulate": bare(True)}}
    window: dict[str, Build] = {
        "plain": plain_accumulating,
        "ours": under_accumulate(Accelerator, 4),
        "accelerate": under_accumulate(Theirs, 4, step_scheduler_with_optimizer=False),
        **({"fabric": fabric_accumulating} if has_fabric() else {}),
        "plain, again": plain_accumulating,
    }
    return {"step": step, "window": window}


def repeated(step: Callable[[], None]) -> Contender:
    def call(calls: int) -> None:
        for _ in range(calls):
            step()

    return call


def check(case: str, builds: dict[str, Build]) -> None:
    """Check that after some steps all contenders have the same weights."""
    results = {}
    for name, build in builds.items():
        parts = Parts()
        repeated(build(parts))(5)
        results[name] = torch.cat([weight.detach().flatten() for weight in parts.weights])
    for name, weights in results.items():
        # Accelerate moves its schedulers once for each process, so its rate is lower by some ten-thousandths.
        close = torch.allclose(weights, results["plain"], rtol=0, atol=1e-5 if name.startswith("accelerate") else 1e-7)
        assert close, f"{case}: {name} trains another model"


def profile(case: str, builds: dict[str, Build], name: str, calls: int, path: Path, writes: bool) -> None:
    """Profile a contender by function."""
    step = repeated(builds[name](Parts()))
    step(20)
    profiler = cProfile.Profile()
    profiler.runcall(step, calls)
    if writes:
        with path.open("a") as file:
            print(f"\n{case}, {name}: {calls} calls", file=file)
            pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(45)


def helper_threads(seconds: float) -> float:
    """Return the CPU seconds per second of an idle process: the heartbeat thread."""
    time.sleep(0.2)
    begin, start = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    return (time.process_time() - begin) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--builds", type=int, required=True, help="how often the models are made anew")
    parser.add_argument("--rounds", type=int, required=True, help="rounds of each")
    parser.add_argument("--calls", type=int, required=True, help="steps in a round")
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    barrier = dist.barrier if dist.is_initialized() else (lambda: None)
    found: dict[str, Any] = {}
    for case, builds in cases(options.output.parent / "project").items():
        calls = options.calls if case != "bare" else 50 * options.calls  # a hundredth of the time each
        check(case, builds)
        times = {name: Times() for name in builds}
        for number in range(options.builds):
            turned = list(builds)[number % len(builds) :] + list(builds)[: number % len(builds)]
            contenders = {name: repeated(builds[name](Parts())) for name in turned}
            for name, more in in_turns(contenders, options.rounds, calls, barrier).items():
                times[name].extend(more)
        everyone = state.gather_object([{name: asdict(entry) for name, entry in times.items()}])
        found[case] = joined(everyone)
        if options.profile:
            for name in ("plain", "ours", "ours, accumulate"):
                if name in builds:
                    profile(case, builds, name, 500, options.profile, state.is_main_process)
    found["helpers"] = {"idle": {"cpu": [max(state.gather_object([helper_threads(5.0)]))]}}
    if state.is_main_process:
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
