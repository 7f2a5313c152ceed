"""The accumulation of one model, as pure arithmetic, against its readable twin."""

from __future__ import annotations

import pytest
import torch
from accumulation_twin import Block, Clear, Event, Mean, Sum, closes, gradients
from hypothesis import given, settings, strategies as st

from slipstream.distributed.gradient_state import LoaderPass
from slipstream.errors import StateError
from slipstream.training.accumulation import Accumulation


def run(history: list[Event], steps: int, *, known: bool = True) -> tuple[list[bool], list[float]]:
    """The machine, driven as the stepper does: where updates end, and their gradients."""
    accumulation, present = Accumulation(), 0.0
    closing, found = [], []
    batches, current = _batches(history, known), None
    for event in history:
        if isinstance(event, Block):
            if closing and closing[-1]:
                found.append(present)
                present = 0.0
            current = batches[event.batch] if event.batch is not None else None
            closing.append(accumulation.begin(steps, current))
        elif isinstance(event, Mean):
            divisor = accumulation.add_mean(event.count)
            present = present * accumulation.change_divisor(divisor) + event.value * event.count / divisor
        elif isinstance(event, Sum):
            accumulation.add_sum(event.weight)
            if accumulation.closing:
                divisor = accumulation.sum_divisor(accumulation.total)
            else:
                if accumulation.estimate is None:
                    accumulation.set_estimate(event.weight)
                divisor = accumulation.estimate or 1.0
            present = present * accumulation.change_divisor(divisor) + event.value / divisor
        elif not accumulation.holds_gradients:
            accumulation.on_zero_grad()
            present = 0.0
    if closing and closing[-1]:
        found.append(present)
    return closing, found


def _batches(history: list[Event], known: bool) -> dict[int, object]:
    """The batches of a history, as a loader would hand them out."""
    blocks = [event for event in history if isinstance(event, Block) and event.batch is not None]
    found: dict[int, object] = {}
    reading = LoaderPass()
    for place, block in enumerate(blocks):
        if block.batch not in found:
            following = blocks[place + 1 :]
            left = 0
            if not block.end:
                ends = [number for number, later in enumerate(following) if later.end]
                inside = following[: ends[0] + 1] if ends else following
                left = len({later.batch for later in inside} - {block.batch})
            found[block.batch] = reading.hand_out(torch.ones(1), block.end, left if known or block.end else None, None, None)
            if block.end:
                reading = LoaderPass()
    return found


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Passes over a loader, whose batches may be cut into pieces; losses of one kind; gradients cleared anywhere."""
    history: list[Event] = []
    number, sums = 0, draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        length, pieces = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 1, 2]))
        for place in range(length):
            number += 1
            count = draw(st.sampled_from([1.0, 1.0, 0.5, 0.25]))
            for _ in range(pieces):
                history.append(Block(number, place == length - 1))
                history += [Clear()] * draw(st.integers(0, 1))
                for _ in range(draw(st.integers(1, 2))):
                    value = draw(st.integers(-8, 8))
                    history.append(Sum(value, draw(st.integers(0, 5))) if sums else Mean(value, count))
                    history += [Clear()] * draw(st.sampled_from([0, 0, 1]))
    return history


@given(history=histories(), steps=st.integers(1, 5), known=st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_machine_is_its_twin(history: list[Event], steps: int, known: bool) -> None:
    """Where updates end, and what their gradients are divided by."""
    closing, found = run(history, steps, known=known)
    assert closing == closes(history, steps)
    assert found == pytest.approx(gradients(history, steps), abs=1e-9)


@given(history=histories(), steps=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_saved_and_restored(history: list[Event], steps: int) -> None:
    """A state that is saved between two blocks goes on as if it had not been."""
    accumulation = Accumulation()
    batches = _batches(history, known=True)
    blocks = [event for event in history if isinstance(event, Block)]
    for place, block in enumerate(blocks):
        if place and blocks[place - 1].batch != block.batch:
            fresh = Accumulation()
            fresh.restore(accumulation.state())
            accumulation = fresh
        assert accumulation.begin(steps, batches[block.batch]) == closes(blocks, steps)[place]


def test_short_window() -> None:
    """A short window of known length.

    It is divided by its size from its first batch on.
    """
    reading, accumulation = LoaderPass(), Accumulation()
    accumulation.begin(4, reading.hand_out(torch.ones(1), False, 1, None, None))
    assert accumulation.add_mean() == 2.0
    accumulation.begin(4, reading.hand_out(torch.ones(1), True, 0, None, None))
    assert (accumulation.change_divisor(accumulation.add_mean()), accumulation.gradient_divisor) == (1.0, 2.0)


def test_means_and_sums_cannot_be_mixed() -> None:
    accumulation = Accumulation()
    accumulation.begin(2, None)
    accumulation.add_mean()
    accumulation.begin(2, None)
    with pytest.raises(StateError, match="weight= to every backward of a window, or to none"):
        accumulation.add_sum(3)


def test_gradients_are_held() -> None:
    """From the first backward of a window to its last: clearing them then does nothing."""
    accumulation, held = Accumulation(), []
    for _ in range(3):
        accumulation.begin(3, None)
        before = accumulation.holds_gradients
        accumulation.add_mean()
        held.append((before, accumulation.holds_gradients))
    assert held == [(False, True), (True, True), (True, False)]
    accumulation.begin(3, None)
    assert not accumulation.holds_gradients, "what is there belongs to the update before"
