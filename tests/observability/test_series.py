"""Few points that look like many: nothing that shows is lost, and there are never more than asked for."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite, isnan, nan

from hypothesis import given, settings, strategies as st

from slipstream.observability.run_dir.series import MIN_POINTS, BlockExtremes, Series, select_points, visible_range

VALUES = st.lists(st.one_of(st.floats(-1e300, 1e300), st.sampled_from([nan, inf, -inf])), min_size=1, max_size=300)


def thin_curve(
    xs: Sequence[float], ys: Sequence[float], count: int, low: float | None = None, high: float | None = None
) -> tuple[array[float], array[float]]:
    """The points that a view of a curve shows."""
    places = select_points(ys, *visible_range(xs, low, high), count)
    return array("d", [xs[place] for place in places]), array("d", [ys[place] for place in places])


@settings(max_examples=150)
@given(ys=VALUES, count=st.integers(0, 120), gaps=st.booleans(), data=st.data())
def test_thinning_keeps_extremes(
    ys: list[float], count: int, gaps: bool, data: st.DataObject
) -> None:
    """First last smallest and largest stay in order and within the count."""
    ys = ys if gaps else [y if isfinite(y) else 0.0 for y in ys]
    xs = sorted(data.draw(st.lists(st.integers(0, 1000), min_size=len(ys), max_size=len(ys))))
    few_xs, few_ys = thin_curve(xs, array("d", ys), count)
    assert len(few_xs) == len(few_ys) <= max(count, MIN_POINTS)
    assert all(x <= other for x, other in pairwise(few_xs))
    assert (few_xs[0], few_xs[-1]) == (xs[0], xs[-1])
    assert repr(few_ys[0]) == repr(float(ys[0]))
    assert repr(few_ys[-1]) == repr(float(ys[-1]))
    numbers, few_numbers = [y for y in ys if isfinite(y)], [y for y in few_ys if isfinite(y)]
    if numbers:
        assert (min(numbers), max(numbers)) == (min(few_numbers), max(few_numbers))
    assert len(numbers) == len(ys) or len(few_numbers) < len(few_ys), "a gap stays a gap"


@settings(max_examples=60)
@given(ys=VALUES, count=st.integers(5, 60), start=st.integers(0, 50), length=st.integers(0, 300))
def test_bucket_extremes(ys: list[float], count: int, start: int, length: int) -> None:
    """Every bucket keeps its extremes."""
    start = min(start, len(ys))
    stop = min(start + length, len(ys))
    places = list(select_points(ys, start, stop, count))
    assert places == sorted(set(places))
    assert all(start <= place < stop for place in places)
    for entry, other in pairwise(places):  # what lies between two points that stay is within the range of their neighbourhood
        between = [value for value in ys[entry + 1 : other] if isfinite(value)]
        around = [ys[place] for place in places if isfinite(ys[place]) and abs(place - entry) <= 2 * (stop - start) // (count // 5) + 2]
        assert not between or (min(around) <= min(between) and max(between) <= max(around))


@settings(max_examples=60)
@given(
    number=st.integers(0, 10**6),
    length=st.integers(600, 3000),
    known=st.integers(0, 3000),
    bounds=st.tuples(st.integers(0, 3000), st.integers(0, 3000)),
    count=st.integers(5, 16),
    gaps=st.sampled_from([0, 1, 40]),
)
def test_blocks_change_only_speed(
    number: int, length: int, known: int, bounds: tuple[int, int], count: int, gaps: int
) -> None:
    """Known blocks change the speed and nothing that is promised."""
    seed = random.Random(number)
    ys = array("d", [seed.random() for _ in range(length)])
    for _ in range(gaps):
        ys[seed.randrange(length)] = seed.choice([nan, inf, -inf])
    blocks = BlockExtremes()
    blocks.follow(ys[:known])
    start, stop = sorted(min(bound, length) for bound in bounds)
    places = list(select_points(ys, start, stop, count, blocks))
    assert places == sorted(set(places))
    assert len(places) <= count
    numbers = [value for value in ys[start:stop] if isfinite(value)]
    few = [ys[place] for place in places if isfinite(ys[place])]
    assert (min(numbers, default=0), max(numbers, default=0)) == (min(few, default=0), max(few, default=0))
    assert (places[0], places[-1]) == (start, stop - 1) if stop > start else places == []
    assert len(numbers) == stop - start or len(few) < len(places), "a gap stays a gap"


def test_spike_kept() -> None:
    """A spike between any two points is kept."""
    for place in range(0, 10_000, 97):
        ys = array("d", bytes(80_000))
        ys[place] = 1.0
        assert 1.0 in thin_curve(range(10_000), ys, 40)[1]


def test_few_points_kept() -> None:
    """A few points are all kept as they are."""
    xs, ys = thin_curve([1, 2, 3], [nan, 5.0, inf], 5)
    assert list(xs) == [1, 2, 3]
    assert isnan(ys[0])
    assert list(ys[1:]) == [5.0, inf]


def test_window_neighbours() -> None:
    """A window has a neighbour on each side."""
    xs = range(0, 1000, 10)
    assert visible_range(xs, None, None) == (0, 100)
    assert [xs[index] for index in range(*visible_range(xs, 95, 125))] == [90, 100, 110, 120, 130]
    assert list(thin_curve(xs, list(map(float, xs)), 50, 100, 100)[0]) == [90, 100, 110]
    assert list(thin_curve(xs, list(map(float, xs)), 50, 5000, 6000)[0]) == []
    assert list(thin_curve(xs, list(map(float, xs)), 50, -20, -10)[0]) == []
    assert list(thin_curve(xs, list(map(float, xs)), 50, 20, 10)[0]) == []
    assert list(thin_curve(xs, list(map(float, xs)), 50, 101, 102)[0]) == [100, 110], "a line that passes through"
    assert list(thin_curve([], [], 50, 1, 2)[0]) == []


@settings(max_examples=30)
@given(
    most=st.integers(100, 400), count=st.integers(1, 6000), spikes=st.lists(st.integers(0, 5999), max_size=3), restart=st.integers(0, 5999)
)
def test_limited_series(most: int, count: int, spikes: list[int], restart: int) -> None:
    """A series beyond its limit keeps first, last, extremes, gaps and restarts, its newest quarter, and the number of all points."""
    series = Series()
    for place in range(count):
        value = nan if place % 1000 == 500 else float(place in spikes)
        series.add(place if place < restart else place - restart, float(place), value)
        series.limit(most)
    assert len(series) <= most
    assert series.count == count
    assert (series.times[0], series.times[-1]) == (0.0, count - 1.0)
    recent = min(count, most // 4)
    assert series.times[-recent:].tolist() == list(range(count - recent, count))
    assert len(series) - series.exact >= recent
    assert sorted(series.times) == series.times.tolist()
    shown = [value for value in series.values if isfinite(value)]
    assert not shown or max(shown) == float(any(spike < count and spike % 1000 != 500 for spike in spikes))
    assert any(isnan(value) for value in series.values) == (count > 500)
    assert series.turns.tolist() == [place for place in range(1, len(series)) if series.steps[place] < series.steps[place - 1]]
    assert series.view(50)["count"] == count


def test_limited_series_uniform() -> None:
    """Old points are about as dense as later ones, and the work for each point does not grow."""
    series, looked = Series(), 0
    for place in range(200_000):
        series.add(place, 0.0, place % 7)
        before = len(series)
        series.limit(8000)
        looked += before if len(series) < before else 0
    thinned = series.steps[: series.exact]
    distances = [later - earlier for earlier, later in pairwise(thinned)]
    halves = sum(distances[: len(distances) // 2]), sum(distances[len(distances) // 2 :])
    assert 0.3 < halves[0] / halves[1] < 3
    assert looked < 10 * 200_000
