"""The clock of a device that computes while the host goes on: where its time went, not where the host asked for it.

Every mark also records an event in the device's queue. The time between two of them on the device belongs to the phase that the second
one ended: a forward that the host asked for in a moment counts as long as it takes, the wait for gradients in the queue counts as
communication, and a queue that ran empty counts for whatever the host was doing. Events are read when the device has passed
them, so nothing waits for the device; rows of steps that it has not finished stay until the next time.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from slipstream.comm.meter import COLUMNS, OTHER, PHASES, Meter

__all__ = ["DeviceClock"]

_WIDTH = COLUMNS + 1
_MOST = 10_000
"""Events of a step, beyond which the clock of the host has to do for it: in an evaluation no step ends."""


class DeviceClock:
    """Takes the place of the meter's clock. `make` gives an event with `record`, `query` and `elapsed_time` (in milliseconds)."""

    def __init__(self, meter: Meter, make: Callable[[], Any]) -> None:
        self._meter = meter
        self._make = make
        self._spare: list[Any] = []
        self._present: list[tuple[int, Any]] = []
        self._ended: list[list[tuple[int, Any]]] = []
        self._is_whole = True
        """Whether the events of the present step are all there."""

    def __call__(self) -> int:
        event = self._spare.pop() if self._spare else self._make()
        event.record()
        self._present.append((self._meter.phase, event))
        if len(self._present) > _MOST:
            self._spare += [event for _, event in self._present[:-1]]
            self._present, self._is_whole = self._present[-1:], False
        return perf_counter_ns()

    def end_step(self) -> None:
        """The events since the last call belong to the step that ends now; its last one begins the next."""
        self._ended.append(self._present if self._is_whole else [])
        self._present, self._is_whole = self._present[-1:], True

    def settle(self, flat: list[int]) -> int:
        """Puts times of the device into rows of steps; how many numbers of them are final, the rest waits for the device."""
        done = 0
        for events in self._ended:
            if events and not events[-1][1].query():
                break
            row = flat[done : done + _WIDTH]
            flat[done : done + _WIDTH] = self._read(events, row)
            self._spare += [event for _, event in events[:-1]]
            done += _WIDTH
        del self._ended[: done // _WIDTH]
        return done

    def _read(self, events: list[tuple[int, Any]], row: list[int]) -> list[int]:
        """The wall time of a step, shared out as the device spent it."""
        spent = [0.0] * (PHASES + 1)
        try:
            for (_, earlier), (phase, event) in zip(events, events[1:], strict=False):
                spent[min(phase, PHASES)] += max(0.0, earlier.elapsed_time(event))
        except RuntimeError:  # recorded on another queue of the device, which is not there yet
            return row
        wall, total = sum(row[:PHASES]), sum(spent[:PHASES])
        if not total:
            return row
        shared = [int(wall * part / total) for part in spent[:PHASES]]
        shared[OTHER] += wall - sum(shared)
        return shared + row[PHASES:]
