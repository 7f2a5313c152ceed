"""The folder of a run: `<project_dir>/runs/<NAME>/`, made once, written by the main process alone, readable while the run goes on.

    run.json          what the run is: name, project, started, ended, state, attempts, git, versions
    config.json       the settings of the run, and every option with its origin
    environment.json  machine and installation, without secrets
    metrics.jsonl     what was logged, a line each (metrics.index helps readers)
    ledger.jsonl      where the time went, a line a second
    events.jsonl      starts, checkpoints, restarts, warnings
    media/            pictures
    report.html       the page, written at the end

A name is taken by making its folder, so two runs never share one by accident. A run that a launcher starts again after a failure finds
its own folder by the identity that the launcher gave it, and goes on there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Final

from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.inside import Folder
from slipstream.runs.journal import Journal
from slipstream.runs.life import is_gone, this_process

__all__ = ["FORMAT", "RunFolder", "find_runs", "git_state", "is_run", "read_info", "run_name", "runs_at", "started_at"]

FORMAT: Final = "slipstream run"
_VERSION: Final = 1
_LONGEST: Final = 120
_INFO: Final = "run.json"
_SIGNS: Final = (_INFO, "metrics.jsonl")
"""A folder with one of these looks like a run."""
_LARGEST: Final = 1 << 20


class RunFolder:
    """The folder of one run, as its main process writes it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as project:
    ...     folder = RunFolder.create(project, "first", project="spirals")
    ...     folder.event("start", "one process")
    ...     folder.end("finished")
    ...     folder.path.relative_to(project).as_posix(), sorted(one.name for one in folder.path.iterdir())
    ('runs/first', ['events.jsonl', 'run.json'])
    """

    def __init__(self, path: Path, info: dict[str, Any], *, now: Callable[[], float] = time.time) -> None:
        self.path = path
        self.info = info
        self._now = now
        self._events: Journal | None = None

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
    ) -> RunFolder:
        """Makes the folder of a run below `<root>/runs`, or finds the one that this run began in an earlier attempt.

        Without a name it is that of the project and the time. A name that is taken is an error, unless `resume` says that the run goes
        on. `restarted` says that a launcher started the job `run_id` again. `details` are fields of run.json, and `attempt` says what
        this start of it is like (world size, hosts); the number of this process and its host stand there too, so that readers see when
        it is gone.
        """
        runs = Path(root) / "runs"
        earlier = _by_identity(runs, run_id) if restarted else None
        if earlier is not None:
            return cls.open(earlier)._begin(attempt, "restart")
        if name is not None:
            _check(name)
        try:
            runs.mkdir(parents=True, exist_ok=True)
            path = _claimed(runs, name, run_name(project))
        except FileExistsError:
            if name is None or not runs.is_dir():
                raise ConfigError(f"{runs} is there already and is no folder: move it away, or give another project_dir") from None
            if resume and is_run(runs / name):
                return cls.open(runs / name)._begin(attempt, "restart")
            raise ConfigError(_taken(runs, name)) from None
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
        return cls(path, info)._begin(attempt, "start")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that is there."""
        return cls(Path(path), read_info(Path(path)))

    def _begin(self, attempt: Mapping[str, Any] | None, kind: str) -> RunFolder:
        earlier = self.info.get("attempts")
        attempts = [*(earlier if isinstance(earlier, list) else ()), {"started": self._now(), **this_process(), **(attempt or {})}]
        self.update(attempts=attempts, state="running", ended=None)
        size = (attempt or {}).get("world_size")
        if kind == "restart" or size is not None:
            processes = "" if size is None else f"{size} process{'' if size == 1 else 'es'}"
            self.event(kind, processes if kind == "start" else f"attempt {len(attempts)}, {processes}".rstrip(", "))
        return self

    def end(self, state: str) -> None:
        """Notes how the run ended ("finished", "ended" without end_training, "interrupted" or "failed") and lets go of its files."""
        self.update(state=state, ended=self._now())
        if self._events is not None:
            self._events.close()
            self._events = None

    # -- writing --------------------------------------------------------------------------------------------------

    def update(self, **fields: Any) -> None:
        """Changes fields of run.json."""
        self.info.update(fields)
        self.write_json(_INFO, self.info)

    def write_json(self, name: str, value: Any) -> None:
        """A file as a whole; a reader sees the old one or the new one."""
        text = json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False)
        self.write_text(name, text + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """The same for a text."""
        target = self.path / name
        beside = target.with_name(f".{name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(beside, target)
        return target

    def journal(self, name: str, *, indexed: bool = False) -> Journal:
        """A file of JSON lines, to be closed by who asked for it."""
        return Journal(self.path / name, indexed=indexed)

    def event(self, kind: str, text: str = "", *, step: int | None = None, rank: int | None = None, **details: Any) -> None:
        """Notes what happens now, for the time axis of the report."""
        self.add_event({"time": self._now(), "kind": kind, "step": step, "rank": rank, "text": text, **details})

    def add_event(self, event: Mapping[str, Any]) -> None:
        """The same for what was noted elsewhere, with the time that it has."""
        if self._events is None:
            self._events = self.journal("events.jsonl")
        self._events.append(dict(event))


# -- names ----------------------------------------------------------------------------------------------------------------


def run_name(project: str, now: float | None = None) -> str:
    """A name for a run that has none: the project and the time.

    >>> run_name("my project/7", now=0.0)
    'my-project-7-19700101-000000'
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    plain = re.sub(r"[^\w.]+", "-", project).strip("-.")[: _LONGEST - 20]
    return f"{plain or 'run'}-{stamp}"


def _check(name: str) -> None:
    if not isinstance(name, str) or not name or len(name) > _LONGEST or name.startswith(".") or re.search(r"[/\\\x00-\x1f:]", name):
        raise ConfigError(
            f"the name of a run, {name!r}, cannot be that of a folder: write letters, digits, '-', '_' and '.', at most {_LONGEST} of them"
        )


def _claimed(runs: Path, name: str | None, otherwise: str) -> Path:
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


def _taken(runs: Path, name: str) -> str:
    there = runs / name
    if not is_run(there):
        return f"{there} is there already and is no run: choose another name, or move it away"
    info = read_info(there)
    state = "killed" if info.get("state") == "running" and is_gone(info) else info.get("state")
    return (
        f"a run named {name!r} is there already ({there}, started {_moment(started_at(info))}, {state}): choose another name, or say "
        "resume=True to go on in its folder. Both go with init_trackers(..., init_kwargs={'local': {'name': ..., 'resume': True}})."
    )


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # no time of this calendar
        return "nobody knows when"


def _by_identity(runs: Path, run_id: str | None) -> Path | None:
    """The run that carries this identity, newest first; a launcher gives one to all attempts of a job."""
    if not run_id or run_id == "none" or not runs.is_dir():
        return None
    found = [path for path, info in _runs_in(runs) if info.get("id") == run_id]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


# -- reading --------------------------------------------------------------------------------------------------------------


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    try:
        return bool(read_info(path))
    except ConfigError:
        return False


def read_info(path: Path) -> dict[str, Any]:
    """run.json of a folder; a ConfigError where there is none or it is something else."""
    try:
        with Folder(path) as folder:  # which follows no link and waits for no pipe
            info = json.loads(folder.read(_INFO, _LARGEST), parse_float=_finite, parse_constant=_finite)
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
    """A number that can be written down again."""
    return value if isfinite(value := float(text)) else None


def started_at(info: Mapping[str, Any]) -> float:
    """When a run began, whatever its file says: 0 where that is no number.

    >>> started_at({"started": 5}), started_at({"started": "now"})
    (5.0, 0.0)
    """
    value = info.get("started")
    try:
        return float(value) if isinstance(value, (int, float)) and isfinite(value) else 0.0
    except OverflowError:
        return 0.0


def find_runs(path: str | os.PathLike[str], left_out: list[tuple[Path, str]] | None = None) -> list[Path]:
    """The runs at a place, oldest first: it is one itself, or has them in it, or in `runs/`.

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
    damaged = [why for one, why in broken if place in one.parents]
    if damaged:
        raise ConfigError(f"{place} has no run in it that can be read: " + "; ".join(damaged[:5]))
    there = ", ".join(sorted(one.name for one in place.iterdir())[:5]) if place.is_dir() else "a file"
    raise ConfigError(
        f"{place} has no run in it (there is: {there or 'nothing'}): give the folder of a run, which has a {_INFO}, or a project_dir "
        "that has runs/ in it. Runs are written where an Accelerator has a project_dir."
    )


def runs_at(place: Path, left_out: list[tuple[Path, str]]) -> list[Path]:
    """The same where there may be none yet."""
    if not place.exists():
        raise ConfigError(f"{place} does not exist: give the folder of a run, or a project_dir that has runs/ in it")
    if (place / _INFO).exists():
        read_info(place)
        return [place]
    for folder in (place / "runs", place):
        found = sorted((started_at(info), one) for one, info in _runs_in(folder, left_out)) if folder.is_dir() else []
        if found:
            return [one for _, one in found]
    return []


def _runs_in(folder: Path, broken: list[tuple[Path, str]] | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The runs in a folder with what their run.json says; those that only look like runs go to `broken`."""
    for one in sorted(folder.iterdir()):
        if one.is_symlink() or not one.is_dir():
            continue
        try:
            yield one, read_info(one)
        except ConfigError as error:
            if broken is not None and (any(os.path.lexists(one / name) for name in _SIGNS) or not os.access(one, os.R_OK | os.X_OK)):
                broken.append((one, str(error)))


def git_state(folder: str | os.PathLike[str] = ".") -> dict[str, Any] | None:
    """Commit, branch, and whether files that git knows were changed; None outside of a repository or without git."""
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
