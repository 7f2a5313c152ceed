"""The run directory `<project_dir>/runs/<NAME>/`, written by the main process only and readable during the run.

No torch is imported.

    run.json          what the run is: name, project, started, ended, state, attempts, git, versions
    config.json       the settings of the run, and every option with its origin
    environment.json  machine and installation, without secrets
    metrics.jsonl     what was logged, a line each (metrics.index helps readers)
    ledger.jsonl      where the time went, a line a second
    events.jsonl      starts, checkpoints, restarts, warnings
    media/            images
    report.html       the page, written at the end

A name is claimed by creating its directory, so two runs never share one by accident. A run that a launcher restarts finds its directory
by the run id and continues there. `JsonLinesWriter` appends each line with one system call: a killed process tears at most its last line,
and the next writer repairs that. Each attempt records its pid and start time, so that a reader on the same machine can tell whether a run
that calls itself running still is (`is_gone`).
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Final

from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.paths import ConfinedFolder

__all__ = [
    "FORMAT", "INDEX_EVERY", "INDEX_RECORD", "JsonLinesWriter", "RunFolder", "SILENCE_LIMIT", "find_runs", "git_state", "identify_process",
    "index_path", "is_gone", "is_run", "read_info", "replacing", "run_name", "runs_at", "started_at",
]


INDEX_EVERY: Final = 1024
"""Lines from one entry of the index to the next."""
INDEX_RECORD: Final = struct.Struct("<QQqd")
"""Number of the line, its first byte, its step (-1 for none, or one that does not fit), its time."""
_STEP_BITS: Final = 63

_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_CHUNK: Final = 1 << 20
_to_json: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def index_path(path: Path) -> Path:
    """Return the index of a file of lines.

    >>> index_path(Path("runs/first/metrics.jsonl")).name
    'metrics.index'
    """
    return path.with_suffix(".index")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Give the block a path beside `target` to write to, and rename it over `target` if the block succeeds.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "notes.txt")) as beside:
    ...         _ = beside.write_text("hello")
    ...     os.listdir(folder)
    ['notes.txt']
    """
    beside = target.with_name(f".{target.stem}.writing-{os.getpid()}{target.suffix}")
    try:
        yield beside
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


class JsonLinesWriter:
    """Lines at the end of a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = JsonLinesWriter(Path(folder) / "events.jsonl")
    ...     journal.append({"kind": "start"})
    ...     journal.close()
    ...     print(journal.path.read_text(), end="")
    {"kind":"start"}
    """

    def __init__(self, path: str | os.PathLike[str], *, indexed: bool = False) -> None:
        self.path = Path(path)
        self._file = os.open(self.path, _APPEND, 0o666)
        self._index: int | None = None
        found = os.fstat(self._file)
        self.size = found.st_size
        self._counts_links = found.st_nlink > 0
        self.lines = 0
        """Lines of the file, where there is an index; else those of this writer."""
        self._torn = self.size > 0 and _last_byte(self.path, self.size) != b"\n"
        if indexed:
            self._index = os.open(index_path(self.path), _APPEND, 0o666)
            self.lines = _count_lines(self.path) if self.size else 0
            self._trim_index()

    def append(self, record: dict[str, Any], *, step: int | None = None, time: float = 0.0) -> None:
        """Append a record as a line; `step` and `time` are for the index."""
        self.line(_to_json(record) + "\n", step, time)

    def line(self, text: str, step: int | None, time: float) -> None:
        """Append a line that is formatted already, its end included."""
        if self._torn or self.lines % INDEX_EVERY == 0:
            self._write_before(step, time)
        data = text.encode("utf-8", "backslashreplace")
        self._torn = True  # until the end of the line is in the file as well
        written = os.write(self._file, data)
        self.size += written
        if written < len(data):
            self._write(data[written:])
        self._torn = False
        self.lines += 1

    def _write_before(self, step: int | None, time: float) -> None:
        """Write what comes before some lines: the end of one that was torn, an entry of the index."""
        if self._torn:
            self._write(b"\n")
            self._torn = False
            self.lines += 1
        if self._index is not None and self.lines % INDEX_EVERY == 0:
            place = -1 if step is None or step.bit_length() > _STEP_BITS else step
            os.write(self._index, INDEX_RECORD.pack(self.lines, self.size, place, time))

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for file in (self._file, self._index):
            if file is not None and file >= 0:
                os.close(file)
        self._file, self._index = -1, None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._file < 0

    @property
    def gone(self) -> bool:
        """Whether the file was removed while it is open; False where the file system does not tell."""
        return self._counts_links and self._file >= 0 and os.fstat(self._file).st_nlink == 0

    def _write(self, data: bytes) -> None:
        while data:  # a full disk writes a part, and the next write raises
            written = os.write(self._file, data)
            self.size += written
            data = data[written:]

    def _trim_index(self) -> None:
        """Drop entries that a crash left half written, or that are ahead of the file."""
        assert self._index is not None
        whole = min(os.fstat(self._index).st_size // INDEX_RECORD.size, -(-self.lines // INDEX_EVERY))
        os.ftruncate(self._index, whole * INDEX_RECORD.size)


def _last_byte(path: Path, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(size - 1)
        return file.read(1)


def _count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(_CHUNK), b""))


SILENCE_LIMIT: Final = 60.0
"""Seconds without a new line after which a run that is running has shown no sign of life."""

_DEAD_STATES: Final = (b"Z", b"X", b"x")


def identify_process() -> dict[str, Any]:
    """Return what identifies this process later: its pid, and what makes the pid unique.

    >>> sorted(identify_process())
    ['host', 'pid', 'pid_namespace', 'pid_started']
    """
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "pid_namespace": _pid_namespace(), "pid_started": _process_state(pid)[1]}


def is_gone(info: Mapping[str, Any]) -> bool:
    """Return whether the process of the latest attempt is known to have ended; False also where that is unknown.

    >>> is_gone({"attempts": [identify_process()]}), is_gone({}), is_gone({"attempts": [{**identify_process(), "host": "elsewhere"}]})
    (False, False, False)
    """
    attempts = info.get("attempts")
    latest = attempts[-1] if isinstance(attempts, list) and attempts else None
    if not isinstance(latest, dict) or latest.get("host") != socket.gethostname() or latest.get("pid_namespace") != _pid_namespace():
        return False
    pid, started = latest.get("pid"), latest.get("pid_started")
    if type(pid) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)  # no signal: it asks whether there is such a process
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's, or no number of a process
        return False
    state, since = _process_state(pid)
    return state in _DEAD_STATES or (since is not None and started is not None and since != started)


def _pid_namespace() -> int | None:
    """Return the pid namespace: processes of a container have pids of their own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # a system without it
        return None


def _process_state(pid: int) -> tuple[bytes | None, int | None]:
    """Return the state of a process and when it was started, in the clock of the kernel; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None, None


FORMAT: Final = "slipstream run"
_VERSION: Final = 1
_MAX_NAME: Final = 120
_INFO: Final = "run.json"
_RUN_FILES: Final = (_INFO, "metrics.jsonl")
"""A folder with one of these looks like a run."""
_UNBEGUN_FILES: Final = ("metrics.jsonl", "metrics.index", "ledger.jsonl", "events.jsonl", "config.json", "environment.json")
_MAX_INFO_BYTES: Final = 1 << 20


class RunFolder:
    """The folder of one run, as its main process writes it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as project:
    ...     folder = RunFolder.create(project, "first", project="spirals")
    ...     folder.event("start", "one process")
    ...     folder.end("finished")
    ...     folder.path.relative_to(project).as_posix(), sorted(file.name for file in folder.path.iterdir())
    ('runs/first', ['events.jsonl', 'run.json'])
    """

    def __init__(self, path: Path, info: dict[str, Any], *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self.info = info
        self._now = now
        self._events: JsonLinesWriter | None = None
        self._is_behind = False
        """Whether run.json could not be written at the start: it is tried again with every event."""

    @property
    def name(self) -> str:
        """The name of the run: that of its folder."""
        return self.path.name

    # -- beginning and end ----------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str],
        name: str | None = None,
        *,
        project: str,
        resume: bool = False,
        run_id: str | None = None,
        restarted: bool = False,
        details: Mapping[str, Any] | None = None,
        attempt: Mapping[str, Any] | None = None,
        tell: Callable[[OSError], None] | None = None,
    ) -> RunFolder:
        """Create the folder of a run below `<root>/runs`, or find the one of an earlier attempt.

        Without a name the run is named after project and time. A name that is taken is an error, unless `resume` continues that run.
        `restarted` means that a launcher restarted the job `run_id`. `details` are fields of run.json, and `attempt` describes this start
        (world size, hosts); pid and host are added to it, so that readers can tell whether the process still runs. If the folder is there
        and cannot be written (the disk is full), `tell` hears of it, and later writes may succeed; without it that is an error.
        """
        runs = Path(root) / "runs"
        earlier = _find_by_run_id(runs, run_id) if restarted else None
        if earlier is not None:
            return cls.open(earlier)._begin(attempt, "restart", tell)
        if name is not None:
            _check_name(name)
        try:
            runs.mkdir(parents=True, exist_ok=True)
            path = _claim_folder(runs, name, run_name(project))
        except FileExistsError:
            if name is None or not runs.is_dir():
                raise ConfigError(f"{runs} exists and is not a folder: move it away, or give a different project_dir") from None
            path = runs / name
            if resume and is_run(path):
                return cls.open(path)._begin(attempt, "restart", tell)
            if not (resume or restarted) or not _is_unbegun(path):
                raise ConfigError(_name_taken(runs, name)) from None
        except OSError as error:
            raise ConfigError(
                f"the folder of the run cannot be made below {runs} ({error.strerror}): give a folder of yours as project_dir"
            ) from error
        info = {
            "format": FORMAT,
            "version": _VERSION,
            "name": path.name,
            "project": project,
            "id": run_id,
            "started": time.time(),
            "ended": None,
            "state": "running",
            "attempts": [],
            **(details or {}),
        }
        return cls(path, info)._begin(attempt, "start", tell)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Return the folder of a run that is there."""
        return cls(Path(path), read_info(Path(path)))

    def _begin(self, attempt: Mapping[str, Any] | None, kind: str, tell: Callable[[OSError], None] | None) -> RunFolder:
        earlier = self.info.get("attempts")
        attempts = [*(earlier if isinstance(earlier, list) else ()), {"started": self._now(), **identify_process(), **(attempt or {})}]
        size = (attempt or {}).get("world_size")
        try:
            self.update(attempts=attempts, state="running", ended=None)
            if kind == "restart" or size is not None:
                processes = "" if size is None else f"{size} process{'' if size == 1 else 'es'}"
                self.event(kind, processes if kind == "start" else f"attempt {len(attempts)}, {processes}".rstrip(", "))
        except OSError as error:
            if tell is None:
                raise
            self._is_behind = True
            tell(error)
        return self

    def end(self, state: str) -> None:
        """Record how the run ended ("finished", "ended" without end_training, "interrupted" or "failed") and close its files."""
        self.update(state=state, ended=self._now())
        if self._events is not None:
            self._events.close()
            self._events = None

    # -- writing --------------------------------------------------------------------------------------------------

    def update(self, **fields: Any) -> None:
        """Change fields of run.json."""
        self.info.update(fields)
        self.write_json(_INFO, self.info)
        self._is_behind = False

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file; a reader sees the old one or the new one."""
        text = json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
        with replacing(self.path / name) as beside:
            beside.write_text(text, encoding="utf-8", errors="backslashreplace")

    def journal(self, name: str, *, indexed: bool = False) -> JsonLinesWriter:
        """Return a file of JSON lines, which the caller closes."""
        return JsonLinesWriter(self.path / name, indexed=indexed)

    def event(self, kind: str, text: str = "", *, step: int | None = None, rank: int | None = None, **details: Any) -> None:
        """Record what happens now, for the time axis of the report."""
        self.add_event({"time": self._now(), "kind": kind, "step": step, "rank": rank, "text": text, **details})

    def add_event(self, event: Mapping[str, Any]) -> None:
        """Record an event that has its own time."""
        if self._is_behind:
            self.update()
        if self._events is None:
            self._events = self.journal("events.jsonl")
        self._events.append(dict(event))


# -- names ----------------------------------------------------------------------------------------------------------------


def run_name(project: str, now: float | None = None) -> str:
    """Return a name for a run that has none: the project and the time.

    >>> run_name("my project/7", now=0.0)
    'my-project-7-19700101-000000'
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    plain = re.sub(r"[^\w.]+", "-", project).strip("-.")[: _MAX_NAME - 20]
    return f"{plain or 'run'}-{stamp}"


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name or len(name) > _MAX_NAME or name.startswith(".") or re.search(r"[/\\\x00-\x1f:]", name):
        raise ConfigError(
            f"the name of a run, {name!r}, cannot be that of a folder: write letters, digits, '-', '_' and '.', at most {_MAX_NAME} of them"
        )


def _claim_folder(runs: Path, name: str | None, otherwise: str) -> Path:
    if name is not None:
        (runs / name).mkdir()
        return runs / name
    for number in range(1, 1000):
        path = runs / (otherwise if number == 1 else f"{otherwise}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise ConfigError(f"there are a thousand runs named {otherwise} below {runs}: name this one")


def _is_unbegun(path: Path) -> bool:
    """Return whether a folder was made for a run that ended before it could write run.json: killed, or on a full disk."""
    return path.is_dir() and all(name.startswith(".") or name in _UNBEGUN_FILES for name in os.listdir(path))


def _name_taken(runs: Path, name: str) -> str:
    there = runs / name
    if not is_run(there):
        return f"{there} exists and is not a run: choose a different name, or move it away"
    info = read_info(there)
    state = "killed" if info.get("state") == "running" and is_gone(info) else info.get("state")
    return (
        f"a run named {name!r} exists ({there}, started {_format_time(started_at(info))}, {state}): choose a different name, or pass "
        "resume=True to continue it: init_trackers(..., init_kwargs={'local': {'name': ..., 'resume': True}})."
    )


def _format_time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # no time of this calendar
        return "at an unknown time"


def _find_by_run_id(runs: Path, run_id: str | None) -> Path | None:
    """Return the newest run with this id, which a launcher gives to all attempts of a job."""
    if not run_id or run_id == "none" or not runs.is_dir():
        return None
    found = [path for path, info in _runs_in(runs) if info.get("id") == run_id]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


# -- reading --------------------------------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run."""
    try:
        return bool(read_info(path))
    except ConfigError:
        return False


def read_info(path: Path) -> dict[str, Any]:
    """Return run.json of a folder; raise a ConfigError if there is none or it is something else."""
    try:
        with ConfinedFolder(path) as folder:  # does not follow links or wait for pipes
            info = json.loads(folder.read(_INFO, _MAX_INFO_BYTES), parse_float=_finite, parse_constant=_finite)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not the folder of a run: it has no {_INFO}") from None
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise ConfigError(f"{path / _INFO} cannot be read as the description of a run ({error})") from None
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise ConfigError(f"{path / _INFO} does not describe a run of slipstream")
    if info.get("version") != _VERSION:
        raise ConfigError(
            f"{path / _INFO} is of version {info.get('version')!r} and this installation reads {_VERSION}: use the slipstream that wrote it"
        )
    return info


def _finite(text: str) -> float | None:
    """Return a finite number, else None."""
    return value if isfinite(value := float(text)) else None


def started_at(info: Mapping[str, Any]) -> float:
    """Return when a run began; 0 if its file has no valid number.

    >>> started_at({"started": 5}), started_at({"started": "now"})
    (5.0, 0.0)
    """
    value = info.get("started")
    try:
        return float(value) if isinstance(value, (int, float)) and isfinite(value) else 0.0
    except OverflowError:
        return 0.0


def find_runs(path: str | os.PathLike[str], left_out: list[tuple[Path, str]] | None = None) -> list[Path]:
    """Return the runs at a place, oldest first: the place itself, or folders in it or in its `runs/`.

    Folders in there that look like runs and cannot be read as such go to `left_out`, with the reason.

    >>> find_runs("no/such/place")
    Traceback (most recent call last):
        ...
    slipstream.errors.ConfigError: no/such/place does not exist: give the folder of a run, or a project_dir that has runs/ in it
    """
    place, broken = Path(path), [] if left_out is None else left_out
    found = runs_at(place, broken)
    if found:
        return found
    damaged = [why for run, why in broken if place in run.parents]
    if damaged:
        raise ConfigError(f"{place} has no run in it that can be read: " + "; ".join(damaged[:5]))
    there = ", ".join(sorted(path.name for path in place.iterdir())[:5]) if place.is_dir() else "a file"
    raise ConfigError(
        f"{place} has no run in it (there is: {there or 'nothing'}): give the folder of a run, which has a {_INFO}, or a project_dir "
        "that has runs/ in it. Runs are written where an Accelerator has a project_dir."
    )


def runs_at(place: Path, left_out: list[tuple[Path, str]]) -> list[Path]:
    """Return the runs at a place, which may have none yet."""
    if not place.exists():
        raise ConfigError(f"{place} does not exist: give the folder of a run, or a project_dir that has runs/ in it")
    if (place / _INFO).exists():
        read_info(place)
        return [place]
    for folder in (place / "runs", place):
        found = sorted((started_at(info), run) for run, info in _runs_in(folder, left_out)) if folder.is_dir() else []
        if found:
            return [run for _, run in found]
    return []


def _runs_in(folder: Path, broken: list[tuple[Path, str]] | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Return the runs in a folder with what their run.json says; those that only look like runs go to `broken`."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            yield path, read_info(path)
        except ConfigError as error:
            if broken is not None and (any(os.path.lexists(path / name) for name in _RUN_FILES) or not os.access(path, os.R_OK | os.X_OK)):
                broken.append((path, str(error)))


def git_state(folder: str | os.PathLike[str] = ".") -> dict[str, Any] | None:
    """Return commit, branch, and whether tracked files were changed; None outside a repository or without git."""
    commit = _git(folder, ["rev-parse", "HEAD"])
    if commit is None:
        return None
    changed = _git(folder, ["status", "--porcelain", "--untracked-files=no"])
    return {
        "commit": commit,
        "branch": _git(folder, ["rev-parse", "--abbrev-ref", "HEAD"]),
        "dirty": None if changed is None else bool(changed),
    }


def _git(folder: str | os.PathLike[str], arguments: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(["git", "-C", os.fspath(folder), *arguments], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a repository too large to ask: the run does without
        return None
    return done.stdout.strip() if done.returncode == 0 else None
