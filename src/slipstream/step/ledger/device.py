"""The clock of a device that computes while the host goes on: where its time went, not where the host asked for it.

Every mark with a time also records an event in the device's queue. The time between two of them on the device belongs to the phase that
was open between the marks: a forward that the host asked for in a moment counts as long as it takes, the wait for gradients in the
queue counts as communication, and a queue that ran empty counts for whatever the host was doing. Events are read when the device has
passed them, so nothing waits for the device; the rest of the log stays until the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import numpy

from slipstream.comm.meter import TICK

__all__ = ["DeviceClock"]


class DeviceClock:
    """Takes the place of the meter's clock. `make` gives an event with `record`, `query` and `elapsed_time` (in milliseconds)."""

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

    def wait(self) -> None:
        """Waits until the device has passed all marks: at the end of a run."""
        if self._events:
            self._events[-1].synchronize()

    def take(self, log: Sequence[int]) -> tuple[int, Any]:
        """How much of a log the device has passed, and the nanoseconds between its marks there. What was taken is forgotten."""
        done = self._done()
        if done == len(self._events):
            length = len(log)
        else:
            timed = numpy.flatnonzero(numpy.array(log[::2]) <= TICK)
            length = 2 * int(timed[done])
        taken, self._events = self._events[:done], self._events[done:]
        spent = []
        for event in taken:
            spent.append(0.0 if self._last is None else _between(self._last, event))
            if self._last is not None:
                self._spare.append(self._last)
            self._last = event
        return length, numpy.array(spent)

    def _done(self) -> int:
        """How many events the device has passed: they come in order."""
        low, high = 0, len(self._events)
        while low < high:
            middle = (low + high) // 2
            if self._events[middle].query():
                low = middle + 1
            else:
                high = middle
        return low


def _between(earlier: Any, later: Any) -> float:
    try:
        return max(0.0, float(earlier.elapsed_time(later)) * 1e6)
    except RuntimeError:  # recorded on another queue of the device, which is not there yet
        return 0.0
