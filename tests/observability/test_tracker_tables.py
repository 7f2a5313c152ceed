"""Tables for trackers: many forms mean the same, and what is not a table is refused with its name."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from slipstream.observability.trackers.values import RejectedValuesError, Table, make_table


class Frame:
    """What `make_table` asks of a frame of pandas."""

    columns = ("a", "b")

    def itertuples(self, index: bool, name: None) -> list[tuple[Any, ...]]:
        return [(1, 2.5), (2, None)]


@pytest.mark.parametrize(
    ("columns", "data"),
    [
        (["a", "b"], [[1, 2.5], (2, None)]),
        (None, {"a": [1, 2], "b": [2.5, None]}),
        (["a", "b"], {"c": [0], "b": (2.5, None), "a": torch.tensor([1, 2])}),
        (None, [{"a": 1, "b": 2.5}, {"a": 2}]),
        (None, Frame()),
    ],
)
def test_table_forms(columns: Any, data: Any) -> None:
    """A table may be given in many forms."""
    assert make_table("t", columns, data) == Table(["a", "b"], [[1, 2.5], [2, None]])


@pytest.mark.parametrize("array", [numpy.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3), [torch.arange(3), numpy.arange(3, 6)]])
def test_array_is_table(array: Any) -> None:
    """An array of two dimensions is a table."""
    assert make_table("t", None, array) == Table(["0", "1", "2"], [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "has no data and no dataframe"),
        ({"data": [1, 2]}, "row 0 of its data is an int, not a row: give rows"),
        ({"data": ["ab"]}, "row 0 of its data is a str, not a row"),
        ({"data": [[1], {"a": 1}]}, "row 1 of its data is a dict, not a row"),
        ({"data": [[1], [1, 2]]}, "its rows have 1 or 2 cells, and its columns are 0"),
        ({"data": {"a": [1], "b": [1, 2]}}, r"different lengths \(a 1, b 2\)"),
        ({"data": {"a": 1}}, "its column a is an int, not a column"),
        ({"data": {"a": [1]}, "columns": ["b"]}, "columns has b, and its data has a"),
        ({"data": torch.zeros(3)}, r"its data is a Tensor of \(3,\)"),
        ({"data": [[1, 2]], "columns": "ab"}, "columns='ab' is a str"),
        ({"dataframe": [1]}, "dataframe= is a list, not a data frame"),
    ],
)
def test_no_table(given: Any, complaint: str) -> None:
    """What is not a table is refused with its name."""
    with pytest.raises(RejectedValuesError, match=f"the table t is left out: .*{complaint}"):
        make_table("t", **{"columns": None, "data": None, **given})
