"""What guards find, reported as a warning with step, rank and remedy, rate-limited per kind.

All ranks report through the main process, so that a thousand ranks do not print the same warning; every finding is also an event of the
run. `RankReports` compares small reports of all ranks under a shared key in the rendezvous store without a collective: no rank waits,
keys that some ranks never reach are dropped, and a store that fails ends the comparison with one log line. `NonFiniteError` is raised
with `on_nan="raise"`.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.logging import get_logger
from slipstream.observability.timing.ledger import StoreMessages

__all__ = ["FindingReporter", "GuardFinding", "NonFiniteError", "RankReports"]

_FIELDS = ("step", "rank", "text", "remedy")
_MAX_WARNINGS = 3
_MAX_EVENTS = 20
"""How many events of a kind the run has, of all ranks together."""
_STEPS_BETWEEN = 100
"""Steps between the first and the second warning of a kind; ten times as many before the third."""


class NonFiniteError(SlipstreamError, FloatingPointError):
    """Raised with `on_nan="raise"` for a NaN or infinite gradient; the message names the step, the ranks and the parameters."""


@dataclass(frozen=True)
class GuardFinding:
    """Something that goes wrong in a run, and what to do about it.

    >>> print(GuardFinding("spike", 120, 1, "the loss rose from 2.1 to 35", "lower the learning rate"))
    step 120, rank 1: the loss rose from 2.1 to 35. What to do: lower the learning rate.
    """

    kind: str
    """The guard that found it: "nan", "spike", "drift", "schedule", "batches", "starving", "straggler"."""
    step: int | None
    rank: int | None
    """The rank, if it concerns one."""
    text: str
    remedy: str
    details: dict[str, Any] = field(default_factory=dict)
    """Further fields of the event, as plain values."""

    def __str__(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in (("step", self.step), ("rank", self.rank)) if value is not None)
        return f"{where}{': ' if where else ''}{self.text}. What to do: {self.remedy}."

    @property
    def order(self) -> tuple[int, bool]:
        """The key by which the earliest finding comes first; within one step a `"consequence"` (see the details) comes later."""
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
        """Return the finding as a line of events.jsonl, without its time.

        >>> GuardFinding("drift", 10, None, "replicas differ", "prepare again", {"ranks": [1]}).event()["guard"]
        'drift'
        """
        event = {"kind": "guard", "guard": self.kind, "step": self.step, "rank": self.rank, "text": self.text, "remedy": self.remedy}
        return {**event, **self.details}


@dataclass
class _KindState:
    """What was reported of one kind of finding."""

    times: int = 0
    first: int | None = None
    next: int = 0
    suppressed: int = 0
    events: int = 0


class FindingReporter:
    """Logs findings, each kind at most three times, with a growing number of steps in between.

    All ranks report through the main process, so that the same warning is not logged by every rank: `tell` sends events there, and
    `receive` logs them.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None] | None = None, is_main: bool = True, world_size: int = 1) -> None:
        self._is_main = is_main
        self._world_size = world_size
        self.tell = tell
        """Where events go, besides the log."""
        self.logs_own = True
        """Whether this process logs its findings itself; else the main process does."""
        self.held_kinds: frozenset[str] = frozenset()
        """Which kinds of findings are held until every rank has reported its steps."""
        self.reported: list[GuardFinding] = []
        self._logger = get_logger("slipstream.guards")
        self._kinds: defaultdict[str, _KindState] = defaultdict(_KindState)
        self._telling = False
        self._held: list[tuple[GuardFinding, bool]] = []

    @property
    def holds(self) -> bool:
        """Whether a finding is held."""
        return bool(self._held)

    def hold(self, finding: GuardFinding, *, own: bool = True) -> None:
        """Hold a finding on the main process until every rank has reported, since it may have begun on another one."""
        self._held.append((finding, own))

    def release(self, last_step: float = math.inf) -> None:
        """Report the earliest held finding once every rank has reported its steps up to `last_step`; the others are its consequences."""
        if not self._held:
            return
        finding, own = min(self._held, key=lambda held: (*held[0].order, held[0].rank or 0))
        if last_step < (finding.step or 0):
            return
        first = {held.rank for held, _ in self._held if held.order == finding.order}
        self._held = []
        if 1 < len(first) == self._world_size:
            finding = replace(finding, rank=None, text=f"on all {len(first)} ranks at once, {finding.text}")
        if own:
            self.report(finding)
        elif self._allow(finding):
            self._log(finding)

    def log_unheard(self, event: Mapping[str, Any]) -> None:
        """Log a finding on a rank other than 0, because the main process ended before it could log it."""
        if event.get("kind") == "guard":
            self._log(GuardFinding.of(event))

    def report(self, finding: GuardFinding | None, *, shared: bool = False) -> bool:
        """Report a finding, unless its kind was reported often or a short while ago; return whether it was.

        `shared`: every rank has found the same, so only the main process reports it.
        """
        if finding is None or not self._allow(finding):
            return False
        if self.logs_own and (self._is_main or not shared):
            self._log(finding)
        self.record(finding, shared=shared)
        return True

    def record(self, finding: GuardFinding, *, shared: bool = False) -> None:
        """Send the event of a finding without logging it."""
        if self.tell is None or (shared and not self._is_main):
            return
        self._telling = True
        try:
            self.tell(finding.event())
        finally:
            self._telling = False

    def accepts(self, event: Mapping[str, Any]) -> bool:
        """Return whether the main process keeps an event: always, unless it is a finding and there are enough of its kind."""
        if event.get("kind") != "guard":
            return True
        state = self._kinds[str(event["guard"])]
        state.events += 1
        return state.events <= _MAX_EVENTS

    def receive(self, event: dict[str, Any]) -> None:
        """Log, on the main process, what another rank has found."""
        if event.get("kind") != "guard" or self._telling:
            return
        finding = GuardFinding.of(event)
        if finding.kind in self.held_kinds:
            self.hold(finding, own=False)
        elif self._allow(finding):
            self._log(finding)

    def _allow(self, finding: GuardFinding) -> bool:
        state, step = self._kinds[finding.kind], finding.step or 0
        earlier = state.first is not None and step < state.first  # another rank, where it began
        if state.times >= _MAX_WARNINGS or (step < state.next and not earlier):
            state.suppressed += 1
            return False
        state.first = step if state.first is None else min(step, state.first)
        state.next = max(state.next, step + _STEPS_BETWEEN * 10**state.times)
        state.times += 1
        self.reported.append(finding)
        return True

    def _log(self, finding: GuardFinding) -> None:
        state = self._kinds[finding.kind]
        count, state.suppressed = state.suppressed, 0
        more = f" (Found {'once' if count == 1 else f'{count} times'} more since the last report.)" if count else ""
        last = " (Not reported again in this run.)" if state.times == _MAX_WARNINGS else ""
        self._logger.warning("%s%s%s", finding, more, last, main_process_only=self._is_main)


_MAX_PENDING_KEYS = 8
"""How many keys may wait for other ranks."""


class RankReports:
    """Reports of one kind from all ranks, compared on the main process.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> ranks = [RankReports(lambda: store, rank, 2, "sums", "sums are compared") for rank in range(2)]
    >>> ranks[0].add("first", b"5", "a context")
    >>> ranks[0].take()
    []
    >>> ranks[1].add("first", b"7")
    >>> ranks[0].take()
    [('a context', [b'5', b'7'])]
    """

    def __init__(self, store: Callable[[], Any], rank: int, world_size: int, prefix: str, purpose: str) -> None:
        self._messages = StoreMessages(store, f"guards/{prefix}", f"{purpose} between ranks no more: {{}}", "slipstream.guards")
        self._rank = rank
        self._others = range(1, world_size)
        self._pending: deque[tuple[str, bytes, Any]] = deque()
        """On the main process, keys that wait for other ranks; on others, those whose reports may still be in the store."""

    def wants(self, key: str) -> bool:
        """Return whether a report under this key would be added: the store is there, and the key is new."""
        return self._messages.reachable and all(key != earlier for earlier, *_ in self._pending)

    def add(self, key: str, data: bytes, context: Any = None) -> None:
        """Add the report of this rank; `context` stays here, and `take` returns it on the main process."""
        if not self.wants(key):
            return
        if self._rank:
            self._messages.publish(f"{key}/{self._rank}", data)
        self._pending.append((key, data, context))
        if len(self._pending) > _MAX_PENDING_KEYS:
            self._forget(self._pending[0])

    def take(self) -> list[tuple[Any, list[bytes]]]:
        """Return and remove, on the main process, the context and the reports by rank of each key to which every rank has reported."""
        found: list[tuple[Any, list[bytes]]] = []
        for pending in list(self._pending):
            key, own, context = pending
            names = [f"{key}/{rank}" for rank in self._others]
            if self._messages.has(*names):
                reports = [report for name in names if (report := self._messages.read(name)) is not None]
                if len(reports) == len(names):  # else a rank has just removed its own
                    found.append((context, [own, *reports]))
                self._forget(pending)
        return found

    def _forget(self, pending: tuple[str, bytes, Any]) -> None:
        self._pending.remove(pending)
        for rank in self._others if not self._rank else (self._rank,):
            self._messages.delete(f"{pending[0]}/{rank}")
