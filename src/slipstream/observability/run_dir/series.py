"""Logged curves and ledger intervals in memory, and how both are reduced to a size that can be drawn.

No torch and no file access. `Series` holds the points of one name in three arrays, in the order in which they were logged; steps may go
back after a restart. Thinning keeps the first, last, smallest and largest point of each bucket, and one gap, so no spike is lost and
nothing is interpolated. A series beyond its limit is thinned that way in memory too, except its newest points, so memory stays flat however
long a run is. `IntervalList` merges neighbouring ledger intervals beyond a limit: sums are preserved, memory keeps its maximum,
utilisation is weighted by time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Final

__all__ = [
    "BlockExtremes", "INTERVAL_COLUMNS", "IntervalList", "MIN_POINTS", "Series", "merge_intervals", "normalize_interval", "select_points",
    "to_columns", "to_json_steps", "to_json_times", "to_json_values", "visible_range",
]


MIN_POINTS: Final = 5
"""A curve is not thinned to fewer points than this: first, last, smallest, largest, and a gap."""

_BLOCK: Final = 64
_POINTS_PER_BUCKET: Final = 4
_POINTS_WITH_GAP: Final = 5


def visible_range(xs: Sequence[float], low: float | None, high: float | None, first: int = 0, end: int | None = None) -> tuple[int, int]:
    """Return from which point to which (not included) a curve shows between two limits, with a neighbour on each side to draw a line to.

    Of points that all lie on one side of the limits nothing shows. `first` and `end` are the part of `xs` that is looked at.

    >>> visible_range([0, 10, 20, 30, 40], 15, 25), visible_range([0, 10, 20, 30, 40], 50, 60)
    ((1, 4), (5, 5))
    """
    end = len(xs) if end is None else end
    start = first if low is None else bisect_left(xs, low, first, end)
    stop = end if high is None else bisect_right(xs, high, first, end)
    turned = low is not None and high is not None and low > high
    if start >= end or stop <= first or turned:
        return end, end
    return max(start - 1, first), min(stop + 1, end)


class BlockExtremes:
    """The positions of the smallest and largest of every 64 values, found once, so that thinning a long curve again is fast.

    Kept for its speed: a million points are thinned in 0.04 s, and in 0.34 s without it (2 cores, busy machine).

    >>> values = array("d", range(1000))
    >>> blocks = BlockExtremes()
    >>> blocks.follow(values)
    >>> list(select_points(values, 0, 1000, 8, blocks)) == list(select_points(values, 0, 1000, 8, BlockExtremes()))
    True
    """

    __slots__ = ("highs", "lows")

    def __init__(self) -> None:
        self.lows: array[int] = array("q")
        self.highs: array[int] = array("q")

    def follow(self, values: array[float]) -> None:
        """Add the whole blocks that have come since the last call."""
        for first in range(len(self.lows) * _BLOCK, len(values) - _BLOCK + 1, _BLOCK):
            block = values[first : first + _BLOCK].tolist()
            plain = isfinite(sum(block))
            self.lows.append(first + block.index(min(block)) if plain else -1)
            self.highs.append(first + block.index(max(block)) if plain else -1)


def select_points(ys: Sequence[float], start: int, stop: int, count: int, blocks: BlockExtremes | None = None) -> Sequence[int]:
    """Return the indices of at most `count` points that show a curve from `start` to `stop`; with `blocks` of `ys` it is quicker.

    >>> list(select_points([0.0, 1.0, 2.0, 9.0, 3.0, 4.0, 5.0, 6.0], 0, 8, 5))
    [0, 3, 7]
    """
    count = max(count, MIN_POINTS)
    if stop - start <= count:
        return range(start, stop)
    found = _select_by_bucket(ys, start, stop, count // _POINTS_PER_BUCKET, blocks)
    return found if len(found) <= count else _select_by_bucket(ys, start, stop, count // _POINTS_WITH_GAP, blocks)


def _select_by_bucket(ys: Sequence[float], start: int, stop: int, buckets: int, blocks: BlockExtremes | None) -> list[int]:
    found: list[int] = []
    total = stop - start
    if total < 2 * _BLOCK * buckets:
        blocks = None
    first = start
    for number in range(1, buckets + 1):
        last = start + total * number // buckets
        if blocks is not None and number < buckets:
            last -= last % _BLOCK
        places = None if blocks is None else _extremes_of_blocks(ys, first, last, blocks)
        found.extend(sorted(_extremes_of_values(ys, first, last) if places is None else places))
        first = last
    return found


def _extremes_of_blocks(ys: Sequence[float], first: int, last: int, blocks: BlockExtremes) -> set[int] | None:
    """Return what a bucket keeps, from what is known of its blocks; None where that is not enough."""
    begin, end = -(-first // _BLOCK), min(last // _BLOCK, len(blocks.lows))
    if end <= begin:
        return None
    lows, highs = blocks.lows[begin:end].tolist(), blocks.highs[begin:end].tolist()
    if -1 in lows:
        return None
    for start, stop in ((first, begin * _BLOCK), (end * _BLOCK, last)):
        if start < stop:
            rest = ys[start:stop]
            if not isfinite(sum(rest)):
                return None
            lows.append(start + rest.index(min(rest)))
            highs.append(start + rest.index(max(rest)))
    return {first, min(lows, key=ys.__getitem__), max(highs, key=ys.__getitem__), last - 1}


def _extremes_of_values(ys: Sequence[float], first: int, last: int) -> set[int]:
    """Return what a bucket keeps, from the values themselves."""
    bucket = ys[first:last]
    if isinstance(bucket, array):
        bucket = bucket.tolist()  # twice as fast to look through as the array
    if isfinite(sum(bucket)):
        return {first, first + bucket.index(min(bucket)), first + bucket.index(max(bucket)), last - 1}
    return {first + place for place in _extremes_with_gap(bucket)}


def _extremes_with_gap(bucket: Sequence[float]) -> set[int]:
    """Return what a bucket with values that are not finite keeps; also where only the sum overflows."""
    numbers = [place for place, value in enumerate(bucket) if isfinite(value)]
    places = {0, len(bucket) - 1}
    if numbers:
        places |= {min(numbers, key=bucket.__getitem__), max(numbers, key=bucket.__getitem__)}
    gap = next((place for place, value in enumerate(bucket) if not isfinite(value)), None)
    return places if gap is None else places | {gap}


class Series:
    """The points of one name.

    >>> series = Series()
    >>> for step in range(4):
    ...     series.add(step, 100.0 + step, step / 3)
    >>> len(series), series.view(points=100)["values"]
    (4, [0.0, 0.3333333333333333, 0.6666666666666666, 1.0])
    """

    __slots__ = ("_blocks", "_dropped", "_each", "_thinned", "steps", "times", "turns", "values")

    def __init__(self) -> None:
        self.steps: array[float] = array("d")
        self.times: array[float] = array("d")
        self.values: array[float] = array("d")
        self.turns: array[int] = array("q")
        """The places of the points whose step is smaller than the one before."""
        self._blocks = BlockExtremes()
        self._dropped = 0
        """How many points `limit` has dropped."""
        self._thinned = 0
        """How many of the points, from the first on, are what it has kept."""
        self._each = 2 * _POINTS_WITH_GAP
        """How many points of the run make one bucket of those."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def count(self) -> int:
        """The number of points that were added, whether or not all of them are still held."""
        return self._dropped + len(self.values)

    @property
    def exact(self) -> int:
        """The place from which on every point is still held."""
        return self._thinned

    def add(self, step: float, time: float, value: float) -> None:
        """One more point."""
        steps = self.steps
        if steps and step < steps[-1]:
            self.turns.append(len(steps))
        steps.append(step)
        self.times.append(time)
        self.values.append(value)

    def limit(self, most: int) -> None:
        """Hold fewer points if there are more than `most`; the newest quarter of them stays exact.

        The oldest exact ones are thinned as for a drawing, with equally many points of the run in each bucket; when what was thinned takes
        half of the room, buckets become twice as large. So each point costs the same, and old points are as dense as later ones.

        >>> series = Series()
        >>> for step in range(100_000):
        ...     series.add(step, 0.0, 1.0 if step == 777 else 0.0)
        ...     series.limit(1000)
        >>> len(series) <= 1000, series.count, max(series.values), series.steps[0], series.steps[-1] - series.steps[-200]
        (True, 100000, 1.0, 0.0, 199.0)
        """
        if len(self) <= most:
            return
        if self._thinned > most // 2:
            self._each *= 2
            self._thin(0, self._thinned, self._thinned // (2 * _POINTS_WITH_GAP))
        self._thin(self._thinned, self._thinned + most // 4, most // 4 // self._each)
        self.turns = array("q", [place for place in range(1, len(self)) if self.steps[place] < self.steps[place - 1]])
        self._blocks = BlockExtremes()

    def _thin(self, start: int, stop: int, buckets: int) -> None:
        """Replace these points by those that show them."""
        kept = _select_by_bucket(self.values, start, stop, max(1, buckets), None)
        for column in (self.steps, self.times, self.values):
            column[start:stop] = array("d", [column[place] for place in kept])
        self._dropped += stop - start - len(kept)
        self._thinned = start + len(kept)

    def settle(self) -> None:
        """Index new points, so that the next view is fast."""
        self._blocks.follow(self.values)

    def view(self, points: int, low: float | None = None, high: float | None = None) -> dict[str, Any]:
        """Return at most `points` of it between two steps as plain lists; `count` says how many there are in all."""
        shown = [range(0, len(self))] if low is None and high is None else list(self._between(low, high))
        if len(shown) <= 1:
            start, stop = (shown[0].start, shown[0].stop) if shown else (0, 0)
            self.settle()
            places: Sequence[int] = select_points(self.values, start, stop, points, self._blocks)
        else:
            order = [place for stretch in shown for place in stretch]
            places = [order[point] for point in select_points([self.values[place] for place in order], 0, len(order), points)]
        return {**self.part(places), "count": self.count}

    def _between(self, low: float | None, high: float | None) -> Iterator[range]:
        """Return what lies between two steps, of each stretch over which steps do not fall."""
        for first, end in zip([0, *self.turns], [*self.turns, len(self)], strict=True):
            start, stop = visible_range(self.steps, low, high, first, end)
            if stop > start:
                yield range(start, stop)

    def part(self, places: Sequence[int]) -> dict[str, Any]:
        """Return some of the points as plain lists."""

        def pick(column: array[float]) -> list[float]:
            return column[places.start : places.stop].tolist() if isinstance(places, range) else [column[place] for place in places]

        return {
            "steps": to_json_steps(pick(self.steps)),
            "times": to_json_times(pick(self.times)),
            "values": to_json_values(pick(self.values)),
        }


def to_json_values(values: Sequence[float]) -> list[float | None]:
    """Return values with every digit, which a slow ramp far from zero needs; None for those that are not finite.

    >>> to_json_values([1 / 3, 123456789.0, float("nan"), float("inf")])
    [0.3333333333333333, 123456789.0, None, None]
    """
    if isfinite(sum(values)):
        return list(values)
    return [value if isfinite(value) else None for value in values]


def to_json_times(times: Sequence[float]) -> list[float | None]:
    """Rounded to a thousandth of a second."""
    return [round(time, 3) if isfinite(time) else None for time in times]


def to_json_steps(steps: Sequence[float]) -> list[float]:
    """Return whole steps as whole numbers.

    >>> to_json_steps([3.0, 2.5])
    [3, 2.5]
    """
    return [int(step) if step.is_integer() else step for step in steps]


INTERVAL_COLUMNS: Final = ("time", "seconds", "first", "last", "steps", "samples", "tokens", "flops", "mfu")
"""The fields of an interval that are one number."""

_MAX_INTERVALS: Final = 1024
_MAX_NUMBERS: Final = 1 << 16
_DIGITS: Final = 6  # microseconds
_MAX_RANKS: Final = 4096
_MAX_PHASES: Final = 32

_Number = float | int | None


class IntervalList:
    """Intervals in the order of time, each of one or more lines of the ledger.

    >>> ledger = IntervalList(most=4)
    >>> for second in range(10):
    ...     ledger.add(normalize_interval({"time": second, "seconds": 1.0, "steps": 2, "phases": {"data": [0.25]}}))
    >>> len(ledger.list), sum(interval["steps"] for interval in ledger.list), sum(interval["phases"]["data"][0] for interval in ledger.list)
    (3, 20, 2.5)
    """

    def __init__(self, most: int = _MAX_INTERVALS) -> None:
        self.list: list[dict[str, Any]] = []
        self._most = most
        self._each = 1
        """How many lines make one interval."""
        self._filled = 0
        """How many lines the last interval has."""

    def add(self, interval: dict[str, Any]) -> None:
        """One more line of the ledger, as `normalize_interval` gives it."""
        if self.list and self._filled < self._each:
            self.list[-1] = merge_intervals(self.list[-1], interval)
            self._filled += 1
            return
        self.list.append(interval)
        self._filled = 1
        numbers = max(1, sum(map(len, interval["phases"].values())))
        if len(self.list) > max(4, min(self._most, _MAX_NUMBERS // numbers)):
            self._halve()

    def _halve(self) -> None:
        old = self.list
        self._filled = self._filled if len(old) % 2 else self._each + self._filled
        self._each *= 2
        self.list = [merge_intervals(*old[index : index + 2]) if index + 1 < len(old) else old[index] for index in range(0, len(old), 2)]


def normalize_interval(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of the ledger with every field there and of the right kind; what is missing or no number is None.

    >>> normalize_interval({"time": 5.0, "seconds": "x", "phases": {"data": [0.5, None]}})["phases"]
    {'data': [0.5, None]}
    """
    memory = record.get("memory")
    phases = record.get("phases")
    memory = memory if isinstance(memory, dict) else {}
    phases = phases if isinstance(phases, dict) else {}
    return {
        **{name: _to_number(record.get(name)) for name in INTERVAL_COLUMNS},
        "phases": {str(name): _to_numbers(phases[name]) or [] for name in list(phases)[:_MAX_PHASES]},
        "slowest": _to_numbers(record.get("slowest")),
        "memory": {"host": _to_numbers(memory.get("host")), "device": _to_numbers(memory.get("device"))},
    }


def merge_intervals(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return two neighbouring intervals as one."""
    names = [*earlier["phases"], *(name for name in later["phases"] if name not in earlier["phases"])]
    added = {name: _combine(_add, earlier[name], later[name]) for name in ("seconds", "steps", "samples", "tokens", "flops")}
    return {
        "time": later["time"] if later["time"] is not None else earlier["time"],
        "first": earlier["first"] if earlier["first"] is not None else later["first"],
        "last": later["last"] if later["last"] is not None else earlier["last"],
        **added,
        "mfu": _weighted_mfu(earlier, later),
        "phases": {name: _combine_lists(_add, earlier["phases"].get(name), later["phases"].get(name)) or [] for name in names},
        "slowest": _combine_lists(_add, earlier["slowest"], later["slowest"]),
        "memory": {name: _combine_lists(max, earlier["memory"][name], later["memory"][name]) for name in ("host", "device")},
    }


def to_columns(intervals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Intervals as columns, the way the page takes them: a list per field, a list of ranks per interval in those of ranks.

    >>> to_columns([normalize_interval({"time": 1.0, "phases": {"data": [0.5, 0.25]}})])["phases"]
    {'data': [[0.5, 0.25]]}
    """
    names = list(dict.fromkeys(name for interval in intervals for name in interval["phases"]))
    return {
        **{name: [interval[name] for interval in intervals] for name in INTERVAL_COLUMNS},
        "phases": {name: [interval["phases"].get(name, []) for interval in intervals] for name in names},
        "slowest": [interval["slowest"] for interval in intervals],
        "memory": {name: [interval["memory"][name] for interval in intervals] for name in ("host", "device")},
    }


def _to_number(value: Any) -> _Number:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return round(value, _DIGITS) if isfinite(value) else None
    except OverflowError:
        return None


def _to_numbers(value: Any) -> list[_Number] | None:
    return [_to_number(number) for number in value[:_MAX_RANKS]] if isinstance(value, list) else None


def _add(number: float, other: float) -> float:
    return round(number + other, _DIGITS)


def _combine(how: Callable[[Any, Any], Any], number: _Number, other: _Number) -> _Number:
    if number is None or other is None:
        return other if number is None else number
    found: _Number = how(number, other)
    return found


def _combine_lists(how: Callable[[Any, Any], Any], entries: list[_Number] | None, other: list[_Number] | None) -> list[_Number] | None:
    if entries is None or other is None:
        return other if entries is None else entries
    longest = max(len(entries), len(other))
    pairs = zip(entries + [None] * (longest - len(entries)), other + [None] * (longest - len(other)), strict=True)
    return [_combine(how, *pair) for pair in pairs]


def _weighted_mfu(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> _Number:
    if earlier["mfu"] is None or later["mfu"] is None:
        return _combine(_add, earlier["mfu"], later["mfu"])
    first, second = earlier["seconds"] or 0.0, later["seconds"] or 0.0
    if not first + second:
        return float(earlier["mfu"])
    return float((earlier["mfu"] * first + later["mfu"] * second) / (first + second))
