"""The meter: how long this process has been doing what, since the last step ended. Marks all over the step add to it.

There is one present phase, and the moment at which it began. Whoever begins something else first adds the time until now to the
present phase, and whoever is done goes back to the phase that was there before: so phases nest, every nanosecond belongs to exactly
one of them, and their sum is the time that has passed. A mark is written out where it stands, since a call would cost as much again:

    now = meter.clock()
    before = meter.phase
    meter.spent[before] += now - meter.since
    meter.since, meter.phase = now, FORWARD
    try:
        ...
    finally:
        now = meter.clock()
        meter.spent[meter.phase] += now - meter.since
        meter.since, meter.phase = now, before

`marked` is the same as a block, for what happens seldom. What becomes of the numbers is the business of `step/ledger/`;
nothing here keeps a loader, a model or another process waiting. Marks are made by the thread that trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import Any

__all__ = [
    "BACKWARD",
    "CHECKPOINT",
    "COLUMNS",
    "DATA",
    "EVALUATION",
    "EXPOSED",
    "FORWARD",
    "OPTIMIZER",
    "OTHER",
    "PHASES",
    "SAMPLES",
    "SETUP",
    "TOKENS",
    "ZERO",
    "Meter",
    "marked",
]

DATA = 0
FORWARD = 1
BACKWARD = 2
EXPOSED = 3
"""Communication, and waiting for others in it: what a rank does when it has nothing left to compute."""
OPTIMIZER = 4
CHECKPOINT = 5
EVALUATION = 6
OTHER = 7
PHASES = 8
"""How many phases there are."""
SAMPLES = 8
TOKENS = 9
"""Counts, kept beside the phases: what was handed out."""
COLUMNS = 10
"""How many numbers a step has."""
SETUP = 10
"""The phase before training begins, which no step counts."""
ZERO = (0,) * 11
"""What a step begins with."""
_LOSSES = 4096
"""How many losses are kept at most, where no step ever ends."""


def _nothing(now: int) -> None:
    return None


class Meter:
    """Where the time of the present step has gone so far, in nanoseconds.

    >>> meter = Meter()
    >>> meter.begin()
    >>> before = meter.enter(DATA)
    >>> meter.leave(before)
    >>> meter.phase == OTHER and meter.spent[DATA] > 0
    True
    """

    __slots__ = (
        "__weakref__", "attend", "clock", "counting", "due", "losses", "phase", "rows", "since", "spent", "step", "thread", "token_counter",
        "trained", "updated", "without_optimizer",
    )  # fmt: skip

    def __init__(self) -> None:
        self.clock: Callable[[], int] = perf_counter_ns
        self.spent: list[int] = [0] * (COLUMNS + 1)
        """Nanoseconds by phase, then counts, of the present step; always the same list."""
        self.phase = SETUP
        self.since = perf_counter_ns()
        """When the present phase began."""
        self.step = 0
        """The number of the present step, from 0."""
        self.updated = False
        """Whether this step has had its update, so that it ends when the next batch is asked for."""
        self.trained = 0
        """Backward passes and updates so far: a pass over a loader without any is an evaluation."""
        self.without_optimizer = True
        """Whether no optimizer was prepared: then a backward pass counts as the update."""
        self.losses: deque[tuple[int, Any]] = deque(maxlen=_LOSSES)
        """(step, loss) of the backward passes since somebody looked: numbers, or tensors without a graph."""
        self.counting: Any = None
        """Counts floating-point operations while it is there: see `step/ledger/flops.py`."""
        self.rows: list[int] = []
        """`spent` of the steps that have ended, one after the other."""
        self.due = 0
        """When a step has ended at this time or later, `attend` is called with the time."""
        self.attend: Callable[[int], None] = _nothing
        self.token_counter: Callable[[Any], Callable[[Any], int] | None] = _none_counted
        """Finds out from the first batch of a pass how the tokens of all of them are counted."""
        self.thread = get_ident()
        """The thread that trains."""

    def begin(self) -> None:
        """A pass over data begins, and with the first one training: time counts from here."""
        self.thread = get_ident()
        if self.phase == SETUP:
            self.enter(OTHER)

    def end_step(self, now: int) -> None:
        """A step ends, now; the time until now was added before. Written out in `data/metered.py`."""
        if self.phase == SETUP:
            self.phase = OTHER
        self.rows += self.spent
        self.spent[:] = ZERO
        self.updated = False
        self.step += 1
        if now >= self.due:
            self.attend(now)

    def enter(self, phase: int) -> int:
        """Begins a phase; gives back the one before, for `leave`."""
        now, before = self.clock(), self.phase
        self.spent[before] += now - self.since
        self.since, self.phase = now, phase
        return before

    def leave(self, before: int) -> None:
        """Ends the present phase, and goes back to the one before."""
        now = self.clock()
        self.spent[self.phase] += now - self.since
        self.since, self.phase = now, before

    def wait(self) -> int:
        """As `enter(EXPOSED)`, unless the present phase keeps its waits to itself or another thread is asking; then -1."""
        return -1 if self.phase in _KEEP_THEIR_WAITS or self.thread != get_ident() else self.enter(EXPOSED)

    def done_waiting(self, before: int) -> None:
        """The end of `wait`."""
        if before >= 0:
            self.leave(before)


_KEEP_THEIR_WAITS = (CHECKPOINT, SETUP)


def _none_counted(batch: Any) -> None:
    return None


@contextmanager
def marked(meter: Meter | None, phase: int) -> Iterator[None]:
    """A block that belongs to a phase, for what happens seldom; without a meter, just the block."""
    if meter is None:
        yield
        return
    before = meter.enter(phase)
    try:
        yield
    finally:
        meter.leave(before)
