"""Curves of many points as curves of few that look the same: no spike is lost and no gap is closed.

The points are cut into buckets of equal count, and each bucket keeps its first and last point and its smallest and largest value, where
they lie; a bucket with a gap in it (nan or an infinity) keeps one of those too. So a line drawn through what is left covers the same
pixels as one through everything, as long as there are as many buckets as pixels. Pure functions; nothing is interpolated or averaged.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import isfinite
from typing import Final

__all__ = ["FEWEST", "Blocks", "kept", "thin", "window"]

FEWEST: Final = 5
"""A curve is not thinned to fewer points than this: first, last, smallest, largest, and a gap."""

_BLOCK: Final = 64
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


class Blocks:
    """Where the smallest and the largest of every 64 values lie, found once, so that thinning a long curve again is quick.

    >>> values = array("d", range(1000))
    >>> blocks = Blocks()
    >>> blocks.follow(values)
    >>> list(kept(values, 0, 1000, 8, blocks)) == list(kept(values, 0, 1000, 8, Blocks()))
    True
    """

    __slots__ = ("highs", "lows")

    def __init__(self) -> None:
        self.lows: array[int] = array("q")
        self.highs: array[int] = array("q")

    def follow(self, values: array[float]) -> None:
        """Takes in the whole blocks that have come since the last call."""
        for first in range(len(self.lows) * _BLOCK, len(values) - _BLOCK + 1, _BLOCK):
            block = values[first : first + _BLOCK].tolist()
            plain = isfinite(sum(block))
            self.lows.append(first + block.index(min(block)) if plain else -1)
            self.highs.append(first + block.index(max(block)) if plain else -1)


def kept(ys: Sequence[float], start: int, stop: int, count: int, blocks: Blocks | None = None) -> Sequence[int]:
    """The places of the points that `thin` keeps of those from `start` to `stop`, in order; with `blocks` of `ys` it is quicker.

    >>> list(kept([0.0, 1.0, 2.0, 9.0, 3.0, 4.0, 5.0, 6.0], 0, 8, 5))
    [0, 3, 7]
    """
    count = max(count, FEWEST)
    if stop - start <= count:
        return range(start, stop)
    found = _of_buckets(ys, start, stop, count // _PLAIN, blocks)
    return found if len(found) <= count else _of_buckets(ys, start, stop, count // _WITH_GAP, blocks)


def _of_buckets(ys: Sequence[float], start: int, stop: int, buckets: int, blocks: Blocks | None) -> list[int]:
    found: list[int] = []
    total = stop - start
    if total < 2 * _BLOCK * buckets:
        blocks = None
    first = start
    for number in range(1, buckets + 1):
        last = start + total * number // buckets
        if blocks is not None and number < buckets:
            last -= last % _BLOCK
        places = None if blocks is None else _of_blocks(ys, first, last, blocks)
        found.extend(sorted(_of_values(ys, first, last) if places is None else places))
        first = last
    return found


def _of_blocks(ys: Sequence[float], first: int, last: int, blocks: Blocks) -> set[int] | None:
    """What a bucket keeps, from what is known of its blocks; None where that is not enough."""
    begin, end = -(-first // _BLOCK), min(last // _BLOCK, len(blocks.lows))
    if end <= begin:
        return None
    lows, highs = blocks.lows[begin:end].tolist(), blocks.highs[begin:end].tolist()
    if -1 in lows:
        return None
    for one, other in ((first, begin * _BLOCK), (end * _BLOCK, last)):
        if one < other:
            rest = ys[one:other]
            if not isfinite(sum(rest)):
                return None
            lows.append(one + rest.index(min(rest)))
            highs.append(one + rest.index(max(rest)))
    return {first, min(lows, key=ys.__getitem__), max(highs, key=ys.__getitem__), last - 1}


def _of_values(ys: Sequence[float], first: int, last: int) -> set[int]:
    """The same from the values themselves."""
    bucket = ys[first:last]
    if isinstance(bucket, array):
        bucket = bucket.tolist()  # twice as fast to look through as the array
    if isfinite(sum(bucket)):
        return {first, first + bucket.index(min(bucket)), first + bucket.index(max(bucket)), last - 1}
    return {first + place for place in _with_gap(bucket)}


def _with_gap(bucket: Sequence[float]) -> set[int]:
    """The same for values some of which may be no numbers; also where the sum alone is too large for one."""
    numbers = [place for place, value in enumerate(bucket) if isfinite(value)]
    places = {0, len(bucket) - 1}
    if numbers:
        places |= {min(numbers, key=bucket.__getitem__), max(numbers, key=bucket.__getitem__)}
    gap = next((place for place, value in enumerate(bucket) if not isfinite(value)), None)
    return places if gap is None else places | {gap}
