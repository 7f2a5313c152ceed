"""An Accelerator with its guards, and what it trains."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from slipstream import Accelerator
from slipstream.observability.guards.monitor import Guards
from slipstream.observability.options import GuardKwargs
from slipstream.observability.timing.step_times import StepWindow


def guarded(options: GuardKwargs, kwargs_handlers: Any = (), **settings: Any) -> tuple[Accelerator, Guards]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options, *kwargs_handlers], **settings)
    return accelerator, accelerator._guards


def network(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(dtype)


def batch(number: int, rank: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * number + rank), dtype=torch.float64).to(dtype)


def window(losses: Any, first: int = 0) -> StepWindow:
    return StepWindow(
        len(losses), first, numpy.zeros((len(losses), 10)), [(first + at, torch.tensor(loss)) for at, loss in enumerate(losses)]
    )


class Poison:
    """Makes the gradient of one parameter NaN in the backward passes that are named."""

    def __init__(self, parameter: torch.nn.Parameter, passes: Any, value: float = float("nan")) -> None:
        self.passes, self.value, self.count = set(passes), value, -1
        parameter.register_hook(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count not in self.passes:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = self.value
        return spoilt
