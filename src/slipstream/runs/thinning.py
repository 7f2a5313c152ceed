"""Curves of many points as curves of few that look the same: no spike is lost and no gap is closed.

The points are cut into buckets of equal count, and each bucket keeps its first and last point and its smallest and largest value, where
they lie; a bucket with a gap in it (nan or an infinity) keeps one of those too. So a line drawn through what is left covers the same
pixels as one through everything, as long as there are as many buckets as pixels. Pure functions; nothing is interpolated or averaged.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import inf, isfinite
from typing import Final

__all__ = ["FEWEST", "kept", "thin", "window"]

FEWEST: Final = 5
"""A curve is not thinned to fewer points than this: first, last, smallest, largest, and a gap."""

_PLAIN: Final = 4
_WITH_GAP: Final = 5


def thin(
    xs: Sequence[float], ys: Sequence[float], count: int, low: float | None = None, high: float | None = None
) -> tuple[array[float], array[float]]:
    """At most `count` of the points, those that show: first, last, and the smallest and largest of every bucket.

    `xs` do not fall (`kept` does without). With `low` and `high` only the points between them are taken, and the neighbour on
    each side, so that a line reaches the edge of the picture. What is no number in `ys` stays as a gap. Counts below `FEWEST`
    are taken for it.

    >>> xs = range(10_000)
    >>> ys = [0.0] * 5_000 + [1.0] + [0.0] * 4_999
    >>> few, values = thin(xs, ys, 100)
    >>> len(few) <= 100, values[list(few).index(5_000)]
    (True, 1.0)
    """
    start, stop = window(xs, low, high)
    taken = kept(ys, start, stop, count)
    return array("d", [xs[one] for one in taken]), array("d", [ys[one] for one in taken])


def window(xs: Sequence[float], low: float | None, high: float | None, first: int = 0, end: int | None = None) -> tuple[int, int]:
    """From which point to which (not included) a curve shows between two limits, with a neighbour on each side to draw a line to.

    Of points that all lie on one side of the limits nothing shows. `first` and `end` are the part of `xs` that is looked at.

    >>> window([0, 10, 20, 30, 40], 15, 25), window([0, 10, 20, 30, 40], 50, 60)
    ((1, 4), (5, 5))
    """
    end = len(xs) if end is None else end
    start = first if low is None else bisect_left(xs, low, first, end)
    stop = end if high is None else bisect_right(xs, high, first, end)
    turned = low is not None and high is not None and low > high
    if start >= end or stop <= first or turned:
        return end, end
    return max(start - 1, first), min(stop + 1, end)


def kept(ys: Sequence[float], start: int, stop: int, count: int) -> Sequence[int]:
    """The places of the points that `thin` keeps of those from `start` to `stop`, in order.

    >>> list(kept([0.0, 1.0, 2.0, 9.0, 3.0, 4.0, 5.0, 6.0], 0, 8, 5))
    [0, 3, 7]
    """
    count = max(count, FEWEST)
    if stop - start <= count:
        return range(start, stop)
    found = _of_buckets(ys, start, stop, count // _PLAIN)
    return found if len(found) <= count else _of_buckets(ys, start, stop, count // _WITH_GAP)


def _of_buckets(ys: Sequence[float], start: int, stop: int, buckets: int) -> list[int]:
    found: list[int] = []
    total = stop - start
    first = start
    for number in range(1, buckets + 1):
        last = start + total * number // buckets
        bucket = ys[first:last]
        if isinstance(bucket, array):
            bucket = bucket.tolist()  # twice as fast to look through as the array
        inner = _without_gap(bucket) if isfinite(sum(bucket)) else _with_gap(bucket)
        found.extend(first + one for one in sorted(inner))
        first = last
    return found


def _without_gap(bucket: Sequence[float]) -> set[int]:
    return {0, bucket.index(min(bucket)), bucket.index(max(bucket)), len(bucket) - 1}


def _with_gap(bucket: Sequence[float]) -> set[int]:
    """The same for values some of which may be no numbers; also where the sum alone is too large for one."""
    places = {0, len(bucket) - 1}
    gap: int | None = None
    least, smallest = inf, -1
    most, largest = -inf, -1
    for place, value in enumerate(bucket):
        if not isfinite(value):
            gap = place if gap is None else gap
            continue
        if value < least:
            least, smallest = value, place
        if value > most:
            most, largest = value, place
    return places | {one for one in (gap, smallest, largest) if one is not None and one >= 0}
