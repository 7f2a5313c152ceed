"""A series: the numbers that were logged under one name, as three arrays of equal length, in the order in which they were logged.

A number takes 24 bytes here and no more. Steps may go back, as they do after a restart from a checkpoint: nothing is dropped or sorted
here, and who draws the curve decides which attempt is the line. Nothing here reads a file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

from slipstream.runs.thinning import Blocks, kept, window

__all__ = ["Series", "plain_steps", "plain_times", "plain_values"]


class Series:
    """The points of one name.

    >>> series = Series()
    >>> for step in range(4):
    ...     series.add(step, 100.0 + step, step / 3)
    >>> len(series), series.view(points=100)["values"]
    (4, [0.0, 0.3333333333333333, 0.6666666666666666, 1.0])
    """

    __slots__ = ("_blocks", "steps", "times", "turns", "values")

    def __init__(self) -> None:
        self.steps: array[float] = array("d")
        self.times: array[float] = array("d")
        self.values: array[float] = array("d")
        self.turns: array[int] = array("q")
        """The places of the points whose step is smaller than the one before."""
        self._blocks = Blocks()

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: float, time: float, value: float) -> None:
        """One more point."""
        steps = self.steps
        if steps and step < steps[-1]:
            self.turns.append(len(steps))
        steps.append(step)
        self.times.append(time)
        self.values.append(value)

    def settle(self) -> None:
        """Looks through what is new, so that the next view is quick."""
        self._blocks.follow(self.values)

    def view(self, points: int, low: float | None = None, high: float | None = None) -> dict[str, Any]:
        """At most `points` of it between two steps as plain lists; `count` says how many there are in all."""
        shown = [range(0, len(self))] if low is None and high is None else list(self._between(low, high))
        if len(shown) <= 1:
            start, stop = (shown[0].start, shown[0].stop) if shown else (0, 0)
            self.settle()
            places: Sequence[int] = kept(self.values, start, stop, points, self._blocks)
        else:
            order = [place for one in shown for place in one]
            places = [order[one] for one in kept([self.values[place] for place in order], 0, len(order), points)]
        return {**self.part(places), "count": len(self)}

    def _between(self, low: float | None, high: float | None) -> Iterator[range]:
        """What lies between two steps, of each stretch over which steps do not fall."""
        for first, end in zip([0, *self.turns], [*self.turns, len(self)], strict=True):
            start, stop = window(self.steps, low, high, first, end)
            if stop > start:
                yield range(start, stop)

    def part(self, places: Sequence[int]) -> dict[str, Any]:
        """Some of the points as plain lists."""
        if isinstance(places, range):
            where = slice(places.start, places.stop)
            columns = (self.steps[where].tolist(), self.times[where].tolist(), self.values[where].tolist())
        else:
            columns = ([self.steps[one] for one in places], [self.times[one] for one in places], [self.values[one] for one in places])
        return {"steps": plain_steps(columns[0]), "times": plain_times(columns[1]), "values": plain_values(columns[2])}


def plain_values(values: Sequence[float]) -> list[float | None]:
    """As they were logged, every digit: a counter or a slow ramp far from zero needs them. What is no number becomes None.

    >>> plain_values([1 / 3, 123456789.0, float("nan"), float("inf")])
    [0.3333333333333333, 123456789.0, None, None]
    """
    if isfinite(sum(values)):
        return list(values)
    return [one if isfinite(one) else None for one in values]


def plain_times(times: Sequence[float]) -> list[float | None]:
    """Rounded to a thousandth of a second."""
    return [round(one, 3) if isfinite(one) else None for one in times]


def plain_steps(steps: Sequence[float]) -> list[float]:
    """Whole steps as whole numbers.

    >>> plain_steps([3.0, 2.5])
    [3, 2.5]
    """
    return [int(one) if one.is_integer() else one for one in steps]
