"""What a prepared step costs on an accelerator, counted on the stand-in: how often the host waits, and what is copied beside the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.devices.memory import timing_event_factory
from slipstream.observability.options import LedgerKwargs
from slipstream.utils import DataLoaderConfiguration

UPDATES = 10
WARM_UP = 4
"""Updates before counting: optimizer states, DDP buckets and the first checks are made in these."""


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randn(count, 1, generator=generator))


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def costs(
    *,
    steps: int = 1,
    clip: str = "",
    weighs: bool = False,
    fused: bool = False,
    settles: bool = False,
    pinned: bool = True,
    **options: Any,
) -> tuple[int, int, int]:
    """(copies to the device, waits of the host, reads beside the queue) of ten updates of an ordinary training loop.

    A read through a stream of its own, of a value that the device has computed before, does not wait for what is queued there.
    """
    handlers = [LedgerKwargs(interval=1e-9)] if settles else []  # the ledger looks at its data between any two steps
    config = DataLoaderConfiguration(non_blocking=pinned)
    accelerator = Accelerator(gradient_accumulation_steps=steps, dataloader_config=config, kwargs_handlers=handlers, **options)
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    batches = (WARM_UP + UPDATES + 1) * steps * accelerator.num_processes
    loader = DataLoader(data(4 * batches), batch_size=4, pin_memory=pinned)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    for number, (x, y) in enumerate(loader):
        if number == WARM_UP * steps:
            torch.standin.reset_counters()
            torch.standin.start_log()
        if number == (WARM_UP + UPDATES) * steps:
            break
        with accelerator.accumulate(net):
            loss = torch.nn.functional.l1_loss(net(x), y, reduction="sum" if weighs else "mean")
            accelerator.backward(loss, weight=(y == y).sum() if weighs else None)
            if clip == "norm":
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            if clip == "value":
                accelerator.clip_grad_value_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(**({"set_to_none": False} if clip == "zeros" else {}))
    counted = torch.standin.counters()
    torch.standin.stop_log()
    beside = sum(entry.kind == "to_host" and entry.stream != 0 for entry in torch.standin.log())
    assert counted.copies_to_host <= counted.synchronizations
    return counted.copies_to_device, counted.synchronizations - beside, beside


WITHOUT_READING: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"steps": 2},
    "norm": {"clip": "norm"},
    "value": {"clip": "value"},
    "bf16": {"mixed_precision": "bf16"},
    "bf16, settling": {"mixed_precision": "bf16", "clip": "norm", "settles": True},
}
"""Loops in which nothing has to be known on the host, so that it never waits."""
READING_ONCE: dict[str, dict[str, Any]] = {
    "fp16": {"mixed_precision": "fp16"},
    "fp16, accumulation": {"mixed_precision": "fp16", "steps": 2},
    "fp16, norm": {"mixed_precision": "fp16", "clip": "norm"},
    "fp16, zeros": {"mixed_precision": "fp16", "clip": "zeros"},
    "fp16, fused": {"mixed_precision": "fp16", "fused": True},
    "fp16, settling": {"mixed_precision": "fp16", "settles": True},
    "skip": {"on_nan": "skip"},
    "raise, norm": {"on_nan": "raise", "clip": "norm"},
    "raise, value, settling": {"on_nan": "raise", "clip": "value", "settles": True},
    "weights": {"weighs": True},
    "weights, accumulation": {"weighs": True, "steps": 3},
}
"""Loops in which one number decides on the host what to do: whether to step, or what to divide by."""
COMPARISONS = 2
"""How often the guards compare the weights of replicas here: after 1, 2, 4, 8, ... updates, and later once in a thousand."""


@pytest.mark.parametrize("world", [1, 2])
def test_waits_of_a_step(ranks: Any, world: int) -> None:
    """The host waits at most once per update, and only where it decides on a value; only the batch is copied to the device.

    With the ledger, the guards and the comparison of replicas on, as they are by default. Plain PyTorch waits as often: a `GradScaler`
    reads once per step whether gradients overflowed.
    """
    cases = {**WITHOUT_READING, **READING_ONCE}

    def run() -> dict[str, tuple[int, int, int]]:
        return {name: costs(**options) for name, options in cases.items()}

    for found in ranks(world, device="standin").run(run):
        for name, (to_device, waits, beside) in found.items():
            tensors = 2 * UPDATES * cases[name].get("steps", 1)
            assert to_device <= tensors, (name, found[name])
            assert waits <= (0 if name in WITHOUT_READING else UPDATES), (name, found[name])
            assert beside <= (UPDATES if cases[name].get("settles") else 0) + COMPARISONS * (world - 1), (name, found[name])


def test_pageable_batches(ranks: Any) -> None:
    """A batch in ordinary memory is waited for, as `tensor.to(device)` does, and nothing else is."""

    def run() -> tuple[int, int, int]:
        return costs(pinned=False)

    assert ranks(1, device="standin").run(run) == [(2 * UPDATES, 2 * UPDATES, 0)]


def test_clock_of_the_device(ranks: Any) -> None:
    """The events of the ledger measure the device: a kernel that takes long is seen, also where another device is the current one."""

    def run() -> list[bool]:
        found = []
        for place in ("standin:0", "standin:1"):
            make = timing_event_factory(place)
            assert make is not None
            x = torch.ones(1, device=place)
            first, second = make(), make()
            torch.standin.set_delay(kernels=0.05)
            try:
                first.record()
                x.add_(1)
                second.record()
                second.synchronize()
            finally:
                torch.standin.set_delay(kernels=0.0)
            found.append(first.elapsed_time(second) >= 45.0)
        return found

    assert ranks(1, device="standin").run(run) == [[True, True]]
