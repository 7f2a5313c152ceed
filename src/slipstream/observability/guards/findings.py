"""What guards find, reported as a warning with step, rank and remedy, rate-limited per kind.

All ranks report through the main process, so that a thousand ranks do not print the same warning; every finding is also an event of the
run. `RankReports` compares small reports of all ranks under a shared key in the rendezvous store without a collective: no rank waits,
keys that some ranks never reach are dropped, and a store that fails ends the comparison with one log line. `NonFiniteError` is raised
with `on_nan="raise"`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from slipstream.distributed.process_group import read_now
from slipstream.errors import SlipstreamError
from slipstream.logging import get_logger

__all__ = ["FindingReporter", "GuardFinding", "NonFiniteError", "RankReports"]


_FIELDS = ("step", "rank", "text", "remedy")
_MAX_WARNINGS = 3
_MAX_EVENTS = 20
"""How many events of a kind the run has, of all ranks together."""
_STEPS_BETWEEN = 100
"""Steps between the first time that something is said and the second; ten times as many before the third."""


class NonFiniteError(SlipstreamError, FloatingPointError):
    """A gradient is NaN or infinite, and `on_nan="raise"` was asked for; the message names the step, the ranks and the parameters."""


@dataclass(frozen=True)
class GuardFinding:
    """Something that goes wrong in a run.

    >>> print(GuardFinding("spike", 120, 1, "the loss rose from 2.1 to 35", "lower the learning rate"))
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
    def of(cls, event: Mapping[str, Any]) -> GuardFinding:
        """Return the finding that an event was made of.

        >>> GuardFinding.of(GuardFinding("drift", 10, None, "replicas differ", "prepare again", {"ranks": [1]}).event()).details
        {'ranks': [1]}
        """
        details = {name: value for name, value in event.items() if name not in (*_FIELDS, "kind", "guard", "time")}
        return cls(event["guard"], event.get("step"), event.get("rank"), event["text"], event["remedy"], details)

    def event(self) -> dict[str, Any]:
        """As a line of events.jsonl, without its time.

        >>> GuardFinding("drift", 10, None, "replicas differ", "prepare again", {"ranks": [1]}).event()["guard"]
        'drift'
        """
        event = {"kind": "guard", "guard": self.kind, "step": self.step, "rank": self.rank, "text": self.text, "remedy": self.remedy}
        return {**event, **self.details}


class FindingReporter:
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
        self.said: list[GuardFinding] = []
        self._logger = get_logger("slipstream.guards")
        self._times: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._admitted: dict[str, int] = {}
        self._telling = False
        self._held: list[tuple[GuardFinding, bool]] = []

    @property
    def holds(self) -> bool:
        """Whether something is held back."""
        return bool(self._held)

    def hold(self, finding: GuardFinding, *, own: bool = True) -> None:
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
            self._log(GuardFinding.of(event))

    def say(self, finding: GuardFinding, *, shared: bool = False) -> bool:
        """Says a finding, unless its kind was said often or a short while ago; whether it did.

        `shared`: every rank has found the same, so only the main process says it.
        """
        if not self._may(finding):
            return False
        if self.aloud and (self._is_main or not shared):
            self._log(finding)
        self.note(finding, shared=shared)
        return True

    def note(self, finding: GuardFinding, *, shared: bool = False) -> None:
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
        return self._admitted[kind] <= _MAX_EVENTS

    def hear(self, event: dict[str, Any]) -> None:
        """On the main process: says what another rank has found."""
        if event.get("kind") != "guard" or self._telling:
            return
        finding = GuardFinding.of(event)
        if finding.kind in self.waits:
            self.hold(finding, own=False)
        elif self._may(finding):
            self._log(finding)

    def _may(self, finding: GuardFinding) -> bool:
        kind, step = finding.kind, finding.step or 0
        times = self._times.get(kind, 0)
        earlier = step < self._first.get(kind, step)  # another rank, where it began
        if times >= _MAX_WARNINGS or (step < self._next.get(kind, step) and not earlier):
            self._kept[kind] = self._kept.get(kind, 0) + 1
            return False
        self._times[kind] = times + 1
        self._first[kind] = min(step, self._first.get(kind, step))
        self._next[kind] = max(self._next.get(kind, 0), step + _STEPS_BETWEEN * 10**times)
        self.said.append(finding)
        return True

    def _log(self, finding: GuardFinding) -> None:
        kept = self._kept.pop(finding.kind, 0)
        more = f" (Found {'once' if kept == 1 else f'{kept} times'} more since it was said last.)" if kept else ""
        last = " (Not said again in this run.)" if self._times.get(finding.kind) == _MAX_WARNINGS else ""
        self._logger.warning("%s%s%s", finding, more, last, main_process_only=self._is_main)


_MAX_PENDING_KEYS = 8
"""How many keys may wait for other ranks."""


class RankReports:
    """The reports of one kind.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> ranks = [RankReports(lambda: store, rank, 2, "sums", "sums are compared") for rank in range(2)]
    >>> ranks[0].add("first", b"5", "a note")
    >>> ranks[0].take()
    []
    >>> ranks[1].add("first", b"7")
    >>> ranks[0].take()
    [('a note', [b'5', b'7'])]
    """

    def __init__(self, store: Callable[[], Any], rank: int, world_size: int, prefix: str, purpose: str) -> None:
        self._store = store
        self._rank = rank
        self._others = range(1, world_size)
        self._prefix = prefix
        self._purpose = purpose
        """What is said not to be done any more, if the store fails."""
        self._lost = False
        self._pending: deque[tuple[str, bytes, Any]] = deque()
        """On the main process, keys that wait for other ranks; on others, those whose reports may still be in the store."""

    def wants(self, key: str) -> bool:
        """Whether a report under this key would be added: the store is there, and the key is new."""
        return not self._lost and self._store() is not None and all(key != earlier for earlier, *_ in self._pending)

    def add(self, key: str, data: bytes, note: Any = None) -> None:
        """Reports; `note` stays on this rank, and comes back from `take` on the main process."""
        if not self.wants(key):
            return
        store = self._store()
        if self._rank:
            self._ask(lambda: _publish(store, self._name(key, self._rank), data))
        self._pending.append((key, data, note))
        if len(self._pending) > _MAX_PENDING_KEYS:
            self._forget(store, self._pending[0])

    def take(self) -> list[tuple[Any, list[bytes]]]:
        """On the main process: the note and the reports, by rank, of each key that every rank has reported to. They are gone then."""
        found: list[tuple[Any, list[bytes]]] = []
        store = self._store()
        if store is not None:
            self._ask(lambda: self._take(store, found))
        return found

    def _take(self, store: Any, found: list[tuple[Any, list[bytes]]]) -> None:
        for entry in list(self._pending):
            key, own, note = entry
            names = [self._name(key, rank) for rank in self._others]
            if store.check(names):
                reports = [read_now(store, name) for name in names]
                if None not in reports:  # one that its rank has just forgotten
                    found.append((note, [own, *(report for report in reports if report is not None)]))
                self._forget(store, entry)

    def _forget(self, store: Any, entry: tuple[str, bytes, Any]) -> None:
        self._pending.remove(entry)
        for rank in self._others if not self._rank else (self._rank,):
            self._ask(partial(store.delete_key, self._name(entry[0], rank)))

    def _ask(self, what: Callable[[], Any]) -> None:
        if self._lost:
            return
        try:
            what()
        except RuntimeError as error:  # torch's errors of stores: closed, not reached, too late
            self._lost = True
            told = next(iter(str(error).splitlines()), type(error).__name__)
            get_logger("slipstream.guards").warning(f"{self._purpose} between ranks no more: {told}", main_process_only=False)

    def _name(self, key: str, rank: int) -> str:
        return f"guards/{self._prefix}/{key}/{rank}"


def _publish(store: Any, key: str, data: bytes) -> None:
    store.set(key, data)
    store.check([key])  # `set` does not wait for an answer: now it is there
