"""`GuardKwargs`: what is watched while a run goes on, and what happens when a gradient is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slipstream.config.handlers import KwargsHandler
from slipstream.errors import ConfigError

__all__ = ["ON_NAN", "GuardKwargs"]

ON_NAN = ("warn", "skip", "raise", "off")
"""What can be done about a loss or a gradient that is not finite."""


@dataclass
class GuardKwargs(KwargsHandler):
    """What is watched, for `Accelerator(kwargs_handlers=[...])`; see docs/guards.md for what each message means.

    >>> GuardKwargs(on_nan="raise", drift_every=100).to_kwargs()
    {'on_nan': 'raise', 'drift_every': 100}
    >>> GuardKwargs.off().watches
    False
    """

    on_nan: str = "warn"
    """"warn": said once in a while, nothing is looked at in a step. "skip": such an update is left out. "raise": it is an error. "off"."""
    loss_spike: float | None = 10.0
    """How many times its usual deviation a loss may rise above its recent median; None for any."""
    drift_every: int | None = 1000
    """After how many updates at the latest the weights of the replicas are compared again; None for never.

    They are compared after updates 1, 2, 4, 8, ..., from then on after so many, in checkpoints, and at the end of training."""
    starving: float | None = 0.3
    """Which share of the time a step may wait for data; None for any."""
    straggler: float | None = 0.3
    """Which share of the time processes may wait for one that is always the last; None for any."""
    schedule: bool = True
    """Whether a learning rate that has come to its end while training goes on is told."""

    same_batches: bool = True
    """Whether processes that train on the same batches, as a loader that was not prepared gives them, are told."""

    def __post_init__(self) -> None:
        if self.on_nan not in ON_NAN:
            raise ConfigError(f"GuardKwargs(on_nan={self.on_nan!r}): write one of {', '.join(map(repr, ON_NAN))}")
        if not _is_number(self.loss_spike, 3.0, math.inf):
            raise ConfigError(
                f"GuardKwargs(loss_spike={self.loss_spike!r}): write how many usual deviations above the median count as a spike, a number "
                "from 3 (10 is usual), or None not to look"
            )
        if self.drift_every is not None and (type(self.drift_every) is not int or self.drift_every < 1):
            raise ConfigError(
                f"GuardKwargs(drift_every={self.drift_every!r}): write after how many updates the weights of all processes are compared, a "
                "whole number from 1 (1000 is usual), or None not to compare"
            )
        for name in ("starving", "straggler"):
            if not _is_number(getattr(self, name), 0.0, 1.0):
                raise ConfigError(
                    f"GuardKwargs({name}={getattr(self, name)!r}): write a share of the time between 0 and 1 (0.3 is usual), or None not "
                    "to look"
                )
        for name in ("schedule", "same_batches"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"GuardKwargs({name}={getattr(self, name)!r}): write True or False")

    @classmethod
    def off(cls) -> GuardKwargs:
        """Nothing is watched."""
        return cls(on_nan="off", loss_spike=None, drift_every=None, starving=None, straggler=None, schedule=False, same_batches=False)

    @property
    def watches(self) -> bool:
        """Whether anything is watched."""
        return self != GuardKwargs.off()

    @property
    def strict(self) -> bool:
        """Whether gradients are looked at before each update."""
        return self.on_nan in ("skip", "raise")


def _is_number(value: Any, least: float, most: float) -> bool:
    if value is None:
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most and 0.0 < value < math.inf
