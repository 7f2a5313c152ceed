"""What a guard found, and how it is said: a warning with the step, the rank and the remedy, a few times and then no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.logging import get_logger

__all__ = ["Finding", "NonFiniteError", "Voice"]

_FIELDS = ("step", "rank", "text", "remedy")
_TIMES = 3
_EVENTS = 20
"""How many events of a kind the run has, of all ranks together."""
_DISTANCE = 100
"""Steps between the first time that something is said and the second; ten times as many before the third."""


class NonFiniteError(SlipstreamError, FloatingPointError):
    """A gradient is NaN or infinite, and `on_nan="raise"` was asked for; the message names the step, the ranks and the parameters."""


@dataclass(frozen=True)
class Finding:
    """Something that goes wrong in a run.

    >>> print(Finding("spike", 120, 1, "the loss rose from 2.1 to 35", "lower the learning rate"))
    step 120, rank 1: the loss rose from 2.1 to 35. What to do: lower the learning rate.
    """

    kind: str
    """Which guard found it: "nan", "spike", "drift", "schedule", "batches", "starving", "straggler"."""
    step: int | None
    rank: int | None
    """Where, if it is one rank's."""
    text: str
    remedy: str
    details: dict[str, Any] = field(default_factory=dict)
    """More for the event, as plain values."""

    def __str__(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in (("step", self.step), ("rank", self.rank)) if value is not None)
        return f"{where}{': ' if where else ''}{self.text}. What to do: {self.remedy}."

    @property
    def order(self) -> tuple[int, bool]:
        """By this the earliest of several is found: within one step, what comes of it (`"consequence"` in the details) is later."""
        return self.step or 0, bool(self.details.get("consequence"))

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Finding:
        """Return the finding that an event was made of.

        >>> Finding.of(Finding("drift", 10, None, "replicas differ", "prepare again", {"ranks": [1]}).event()).details
        {'ranks': [1]}
        """
        details = {name: value for name, value in event.items() if name not in (*_FIELDS, "kind", "guard", "time")}
        return cls(event["guard"], event.get("step"), event.get("rank"), event["text"], event["remedy"], details)

    def event(self) -> dict[str, Any]:
        """As a line of events.jsonl, without its time.

        >>> Finding("drift", 10, None, "replicas differ", "prepare again", {"ranks": [1]}).event()["guard"]
        'drift'
        """
        event = {"kind": "guard", "guard": self.kind, "step": self.step, "rank": self.rank, "text": self.text, "remedy": self.remedy}
        return {**event, **self.details}


class Voice:
    """Says findings: each kind at most three times, with a growing number of steps in between.

    All ranks speak through the main process, so that a thousand of them do not say the same: `tell` takes events there, and `hear` says
    them.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None] | None = None, is_main: bool = True, world_size: int = 1) -> None:
        self._is_main = is_main
        self._world_size = world_size
        self.tell = tell
        """Where events go, besides the log."""
        self.aloud = True
        """Whether this process says its findings itself; else the main process does."""
        self.waits: frozenset[str] = frozenset()
        """Which kinds of other ranks' findings are held back until every rank was heard."""
        self.said: list[Finding] = []
        self._logger = get_logger("slipstream.guards")
        self._times: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._admitted: dict[str, int] = {}
        self._telling = False
        self._held: list[tuple[Finding, bool]] = []

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def hold(self, finding: Finding, *, own: bool = True) -> None:
        """On the main process: keeps a finding back until every rank has been heard, since another one may be where it began."""
        self._held.append((finding, own))

    def release(self, told: float = math.inf) -> None:
        """Says the earliest of what is held back, once every rank has told its steps up to there; the others are its consequences."""
        if not self._held:
            return
        finding, own = min(self._held, key=lambda entry: (*entry[0].order, entry[0].rank or 0))
        if told < (finding.step or 0):
            return
        first = {entry.rank for entry, _ in self._held if entry.order == finding.order}
        self._held = []
        if 1 < len(first) == self._world_size:
            finding = replace(finding, rank=None, text=f"on all {len(first)} ranks at once, {finding.text}")
        if own:
            self.say(finding)
        elif self._may(finding):
            self._log(finding)

    def say_alone(self, event: Mapping[str, Any]) -> None:
        """On another rank: says what was left to the main process, which is gone and cannot say it any more."""
        if event.get("kind") == "guard":
            self._log(Finding.of(event))

    def say(self, finding: Finding, *, shared: bool = False) -> bool:
        """Says a finding, unless its kind was said often or a short while ago; whether it did.

        `shared`: every rank has found the same, so only the main process says it.
        """
        if not self._may(finding):
            return False
        if self.aloud and (self._is_main or not shared):
            self._log(finding)
        self.note(finding, shared=shared)
        return True

    def note(self, finding: Finding, *, shared: bool = False) -> None:
        """Makes an event of a finding, and says nothing."""
        if self.tell is None or (shared and not self._is_main):
            return
        self._telling = True
        try:
            self.tell(finding.event())
        finally:
            self._telling = False

    def admits(self, event: Mapping[str, Any]) -> bool:
        """On the main process: whether an event is kept, or there are enough of its kind. Those that are no finding are."""
        if event.get("kind") != "guard":
            return True
        kind = str(event["guard"])
        self._admitted[kind] = self._admitted.get(kind, 0) + 1
        return self._admitted[kind] <= _EVENTS

    def hear(self, event: dict[str, Any]) -> None:
        """On the main process: says what another rank has found."""
        if event.get("kind") != "guard" or self._telling:
            return
        finding = Finding.of(event)
        if finding.kind in self.waits:
            self.hold(finding, own=False)
        elif self._may(finding):
            self._log(finding)

    def _may(self, finding: Finding) -> bool:
        kind, step = finding.kind, finding.step or 0
        times = self._times.get(kind, 0)
        earlier = step < self._first.get(kind, step)  # another rank, where it began
        if times >= _TIMES or (step < self._next.get(kind, step) and not earlier):
            self._kept[kind] = self._kept.get(kind, 0) + 1
            return False
        self._times[kind] = times + 1
        self._first[kind] = min(step, self._first.get(kind, step))
        self._next[kind] = max(self._next.get(kind, 0), step + _DISTANCE * 10**times)
        self.said.append(finding)
        return True

    def _log(self, finding: Finding) -> None:
        kept = self._kept.pop(finding.kind, 0)
        more = f" (Found {'once' if kept == 1 else f'{kept} times'} more since it was said last.)" if kept else ""
        last = " (Not said again in this run.)" if self._times.get(finding.kind) == _TIMES else ""
        self._logger.warning("%s%s%s", finding, more, last, main_process_only=self._is_main)
