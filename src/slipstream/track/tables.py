"""Tables as columns and rows of plain data, whatever they were given as.

A table is rows with the names of their columns, a dict of columns, a list of records (dicts), an array or tensor of two dimensions, or a
data frame of pandas or polars. Every row has a cell for each column: what does not fit is refused with its name, and never guessed at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.track.plain import plain
from slipstream.track.values import NotKept, kind_of

__all__ = ["Table", "table_of"]

_WRITE = (
    'give rows (columns=["a", "b"], data=[[1, 2]]), columns (data={"a": [1], "b": [2]}), records (data=[{"a": 1, "b": 2}]), '
    "an array of two dimensions, or dataframe= of pandas or polars"
)


@dataclass(frozen=True)
class Table:
    """Columns, and rows of plain data."""

    columns: list[str]
    rows: list[list[Any]]

    def markdown(self) -> str:
        """The table as text.

        >>> print(Table(["a", "b"], [[1, "x|y"]]).markdown())
        | a | b |
        |---|---|
        | 1 | x\\|y |
        """
        lines = [self.columns, *([str(cell) for cell in row] for row in self.rows)]
        shown = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]
        return "\n".join([shown[0], "|" + "---|" * len(self.columns), *shown[1:]])


class _Unfit(Exception):
    """Why something is no table."""


def table_of(name: str, columns: Sequence[str] | None, data: Any, dataframe: Any = None, own: str | None = None) -> Table:
    """A table of what was given; `columns` names the columns, or, where they have names, chooses among them.

    Cells become plain data, but for objects of the package `own`.

    >>> table_of("samples", ["prompt", "score"], [["a", 1.0]])
    Table(columns=['prompt', 'score'], rows=[['a', 1.0]])
    >>> table_of("samples", None, {"a": [1, 2], "b": ["x", "y"]}) == table_of("samples", None, [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}])
    True
    >>> table_of("samples", None, [1, 2])
    Traceback (most recent call last):
        ...
    slipstream.track.values.NotKept: the table samples is left out: row 0 of its data is an int and no row: give rows (columns=["a", ...
    """
    try:
        wanted = _wanted(columns)
        names, rows = _read(wanted, data, dataframe)
        widths = sorted({len(row) for row in rows})
        if widths and widths != [len(names)]:
            some = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            cells = " or ".join(map(str, widths[:3]))
            raise _Unfit(f"its rows have {cells} cells, and its columns are {some or 'none'}: give every row one cell for each column")
    except _Unfit as error:
        raise NotKept("table", {name: str(error)}) from None
    return Table(names, [[cell if _is_of(own, cell) else plain(cell) for cell in row] for row in rows])


def _read(wanted: list[str] | None, data: Any, dataframe: Any) -> tuple[list[str], list[list[Any]]]:
    if (data is None) == (dataframe is None):
        raise _Unfit(f"it has {'no data and no' if data is None else 'both data and a'} dataframe: {_WRITE}")
    frame = dataframe if data is None else data
    by_rows = callable(getattr(frame, "rows", None))  # polars; of pandas it could be a column of that name
    if hasattr(frame, "columns") and (by_rows or hasattr(frame, "itertuples")):
        rows = frame.rows() if by_rows else frame.itertuples(index=False, name=None)
        there = [str(one) for one in frame.columns]
        places = list(range(len(there))) if wanted is None else [there.index(name) for name in _chosen(wanted, there)]
        return [there[place] for place in places], [[row[place] for place in places] for row in rows]
    if dataframe is not None:
        raise _Unfit(f"dataframe= is {kind_of(dataframe)}, and no data frame of pandas or polars: {_WRITE}")
    if isinstance(data, Mapping):
        return _of_columns(wanted, {str(key): column for key, column in data.items()})
    if isinstance(data, str | bytes) or not isinstance(data, Iterable) or _dimensions(data) not in (None, 2):
        raise _Unfit(f"its data is {kind_of(data)}: {_WRITE}")
    array: Any = data if _dimensions(data) == 2 else None
    given = list(data if array is None else array.tolist())
    if given and all(isinstance(row, Mapping) for row in given):
        return _of_records(wanted, [{str(key): cell for key, cell in row.items()} for row in given])
    rows = [_cells(row, f"row {place} of its data", "row") for place, row in enumerate(given)]
    width = array.shape[1] if array is not None else len(rows[0]) if rows else 0
    return [str(place) for place in range(width)] if wanted is None else wanted, rows


def _of_columns(wanted: list[str] | None, given: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    names = _chosen(wanted, list(given))
    cells = {name: _cells(given[name], f"its column {name}", "column") for name in names}
    if len({len(column) for column in cells.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in list(cells.items())[:10])
        raise _Unfit(f"its columns have different lengths ({lengths}): give every column one cell for each row")
    return names, [list(row) for row in zip(*cells.values(), strict=True)]


def _of_records(wanted: list[str] | None, given: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Records need not have every name: a cell that one lacks is None."""
    names = _chosen(wanted, list(dict.fromkeys(key for record in given for key in record)))
    return names, [[record.get(name) for name in names] for record in given]


def _chosen(wanted: list[str] | None, there: list[str]) -> list[str]:
    if wanted is not None and (missing := [name for name in wanted if name not in there]):
        raise _Unfit(f"columns has {', '.join(missing)}, and its data has {', '.join(there[:10]) or 'no column'}: choose among those")
    return there if wanted is None else wanted


def _cells(given: Any, place: str, kind: str) -> list[Any]:
    if _dimensions(given) == 1 and hasattr(given, "tolist"):
        return list(given.tolist())
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise _Unfit(f"{place} is {kind_of(given)} and no {kind}: {_WRITE}")
    return list(given)


def _wanted(columns: Any) -> list[str] | None:
    if columns is None:
        return None
    if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
        raise _Unfit(f"columns={columns!r} is {kind_of(columns)}: give the names of the columns as a list")
    return [str(column) for column in columns]


def _dimensions(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    return len(shape) if isinstance(shape, tuple) else None


def _is_of(package: str | None, value: Any) -> bool:
    return package is not None and type(value).__module__.split(".")[0] == package
