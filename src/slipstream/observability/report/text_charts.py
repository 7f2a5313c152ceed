"""Charts and tables made of characters: braille curves, bar levels, proportional bars, aligned columns.

All are pure functions with an ASCII form. They do not depend on runs, colours or rich, so callers that print one line may import them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite
from typing import Final

__all__ = ["align_columns", "apportion", "draw_curve", "select_latest_attempt", "draw_levels", "escape_control", "format_number"]

_EMPTY: Final = 0x2800
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of the dots of a braille character: four rows of two."""
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = "._-~=+*#"


def draw_curve(xs: Sequence[float], ys: Sequence[float | None], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """Return a curve as lines of text, `width` characters each; None in `ys` is a gap.

    >>> print("\\n".join(draw_curve(range(8), [0, 1, 2, 3, 4, 5, 6, 7], 4, 2)))
    ⠀⠀⡠⠊
    ⡠⠊⠀⠀
    >>> draw_curve(range(4), [0.0, 1.0, 2.0, 3.0], 4, 1, ascii_only=True)
    ['.-+#']
    """
    numbers = [y for y in ys if y is not None]
    if not numbers:
        return [" " * width] * height
    if ascii_only:
        return [" " * width] * (height - 1) + [draw_levels(_last_by_column(xs, ys, width), ascii_only=True)]
    low, high = min(numbers), max(numbers)
    across, down = 2 * width - 1, 4 * height - 1
    first, last = xs[0], xs[-1]
    cells = [[_EMPTY] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, y in zip(xs, ys, strict=True):
        if y is None:
            before = None
            continue
        column = round((x - first) / (last - first) * across) if last > first else 0
        row = down - (round((y - low) / (high - low) * down) if high > low and isfinite(high - low) else down // 2)
        _draw_line(cells, before or (column, row), (column, row))
        before = column, row
    return ["".join(map(chr, line)) for line in cells]


def _draw_line(cells: list[list[int]], start: tuple[int, int], end: tuple[int, int]) -> None:
    """Set the dots from one place to another."""
    (column, row), (to_column, to_row) = start, end
    count = max(abs(to_column - column), abs(to_row - row), 1)
    for number in range(count + 1):
        x = column + round((to_column - column) * number / count)
        y = row + round((to_row - row) * number / count)
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]


def _last_by_column(xs: Sequence[float], ys: Sequence[float | None], width: int) -> list[float | None]:
    """Return the last number of each column."""
    found: list[float | None] = [None] * width
    first, last = xs[0], xs[-1]
    for x, y in zip(xs, ys, strict=True):
        if y is not None:
            found[round((x - first) / (last - first) * (width - 1)) if last > first else 0] = y
    return found


def draw_levels(values: Sequence[float | None], *, ascii_only: bool = False, low: float | None = None) -> str:
    """Return one character for each value, higher for larger ones and blank for None; the lowest means `low` or the smallest value.

    >>> draw_levels([0.0, 1.0, None, 2.0])
    '▁▅ █'
    """
    marks = _ASCII if ascii_only else _BLOCKS
    numbers = [value for value in values if value is not None]
    if not numbers:
        return " " * len(values)
    least = min(numbers) if low is None else low
    room = max(numbers) - least
    if room <= 0 or not isfinite(room):
        return "".join(" " if value is None else marks[3] for value in values)
    return "".join(" " if value is None else marks[max(0, min(7, round((value - least) / room * 7)))] for value in values)


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return rows of cells as lines with aligned columns: those of `left` to the left, the others, as numbers are, to the right.

    >>> align_columns([["phase", "share"], ["data", "5%"]])
    ['phase  share', 'data      5%']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(widths[place]) if place in left else cell.rjust(widths[place]) for place, cell in enumerate(row)).rstrip()
        for row in rows
    ]


def apportion(parts: Mapping[str, float], width: int) -> dict[str, int]:
    """Return how many of `width` characters each part gets, so that they add up.

    >>> apportion({"data": 1.0, "forward": 1.0, "backward": 2.0}, 10)
    {'data': 3, 'forward': 2, 'backward': 5}
    """
    total = sum(parts.values())
    if total <= 0:
        return dict.fromkeys(parts, 0)
    exact = {name: value / total * width for name, value in parts.items()}
    found = {name: int(value) for name, value in exact.items()}
    left = width - sum(found.values())
    for name in sorted(exact, key=lambda part: found[part] - exact[part])[:left]:
        found[name] += 1
    return found


def select_latest_attempt(steps: Sequence[float], values: Sequence[float | None]) -> tuple[list[float], list[float | None]]:
    """Return the points of a curve whose steps may go back, without those that were done again later.

    >>> select_latest_attempt([1, 2, 3, 2, 3, 4], [1.0, 2.0, 3.0, 2.5, 3.5, 4.5])
    ([1, 2, 3, 4], [1.0, 2.5, 3.5, 4.5])
    """
    found: list[tuple[float, float | None]] = []
    least = float("inf")
    for step, value in zip(reversed(steps), reversed(values), strict=True):
        if step < least:
            found.append((step, value))
            least = step
    return [step for step, _ in reversed(found)], [value for _, value in reversed(found)]


def escape_control(text: object) -> str:
    r"""Return a text in one line, with control characters escaped.

    >>> escape_control("loss\x1b[2J")
    'loss\\x1b[2J'
    """
    plain = str(text)
    return plain if plain.isprintable() else "".join(character if character.isprintable() else repr(character)[1:-1] for character in plain)


def format_number(value: float | None) -> str:
    """Return a number in a few characters.

    >>> format_number(0.123456), format_number(123456.7), format_number(None), format_number(12.0), format_number(2.5e-7)
    ('0.1235', '1.235e+05', '-', '12', '2.5e-07')
    """
    return "-" if value is None or not isfinite(value) else f"{value:.4g}"
