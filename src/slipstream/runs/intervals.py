"""The ledger of a run as a list of intervals that stays short: beyond a limit, neighbours become one.

Nothing is thrown away by that: seconds, steps, samples and phases are added up, memory keeps its high-water mark, and utilisation is
weighted by time. A day of seconds becomes intervals of a minute or so, and their sums are those of the day.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, Final

__all__ = ["COLUMNS", "Intervals", "columns", "joined", "tidy_interval"]

COLUMNS: Final = ("time", "seconds", "first", "last", "steps", "samples", "tokens", "flops", "mfu")
"""The fields of an interval that are one number."""

_MOST: Final = 1024
_MOST_NUMBERS: Final = 1 << 16
_DIGITS: Final = 6  # microseconds
_MOST_RANKS: Final = 4096
_MOST_PHASES: Final = 32

_Number = float | int | None


class Intervals:
    """Intervals in the order of time, each of one or more lines of the ledger.

    >>> ledger = Intervals(most=4)
    >>> for second in range(10):
    ...     ledger.add(tidy_interval({"time": second, "seconds": 1.0, "steps": 2, "phases": {"data": [0.25]}}))
    >>> len(ledger.list), sum(one["steps"] for one in ledger.list), sum(one["phases"]["data"][0] for one in ledger.list)
    (3, 20, 2.5)
    """

    def __init__(self, most: int = _MOST) -> None:
        self.list: list[dict[str, Any]] = []
        self._most = most
        self._each = 1
        """How many lines make one interval."""
        self._filled = 0
        """How many lines the last interval has."""

    def add(self, interval: dict[str, Any]) -> None:
        """One more line of the ledger, as `tidy_interval` gives it."""
        if self.list and self._filled < self._each:
            self.list[-1] = joined(self.list[-1], interval)
            self._filled += 1
            return
        self.list.append(interval)
        self._filled = 1
        numbers = max(1, sum(map(len, interval["phases"].values())))
        if len(self.list) > max(4, min(self._most, _MOST_NUMBERS // numbers)):
            self._halve()

    def _halve(self) -> None:
        old = self.list
        self._filled = self._filled if len(old) % 2 else self._each + self._filled
        self._each *= 2
        self.list = [joined(*old[one : one + 2]) if one + 1 < len(old) else old[one] for one in range(0, len(old), 2)]


def tidy_interval(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the ledger with every field there and of the right kind; what is missing or no number is None.

    >>> tidy_interval({"time": 5.0, "seconds": "x", "phases": {"data": [0.5, None]}})["phases"]
    {'data': [0.5, None]}
    """
    memory = record.get("memory")
    phases = record.get("phases")
    memory = memory if isinstance(memory, dict) else {}
    phases = phases if isinstance(phases, dict) else {}
    return {
        **{name: _number(record.get(name)) for name in COLUMNS},
        "phases": {str(name): _numbers(phases[name]) or [] for name in list(phases)[:_MOST_PHASES]},
        "slowest": _numbers(record.get("slowest")),
        "memory": {"host": _numbers(memory.get("host")), "device": _numbers(memory.get("device"))},
    }


def joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two neighbouring intervals as one."""
    names = [*one["phases"], *(name for name in other["phases"] if name not in one["phases"])]
    added = {name: _with(_plus, one[name], other[name]) for name in ("seconds", "steps", "samples", "tokens", "flops")}
    return {
        "time": other["time"] if other["time"] is not None else one["time"],
        "first": one["first"] if one["first"] is not None else other["first"],
        "last": other["last"] if other["last"] is not None else one["last"],
        **added,
        "mfu": _weighted(one, other),
        "phases": {name: _each(_plus, one["phases"].get(name), other["phases"].get(name)) or [] for name in names},
        "slowest": _each(_plus, one["slowest"], other["slowest"]),
        "memory": {name: _each(max, one["memory"][name], other["memory"][name]) for name in ("host", "device")},
    }


def columns(intervals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Intervals as columns, the way the page takes them: a list per field, a list of ranks per interval in those of ranks.

    >>> columns([tidy_interval({"time": 1.0, "phases": {"data": [0.5, 0.25]}})])["phases"]
    {'data': [[0.5, 0.25]]}
    """
    names = list(dict.fromkeys(name for one in intervals for name in one["phases"]))
    return {
        **{name: [one[name] for one in intervals] for name in COLUMNS},
        "phases": {name: [one["phases"].get(name, []) for one in intervals] for name in names},
        "slowest": [one["slowest"] for one in intervals],
        "memory": {name: [one["memory"][name] for one in intervals] for name in ("host", "device")},
    }


def _number(value: Any) -> _Number:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return round(value, _DIGITS) if isfinite(value) else None
    except OverflowError:
        return None


def _numbers(value: Any) -> list[_Number] | None:
    return [_number(one) for one in value[:_MOST_RANKS]] if isinstance(value, list) else None


def _plus(one: float, other: float) -> float:
    return round(one + other, _DIGITS)


def _with(how: Callable[[Any, Any], Any], one: _Number, other: _Number) -> _Number:
    if one is None or other is None:
        return other if one is None else one
    found: _Number = how(one, other)
    return found


def _each(how: Callable[[Any, Any], Any], one: list[_Number] | None, other: list[_Number] | None) -> list[_Number] | None:
    if one is None or other is None:
        return other if one is None else one
    longest = max(len(one), len(other))
    pairs = zip(one + [None] * (longest - len(one)), other + [None] * (longest - len(other)), strict=True)
    return [_with(how, *pair) for pair in pairs]


def _weighted(one: Mapping[str, Any], other: Mapping[str, Any]) -> _Number:
    if one["mfu"] is None or other["mfu"] is None:
        return _with(_plus, one["mfu"], other["mfu"])
    first, second = one["seconds"] or 0.0, other["seconds"] or 0.0
    if not first + second:
        return float(one["mfu"])
    return float((one["mfu"] * first + other["mfu"] * second) / (first + second))
