"""The page: views of runs in, one self-contained HTML document out.

Style and script stand inside the document, so it opens from a file and asks nobody for anything; a policy in its head, which names both
by their checksums, forbids everything else. What comes from a run (names, settings, messages) is data: it stands in a block of JSON in
which no tag can end, and the script puts it on the page as text, never as markup. With `live=True` the same page is fed by the server
that it came from: `GET /api/runs`, `/api/view`, `/api/events`, `/media`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import sys
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata, resources
from math import nan
from typing import Any, Final

__all__ = ["is_report", "policy", "render"]

_STYLE: Final = "style.css"
_SCRIPTS: Final = (
    "dom.js",
    "format.js",
    "math.js",
    "data.js",
    "state.js",
    "marks.js",
    "plot.js",
    "lines.js",
    "areas.js",
    "heat.js",
    "overview.js",
    "curves.js",
    "ledger.js",
    "records.js",
    "live.js",
    "main.js",
)
"""In the order in which they need each other."""

_WHOLE: Final = 2**31
_MARK: Final = b'<meta name="generator" content="Slipstream">'


def render(
    views: Iterable[Mapping[str, Any]], *, live: bool = False, title: str | None = None, left_out: Iterable[tuple[object, str]] = ()
) -> str:
    """The document that shows these views, laid over each other; `live` also lets it ask its server for news.

    `left_out` are folders that look like runs and cannot be read, each with the reason; the page says so.

    >>> text = render([{"name": "first", "series": {"loss": {"steps": [1, 2], "times": [5.0, 6.0], "values": [0.5, None], "count": 2}}}])
    >>> text.startswith("<!doctype html>"), "https:" in text
    (True, False)
    """
    shown = _labelled([dict(view) for view in views])
    names = [str(view["label"]) for view in shown]
    heading = title or (", ".join(names) if 0 < len(names) <= 3 else f"{len(names)} runs" if names else "Runs")
    data = {
        "title": heading,
        "live": live,
        "made": None if live else round(time.time()),
        "version": metadata.version("slipstream"),
        "left_out": [[str(path), why] for path, why in left_out],
        "views": [{**view, "series": {name: _packed_series(one) for name, one in view.get("series", {}).items()}} for view in shown],
    }
    style, script = _assets()
    return _DOCUMENT.format(
        policy=html.escape(policy(live=live)), title=html.escape(_visible(heading)), style=style, script=script, data=_json(data)
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


def policy(*, live: bool = False) -> str:
    """The content security policy of the page, for its head and for the server that sends it: its own style and script, and nothing else.

    >>> "connect-src 'none'" in policy(), "connect-src 'self'" in policy(live=True)
    (True, True)
    """
    style, script = (f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in _assets())
    own, pictures = ("'self'", "data: 'self'") if live else ("'none'", "data:")
    allowed = f"script-src {script}; style-src {style}; img-src {pictures}; connect-src {own}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


@functools.cache
def _assets() -> tuple[str, str]:
    folder = resources.files("slipstream.report") / "assets"
    parts = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    style = (folder / _STYLE).read_text(encoding="utf-8")
    assert "</" not in style + script, "an asset would end its own tag"
    return style, script


def _json(data: Any) -> str:
    """JSON that no HTML parser takes for a tag or a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").encode("utf-8", "replace").decode()


def _visible(text: str) -> str:
    """Characters that turn the direction of what follows are spelled out."""
    return "".join(f"\\u{ord(one):04x}" if one in _TURNS else one for one in text)


_TURNS: Final = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))


def is_report(start: bytes) -> bool:
    """Whether a file that starts so, over at least some kilobytes, is a page of this module.

    >>> is_report(render([]).encode()), is_report(b"<!doctype html> another page")
    (True, False)
    """
    return start.startswith(b"<!doctype html>") and _MARK in start


def _labelled(views: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs that have one name are told apart by the folders they lie in, and failing that by a number."""
    names = [str(view.get("label") or view.get("name") or "run") for view in views]
    for place, view in enumerate(views):
        label = names[place]
        if names.count(label) > 1:
            folders = [part for part in str(view.get("path") or "").replace("\\", "/").split("/")[:-1] if part not in ("", ".", "runs")]
            label = f"{folders[-1]}/{label}" if folders else label
        taken = {one["label"] for one in views[:place]}
        number = 2
        plain = label
        while label in taken:
            label, number = f"{plain} ({number})", number + 1
        view["label"] = label
    return views


def _packed_series(series: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a series as base64 of arrays, which is smaller than digits and quicker to read."""
    steps, times, values = series["steps"], series["times"], series["values"]
    whole = all(isinstance(step, int) and -_WHOLE <= step < _WHOLE for step in steps)
    return {
        "count": series.get("count", len(values)),
        "steps": _packed("i" if whole else "d", steps),
        "times": _packed("d", times),
        "values": _packed("d", values),
    }


_KINDS: Final[Mapping[str, str]] = {"i": "i4:", "f": "f4:", "d": "f8:"}


def _packed(kind: str, values: Sequence[float | None]) -> str:
    """Little-endian numbers as text; None is no number. Numbers that four bytes hold exactly, as most losses are, take four.

    >>> _packed("i", [1, 2])
    'i4:AQAAAAIAAAA='
    >>> _packed("d", [0.5]), _packed("d", [0.1])
    ('f4:AAAAPw==', 'f8:mpmZmZmZuT8=')
    """
    numbers = array(kind, [nan if value is None else value for value in values])
    if kind == "d":
        numbers = _halved(numbers)
        kind = numbers.typecode
    if sys.byteorder == "big":
        numbers.byteswap()
    return _KINDS[kind] + base64.b64encode(numbers.tobytes()).decode()


def _halved(numbers: array[float]) -> array[float]:
    """The same numbers in four bytes each, if every one of them survives it; else as they came."""
    small = array("f", numbers)
    return small if all(one == other or other != other for one, other in zip(small, numbers, strict=True)) else numbers
