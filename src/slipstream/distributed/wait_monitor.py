"""Decide when a wait for other ranks is reported and when it ends with an exception.

`check()` is called several times a second by whoever waits. It raises when a rank is lost, when ranks wait for each other in different
places, or when the limit is reached, and it prints the table of ranks after `hang_warning` seconds and at each doubling of that time. A
patient wait (a barrier) continues as long as the other ranks show signs of life. In a section of torch's own collectives
(`distributed/watchdog.py`) work cannot be told from waiting, so less is reported while every rank is inside.
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
    """A collective raises after this time; so does a patient wait for ranks that show no sign of life for so long."""
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
        soonest = 0.0 if section is None else 2 * heartbeat.PUBLISH_EVERY  # a peer that has arrived may look absent for so long
        self._limit = max(soonest, limits.barrier_timeout if patient else limits.timeout)
        self._warn_at = max(soonest, limits.hang_warning) if limits.hang_warning > 0 else float("inf")
        self._suspects: dict[int, tuple[int, int]] = {}
        heartbeat.hang_warning = limits.hang_warning or 10.0

    def check(self) -> None:
        waited = time.monotonic() - self._position.since
        if self._heartbeat.loss is not None:
            self.raise_lost()
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
        """Whether this is more than work: in a section, a collective has begun in it that somebody does not take part in."""
        return not self._position.watched or (self._heartbeat.position().begun > 0 and self._somebody_is_missing())

    def raise_lost(self) -> NoReturn:
        heartbeat = self._heartbeat
        if heartbeat.mistake:
            raise MismatchError(f"{heartbeat.loss}\n(raised on rank {heartbeat.rank})")
        if heartbeat.loss is not None and heartbeat.loss.endswith(PROCESS_ENDED):
            heartbeat.find_loss(1.0)
        heartbeat.refresh()
        text = f"{self._position.call} cannot complete on rank {heartbeat.rank}: {heartbeat.loss}.\n{heartbeat.table()}"
        if heartbeat.loss is not None and PROCESS_ENDED in heartbeat.loss and not self._position.watched:  # it did not fail
            question = guess_condition(heartbeat.rank, len(heartbeat.peers) + 1)
            text += f"\nIf rank {heartbeat.rank} makes this call alone: {question}? Call it on every process."
        raise PeerLostError(text)

    # -- deadlocks ------------------------------------------------------------------------------------------------

    def _check_for_deadlock(self) -> None:
        """Raise if a rank waits where this one will never join it. A note may be a moment old, so two of them have to say it."""
        own = self._heartbeat.note()
        for rank, peer in self._heartbeat.peers.items():
            if not peer.note or not _is_deadlock(own, peer.note):
                self._suspects.pop(rank, None)
                continue
            sections = peer.note["sections"]
            first_beat, before = self._suspects.setdefault(rank, (peer.beat, sections))
            if before != sections:
                del self._suspects[rank]
            elif peer.beat > first_beat:
                self._raise_mismatch()

    def _raise_mismatch(self) -> NoReturn:
        heartbeat = self._heartbeat
        heartbeat.refresh()
        text = (
            "The processes wait for each other in different places, so none of them can go on:\n"
            f"{heartbeat.table()}\n"
            "Every process has to run every backward pass that averages gradients, and to make every call, in the same order.\n"
            "Look for a loop that one process leaves early (break, return, fewer batches), and for a call under a condition that is not "
            "true everywhere, such as `if accelerator.is_main_process:`."
        )
        heartbeat.post("mistake", generation=self._position.generation, text=text)
        raise MismatchError(f"{text}\n(raised on rank {heartbeat.rank})")

    # -- long waits -----------------------------------------------------------------------------------------------

    def _report(self, waited: float) -> None:
        heartbeat = self._heartbeat
        if not heartbeat.is_lowest_waiting():
            return  # one table is enough, and that rank prints it
        verb, then = ("been", "It") if self._position.watched else ("waited", "The wait")
        or_silence = f", or after {self._limits.timeout:.0f} s without a sign of life" if self._patient else ""
        print(
            f"slipstream: rank {heartbeat.rank} has {verb} {waited:.0f} s in {self._position.call}. Not there: "
            f"{format_ranks(heartbeat.missing())}. "
            f"{then} ends with an error after {self._limit:.0f} s{or_silence}.\n{heartbeat.table()}",
            file=sys.stderr,
            flush=True,
        )

    def raise_timeout(self, waited: float) -> NoReturn:
        heartbeat, position = self._heartbeat, self._position
        name = "barrier_timeout" if waited >= self._limits.barrier_timeout and self._patient else "timeout"
        message = (
            f"rank {heartbeat.rank} waited {waited:.0f} s in {position.call}, and {format_ranks(heartbeat.missing())} did not "
            f"come:\n{heartbeat.table()}\n"
            f"If the work before it may take so long, raise the limit with {name}=... or SLIPSTREAM_{name.upper()} "
            f"(now {getattr(self._limits, name):g} s)."
        )
        if position.sequence or position.watched:  # opening the group can be tried again; a call that was given up cannot
            heartbeat.post("gave_up", generation=position.generation, call=position.call, because="")
        raise WaitTimeoutError(message)


def _is_deadlock(own: dict[str, Any], note: dict[str, Any]) -> bool:
    """Whether this rank and the one that wrote the note wait for each other in different places.

    A rank that has begun a collective of torch in a section that another has not entered waits for that one; if the other is in a
    collective of ours that the first has not reached, it waits too. Both counters restart at the last
    Slipstream collective, and both must be ahead: a rank may run a section, or a torch collective, by itself.
    """
    if not note["waiting"] or note["generation"] != own["generation"]:
        return False
    if own["watched"] and note["watched"]:
        same_place = all(own[name] == note[name] for name in ("sequence", "syncs"))
        return bool(own["begun"] and note["begun"] and same_place and own["operation"] != note["operation"])
    section, call = (own, note) if own["watched"] else (note, own)
    if not section["watched"] or call["watched"]:
        return False
    is_ahead = section["syncs"] > call["syncs"] and section["reductions"] > call["reductions"]
    return bool(section["begun"] and is_ahead and section["sequence"] == call["sequence"] - 1)


def guess_condition(rank: int, world_size: int) -> str:
    """Return the condition under which a call that this rank makes alone most likely stands, as the beginning of a question.

    >>> guess_condition(0, 4), guess_condition(3, 4)
    ('is that under `if accelerator.is_main_process:`', 'is that under `if accelerator.is_last_process:`')
    """
    if rank == 0:
        return "is that under `if accelerator.is_main_process:`"
    if rank == world_size - 1 > 1:
        return "is that under `if accelerator.is_last_process:`"
    return f"is that under a condition that is true on rank {rank} alone"
