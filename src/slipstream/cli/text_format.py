"""Text for terminals: tables, sizes, times, and strings from files with control characters escaped."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

from slipstream.devices.memory import convert_bytes

__all__ = [
    "escape_control", "format_age", "format_columns", "format_count", "format_number", "format_size", "format_time", "parse_time",
    "shorten", "truncate",
]


def escape_control(value: object) -> str:
    r"""Return the text of a value, with everything that a terminal would obey written out.

    >>> escape_control("model\x1b[2J")
    'model\\x1b[2J'
    """
    text = str(value)
    return text if text.isprintable() else "".join(entry if entry.isprintable() else repr(entry)[1:-1] for entry in text)


def truncate(text: object, longest: int) -> str:
    """Return a text in at most so many characters, with control characters escaped."""
    shown = escape_control(text)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def shorten(value: object, longest: int = 60) -> str:
    """Return the repr of a value in at most so many characters.

    >>> shorten("x" * 100, 10)
    "'xxxxxx..."
    """
    return truncate(repr(value), longest)


def format_columns(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Return the rows as aligned lines; the columns numbered in `right` are aligned to the right.

    >>> format_columns([("step", "name"), ("7", "first")], right=[0])
    ['step  name', '   7  first']
    """
    texts = [[escape_control(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*texts, strict=True)]
    lines = []
    for row in texts:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(width) if place in right else cell.ljust(width) for place, (cell, width) in pairs]
        lines.append("  ".join(cells).rstrip())
    return lines


def format_size(count: int) -> str:
    """Return a number of bytes in words."""
    return convert_bytes(count)


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
    """Return the time that a manifest says, if it can be understood."""
    try:
        found = datetime.datetime.fromisoformat(created)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.timezone.utc)


def format_time(created: str) -> str:
    """Return the time of a save, in the time of this machine; as it stands if it cannot be understood."""
    found = parse_time(created)
    try:
        return shorten(created, 25) if found is None else found.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):  # years that no clock of this machine shows
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
