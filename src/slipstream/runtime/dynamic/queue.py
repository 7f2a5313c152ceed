"""The queue of dynamic work: who works on which unit, what is finished, and what happens to the units of a process that is gone.

`Shared` keeps it in the rendezvous store, below a prefix of its own for each piece of work:

* `next` is a counter. Taking units is one atomic addition, about twenty microseconds on one machine. A process that fails adds a number
  beyond all units, so that the next claim of everybody else meets the end of the queue and reads `failure`.
* `holds/RANK` says what a rank has claimed and not reported yet; written right after a claim, without waiting for an answer.
* `result/RANK/NUMBER` is a report: some finished units with their results, in pieces that the store takes. It counts once it stands
  in `log`, to which one short entry is appended after the pieces; so a report is there completely or not at all, and all processes
  read the reports in the same order. Where a unit is reported twice, the first counts, for everybody.
* `owner/UNIT` decides who takes over a unit whose holder is gone: whoever changes it first from the former owner, in one atomic request.

A unit is taken over if it is in no report and no living rank holds it, in two looks after each other, while somebody is gone. A
process that was only silent and comes back has then worked for nothing, and nothing else.

`Alone` is the queue of a single process: the same verbs, and no store.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.errors import PeerLostError
from slipstream.launch.contract import bearing_key
from slipstream.runtime.dynamic.others import LEFT, Others

__all__ = ["Alone", "Queue", "Report", "Shared"]

_CLOSED = 1 << 40
"""Beyond the number of any unit."""
_PIECE = 4 << 20
"""Bytes of one value; torch's store refuses more than twice that."""
_LOOK_EVERY = 0.25
_ENTRY = 24
"""Characters of an entry of the log: rank, number and pieces, eight hexadecimal digits each."""


@dataclass(frozen=True)
class Report:
    """Some finished units, as one process reported them."""

    rank: int
    body: bytes


class Queue(Protocol):
    """What the work needs of a queue."""

    rank: int
    world_size: int

    def take(self, most: int) -> int:
        """Claims up to `most` units; the first of them, which may lie beyond the last unit."""

    def hold(self, units: Sequence[int]) -> None:
        """Says what this process has claimed and not reported."""

    def report(self, body: bytes, items: int) -> None:
        """Tells everybody that units are finished, with so many items."""

    def reports(self) -> Iterator[Report]:
        """The reports of all processes that were not given out before, in the order that all processes see."""

    def finished_items(self) -> int:
        """How many items are reported; more than there are where some were worked on twice."""

    def take_over(self, unfinished: Sequence[int], most: int) -> list[int]:
        """Claims up to `most` of the units that nobody works on any more."""

    def gone(self) -> dict[int, str]:
        """The processes that are gone, and how, as far as `take_over` has found out."""

    def failure(self) -> str | None:
        """Why another process has ended the work for all."""

    def fail(self, reason: str) -> None:
        """Ends the work for all."""

    def leave(self, *, early: bool) -> None:
        """This process takes no further part; `early`: before all was finished."""

    def is_first(self) -> bool:
        """Whether no lower rank takes part any more: who does what one process has to do."""

    def settle(self) -> None:
        """What one process has to do is done."""

    def is_settled(self) -> bool:
        """Whether it is."""

    def forget(self) -> None:
        """This process has read everything that it needs."""


class Alone:
    """The queue of one process.

    >>> queue = Alone()
    >>> queue.take(2), queue.take(1)
    (0, 2)
    >>> queue.report(b"both", items=2)
    >>> [report.body for report in queue.reports()], queue.finished_items()
    ([b'both'], 2)
    """

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._next = self._items = 0
        self._settled = False
        self._reports: list[Report] = []

    def take(self, most: int) -> int:
        self._next += most
        return self._next - most

    def hold(self, units: Sequence[int]) -> None:
        """Nobody asks."""

    def report(self, body: bytes, items: int) -> None:
        self._reports.append(Report(0, body))
        self._items += items

    def reports(self) -> Iterator[Report]:
        fresh, self._reports = self._reports, []
        yield from fresh

    def finished_items(self) -> int:
        return self._items

    def take_over(self, unfinished: Sequence[int], most: int) -> list[int]:
        return []

    def gone(self) -> dict[int, str]:
        return {}

    def failure(self) -> str | None:
        return None

    def fail(self, reason: str) -> None:
        """Nobody is to be told."""

    def leave(self, *, early: bool) -> None:
        """Nobody is to be told."""

    def is_first(self) -> bool:
        return True

    def settle(self) -> None:
        self._settled = True

    def is_settled(self) -> bool:
        return self._settled

    def forget(self) -> None:
        """Nothing is kept elsewhere."""


class Shared:
    """The queue of several processes. `store` is the rendezvous store of the job, `name` what this piece of work is called in it."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self.rank = rank
        self.world_size = world_size
        self._job = store
        self._store: Any = PrefixStore(f"dynamic/{name}", store)
        self._others = Others(store, rank, world_size)
        self._gone: dict[int, str] = {}
        self._own: list[bytes] = []
        self._read = 0
        self._suspects: set[int] = set()
        self._next_look = 0.0
        self.hold([])
        self._job.set(bearing_key(rank), "1")
        self._ask(self._store.add, "next", 0)  # waits for an answer: from here on the launcher knows

    def _ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return request(*arguments)
        except RuntimeError as error:  # torch.distributed.DistError: whoever serves the store is gone
            raise PeerLostError(
                f"the rendezvous store does not answer on rank {self.rank} ({str(error).splitlines()[0]}), so no items can be handed out. "
                "Without a launcher it is served by rank 0, and ends with it; with checkpoint=FILE the next run goes on where this one was."
            ) from None

    def take(self, most: int) -> int:
        return int(self._ask(self._store.add, "next", most)) - most

    def hold(self, units: Sequence[int]) -> None:
        self._ask(self._store.set, f"holds/{self.rank}", _spelled(units))

    def report(self, body: bytes, items: int) -> None:
        number = len(self._own)
        pieces = -(-len(body) // _PIECE)
        for piece in range(pieces):
            value = body[piece * _PIECE : (piece + 1) * _PIECE]
            self._ask(self._store.set, f"result/{self.rank}/{number}/{piece}", value)
        self._own.append(body)
        self._ask(self._store.append, "log", f"{self.rank:08x}{number:08x}{pieces:08x}")
        self._ask(self._store.add, "items", items)

    def finished_items(self) -> int:
        return int(self._ask(self._store.add, "items", 0))

    def _log(self, start: int) -> list[tuple[int, int, int]]:
        if not self._ask(self._store.check, ["log"]):
            return []
        text = self._ask(self._store.get, "log").decode()
        entries = [text[place : place + _ENTRY] for place in range(start * _ENTRY, len(text), _ENTRY)]
        return [(int(entry[:8], 16), int(entry[8:16], 16), int(entry[16:], 16)) for entry in entries]

    def reports(self) -> Iterator[Report]:
        for rank, number, pieces in self._log(self._read):
            self._read += 1
            yield Report(rank, self._own[number] if rank == self.rank else self._body(rank, number, pieces))

    def _body(self, rank: int, number: int, pieces: int) -> bytes:
        keys = [f"result/{rank}/{number}/{piece}" for piece in range(pieces)]
        return b"".join(self._ask(self._store.get, key) for key in keys)

    def gone(self) -> dict[int, str]:
        return dict(self._gone)

    def take_over(self, unfinished: Sequence[int], most: int) -> list[int]:
        holds = self._holds()
        gone = self._ask(self._others.gone, holds)
        self._say(gone)
        self._gone = gone
        if not gone:
            self._suspects = set()
            return []
        held = {unit for rank, text in holds.items() if rank not in gone for unit in _read(text)}
        free = [unit for unit in unfinished if unit not in held]
        sure, self._suspects = [unit for unit in free if unit in self._suspects], set(free)
        won: list[int] = []
        for unit in sure:
            if len(won) < most and self._own_it(unit, gone):
                won.append(unit)
        return won

    def _holds(self) -> dict[int, str]:
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        present = [rank for rank in ranks if self._ask(self._store.check, [f"holds/{rank}"])]
        values = self._ask(self._store.multi_get, [f"holds/{rank}" for rank in present]) if present else []
        return {rank: value.decode() for rank, value in zip(present, values, strict=True)}

    def _own_it(self, unit: int, gone: dict[int, str]) -> bool:
        key, own = f"owner/{unit}", f"rank {self.rank}"
        found = self._ask(self._store.compare_set, key, "", own).decode()
        if found != own and int(found.split()[1]) in gone:
            found = self._ask(self._store.compare_set, key, found, own).decode()
        return bool(found == own)

    def _say(self, gone: dict[int, str]) -> None:
        """One line for everyone who is gone, from the lowest rank that is there."""
        if any(rank not in gone for rank in range(self.rank)):
            return
        for rank in gone.keys() - self._gone.keys():
            print(f"slipstream: {gone[rank]}; what it had not finished goes to the others", file=sys.stderr, flush=True)

    def failure(self) -> str | None:
        if not self._ask(self._store.check, ["failure"]):
            return None
        return str(self._ask(self._store.get, "failure").decode())

    def fail(self, reason: str) -> None:
        self._ask(self._store.compare_set, "failure", "", reason)
        self._ask(self._store.add, "next", _CLOSED)

    def leave(self, *, early: bool) -> None:
        self._job.set(bearing_key(self.rank), "0")
        self._store.set(f"holds/{self.rank}", LEFT if early else "")

    def is_first(self) -> bool:
        lower = range(self.rank)
        if lower and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_EVERY
            self._gone = self._ask(self._others.gone, self._holds())
        return all(rank in self._gone for rank in lower)

    def settle(self) -> None:
        self._ask(self._store.add, "settled", 1)

    def is_settled(self) -> bool:
        return int(self._ask(self._store.add, "settled", 0)) > 0

    def forget(self) -> None:
        """The last one to come removes what lies in the store; with a process gone nobody is the last, and it lies there until the end."""
        if self._ask(self._store.add, "read", 1) < self.world_size:
            return
        for rank, number, pieces in self._log(0):
            for piece in range(pieces):
                self._ask(self._store.delete_key, f"result/{rank}/{number}/{piece}")


def _spelled(units: Sequence[int]) -> str:
    """
    >>> _spelled([4, 5, 6, 9]), _spelled(range(0))
    ('4-6 9-9', '')
    """
    spans: list[list[int]] = []
    for unit in units:
        if spans and unit == spans[-1][1] + 1:
            spans[-1][1] = unit
        else:
            spans.append([unit, unit])
    return " ".join(f"{first}-{last}" for first, last in spans)


def _read(text: str) -> Iterable[int]:
    """
    >>> list(_read("4-6 9-9"))
    [4, 5, 6, 9]
    """
    for span in text.split():
        first, last = span.split("-")
        yield from range(int(first), int(last) + 1)
