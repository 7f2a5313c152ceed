"""Convert logged values to plain data, sort them into numbers, texts and others, and normalize tables.

Nested dicts become names joined by slashes; tensors and arrays of one element become numbers; what is unknown becomes its text, never an
error. A value that a tracker cannot store is rejected after the others were stored, with its name and what to write instead. A table is
rows with column names, a dict of columns, a list of records, a two-dimensional array or a data frame; every row has a cell for each
column.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from numbers import Real
from typing import Any

__all__ = [
    "MAX_BITS", "RejectedValuesError", "Table", "UnsupportedTypeError", "ValuesByKind", "describe_type", "fetch_scalars", "flatten",
    "make_table", "raise_if_unsupported", "sort_values", "to_number", "to_plain",
]


_MAX_ELEMENTS = 1000
"""Tensors with more elements are described and not written out."""
MAX_BITS = 1023
"""Integers with more bits are no floats; they are stored as infinite."""
_MAX_DEPTH = 50
"""Levels of nested data that are written out; what is deeper is three dots."""


def to_plain(value: Any) -> Any:
    """Return the value as data that JSON and YAML support; numbers that they do not support (nan, inf) become texts.

    >>> import torch
    >>> to_plain({"lr": torch.tensor(0.5), "dtype": torch.float32, "betas": (0.9, float("inf")), "layers": {3, 1}, 4: None})
    {'lr': 0.5, 'dtype': 'torch.float32', 'betas': [0.9, 'inf'], 'layers': [1, 3], '4': None}
    """
    return _to_plain(value, ())


def _to_plain(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, Enum):
        return _to_plain(value.value, above)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if id(value) in above:
        return "(the same again)"
    if len(above) >= _MAX_DEPTH:
        return "..."
    above = (*above, id(value))
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return {name: _to_plain(var, above) for name, var in vars(value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name, None), above) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(_to_plain(key, above)): _to_plain(item, above) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_to_plain(item, above) for item in value), key=lambda item: (str(type(item)), str(item)))
    if isinstance(value, list | tuple):
        return [_to_plain(item, above) for item in value]
    return _from_array(value, above)


def _from_array(value: Any, above: tuple[int, ...]) -> Any:
    """Return tensors and arrays, and numbers of numpy, as their elements; anything else as its text."""
    size = _count_elements(value)
    if size is None:
        return _describe_object(value)
    if size > _MAX_ELEMENTS:
        return f"{type(value).__name__} of {tuple(value.shape)}"
    try:
        elements = value.tolist()
    except Exception:  # without data (the meta device), or of a kind whose elements cannot be had
        return f"{type(value).__name__} of {tuple(value.shape)}"
    return _to_plain(elements, above)


def _describe_object(value: Any) -> str:
    """Return the name of a class or function, which is the same in every run, or the text of another object."""
    if isinstance(value, functools.partial):
        return f"partial of {_describe_object(value.func)}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return value.__qualname__
    try:
        return str(value)
    except Exception as error:  # the __str__ of a user's object raises; storing settings must not fail for that
        return f"({type(value).__name__}, whose text fails with {type(error).__name__})"


def _count_elements(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    if not hasattr(value, "tolist") or not isinstance(shape, tuple):
        return None
    return math.prod(shape)


def to_number(value: Any) -> Any:
    """Return a tensor or array of one element as a number; any other value unchanged.

    >>> import torch
    >>> to_number(torch.tensor([3])), to_number("text"), to_number(True)
    (3, 'text', True)
    """
    return value.item() if _count_elements(value) == 1 and hasattr(value, "item") else value


_PLAIN: frozenset[type] = frozenset((float, int, bool, str))
"""Types of values that are on the host, whatever they hold."""


def fetch_scalars(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values with tensors of one element on the host. Those of a device are fetched together, so that it is waited for once.

    >>> import torch
    >>> fetch_scalars({"loss": torch.tensor(0.5), "eval": {"name": "test"}})
    {'loss': tensor(0.5000), 'eval': {'name': 'test'}}
    """
    waiting = _device_scalars(values.values(), _MAX_DEPTH)
    if not waiting:
        return values
    import torch

    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in waiting:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    fetched = {
        id(tensor): single.reshape(tensor.shape)
        for tensors in alike.values()
        for tensor, single in zip(tensors, torch.stack([tensor.detach().reshape(()) for tensor in tensors]).cpu(), strict=True)
    }
    return _replace(values, fetched, _MAX_DEPTH)


def _device_scalars(values: Iterable[Any], levels: int) -> list[Any]:
    """Return the tensors of one element that are on a device, also of nested dicts; no names are made on the way."""
    found: list[Any] = []
    for value in values:
        if type(value) in _PLAIN or getattr(value, "is_cpu", None) is True:
            continue
        if isinstance(value, Mapping):
            found += _device_scalars(value.values(), levels - 1) if levels else ()
        elif _is_device_scalar(value):
            found.append(value)
    return found


def _is_device_scalar(value: Any) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() == 1 and not value.is_cpu and not value.is_meta


def _replace(values: Mapping[str, Any], found: Mapping[int, Any], levels: int) -> dict[str, Any]:
    return {
        name: _replace(value, found, levels - 1) if isinstance(value, Mapping) and levels else found.get(id(value), value)
        for name, value in values.items()
    }


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one, with names joined by slashes; a repeated name gets a number, so that both values are kept.

    >>> flatten({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "b/c": 4})
    {'a': 1, 'b/c': 2, 'b/d/e': 3, 'b/c-2': 4}
    """
    found: dict[str, Any] = {}
    for name, value in _flatten(values, prefix, _MAX_DEPTH):
        if name in found:
            name = next(again for number in count(2) if (again := f"{name}-{number}") not in found)
        found[name] = value
    return found


def _flatten(values: Mapping[str, Any], prefix: str, levels: int) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and levels:
            yield from _flatten(value, f"{prefix}{name}/", levels - 1)
        else:
            yield f"{prefix}{name}", value


_MAX_NAMES = 5
"""Names that one message lists."""


class RejectedValuesError(TypeError):
    """Pictures or tables that could not be stored, with the reason, by name; the others of the call were stored."""

    def __init__(self, what: str, wrong: Mapping[str, str]) -> None:
        self.what, self.wrong = what, dict(wrong)
        super().__init__(self.text(self.wrong))

    def text(self, names: Iterable[str]) -> str:
        """Return the message about some of them.

        >>> RejectedValuesError("picture", {"a": "it is a text", "b": "it is None"}).text(["a", "b"])
        'the pictures a and b are left out: it is a text; it is None'
        """
        some = list(names)
        reasons = "; ".join(dict.fromkeys(self.wrong[name] for name in some[:_MAX_NAMES]))
        return f"the {self.what}{'s' if len(some) > 1 else ''} {_join_names(some)} {'are' if len(some) > 1 else 'is'} left out: {reasons}"


class UnsupportedTypeError(RejectedValuesError):
    """Values that a tracker cannot store, with their types, by name; the other values of the call were stored."""

    def __init__(self, tracker: str, wrong: Mapping[str, str], keeps: str) -> None:
        self.tracker, self.keeps = tracker, keeps
        super().__init__("value", wrong)

    def text(self, names: Iterable[str]) -> str:
        """Return the message about some of them."""
        some = list(names)
        named = _join_names([f"{name} is {self.wrong[name]}" for name in some])
        of_it = "each" if len(some) > 1 else "it"
        return (
            f"{named}, and the tracker {self.tracker} stores {self.keeps}: log a number of {of_it} (such as its mean), pictures with "
            f"log_images, rows with log_table, or use {self.tracker} itself: get_tracker({self.tracker!r}, unwrap=True)"
        )


def _join_names(names: list[str]) -> str:
    """Return names as a list in a sentence.

    >>> _join_names(["a"]), _join_names(["a", "b", "c"]), _join_names(list("abcdefgh"))
    ('a', 'a, b and c', 'a, b, c, d, e and 3 more')
    """
    shown = names if len(names) <= _MAX_NAMES else [*names[:_MAX_NAMES], f"{len(names) - _MAX_NAMES} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


@dataclass(frozen=True)
class ValuesByKind:
    """The values of one call by kind."""

    numbers: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    """Objects of the package that stores the values."""


def sort_values(values: Mapping[str, Any], own: str | None = None) -> ValuesByKind:
    """Return the values of one call by kind; `own` is the package whose objects go to `own`.

    >>> sort_values({"loss": 0.5, "eval": {"accuracy": 1, "note": "good"}, "weights": [1, 2]})
    ValuesByKind(numbers={'loss': 0.5, 'eval/accuracy': 1}, texts={'eval/note': 'good'}, others={'weights': [1, 2]}, own={})
    """
    found = ValuesByKind()
    for name, given in flatten(values).items():
        value = _try_number(given)
        if isinstance(value, bool):
            found.numbers[name] = int(value)
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            found.numbers[name] = math.copysign(math.inf, value > 0 or -1)
        elif isinstance(value, int | float):
            found.numbers[name] = value
        elif isinstance(value, Real):
            found.numbers[name] = float(value)
        elif isinstance(value, str):
            found.texts[name] = value
        else:
            (found.own if _is_from_package(own, given) else found.others)[name] = given
    return found


def _try_number(value: Any) -> Any:
    try:
        return to_number(value)
    except (RuntimeError, TypeError, ValueError):  # one element without data, as on the meta device
        return value


def raise_if_unsupported(tracker: str, others: Mapping[str, Any], keeps: str = "numbers and texts") -> None:
    """Raise an error for values that a tracker cannot store, if there are any.

    >>> raise_if_unsupported("local", {})
    >>> raise_if_unsupported("local", {"weights": [1, 2]})
    Traceback (most recent call last):
        ...
    slipstream.observability.trackers.values.UnsupportedTypeError: weights is a list, and the tracker local stores numbers and texts: ...
    """
    if others:
        raise UnsupportedTypeError(tracker, {name: describe_type(value) for name, value in others.items()}, keeps)


def describe_type(value: Any) -> str:
    """Return the type of a value with an article, and its shape if it has one.

    >>> import torch
    >>> describe_type(torch.zeros(3)), describe_type(None), describe_type([1]), describe_type(1)
    ('a Tensor of (3,)', 'None', 'a list', 'an int')
    """
    if value is None:
        return "None"
    name, shape = type(value).__name__, getattr(value, "shape", None)
    article = "an" if name[0].lower() in "aeio" else "a"
    return f"{article} {name} of {tuple(shape)}" if isinstance(shape, tuple) else f"{article} {name}"


_TABLE_FORMS = (
    'give rows (columns=["a", "b"], data=[[1, 2]]), columns (data={"a": [1], "b": [2]}), records (data=[{"a": 1, "b": 2}]), '
    "an array of two dimensions, or dataframe= of pandas or polars"
)


@dataclass(frozen=True)
class Table:
    """Columns, and rows of plain data."""

    columns: list[str]
    rows: list[list[Any]]

    def markdown(self) -> str:
        """Return the table as text.

        >>> print(Table(["a", "b"], [[1, "x|y"]]).markdown())
        | a | b |
        |---|---|
        | 1 | x\\|y |
        """
        lines = [self.columns, *([str(cell) for cell in row] for row in self.rows)]
        shown = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]
        return "\n".join([shown[0], "|" + "---|" * len(self.columns), *shown[1:]])


class _NoTableError(Exception):
    """Why something is not a table."""


def make_table(name: str, columns: Sequence[str] | None, data: Any, dataframe: Any = None, own: str | None = None) -> Table:
    """Return a table from data or a data frame; `columns` names the columns, or selects among named ones.

    Cells become plain data, except objects of the package `own`.

    >>> make_table("samples", ["prompt", "score"], [["a", 1.0]])
    Table(columns=['prompt', 'score'], rows=[['a', 1.0]])
    >>> make_table("samples", None, {"a": [1, 2], "b": ["x", "y"]}) == make_table("samples", None, [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}])
    True
    >>> make_table("samples", None, [1, 2])
    Traceback (most recent call last):
        ...
    slipstream.observability.trackers.values.RejectedValuesError: the table samples is left out: row 0 of its data is an int, not a row: ...
    """
    try:
        wanted = _column_names(columns)
        names, rows = _read_table(wanted, data, dataframe)
        widths = sorted({len(row) for row in rows})
        if widths and widths != [len(names)]:
            some = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            cells = " or ".join(map(str, widths[:3]))
            raise _NoTableError(
                f"its rows have {cells} cells, and its columns are {some or 'none'}: give every row one cell for each column"
            )
    except _NoTableError as error:
        raise RejectedValuesError("table", {name: str(error)}) from None
    return Table(names, [[cell if _is_from_package(own, cell) else to_plain(cell) for cell in row] for row in rows])


def _read_table(wanted: list[str] | None, data: Any, dataframe: Any) -> tuple[list[str], list[list[Any]]]:
    if (data is None) == (dataframe is None):
        raise _NoTableError(f"it has {'no data and no' if data is None else 'both data and a'} dataframe: {_TABLE_FORMS}")
    frame = dataframe if data is None else data
    by_rows = callable(getattr(frame, "rows", None))  # polars; of pandas it could be a column of that name
    if hasattr(frame, "columns") and (by_rows or hasattr(frame, "itertuples")):
        rows = frame.rows() if by_rows else frame.itertuples(index=False, name=None)
        there = [str(column) for column in frame.columns]
        places = list(range(len(there))) if wanted is None else [there.index(name) for name in _choose_columns(wanted, there)]
        return [there[place] for place in places], [[row[place] for place in places] for row in rows]
    if dataframe is not None:
        raise _NoTableError(f"dataframe= is {describe_type(dataframe)}, not a data frame of pandas or polars: {_TABLE_FORMS}")
    if isinstance(data, Mapping):
        return _from_columns(wanted, {str(key): column for key, column in data.items()})
    if isinstance(data, str | bytes) or not isinstance(data, Iterable) or _dimensions(data) not in (None, 2):
        raise _NoTableError(f"its data is {describe_type(data)}: {_TABLE_FORMS}")
    array: Any = data if _dimensions(data) == 2 else None
    given = list(data if array is None else array.tolist())
    if given and all(isinstance(row, Mapping) for row in given):
        return _from_records(wanted, [{str(key): cell for key, cell in row.items()} for row in given])
    rows = [_cells(row, f"row {place} of its data", "row") for place, row in enumerate(given)]
    width = array.shape[1] if array is not None else len(rows[0]) if rows else 0
    return [str(place) for place in range(width)] if wanted is None else wanted, rows


def _from_columns(wanted: list[str] | None, given: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    names = _choose_columns(wanted, list(given))
    cells = {name: _cells(given[name], f"its column {name}", "column") for name in names}
    if len({len(column) for column in cells.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in list(cells.items())[:10])
        raise _NoTableError(f"its columns have different lengths ({lengths}): give every column one cell for each row")
    return names, [list(row) for row in zip(*cells.values(), strict=True)]


def _from_records(wanted: list[str] | None, given: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of records; a missing cell is None."""
    names = _choose_columns(wanted, list(dict.fromkeys(key for record in given for key in record)))
    return names, [[record.get(name) for name in names] for record in given]


def _choose_columns(wanted: list[str] | None, there: list[str]) -> list[str]:
    if wanted is not None and (missing := [name for name in wanted if name not in there]):
        raise _NoTableError(
            f"columns has {', '.join(missing)}, and its data has {', '.join(there[:10]) or 'no column'}: choose among those"
        )
    return there if wanted is None else wanted


def _cells(given: Any, place: str, kind: str) -> list[Any]:
    if _dimensions(given) == 1 and hasattr(given, "tolist"):
        return list(given.tolist())
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise _NoTableError(f"{place} is {describe_type(given)}, not a {kind}: {_TABLE_FORMS}")
    return list(given)


def _column_names(columns: Any) -> list[str] | None:
    if columns is None:
        return None
    if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
        raise _NoTableError(f"columns={columns!r} is {describe_type(columns)}: give the names of the columns as a list")
    return [str(column) for column in columns]


def _dimensions(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    return len(shape) if isinstance(shape, tuple) else None


def _is_from_package(package: str | None, value: Any) -> bool:
    return package is not None and type(value).__module__.split(".")[0] == package
