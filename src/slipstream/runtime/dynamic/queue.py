"""The queue of dynamic work: who works on which unit, what is finished, and what happens to the units of a process that is gone.

`Shared` keeps it in the rendezvous store, below a prefix of its own for each piece of work:

* `counts` is a counter: units that were taken in its lower half, items that are finished in its upper half. One atomic addition takes units
  and tells what was finished before: a single request for each turn, some ten microseconds on one machine. A process that fails adds a
  number beyond all units, so that the next claim of everybody else meets the end of the queue and reads `failure`.
* `holds/RANK` says what a rank has claimed and not reported yet; written right after a claim, without waiting for an answer.
* `log` is appended to, without waiting either: one entry for each report of some finished units, with their results. Results of more
  than a few kilobytes go to `results/RANK/VOLUME` first, and the entry says where. So a report counts completely or not at all, and all
  processes read the reports in the same order. Where a unit is reported twice, the first counts, for everybody. The log is read at the
  end, and when somebody is gone.
* `owner/UNIT` decides who takes over a unit whose holder is gone: whoever changes it first from the former owner, in one atomic request.

A unit is taken over if it is in no report and no living rank holds it, in two looks after each other, while somebody is gone. A
process that was only silent and comes back has then worked for nothing, and nothing else. Units are taken over one at a time: if whoever
has taken one over dies too, it is this unit that kills processes (it needs more memory than there is, say), and the work ends with
an error instead of taking everybody along.

`Alone` is the queue of a single process: the same verbs, and no store.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from slipstream.errors import PeerLostError
from slipstream.launch.contract import bearing_key
from slipstream.runtime.dynamic.others import LEFT, Others

__all__ = ["Alone", "Deadly", "Queue", "Report", "Shared"]

_ITEMS = 32
"""Where the upper half of the counter begins."""
_CLOSED = 1 << 31
"""Beyond the number of any unit."""
_PIECE = 4 << 20
"""Bytes of one request; torch's store refuses more than twice that."""
_VOLUME = 64 << 20
"""Bytes of results in one value; a new one is begun beyond that."""
_INLINE = 4096
"""Bytes of results that stand in the log itself."""
_LOOK_EVERY = 0.25


@dataclass(frozen=True)
class Report:
    """Some finished units, as one process reported them."""

    rank: int
    units: tuple[int, ...]
    body: bytes | None
    """The results; None where they stand elsewhere."""
    place: tuple[int, int, int] = (0, 0, 0)
    """Where that is: volume, first byte, length."""


class Deadly(Exception):
    """A unit that had been taken over from a process that is gone, and whose second process has died as well."""

    def __init__(self, unit: int, end: str) -> None:
        super().__init__(unit, end)
        self.unit, self.end = unit, end


class Queue(Protocol):
    """What the work needs of a queue."""

    rank: int
    world_size: int

    def take(self, most: int) -> int:
        """Claims up to `most` units; the first of them, which may lie beyond the last unit."""

    def hold(self, units: Sequence[int]) -> None:
        """Says what this process has claimed and not reported."""

    def report(self, units: Sequence[int], body: bytes, items: int) -> None:
        """Tells everybody that units are finished, so many items, with their results; the items are counted with the next `take`."""

    def reports(self) -> list[Report]:
        """The reports of all processes that were not given out before, in the order that all processes see."""

    def bodies(self, reports: Sequence[Report]) -> Iterator[bytes]:
        """The results of these reports, which are all there are."""

    def finished_items(self) -> int:
        """How many items are reported; more than there are where some were worked on twice."""

    def take_over(self, unfinished: Callable[[], Sequence[int]]) -> int | None:
        """Claims one of the units that nobody works on any more; a `Deadly` if two processes have died with it."""

    def gone(self) -> dict[int, str]:
        """The processes that are gone, and how, as far as `take_over` has found out."""

    def failure(self) -> str | None:
        """Why another process has ended the work for all."""

    def fail(self, reason: str) -> None:
        """Ends the work for all."""

    def leave(self, *, early: bool) -> bool:
        """This process takes no further part; `early`: before all was finished. Whether now all have left early."""

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
    >>> queue.report([0, 1, 2], b"three", items=3)
    >>> [report.units for report in queue.reports()], queue.finished_items()
    ([(0, 1, 2)], 3)
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

    def report(self, units: Sequence[int], body: bytes, items: int) -> None:
        self._reports.append(Report(0, tuple(units), body))
        self._items += items

    def reports(self) -> list[Report]:
        fresh, self._reports = self._reports, []
        return fresh

    def bodies(self, reports: Sequence[Report]) -> Iterator[bytes]:
        for report in reports:
            yield report.body or b""

    def finished_items(self) -> int:
        return self._items

    def take_over(self, unfinished: Callable[[], Sequence[int]]) -> int | None:
        return None

    def gone(self) -> dict[int, str]:
        return {}

    def failure(self) -> str | None:
        return None

    def fail(self, reason: str) -> None:
        """Nobody is to be told."""

    def leave(self, *, early: bool) -> bool:
        return early

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
        self._own: list[bytearray] = []
        self._uncounted = 0
        self._read = 0
        self._suspects: set[int] = set()
        self._next_look = 0.0
        self.hold([])
        self._job.set(bearing_key(rank), "1")
        self.take(0)  # waits for an answer: from here on the launcher knows

    def _ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return request(*arguments)
        except RuntimeError as error:  # torch.distributed.DistError: whoever serves the store is gone
            raise PeerLostError(
                f"the rendezvous store does not answer on rank {self.rank} ({str(error).splitlines()[0]}), so no items can be handed out. "
                "Without a launcher it is served by rank 0, and ends with it; with checkpoint=FILE the next run goes on where this one was."
            ) from None

    def take(self, most: int) -> int:
        items, self._uncounted = self._uncounted, 0
        return int(self._ask(self._store.add, "counts", most + (items << _ITEMS))) % (1 << _ITEMS) - most

    def hold(self, units: Sequence[int]) -> None:
        self._ask(self._store.set, f"holds/{self.rank}", _spelled(units))

    def report(self, units: Sequence[int], body: bytes, items: int) -> None:
        entry = f"{self.rank} {len(body)} {_spelled(units)}\n".encode()
        if len(body) <= _INLINE:
            self._ask(self._store.append, "log", b"= " + entry + body)
        else:
            self._ask(self._store.append, "log", self._shelve(body) + entry)
        self._uncounted += items

    def _shelve(self, body: bytes) -> bytes:
        """Writes results to a volume of this rank; where they stand, for the log."""
        if not self._own or len(self._own[-1]) > _VOLUME:
            self._own.append(bytearray())
        volume, start = len(self._own) - 1, len(self._own[-1])
        for piece in range(0, len(body), _PIECE):
            self._ask(self._store.append, f"results/{self.rank}/{volume}", body[piece : piece + _PIECE])
        self._own[-1] += body
        return f"{volume}/{start} ".encode()

    def finished_items(self) -> int:
        return int(self._ask(self._store.add, "counts", 0)) >> _ITEMS  # also asked by the thread of the bar: changes nothing here

    def reports(self) -> list[Report]:
        if not self._ask(self._store.check, ["log"]):
            return []
        log: bytes = self._ask(self._store.get, "log")
        found: list[Report] = []
        while self._read < len(log):
            end = log.index(b"\n", self._read) + 1
            report, inline = _report(log[self._read : end].decode())
            self._read = end + inline
            found.append(report if report.body is None else replace(report, body=log[end : self._read]))
        return found

    def bodies(self, reports: Sequence[Report]) -> Iterator[bytes]:
        volumes: dict[tuple[int, int], bytes | bytearray] = {(self.rank, number): own for number, own in enumerate(self._own)}
        last = {(report.rank, report.place[0]): place for place, report in enumerate(reports) if report.body is None}
        for place, report in enumerate(reports):
            if report.body is not None:
                yield report.body
                continue
            volume, start, length = report.place
            key = report.rank, volume
            if key not in volumes:
                volumes[key] = self._ask(self._store.get, f"results/{report.rank}/{volume}")
            yield bytes(volumes[key][start : start + length])
            if last[key] == place:
                del volumes[key]

    def gone(self) -> dict[int, str]:
        return dict(self._gone)

    def take_over(self, unfinished: Callable[[], Sequence[int]]) -> int | None:
        holds = self._holds()
        gone = self._ask(self._others.gone, holds)
        self._say(gone)
        self._gone = gone
        if not gone:
            return None
        held = {unit for rank, text in holds.items() if rank not in gone for unit in _read(text)}
        free = [unit for unit in unfinished() if unit not in held]
        sure, self._suspects = [unit for unit in free if unit in self._suspects], set(free)
        return next((unit for unit in sure if self._own_it(unit, gone)), None)

    def _holds(self) -> dict[int, str]:
        ranks = [rank for rank in range(self.world_size) if rank != self.rank]
        present = [rank for rank in ranks if self._ask(self._store.check, [f"holds/{rank}"])]
        values = self._ask(self._store.multi_get, [f"holds/{rank}" for rank in present]) if present else []
        return {rank: value.decode() for rank, value in zip(present, values, strict=True)}

    def _own_it(self, unit: int, gone: dict[int, str]) -> bool:
        key, own = f"owner/{unit}", f"rank {self.rank}"
        found = self._ask(self._store.compare_set, key, "", own).decode()
        if found == own:
            return True
        former = int(found.split()[1])
        if former in self._others.ended:
            raise Deadly(unit, gone[former])
        return former in gone and bool(self._ask(self._store.compare_set, key, found, own).decode() == own)

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
        if self._ask(self._store.compare_set, "failure", "", reason).decode() == reason:  # once: more would flow into the upper half
            self.take(_CLOSED)

    def leave(self, *, early: bool) -> bool:
        with contextlib.suppress(RuntimeError):  # a store that is gone has nobody waiting at it
            self._job.set(bearing_key(self.rank), "0")
            self._store.set(f"holds/{self.rank}", LEFT if early else "")
            return early and self._store.add("left", 1) == self.world_size
        return False

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
        self._read = 0
        for rank, volume in sorted({(report.rank, report.place[0]) for report in self.reports() if report.body is None}):
            self._ask(self._store.delete_key, f"results/{rank}/{volume}")
        self._ask(self._store.delete_key, "log")


def _report(entry: str) -> tuple[Report, int]:
    """What an entry of the log says, and how many bytes of results follow it.

    >>> _report("= 1 120 4-6 9-9")
    (Report(rank=1, units=(4, 5, 6, 9), body=b'', place=(0, 0, 0)), 120)
    >>> _report("2/300 1 9000 4-4")
    (Report(rank=1, units=(4,), body=None, place=(2, 300, 9000)), 0)
    """
    where, rank, length, *spans = entry.split()
    units = tuple(_read(" ".join(spans)))
    if where == "=":
        return Report(int(rank), units, b""), int(length)
    volume, start = where.split("/")
    return Report(int(rank), units, None, (int(volume), int(start), int(length))), 0


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
