"""Runs that are being watched, and their updates for every listener.

One thread looks at all runs about twice a second, reads what is new, and hands each message, encoded once, to every listener. A listener
has a short queue; one that falls behind is dropped, and its page fetches everything when it reconnects. New runs beside the watched ones
are added, deleted ones are removed. A long run is shown at once, as far as it has been read, and again every few seconds until all of it
is there. Every message and every view has a number (`at`): a page with view 7 needs the messages from 8 on, so
nothing is lost or counted twice.
"""

from __future__ import annotations

import json
import os
import queue
import stat
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, Final

from slipstream.errors import ConfigError
from slipstream.observability.run_dir.folder import find_runs, is_gone, is_run, read_info, runs_at, started_at
from slipstream.observability.run_dir.reader import Run
from slipstream.observability.run_dir.series import select_points, to_columns

__all__ = ["Listener", "RunWatcher", "WatchedRun", "encode_event", "sort_newest_first"]

_INTERVAL: Final = 0.5
_MAX_RUNS: Final = 64
"""So many of the newest runs of a folder are watched; others when they are named."""
_MAX_LISTENERS: Final = 64
_QUEUE_LENGTH: Final = 256
_FIRST_BLOCKS: Final = 8
"""Blocks that are read before the first view of a run: a tenth of a second."""
_CATCH_UP_INTERVAL: Final = 2.0
"""Seconds between two messages about a run that is still being read."""
_MAX_NEW_POINTS: Final = 1000
"""Points of one series in one message; more are thinned to this."""


def encode_event(kind: str, value: Any) -> bytes:
    r"""Return a server-sent event.

    >>> encode_event("update", {"run": "first"})
    b'event: update\ndata: {"run":"first"}\n\n'
    """
    return f"event: {kind}\ndata: {_to_json(value)}\n\n".encode()


def _to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


class WatchedRun:
    """One run that is watched; every method may be called from any thread."""

    def __init__(self, key: str, path: Path) -> None:
        self.key = key
        """The name of the run, with more words where two runs have one name."""
        self.path = path
        self.identity = _identity(path)
        """Device and inode of the folder."""
        self._run = Run(path)
        self._lock = threading.Lock()
        self._begun = False
        """Whether something has been read."""
        self._behind = False
        """Whether the last read stopped before the end of a file."""
        self._told = 0.0
        """When listeners last heard of a run that is still being read."""
        self._at = 0
        self._sent_points: dict[str, int] = {}
        self._beginnings = 0
        self._sent_others: dict[str, Any] = {}
        self._ledger_json: tuple[int, str] | None = None

    def view(self, *, only_series: bool = False, **chosen: Any) -> bytes:
        """Return `Run.view` of these arguments as JSON with the number of the last message in it; or name, number and series alone."""
        with self._lock:
            if not self._begun:
                self._run.refresh(blocks=_FIRST_BLOCKS)
                self._mark()
                self._at += 1
                self._begun, self._behind = True, self._run.progress < 1
            if only_series:
                return _to_json({"name": self.key, "at": self._at, "series": self._run.curves(**chosen)}).encode()
            found = {**self._run.view(ledger=False, **chosen), "name": self.key, "at": self._at, "read": self._run.progress}
            return f'{_to_json(found)[:-1]},"ledger":{self._ledger()}}}'.encode()

    def _ledger(self) -> str:
        """Return the columns of the ledger as JSON. They are the larger part of a view and change once a second, so the text is kept."""
        if self._ledger_json is None or self._ledger_json[0] != self._run.ledger_lines:
            self._ledger_json = self._run.ledger_lines, _to_json(to_columns(self._run.ledger))
        return self._ledger_json[1]

    @contextmanager
    def reading(self) -> Iterator[Run]:
        """Lock the run for the block and give it to the block."""
        with self._lock:
            yield self._run

    def info(self) -> dict[str, Any]:
        """Return `Run.current_info`, or run.json before the first read; empty if it cannot be read."""
        try:
            info = self._run.current_info() or read_info(self.path)
        except ConfigError:  # it was there a moment ago; its folder is being moved or deleted
            return {}
        return {**info, "state": "killed"} if info.get("state") == "running" and is_gone(info) else info

    def summary(self) -> dict[str, Any]:
        """Return the fields that a list of runs shows."""
        info = self.info()
        return {"name": self.key, "path": str(self.path), **{name: info.get(name) for name in ("project", "state", "started", "ended")}}

    def news(self) -> dict[str, Any] | None:
        """Read the next new block and return it as a message; None if there is nothing new.

        Of a run that is still being read the message is only how far it is, and that its view has changed: {} if that was said just now.
        """
        with self._lock:
            changed, self._begun = self._run.refresh(blocks=1), True
            was_behind, self._behind = self._behind, self._run.progress < 1
            if self._behind or was_behind:
                return self._catch_up()
            if not changed:
                info = self._run.current_info()
                if info == self._sent_others.get("info", info):
                    return None  # not even that it has fallen silent
            run = self._run
            self._at += 1
            found: dict[str, Any] = {"run": self.key, "at": self._at}
            if run.beginnings != self._beginnings or run.fresh_lost:
                found["reload"] = True
            else:
                sent = self._sent_points
                series = {name: self._new_points(name) for name, curve in run.series.items() if curve.count > sent.get(name, 0)}
                found.update({"series": series, "ledger": run.fresh_ledger, "events": run.fresh_events})
                found.update({name: value for name, value in self._others().items() if value != self._sent_others.get(name)})
            self._mark()
            return found

    def _catch_up(self) -> dict[str, Any]:
        if self._behind and time.monotonic() - self._told < _CATCH_UP_INTERVAL:
            return {}
        self._told = time.monotonic()
        self._at += 1
        self._mark()
        return {"run": self.key, "at": self._at, "read": self._run.progress, "reload": True}

    def _new_points(self, name: str) -> dict[str, Any]:
        series = self._run.series[name]
        start = max(series.exact, len(series) - (series.count - self._sent_points.get(name, 0)))
        places = select_points(series.values, start, len(series), _MAX_NEW_POINTS)
        return {**series.part(places), "count": series.count}

    def _others(self) -> dict[str, Any]:
        """Return the parts that are sent again as a whole when they change."""
        run = self._run
        found = {"info": run.current_info(), "config": run.config, "skipped": run.skipped}
        images = {name: list(shots) for name, shots in run.images.items()}
        return {**found, "images": images, "tables": dict(run.tables), "texts": dict(run.texts)}

    def _mark(self) -> None:
        for series in self._run.series.values():
            series.settle()
        self._sent_points = {name: series.count for name, series in self._run.series.items()}
        self._beginnings = self._run.beginnings
        self._sent_others = self._others()


def sort_newest_first(runs: Iterable[WatchedRun]) -> list[WatchedRun]:
    """Return runs in the order of lists: running ones first, then the newest first."""

    def sort_key(watched: WatchedRun) -> tuple[bool, float]:
        info = watched.info()
        return info.get("state") == "running" and "silent" not in info, started_at(info)

    return sorted(runs, key=sort_key, reverse=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and number of a folder; None if it is not there, or not a folder any more."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _is_new_run(path: Path) -> bool:
    """Return whether a folder that has appeared is a run; a pipe in the place of its file is not waited for."""
    try:
        return stat.S_ISREG(os.lstat(path / "run.json").st_mode) and is_run(path)
    except (OSError, RecursionError):  # nothing there yet, or a file that is not the JSON of a run
        return False


class Listener:
    """The queue of messages for one page."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUE_LENGTH)
        self.ended = False

    def put(self, data: bytes) -> bool:
        """Queue a message; return False if the queue is full, which ends this listener."""
        try:
            self._queue.put_nowait(data)
        except queue.Full:
            self.end()
            return False
        return True

    def end(self) -> None:
        """End the stream of messages, including those in the queue."""
        self.ended = True
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._queue.get_nowait()
            self._queue.put_nowait(None)

    def next(self, seconds: float) -> bytes | None:
        """Return the next message; an empty one after so many seconds, None at the end."""
        try:
            found = self._queue.get(timeout=seconds)
        except queue.Empty:
            return b""
        return None if self.ended else found


class RunWatcher:
    """All runs that are watched, at the places given: runs, or folders that have runs in them.

    With `wait` a folder may also be one that has no run in it yet.
    """

    def __init__(self, places: Sequence[str | os.PathLike[str]], *, interval: float = _INTERVAL, wait: bool = False) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._runs: dict[str, WatchedRun] = {}
        self._named: list[Path] = []
        """Runs that were named themselves."""
        self._parents: list[Path] = []
        self._listeners: list[Listener] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.left_out: set[Path] = set()
        """Older runs of a folder that are not watched, because there are too many."""
        self.unreadable: list[tuple[Path, str]] = []
        """Folders that looked like runs at the beginning and could not be read, with the reason."""
        for place in map(Path, places):
            found = runs_at(place, self.unreadable) if wait and place.is_dir() else find_runs(place, self.unreadable)
            if found == [place]:
                self._named.append(place)
            elif not found:
                self._parents.extend([place / "runs", place])
            else:
                self._parents.extend({run.parent: None for run in found if run.parent not in self._parents})
                self.left_out.update(found[:-_MAX_RUNS])
            self._add(found[-_MAX_RUNS:])
        self.left_out -= {run.path for run in self._runs.values()}

    def runs(self) -> list[WatchedRun]:
        """Return all runs, in the order in which they were found."""
        with self._lock:
            return list(self._runs.values())

    def summaries(self) -> list[dict[str, Any]]:
        """Return the summaries of all runs, the newest that is running first."""
        return [watched.summary() for watched in sort_newest_first(self.runs())]

    def run(self, key: str) -> WatchedRun | None:
        """Return the run of this name."""
        with self._lock:
            return self._runs.get(key)

    def listen(self) -> Listener | None:
        """Add a listener; return None if there are too many or the watcher has stopped."""
        with self._lock:
            if len(self._listeners) >= _MAX_LISTENERS or self._stop.is_set():
                return None
            listener = Listener()
            self._listeners.append(listener)
            return listener

    def forget(self, listener: Listener) -> None:
        """Remove a listener."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    @property
    def listeners(self) -> int:
        """The number of listeners."""
        with self._lock:
            return len(self._listeners)

    # -- the thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that looks for updates."""
        self._thread = threading.Thread(target=self._work, name="slipstream watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and all listeners; may be called twice."""
        self._stop.set()
        with self._lock:
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.end()
        if self._thread is not None:
            self._thread.join()

    def look(self, seconds: float = inf) -> None:
        """Look once: for new runs, for those that are gone, and for what is new in each, or as much of it as is read within some seconds.

        The thread does this again and again.
        """
        end = time.monotonic() + seconds
        if self._lose() + self._discover():
            self._publish(encode_event("runs", self.summaries()))
        unread = self.runs()
        while unread and not self._stop.is_set() and time.monotonic() < end:  # in turns: a long run does not keep the others waiting
            unread = [run for run in unread if self._tell_news(run)]

    def _tell_news(self, run: WatchedRun) -> bool:
        """Read a block of a run and publish what is new in it; return whether there may be more."""
        found = run.news()
        if found and self.listeners:
            self._publish(encode_event("update", found))
        if found is not None:
            time.sleep(0.001)  # let threads that wait for this run continue
        return found is not None

    def _work(self) -> None:
        printed: set[str] = set()
        while not self._stop.is_set():
            try:
                self.look()
            except Exception as error:  # stopping would leave a page that looks alive: print the error once and continue
                if repr(error) not in printed:
                    printed.add(repr(error))
                    traceback.print_exc()
            self._stop.wait(self._interval)

    def _publish(self, data: bytes) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            if not listener.put(data):
                self.forget(listener)

    def _lose(self) -> int:
        """Remove runs whose folder was deleted or renamed; return how many."""
        gone = [run for run in self.runs() if run.identity is None or run.identity != _identity(run.path)]
        with self._lock:
            for run in gone:
                del self._runs[run.key]
        return len(gone)

    def _discover(self) -> int:
        """Add runs that have appeared; return how many."""
        known = self.left_out | {run.path for run in self.runs()}
        new = [path for path in self._named if path not in known and _is_new_run(path)]
        for parent in self._parents:
            try:
                with os.scandir(parent) as entries:
                    names = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
            except OSError:  # the folder was moved or deleted; it may come back
                continue
            new.extend(path for path in sorted(names) if path not in known and _is_new_run(path))
        return self._add(new)

    def _add(self, paths: Iterable[Path]) -> int:
        with self._lock:
            before = len(self._runs)
            for path in paths:
                watched = WatchedRun(self._key(path), path)
                if watched.identity not in {run.identity for run in self._runs.values()}:
                    self._runs[watched.key] = watched
            return len(self._runs) - before

    def _key(self, path: Path) -> str:
        real = Path(os.path.realpath(path))
        project = real.parent.parent.name if real.parent.name == "runs" else real.parent.name
        for key in (real.name, f"{real.name} ({project})"):
            if key not in self._runs:
                return key
        return next(key for number in range(2, len(self._runs) + 3) if (key := f"{real.name} ({project} {number})") not in self._runs)
