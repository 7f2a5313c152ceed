"""Growth: how a cost grows with the size of what it is paid for, as curves; kept as JSON, drawn as SVG on logarithmic axes.

A `growth_TOPIC.py` has a `measure(quick)` that returns `Growth`s; its program is `curves.main(measure, __doc__)`, which knows `--quick`,
`--json FILE` and `--draw`, or stands between `options(__doc__)` and `report(...)` where it has more options. On logarithmic axes a
power is a straight line: flat costs the same at any size, one up for one to the right is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from figures import own_command, provenance

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 560, 52, 344
"""The edges of the area with the curves; to its right stand their names."""
LINE = 15
"""The height of a line of text."""
GREY, FAINT = "#7d8590", "#7d859055"
COLOURS = ("#2f81f7", "#d2772c", "#3fa266", "#a371f7", "#d1569a", "#9a8434")
"""Of a middle brightness, so that they can be read on white and on black."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Curve:
    """One line of a drawing: sizes with their costs, in the order of the sizes."""

    what: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    """Whether it is the other side: bare torch, Accelerate."""

    @property
    def exponent(self) -> float:
        """The power of the size with which the cost grows over the last decade (or all of it): 0 is flat, 1 is linear.

        >>> round(Curve("square", ((1, 5), (10, 7), (100, 700), (1000, 70_000))).exponent, 3)
        2.0
        """
        last, cost = self.points[-1]
        first, before = max((point for point in self.points if point[0] <= last / 9.9), default=self.points[0])
        return math.log(cost / before) / math.log(last / first) if first < last else 0.0


@dataclass(frozen=True)
class Growth:
    """One drawing."""

    name: str
    """Of its file: `growth-NAME.svg`."""
    title: str
    x: str
    """What is counted along the axis to the right: `ranks`."""
    y: str
    """The unit of the cost: `ms`."""
    curves: tuple[Curve, ...]
    note: str = ""


# -- files ------------------------------------------------------------------------------------------------------------


def save(path: Path, growths: Sequence[Growth], command: str) -> None:
    """Save drawings as JSON, with the command, the machine, the commit and the date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**provenance(command), "growth": [asdict(growth) for growth in growths]}, indent=1) + "\n")


def load(path: Path) -> list[Growth]:
    """Return the drawings of a file that `save` wrote."""
    return [from_json(entry) for entry in json.loads(path.read_text())["growth"]]


def from_json(entry: dict[str, Any]) -> Growth:
    curves = [Curve(curve["what"], tuple((x, y) for x, y in curve["points"]), curve["dashed"]) for curve in entry["curves"]]
    return Growth(**{**entry, "curves": tuple(curves)})


def draw(growth: Growth, folder: Path = PICTURES) -> Path:
    """Write the drawing, and return its path."""
    path = folder / f"growth-{growth.name}.svg"
    path.write_text(svg(growth))
    return path


def main(measure: Callable[[bool], list[Growth]], description: str | None) -> None:
    """Be the program of a growth script without options of its own."""
    given = options(description).parse_args()
    report(measure(given.quick), given)


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every growth script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    parser.add_argument("--json", type=Path, help="write the curves to this file")
    parser.add_argument("--draw", action="store_true", help=f"draw them into {PICTURES.relative_to(PICTURES.parent.parent)}")
    return parser


def report(growths: Sequence[Growth], given: argparse.Namespace) -> None:
    """Print the curves, and save or draw them where the options say so."""
    for growth in growths:
        print("\n" + text(growth), flush=True)
        if given.draw:
            print(f"drawn: {draw(growth)}")
    if given.json:
        save(given.json, growths, own_command())


# -- as text ----------------------------------------------------------------------------------------------------------


def text(growth: Growth) -> str:
    """Return the points as aligned columns, one row for each size.

    >>> print(text(Growth("b", "a barrier", "ranks", "ms", (Curve("ours", ((2, 0.5), (4, 1.0))), Curve("torch", ((2, 3.0),))))))
    a barrier (ms)
      ranks   ours  torch
      2       0.5   3
      4       1
      growth  x^1   x^0
    """
    table = rows(growth)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([f"{growth.title} ({growth.y})", *lines, *([f"  {growth.note}"] if growth.note else [])])


def rows(growth: Growth) -> list[tuple[str, ...]]:
    """Return the head, a row for each size, and a row that says how each curve grows."""
    costs = [dict(curve.points) for curve in growth.curves]
    sizes = sorted({size for of_size in costs for size in of_size})
    head = (growth.x, *(curve.what for curve in growth.curves))
    body = [(number(size), *(number(of_size[size]) if size in of_size else "" for of_size in costs)) for size in sizes]
    return [head, *body, ("growth", *(f"x^{round(curve.exponent, 1) + 0.0:g}" for curve in growth.curves))]


def number(value: float) -> str:
    """Format three significant digits; large powers of ten as such.

    >>> [number(value) for value in (0.00123, 0.5, 32, 50_000, 1_234_567, 1e9, 2.5e9, 1e-5)]
    ['0.00123', '0.5', '32', '50,000', '1.23·10⁶', '10⁹', '2.5·10⁹', '10⁻⁵']
    """
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.10g}" if abs(value) < 1000 else f"{value:,.0f}"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    mantissa = f"{value / 10**power:.3g}"
    return ("" if mantissa == "1" else f"{mantissa}·") + f"10{str(power).translate(SUPERSCRIPTS)}"


# -- as a drawing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis: values from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Return where a value is drawn."""
        return self.start + (self.end - self.start) * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """Return the powers of ten in the range; where there are few of them, also 2 and 5 times those.

        >>> Axis(1, 30, 0, 1).ticks(), Axis(1, 10_000, 0, 1).ticks()
        ([1, 2, 5, 10, 20], [1, 10, 100, 1000, 10000])
        """
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1,) if math.log10(self.high / self.low) > 3 else (1, 2, 5)
        found = [step * 10**power for power in powers for step in steps]
        return [value for value in found if self.low <= value * 1.0001 and value <= self.high * 1.0001]


def svg(growth: Growth) -> str:
    """Return the drawing as SVG without a background."""
    _check(growth)
    sizes = sorted({size for curve in growth.curves for size, _ in curve.points})
    costs = [cost for curve in growth.curves for _, cost in curve.points]
    x = Axis(sizes[0], max(sizes[-1], sizes[0] * 1.01), LEFT, RIGHT)
    y = Axis(min(costs) / 1.5, max(max(costs), min(costs) * 10) * 1.5, BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"'
        f' font-family="system-ui, sans-serif" font-size="12" fill="{GREY}">',
        f"<title>{escape(growth.title)}</title>",
        _words(LEFT, 20, growth.title, 'font-size="15" font-weight="600"'),
        _words(LEFT, 40, growth.y),
        _words(RIGHT, BOTTOM + 40, growth.x, 'text-anchor="end"'),
        *_grid(x, y, sizes),
        *(_line(curve, colour, x, y) for curve, colour in zip(growth.curves, COLOURS, strict=False)),
        *_names(growth, y),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _check(growth: Growth) -> None:
    if not growth.curves or len(growth.curves) > len(COLOURS):
        raise ValueError(f"{growth.name}: a drawing has 1 to {len(COLOURS)} curves, not {len(growth.curves)}")
    for curve in growth.curves:
        if not curve.points or list(curve.points) != sorted(curve.points):
            raise ValueError(f"{growth.name}, {curve.what}: the points are to be given in the order of their sizes, not as {curve.points}")
        if wrong := [point for point in curve.points if min(point) <= 0]:
            raise ValueError(f"{growth.name}, {curve.what}: {wrong} cannot stand on logarithmic axes; leave out what is not above 0")


def _words(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _grid(x: Axis, y: Axis, sizes: Sequence[float]) -> Iterable[str]:
    """Yield the lines of the costs, with their values, and the sizes that were measured, where there is room."""
    for value in y.ticks():
        height = y.place(value)
        yield f'<path d="M{LEFT} {height:.1f}H{RIGHT}" stroke="{FAINT}"/>'
        yield _words(LEFT - 8, height + 4, number(value), 'text-anchor="end"')
    yield f'<path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="{GREY}"/>'
    free = -math.inf
    for size in sizes:
        place, half = x.place(size), 4 + 3.5 * len(number(size))
        yield f'<path d="M{place:.1f} {BOTTOM}v5" stroke="{GREY}"/>'
        if place - half >= free:
            yield _words(place, BOTTOM + 20, number(size), 'text-anchor="middle"')
            free = place + half


def _line(curve: Curve, colour: str, x: Axis, y: Axis) -> str:
    places = [(x.place(size), y.place(cost)) for size, cost in curve.points]
    path = " ".join(f"{across:.1f},{height:.1f}" for across, height in places)
    dots = "".join(f'<circle cx="{across:.1f}" cy="{height:.1f}" r="3"/>' for across, height in places)
    dashes = ' stroke-dasharray="6 4"' if curve.dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/><g fill="{colour}">{dots}</g>'


def _names(growth: Growth, y: Axis) -> Iterable[str]:
    """Yield the name and the last cost of each curve, at its end, or below the one above where there is no room."""
    labels = [textwrap.wrap(f"{curve.what}: {number(curve.points[-1][1])}\N{NO-BREAK SPACE}{growth.y}", 28) for curve in growth.curves]
    ends = [y.place(curve.points[-1][1]) + 4 for curve in growth.curves]
    order = sorted(range(len(ends)), key=lambda index: ends[index])
    tops = spread([ends[index] for index in order], [LINE * len(labels[index]) for index in order], BOTTOM + LINE)
    for top, index in zip(tops, order, strict=True):
        for number_of_line, words in enumerate(labels[index]):
            yield _words(RIGHT + 12, top + LINE * number_of_line, words, f'fill="{COLOURS[index]}"')


def spread(wanted: Sequence[float], heights: Sequence[float], end: float) -> list[float]:
    """Return places for blocks from the top down, near the wanted ones, that do not overlap and end before `end`.

    >>> spread([10, 12, 90], [15, 15, 15], 100)
    [10, 25, 85]
    """
    places: list[float] = []
    free = -math.inf
    for place, height in zip(wanted, heights, strict=True):
        places.append(max(place, free))
        free = places[-1] + height
    for index in reversed(range(len(places))):
        places[index] = min(places[index], end - heights[index])
        end = places[index]
    return places
