"""What torch's profiler records: `ProfileKwargs`, checked when it is made, so that a mistake shows before the run and not after it.

It writes nothing: the block that records is in `block.py`, and one file of all ranks is made by `traces.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from slipstream.config.handlers import KwargsHandler
from slipstream.errors import ConfigError

__all__ = ["PROFILE_PATTERN_NAME", "ProfileKwargs"]

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
            raise ConfigError(f"ProfileKwargs(activities={self.activities!r}) records nothing: write some of {_names()}, or leave it out")
        for given in self.activities or ():
            _activity(given)
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)
        if self.on_trace_ready is not None and not callable(self.on_trace_ready):
            raise ConfigError(f"ProfileKwargs(on_trace_ready={self.on_trace_ready!r}) is not a function: write one that takes the profiler")

    def build(self) -> profile:
        """Torch's profiler, to be entered with `with`."""
        return self.building(self.on_trace_ready)

    def building(self, on_trace_ready: Callable[..., Any] | None) -> profile:
        """The same with another function to call when a recording ends."""
        return profile(
            activities=None if self.activities is None else {_present(_activity(given)): None for given in self.activities}.keys(),
            schedule=None if self.schedule_option is None else schedule(**self.schedule_option),
            on_trace_ready=on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _names() -> str:
    return ", ".join(name.lower() for name in ProfilerActivity.__members__)


def _activity(given: Any) -> ProfilerActivity:
    if isinstance(given, ProfilerActivity):
        return given
    found = next((one for name, one in ProfilerActivity.__members__.items() if name.lower() == str(given).lower()), None)
    if found is None:
        raise ConfigError(f"ProfileKwargs(activities=[{given!r}]): torch's profiler does not know it; write some of {_names()}")
    return found


def _present(activity: ProfilerActivity) -> ProfilerActivity:
    here: set[ProfilerActivity] = supported_activities()  # type: ignore[no-untyped-call]
    if activity not in here:
        known = ", ".join(sorted(one.name.lower() for one in here))
        raise ConfigError(
            f"ProfileKwargs(activities=[{activity.name.lower()!r}]): this installation of torch cannot record that; it can record {known}"
        )
    return activity


def _check_schedule(options: dict[str, int]) -> None:
    parameters = inspect.signature(schedule).parameters
    needed = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
    where = f"ProfileKwargs(schedule_option={options!r})"
    if unknown := [name for name in options if name not in parameters]:
        raise ConfigError(f"{where}: {', '.join(map(str, unknown))} is not part of a schedule; write some of {', '.join(parameters)}")
    if missing := [name for name in needed if name not in options]:
        raise ConfigError(f"{where}: {', '.join(missing)} is not there; a schedule needs {', '.join(needed)}, and 0 is a number too")
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < (name == "active"):
            raise ConfigError(f"{where}: {name} counts calls of profiler.step(), so it is a whole number from {int(name == 'active')}")
