"""Turn the meter's log into one row per step with the seconds of each phase, samples and tokens.

`MeterReader` assigns the time between two marks to the innermost open phase and to the step that had not ended. It keeps open phases and
passes between calls, so a log can be cut anywhere. A pass over a loader without a backward or an update counts as evaluation. numpy,
because a fast loop writes ten thousand entries in a second.

`DeviceClock` times an asynchronous device: each mark also records an event in the device's queue, and the time between two events belongs
to the phase between the marks. Events are read after the device has passed them, so reading never waits for the device.

A message is a JSON header with its length in front, followed by the rows as 32-bit floats: 40 bytes for a step.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter_ns, sleep
from typing import Any

import numpy
import torch

from slipstream.observability.timing import meter

__all__ = [
    "DeviceClock", "MeterReader", "PHASE_COLUMNS", "RankMessage", "Rows", "StepWindow", "pack_message", "to_seconds", "unpack_message",
]


Rows = Any
"""A numpy array: steps x columns; seconds, then counts."""

PHASE_COLUMNS: dict[str, int | None] = {
    "data": meter.DATA,
    "forward": meter.FORWARD,
    "backward": meter.BACKWARD,
    "communication": None,
    "waiting": None,
    "optimizer": meter.OPTIMIZER,
    "checkpoint": meter.CHECKPOINT,
    "evaluation": meter.EVALUATION,
    "other": meter.OTHER,
}
"""The phases as reports name them, in order; communication and waiting are found by comparing the ranks."""

_LENGTH = struct.Struct("<I")
_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class StepWindow:
    """The steps of this rank since the last interval, for examiners such as the guards."""

    steps: int
    first_step: int
    """The number of the first of them; steps are counted from 0."""
    rows: Rows
    """Steps x columns of `meter.py`: seconds of each phase (DATA, FORWARD, ...), then samples and tokens."""
    losses: Sequence[tuple[int, float | torch.Tensor]]
    """(step, loss) of each backward pass, as it was given to `backward`, without its graph. The last may be of the step under way."""
    limit: float = math.inf
    """Values of this step and of later ones are not to be read yet: the device has not computed them."""
    passed: bool = False
    """Whether the device has computed what is before the limit, so that reading it need not wait for what is queued."""


@dataclass
class RankMessage:
    """What a rank reports to rank 0."""

    first: int
    rows: Rows
    memory: tuple[int | None, int | None] = (None, None)
    """High-water marks of host and device, in bytes."""
    events: list[dict[str, Any]] = field(default_factory=list)
    tail: list[float] | None = None
    """The row of what came after the last step, in the last message."""


def pack_message(message: RankMessage) -> bytes:
    """Return a message as bytes.

    >>> unpack_message(pack_message(RankMessage(7, numpy.ones((2, meter.COLUMNS))))).first
    7
    """
    header = {"first": message.first, "memory": message.memory, "events": message.events, "tail": message.tail}
    text = json.dumps(header, default=str).encode()
    return _LENGTH.pack(len(text)) + text + numpy.ascontiguousarray(message.rows, dtype="<f4").tobytes()


def unpack_message(data: bytes) -> RankMessage:
    """Return the message that `pack_message` packed."""
    (length,) = _LENGTH.unpack_from(data)
    header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    rows = numpy.frombuffer(data, dtype="<f4", offset=_LENGTH.size + length).reshape(-1, meter.COLUMNS).astype(numpy.float64)
    host, device = header["memory"]
    return RankMessage(header["first"], rows, (host, device), header["events"], header["tail"])


def to_seconds(rows: Rows) -> Rows:
    """Return rows with seconds instead of nanoseconds."""
    made = numpy.array(rows, dtype=numpy.float64)
    made[..., :meter.PHASES] *= 1e-9
    return made


_Array = Any
"""A numpy array."""
_COUNT_COLUMNS = {meter.SAMPLES_HANDED: meter.SAMPLES, meter.TOKENS_COUNTED: meter.TOKENS}
_EVALUATION_COLUMNS = (meter.DATA, meter.FORWARD, meter.SAMPLES, meter.TOKENS)
"""Columns of a pass that become evaluation time, or are not counted."""


class MeterReader:
    """Reads the log of a meter, part by part.

    >>> reader = MeterReader(0)
    >>> log = [meter.TICK, 5, meter.TRAINING_BEGIN, 0, meter.FORWARD, 10, meter.LEAVE, 30]
    >>> log += [meter.SAMPLES_HANDED, 4, meter.TICK, 31, meter.STEP_END, 0]
    >>> reader.read(log)[0, [meter.FORWARD, meter.OTHER, meter.SAMPLES]].tolist()
    [20.0, 6.0, 4.0]
    """

    def __init__(self, since: int) -> None:
        self.open = numpy.zeros(meter.COLUMNS)
        """The row of the step under way: times by phase, then counts."""
        self._last = since
        self._base = meter.SETUP
        self._stack: list[int] = []
        self._passes: dict[int, _Array | None] = {}
        """What each open pass has had so far of `_EVALUATION_COLUMNS`, as long as nothing was trained in it; then None."""

    def copy(self) -> MeterReader:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def read(self, log: Sequence[int], spent: _Array | None = None) -> _Array:
        """Return the rows of the steps that ended in this part of the log. `spent`: times between marks as another clock measured them."""
        if not len(log):
            return numpy.zeros((0, meter.COLUMNS))
        events = numpy.array(log, dtype=numpy.int64).reshape(-1, 2)
        codes, values = events[:, 0], events[:, 1]
        timed = numpy.flatnonzero(codes <= meter.TICK)
        steps = numpy.cumsum(codes == meter.STEP_END)
        phases = self._phases(codes, timed)
        if spent is None:
            spent = numpy.diff(values[timed], prepend=self._last)
        if len(timed):
            self._last = int(values[timed[-1]])
        counts = numpy.where(numpy.isin(codes, list(_COUNT_COLUMNS)), values, 0)
        self._passed(codes, values, timed, phases, spent, counts)
        rows = numpy.zeros((int(steps[-1]) + 1, meter.COLUMNS))
        width = meter.PHASES + 1
        cells = numpy.bincount(steps[timed] * width + phases, weights=spent, minlength=len(rows) * width)
        rows[:, :meter.PHASES] = cells.reshape(-1, width)[:, :meter.PHASES]
        for code, column in _COUNT_COLUMNS.items():
            found = codes == code
            rows[:, column] = numpy.bincount(steps[found], weights=counts[found], minlength=len(rows))
        rows[0] += self.open
        self.open = rows[-1]
        return rows[:-1]

    # -- phases ---------------------------------------------------------------------------------------------------

    def _phases(self, codes: _Array, timed: _Array) -> _Array:
        """Return the phase that ended with each mark that has a time."""
        marks = codes[timed]
        depth = len(self._stack) + numpy.cumsum(numpy.where(marks < meter.PHASES, 1, numpy.where(marks == meter.LEAVE, -1, 0)))
        before = self._top()
        exposed = (marks == meter.LOCAL_END) & (depth > 0)
        after = numpy.where(marks < meter.PHASES, marks, numpy.where(exposed, meter.EXPOSED, self._bases(codes, timed)))
        if ((depth > 0) & ((marks == meter.LEAVE) | (marks == meter.TICK))).any():
            self._fill(marks, depth, after)
        if len(timed):
            self._stack = [self._level(level, depth, after) for level in range(1, int(depth[-1]) + 1)]
            return numpy.concatenate([[before], after[:-1]])
        return after

    def _top(self) -> int:
        return self._stack[-1] if self._stack else self._base

    def _bases(self, codes: _Array, timed: _Array) -> _Array:
        """Return the phase outside of all phases after each of the marks: that before training, until it begins."""
        if self._base == meter.OTHER:
            return numpy.full(len(timed), meter.OTHER)
        begun = numpy.flatnonzero((codes == meter.TRAINING_BEGIN) | (codes == meter.STEP_END))[:1]
        if not len(begun):
            return numpy.full(len(timed), meter.SETUP)
        self._base = meter.OTHER
        following = numpy.append(timed[1:], len(codes))
        return numpy.where(following > begun[0], meter.OTHER, meter.SETUP)

    def _fill(self, marks: _Array, depth: _Array, after: _Array) -> None:
        """After the end of an inner phase, continue the outer one."""
        ends = (marks == meter.LEAVE) | (marks == meter.TICK)
        for level in range(1, int(depth.max()) + 1):
            (places,) = numpy.nonzero(depth == level)
            begun = numpy.maximum.accumulate(numpy.where(ends[places], -1, numpy.arange(len(places))))
            outside = self._stack[level - 1] if level <= len(self._stack) else meter.OTHER
            after[places] = numpy.where(begun < 0, outside, after[places[begun]])

    def _level(self, level: int, depth: _Array, after: _Array) -> int:
        """Return the phase that is open at a level in the end."""
        found = numpy.flatnonzero(depth == level)
        return int(after[found[-1]]) if len(found) else self._stack[level - 1]

    # -- passes over loaders --------------------------------------------------------------------------------------

    def _passed(self, codes: _Array, values: _Array, timed: _Array, phases: _Array, spent: _Array, counts: _Array) -> None:
        """Turn passes without training into evaluation; changes `phases` and `counts`."""
        limits = numpy.flatnonzero((codes == meter.PASS_BEGIN) | (codes == meter.PASS_END))
        if not len(limits) and not self._passes:
            return
        training = numpy.flatnonzero((codes == meter.BACKWARD) | (codes == meter.OPTIMIZER))
        began = dict.fromkeys(self._passes, -1)
        for place in limits.tolist():
            number = int(values[place])
            if codes[place] == meter.PASS_BEGIN:
                began[number] = place
            elif number in began:
                first, carried = began.pop(number), self._passes.pop(number, numpy.zeros(len(_EVALUATION_COLUMNS)))
                if carried is not None and not _any_between(training, first, place):
                    self._move(number, carried)
                    inside = timed[(timed > first) & (timed <= place)]
                    moved = numpy.isin(timed, inside) & numpy.isin(phases, (meter.DATA, meter.FORWARD))
                    phases[moved] = meter.EVALUATION
                    counts[first + 1 : place] = 0
        for number, first in began.items():
            carried = self._passes.get(number, numpy.zeros(len(_EVALUATION_COLUMNS)))
            trained = carried is None or _any_between(training, first, len(codes))
            self._passes[number] = None if trained else carried + _pass_sums(codes, timed, phases, spent, counts, first)

    def _move(self, number: int, carried: _Array) -> None:
        """Move what a pass had in earlier parts of the log, in the open row and in what earlier passes carry."""
        for value, column in zip(carried, _EVALUATION_COLUMNS, strict=True):
            self.open[column] -= value
            if column < meter.PHASES:
                self.open[meter.EVALUATION] += value
        for other, its in self._passes.items():
            if other < number and its is not None:
                its -= carried


def _any_between(places: _Array, first: int, last: int) -> bool:
    return bool(numpy.searchsorted(places, first, side="right") < numpy.searchsorted(places, last))


def _pass_sums(codes: _Array, timed: _Array, phases: _Array, spent: _Array, counts: _Array, first: int) -> _Array:
    """Return what a pass that began at this place has had of `_EVALUATION_COLUMNS` since."""
    since = timed > first
    times = [float(spent[since & (phases == phase)].sum()) for phase in (meter.DATA, meter.FORWARD)]
    later = codes[first + 1 :], counts[first + 1 :]
    return numpy.array(times + [float(later[1][later[0] == code].sum()) for code in (meter.SAMPLES_HANDED, meter.TOKENS_COUNTED)])


class DeviceClock:
    """Replaces the meter's clock. `make` returns an event with `record`, `query` and `elapsed_time` (in milliseconds)."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._spare: list[Any] = []
        self._events: list[Any] = []
        self._last: Any = None

    def __call__(self) -> int:
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        self._events.append(event)
        return perf_counter_ns()

    @property
    def is_idle(self) -> bool:
        """Whether the device had passed all marks when they were last taken."""
        return not self._events

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until the device has passed all marks, at the end of a run, but not longer than so many seconds."""
        if self._events and seconds == math.inf:
            self._events[-1].synchronize()
        deadline = monotonic() + seconds
        while self._events and not self._events[-1].query() and monotonic() < deadline:
            sleep(_POLL_SECONDS)

    def take(self, log: Sequence[int]) -> tuple[int, Any]:
        """Return how much of a log the device has passed, and the nanoseconds between its marks there. What was taken is forgotten."""
        done = self._done()
        if done == len(self._events):
            length = len(log)
        else:
            timed = numpy.flatnonzero(numpy.array(log[::2]) <= meter.TICK)
            length = 2 * int(timed[done])
        taken, self._events = self._events[:done], self._events[done:]
        spent = []
        for event in taken:
            spent.append(0.0 if self._last is None else _elapsed(self._last, event))
            if self._last is not None:
                self._spare.append(self._last)
            self._last = event
        return length, numpy.array(spent)

    def _done(self) -> int:
        """Return how many events the device has passed: they come in order."""
        low, high = 0, len(self._events)
        while low < high:
            middle = (low + high) // 2
            if self._events[middle].query():
                low = middle + 1
            else:
                high = middle
        return low


def _elapsed(earlier: Any, later: Any) -> float:
    try:
        return max(0.0, float(earlier.elapsed_time(later)) * 1e6)
    except RuntimeError:  # recorded on a different queue of the device, which has not reached it yet
        return 0.0
