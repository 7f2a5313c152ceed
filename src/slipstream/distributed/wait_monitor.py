"""Decide when a wait for other ranks is reported and when it ends with an exception.

`look()` is called several times a second by whoever waits. It raises when a rank is lost, when ranks wait for each other in different
places, or when the limit is reached, and it prints the table of ranks after `hang_warning` seconds and at each doubling of that time. A
patient wait (a barrier) continues as long as the other ranks show signs of life. In a section of torch's own collectives
(`distributed/watchdog.py`) work cannot be told from waiting, so less is reported while every rank is inside.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from slipstream.distributed.heartbeat import PROCESS_ENDED, Heartbeat, RankPosition
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
    """One wait: that of the collective which the beacon has entered, or of the section that is given."""

    def __init__(self, beacon: Heartbeat, limits: Limits, *, patient: bool = False, section: RankPosition | None = None) -> None:
        self._beacon = beacon
        self._here = section or beacon.here
        self._limits = limits
        self._patient = patient
        soonest = 0.0 if section is None else 2 * beacon.PUBLISH_EVERY  # the notes of the others may be so old: they may have come
        self._limit = max(soonest, limits.barrier_timeout if patient else limits.timeout)
        self._warn_at = max(soonest, limits.hang_warning) if limits.hang_warning > 0 else float("inf")
        self._suspects: dict[int, tuple[int, int]] = {}
        beacon.hang_warning = limits.hang_warning or 10.0

    def look(self) -> None:
        waited = time.monotonic() - self._here.since
        if self._beacon.loss is not None:
            self.lose()
        self._look_for_a_deadlock()
        if waited >= self._limit and self._is_waiting() or (
            self._patient and waited > self._limits.timeout and self._beacon.all_missing_silent(self._limits.timeout)
        ):
            self.give_up(waited)
        if waited >= self._warn_at * 0.95 and (self._somebody_is_missing() or waited >= self._limits.hang_warning * _ALL_INSIDE_FACTOR):
            self._warn_at = waited * 2
            self._report(waited)

    def _somebody_is_missing(self) -> bool:
        return not self._here.watched or bool(self._beacon.missing())

    def _is_waiting(self) -> bool:
        """Whether this is more than work: in a section, a collective has begun in it that somebody does not take part in."""
        return not self._here.watched or (self._beacon.place().begun > 0 and self._somebody_is_missing())

    def lose(self) -> NoReturn:
        beacon = self._beacon
        if beacon.mistake:
            raise MismatchError(f"{beacon.loss}\n(raised on rank {beacon.rank})")
        if beacon.loss is not None and beacon.loss.endswith(PROCESS_ENDED):
            beacon.find_loss(1.0)
        beacon.refresh()
        text = f"{self._here.call} cannot complete on rank {beacon.rank}: {beacon.loss}.\n{beacon.table()}"
        if beacon.loss is not None and PROCESS_ENDED in beacon.loss and not self._here.watched:  # it came to its end in peace
            question = guess_condition(beacon.rank, len(beacon.peers) + 1)
            text += f"\nIf rank {beacon.rank} makes this call alone: {question}? Call it on every process."
        raise PeerLostError(text)

    # -- ranks that wait for each other ---------------------------------------------------------------------------

    def _look_for_a_deadlock(self) -> None:
        """Ends the wait if a rank is where it will never be joined. One note may be a moment old: two of them have to say it."""
        own = self._beacon.note()
        for rank, peer in self._beacon.peers.items():
            if not peer.note or not _is_deadlock(own, peer.note):
                self._suspects.pop(rank, None)
                continue
            sections = peer.note["sections"]
            first_beat, before = self._suspects.setdefault(rank, (peer.beat, sections))
            if before != sections:
                del self._suspects[rank]
            elif peer.beat > first_beat:
                self._disagree()

    def _disagree(self) -> NoReturn:
        beacon = self._beacon
        beacon.refresh()
        text = (
            "The processes wait for each other in different places, so none of them can go on:\n"
            f"{beacon.table()}\n"
            "Every process has to run every backward pass that averages gradients, and to make every call, in the same order.\n"
            "Look for a loop that one process leaves early (break, return, fewer batches), and for a call under a condition that is not "
            "true everywhere, such as `if accelerator.is_main_process:`."
        )
        beacon.post("mistake", generation=self._here.generation, text=text)
        raise MismatchError(f"{text}\n(raised on rank {beacon.rank})")

    # -- long waits -----------------------------------------------------------------------------------------------

    def _report(self, waited: float) -> None:
        beacon = self._beacon
        if not beacon.is_lowest_waiting():
            return  # one table is enough, and that rank prints it
        verb, then = ("been", "It") if self._here.watched else ("waited", "The wait")
        print(
            f"slipstream: rank {beacon.rank} has {verb} {waited:.0f} s in {self._here.call}. Not there: "
            f"{_format_missing(beacon.missing())}. "
            f"{then} ends with an error after {self._limit:.0f} s{self._or_silence()}.\n{beacon.table()}",
            file=sys.stderr,
            flush=True,
        )

    def _or_silence(self) -> str:
        return f", or after {self._limits.timeout:.0f} s without a sign of life" if self._patient else ""

    def give_up(self, waited: float) -> NoReturn:
        beacon, here = self._beacon, self._here
        name = "barrier_timeout" if waited >= self._limits.barrier_timeout and self._patient else "timeout"
        message = (
            f"rank {beacon.rank} waited {waited:.0f} s in {here.call}, and {_format_missing(beacon.missing())} did not "
            f"come:\n{beacon.table()}\n"
            f"If the work before it may take so long, raise the limit with {name}=... or SLIPSTREAM_{name.upper()} "
            f"(now {getattr(self._limits, name):g} s)."
        )
        if here.sequence or here.watched:  # opening the group can be tried again; a call that was given up cannot
            beacon.post("gave_up", generation=here.generation, call=here.call, because="")
        raise WaitTimeoutError(message)


def _is_deadlock(own: dict[str, Any], note: dict[str, Any]) -> bool:
    """Whether this rank and the one that wrote the note wait for each other in different places.

    A rank that has begun a collective of torch in a section which another has not entered waits for that one; if the other is in a
    collective of ours that the first has not reached, it waits too. Both are counted from the last collective of ours, and both
    sections and collectives of torch have to say so: one rank may well run some of either alone.
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


def _format_missing(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}" if ranks else "no rank in particular"


def guess_condition(rank: int, world_size: int) -> str:
    """Under which condition a call most likely stands that this rank makes alone, as the beginning of a question.

    >>> guess_condition(0, 4), guess_condition(3, 4)
    ('is that under `if accelerator.is_main_process:`', 'is that under `if accelerator.is_last_process:`')
    """
    if rank == 0:
        return "is that under `if accelerator.is_main_process:`"
    if rank == world_size - 1 > 1:
        return "is that under `if accelerator.is_last_process:`"
    return f"is that under a condition that is true on rank {rank} alone"
