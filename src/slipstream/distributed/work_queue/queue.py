"""The queue of units in the rendezvous store: who works on which unit, what is finished, and what a lost process leaves.

`WorkQueue` keeps it below a prefix of its own for each piece of work:

* `counts` is a counter: units taken in its lower half, items finished in its upper half. One atomic addition takes units and reports
  what was finished. A process that fails adds a number beyond all units, so that the next claim of the others reads `failure`.
* `holds/RANK` says what a rank has claimed and not reported yet.
* `log` is appended to: one entry for each report of finished units, with their results. Large results go to `results/RANK/VOLUME`
  first. A report counts completely or not at all; where a unit is reported twice, the first counts for everybody.
* `owner/UNIT` decides, in one atomic request, who takes over a unit whose holder is gone.

A process is gone when the launcher reports its end, when it left the work, or when its heartbeat has been silent for `SILENCE_SECONDS`.
Units are taken over one at a time: if the second holder dies too, the unit is a `PoisonItem` and the work ends with an error.
A single process has the same queue, in a store in its own memory.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

# torch internals: the stubs of torch.distributed do not export it (torch 2.13); mypy notices when they do.
from torch._C._distributed_c10d import PrefixStore

from slipstream.distributed.heartbeat import process_state
from slipstream.errors import PeerLostError
from slipstream.launch.store import ExitNotice, exit_key, holds_items_key

__all__ = ["LEFT_KEY", "PoisonItem", "QueuePeers", "SILENCE_SECONDS", "UnitReport", "WorkQueue"]


SILENCE_SECONDS = 30.0
"""Seconds without a beat after which a process counts as gone."""
LEFT_KEY = "left"
"""What a process that leaves the work before its end writes where its claims stand."""


class QueuePeers:
    """The other ranks, as the rendezvous store shows them.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> others = QueuePeers(store, rank=0, world_size=2)
    >>> others.gone({1: ""})
    {}
    >>> store.set(exit_key(1), ExitNotice(1, "node0", 4711, -9).to_json())
    >>> others.gone({1: ""})
    {1: 'rank 1 (host node0, pid 4711) was ended by SIGKILL'}
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._host = socket.gethostname()
        self._ranks = [other for other in range(world_size) if other != rank]
        self._beats: dict[int, tuple[int, float]] = {}
        self.ended: dict[int, str] = {}
        """Those whose end the launcher has told, as far as `gone` has looked."""

    def gone(self, holds: dict[int, str]) -> dict[int, str]:
        """The ranks that are gone, and how; `holds` is what each has written about its claims."""
        found: dict[int, str] = {}
        for rank in self._ranks:
            if rank not in self.ended and self._store.check([exit_key(rank)]):
                self.ended[rank] = str(ExitNotice.from_json(self._store.get(exit_key(rank)).decode()))
            if rank in self.ended:
                found[rank] = self.ended[rank]
            elif holds.get(rank) == LEFT_KEY:
                found[rank] = f"rank {rank} left the work before its end"
            elif (silent := self._silent(rank)) > SILENCE_SECONDS:
                found[rank] = f"rank {rank} has shown no sign of life for {silent:.0f} s"
        return found

    def _silent(self, rank: int) -> float:
        key, now = f"heartbeat/{rank}", time.monotonic()
        if not self._store.check([key]):
            return 0.0
        note = json.loads(self._store.get(key).decode())
        if self._beats.get(rank, (-1, 0.0))[0] != note["beat"]:
            self._beats[rank] = (note["beat"], now)
        silent = now - self._beats[rank][1]
        return 0.0 if silent > SILENCE_SECONDS and self._runs_here(note) else silent

    def _runs_here(self, note: dict[str, Any]) -> bool:
        if note.get("host") != self._host:
            return False
        state = process_state(note) or "runs"
        return not state.endswith(("is gone", "ended", "stopped by a signal"))


_ITEM_SHIFT = 32
"""Where the upper half of the counter begins.

Two counts share one number because `store.add` is the only atomic request: units and items are counted together or not at all.
tests/distributed/test_work_queue.py notices if the halves mix. It can go when the store has a transaction over two keys.
"""
_CLOSED = 1 << 31
"""Beyond the number of any unit."""
_CHUNK_BYTES = 4 << 20
"""Bytes of one request; torch's store refuses more than twice that."""
_VOLUME_BYTES = 64 << 20
"""Bytes of results in one value; a new one is begun beyond that."""
_INLINE_BYTES = 4096
"""Bytes of results that stand in the log itself."""
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class UnitReport:
    """Some finished units, as one process reported them."""

    rank: int
    units: tuple[int, ...]
    body: bytes | None
    """The results; None where they stand elsewhere."""
    place: tuple[int, int, int] = (0, 0, 0)
    """Where that is: volume, first byte, length."""


class PoisonItem(Exception):
    """A unit that had been taken over from a process that is gone, and whose second process has died as well."""

    def __init__(self, unit: int, end: str) -> None:
        super().__init__(unit, end)
        self.unit, self.end = unit, end


class WorkQueue:
    """The queue as one process sees it. `store` is the rendezvous store of the job, `name` the name of this work in it.

    >>> from torch.distributed import HashStore
    >>> queue = WorkQueue(HashStore(), "work", rank=0, world_size=1)
    >>> queue.take(2), queue.take(1)
    (0, 2)
    >>> queue.report([0, 1, 2], b"three", items=3)
    >>> queue.take(0), [report.units for report in queue.reports()], queue.finished_items()
    (3, [(0, 1, 2)], 3)
    """

    def __init__(self, store: Any, name: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._job = store
        self._store: Any = PrefixStore(f"dynamic/{name}", store)
        self._others = QueuePeers(store, rank, world_size)
        self.gone: dict[int, str] = {}
        """The processes that are gone, and how, as far as `take_over` has found out."""
        self._own: list[bytearray] = []
        self._uncounted = 0
        self._read = 0
        self._suspects: set[int] = set()
        self._next_look = 0.0
        self.hold([])
        self._job.set(holds_items_key(rank), "1")
        self.take(0)  # waits for an answer: from here on the launcher knows

    def _ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return request(*arguments)
        except RuntimeError as error:  # torch.distributed.DistError: whoever serves the store is gone
            raise PeerLostError(
                f"the rendezvous store does not answer on rank {self.rank} ({str(error).splitlines()[0]}), so no items can be handed out. "
                "Without a launcher it is served by rank 0, and ends with it; with checkpoint=FILE the next run resumes where this one was."
            ) from None

    def take(self, most: int) -> int:
        """Claim up to `most` units and count what was reported; return the first unit, which may lie beyond the last one."""
        items, self._uncounted = self._uncounted, 0
        return int(self._ask(self._store.add, "counts", most + (items << _ITEM_SHIFT))) % (1 << _ITEM_SHIFT) - most

    def hold(self, units: Sequence[int]) -> None:
        """Publish what this process has claimed and not reported."""
        self._ask(self._store.set, f"holds/{self.rank}", _format_ranges(units))

    def report(self, units: Sequence[int], body: bytes, items: int) -> None:
        """Publish finished units with their results; their items are counted with the next `take`."""
        entry = f"{self.rank} {len(body)} {_format_ranges(units)}\n".encode()
        if len(body) <= _INLINE_BYTES:
            self._ask(self._store.append, "log", b"= " + entry + body)
        else:
            self._ask(self._store.append, "log", self._shelve(body) + entry)
        self._uncounted += items

    def _shelve(self, body: bytes) -> bytes:
        """Write results to a volume of this rank; return where, for the log."""
        if not self._own or len(self._own[-1]) > _VOLUME_BYTES:
            self._own.append(bytearray())
        volume, start = len(self._own) - 1, len(self._own[-1])
        for piece in range(0, len(body) if self.world_size > 1 else 0, _CHUNK_BYTES):  # alone, nobody reads them
            self._ask(self._store.append, f"results/{self.rank}/{volume}", body[piece : piece + _CHUNK_BYTES])
        self._own[-1] += body
        return f"{volume}/{start} ".encode()

    def finished_items(self) -> int:
        """Return how many items are counted as finished; more than there are where some were worked on twice."""
        return int(self._ask(self._store.add, "counts", 0)) >> _ITEM_SHIFT  # also asked by the thread of the bar: changes nothing here

    def reports(self) -> list[UnitReport]:
        """Return the reports of all processes that were not returned before, in the order that all processes see."""
        if not self._ask(self._store.check, ["log"]):
            return []
        log: bytes = self._ask(self._store.get, "log")
        found: list[UnitReport] = []
        while self._read < len(log):
            end = log.index(b"\n", self._read) + 1
            report, inline = _parse_report(log[self._read : end].decode())
            self._read = end + inline
            found.append(report if report.body is None else replace(report, body=log[end : self._read]))
        return found

    def bodies(self, reports: Sequence[UnitReport]) -> Iterator[bytes]:
        """Yield the results of these reports, which are all there are."""
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

    def take_over(self, unfinished: Callable[[], Sequence[int]]) -> int | None:
        """Claim a unit that nobody works on any more; raise `PoisonItem` if two processes have died with it."""
        holds = self._holds()
        gone = self._ask(self._others.gone, holds)
        self._announce(gone)
        self.gone = gone
        if not gone:
            return None
        held = {unit for rank, text in holds.items() if rank not in gone for unit in _parse_ranges(text)}
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
            raise PoisonItem(unit, gone[former])
        return former in gone and bool(self._ask(self._store.compare_set, key, found, own).decode() == own)

    def _announce(self, gone: dict[int, str]) -> None:
        """Print a line for each process that is gone, on the lowest rank that is still there."""
        if any(rank not in gone for rank in range(self.rank)):
            return
        for rank in gone.keys() - self.gone.keys():
            print(f"slipstream: {gone[rank]}; what it had not finished goes to the others", file=sys.stderr, flush=True)

    def failure(self) -> str | None:
        """Return why another process has ended the work for all, if one has."""
        if not self._ask(self._store.check, ["failure"]):
            return None
        return str(self._ask(self._store.get, "failure").decode())

    def fail(self, reason: str) -> None:
        """End the work for all."""
        if self._ask(self._store.compare_set, "failure", "", reason).decode() == reason:  # once: more would flow into the upper half
            self.take(_CLOSED)

    def leave(self, *, early: bool) -> bool:
        """Take no further part; `early` means before all was finished. Return whether all processes have left early now."""
        with contextlib.suppress(RuntimeError):  # a store that is gone has nobody waiting at it
            self._job.set(holds_items_key(self.rank), "0")
            self._store.set(f"holds/{self.rank}", LEFT_KEY if early else "")
            return early and self._store.add("left", 1) == self.world_size
        return False

    def is_first(self) -> bool:
        """Whether no lower rank takes part any more: the first does what a single process has to do."""
        lower = range(self.rank)
        if lower and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _POLL_SECONDS
            self.gone = self._ask(self._others.gone, self._holds())
        return all(rank in self.gone for rank in lower)

    def settle(self) -> None:
        """Record that what a single process has to do is done."""
        self._ask(self._store.add, "settled", 1)

    def is_settled(self) -> bool:
        return int(self._ask(self._store.add, "settled", 0)) > 0

    def forget(self) -> None:
        """Record that this process has read everything; the last one empties the store. With a process gone it stays until the end."""
        if self._ask(self._store.add, "read", 1) < self.world_size:
            return
        self._read = 0
        for rank, volume in sorted({(report.rank, report.place[0]) for report in self.reports() if report.body is None}):
            self._ask(self._store.delete_key, f"results/{rank}/{volume}")
        self._ask(self._store.delete_key, "log")


def _parse_report(entry: str) -> tuple[UnitReport, int]:
    """Parse an entry of the log; return it and how many bytes of results follow.

    >>> _parse_report("= 1 120 4-6 9-9")
    (UnitReport(rank=1, units=(4, 5, 6, 9), body=b'', place=(0, 0, 0)), 120)
    >>> _parse_report("2/300 1 9000 4-4")
    (UnitReport(rank=1, units=(4,), body=None, place=(2, 300, 9000)), 0)
    """
    where, rank, length, *spans = entry.split()
    units = tuple(_parse_ranges(" ".join(spans)))
    if where == "=":
        return UnitReport(int(rank), units, b""), int(length)
    volume, start = where.split("/")
    return UnitReport(int(rank), units, None, (int(volume), int(start), int(length))), 0


def _format_ranges(units: Sequence[int]) -> str:
    """
    >>> _format_ranges([4, 5, 6, 9]), _format_ranges(range(0))
    ('4-6 9-9', '')
    """
    spans: list[list[int]] = []
    for unit in units:
        if spans and unit == spans[-1][1] + 1:
            spans[-1][1] = unit
        else:
            spans.append([unit, unit])
    return " ".join(f"{first}-{last}" for first, last in spans)


def _parse_ranges(text: str) -> Iterable[int]:
    """
    >>> list(_parse_ranges("4-6 9-9"))
    [4, 5, 6, 9]
    """
    for span in text.split():
        first, last = span.split("-")
        yield from range(int(first), int(last) + 1)
