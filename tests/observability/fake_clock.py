"""A clock that moves only when a part of a training loop naps, so that the time of each phase is known exactly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from slipstream import Accelerator
from slipstream.observability.timing.ledger import Ledger
from slipstream.observability.timing.step_times import MeterReader

MS = 1_000_000


class Clock:
    """Nanoseconds that pass by `nap` alone; counts who napped for how long."""

    def __init__(self) -> None:
        self.now = 0
        self.napped: Counter[str] = Counter()

    def __call__(self) -> int:
        return self.now

    def nap(self, name: str, milliseconds: int) -> None:
        self.now += milliseconds * MS
        self.napped[name] += milliseconds


def on_clock(ledger: Ledger, clock: Clock) -> Ledger:
    """The ledger, with this clock instead of the real one."""
    assert ledger.meter is not None
    ledger.meter.clock, ledger._reader = clock, MeterReader(clock.now)
    ledger._due = clock.now + int(ledger.interval * 1e9)
    ledger.meter.due = min(ledger.meter.due, ledger._due)
    return ledger


def ledger_of(accelerator: Accelerator, clock: Clock | None = None) -> Ledger:
    ledger = accelerator._components.ledger
    return ledger if clock is None else on_clock(ledger, clock)


class Items(Dataset[Any]):
    """Numbers that take a while to read, each."""

    def __init__(self, clock: Any, count: int, milliseconds: int, name: str = "data") -> None:
        self.clock, self.count, self.milliseconds, self.name = clock, count, milliseconds, name

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.nap(self.name, self.milliseconds)
        return torch.full((3,), float(index))


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, clock: Any, milliseconds: int) -> torch.Tensor:
        ctx.nap = clock.nap, milliseconds
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        nap, milliseconds = ctx.nap
        nap("backward", milliseconds)
        return gradient, None, None


class Net(torch.nn.Module):
    """A model that naps in forward and, before its gradients, in backward."""

    def __init__(self, clock: Any, forward: int, backward: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.clock, self.naps, self.backward_naps = clock, forward, backward

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        name = "forward" if torch.is_grad_enabled() else "evaluation"
        self.clock.nap(name, self.naps)
        return _Slow.apply(self.linear(batch), self.clock, self.backward_naps)  # type: ignore[no-untyped-call,no-any-return]


class Sgd(torch.optim.SGD):
    """An optimizer that naps."""

    def __init__(self, parameters: Any, clock: Any, milliseconds: int) -> None:
        super().__init__(parameters, lr=0.01)
        self.nap = lambda: clock.nap("optimizer", milliseconds)

    def step(self, closure: Any = None) -> Any:
        self.nap()
        return super().step(closure)


def loader(clock: Any, count: int, milliseconds: int, batch_size: int = 2, name: str = "data") -> DataLoader[Any]:
    return DataLoader(Items(clock, count, milliseconds, name), batch_size=batch_size)


def milliseconds(phases: dict[str, list[float | None]], rank: int = 0) -> dict[str, int]:
    """The phases of a rank in whole milliseconds, without those that took none."""
    return {name: round(value * 1e3) for name, values in phases.items() if (value := values[rank] or 0.0) > 1e-9}


class Loop:
    """An Accelerator on a clock of naps, with a model, an optimizer and a loader of ten batches that nap."""

    def __init__(self, forward: int = 3, backward: int = 5, optimizer: int = 7, data: int = 1, **options: Any) -> None:
        self.clock = Clock()
        self.accelerator = Accelerator(cpu=True, **options)
        self.ledger = ledger_of(self.accelerator, self.clock)
        net = Net(self.clock, forward, backward)
        self.net, self.optimizer, self.loader = self.accelerator.prepare(
            net, Sgd(net.parameters(), self.clock, optimizer), loader(self.clock, 20, data)
        )

    def step(self, batch: torch.Tensor, body: int = 0) -> None:
        self.accelerator.backward(self.net(batch).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.clock.nap("other", body)

    def found(self) -> dict[str, int]:
        report = self.ledger.report()
        assert sum(value for values in report.phases.values() for value in values if value) == pytest.approx(report.seconds)
        return milliseconds(report.phases)
