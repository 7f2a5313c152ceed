"""You pay for what you use, in counts: collectives per update, rooms entered in a step, what is looked up on the way."""

import builtins
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import slipstream
from slipstream import Accelerator
from slipstream.observability.options import LedgerKwargs

PACKAGE = str(Path(slipstream.__file__).parent)


def prepared(steps: int = 1, **options: Any) -> tuple[Accelerator, Any, Any, Any, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4)
    return accelerator, *accelerator.prepare(net, optimizer, loader, scheduler)


def step(accelerator: Accelerator, net: Any, optimizer: Any, x: Any, scheduler: Any, clip: bool = False) -> None:
    with accelerator.accumulate(net):
        accelerator.backward(net(x).square().mean())
        if clip:
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def entered(calls: Any) -> set[str]:
    """The files of ours whose functions run during a call."""
    files: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        calls()
    finally:
        sys.setprofile(None)
    return files


def test_step_enters_few_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step enters at most five modules reads no variable and looks up no package."""
    settles_later = LedgerKwargs(interval=3600.0)  # once per interval the ledger looks at its rows, between two steps
    accelerator, net, optimizer, loader, scheduler = prepared(steps=2, kwargs_handlers=[settles_later])
    batches = iter(loader)
    step(accelerator, net, optimizer, next(batches)[0], scheduler)
    step(accelerator, net, optimizer, next(batches)[0], scheduler)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"looked up in a step: {args}")

    class Closed(dict[str, str]):
        __getitem__ = __contains__ = forbidden

        def get(self, name: str, default: Any = None) -> Any:
            if name != "PYTORCH_NVML_BASED_CUDA_CHECK":  # Adam asks torch.cuda.is_available(), which reads it in a build with CUDA
                forbidden(name)
            return default

    ours = []
    real_import = builtins.__import__

    def imports(name: str, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(PACKAGE):
            ours.append((caller, name))
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(os, "environ", Closed())
    monkeypatch.setattr(importlib.util, "find_spec", forbidden)
    monkeypatch.setattr(importlib.metadata, "version", forbidden)
    monkeypatch.setattr(builtins, "__import__", imports)
    x = next(batches)[0]
    files = entered(lambda: [step(accelerator, net, optimizer, x, scheduler) for _ in range(2)])
    whole = entered(lambda: [step(accelerator, net, optimizer, next(batches)[0], scheduler) for _ in range(2)])
    reading = entered(lambda: [step(accelerator, net, optimizer, next(batches)[0], scheduler, clip=True) for _ in range(2)])
    monkeypatch.undo()
    assert not ours
    assert len(files) <= 5, sorted(files)
    assert len(whole) <= 9, sorted(whole)
    rooms = {"accelerator", "data", "distributed", "observability", "strategies", "training"}
    assert {file.split("/")[0] for file in reading} <= rooms, sorted(reading)


def _counting(reduced: list[int], bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    reduced.append(1)
    work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_gradients_reduced_once(ranks: Any) -> None:
    """Gradients are reduced once per bucket and update.

    And not at all while they are added up; with the guard and the heartbeat on.
    """

    def run() -> Any:
        counts = {}
        for steps in (1, 4):
            accelerator, net, optimizer, loader, scheduler = prepared(steps)
            reduced: list[int] = []

            net.register_comm_hook(reduced, _counting)
            sequence = accelerator.state.channel().sequence
            for (x,) in loader:
                step(accelerator, net, optimizer, x, scheduler)
            counts[steps] = (len(reduced), len(loader), accelerator.state.channel().sequence - sequence)
        return counts

    for counts in ranks(2).run(run):
        reduced, batches, guarded = counts[1]
        assert (reduced, guarded) == (batches, 1), "one bucket, one all-reduce per update, and one call of ours where the pass begins"
        assert counts[4] == (batches // 4, batches, 1)


def test_preparing_copies_no_parameters() -> None:
    net = torch.nn.Linear(64, 64)
    before = [parameter.data_ptr() for parameter in net.parameters()]
    for precision in ("no", "bf16", "fp16"):
        back = Accelerator(cpu=True, mixed_precision=precision).prepare(net)
        assert [parameter.data_ptr() for parameter in back.parameters()] == before
