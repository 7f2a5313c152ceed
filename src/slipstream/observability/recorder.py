"""`RunRecorder` connects run directory, trackers, ledger, guards and the final report for one Accelerator.

With a `project_dir` the main process writes `<project_dir>/runs/<NAME>/`. `init_trackers` creates it; in a script without that call, the
first record does. Records that come earlier are buffered. Other processes, and runs without a `project_dir`, write no files: their
records reach the main process through the ledger's store exchange, or go to the terminal.

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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config.handlers import ProjectConfiguration
from slipstream.config.redaction import redact_text, redact_values
from slipstream.config.sources import environment
from slipstream.devices.packages import version_of
from slipstream.distributed.collectives import gather_objects
from slipstream.files.object_store import is_url, local_path, redact
from slipstream.logging import get_logger
from slipstream.observability.guards.monitor import Guards
from slipstream.observability.memory import MemorySnapshot, NamedTensor, named_tensors, watch_memory
from slipstream.observability.options import GuardKwargs
from slipstream.observability.run_dir.environment import environment_report
from slipstream.observability.run_dir.folder import JsonLinesWriter, RunFolder, git_state
from slipstream.observability.timing.ledger import Ledger
from slipstream.observability.trackers.local import LocalTracker
from slipstream.observability.trackers.registry import ChosenTrackers, Trackers, to_settings
from slipstream.observability.trackers.values import to_plain

if TYPE_CHECKING:
    from slipstream.accelerator.components import Components

__all__ = ["RunRecorder", "attach_guards", "absolute_place", "add_local_tracker"]

_GUARDS = "slipstream.guards"
_FOLDER_NOTE = "folder of the run"
_MAX_SAME_WARNING = 3
"""How often one and the same warning is noted."""
_INTERRUPT_TEXT = f"exit code {128 + signal.SIGINT}"
"""What our worker notes of a script that caught Ctrl-C and exits as shells expect it."""
_MIN_SUMMARY_SECONDS = 1.0
"""Seconds of training below which the end says nothing of where they went."""
_MAX_WAITING = 1000
"""Events and intervals that wait for a folder."""


class RunRecorder:
    """The folder of the run of one Accelerator, and what goes into it."""

    def __init__(self, parts: Components, project: ProjectConfiguration, trackers: Trackers, told: Mapping[str, Any]) -> None:
        self._parts = parts
        self._root = absolute_place(project.project_dir)
        self._trackers = trackers
        self._told = told
        """The arguments of the Accelerator that were given."""
        self.folder: RunFolder | None = None
        self._ledger: JsonLinesWriter | None = None
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_MAX_WAITING)
        self._said: set[str] = set()
        self._heard: Counter[str] = Counter()
        """Warnings of this process, and how often each came."""
        self._open_run = _OpenRun(parts.ledger)
        self._left = self._open_run.ending = weakref.finalize(self, _close_abandoned_run, self._open_run)
        atexit.register(self._left)  # before the group is closed: handlers run in the other order than they were registered
        self._memory = watch_memory(self._tensors, self._place_of_snapshots, self._tell_snapshot)
        weakly = weakref.WeakMethod
        parts.ledger.sinks.append(partial(_call_if_alive, weakly(self.interval)))
        parts.ledger.event_sinks.append(partial(_call_if_alive, weakly(self.event)))
        self._hears = partial(_call_if_alive, weakly(self._hear))
        parts.state.runtime.hearers.append(self._hears)

    # -- beginning ------------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path | None:
        """The folder of the run that is under way."""
        return None if self.folder is None else self.folder.path

    @property
    def root(self) -> Path | None:
        """Where runs are kept; None where nothing is, and on processes that do not write."""
        if self._root is None or not self._parts.state.is_main_process:
            return None
        if is_url(self._root):
            self._say(f"project_dir={redact(self._root)} is no folder of this machine, so this run gets none: no report is written")
            return None
        return Path(self._root)

    def begin(self, project: str, config: Any, init_kwargs: Mapping[str, Any] | None) -> None:
        """Begins a run under its own name: the folder, then the trackers; arguments that are wrong leave a run that goes on alone."""
        self._trackers.check(project, config, init_kwargs)
        if self.folder is not None:
            self._close("finished")  # one that was made without a name, before this call
        if self.root is not None:
            local = dict((init_kwargs or {}).get("local", {}))
            self._open(project, local.get("name"), resume=bool(local.get("resume", False)), config=config)
        try:
            self._trackers.start(project, config, init_kwargs, folder=self.folder)
        except BaseException:
            self._close("failed")
            raise

    def _open(self, project: str, name: str | None = None, *, resume: bool = False, config: Any = None) -> None:
        root, process = self.root, self._parts.state.runtime.process
        assert root is not None
        self.folder = RunFolder.create(
            root,
            name,
            project=project,
            resume=resume,
            run_id=None if process.run_id == "none" else process.run_id,
            restarted=process.attempt > 0,
            details={
                "command": [redact_text(entry) for entry in sys.argv],
                "git": git_state(),
                "versions": {name: version_of(name) for name in ("slipstream", "torch")} | {"python": sys.version.split()[0]},
            },
            attempt={"world_size": process.world_size, "host": process.host},
        )
        options = {name: {"value": shown, "origin": origin} for name, shown, origin in self._options()}
        settings = redact_values("config", to_plain(to_settings(config)) or {})
        self.folder.write_json("config.json", {"settings": settings, "options": options})
        report = environment_report(environment())
        told = {f"{part}: {name}": str(value) for part, every in report.items() for name, value in every.items()}
        self.folder.write_json("environment.json", told)
        self._parts.state.runtime.notes.agree(_FOLDER_NOTE, str(self.folder.path.absolute()))
        self._ledger = self.folder.journal("ledger.jsonl")
        self._open_run.folder, self._open_run.journal = self.folder, self._ledger
        while self._waiting:
            kind, record = self._waiting.popleft()
            self._write(kind, record)

    def _options(self) -> list[tuple[str, Any, str]]:
        choices = self._parts.state.options
        found = [(name, choice.value, str(choice.origin)) for name, choice in choices.items()]
        found += [(name, value, f"from Accelerator({name}=...)") for name, value in self._told.items() if name not in choices]
        return [(name, redact_values(name, to_plain(value)), origin) for name, value, origin in found]

    # -- what happens ---------------------------------------------------------------------------------------------

    def interval(self, interval: dict[str, Any]) -> None:
        """Where the time of an interval went, on all processes."""
        self._write("interval", interval)

    def event(self, event: Mapping[str, Any]) -> None:
        """What happened somewhere: kind, text, and whatever belongs to it."""
        self._write("event", {"time": time.time(), "step": None, "rank": None, "text": "", **event})

    def _hear(self, logger: str, text: str) -> None:
        """A warning of this process, the first times that it comes; what guards say is an event of its own."""
        if logger.startswith(_GUARDS) or (text not in self._heard and len(self._heard) >= _MAX_WAITING):
            return
        self._heard[text] += 1
        if self._heard[text] <= _MAX_SAME_WARNING:
            self._parts.ledger.tell({"kind": "warning", "text": redact_text(text), "step": self._parts.ledger.step or None})

    def trace(self, path: Path) -> None:
        """A trace of the profiler was written."""
        self._parts.ledger.tell({"kind": "trace", "text": path.name, "path": str(path), "step": self._parts.ledger.step or None})

    @contextmanager
    def timed(self, kind: str) -> Iterator[dict[str, Any]]:
        """A block whose end is an event, with the seconds that it took and what is put into the dict."""
        details: dict[str, Any] = {}
        began = time.perf_counter()
        yield details
        self.event({"kind": kind, "step": self._parts.ledger.step, "seconds": round(time.perf_counter() - began, 6), **details})

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        if self.root is None:
            return
        if self.folder is None:
            self._waiting.append((kind, record))
            if kind == "interval":  # the script trains and has not named its run
                self._safely("made", lambda: self._open(Path(sys.argv[0]).stem or "run"))
            return
        self._safely("written", lambda: self._put(kind, record))

    def _put(self, kind: str, record: dict[str, Any]) -> None:
        assert self.folder is not None
        if kind == "event":
            self.folder.add_event(to_plain(record))
        elif self._ledger is not None:
            self._ledger.append(to_plain(record))

    def _safely(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a full disk, a folder taken away: the training is worth more than its records
            self._say(f"the folder of the run could not be {what} ({type(error).__name__}: {error}); the training goes on without it")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            get_logger(__name__).warning(text)

    # -- memory that ran out (runtime/memory/) --------------------------------------------------------------------

    def _tensors(self) -> Iterable[NamedTensor]:
        models = [model.original for model in self._parts.stepper.models]
        return named_tensors(models, [optimizer.optimizer for optimizer in self._parts.registry.optimizers])

    def _place_of_snapshots(self) -> Path | None:
        """The folder of the run; other processes ask the main one's note."""
        if self.folder is not None:
            return self.folder.path
        notes = self._parts.state.runtime.notes
        return Path(notes.agree(_FOLDER_NOTE, "")) if notes.has(_FOLDER_NOTE) else None

    def _tell_snapshot(self, path: Path, snapshot: MemorySnapshot) -> None:
        ledger = self._parts.ledger
        ledger.tell({"kind": "memory", "text": "memory ran out", "path": path.name, "step": ledger.step})
        ledger.leave()  # there is no next time

    # -- the end --------------------------------------------------------------------------------------------------

    def end(self, state: str = "finished") -> Path | None:
        """Ends ledger, trackers and run, and says where the time went; the path of the report that was written."""
        report = self._parts.ledger.finish()
        self._left.detach()
        atexit.unregister(self._left)
        if (
            report.steps
            and report.seconds >= _MIN_SUMMARY_SECONDS
            and self._parts.ledger.options.summary
            and self._parts.state.is_main_process
        ):
            print(f"\n{report.table()}", file=sys.stderr, flush=True)
        self._memory.close()
        with suppress(ValueError):
            self._parts.state.runtime.hearers.remove(self._hears)
        self._trackers.finish()
        if self.folder is None and self._waiting and self.root is not None:
            self._safely("made", lambda: self._open(Path(sys.argv[0]).stem or "run"))
        folder = self.folder
        if folder is None:
            return None
        self._close(state)
        written = self._report(folder)
        if written is not None and self._parts.ledger.options.summary:
            print(f"report: {written.absolute()}", file=sys.stderr, flush=True)
        return written

    def _close(self, state: str) -> None:
        folder, ledger = self.folder, self._ledger
        self.folder = self._ledger = self._open_run.folder = self._open_run.journal = None
        if folder is not None:
            self._safely("written", lambda: folder.event("end", state))
            self._safely("closed", lambda: folder.end(state))
        if ledger is not None:
            ledger.close()

    def _report(self, folder: RunFolder) -> Path | None:
        from slipstream.observability.report import write

        written: list[Path] = []
        self._safely("shown", lambda: written.append(write([folder.path], folder.path / "report.html")))
        return written[0] if written else None


def attach_guards(parts: Components, options: GuardKwargs | None) -> Guards:
    """The guards of an Accelerator, hung in where they look."""
    state, registry = parts.state, parts.registry

    def exchange(value: Any, reason: str = "") -> list[Any]:
        return gather_objects(state.channel(), state.limits, value, operation="guards", reason=reason) or []

    guards = Guards(
        options or GuardKwargs(),
        parts.stepper,
        rank=state.process_index,
        world_size=state.num_processes,
        local_ranks=state.runtime.process.local_world_size,
        registry=registry,
        exchange=exchange,
        store=lambda: state.runtime.store,
    )
    guards.attach(parts.ledger, parts.clipper, parts.strategy)
    return guards


def absolute_place(given: str | None) -> str | None:
    """A folder that was given, as a path that stays the same wherever the script goes; a URL of something else as it is.

    >>> absolute_place("file:///data/run"), absolute_place("s3://bucket/run"), absolute_place(None)
    ('/data/run', 's3://bucket/run', None)
    """
    return given if given is None or is_url(given) else os.path.abspath(os.path.expanduser(local_path(given)))


def add_local_tracker(chosen: ChosenTrackers, project: ProjectConfiguration) -> ChosenTrackers:
    """The trackers of `log_with`, and the local one besides where the run has a folder."""
    if project.project_dir is None or is_url(project.project_dir) or any(entry.name == LocalTracker.name for entry in chosen):
        return chosen
    return ChosenTrackers([*chosen, LocalTracker], chosen.optional)


def _call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *told: Any) -> None:
    alive = method()
    if alive is not None:
        alive(*told)


@dataclass
class _OpenRun:
    """What has to be ended of a run whose script ends, or forgets its Accelerator, without end_training."""

    ledger: Ledger
    folder: RunFolder | None = None
    journal: JsonLinesWriter | None = None
    process: int = field(default_factory=os.getpid)
    ending: weakref.finalize[..., Any] | None = None
    """What calls `_close_abandoned_run`, once: at the end of the Accelerator or of the process."""


def _close_abandoned_run(run: _OpenRun) -> None:
    """A script that ends, or forgets its Accelerator, without end_training: its run has ended too, and its report is worth the most."""
    if os.getpid() != run.process:  # a child, which has inherited it
        return
    from slipstream.observability.report import write

    atexit.unregister(run.ending)  # type: ignore[arg-type]  # it is compared, and not called
    state, why = _find_exit_state()
    folder = run.folder
    if run.ledger.rank and state != "ended":  # the failure itself tells more, and the store may be out of reach
        return
    try:
        run.ledger.leave(patient=state == "ended")  # the last steps, and what other processes told before they ended
        if run.journal is not None:
            run.journal.close()
        if folder is not None:
            folder.event("end", why)
            folder.end(state)
            write([folder.path], folder.path / "report.html")
    except Exception as error:  # at exit nobody can catch it, and how the script ended counts for more
        where = "" if folder is None else f" in {folder.path}"
        print(f"slipstream: the run{where} could not be closed ({type(error).__name__}: {error})", file=sys.stderr)


def _find_exit_state() -> tuple[str, str]:
    """By what the interpreter, or our worker, noted of an exception that nobody caught."""
    kind = getattr(sys, "last_type", None)
    if kind is None:
        return "ended", "the script ended without end_training()"
    text = redact_text(next(iter(str(getattr(sys, "last_value", "")).splitlines()), ""))
    if issubclass(kind, KeyboardInterrupt) or (kind is SystemExit and text == _INTERRUPT_TEXT):
        return "interrupted", "by Ctrl-C, or another SIGINT"
    return "failed", f"{kind.__name__}: {text}".removesuffix(": ")
