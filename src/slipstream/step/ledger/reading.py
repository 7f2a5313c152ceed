"""Reading the log of a meter: codes and times in, rows of steps out. In numpy, as a fast loop writes ten thousand entries in a second.

The time between two marks belongs to the innermost phase that was open between them, and to the step that had not ended by then. What the
last step is still spending, and the phases and passes that are open, are kept for the next time, so a log can be cut anywhere.

A pass over a loader without any backward or update was an evaluation: when it is over, its data and forward passes are counted as such,
and its samples are not counted. No step ends in such a pass, so all of it is in one row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy

from slipstream.comm.meter import (
    BACKWARD,
    BEGIN,
    COLUMNS,
    COUNTED,
    DATA,
    EVALUATION,
    EXPOSED,
    FORWARD,
    HANDED,
    LEAVE,
    LOCAL_END,
    OPTIMIZER,
    OTHER,
    PASS,
    PASSED,
    PHASES,
    SAMPLES,
    SETUP,
    STEP,
    TICK,
    TOKENS,
)

__all__ = ["Reader"]

_Array = Any
"""A numpy array."""
_COUNTS = {HANDED: SAMPLES, COUNTED: TOKENS}
_MOVED = (DATA, FORWARD, SAMPLES, TOKENS)
"""What becomes an evaluation, or is not counted."""


class Reader:
    """Where the reading of a log stands.

    >>> reader = Reader(0)
    >>> reader.read([TICK, 5, BEGIN, 0, FORWARD, 10, LEAVE, 30, HANDED, 4, TICK, 31, STEP, 0])[0, [FORWARD, OTHER, SAMPLES]].tolist()
    [20.0, 6.0, 4.0]
    """

    def __init__(self, since: int) -> None:
        self.open = numpy.zeros(COLUMNS)
        """The row of the step under way: times by phase, then counts."""
        self._last = since
        self._base = SETUP
        self._stack: list[int] = []
        self._passes: dict[int, _Array | None] = {}
        """What each open pass has had so far of `_MOVED`, as long as nothing was trained in it; then None."""

    def copy(self) -> Reader:
        """One that reads on apart."""
        return copy.deepcopy(self)

    def read(self, log: Sequence[int], spent: _Array | None = None) -> _Array:
        """The rows of the steps that ended in this part of the log. `spent`: times between marks as another clock measured them."""
        if not len(log):
            return numpy.zeros((0, COLUMNS))
        events = numpy.array(log, dtype=numpy.int64).reshape(-1, 2)
        codes, values = events[:, 0], events[:, 1]
        timed = numpy.flatnonzero(codes <= TICK)
        steps = numpy.cumsum(codes == STEP)
        phases = self._phases(codes, timed)
        if spent is None:
            spent = numpy.diff(values[timed], prepend=self._last)
        if len(timed):
            self._last = int(values[timed[-1]])
        counts = numpy.where(numpy.isin(codes, list(_COUNTS)), values, 0)
        self._passed(codes, values, timed, phases, spent, counts)
        rows = numpy.zeros((int(steps[-1]) + 1, COLUMNS))
        width = PHASES + 1
        cells = numpy.bincount(steps[timed] * width + phases, weights=spent, minlength=len(rows) * width)
        rows[:, :PHASES] = cells.reshape(-1, width)[:, :PHASES]
        for code, column in _COUNTS.items():
            found = codes == code
            rows[:, column] = numpy.bincount(steps[found], weights=counts[found], minlength=len(rows))
        rows[0] += self.open
        self.open = rows[-1]
        return rows[:-1]

    # -- phases ---------------------------------------------------------------------------------------------------

    def _phases(self, codes: _Array, timed: _Array) -> _Array:
        """The phase that ended with each mark that has a time."""
        marks = codes[timed]
        depth = len(self._stack) + numpy.cumsum(numpy.where(marks < PHASES, 1, numpy.where(marks == LEAVE, -1, 0)))
        before = self._top()
        after = numpy.where(marks < PHASES, marks, numpy.where((marks == LOCAL_END) & (depth > 0), EXPOSED, self._bases(codes, timed)))
        if ((depth > 0) & ((marks == LEAVE) | (marks == TICK))).any():
            self._fill(marks, depth, after)
        if len(timed):
            self._stack = [self._level(level, depth, after) for level in range(1, int(depth[-1]) + 1)]
            return numpy.concatenate([[before], after[:-1]])
        return after

    def _top(self) -> int:
        return self._stack[-1] if self._stack else self._base

    def _bases(self, codes: _Array, timed: _Array) -> _Array:
        """The phase outside of all phases after each of the marks: that before training, until it begins."""
        if self._base == OTHER:
            return numpy.full(len(timed), OTHER)
        begun = numpy.flatnonzero((codes == BEGIN) | (codes == STEP))[:1]
        if not len(begun):
            return numpy.full(len(timed), SETUP)
        self._base = OTHER
        following = numpy.append(timed[1:], len(codes))
        return numpy.where(following > begun[0], OTHER, SETUP)

    def _fill(self, marks: _Array, depth: _Array, after: _Array) -> None:
        """After the end of a phase inside of another it is the other's turn again."""
        ends = (marks == LEAVE) | (marks == TICK)
        for level in range(1, int(depth.max()) + 1):
            (places,) = numpy.nonzero(depth == level)
            begun = numpy.maximum.accumulate(numpy.where(ends[places], -1, numpy.arange(len(places))))
            outside = self._stack[level - 1] if level <= len(self._stack) else OTHER
            after[places] = numpy.where(begun < 0, outside, after[places[begun]])

    def _level(self, level: int, depth: _Array, after: _Array) -> int:
        """The phase that is open at a level in the end."""
        found = numpy.flatnonzero(depth == level)
        return int(after[found[-1]]) if len(found) else self._stack[level - 1]

    # -- passes over loaders --------------------------------------------------------------------------------------

    def _passed(self, codes: _Array, values: _Array, timed: _Array, phases: _Array, spent: _Array, counts: _Array) -> None:
        """Makes evaluations of the passes in which nothing was trained; changes `phases` and `counts`."""
        limits = numpy.flatnonzero((codes == PASS) | (codes == PASSED))
        if not len(limits) and not self._passes:
            return
        training = numpy.flatnonzero((codes == BACKWARD) | (codes == OPTIMIZER))
        began = dict.fromkeys(self._passes, -1)
        for place in limits.tolist():
            number = int(values[place])
            if codes[place] == PASS:
                began[number] = place
            elif number in began:
                first, carried = began.pop(number), self._passes.pop(number, numpy.zeros(len(_MOVED)))
                if carried is not None and not _any_between(training, first, place):
                    self._move(number, carried)
                    inside = timed[(timed > first) & (timed <= place)]
                    moved = numpy.isin(timed, inside) & numpy.isin(phases, (DATA, FORWARD))
                    phases[moved] = EVALUATION
                    counts[first + 1 : place] = 0
        for number, first in began.items():
            carried = self._passes.get(number, numpy.zeros(len(_MOVED)))
            trained = carried is None or _any_between(training, first, len(codes))
            self._passes[number] = None if trained else carried + _sums(codes, timed, phases, spent, counts, first)

    def _move(self, number: int, carried: _Array) -> None:
        """What a pass had in parts of the log that were read before stands in the open row; and in what earlier passes carry."""
        for value, column in zip(carried, _MOVED, strict=True):
            self.open[column] -= value
            if column < PHASES:
                self.open[EVALUATION] += value
        for other, its in self._passes.items():
            if other < number and its is not None:
                its -= carried


def _any_between(places: _Array, first: int, last: int) -> bool:
    return bool(numpy.searchsorted(places, first, side="right") < numpy.searchsorted(places, last))


def _sums(codes: _Array, timed: _Array, phases: _Array, spent: _Array, counts: _Array, first: int) -> _Array:
    """What a pass that began at this place has had of `_MOVED` since."""
    since = timed > first
    times = [float(spent[since & (phases == phase)].sum()) for phase in (DATA, FORWARD)]
    later = codes[first + 1 :], counts[first + 1 :]
    return numpy.array(times + [float(later[1][later[0] == code].sum()) for code in (HANDED, COUNTED)])
