"""`GuardKwargs`, `LedgerKwargs` and `ProfileKwargs`, the options for `Accelerator(kwargs_handlers=[...])`.

Each is checked when it is constructed, so that a mistake raises a `ConfigError` before the run starts. This module does nothing else: it
starts no profiler and attaches no guard, so it is cheap to import.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from slipstream.config.handlers import KwargsHandler, check_count
from slipstream.devices.table import family_types
from slipstream.errors import ConfigError

__all__ = ["GuardKwargs", "LedgerKwargs", "ON_NAN", "PROFILE_PATTERN_NAME", "ProfileKwargs"]


ON_NAN = ("warn", "skip", "raise", "off")
"""What to do about a loss or a gradient that is not finite."""


@dataclass
class GuardKwargs(KwargsHandler):
    """What is watched, for `Accelerator(kwargs_handlers=[...])`; see docs/guards.md for what each message means.

    >>> GuardKwargs(on_nan="raise", drift_every=100).to_kwargs()
    {'on_nan': 'raise', 'drift_every': 100}
    >>> GuardKwargs.off().watches
    False
    """

    on_nan: str = "warn"
    """"warn": report it; nothing is checked inside of a step. "skip": skip such updates. "raise": raise an error. "off": do nothing."""
    loss_spike: float | None = 10.0
    """How many deviations a loss may rise above its recent median; None for no check."""
    drift_every: int | None = 1000
    """The largest number of updates between two comparisons of the replicas' weights; None for no comparison.

    They are compared after updates 1, 2, 4, 8, ..., from then on after so many, in checkpoints, and at the end of training."""
    starving: float | None = 0.3
    """The share of the time that steps may wait for data; None for no check."""
    straggler: float | None = 0.3
    """The share of the time that processes may wait for a straggler; None for no check."""
    schedule: bool = True
    """Whether to report a learning rate that has reached its end while training continues."""

    same_batches: bool = True
    """Whether to report processes that train on the same batches, as with a loader that was not prepared."""

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
        """Return options with every check off."""
        return cls(on_nan="off", loss_spike=None, drift_every=None, starving=None, straggler=None, schedule=False, same_batches=False)

    @property
    def watches(self) -> bool:
        """Whether any check is on."""
        return self != GuardKwargs.off()

    @property
    def strict(self) -> bool:
        """Whether gradients are checked before each update."""
        return self.on_nan in ("skip", "raise")


def _is_number(value: Any, least: float, most: float) -> bool:
    if value is None:
        return True
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most and 0.0 < value < math.inf


@dataclass
class LedgerKwargs(KwargsHandler):
    """The options of the ledger, for `Accelerator(kwargs_handlers=[...])`.

    >>> LedgerKwargs(flops_per_sample=6e9, peak_flops=312e12).to_kwargs()
    {'flops_per_sample': 6000000000.0, 'peak_flops': 312000000000000.0}
    """

    enabled: bool = True
    """Whether there is a ledger at all. Without one a step makes no marks."""
    interval: float = 1.0
    """Seconds between two reports to rank 0. Beyond 16 processes it grows with their number."""
    flops_per_sample: float | None = None
    """Floating-point operations of forward and backward for one sample, where they are known."""
    count_flops: bool = False
    """Count them in the second step, with torch's counter; that step is slower."""
    peak_flops: float | None = None
    """What the device of one process can do in a second; None measures it once with a product of matrices, where FLOPs are known."""
    tokens: str | Callable[[Any], int] | None = None
    """The name under which a batch holds its tokens, or a function of a batch that counts them; None looks for "input_ids"."""
    summary: bool = True
    """Whether `end_training` prints the summary, where training took a second at least."""

    def __post_init__(self) -> None:
        if self.interval is None or not _is_number(self.interval, 0.0, math.inf):
            raise ConfigError(f"LedgerKwargs(interval={self.interval!r}): write the seconds between two looks, more than 0; 1.0 is usual")
        for name in ("flops_per_sample", "peak_flops"):
            value = getattr(self, name)
            if not _is_number(value, 0.0, math.inf):
                raise ConfigError(f"LedgerKwargs({name}={value!r}): write how many floating-point operations, more than 0, or leave it out")
        if self.flops_per_sample is not None and self.count_flops:
            raise ConfigError("LedgerKwargs(flops_per_sample=..., count_flops=True): they are given, and to be counted; pass one of them")
        if self.tokens is not None and not isinstance(self.tokens, str) and not callable(self.tokens):
            raise ConfigError(
                f"LedgerKwargs(tokens={self.tokens!r}): write the name of an entry of a batch ('input_ids'), or a function that counts the "
                "tokens of a batch"
            )
        if not self.enabled:
            given = [name for name in self.to_kwargs() if name not in ("enabled", "summary")]
            if given:
                raise ConfigError(f"LedgerKwargs(enabled=False, {given[0]}=...): a ledger that is off counts nothing; pass one of them")


PROFILE_PATTERN_NAME = "profile_{suffix}.json"
"""The name of a trace file; the suffix is the rank."""


@dataclass
class ProfileKwargs(KwargsHandler):
    """What torch's profiler records, for `Accelerator(kwargs_handlers=[...])` or `accelerator.profile(...)`.

    >>> ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 2}).to_kwargs()["activities"]
    ['cpu']
    """

    activities: list[Any] | None = None
    """Names of what is recorded, such as "cpu", or members of `ProfilerActivity`; None for everything that is here."""
    schedule_option: dict[str, int] | None = None
    """`wait`, `warmup`, `active` and, if wanted, `repeat` and `skip_first`: numbers of calls of `profiler.step()`."""
    on_trace_ready: Callable[..., Any] | None = None
    """Called with the profiler when a recording ends."""
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    """The folder for the traces, one file for each process and one of all; it is made if there is none."""

    def __post_init__(self) -> None:
        if self.activities is not None and not self.activities:
            raise ConfigError(
                f"ProfileKwargs(activities={self.activities!r}) records nothing: write some of {_activity_names()}, or leave it out"
            )
        for given in self.activities or ():
            _check_activity(given)
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)
        if self.on_trace_ready is not None and not callable(self.on_trace_ready):
            raise ConfigError(f"ProfileKwargs(on_trace_ready={self.on_trace_ready!r}) is not a function: write one that takes the profiler")

    def build(self) -> profile:
        """Return torch's profiler, to be entered with `with`."""
        return self.building(self.on_trace_ready)

    def building(self, on_trace_ready: Callable[..., Any] | None) -> profile:
        """Return torch's profiler with another function to call when a recording ends."""
        return profile(
            activities=None
            if self.activities is None
            else {_find_activity(given): None for given in self.activities}.keys(),
            schedule=None if self.schedule_option is None else schedule(**self.schedule_option),
            on_trace_ready=on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _activity_names() -> str:
    return ", ".join(_activities())


def _activities() -> dict[str, ProfilerActivity]:
    """Return all activities by their names: torch's, and that of the device from outside, once its package is loaded."""
    members = ProfilerActivity.__members__
    return {**{name.lower(): member for name, member in members.items()}, **{member.name.lower(): member for member in members.values()}}


def _check_activity(given: Any) -> None:
    """Raise for a name that can never be an activity; a device from outside has its name only once its package is loaded."""
    if not isinstance(given, ProfilerActivity) and str(given).lower() not in (*_activities(), *family_types()):
        raise ConfigError(f"ProfileKwargs(activities=[{given!r}]): torch's profiler does not know it; write some of {_activity_names()}")


def _find_activity(given: Any) -> ProfilerActivity:
    """Return an activity that can be recorded here."""
    here: set[ProfilerActivity] = supported_activities()  # type: ignore[no-untyped-call]
    found = given if isinstance(given, ProfilerActivity) else _activities().get(str(given).lower())
    if found not in here:
        known = ", ".join(sorted(activity.name.lower() for activity in here))
        name = given.name.lower() if isinstance(given, ProfilerActivity) else str(given)
        raise ConfigError(f"ProfileKwargs(activities=[{name!r}]): this installation of torch cannot record that; it can record {known}")
    return found


def _check_schedule(options: dict[str, int]) -> None:
    parameters = inspect.signature(schedule).parameters
    needed = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    where = f"ProfileKwargs(schedule_option={options!r})"
    if unknown := [name for name in options if name not in parameters]:
        raise ConfigError(f"{where}: {', '.join(map(str, unknown))} is not part of a schedule; write some of {', '.join(parameters)}")
    if missing := [name for name in needed if name not in options]:
        raise ConfigError(f"{where}: {', '.join(missing)} is not there; a schedule needs {', '.join(needed)}, and 0 is a number too")
    for name, value in options.items():
        least = int(name == "active")
        check_count(value, f"{where}: {name} counts calls of profiler.step(), so it is a whole number from {least}", least)
