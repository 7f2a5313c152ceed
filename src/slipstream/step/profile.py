"""Torch's profiler as an option of the run: what it records, and one trace file for each process.

`ProfileKwargs` is checked when it is made, so that a mistake shows before the run and not after it; `profiling` is the block that
`Accelerator.profile()` gives. With `output_trace_dir` every process writes a trace of its own, for chrome://tracing or Perfetto, whenever a
recording ends: at the end of the block, or, with a schedule, after each cycle of it (the last one stays).
"""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

from slipstream.config.handlers import KwargsHandler
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["PROFILE_PATTERN_NAME", "ProfileKwargs", "profiling"]

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
    """The folder for the traces; it is made if there is none."""

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
        return self._built(self.on_trace_ready)

    def _built(self, on_trace_ready: Callable[..., Any] | None) -> profile:
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


@contextmanager
def profiling(handler: ProfileKwargs | None, process_index: int = 0) -> Iterator[profile]:
    """A block that torch's profiler watches; with `output_trace_dir`, `profile_<rank>.json` is there when it ends.

    >>> import torch
    >>> with profiling(ProfileKwargs(activities=["cpu"])) as profiler:
    ...     _ = torch.ones(3).sum()
    >>> any(event.key == "aten::sum" for event in profiler.key_averages())
    True
    """
    handler = handler or ProfileKwargs()
    if handler.output_trace_dir is None:
        with handler.build() as profiler:
            yield profiler
        return
    trace = _TraceFile(_folder(handler.output_trace_dir) / PROFILE_PATTERN_NAME.format(suffix=process_index), handler.on_trace_ready)
    with handler._built(trace.write) as profiler:
        yield profiler
    if not trace.written:
        get_logger(__name__).warning(
            "nothing was recorded, so there is no %s: with a schedule, call profiler.step() after every step, until a cycle has begun",
            trace.path,
            main_process_only=False,
        )


def _folder(given: str) -> Path:
    """The folder for traces, made if need be; an error now and not after the run if nothing can be written there."""
    folder = Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            f"ProfileKwargs(output_trace_dir={os.fspath(given)!r}): no trace can be written there ({error.strerror}); name another folder"
        ) from error


class _TraceFile:
    """Writes the trace of every recording that ends, after the user's own function has seen it."""

    def __init__(self, path: Path, also: Callable[..., Any] | None) -> None:
        self.path = path
        self.written = False
        self._also = also

    def write(self, profiler: profile) -> None:
        if self._also is not None:
            self._also(profiler)
        try:
            profiler.export_chrome_trace(str(self.path))
        except RuntimeError as error:
            if "already saved" not in str(error):
                raise
            get_logger(__name__).warning_once(f"on_trace_ready has saved the trace itself, so {self.path} is not written again")
        self.written = True
