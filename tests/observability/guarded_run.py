"""An Accelerator with its guards, and what it trains."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from slipstream import Accelerator, PartialState
from slipstream.observability.guards.monitor import Guards
from slipstream.observability.options import GuardKwargs
from slipstream.observability.timing.step_times import StepWindow

TORCH_LOG = re.compile(r"(\[rank\d+\]:)?\[W\d")


def guarded(options: GuardKwargs, kwargs_handlers: Any = (), **settings: Any) -> tuple[Accelerator, Guards]:
    """On the host, and in a pool of ranks on the device of the pool."""
    accelerator = Accelerator(cpu=not on_pool_device(), kwargs_handlers=[options, *kwargs_handlers], **settings)
    return accelerator, accelerator._guards


def on_pool_device() -> bool:
    return "SLIPSTREAM_DEVICE" in os.environ


def network(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(dtype)


def batch(number: int, rank: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    made = torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * number + rank), dtype=torch.float64).to(dtype)
    return made.to(PartialState().device) if on_pool_device() else made


def window(losses: Any, first: int = 0) -> StepWindow:
    return StepWindow(
        len(losses), first, numpy.zeros((len(losses), 10)), [(first + at, torch.tensor(loss)) for at, loss in enumerate(losses)]
    )


def own_words(output: str) -> str:
    """What was printed, without the lines of torch's own log, such as warnings about backends of out-of-tree devices."""
    return "".join(line for line in output.splitlines(keepends=True) if not TORCH_LOG.match(line))


@contextmanager
def delayed(copies: float = 0.0002, kernels: float = 0.0) -> Iterator[None]:
    """Within the block, work on the stand-in device takes so many seconds; then what it takes by default."""
    torch.standin.set_delay(copies=copies, kernels=kernels)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.standin.set_delay(copies=0.0002, kernels=0.0)  # type: ignore[attr-defined]


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
