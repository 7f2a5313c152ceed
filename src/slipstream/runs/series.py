"""A series: the numbers that were logged under one name, as three arrays of equal length.

A number takes 24 bytes here and no more. After a restart, the points of steps that the run does once more make room for the new ones, as
the training itself forgot them; `superseded` counts them. Nothing here reads a file.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from math import isfinite
from typing import Any

from slipstream.runs.thinning import kept, window

__all__ = ["Series", "plain_steps", "plain_times", "plain_values"]


class Series:
    """The points of one name, in the order in which they were logged.

    >>> series = Series()
    >>> for step in range(4):
    ...     series.add(step, 100.0 + step, step / 3)
    >>> len(series), series.view(points=100)["values"]
    (4, [0.0, 0.3333333, 0.6666667, 1.0])
    """

    __slots__ = ("_again", "_order", "rising", "steps", "superseded", "times", "values")

    def __init__(self) -> None:
        self.steps: array[float] = array("d")
        self.times: array[float] = array("d")
        self.values: array[float] = array("d")
        self.superseded = 0
        self.rising = True
        """Whether no step is smaller than the one before it."""
        self._again = False
        self._order: Sequence[int] = range(0)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: float, time: float, value: float) -> None:
        """One more point."""
        steps = self.steps
        if steps and step <= steps[-1]:
            if self._again:
                self._forget(step)
            elif step < steps[-1]:
                self.rising = False
        self._again = False
        steps.append(step)
        self.times.append(time)
        self.values.append(value)

    def restart(self) -> None:
        """The next point may be one of a step that was done before; it and those after it then take the place of the earlier ones."""
        self._again = True

    def _forget(self, step: float) -> None:
        first = bisect_left(self.steps, step) if self.rising else next(place for place, one in enumerate(self.steps) if one >= step)
        self.superseded += len(self.steps) - first
        self._order = range(0)
        del self.steps[first:], self.times[first:], self.values[first:]

    def view(self, points: int, low: float | None = None, high: float | None = None) -> dict[str, Any]:
        """At most `points` of it between two steps as plain lists, sorted by step; `count` says how many there are in all."""
        if self.rising:
            start, stop = window(self.steps, low, high)
            places: Sequence[int] = kept(self.values, start, stop, points)
        else:
            order = self._sorted()
            start, stop = window([self.steps[one] for one in order], low, high)
            places = [order[one] for one in kept([self.values[one] for one in order], start, stop, points)]
        return {**self.part(places), "count": len(self)}

    def part(self, places: Sequence[int]) -> dict[str, Any]:
        """Some of the points as plain lists."""
        if isinstance(places, range):
            where = slice(places.start, places.stop)
            columns = (self.steps[where].tolist(), self.times[where].tolist(), self.values[where].tolist())
        else:
            columns = ([self.steps[one] for one in places], [self.times[one] for one in places], [self.values[one] for one in places])
        return {"steps": plain_steps(columns[0]), "times": plain_times(columns[1]), "values": plain_values(columns[2])}

    def _sorted(self) -> Sequence[int]:
        if len(self._order) != len(self):
            self._order = array("q", sorted(range(len(self)), key=self.steps.__getitem__))
        return self._order


def plain_values(values: Sequence[float]) -> list[float | None]:
    """Rounded to seven digits, which is more than a picture shows; what is no number becomes None.

    >>> plain_values([1 / 3, 123456789.0, float("nan"), float("inf")])
    [0.3333333, 123456800.0, None, None]
    """
    shown = "%.7g"
    if isfinite(sum(values)):
        return [float(shown % one) for one in values]
    return [float(shown % one) if isfinite(one) else None for one in values]


def plain_times(times: Sequence[float]) -> list[float | None]:
    """Rounded to a thousandth of a second."""
    return [round(one, 3) if isfinite(one) else None for one in times]


def plain_steps(steps: Sequence[float]) -> list[float]:
    """Whole steps as whole numbers.

    >>> plain_steps([3.0, 2.5])
    [3, 2.5]
    """
    return [int(one) if one.is_integer() else one for one in steps]
