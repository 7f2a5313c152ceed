"""The block that torch's profiler watches: a trace for each rank, one of all ranks, and a table of the operators that took the time.

With `output_trace_dir` every process writes `profile_<rank>.json` whenever a recording ends: at the end of the block, or, with a schedule,
after each cycle of it (the last one stays). Whoever writes last makes `profile_merged.json` of all of them: the processes count themselves
in the rendezvous store, so that nobody waits for anybody. If one never comes to the end there is no merged file, and `merge_traces(folder)`
makes it later. Traces that cannot be merged are said, and are no error of the run.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import profile

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.logging import get_logger
from slipstream.runtime.process import Process
from slipstream.runtime.runtime import Runtime
from slipstream.step.profiling.options import PROFILE_PATTERN_NAME, ProfileKwargs
from slipstream.step.profiling.table import TopOperators, top_operators
from slipstream.step.profiling.traces import merge_traces

__all__ = ["profiling"]

_Told = Callable[[Path], object]


@contextmanager
def profiling(handler: ProfileKwargs | None, runtime: Runtime | None = None, tell: _Told | None = None) -> Iterator[profile]:
    """A block that torch's profiler watches; with `output_trace_dir`, `profile_<rank>.json` is there when it ends.

    `runtime` is that of this process, which knows its rank and the others; `tell` is called with the path of each trace that is there when
    the block ends, that of this rank and, if it was made here, that of all.

    >>> import torch
    >>> with profiling(ProfileKwargs(activities=["cpu"])) as profiler:
    ...     _ = torch.ones(3).sum()
    >>> any(event.key == "aten::sum" for event in profiler.key_averages())
    True
    """
    handler = handler or ProfileKwargs()
    process = runtime.process if runtime is not None else Process()
    folder = None if handler.output_trace_dir is None else _folder(handler.output_trace_dir)
    recording = _Recording(folder and folder / PROFILE_PATTERN_NAME.format(suffix=process.rank), handler.on_trace_ready, process)
    try:
        with handler.building(recording.ready) as profiler:
            yield profiler
    finally:
        if folder is not None:
            recording.say_if_nothing()
            for path in recording.path, _merged(folder, recording, runtime):
                if path is not None and tell is not None:
                    tell(path)
    recording.say_top()


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


class _Recording:
    """What becomes of every recording that ends, after the user's own function has seen it: a file, if there is a place for one."""

    def __init__(self, path: Path | None, also: Callable[..., Any] | None, process: Process) -> None:
        self._path = path
        self._also = also
        self._written = self._ended = False
        # It costs a look at every event, as much as writing them: where traces are written it is shown, else to who listens.
        self._counted = process.is_main and (path is not None or get_logger(__name__).isEnabledFor(logging.INFO))
        self._top: TopOperators | None = None

    @property
    def path(self) -> Path | None:
        """The file, if it is there."""
        return self._path if self._written else None

    def ready(self, profiler: profile) -> None:
        if self._also is not None:
            self._also(profiler)
        self._ended = True
        if self._counted:
            self._top = top_operators(profiler)  # now: torch forgets it with the next cycle
        if self._path is not None:
            self._write(profiler, self._path)

    def _write(self, profiler: profile, path: Path) -> None:
        """Beside its place first: whoever merges at this moment reads the trace of the cycle before, and not half of this one."""
        beside = path.with_name(f".{path.stem}.writing-{os.getpid()}.json")
        try:
            profiler.export_chrome_trace(str(beside))
            os.replace(beside, path)
            self._written = True
        except RuntimeError as error:
            if "already saved" not in str(error):
                raise
            get_logger(__name__).warning_once(f"on_trace_ready has saved the trace itself, so {path} is not written again")
        finally:
            beside.unlink(missing_ok=True)

    def say_if_nothing(self) -> None:
        if not self._ended:
            get_logger(__name__).warning(
                "nothing was recorded, so there is no %s: with a schedule, call profiler.step() after every step, until a cycle has begun",
                self._path,
                main_process_only=False,
            )

    def say_top(self) -> None:
        if self._top is not None and self._path is not None:
            print(self._top, file=sys.stderr, flush=True)
        elif self._top is not None:
            get_logger(__name__).info("%s", self._top)


def _merged(folder: Path, recording: _Recording, runtime: Runtime | None) -> Path | None:
    """The trace of all ranks, if this is the last of them to have written its own."""
    if runtime is None or runtime.process.world_size == 1:
        return None
    logger, process = get_logger(__name__), runtime.process
    if runtime.store is None:
        logger.info("the traces in %s are not merged, as the processes never met: merge_traces(%r) does that", folder, str(folder))
        return None
    try:
        if not _is_last(runtime.store, f"traces/{folder}", process, written=recording.path is not None):
            return None
        merged = merge_traces(folder, ranks=range(process.world_size))
    except (OSError, RuntimeError, SlipstreamError) as error:
        logger.warning(
            "the traces in %s were not merged (%s): merge_traces(%r) tries again", folder, error, str(folder), main_process_only=False
        )
        return None
    absent = [rank for rank in range(process.world_size) if not (folder / PROFILE_PATTERN_NAME.format(suffix=rank)).exists()]
    if absent:
        logger.warning(
            "%s has no rank %s, whose traces are on other machines: bring them into one folder and call merge_traces",
            merged,
            ", ".join(map(str, absent)),
            main_process_only=False,
        )
    return merged


def _is_last(store: Any, key: str, process: Process, *, written: bool) -> bool:
    """Whether all others have written the trace of the same block: the first of each on this folder, the second, and so on."""
    number = store.add(f"{key}/{process.rank}", 1)
    return bool(written and store.add(f"{key}/block {number}", 1) == process.world_size)
