"""The loop over a work queue: items are claimed as a process becomes free, and results come back in the order of the input.

    with state.split_between_processes(prompts, balance="dynamic", key=len) as work:
        for prompt in work:
            work.done(generate(prompt))
    texts = work.results()

The loop yields one item, or with `batch_size=n` a list of up to n items; `done` takes the result, or a list of as many results. An
iteration without `done` counts as finished, without a result. Every item goes to one process and, if that process dies, leaves the loop
early or falls silent, to another. The loop ends on every process when all items are finished; `results()` is the same on every process.
If a process fails, all raise, and name the item. Nothing here is a collective.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.distributed import codec
from slipstream.distributed.work_queue.items import ClaimSize, WorkItems, WorkUnits, fingerprint
from slipstream.distributed.work_queue.journal import ResultJournal
from slipstream.distributed.work_queue.queue import PoisonItem, UnitReport, WorkQueue
from slipstream.errors import PeerLostError, StateError

__all__ = ["FinishedItems", "Work", "add_article", "add_remark"]


_NOTHING: Any = object()
_LOOPS = {"split_between_processes": 'the loop over split_between_processes(balance="dynamic")'}
"""What the loop over the items is called in messages."""
_MAX_PAUSE = 0.02
_PEER_CHECK_SECONDS = 0.25
"""Seconds between two checks for lost processes, while there is nothing left to claim."""


@dataclass
class FinishedItems:
    """What is known of finished items: results by position, who reported them, and in which order."""

    results: dict[int, Any] = field(default_factory=dict)
    authors: dict[int, int] = field(default_factory=dict)
    """By position, the rank whose report counts; not of items that an earlier run has finished."""
    order: list[int] = field(default_factory=list)
    """Positions as they were finished, those of an earlier run first."""
    units: set[int] = field(default_factory=set)


class Work:
    """The loop over the items of this process, created by `split_between_processes(balance="dynamic")`; see the module docstring."""

    def __init__(
        self,
        items: WorkItems,
        units: WorkUnits,
        queue: WorkQueue,
        *,
        batches: bool,
        operation: str,
        journal: ResultJournal | None = None,
        earlier: dict[int, Any] | None = None,
        advice: str = "",
        block_collectives: Callable[[str], object] = str,
    ) -> None:
        self._items, self._units, self._queue = items, units, queue
        self._batches, self._operation, self._advice = batches, operation, advice
        self._journal = journal
        self._block_collectives = block_collectives
        """Called with the name of the block in which no collective may be called; empty at its end."""
        self._settled = FinishedItems(dict(earlier or {}), order=sorted(earlier or {}))
        self._claim_size = ClaimSize(queue.world_size)
        self._began = time.monotonic()
        self._unit: int | None = None
        self._positions: Sequence[int] = ()
        self._marks: list[str | None] = []
        self._result: Any = _NOTHING
        self._reports: list[UnitReport] = []
        """The known reports of all processes, whose results are read at the end."""
        self._finished: dict[int, Any] = {}
        """Units that are not reported yet, with their results."""
        self._finished_items = 0
        self._left = len(units)
        self._took_over = False
        """Whether the last unit came from a process that is gone."""
        self._state = "new"
        """new · open (the loop runs) · complete · ended (before that)"""

    def __len__(self) -> int:
        """How many items there are for all processes together, those of an interrupted run included."""
        return len(self._items)

    # -- the loop -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._state != "new":
            raise StateError(f"{self._operation} hands every item out once: its loop has been begun already. Split the inputs again.")
        self._state = "open"
        self._block_collectives(_LOOPS.get(self._operation, self._operation))
        try:
            yield from self._hand_out_all()
        finally:
            self._block_collectives("")
        self._collect_results()
        self._state = "complete"

    def _hand_out_all(self) -> Iterator[Any]:
        while units := self._claim():
            began = time.monotonic()
            for unit in units:
                yield self._hand_out(unit)
                self._finish()
                if time.monotonic() - began > self._claim_size.MOST:  # more work than was expected: the others need not wait for all of it
                    self._report()
            self._claim_size.took(len(units), time.monotonic() - began)
            self._report()

    @property
    def indices(self) -> list[int]:
        """The positions in the input of the present item, or of the items of the present batch."""
        return list(self._positions)

    def done(self, result: Any) -> None:
        """Record the result of the present item, or a list with one result for each item of the present batch."""
        if self._unit is None:
            raise StateError("done(...) tells the result of an item that was handed out: call it inside of the loop over the work")
        if self._result is not _NOTHING:
            raise StateError(f"done(...) was called twice for {self._describe_item()}; give all of its result in one call")
        results = self._check_batch_results(result) if self._batches else [result]
        if self._journal is not None:
            for position, mark, entry in zip(self._positions, self._marks, results, strict=True):
                self._journal.add(position, mark, entry)
        self._result = results

    def _check_batch_results(self, result: Any) -> list[Any]:
        count = len(self.indices)
        if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__") or not hasattr(result, "__getitem__"):
            given = add_article(type(result).__name__)
            raise TypeError(f"a batch of {count} items needs a list of {count} results, but {self._describe_item()} gave {given}")
        if len(result) != count:
            raise ValueError(f"a batch of {count} items needs {count} results, but {self._describe_item()} gave {len(result)}")
        return list(result)

    def _describe_item(self, positions: Sequence[int] = ()) -> str:
        positions = positions or self.indices
        return f"item {positions[0]}" if len(positions) == 1 else f"the batch of items {', '.join(map(str, positions))}"

    def _hand_out(self, unit: int) -> Any:
        self._unit, self._result = unit, _NOTHING
        self._positions = positions = self._units[unit]
        item = self._items.several(positions) if self._batches else self._items[positions[0]]
        if self._journal is not None:  # before the user's code can have changed the item
            self._marks = [fingerprint(entry) for entry in (item if self._batches else [item])]
        return item

    def _finish(self) -> None:
        if self._journal is not None and self._result is _NOTHING:
            item = self._describe_item()
            raise StateError(f"checkpoint= keeps results, but none was told for {item}: call work.done(result) in the loop")
        assert self._unit is not None
        self._finished[self._unit] = None if self._result is _NOTHING else self._result
        self._finished_items += len(self._positions)
        self._unit, self._positions, self._result = None, (), _NOTHING

    def _report(self) -> None:
        finished, items = self._finished, self._finished_items
        self._finished, self._finished_items = {}, 0
        if finished:
            self._queue.report(list(finished), self._encoded(finished), items)

    def _encoded(self, finished: dict[int, Any]) -> bytes:
        try:
            return codec.encode(list(finished.values()))
        except Exception as error:  # whatever a foreign class raises when it is pickled
            for unit, results in finished.items():
                _try_to_send(results, self._units[unit], error)
            raise

    # -- claiming -------------------------------------------------------------------------------------------------

    def _claim(self) -> Sequence[int]:
        """Return the next units of this process; none when all units of all processes are finished."""
        if self._left:
            wanted = self._claim_size.wanted(self._left, time.monotonic() - self._began)
            asked = time.monotonic()
            start = self._queue.take(wanted)
            self._claim_size.waited(time.monotonic() - asked)
            units = range(start, min(start + wanted, len(self._units)))
            self._left = max(0, len(self._units) - start - wanted)
            if units:
                self._queue.hold(units)
                return units
            self._queue.hold([])
        self.stop_if_another_failed()
        return self._wait_for_the_rest()

    def _wait_for_the_rest(self) -> Sequence[int]:
        """Wait until everything is finished, or a lost process leaves a unit to take over."""
        pause, look = 0.0005, time.monotonic() + (0.0 if self._took_over else _PEER_CHECK_SECONDS)
        self._queue.hold([])
        self._queue.take(0)  # what was reported last is counted
        while len(self._settled.units) < len(self._units):
            if self._queue.finished_items() >= self._units.items:
                self._read_reports()
                continue
            if time.monotonic() >= look:
                look = time.monotonic() + _PEER_CHECK_SECONDS
                self.stop_if_another_failed()
                unit = self._take_over()
                if unit is not None:
                    self._queue.hold([unit])
                    return [unit]
            time.sleep(pause)
            pause = min(pause * 1.5, _MAX_PAUSE)
        return ()

    def _take_over(self) -> int | None:
        """Return a unit that nobody works on any more; there may be more of them, so the next check follows at once."""
        try:
            unit = self._queue.take_over(self._unfinished)
        except PoisonItem as poison:
            what = self._describe_item(self._units[poison.unit])
            self._queue.fail(f"{what} may be what ends processes: two have died with it, the second: {poison.end}")
            self.stop_if_another_failed()
            raise AssertionError("a failure was told, and is not there") from None
        self._took_over = unit is not None
        return unit

    def _unfinished(self) -> list[int]:
        self._read_reports()
        return [unit for unit in range(len(self._units)) if unit not in self._settled.units]

    def _read_reports(self) -> None:
        """Read which units have been reported since the last time."""
        fresh = self._queue.reports()
        self._reports += fresh
        self._settled.units.update(unit for report in fresh for unit in report.units)

    def _collect_results(self) -> None:
        """Read all results; the first report of a unit counts."""
        settled, known = self._settled, set[int]()
        for report, body in zip(self._reports, self._queue.bodies(self._reports), strict=True):
            for unit, results in zip(report.units, codec.decode(body), strict=True):
                if unit in known:
                    continue
                known.add(unit)
                positions = self._units[unit]
                settled.order += positions
                settled.authors.update(dict.fromkeys(positions, report.rank))
                if results is not None:
                    settled.results.update(zip(positions, results, strict=True))
        self._reports = []

    def stop_if_another_failed(self) -> None:
        """Raise if another process has failed, which ends the work for all."""
        reason = self._queue.failure()
        if reason is not None:
            self._state = "ended"
            raise PeerLostError(f"{self._operation} cannot complete on rank {self._queue.rank}: {reason}.{self._describe_loss()}")

    # -- the end --------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process stops, and add a note to the error of where it was."""
        if self._state == "ended":
            return
        self._state = "ended"
        where = f" at {self._describe_item()}" if self._unit is not None else ""
        first = (str(error).strip().splitlines() or [""])[0]
        told = f"{type(error).__name__}: {first}" if first else type(error).__name__
        with contextlib.suppress(PeerLostError):  # the store is gone: the error on its way says more
            self._queue.fail(f"rank {self._queue.rank} failed{where}: {told}")
        if where:
            add_remark(error, f"({self._operation}: raised on rank {self._queue.rank}{where}){self._describe_loss()}")

    def _describe_loss(self) -> str:
        if self._journal is not None and self._journal.lost:
            return " Something has removed files of the checkpoint, so what was finished may be lost."
        return self._advice

    def close(self) -> None:
        """Take no further part, at the end of the block."""
        complete, failed = self._state == "complete", self._state == "ended"
        self._block_collectives("")
        try:
            if not complete and not failed:
                with contextlib.suppress(PeerLostError):  # the store is gone: nobody waits for what this process has finished
                    self._report_rest()
            if self._journal is not None:
                self._journal.close()
        finally:
            all_left = self._queue.leave(early=not complete)
        if complete:
            self._queue.forget()
            return
        self._state = "ended"
        if all_left and not failed:
            with contextlib.suppress(PeerLostError):
                self._report_unfinished()

    def _report_rest(self) -> None:
        """Report what this process has finished before it leaves early."""
        if self._result is not _NOTHING:
            self._finish()
        self._report()
        self._queue.take(0)

    def _report_unfinished(self) -> None:
        left = self._units.items - self._queue.finished_items()
        if left > 0 and self._queue.failure() is None:
            why = "every process left the loop before its end, or never began it"
            print(f"slipstream: {self._operation}: nobody has worked on {left} of {len(self)} items: {why}.", file=sys.stderr, flush=True)

    @property
    def settled(self) -> FinishedItems:
        """What is known of finished items."""
        return self._settled

    @property
    def gone(self) -> dict[int, str]:
        """The processes that died or left during the work, and how, as far as this one has found out."""
        return dict(self._queue.gone)

    @property
    def complete(self) -> bool:
        """Whether every item is finished and this process knows it."""
        return self._state == "complete"

    def results(self, order: bool = True) -> list[Any]:
        """One result for each item, on every process: in the order of the input, or with `order=False` as they were finished."""
        if not self.complete:
            raise StateError(
                f"the results of {self._operation} are there when all items are finished: let the loop over the work come to its end on "
                "this process, without break or return"
            )
        positions: Sequence[int] = range(len(self)) if order else self._settled.order
        results = self._settled.results
        missing = [position for position in positions if position not in results]
        if missing:
            many = f"item {missing[0]} ({len(missing)} of {len(self)})"
            raise StateError(f"no result was told for {many}: call work.done(result) in the loop")
        return [results[position] for position in positions]

    # -- for `gather` ---------------------------------------------------------------------------------------------

    leaf_by_leaf = False
    ranks = None
    batch_total = 0

    @property
    def total(self) -> int:
        """How many items were handed out; -1 while that is not over."""
        return self._units.items if self.complete else -1

    def order(self, counts: Sequence[int]) -> list[int] | None:
        """See `distributed/collectives.py`: the order of the input, for lists with one entry for each item that a process was given."""
        own: list[list[int]] = [[] for _ in counts]
        for position in self._settled.order:
            rank = self._settled.authors.get(position)
            if rank is not None:
                own[rank].append(position)
        if [len(positions) for positions in own] != list(counts):
            return None
        given = [position for positions in own for position in positions]
        return sorted(range(len(given)), key=given.__getitem__)


def _try_to_send(results: Any, positions: Sequence[int], error: Exception) -> None:
    for position, result in zip(positions, results or (), strict=False):
        try:
            codec.encode(result)
        except Exception as cause:
            raise TypeError(
                f"the result of item {position}, {add_article(type(result).__name__)}, cannot be sent to the other processes ({cause}): "
                "give plain data, tensors or arrays"
            ) from error


def add_article(word: str) -> str:
    """
    >>> add_article("int"), add_article("str")
    ('an int', 'a str')
    """
    return f"a{'n' * word.lower().startswith(tuple('aeiou'))} {word}"


def add_remark(error: BaseException, text: str) -> None:
    """Add a line to what is printed of an error."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # before Python 3.11
        print(f"slipstream: {text}", file=sys.stderr, flush=True)
