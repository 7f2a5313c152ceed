"""Every item is in one unit, the expensive ones first, neighbours cost nearly the same, and claims shrink towards the end."""

from __future__ import annotations

import heapq
import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

from slipstream.distributed.work_queue.items import ClaimSize, WorkItems, WorkUnits, check_cost, fingerprint, order_by_cost
from slipstream.errors import ConfigError

COSTS = st.lists(st.floats(0, 1e6), max_size=60)
Row = namedtuple("Row", ["id", "name"])  # noqa: PYI024


@given(COSTS, st.integers(1, 9), st.sets(st.integers(0, 59)))
def test_items_in_exactly_one_unit(costs: list[float], size: int, done: set[int]) -> None:
    """Every item that is not done is in one unit."""
    units = WorkUnits(order_by_cost(costs), size, without=done)
    by_cost = WorkUnits(order_by_cost(costs), size, without=done, costs=costs)
    handed = [position for unit in units for position in unit]
    assert [position for unit in by_cost for position in unit] == handed
    assert sorted(len(unit) for unit in by_cost) == sorted(len(unit) for unit in units), "one is short, wherever it is"
    assert sorted(handed) == [position for position in range(len(costs)) if position not in done]
    assert [len(unit) for unit in units][:-1] == [size] * max(0, len(units) - 1)
    assert units.items == len(handed)


@given(COSTS, st.integers(1, 9))
def test_order_by_cost_is_stable(costs: list[float], size: int) -> None:
    """The expensive come first and equals keep their order."""
    order = order_by_cost(costs)
    assert [(-costs[position], position) for position in order] == sorted((-cost, position) for position, cost in enumerate(costs))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(1, 8))
@example([1, 2, 2, 1], 3)
def test_cost_order_never_pads_more(lengths: list[int], size: int) -> None:
    """Grouping by length never pads more than the order of the input."""

    def padded(units: WorkUnits) -> int:
        return sum(len(unit) * max(lengths[position] for position in unit) for unit in units)

    order = order_by_cost([float(length) for length in lengths])
    assert padded(WorkUnits(order, size, costs=lengths)) <= padded(WorkUnits(range(len(lengths)), size))


def makespan(costs: list[float], processes: int, request: float) -> float:
    """What `Pace` makes of work of these costs, with a claim that takes so long, simulated."""
    paces = [ClaimSize(processes) for _ in range(processes)]
    free = [(0.0, rank) for rank in range(processes)]
    taken, ends = 0, []
    while free:
        now, rank = heapq.heappop(free)
        wanted = paces[rank].wanted(len(costs) - taken, now)
        mine = costs[taken : taken + wanted]
        taken += len(mine)
        paces[rank].waited(request)
        if mine:
            paces[rank].took(len(mine), sum(mine))
            heapq.heappush(free, (now + request + sum(mine), rank))
        else:
            ends.append(now + request)
    return max(ends)


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("unit", [0.001, 1.0])
def test_heavy_tail_shared_evenly(processes: int, unit: float) -> None:
    """A heavy tail is shared nearly ideally however long items take."""
    ratios, by_cost = [], []
    for seed in range(40):
        draw = random.Random(seed)
        costs = [unit * min(50.0, draw.paretovariate(1.0)) for _ in range(600)]
        ideal = max(sum(costs) / processes, max(costs))
        ratios.append(makespan(costs, processes, request=50e-6) / ideal)
        by_cost.append(makespan(sorted(costs, reverse=True), processes, request=50e-6) / ideal)
    assert sorted(ratios)[20] < 1.05
    assert max(ratios) < 1.1
    assert max(by_cost) < 1.1


def test_tiny_items_claimed_in_bulk() -> None:
    """Tiny items are taken by the hundred."""
    costs = [1e-6] * 100_000
    assert makespan(costs, 4, request=50e-6) < 1.3 * sum(costs) / 4


@pytest.mark.parametrize("value", ["3", None, float("nan"), float("inf"), [1], b"1"])
def test_a_key_has_to_give_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match="item 7"):
        check_cost(value, 7)


def test_numbers_of_libraries_are_costs_too() -> None:
    assert [check_cost(entry, 0) for entry in (True, np.int64(3), torch.tensor(2.5))] == [1.0, 3.0, 2.5]


# -- items ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "second"),
    [
        ([1, 2, 3], 2),
        (("a", "b"), "b"),
        (range(5, 9), 6),
        ({"id": [1, 2], "name": ("a", "b")}, {"id": 2, "name": "b"}),
        (Row([1, 2], ["a", "b"]), Row(2, "b")),
        ((letter for letter in "abc"), "b"),
        ({"a": 1, "b": 2}.keys(), "b"),
    ],
)
def test_items_have_positions(inputs: Any, second: Any) -> None:
    items = WorkItems(inputs)
    assert items[1] == second
    assert items.several([1, 0])[0] == second


def test_rows_of_tensors_are_items() -> None:
    items = WorkItems({"ids": torch.arange(6).reshape(3, 2), "kept": np.array([1, 2, 3])})
    assert items[2]["ids"].tolist() == [4, 5]
    assert items[2]["kept"] == 3


@pytest.mark.parametrize("inputs", ["text", {1, 2}, 5, {"a": [1], "b": [1, 2]}, torch.tensor(1)])
def test_what_has_no_items_is_refused(inputs: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="split_between_processes"):
        WorkItems(inputs)


def test_dataset_read_on_demand() -> None:
    """A dataset is read where it is asked for."""

    class Rows:
        read: list[int] = []

        def __len__(self) -> int:
            return 5

        def __getitem__(self, position: int) -> int:
            self.read.append(position)
            return position * 10

    rows = Rows()
    items = WorkItems(rows)
    items.fingerprint()
    assert rows.read == []
    assert (items[3], rows.read) == (30, [3])


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(st.lists(PLAIN, max_size=4), st.lists(PLAIN, max_size=4))
def test_fingerprint_identifies_plain_inputs(entries: list[Any], other: list[Any]) -> None:
    """Plain inputs have the same fingerprint only if they are the same."""
    same = repr(entries) == repr(other)  # 1 == 1.0 == True, and -0.0 == 0.0: a function may treat them differently
    assert (WorkItems(entries).fingerprint() == WorkItems(other).fingerprint()) >= same
    if entries != other:
        assert WorkItems(entries).fingerprint() != WorkItems(other).fingerprint()


def test_fingerprint_covers_array_contents() -> None:
    """Arrays count by what is in them."""
    base = torch.arange(6, dtype=torch.float32)
    prints = [WorkItems(entry).fingerprint() for entry in (base, base + 1, base.double(), base.reshape(2, 3), base.numpy(), base.clone())]
    assert len(set(prints[:5])) == 5
    assert prints[5] == prints[0]
    assert fingerprint(torch.ones(2)) == fingerprint(torch.ones(2)) != fingerprint(torch.zeros(2))
    assert fingerprint({1, 2}) is fingerprint([object()]) is None
