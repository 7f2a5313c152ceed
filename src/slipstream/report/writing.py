"""The report as a file: reads runs, thins what they logged, puts their pictures into the page, and replaces the file as a whole.

Only a report is ever replaced: a file that is something else stays, and so does everything in the folder of a run but its `report.html`.

A run that goes on can be reported too: the page shows what there is. A picture that cannot be read, or that would make the page too large
to open, is left out, and the page says so.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.inside import Folder
from slipstream.report.page import is_report, render
from slipstream.runs.folder import find_runs
from slipstream.runs.reading import Run

__all__ = ["document", "write"]

_MOST_POINTS: Final = 1_000_000
"""Points in one page: with very many series each gets fewer."""
_MOST_PICTURES: Final = 24 << 20
"""Bytes of all pictures in one page; the newest go in first."""

_KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp", ".bmp": "image/bmp"}
)

_AnyPath = str | os.PathLike[str]


def write(
    paths: _AnyPath | Sequence[_AnyPath],
    output: _AnyPath | None = None,
    *,
    title: str | None = None,
    points: int = 4000,
    left_out: list[tuple[Path, str]] | None = None,
) -> Path:
    """Writes the page of these runs and returns its path.

    Each path is the folder of a run, or a folder with runs in it. Without `output` the page of one run is `report.html` in its folder,
    and that of several is `report.html` here. `points` is what a curve keeps at most: first, last, lowest and highest of each part of it.
    Folders that look like runs and cannot be read are not in it: the page says so, and they go to `left_out`, with the reason.

    >>> import tempfile
    >>> from slipstream.runs.folder import RunFolder
    >>> with tempfile.TemporaryDirectory() as project:
    ...     run = RunFolder.create(project, "first", project="spirals")
    ...     run.end("finished")
    ...     write(run.path).relative_to(project).as_posix()
    'runs/first/report.html'
    """
    broken: list[tuple[Path, str]] = [] if left_out is None else left_out
    folders = _folders(paths, broken)
    target = Path(output) if output is not None else folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    _check_target(target)
    _replace(target, render(_views(folders, points), title=title, left_out=broken))
    return target


def document(
    paths: _AnyPath | Sequence[_AnyPath],
    *,
    title: str | None = None,
    points: int = 4000,
    left_out: list[tuple[Path, str]] | None = None,
) -> str:
    """The page that `write` writes, as text."""
    broken: list[tuple[Path, str]] = [] if left_out is None else left_out
    folders = _folders(paths, broken)
    return render(_views(folders, points), title=title, left_out=broken)


def _folders(paths: _AnyPath | Sequence[_AnyPath], left_out: list[tuple[Path, str]]) -> list[Path]:
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    folders = list(dict.fromkeys(folder for path in given for folder in find_runs(path, left_out)))
    if not folders:
        raise ConfigError("No run was given to report: give the folder of a run, or a project_dir that has runs/ in it.")
    return folders


def _check_target(target: Path) -> None:
    """Refuses a place where something would be lost."""
    if target.is_dir():
        raise ConfigError(f"The output {target} is a folder: give the name of a file, such as {target / 'report.html'}.")
    whole = target.parent.resolve() / target.name
    run = next((folder for folder in whole.parents if (folder / "run.json").exists()), None)
    if run is not None and whole != run / "report.html":
        raise ConfigError(
            f"The output {target} lies in the folder of a run, where only {run / 'report.html'} is a report: give another place."
        )
    if not target.exists():
        return
    try:
        ours = target.is_file() and is_report(_start(target))
    except OSError:  # it cannot be read, so nobody knows what would be lost
        ours = False
    if not ours:
        raise ConfigError(f"The output {target} exists and is no report of slipstream, so it stays: give another name, or remove it first.")


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8192)


def _views(folders: Iterable[Path], points: int) -> list[dict[str, Any]]:
    runs = [Run(folder) for folder in folders]
    for run in runs:
        run.refresh()
    names = sum(len(run.series) for run in runs)
    each = max(50, min(points, _MOST_POINTS // max(1, names)))
    room = _MOST_PICTURES // len(runs)
    return [{**(view := run.view(points=each)), "images": _pictures(run.path, view["images"], room)} for run in runs]


def _pictures(folder: Path, images: Mapping[str, Sequence[Mapping[str, Any]]], room: int) -> dict[str, list[dict[str, Any]]]:
    """The pictures as data: URIs, the newest of each name first, as long as there is room."""
    found = {name: [{"step": one["step"], "time": one["time"]} for one in shots] for name, shots in images.items()}
    ages = sorted((age, name) for name, shots in images.items() for age in range(1, len(shots) + 1))
    with Folder(folder) as inside:
        for age, name in ages:
            place = len(images[name]) - age
            sources, left_out = [], False
            for path in images[name][place]["paths"]:
                source = _data_uri(inside, path, room)
                room -= len(source or "")
                left_out |= source is None
                sources += [source] if source is not None else []
            found[name][place].update({"sources": sources, "left_out": left_out})
    return found


def _data_uri(folder: Folder, path: str, room: int) -> str | None:
    kind = _KINDS.get(PurePosixPath(path).suffix.lower())
    if kind is None or room <= 0:
        return None
    try:
        data = folder.read(path, room * 3 // 4)
    except CheckpointError:  # gone, no regular file, or too large: the page says that it is not there
        return None
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _replace(target: Path, text: str) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"The report {target} cannot be written: {error.strerror}. Give another place, with -o FILE.") from error
