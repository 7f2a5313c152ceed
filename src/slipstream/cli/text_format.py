"""Text for terminals: tables, sizes, times, and strings from files with control characters escaped."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Sequence

from slipstream.observability.report.text_charts import align_columns, escape_control

__all__ = ["format_age", "format_columns", "format_count", "format_number", "format_time", "parse_time", "shorten", "truncate"]


def truncate(text: object, longest: int) -> str:
    """Return a text cut to `longest` characters, with control characters escaped."""
    shown = escape_control(text)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def shorten(value: object, longest: int = 60) -> str:
    """Return the repr of a value cut to `longest` characters.

    >>> shorten("x" * 100, 10)
    "'xxxxxx..."
    """
    return truncate(repr(value), longest)


def format_columns(rows: Iterable[Sequence[str]], *, left: Collection[int]) -> list[str]:
    """Return the rows as indented, aligned lines with control characters escaped; columns in `left` are aligned to the left.

    >>> format_columns([("step", "name"), ("7", "first")], left=[1])
    ['  step  name', '     7  first']
    """
    return [f"  {line}" for line in align_columns([[escape_control(cell) for cell in row] for row in rows], left)]


def format_count(number: int, text: str, many: str | None = None) -> str:
    """Return a number of things.

    >>> format_count(1, "file"), format_count(1200, "file"), format_count(2, "entry", "entries")
    ('1 file', '1,200 files', '2 entries')
    """
    return f"{number:,} {text if number == 1 else many or text + 's'}"


def format_number(value: float | None) -> str:
    """Return a metric, or a difference."""
    return "-" if value is None else f"{value:.6g}"


def parse_time(created: str) -> datetime.datetime | None:
    """Return the time in a manifest; None if it is not in ISO format."""
    try:
        found = datetime.datetime.fromisoformat(created)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)


def format_time(created: str) -> str:
    """Return the time of a save in local time; unchanged if it is not in ISO format."""
    found = parse_time(created)
    try:
        return shorten(created, 25) if found is None else found.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):  # a year that this machine does not support
        return shorten(created, 25)


def format_age(created: str, now: datetime.datetime) -> str:
    """Return how long before `now` that was.

    >>> utc = datetime.timezone.utc
    >>> format_age("2026-01-01T00:00:00+00:00", datetime.datetime(2026, 1, 3, 4, tzinfo=utc))
    '2 days ago'
    """
    found = parse_time(created)
    if found is None:
        return ""
    seconds = (now - found).total_seconds()
    if seconds < 0:
        return "in the future"
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{format_count(int(seconds // length), unit)} ago"
    return f"{format_count(int(seconds), 'second')} ago"
