"""`RunRecorder` connects run directory, trackers, ledger, guards and the final report for one Accelerator.

With a `project_dir` the main process writes `<project_dir>/runs/<NAME>/`. `init_trackers` creates it; in a script without that call, the
first record does. Records that come earlier are buffered. Other processes, and runs without a `project_dir`, write no files: their
records reach the main process through the ledger's store exchange, or go to the terminal. Trackers, run directory and report are imported
when they are first used.

The recorder takes part in no collective. If it cannot write, it logs a warning and training continues.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config.handlers import ProjectConfiguration
from slipstream.config.redaction import redact_text, redact_values
from slipstream.config.sources import environment
from slipstream.devices.packages import version_of
from slipstream.logging import get_logger
from slipstream.observability.guards.monitor import Guards, call_if_alive
from slipstream.observability.memory import MemorySnapshot, NamedTensor, named_tensors, watch_memory
from slipstream.observability.options import GuardKwargs
from slipstream.observability.timing.ledger import Ledger

if TYPE_CHECKING:
    from slipstream.accelerator.components import Components
    from slipstream.observability.run_dir.folder import JsonLinesWriter, RunFolder
    from slipstream.observability.trackers.registry import Trackers

__all__ = ["RunRecorder", "attach_guards"]

_GUARDS = "slipstream.guards"
_FOLDER_NOTE = "folder of the run"
_MAX_SAME_WARNING = 3
"""How often the same warning is recorded."""
_INTERRUPT_TEXT = f"exit code {128 + signal.SIGINT}"
"""What our worker records of a script that caught Ctrl-C and exits as shells expect it."""
_MIN_SUMMARY_SECONDS = 1.0
"""Seconds of training below which no summary is printed."""
_MAX_BUFFERED = 1000
"""Events and intervals that are kept until there is a folder."""


class RunRecorder:
    """The trackers and the run directory of one Accelerator."""

    def __init__(self, components: Components, project: ProjectConfiguration, log_with: Any, given: Mapping[str, Any]) -> None:
        self._components = components
        self._root = _absolute_path(project.project_dir)
        self._logging_dir = _absolute_path(project.logging_dir)
        self._log_with = log_with
        self._given = given
        """The arguments that the Accelerator was given."""
        self.log_with: list[str] = []
        """The names of the trackers that `log_with` chose."""
        self._buffer: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MAX_BUFFERED)
        self._warned: set[str] = set()
        self._heard: Counter[str] = Counter()
        """Warnings of this process, and how often each came."""
        ledger = components.ledger
        self._run = _OpenRun(ledger)
        self._finalizer = self._run.finalizer = weakref.finalize(self, _close_abandoned_run, self._run)
        atexit.register(self._finalizer)  # before the group is closed: handlers run in the other order than they were registered
        self._memory = watch_memory(self._tensors, self._snapshot_folder, self._tell_snapshot)
        ledger.sinks.append(partial(call_if_alive, weakref.WeakMethod(self.interval)))
        ledger.event_sinks.append(partial(call_if_alive, weakref.WeakMethod(self.event)))
        self._hears = partial(call_if_alive, weakref.WeakMethod(self._hear))
        components.state.runtime.warning_listeners.append(self._hears)
        if log_with is not None or project.project_dir is not None:
            self.trackers  # noqa: B018  # a wrong log_with is an error now

    @cached_property
    def trackers(self) -> Trackers:
        """The trackers of `log_with`, and the local one as well where the run has a folder."""
        from slipstream.files.object_store import is_url
        from slipstream.observability.trackers.local import LocalTracker
        from slipstream.observability.trackers.registry import ChosenTrackers, Trackers, resolve_trackers

        chosen = resolve_trackers(self._log_with, self._logging_dir)
        self.log_with = [tracker.name for tracker in chosen]
        if self._root is not None and not is_url(self._root) and LocalTracker.name not in self.log_with:
            chosen = ChosenTrackers([*chosen, LocalTracker], chosen.optional)
        return Trackers(chosen, self._logging_dir, is_main_process=self._components.state.is_main_process)

    # -- start ----------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> RunFolder | None:
        """The folder of the current run, on the process that writes it."""
        return self._run.folder

    @property
    def run_dir(self) -> Path | None:
        """The path of that folder."""
        return None if self.folder is None else self.folder.path

    @property
    def root(self) -> Path | None:
        """The folder of all runs; None without a `project_dir`, and on processes that do not write."""
        if self._root is None or not self._components.state.is_main_process:
            return None
        from slipstream.files.object_store import is_url, redact

        if is_url(self._root):
            self._warn(f"project_dir={redact(self._root)} is not a local folder: this run has no run directory, and no report is written")
            return None
        return Path(self._root)

    def begin(self, project: str, config: Any, init_kwargs: Mapping[str, Any] | None) -> None:
        """Start a named run: its folder, then the trackers. Wrong arguments raise an error before anything is created."""
        self.trackers.check(project, config, init_kwargs)
        if self.folder is not None:
            self._close("finished")  # one that was made without a name, before this call
        if self.root is not None:
            local = dict((init_kwargs or {}).get("local", {}))
            self._open(project, local.get("name"), resume=bool(local.get("resume", False)), config=config)
        try:
            self.trackers.start(project, config, init_kwargs, folder=self.folder)
        except BaseException:
            self._close("failed")
            raise

    def _open(self, project: str, name: str | None = None, *, resume: bool = False, config: Any = None) -> None:
        from slipstream.observability.run_dir.environment import describe_device, environment_report
        from slipstream.observability.run_dir.folder import RunFolder, git_state
        from slipstream.observability.trackers.registry import to_settings
        from slipstream.observability.trackers.values import to_plain

        root, process = self.root, self._components.state.runtime.process
        assert root is not None
        folder = RunFolder.create(
            root,
            name,
            project=project,
            resume=resume,
            run_id=None if process.run_id == "none" else process.run_id,
            restarted=process.attempt > 0,
            details={
                "command": [redact_text(argument) for argument in sys.argv],
                "git": git_state(),
                "versions": {name: version_of(name) for name in ("slipstream", "torch")} | {"python": sys.version.split()[0]},
            },
            attempt={"world_size": process.world_size, "host": process.host},
            tell=lambda error: self._warn_of("written", error),
        )
        self._run.folder = folder
        options = {name: {"value": shown, "origin": origin} for name, shown, origin in self._options()}
        settings = redact_values("config", to_plain(to_settings(config)) or {})
        self._safely("written", lambda: folder.write_json("config.json", {"settings": settings, "options": options}))
        report = environment_report(environment())
        state = self._components.state
        report["run"] = {"device": f"{state.device}: {describe_device(state.device)}", "processes": state.num_processes}
        facts = {f"{part}: {name}": str(value) for part, section in report.items() for name, value in section.items()}
        self._safely("written", lambda: folder.write_json("environment.json", facts))
        state.runtime.store_flags.agree(_FOLDER_NOTE, str(folder.path.absolute()))
        while self._buffer:
            self._write(*self._buffer.popleft())

    def _open_unnamed(self) -> None:
        """Open the folder of a script that never called `init_trackers`."""
        self._safely("made", lambda: self._open(Path(sys.argv[0]).stem or "run"))

    def _options(self) -> list[tuple[str, Any, str]]:
        from slipstream.observability.trackers.values import to_plain

        choices = self._components.state.options
        found = [(name, choice.value, str(choice.origin)) for name, choice in choices.items()]
        found += [(name, value, f"from Accelerator({name}=...)") for name, value in self._given.items() if name not in choices]
        return [(name, redact_values(name, to_plain(value)), origin) for name, value, origin in found]

    # -- records --------------------------------------------------------------------------------------------------

    def interval(self, interval: dict[str, Any]) -> None:
        """Record where the time of an interval went, on all processes."""
        self._write("interval", interval)

    def event(self, event: Mapping[str, Any]) -> None:
        """Record an event: kind, text, and further fields."""
        self._write("event", {"time": time.time(), "step": None, "rank": None, "text": "", **event})

    def _hear(self, logger: str, text: str) -> None:
        """Record a warning of this process, the first times that it comes; findings of guards are events of their own."""
        if logger.startswith(_GUARDS) or (text not in self._heard and len(self._heard) >= _MAX_BUFFERED):
            return
        self._heard[text] += 1
        if self._heard[text] <= _MAX_SAME_WARNING:
            self._tell("warning", redact_text(text))

    def trace(self, path: Path) -> None:
        """Record that the profiler has written a trace."""
        self._tell("trace", path.name, path=str(path))

    def _tell(self, kind: str, text: str, **details: Any) -> None:
        ledger = self._components.ledger
        ledger.tell({"kind": kind, "text": text, **details, "step": ledger.step or None})

    @contextmanager
    def timed(self, kind: str) -> Iterator[dict[str, Any]]:
        """Record a block as an event, with its duration and what is put into the dict."""
        details: dict[str, Any] = {}
        began = time.perf_counter()
        yield details
        self.event({"kind": kind, "step": self._components.ledger.step, "seconds": round(time.perf_counter() - began, 6), **details})

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        if self.root is None:
            return
        if self.folder is not None:
            self._safely("written", lambda: self._put(kind, record))
            return
        self._buffer.append((kind, record))
        if kind == "interval":  # the script trains and has not named its run
            self._open_unnamed()

    def _put(self, kind: str, record: dict[str, Any]) -> None:
        from slipstream.observability.trackers.values import to_plain

        assert self.folder is not None
        if kind == "event":
            self.folder.add_event(to_plain(record))
        else:
            if self._run.journal is None:
                self._run.journal = self.folder.journal("ledger.jsonl")
            self._run.journal.append(to_plain(record))

    def _safely(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a full disk or a removed folder must not end the training
            self._warn_of(what, error)

    def _warn_of(self, what: str, error: Exception) -> None:
        self._warn(f"the folder of the run could not be {what} ({type(error).__name__}: {error}); training continues without it")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            get_logger(__name__).warning(text)

    # -- out of memory (observability/memory.py) ------------------------------------------------------------------

    def _tensors(self) -> Iterable[NamedTensor]:
        models = [model.original for model in self._components.stepper.models]
        return named_tensors(models, [optimizer.optimizer for optimizer in self._components.registry.optimizers])

    def _snapshot_folder(self) -> Path | None:
        """Return the folder of the run, which the main process has published for the others."""
        if self.folder is not None:
            return self.folder.path
        notes = self._components.state.runtime.store_flags
        return Path(notes.agree(_FOLDER_NOTE, "")) if notes.is_set(_FOLDER_NOTE) else None

    def _tell_snapshot(self, path: Path, snapshot: MemorySnapshot) -> None:
        ledger = self._components.ledger
        ledger.tell({"kind": "memory", "text": "memory ran out", "path": path.name, "step": ledger.step})
        ledger.leave()  # the process ends before the next interval

    # -- end ------------------------------------------------------------------------------------------------------

    def end(self, state: str = "finished") -> Path | None:
        """End ledger, trackers and run, and print where the time went; return the path of the report that was written."""
        ledger = self._components.ledger
        report = ledger.finish()
        self._finalizer.detach()
        atexit.unregister(self._finalizer)
        if report.steps and report.seconds >= _MIN_SUMMARY_SECONDS and ledger.options.summary and self._components.state.is_main_process:
            print(f"\n{report.table()}", file=sys.stderr, flush=True)
        self._memory.close()
        with suppress(ValueError):
            self._components.state.runtime.warning_listeners.remove(self._hears)
        if "trackers" in vars(self):
            self.trackers.finish()
        if self.folder is None and self._buffer and self.root is not None:
            self._open_unnamed()
        folder = self.folder
        if folder is None:
            return None
        self._close(state)
        written: list[Path] = []
        self._safely("shown", lambda: written.append(_write_report(folder)))
        if written and ledger.options.summary:
            print(f"report: {written[0].absolute()}", file=sys.stderr, flush=True)
        return written[0] if written else None

    def _close(self, state: str) -> None:
        folder, journal = self._run.folder, self._run.journal
        self._run.folder = self._run.journal = None
        if folder is not None:
            self._safely("written", lambda: folder.event("end", state))
            self._safely("closed", lambda: folder.end(state))
        if journal is not None:
            journal.close()


def attach_guards(components: Components, options: GuardKwargs | None) -> Guards:
    """Create the guards of an Accelerator and attach them to its ledger, clipper and strategy."""
    from slipstream.distributed.collectives import gather_objects

    state = components.state

    def exchange(value: Any, reason: str = "") -> list[Any]:
        return gather_objects(state.channel(), state.limits, value, operation="guards", reason=reason) or []

    guards = Guards(
        options or GuardKwargs(),
        components.stepper,
        rank=state.process_index,
        world_size=state.num_processes,
        local_ranks=state.runtime.process.local_world_size,
        registry=components.registry,
        exchange=exchange,
        store=lambda: state.runtime.store,
    )
    guards.attach(components.ledger, components.clipper, components.strategy)
    return guards


def _absolute_path(given: str | None) -> str | None:
    """Return a folder as a path that does not depend on the working directory; a URL of something else as it is.

    >>> _absolute_path("file:///data/run"), _absolute_path("s3://bucket/run"), _absolute_path(None)
    ('/data/run', 's3://bucket/run', None)
    """
    if given is None:
        return None
    from slipstream.files.object_store import is_url, local_path

    return given if is_url(given) else os.path.abspath(os.path.expanduser(local_path(given)))


def _write_report(folder: RunFolder) -> Path:
    from slipstream.observability.report import write

    return write([folder.path], folder.path / "report.html")


@dataclass
class _OpenRun:
    """The resources to close if the script ends, or drops its Accelerator, without end_training."""

    ledger: Ledger
    folder: RunFolder | None = None
    journal: JsonLinesWriter | None = None
    process: int = field(default_factory=os.getpid)
    finalizer: weakref.finalize[..., Any] | None = None
    """Calls `_close_abandoned_run`, once: when the Accelerator or the process ends."""


def _close_abandoned_run(run: _OpenRun) -> None:
    """Close a run whose script ends, or drops its Accelerator, without end_training, and write its report."""
    if os.getpid() != run.process:  # a child, which has inherited it
        return
    atexit.unregister(run.finalizer)  # type: ignore[arg-type]  # it is compared, and not called
    state, why = _find_exit_state()
    if run.ledger.rank and state != "ended":  # the error itself says more, and the store may be unreachable
        return
    folder = run.folder
    try:
        run.ledger.leave(patient=state == "ended")  # report the last steps, and what other processes sent before they ended
        if run.journal is not None:
            run.journal.close()
        if folder is not None:
            folder.event("end", why)
            folder.end(state)
            _write_report(folder)
    except Exception as error:  # at exit it cannot be caught, and must not hide how the script ended
        where = "" if folder is None else f" in {folder.path}"
        print(f"slipstream: the run{where} could not be closed ({type(error).__name__}: {error})", file=sys.stderr)


def _find_exit_state() -> tuple[str, str]:
    """Return state and reason, from what the interpreter or our worker recorded of an uncaught exception."""
    kind = getattr(sys, "last_type", None)
    if kind is None:
        return "ended", "the script ended without end_training()"
    text = redact_text(next(iter(str(getattr(sys, "last_value", "")).splitlines()), ""))
    if issubclass(kind, KeyboardInterrupt) or (kind is SystemExit and text == _INTERRUPT_TEXT):
        return "interrupted", "by Ctrl-C, or another SIGINT"
    return "failed", f"{kind.__name__}: {text}".removesuffix(": ")
