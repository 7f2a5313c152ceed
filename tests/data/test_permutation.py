"""Computed orders: every sample once, the same in any block, pinned for all platforms, and without a pattern that statistics would show.

Keys are fixed, so a test of chance passes always or never. Bounds are five standard deviations of what uniform permutations give.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy
import pytest
from hypothesis import example, given, settings, strategies as st

from slipstream.data.permutation import LAID_OUT, Draws, Permutation, RepeatedPermutation, Selection
from slipstream.data.plan import ComputedOrder
from slipstream.data.random_state import derive_seed

LARGE = (LAID_OUT + 1, 5000, 10_007)
KEYS = st.integers(0, 2**64 - 1)


def positions(start: int, stop: int) -> Any:
    return numpy.arange(start, stop, dtype=numpy.uint64)


def whole(order: ComputedOrder) -> list[Any]:
    return order.look_up(positions(0, len(order)))


def permutations(length: int, number: int) -> Any:
    """Permutations of many keys, a row each."""
    return numpy.array([whole(Permutation(length, derive_seed(3, key))) for key in range(number)])


def is_uniform(counts: Any, *, lost: float = 1.0) -> bool:
    """Whether counts could come from equal chances: chi-square within five standard deviations; `lost` degrees of freedom are not free."""
    counts = numpy.asarray(counts, float).ravel()
    expected, free = counts.mean(), counts.size - lost
    return bool(abs(((counts - expected) ** 2 / expected).sum() - free) < 5 * math.sqrt(2 * free))


# -- what an order is ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 20_000), KEYS)
@example(LAID_OUT, 0)
@example(LAID_OUT + 1, 2**64 - 1)
@example(128 * 128, 1)
@settings(max_examples=60, deadline=None)
def test_every_sample_once(length: int, key: int) -> None:
    assert sorted(whole(Permutation(length, key))) == list(range(length))


@given(st.integers(1, 10**15), KEYS, st.data())
@settings(max_examples=60, deadline=None)
def test_any_block_is_a_part_of_the_whole(length: int, key: int, data: Any) -> None:
    """A block of positions, in any shape, gives what the positions give one by one; samples are in range and not repeated."""
    start = data.draw(st.integers(0, length - 1))
    block = positions(start, min(length, start + 24))
    order = Permutation(length, key)
    found = order.look_up(block)
    assert found == [order.look_up(block[place : place + 1])[0] for place in range(len(block))]
    assert sum(order.look_up(block.reshape(1, -1)), []) == found
    assert len(set(found)) == len(found)
    assert all(0 <= sample < length for sample in found)


def test_order_is_pinned() -> None:
    """Orders are part of what a checkpoint means: another one would be another version (`epoch_state.ORDER_VERSIONS`)."""
    assert whole(Permutation(10, 7)) == PINNED[0]
    assert Permutation(LAID_OUT + 1, 7).look_up(positions(0, 5)) == PINNED[1]
    assert Permutation(10**9, 7).look_up(positions(0, 5)) == PINNED[2]
    assert Permutation(10**9, 2**64 - 1).look_up(positions(10**9 - 5, 10**9)) == PINNED[3]
    assert whole(RepeatedPermutation(3, 8, 7)) == PINNED[4]
    assert whole(Draws(10**9, 4, 7)) == PINNED[5]
    assert whole(Selection("abcde", 7)) == PINNED[6]


def test_rounds_over_few_samples() -> None:
    """Each round over the samples has every one, in an order of its own; a short last round has each at most once."""
    order = whole(RepeatedPermutation(7, 60, 5))
    rounds = [order[begin : begin + 7] for begin in range(0, 60, 7)]
    assert all(sorted(part) == list(range(7)) for part in rounds[:-1])
    assert len(set(rounds[-1])) == 4
    assert len({tuple(part) for part in rounds}) == len(rounds)
    assert RepeatedPermutation(7, 60, 5).look_up(positions(5, 30)) == order[5:30]


@given(st.integers(1, 40), st.lists(st.integers(0, 10_000), max_size=60), KEYS)
@settings(max_examples=60, deadline=None)
def test_rounds_at_any_positions(count: int, places: list[int], key: int) -> None:
    """Positions in any order, of any rounds, give what they give one by one."""
    order = RepeatedPermutation(count, 10_001, key)
    together = order.look_up(numpy.array(places, numpy.uint64))
    assert together == [order.look_up(positions(place, place + 1))[0] for place in places]


class Counted(numpy.ndarray[Any, Any]):
    """An array that counts the elements that arithmetic and comparisons on it, and on what comes of them, go through."""

    elements = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [entry.view(numpy.ndarray) if isinstance(entry, Counted) else entry for entry in inputs]
        out = tuple(entry.view(numpy.ndarray) if isinstance(entry, Counted) else entry for entry in options.pop("out", ()))
        Counted.elements += max(numpy.size(entry) for entry in plain)
        result = getattr(ufunc, method)(*plain, **options, **({"out": out} if out else {}))
        return result.view(Counted) if isinstance(result, numpy.ndarray) else result


def test_many_rounds_cost_what_their_positions_cost() -> None:
    """Twice the positions are twice the work, however few samples a round has."""

    def work(count: int) -> int:
        Counted.elements = 0
        RepeatedPermutation(3, 10**6, 5).look_up(positions(0, count).view(Counted))
        return Counted.elements

    assert work(1800) < 3 * work(900)


def test_selection_keeps_values() -> None:
    values = [f"sample {number}" for number in range(5000)]
    order = Selection(values, 5)
    assert sorted(whole(order)) == sorted(values)
    assert order.look_up(positions(0, 6).reshape(3, 2)) == [[values[place] for place in row] for row in
                                                            Permutation(5000, 5).look_up(positions(0, 6).reshape(3, 2))]  # fmt: skip


# -- chance ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_order_of_few_samples(length: int) -> None:
    """All n! orders occur equally often."""
    orders = math.factorial(length)
    counts = Counter(tuple(order) for order in permutations(length, 100 * orders).tolist())
    assert len(counts) == orders
    assert is_uniform(list(counts.values()))


@pytest.mark.parametrize("length", [2, 3, 5, 10, 100])
def test_every_sample_at_every_position(length: int) -> None:
    number = 60 * length
    table = numpy.zeros((length, length))
    for order in permutations(length, number):
        table[numpy.arange(length), order] += 1
    # rows and columns have fixed sums, which leaves (n - 1)^2 degrees of freedom and makes cells vary a little more
    assert is_uniform(number / length + (table - number / length) * math.sqrt(1 - 1 / length), lost=2 * length - 1)


@pytest.mark.parametrize("length", [LAID_OUT, *LARGE])
def test_every_region_at_every_region(length: int) -> None:
    """Of many samples: each sixteenth of the samples is found equally often in each sixteenth of the positions."""
    orders = permutations(length, 60)[:, : length // 16 * 16]
    table = numpy.zeros((16, 16))
    numpy.add.at(table, (numpy.arange(orders.shape[1]) * 16 // orders.shape[1] + numpy.zeros_like(orders), orders * 16 // length), 1)
    expected = numpy.diff([-(-length * part // 16) for part in range(17)]) * orders.size / 16 / length
    assert (((table - expected) ** 2 / expected).sum() - 15**2) < 5 * math.sqrt(2 * 15**2)


@pytest.mark.parametrize("length", [10, 100, 1000, *LARGE])
def test_neighbours_are_unrelated(length: int) -> None:
    """The difference of neighbouring samples is any, neighbours do not correlate, and half of them descend."""
    orders = permutations(length, 300)
    differences = (orders[:, 1:] - orders[:, :-1]) % length
    assert is_uniform(numpy.bincount(differences.ravel(), minlength=length)[1:])
    centred = orders - (length - 1) / 2
    products = (centred[:, 1:] * centred[:, :-1]).sum(axis=1) / ((length**2 - 1) / 12)
    assert abs(products.mean() + 1) < 5 * products.std() / math.sqrt(len(products))
    descents = (differences != orders[:, 1:] - orders[:, :-1]).sum(axis=1)
    assert abs(descents.mean() - (length - 1) / 2) < 5 * math.sqrt((length + 1) / 12 / len(descents))
    assert abs(descents.var() / ((length + 1) / 12) - 1) < 5 * math.sqrt(2 / len(descents))


@pytest.mark.parametrize("length", [10, 100, *LARGE])
def test_fixed_points(length: int) -> None:
    """The number of samples that stay where they are has mean and variance 1 (a Poisson distribution)."""
    orders = permutations(length, 500)
    counts = (orders == numpy.arange(length)).sum(axis=1)
    assert abs(counts.mean() - 1) < 5 / math.sqrt(len(counts))
    assert abs(counts.var() - 1) < 5 * math.sqrt(3 / len(counts))


@pytest.mark.parametrize("length", [LAID_OUT + 1, 10**9])
def test_pairs_in_rows_and_columns(length: int) -> None:
    """Positions that share a row or a column of the network, or follow each other, are sent to unrelated places of it."""
    columns = int(Permutation(length, 0)._columns)
    places = numpy.array([0, 1, columns, 2 * columns, columns + 1, length - 1], numpy.uint64)
    moved = numpy.array([Permutation(length, derive_seed(5, key)).look_up(places) for key in range(1500)])
    same = [moved[:, first] * 8 // length * 8 + moved[:, second] * 8 // length for first in range(6) for second in range(first)]
    assert all(is_uniform(numpy.bincount(pair, minlength=64)) for pair in same)


def test_keys_are_unrelated() -> None:
    """Neighbouring keys, as those of epochs, give unrelated orders."""
    orders = [numpy.array(whole(Permutation(5000, key))) for key in range(40)]
    same = [int((first == second).sum()) for number, first in enumerate(orders) for second in orders[:number]]
    assert abs(numpy.mean(same) - 1) < 5 / math.sqrt(len(same))


def test_draws_are_independent() -> None:
    """Samples that are drawn with replacement are equally likely, also after each other."""
    drawn = numpy.array(whole(Draws(10, 40_000, 7)))
    assert is_uniform(numpy.bincount(drawn))
    assert is_uniform(numpy.bincount(drawn[1:] * 10 + drawn[:-1]))


PINNED: list[Any] = [
    [2, 0, 9, 6, 8, 1, 5, 7, 4, 3],
    [1948, 584, 3428, 1168, 3329],
    [249901220, 967738380, 750263172, 460534390, 713971218],
    [479533204, 726663181, 782252083, 384486441, 875788986],
    [2, 1, 0, 0, 2, 1, 0, 1],
    [577507604, 892374487, 594955804, 815609346],
    ["c", "a", "b", "e", "d"],
]
