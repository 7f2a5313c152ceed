"""Where a rank is, as its beacon notes it and as the others read it.

A note is a plain dict, so that it travels as JSON. Nothing here waits, and nothing here knows the store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Here", "Peer", "Watched", "state_of"]


@dataclass(frozen=True)
class Here:
    """What this rank is doing: waiting in a collective, or on its way after one."""

    generation: int = 0
    sequence: int = 0
    operation: str = ""
    site: str = ""
    waiting: bool = False
    since: float = field(default_factory=time.monotonic)
    sections: int = 0
    """Watched sections of this generation that it has entered."""
    syncs: int = 0
    """Those of them that it entered after its last collective of ours: ranks that are in step have the same."""
    watched: bool = False
    """Whether this is a watched section and not a collective of ours."""
    number: int = 0
    """The how manieth section of its kind it is."""
    begun: int = 0
    """Collectives of torch that have begun in the section."""
    reductions: int = 0
    """Collectives of torch that it has begun after its last collective of ours, in a section or not."""

    @property
    def call(self) -> str:
        """What it is, counted and with its place: `gather number 7 at train.py:20`."""
        return _call(vars(self))

    def note(self) -> dict[str, Any]:
        return {**vars(self), "seconds": time.monotonic() - self.since}

    def is_after(self, note: dict[str, Any]) -> bool:
        """Whether a rank that took part in this has gone on since it wrote the note."""
        generation, sequence, sections = (note.get(name, 0) for name in ("generation", "sequence", "sections"))
        if generation != self.generation:
            return bool(generation < self.generation)
        return bool(sequence <= self.sequence and sections <= self.sections and (sequence, sections) != (self.sequence, self.sections))


class Watched(Protocol):
    """A section of the program in which torch's own collectives run, as the beacon sees it."""

    since: float
    """When it was entered last."""
    ask_after: float
    """Seconds after which the notes of the others are read."""

    def here(self, waiting: bool) -> Here: ...

    def look(self) -> None:
        """Called by the beacon's thread while the section is under way: reports, and ends what cannot complete."""


@dataclass
class Peer:
    """What is known of another rank, by this process's own clock."""

    note: dict[str, Any] = field(default_factory=dict)
    beat: int = -1
    heard: float = field(default_factory=time.monotonic)
    stack: list[str] = field(default_factory=list)
    stack_asked: float = 0.0
    stack_key: str = ""
    """Where the answer to the last question will stand."""

    def hear(self, note: dict[str, Any]) -> None:
        if note["beat"] != self.beat:
            self.beat, self.heard = note["beat"], time.monotonic()
        self.note = note

    @property
    def silent(self) -> float:
        """Seconds since its beat last went up."""
        return time.monotonic() - self.heard


def _call(note: dict[str, Any]) -> str:
    return f"{note['operation']} number {note['number'] if note['watched'] else note['sequence']} at {note['site']}"


def state_of(note: dict[str, Any]) -> str:
    """What a note says, for people.

    >>> state_of(Here(1, 7, "gather", "train.py:20", waiting=True).note())
    'waits 0 s in gather number 7 at train.py:20'
    """
    if not note:
        return "nothing heard of it yet"
    failure = f"; before that it failed in {note['failure']}" if note.get("failure") else ""
    if note["waiting"]:
        return f"{'has been' if note['watched'] else 'waits'} {note['seconds']:.0f} s in {_call(note)}{failure}"
    if not note["operation"]:
        return f"in no collective yet, for {note['seconds']:.0f} s"
    return f"in no collective for {note['seconds']:.0f} s; the last was {_call(note)}{failure}"
