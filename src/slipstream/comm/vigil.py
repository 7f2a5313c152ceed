"""A wait for other processes: when it is reported, and when it ends with an exception.

`look()` is called several times a second by whoever waits. It raises when a rank that is waited for is lost or when the limit is
reached, and prints the table of ranks after `hang_warning` seconds and at twice that time each time after. A patient wait (a
barrier, a turn) goes on as long as the others show signs of life: one rank may tokenise for an hour.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from slipstream.comm.beacon import PROCESS_ENDED, Beacon
from slipstream.errors import PeerLostError, WaitTimeoutError

__all__ = ["Limits", "Vigil"]


@dataclass(frozen=True)
class Limits:
    """How long a call may wait, in seconds: each state object has its own."""

    timeout: float = 1800.0
    """A collective raises after this time; so does a patient wait for ranks that show no sign of life for so long."""
    barrier_timeout: float = 86400.0
    """A patient wait raises after this time."""
    hang_warning: float = 10.0
    """The table of ranks is printed after this time; 0 for never."""


class Vigil:
    """One wait, from the moment that the beacon entered it."""

    def __init__(self, beacon: Beacon, operation: str, site: str, limits: Limits, *, patient: bool = False) -> None:
        self._beacon = beacon
        self._limits = limits
        self._patient = patient
        self._limit = limits.barrier_timeout if patient else limits.timeout
        self._warn_at = limits.hang_warning if limits.hang_warning > 0 else float("inf")
        self._call = f"{operation} number {beacon.here.sequence} at {site}"
        beacon.hang_warning = limits.hang_warning or 10.0

    def look(self) -> None:
        waited = time.monotonic() - self._beacon.here.since
        if self._beacon.loss is not None:
            self.lose()
        if waited >= self._limit or (
            self._patient and waited > self._limits.timeout and self._beacon.all_missing_silent(self._limits.timeout)
        ):
            self._give_up(waited)
        if waited >= self._warn_at * 0.95:
            self._warn_at = waited * 2
            self._report(waited)

    def lose(self) -> NoReturn:
        beacon = self._beacon
        if beacon.loss is not None and beacon.loss.endswith(PROCESS_ENDED):
            beacon.find_loss(1.0)
        beacon.refresh()
        raise PeerLostError(f"{self._call} cannot complete on rank {beacon.rank}: {beacon.loss}.\n{beacon.table()}")

    def _report(self, waited: float) -> None:
        beacon = self._beacon
        if not beacon.is_lowest_waiting():
            return  # one table is enough, and that rank prints it
        print(
            f"slipstream: rank {beacon.rank} has waited {waited:.0f} s in {self._call}. Not there: {_ranks(beacon.missing())}. "
            f"The wait ends with an error after {self._limit:.0f} s{self._or_silence()}.\n{beacon.table()}",
            file=sys.stderr,
            flush=True,
        )

    def _or_silence(self) -> str:
        return f", or after {self._limits.timeout:.0f} s without a sign of life" if self._patient else ""

    def _give_up(self, waited: float) -> NoReturn:
        beacon, here = self._beacon, self._beacon.here
        name = "barrier_timeout" if waited >= self._limits.barrier_timeout and self._patient else "timeout"
        message = (
            f"rank {beacon.rank} waited {waited:.0f} s in {self._call}, and {_ranks(beacon.missing())} did not come:\n{beacon.table()}\n"
            f"If the work before it may take so long, raise the limit with {name}=... or SLIPSTREAM_{name.upper()} "
            f"(now {getattr(self._limits, name):g} s)."
        )
        if here.sequence:  # opening the group can be tried again; a call that was given up cannot
            beacon.post("gave_up", generation=here.generation, sequence=here.sequence, operation=here.operation, site=here.site)
        raise WaitTimeoutError(message)


def _ranks(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}" if ranks else "no rank in particular"
