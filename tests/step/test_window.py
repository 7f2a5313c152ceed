"""The window of accumulation, as pure arithmetic: the divisor of an update is what its window really held."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from slipstream.errors import StateError
from slipstream.step.window import Window


def run(window: Window, steps: int, values: list[float], counts: list[float], *, known: bool) -> list[float]:
    """The gradients of the updates of one pass, as the stepper would make them of gradients `values`."""
    gradient, updates = 0.0, []
    for position, (value, count) in enumerate(zip(values, counts, strict=True)):
        left = len(values) - position - 1
        closing = window.begin(steps, end=left == 0, left=left if known else None)
        change = window.add_mean(count)
        gradient = gradient * change.existing + value * count / change.divisor
        if closing:
            updates.append(gradient)
            gradient = 0.0
    return updates


@given(
    steps=st.integers(1, 5),
    batches=st.lists(st.tuples(st.floats(-10, 10), st.sampled_from([1.0, 1.0, 0.5, 0.25])), min_size=1, max_size=12),
    known=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_update_is_the_mean_over_what_its_window_held(steps: int, batches: list[tuple[float, float]], known: bool) -> None:
    values, counts = [value for value, _ in batches], [count for _, count in batches]
    updates = run(Window(), steps, values, counts, known=known)
    windows = [range(start, min(start + steps, len(values))) for start in range(0, len(values), steps)]
    expected = [sum(values[i] * counts[i] for i in window) / sum(counts[i] for i in window) for window in windows]
    assert len(updates) == len(expected)
    assert all(math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9) for one, other in zip(updates, expected, strict=True))


def test_a_short_last_window_of_known_length_is_divided_by_its_size_from_its_first_batch_on() -> None:
    window = Window()
    window.begin(4, end=False, left=1)
    assert window.add_mean().divisor == 2.0
    window.begin(4, end=True, left=0)
    change = window.add_mean()
    assert (change.divisor, change.existing) == (2.0, 1.0)


def test_several_losses_of_one_batch_count_as_one_batch() -> None:
    window = Window()
    window.begin(1, end=False, left=None)
    assert [window.add_mean().divisor, window.add_mean().divisor] == [1.0, 1.0]


@given(steps=st.integers(1, 4), sums=st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 9)), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_sums_with_weights_are_divided_by_the_weight_of_the_window(steps: int, sums: list[tuple[float, int]]) -> None:
    window, gradient, updates = Window(), 0.0, []
    for position, (value, weight) in enumerate(sums):
        closing = window.begin(steps, end=position == len(sums) - 1, left=None)
        total = window.add_sum(weight)
        change = window.settle_sum(total)
        gradient = gradient * change.existing + value / change.divisor
        if closing:
            updates.append(gradient)
            gradient = 0.0
    windows = [sums[start : start + steps] for start in range(0, len(sums), steps)]
    expected = [sum(value for value, _ in window) / (sum(weight for _, weight in window) or 1) for window in windows]
    assert all(math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9) for one, other in zip(updates, expected, strict=True))


def test_means_and_sums_cannot_be_mixed_in_one_window() -> None:
    window = Window()
    window.begin(2, end=False, left=None)
    window.add_mean()
    window.begin(2, end=False, left=None)
    with pytest.raises(StateError, match="weight= to every backward of a window, or to none"):
        window.add_sum(3)


def test_gradients_are_held_from_the_first_backward_of_a_window_to_its_last() -> None:
    window, held = Window(), []
    for _ in range(3):
        window.begin(3, end=False, left=None)
        before = window.holds_gradients
        window.add_mean()
        held.append((before, window.holds_gradients))
    assert held == [(False, True), (True, True), (True, False)]
    window.begin(3, end=False, left=None)
    assert not window.holds_gradients, "what is there belongs to the update before"
