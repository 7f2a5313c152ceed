"""Boxes of tensors: what they have in common, where that lies, and what files say of them. numpy is the oracle."""

from __future__ import annotations

import json

import numpy
import pytest
from hypothesis import given, settings, strategies as st

from slipstream.checkpoint.shard_layout import (
    SHARDING,
    Box,
    ShardPosition,
    cover_box,
    describe_positions,
    element_runs,
    intersect,
    read_positions,
    whole_box,
)
from slipstream.errors import CheckpointError
from slipstream.files.safetensors_layout import SafetensorsLayout, plan_layout


@st.composite
def boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes in it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    found = []
    for _ in range(count):
        offset = tuple(draw(st.integers(0, size)) for size in shape)
        found.append(Box(offset, tuple(draw(st.integers(0, size - start)) for start, size in zip(offset, shape, strict=True))))
    return shape, found


@settings(max_examples=150, deadline=None)
@given(boxes(2))
def test_what_two_boxes_in_common(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    """What two boxes have in common."""
    shape, (entry, other) = drawn
    counts = numpy.zeros(shape, int)
    counts[entry.slices()] += 1
    counts[other.slices()] += 1
    both = intersect(entry, other)
    expected = counts == 2
    found = numpy.zeros(shape, bool)
    if both is not None:
        found[both.slices()] = True
        assert both.volume == expected.sum()
    assert numpy.array_equal(found, expected)


@settings(max_examples=150, deadline=None)
@given(boxes(1), st.integers(0, 8))
def test_element_runs_of_a_box(drawn: tuple[tuple[int, ...], list[Box]], gap: int) -> None:
    """The spans of a box are its elements and small gaps."""
    shape, (box,) = drawn
    numbers = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape)
    wanted = set(numbers[box.slices()].ravel().tolist())
    found = element_runs(box, shape, gap)
    covered = {element for first, end in found for element in range(first, end)}
    assert wanted <= covered
    assert all(first in wanted and end - 1 in wanted for first, end in found)
    if gap == 0:
        assert covered == wanted
    assert all(end < after for (_, end), (after, _) in zip(found, found[1:], strict=False)) or gap == 0


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_cut_gives_any_box(data: st.DataObject) -> None:
    """Any cut of a tensor gives any box of it."""
    shape, (wanted,) = data.draw(boxes(1))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    shards = []
    for places in numpy.ndindex(*(len(cut) - 1 for cut in cuts)):
        edges = [(cut[place], cut[place + 1]) for cut, place in zip(cuts, places, strict=True)]
        shards.append(Box(tuple(start for start, _ in edges), tuple(end - start for start, end in edges)))
    full = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape)
    made = numpy.full(wanted.shape, -1)
    for number, part in cover_box(shards, wanted):
        made[part.relative_to(wanted).slices()] = full[shards[number].slices()][part.relative_to(shards[number]).slices()]
    assert numpy.array_equal(made, full[wanted.slices()])


@pytest.mark.parametrize("shards", [[], [(0, 2)], [(0, 3), (2, 2), (1, 1)], [(0, 2), (0, 2)]])
def test_shards_not_whole_refused(shards: list[tuple[int, int]]) -> None:
    """Shards that are not the whole are refused."""
    with pytest.raises(ValueError, match="shard"):
        list(cover_box([Box((start,), (length,)) for start, length in shards], whole_box((4,))))


def layout_with(said: object) -> SafetensorsLayout:
    metadata = {} if said is None else {SHARDING: json.dumps(said)}
    return plan_layout([("weight", "F32", (2, 2))], metadata)[1]


def test_file_says_shards_holds() -> None:
    """A file says which shards it holds."""
    places = {"weight": ShardPosition((4, 2), Box((2, 0), (2, 2)))}
    assert read_positions(plan_layout([("weight", "F32", (2, 2))], describe_positions(places))[1], "a file") == places


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {},
        {"weight": None},
        {"weight": {"saved_offsets": [2, 0]}},
        {"weight": {"saved_offsets": [3, 0], "global_shape": [4, 2]}},
        {"weight": {"saved_offsets": [-1, 0], "global_shape": [4, 2]}},
        {"weight": {"saved_offsets": [0], "global_shape": [4]}},
        {"weight": {"saved_offsets": [0, True], "global_shape": [4, 4]}},
        {"weight": {"saved_offsets": [0, 0], "global_shape": [2**62, 2**62]}},
        {"weight": {"saved_offsets": [0, 0], "global_shape": [4, 2]}, "other": {"saved_offsets": [0], "global_shape": [1]}},
    ],
)
def test_file_does_not_say_refused(said: object) -> None:
    """A file that does not say it is refused."""
    with pytest.raises(CheckpointError, match="a file"):
        read_positions(layout_with(said), "a file")
