"""`Meter` is a log of phase marks, written by the training step and read by `observability/timing/step_times.py`.

A mark is two entries in one list, a code and a value. `training/stepper.py:run_timed` writes the marks around a phase, `mark_phase` does
the same as a context manager for rare events. The step only appends, because caches are cold after torch's work: summing inside of the
step was measured to cost three times as much. Phases nest as calls do, and every moment belongs to the innermost phase, so the phases add
up to the elapsed time even when an exception is raised. Marks are made by the training thread. The module imports no other of this package.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import Any

__all__ = [
    "BACKWARD", "CHECKPOINT", "COLUMNS", "DATA", "EVALUATION", "EXPOSED", "FORWARD", "LEAVE", "LOCAL_END", "LOG_LIMIT", "OPTIMIZER",
    "OTHER", "PASS_BEGIN", "PASS_END", "PHASES", "SAMPLES", "SAMPLES_HANDED", "SETUP", "STEP_END", "TICK", "TOKENS", "TOKENS_COUNTED",
    "TRAINING_BEGIN", "Meter", "mark_phase",
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
"""How many phases there are: as codes they begin one."""
SETUP = 8
"""The phase before training begins, which no step counts."""
SAMPLES = 8
TOKENS = 9
"""Columns of counts, behind those of the phases."""
COLUMNS = 10
"""How many numbers a step has."""

LEAVE = 8
"""Ends the innermost phase."""
LOCAL_END = 9
"""From here on the innermost phase is `EXPOSED`."""
TICK = 10
"""Time has passed. Up to this code the value is the time."""
STEP_END = 11
"""A step has ended."""
SAMPLES_HANDED = 12
"""So many samples were yielded."""
TOKENS_COUNTED = 13
"""So many tokens were yielded."""
PASS_BEGIN = 14
"""A pass over a loader began; the value is its number."""
PASS_END = 15
"""The pass ended."""
TRAINING_BEGIN = 16
"""Training begins."""

LOG_LIMIT = 200_000
"""Entries after which the log is read wherever it is: where no step ends and no loader is read."""
_MAX_LOSSES = 4096
"""How many losses are kept at most, where no step ever ends."""


class Meter:
    """The log of one ledger.

    >>> meter = Meter()
    >>> meter.begin()
    >>> with mark_phase(meter, DATA):
    ...     pass
    >>> meter.log[::2] == [TICK, TRAINING_BEGIN, DATA, LEAVE]
    True
    """

    __slots__ = (
        "__weakref__", "add", "attend", "clock", "counting", "due", "has_begun", "keeps_waits", "log", "losses", "passes", "since", "step",
        "thread", "token_counter", "updated", "without_optimizer",
    )  # fmt: skip

    def __init__(self) -> None:
        self.clock: Callable[[], int] = perf_counter_ns
        self.log: list[int] = []
        """Codes and values in turns; always the same list."""
        self.add = self.log.append
        self.since = perf_counter_ns()
        """When it was made."""
        self.step = 0
        """The number of the present step, from 0."""
        self.updated = False
        """Whether this step has had its update, so that it ends when the next batch is requested."""
        self.without_optimizer = True
        """Whether no optimizer was prepared: then a backward pass counts as the update."""
        self.has_begun = False
        self.keeps_waits = False
        """Whether waits belong to the present phase, a checkpoint."""
        self.passes = 0
        """Passes over loaders so far."""
        self.losses: deque[tuple[int, Any]] = deque(maxlen=_MAX_LOSSES)
        """(step, loss) of the backward passes since the last read: numbers, or tensors without a graph."""
        self.counting: Any = None
        """Counts floating-point operations while it is there: see `observability/timing/ledger.py`."""
        self.due = 0
        """From this time on `attend` is called, between two steps."""
        self.attend: Callable[[int], None] = lambda now: None
        """Reads the log; called with the time."""
        self.token_counter: Callable[[Any], Callable[[Any], int] | None] = lambda batch: None
        """Finds out from the first batch of a pass how the tokens of all of them are counted."""
        self.thread = get_ident()
        """The thread that trains."""

    def begin(self) -> None:
        """Begin a pass over data; time counts from the first one on."""
        self.thread = get_ident()
        if not self.has_begun:
            self.tick()
            self.add(TRAINING_BEGIN)
            self.add(0)
            self.has_begun = True

    def tick(self) -> None:
        """Mark that time has passed."""
        self.add(TICK)
        self.add(self.clock())

    def enter(self, phase: int) -> None:
        """Mark the begin of a phase."""
        self.add(phase)
        self.add(self.clock())

    def leave(self) -> None:
        """Mark the end of the innermost phase."""
        self.add(LEAVE)
        self.add(self.clock())

    def wait(self) -> bool:
        """Begin a wait for other ranks; return False if it belongs to the current phase or to another thread."""
        if self.keeps_waits or not self.has_begun or self.thread != get_ident():
            return False
        self.enter(EXPOSED)
        return True

    def end_wait(self, begun: bool) -> None:
        """End a wait, if it was begun."""
        if begun:
            self.leave()
            if len(self.log) > LOG_LIMIT:
                self.attend(self.log[-1])

    def end_step(self) -> None:
        """Mark that a step has ended with the last mark."""
        self.add(STEP_END)
        self.add(0)
        self.updated, self.has_begun = False, True
        self.step += 1
        now = self.log[-3]
        if now >= self.due:
            self.attend(now)


@contextmanager
def mark_phase(meter: Meter | None, phase: int) -> Iterator[None]:
    """Mark a block as a phase, for rare events; without a meter, just run the block."""
    if meter is None:
        yield
        return
    before, meter.keeps_waits = meter.keeps_waits, meter.keeps_waits or phase == CHECKPOINT
    meter.enter(phase)
    try:
        yield
    finally:
        meter.leave()
        meter.keeps_waits = before
