"""Decide when a wait for other ranks is reported and when it ends with an exception.

`check()` is called several times a second by whoever waits. It raises when a rank is lost, when ranks wait for each other in different
places, or when the limit is reached, and it prints the table of ranks after `hang_warning` seconds and at each doubling of that time. A
patient wait (a barrier) continues as long as the other ranks show signs of life. In a section of torch's own collectives
(`distributed/watchdog.py`) work cannot be distinguished from waiting, so less is reported while every rank is inside.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from slipstream.distributed.heartbeat import PROCESS_ENDED, Heartbeat, RankPosition, format_ranks
from slipstream.errors import MismatchError, PeerLostError, WaitTimeoutError

__all__ = ["Limits", "WaitMonitor", "guess_condition"]


_ALL_INSIDE_FACTOR = 6
"""A watched section that every rank is in is reported after this many times `hang_warning`."""


@dataclass(frozen=True)
class Limits:
    """How long a call may wait, in seconds: each state object has its own."""

    timeout: float = 1800.0
    """A collective raises after this time; a patient wait raises if the missing ranks have been silent for this time."""
    barrier_timeout: float = 86400.0
    """A patient wait raises after this time."""
    hang_warning: float = 10.0
    """The table of ranks is printed after this time; 0 for never."""


class WaitMonitor:
    """One wait: in the collective that the heartbeat has entered, or in a watched section."""

    def __init__(self, heartbeat: Heartbeat, limits: Limits, *, patient: bool = False, section: RankPosition | None = None) -> None:
        self._heartbeat = heartbeat
        self._position = section or heartbeat.collective
        self._limits = limits
        self._patient = patient
        soonest = 0.0 if section is None else 2 * heartbeat.PUBLISH_EVERY  # a peer that has arrived may still look absent for this long
        self._limit = max(soonest, limits.barrier_timeout if patient else limits.timeout)
        self._warn_at = max(soonest, limits.hang_warning) if limits.hang_warning > 0 else float("inf")
        self._suspects: dict[int, tuple[int, int]] = {}
        heartbeat.hang_warning = limits.hang_warning or 10.0

    def check(self) -> None:
        waited = time.monotonic() - self._position.since
        if self._heartbeat.peer_failure is not None:
            self.raise_peer_failure()
        self._check_for_deadlock()
        if waited >= self._limit and self._is_waiting() or (
            self._patient and waited > self._limits.timeout and self._heartbeat.all_missing_silent(self._limits.timeout)
        ):
            self.raise_timeout(waited)
        if waited >= self._warn_at * 0.95 and (self._somebody_is_missing() or waited >= self._limits.hang_warning * _ALL_INSIDE_FACTOR):
            self._warn_at = waited * 2
            self._report(waited)

    def _somebody_is_missing(self) -> bool:
        return not self._position.watched or bool(self._heartbeat.missing())

    def _is_waiting(self) -> bool:
        """Whether this rank waits rather than computes: in a section, a collective has begun that a rank has not joined."""
        return not self._position.watched or (self._heartbeat.position().torch_ops > 0 and self._somebody_is_missing())

    def raise_peer_failure(self) -> NoReturn:
        heartbeat = self._heartbeat
        if heartbeat.is_mismatch:
            raise MismatchError(f"{heartbeat.peer_failure}\n(raised on rank {heartbeat.rank})")
        if heartbeat.peer_failure is not None and heartbeat.peer_failure.endswith(PROCESS_ENDED):
            heartbeat.find_peer_failure(1.0)
        heartbeat.refresh()
        text = f"{self._position.call} cannot complete on rank {heartbeat.rank}: {heartbeat.peer_failure}.\n{heartbeat.table()}"
        if heartbeat.peer_failure is not None and PROCESS_ENDED in heartbeat.peer_failure and not self._position.watched:  # it did not fail
            question = guess_condition(heartbeat.rank, len(heartbeat.peers) + 1)
            text += f"\nIf rank {heartbeat.rank} makes this call alone: {question}? Call it on every process."
        raise PeerLostError(text)

    # -- deadlocks ------------------------------------------------------------------------------------------------

    def _check_for_deadlock(self) -> None:
        """Raise if a rank waits where this one will never join it; two records must agree, because one may be out of date."""
        own = self._heartbeat.record()
        for rank, peer in self._heartbeat.peers.items():
            if not peer.record or not _is_deadlock(own, peer.record):
                self._suspects.pop(rank, None)
                continue
            sections = peer.record["sections"]
            first_beat, before = self._suspects.setdefault(rank, (peer.beat, sections))
            if before != sections:
                del self._suspects[rank]
            elif peer.beat > first_beat:
                self._raise_mismatch()

    def _raise_mismatch(self) -> NoReturn:
        heartbeat = self._heartbeat
        heartbeat.refresh()
        text = (
            "The processes wait for each other in different places, so none of them can continue:\n"
            f"{heartbeat.table()}\n"
            "Every process has to run every backward pass that averages gradients, and to make every call, in the same order.\n"
            "Look for a loop that one process leaves early (break, return, fewer batches), and for a call under a condition that is not "
            "true everywhere, such as `if accelerator.is_main_process:`."
        )
        heartbeat.post("mismatch", generation=self._position.generation, text=text)
        raise MismatchError(f"{text}\n(raised on rank {heartbeat.rank})")

    # -- long waits -----------------------------------------------------------------------------------------------

    def _report(self, waited: float) -> None:
        heartbeat = self._heartbeat
        if not heartbeat.is_lowest_waiting():
            return  # a lower rank prints the table
        verb, missing = "been" if self._position.watched else "waited", heartbeat.missing()
        absent = f"Missing: {format_ranks(missing)}. " if missing else ""
        or_silence = f", or after {self._limits.timeout:.0f} s without a sign of life" if self._patient else ""
        print(
            f"slipstream: rank {heartbeat.rank} has {verb} {waited:.0f} s in {self._position.call}. {absent}"
            f"Timeout after {self._limit:.0f} s{or_silence}.\n{heartbeat.table()}",
            file=sys.stderr,
            flush=True,
        )

    def raise_timeout(self, waited: float) -> NoReturn:
        heartbeat, position = self._heartbeat, self._position
        name = "barrier_timeout" if waited >= self._limits.barrier_timeout and self._patient else "timeout"
        message = (
            f"rank {heartbeat.rank} waited {waited:.0f} s in {position.call}, and {format_ranks(heartbeat.missing())} did not "
            f"come:\n{heartbeat.table()}\n"
            f"If the work before it can take that long, raise the limit with {name}=... or SLIPSTREAM_{name.upper()} "
            f"(now {getattr(self._limits, name):g} s)."
        )
        if position.sequence or position.watched:  # opening the group can be retried; an abandoned call cannot
            heartbeat.post("gave_up", generation=position.generation, call=position.call, because="")
        raise WaitTimeoutError(message)


def _is_deadlock(own: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether this rank and the one that published the record wait for each other in different places.

    A rank that has begun a torch collective in a section waits for a rank that has not entered that section. If that rank waits in a
    Slipstream collective that the first has not reached, neither can continue. Both counters restart at the last Slipstream collective,
    and both must be ahead, because a rank may run a section, or a torch collective, by itself.
    """
    if not record["waiting"] or record["generation"] != own["generation"]:
        return False
    if own["watched"] and record["watched"]:
        same_place = all(own[name] == record[name] for name in ("sequence", "sections_since_call"))
        return bool(own["torch_ops"] and record["torch_ops"] and same_place and own["operation"] != record["operation"])
    section, call = (own, record) if own["watched"] else (record, own)
    if not section["watched"] or call["watched"]:
        return False
    is_ahead = all(section[name] > call[name] for name in ("sections_since_call", "torch_ops_since_call"))
    return bool(section["torch_ops"] and is_ahead and section["sequence"] == call["sequence"] - 1)


def guess_condition(rank: int, world_size: int) -> str:
    """Return the most likely condition around a call that only this rank makes, as the beginning of a question.

    >>> guess_condition(0, 4), guess_condition(3, 4)
    ('is that under `if accelerator.is_main_process:`', 'is that under `if accelerator.is_last_process:`')
    """
    if rank == 0:
        return "is that under `if accelerator.is_main_process:`"
    if rank == world_size - 1 > 1:
        return "is that under `if accelerator.is_last_process:`"
    return f"is that under a condition that is true on rank {rank} alone"
