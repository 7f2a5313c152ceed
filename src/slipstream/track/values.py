"""What is logged, sorted by what a tracker can do with it: numbers, texts, and the rest; tables as columns and rows.

Nested dicts become names that are joined by slashes, tensors and arrays of one element become numbers. What a tracker has no place for
is refused by `refuse`, after the rest was kept: with its name, the tracker, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from slipstream.errors import ConfigError
from slipstream.track.plain import flat, number, plain

__all__ = ["NotANumber", "Sorted", "Table", "refuse", "sort_values", "table_of"]


class NotANumber(TypeError):
    """A value that a tracker cannot draw; the other values of the call were kept."""


@dataclass(frozen=True)
class Sorted:
    """The values of one call by kind."""

    numbers: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


def sort_values(values: Mapping[str, Any]) -> Sorted:
    """The values of one call, sorted.

    >>> sort_values({"loss": 0.5, "eval": {"accuracy": 1, "note": "good"}, "weights": [1, 2]})
    Sorted(numbers={'loss': 0.5, 'eval/accuracy': 1}, texts={'eval/note': 'good'}, others={'weights': [1, 2]})
    """
    found = Sorted()
    for name, given in flat(values).items():
        value = _number(given)
        if isinstance(value, bool):
            found.numbers[name] = int(value)
        elif isinstance(value, int | float):
            found.numbers[name] = value
        elif isinstance(value, Real):
            found.numbers[name] = float(value)
        elif isinstance(value, str):
            found.texts[name] = value
        else:
            found.others[name] = given
    return found


def _number(value: Any) -> Any:
    try:
        return number(value)
    except (RuntimeError, TypeError, ValueError):  # one element without data, as on the meta device
        return value


def refuse(tracker: str, others: Mapping[str, Any], keeps: str = "numbers and texts") -> None:
    """An error for values that a tracker has no place for; nothing where there are none.

    >>> refuse("local", {})
    >>> refuse("local", {"weights": [1, 2]})
    Traceback (most recent call last):
        ...
    slipstream.track.values.NotANumber: weights is a list, and the tracker local keeps numbers and texts: log a number of it (its mean, ...
    """
    if others:
        named = ", ".join(f"{name} is a {_kind(value)}" for name, value in others.items())
        raise NotANumber(
            f"{named}, and the tracker {tracker} keeps {keeps}: log a number of it (its mean, say), pictures with log_images, "
            f"rows with log_table, or what else {tracker} can do through get_tracker({tracker!r}, unwrap=True)"
        )


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of {tuple(shape)}" if isinstance(shape, tuple) else type(value).__name__


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


def table_of(name: str, columns: Sequence[str] | None, data: Sequence[Sequence[Any]] | None, dataframe: Any = None) -> Table:
    """A table from rows with the names of their columns, or from a data frame.

    >>> table_of("samples", ["prompt", "score"], [["a", 1.0]])
    Table(columns=['prompt', 'score'], rows=[['a', 1.0]])
    """
    if (data is None) == (dataframe is None):
        given = "neither rows (data=[[...], ...]) nor a dataframe" if data is None else "both rows (data) and a dataframe"
        raise ConfigError(f"log_table({name!r}) has {given}: give one of them")
    if dataframe is not None:
        given_rows = dataframe.rows() if hasattr(dataframe, "rows") else dataframe.values.tolist()
        columns = list(dataframe.columns) if columns is None else columns
    else:
        given_rows = list(data or ())
    rows = [list(plain(list(row))) for row in given_rows]
    widths = {len(row) for row in rows}
    names = [str(column) for column in columns] if columns is not None else [str(place) for place in range(max(widths, default=0))]
    if widths - {len(names)}:
        raise ConfigError(
            f"log_table({name!r}): the rows have {', '.join(map(str, sorted(widths)))} cells and there are {len(names)} columns "
            f"({', '.join(names)}): give every row one cell for each column"
        )
    return Table(names, rows)
