"""Render views of runs as one self-contained HTML document, and write it as a file.

Style and script are embedded, so the page opens from a file and requests nothing; a content security policy that names both by checksum
forbids everything else. Data of a run (names, settings, messages) is a JSON block that cannot end a tag, and the script inserts it as
text, never as markup. With `live=True` the page is updated by the server that sent it.

`write` replaces the target atomically and only if it is a report; other files, and everything in a run directory except `report.html`,
are never overwritten. A run in progress can be reported too. Images that cannot be read, or that would make the page too large, are left
out, and the page says so.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import os
import sys
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata, resources
from math import nan
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.paths import ConfinedFolder
from slipstream.observability.run_dir.folder import find_runs, replacing
from slipstream.observability.run_dir.reader import Run

__all__ = ["IMAGE_TYPES", "content_security_policy", "is_report", "render_page", "render_report", "write"]


_STYLE: Final = "style.css"
_SCRIPTS: Final = (
    "dom", "format", "math", "data", "state", "marks", "plot", "lines", "areas", "heat", "overview", "curves", "ledger", "records", "live",
    "main",
)  # fmt: skip
"""In the order in which they need each other."""

_INT32_LIMIT: Final = 2**31
_GENERATOR_TAG: Final = b'<meta name="generator" content="Slipstream">'


def render_page(
    views: Iterable[Mapping[str, Any]], *, live: bool = False, title: str | None = None, left_out: Iterable[tuple[object, str]] = ()
) -> str:
    """Return the document that shows these views, laid over each other; `live` also lets it ask its server for news.

    `left_out` are folders that look like runs and cannot be read, each with the reason; the page says so.

    >>> text = render_page([{"name": "1st", "series": {"loss": {"steps": [1, 2], "times": [5.0, 6.0], "values": [0.5, None], "count": 2}}}])
    >>> text.startswith("<!doctype html>"), "https:" in text
    (True, False)
    """
    shown = _add_labels([dict(view) for view in views])
    names = [str(view["label"]) for view in shown]
    heading = title or (", ".join(names) if 0 < len(names) <= 3 else f"{len(names)} runs" if names else "Runs")
    data = {
        "title": heading,
        "live": live,
        "made": None if live else round(time.time()),
        "version": metadata.version("slipstream"),
        "left_out": [[str(path), why] for path, why in left_out],
        "views": [{**view, "series": {name: _pack_series(curve) for name, curve in view.get("series", {}).items()}} for view in shown],
    }
    style, script = _load_assets()
    return _DOCUMENT.format(
        policy=html.escape(content_security_policy(live=live)),
        title=html.escape(_escape_direction(heading)),
        style=style,
        script=script,
        data=_to_safe_json(data),
    )


_DOCUMENT: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="Slipstream">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<noscript><p>This page draws its charts with a script of its own, which this browser does not run.</p></noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def content_security_policy(*, live: bool = False) -> str:
    """Return the content security policy of the page: its own style and script, and nothing else.

    >>> "connect-src 'none'" in content_security_policy(), "connect-src 'self'" in content_security_policy(live=True)
    (True, True)
    """
    style, script = (f"'sha256-{base64.b64encode(hashlib.sha256(asset.encode()).digest()).decode()}'" for asset in _load_assets())
    own, pictures = ("'self'", "data: 'self'") if live else ("'none'", "data:")
    allowed = f"script-src {script}; style-src {style}; img-src {pictures}; connect-src {own}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


@functools.cache
def _load_assets() -> tuple[str, str]:
    folder = resources.files("slipstream.observability.report") / "assets"
    parts = "\n".join((folder / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    style = (folder / _STYLE).read_text(encoding="utf-8")
    assert "</" not in style + script, "an asset would end its own tag"
    return style, script


def _to_safe_json(data: Any) -> str:
    """Return JSON that an HTML parser cannot mistake for a tag or a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").encode("utf-8", "replace").decode()


def _escape_direction(text: str) -> str:
    """Spell out characters that change the direction of the text after them."""
    return "".join(f"\\u{ord(character):04x}" if character in _DIRECTION_MARKS else character for character in text)


_DIRECTION_MARKS: Final = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def is_report(start: bytes) -> bool:
    """Return whether a file that starts so, over at least some kilobytes, is a page of this module.

    >>> is_report(render_page([]).encode()), is_report(b"<!doctype html> another page")
    (True, False)
    """
    return start.startswith(b"<!doctype html>") and _GENERATOR_TAG in start


def _add_labels(views: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Label runs of the same name by their folder, or else by a number."""
    names = [str(view.get("label") or view.get("name") or "run") for view in views]
    for place, view in enumerate(views):
        label = names[place]
        if names.count(label) > 1:
            folders = [part for part in str(view.get("path") or "").replace("\\", "/").split("/")[:-1] if part not in ("", ".", "runs")]
            label = f"{folders[-1]}/{label}" if folders else label
        taken = {view["label"] for view in views[:place]}
        number = 2
        plain = label
        while label in taken:
            label, number = f"{plain} ({number})", number + 1
        view["label"] = label
    return views


def _pack_series(series: Mapping[str, Any]) -> dict[str, Any]:
    """Return a series with its numbers as base64 of arrays, which is smaller than digits and faster to read."""
    steps, times, values = series["steps"], series["times"], series["values"]
    whole = all(isinstance(step, int) and -_INT32_LIMIT <= step < _INT32_LIMIT for step in steps)
    return {
        "count": series.get("count", len(values)),
        "steps": _pack_numbers("i" if whole else "d", steps),
        "times": _pack_numbers("d", times),
        "values": _pack_numbers("d", values),
    }


_DTYPE_PREFIX: Final[Mapping[str, str]] = {"i": "i4:", "f": "f4:", "d": "f8:"}


def _pack_numbers(kind: str, values: Sequence[float | None]) -> str:
    """Encode numbers as little-endian base64; None becomes nan. Numbers that float32 holds exactly take four bytes.

    >>> _pack_numbers("i", [1, 2])
    'i4:AQAAAAIAAAA='
    >>> _pack_numbers("d", [0.5]), _pack_numbers("d", [0.1])
    ('f4:AAAAPw==', 'f8:mpmZmZmZuT8=')
    """
    numbers = array(kind, [nan if value is None else value for value in values])
    if kind == "d":
        numbers = _to_float32_if_exact(numbers)
        kind = numbers.typecode
    if sys.byteorder == "big":
        numbers.byteswap()
    return _DTYPE_PREFIX[kind] + base64.b64encode(numbers.tobytes()).decode()


def _to_float32_if_exact(numbers: array[float]) -> array[float]:
    """Return the numbers as float32 if that is exact for all of them, else unchanged."""
    small = array("f", numbers)
    return small if all(single == other or other != other for single, other in zip(small, numbers, strict=True)) else numbers


_MAX_POINTS: Final = 1_000_000
"""Points in one page: with very many series each gets fewer."""
_MAX_IMAGE_BYTES: Final = 24 << 20
"""Bytes of all pictures in one page; the newest go in first."""

IMAGE_TYPES: Final[Mapping[str, str]] = MappingProxyType(
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
    """Write the page of these runs and return its path.

    Each path is the folder of a run, or a folder with runs in it. Without `output` the page of one run is `report.html` in its folder,
    and that of several is `report.html` here. `points` is what a curve keeps at most: first, last, lowest and highest of each part of it.
    Folders that look like runs and cannot be read are not in it: the page says so, and they go to `left_out`, with the reason.

    >>> import tempfile
    >>> from slipstream.observability.run_dir.folder import RunFolder
    >>> with tempfile.TemporaryDirectory() as project:
    ...     run = RunFolder.create(project, "first", project="spirals")
    ...     run.end("finished")
    ...     write(run.path).relative_to(project).as_posix()
    'runs/first/report.html'
    """
    broken: list[tuple[Path, str]] = [] if left_out is None else left_out
    folders = _find_folders(paths, broken)
    target = Path(output) if output is not None else folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    _check_target(target)
    _replace_file(target, render_page(_read_views(folders, points), title=title, left_out=broken))
    return target


def render_report(
    paths: _AnyPath | Sequence[_AnyPath],
    *,
    title: str | None = None,
    points: int = 4000,
    left_out: list[tuple[Path, str]] | None = None,
) -> str:
    """Return the page that `write` writes, as text."""
    broken: list[tuple[Path, str]] = [] if left_out is None else left_out
    return render_page(_read_views(_find_folders(paths, broken), points), title=title, left_out=broken)


def _find_folders(paths: _AnyPath | Sequence[_AnyPath], left_out: list[tuple[Path, str]]) -> list[Path]:
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    folders = list(dict.fromkeys(folder for path in given for folder in find_runs(path, left_out)))
    if not folders:
        raise ConfigError("No run was given to report: give the folder of a run, or a project_dir that has runs/ in it.")
    return folders


def _check_target(target: Path) -> None:
    """Raise an error for a target that holds something else than a report."""
    if target.is_dir():
        raise ConfigError(f"The output {target} is a folder: give the name of a file, such as {target / 'report.html'}.")
    whole = target.parent.resolve() / target.name
    run = next((folder for folder in whole.parents if (folder / "run.json").exists()), None)
    if run is not None and whole != run / "report.html":
        raise ConfigError(
            f"The output {target} is inside the folder of a run, where only {run / 'report.html'} is a report: give a different path."
        )
    if not target.exists():
        return
    ours = False
    with suppress(OSError), target.open("rb") as file:  # a file that cannot be read is not overwritten
        ours = is_report(file.read(8192))
    if not ours:
        raise ConfigError(f"The output {target} exists and is not a report of slipstream: give a different name, or remove it first.")


def _read_views(folders: Iterable[Path], points: int) -> list[dict[str, Any]]:
    runs = [Run(folder) for folder in folders]
    for run in runs:
        run.refresh()
    names = sum(len(run.series) for run in runs)
    each = max(50, min(points, _MAX_POINTS // max(1, names)))
    room = _MAX_IMAGE_BYTES // len(runs)
    return [{**(view := run.view(points=each)), "images": _embed_images(run.path, view["images"], room)} for run in runs]


def _embed_images(folder: Path, images: Mapping[str, Sequence[Mapping[str, Any]]], room: int) -> dict[str, list[dict[str, Any]]]:
    """Return the images as data: URIs, the newest of each name first, while there is room."""
    found = {name: [{"step": shot["step"], "time": shot["time"]} for shot in shots] for name, shots in images.items()}
    ages = sorted((age, name) for name, shots in images.items() for age in range(1, len(shots) + 1))
    with ConfinedFolder(folder) as inside:
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


def _data_uri(folder: ConfinedFolder, path: str, room: int) -> str | None:
    kind = IMAGE_TYPES.get(PurePosixPath(path).suffix.lower())
    if kind is None or room <= 0:
        return None
    try:
        data = folder.read(path, room * 3 // 4)
    except CheckpointError:  # gone, no regular file, or too large: the page says that it is not there
        return None
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _replace_file(target: Path, text: str) -> None:
    try:
        with replacing(target) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The report {target} cannot be written: {error.strerror}. Give a different path with -o FILE.") from error
