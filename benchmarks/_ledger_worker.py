"""The worker of `ledger.py` on one rank or on two: the same loop with the ledger on, with it off, and in plain PyTorch, interleaved.

A step reads a batch, runs forward and backward, clips, updates and clears, so it passes every mark of the ledger. Weights after some
steps are compared before anything is timed. Rank 0 writes all times as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _no_work import NoLoss, NoOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from turns import Contender, Times, in_turns, joined

from slipstream import Accelerator, PartialState
from slipstream.observability.options import LedgerKwargs

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

WIDTH, BATCH, LAYERS = 160, 48, 4
"""About a millisecond of plain PyTorch on an idle core."""

Build = Callable[[], Callable[[], None]]
"""Makes a step."""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(LAYERS)))


class Batches(torch.utils.data.Dataset[Any]):
    """Preloaded batches, so that reading them takes no time."""

    def __init__(self, count: int = 2000) -> None:
        self._batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batch


def endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def plain() -> Callable[[], None]:
    net: Any = model()
    weights = list(net.parameters())
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    if dist.is_initialized():
        net = DistributedDataParallel(net)
    batches = endless(DataLoader(Batches(), batch_size=None))

    def step() -> None:
        net(next(batches)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step.weights = weights  # type: ignore[attr-defined]
    return step


def ours(folder: str | None = None, **options: Any) -> Build:
    """Return our loop; with a folder, it logs its loss there in every step."""

    def build() -> Callable[[], None]:
        accelerator = Accelerator(cpu=True, project_dir=folder, kwargs_handlers=[LedgerKwargs(summary=False, **options)])
        if folder is not None:
            accelerator.init_trackers("bench")
        net: Any = model()
        weights = list(net.parameters())
        net, optimizer, reader = accelerator.prepare(
            net, torch.optim.SGD(weights, lr=1e-3), DataLoader(Batches(2000 * accelerator.num_processes), batch_size=None)
        )
        batches, numbers = endless(reader), itertools.count()

        def step() -> None:
            accelerator.backward(net(next(batches)).square().mean())
            accelerator.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        def logged() -> None:
            loss = net(next(batches)).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss}, step=next(numbers))

        chosen = step if folder is None else logged
        chosen.weights = weights  # type: ignore[attr-defined]
        return chosen

    return build


class _NoModel(torch.nn.Module):
    """A model with a precomputed loss."""

    def __init__(self, loss: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self._loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss


def bare(folder: str | None = None, **options: Any) -> Build:
    """Return a step in which torch does nothing: the difference between two of them is the ledger. With a folder, it logs a loss there."""

    def build() -> Callable[[], None]:
        accelerator = Accelerator(cpu=True, project_dir=folder, kwargs_handlers=[LedgerKwargs(summary=False, **options)])
        if folder is not None:
            accelerator.init_trackers("bench")
        inner = _NoModel(torch.ones((), requires_grad=True).as_subclass(NoLoss))
        net, optimizer, reader = accelerator.prepare(inner, NoOptimizer(inner.parameters()), DataLoader(Batches(), batch_size=None))
        batches, numbers, value = endless(reader), itertools.count(), torch.ones(())

        def step() -> None:
            accelerator.backward(net(next(batches)))
            optimizer.step()
            optimizer.zero_grad()

        def logged() -> None:
            step()
            accelerator.log({"loss": value}, step=next(numbers))

        chosen = step if folder is None else logged
        chosen.accelerator = accelerator  # type: ignore[attr-defined]
        return chosen

    return build


def cases(folder: str) -> dict[str, dict[str, Build]]:
    """Return the contenders of each case."""
    off = {"enabled": False}
    step: dict[str, Build] = {"plain": plain, "off": ours(**off), "on": ours(), "logged": ours(folder), "off, again": ours(**off)}
    return {"step": step} if dist.is_initialized() else {"step": step, "bare": {"off": bare(**off), "on": bare()}}


def repeated(step: Callable[[], None]) -> Contender:
    def call(calls: int) -> None:
        for _ in range(calls):
            step()

    return call


def check(builds: dict[str, Build]) -> None:
    """Check that after some steps all contenders have the same weights."""
    results = {}
    for name, build in builds.items():
        step = build()
        repeated(step)(5)
        results[name] = torch.cat([weight.detach().flatten() for weight in step.weights])  # type: ignore[attr-defined]
    for name, weights in results.items():
        assert torch.allclose(weights, results["plain"], rtol=0, atol=1e-7), f"{name} trains another model"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--builds", type=int, required=True, help="how often the models are made anew")
    parser.add_argument("--rounds", type=int, required=True, help="rounds of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    barrier = dist.barrier if dist.is_initialized() else (lambda: None)
    found: dict[str, Any] = {}
    for case, builds in cases(str(options.output.parent / "project")).items():
        if case == "step":
            check(builds)
        times = {name: Times() for name in builds}
        for number in range(options.builds):
            turned = list(builds)[number % len(builds) :] + list(builds)[: number % len(builds)]
            contenders = {name: repeated(builds[name]()) for name in turned}
            for name, more in in_turns(contenders, options.rounds, 10 if case == "step" else 100, barrier).items():
                times[name].extend(more)
        found[case] = joined(state.gather_object([{name: asdict(entry) for name, entry in times.items()}]))
    if state.is_main_process:
        options.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
