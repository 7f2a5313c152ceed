"""Start and end of a work queue: what the processes agree on first, and the context in which items are handed out.

One small collective comes first: all processes say what they were given, and if they differ all raise. The costs of the items are
computed in shares, so that all have the same order. With `checkpoint=` the main process prepares the journal and every process reads it.
After that nothing is a collective.
"""

from __future__ import annotations

import os
import reprlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slipstream.distributed.collectives import gather_objects
from slipstream.distributed.guard import Channel, Limits
from slipstream.distributed.split import split
from slipstream.distributed.work_queue import journal
from slipstream.distributed.work_queue.items import WorkItems, WorkUnits, check_cost, fingerprint, order_by_cost
from slipstream.distributed.work_queue.queue import LocalQueue, StoreQueue
from slipstream.distributed.work_queue.work import Work, add_article, add_remark, make_work_bar
from slipstream.errors import CheckpointError, ConfigError, MismatchError, PeerLostError

__all__ = ["WorkOptions", "WorkTeam", "open_work_queue", "parse_balance"]

_COMPARED_RESULTS = 8
"""How many finished items of a dataset are compared with the journal."""

_COMPARED_ITEMS = 20_000
"""How many items are looked at to say how the inputs of two processes differ."""

_PAUSE = 0.005

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """How items are handed out.

    >>> WorkOptions(batch_size=0)
    Traceback (most recent call last):
        ...
    slipstream.errors.ConfigError: batch_size=0: write a number of items from 1 on, or None to get the items one by one
    """

    batch_size: int | None = None
    key: Callable[[Any], float] | None = None
    checkpoint: str | os.PathLike[str] | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        size = self.batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"batch_size={size!r}: write a number of items from 1 on, or None to get the items one by one")
        if self.key is not None and not callable(self.key):
            raise ConfigError(f"key={self.key!r} is no function: it says what an item costs, for example key=len")
        if self.progress not in (None, True, False):
            raise ConfigError(f"progress={self.progress!r}: write True, False, or None for a bar where there is a terminal")

    @property
    def path(self) -> Path | None:
        return None if self.checkpoint is None else Path(os.path.abspath(os.fspath(self.checkpoint)))


def parse_balance(balance: str, apply_padding: bool, options: WorkOptions) -> WorkOptions | None:
    """Return the options of dynamic work; None for a static split. Refuse options that do not go together.

    >>> parse_balance("static", False, WorkOptions(key=len))
    Traceback (most recent call last):
        ...
    slipstream.errors.ConfigError: key is for items that are handed out as processes become free: write balance="dynamic" too
    """
    if balance == "dynamic":
        if apply_padding:
            raise ConfigError('apply_padding=True gives every process the same count, which balance="dynamic" does not: leave out one')
        return options
    if balance != "static":
        raise ConfigError(f'balance={balance!r}: write "static" (a part for each process) or "dynamic" (items as processes become free)')
    given = [name for name, value in vars(options).items() if value is not None]
    if given:
        raise ConfigError(f'{given[0]} is for items that are handed out as processes become free: write balance="dynamic" too')
    return None


@dataclass(frozen=True)
class WorkTeam:
    """The processes that share the work, as one of them sees it."""

    channel: Channel
    limits: Limits
    store: Callable[[], Any]
    """The rendezvous store, once the group is open; asked for by several processes alone."""
    operation: str
    """What the user called, for messages."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of the ranks."""
        found = gather_objects(self.channel, self.limits, value, operation=self.operation)
        assert found is not None
        return found

    def occupy(self, inside: str) -> None:
        """Refuse collectives from here on, while the process is inside of this; empty: allow them again."""
        self.channel.busy = inside

    def queue(self, name: str) -> LocalQueue:
        if self.channel.world_size == 1:
            return LocalQueue()
        return StoreQueue(self.store(), name, self.channel.rank, self.channel.world_size)


@contextmanager
def open_work_queue(team: WorkTeam, inputs: Any, options: WorkOptions) -> Iterator[Work]:
    """Open the work for the block; when it ends on all processes, the journal is in its final form."""
    items: WorkItems

    def describe() -> tuple[dict[str, Any], str]:
        nonlocal items
        items = WorkItems(inputs, team.operation)
        given = {"batch_size": options.batch_size, "key": options.key is not None, "checkpoint": str(options.path or "")}
        return {"count": len(items), "inputs": items.fingerprint(), **given}, secrets.token_hex(8)

    told = _run_or_raise_together(team, describe)
    own, name = told[team.channel.rank][0], told[0][1]
    _check_same(team, [given for given, _ in told], items)
    costs = _costs(team, items, options.key)
    order = range(len(items)) if costs is None else order_by_cost(costs)
    session = _JournalSession(team, options.path, journal.JournalHeader(len(items), own["inputs"]), name, items)
    try:
        units = WorkUnits(order, options.batch_size or 1, without=session.earlier, costs=costs)
        queue = team.queue(name)
        is_main, before = team.channel.rank == 0, len(session.earlier)
        work = Work(
            items,
            units,
            queue,
            batches=options.batch_size is not None,
            operation=team.operation,
            journal=session.writer(),
            bar=make_work_bar(options.progress, is_main=is_main, finished=queue.finished_items, total=len(items), before=before),
            earlier=session.earlier,
            advice=session.advice,
            busy=team.occupy,
        )
        try:
            yield work
            if work.complete:
                session.finish(work, queue)
        except BaseException as error:
            work.fail(error)
            raise
        finally:
            work.close()
    finally:
        session.close()


def _check_same(team: WorkTeam, told: list[dict[str, Any]], items: WorkItems) -> None:
    """Raise a MismatchError on every process if they were not given the same."""
    for what in told[0]:
        others = [rank for rank, given in enumerate(told) if given[what] != told[0][what]]
        if others:
            rank = others[0]
            shown = f"{told[0][what]!r} on rank 0, {told[rank][what]!r} on rank {rank}"
            if what in ("count", "inputs"):
                shown = f"{told[0]['count']} items on rank 0, {told[rank]['count']} on rank {rank}"
                shown = shown if what == "count" else _describe_difference(team, items, rank)
                shown, what = f"{shown}. Every process has to pass the same items in the same order", "inputs"
            raise MismatchError(f"{team.operation} was given different {what}: {shown}\n(raised on rank {team.channel.rank})")


def _describe_difference(team: WorkTeam, items: WorkItems, rank: int) -> str:
    """Return how the inputs of this rank and rank 0 differ, which are as many; a collective."""
    seen = range(min(len(items), _COMPARED_ITEMS) if items.in_memory else 0)
    told = team.gather((type(items.inputs).__name__, [fingerprint(items[position]) for position in seen]))
    (kind, marks), (other, theirs) = told[0], told[rank]
    if kind != other:
        team.gather("")
        return f"{add_article(kind)} on rank 0, {add_article(other)} on rank {rank}"
    position = next((place for place, pair in enumerate(zip(marks, theirs, strict=False)) if pair[0] != pair[1]), None)
    shown = team.gather("" if position is None or not items.in_memory else reprlib.repr(items[position]))
    if position is None:
        return f"the same number on rank 0 and on rank {rank}, but others"
    return f"item {position} is {shown[0]} on rank 0 and {shown[rank]} on rank {rank}"


def _error_of_peer(team: WorkTeam, rank: int, why: str) -> Exception:
    """Return the error for a failure of another process: a CheckpointError concerns all, anything else ends the work here."""
    kind, _, text = why.partition(": ")
    if kind == CheckpointError.__name__:
        return CheckpointError(f"{text}\n(found on rank {rank}, raised on rank {team.channel.rank} too)")
    return PeerLostError(f"{team.operation} cannot begin on rank {team.channel.rank}, because it failed on rank {rank}: {why}")


def _run_or_raise_together(team: WorkTeam, act: Callable[[], T]) -> list[T]:
    """Return the results of `act` on every process; if one fails, all raise."""
    error: Exception | None = None
    value: Any = None
    try:
        value = act()
    except Exception as problem:  # whatever the user's `key` or dataset raises: the others have to raise too
        error = problem
    notes = " ".join(getattr(error, "__notes__", ()))
    told = team.gather({"value": value, "error": None if error is None else f"{type(error).__name__}: {error} {notes}".rstrip()})
    if error is not None:
        raise error
    for rank, entry in enumerate(told):
        if entry["error"] is not None:
            raise _error_of_peer(team, rank, entry["error"])
    return [entry["value"] for entry in told]


def _costs(team: WorkTeam, items: WorkItems, key: Callable[[Any], float] | None) -> list[float] | None:
    """Return the cost of every item, computed in shares; None without a key."""
    if key is None:
        return None

    def costs() -> list[float]:
        share = split(range(len(items)), team.channel.rank, team.channel.world_size).value
        return [check_cost(asked(position), position) for position in share]

    def asked(position: int) -> Any:
        item = items[position]
        try:
            return key(item)
        except Exception as error:  # whatever a function of the user's raises
            where = f"for item {position} on rank {team.channel.rank}"
            add_remark(error, f"({team.operation}: raised by key, which says what an item costs, {where})")
            raise

    return [cost for part in _run_or_raise_together(team, costs) for cost in part]


class _JournalSession:
    """The journal of one piece of work, or none."""

    def __init__(self, team: WorkTeam, path: Path | None, header: journal.JournalHeader, run: str, items: WorkItems) -> None:
        self._team, self._path, self._header, self._run = team, path, header, run
        self._lock: int | None = None
        self.earlier: dict[int, Any] = {}
        """The results of an interrupted run, by position."""
        self.advice = " What was finished is lost; with checkpoint=FILE the next run resumes from there."
        if path is None:
            return
        self.advice = f" What was finished is in {path}, and the next run resumes from there."
        _run_or_raise_together(team, lambda: self._prepare(path))
        try:
            counts = _run_or_raise_together(team, lambda: self._read(path, items))
            if len(set(counts)) > 1:
                raise CheckpointError(
                    f"the processes do not see the same {path} (finished items by rank: {counts}): it has to lie in a folder that all "
                    "machines share"
                )
        except BaseException:
            self.close()
            raise

    def _prepare(self, path: Path) -> None:
        if self._team.channel.rank == 0:
            self._lock = journal.prepare_journal(path, self._header)

    def _read(self, path: Path, items: WorkItems) -> int:
        marks: dict[int, str | None] = {}
        for entry in journal.read_journal(path, self._header):
            self.earlier.setdefault(entry.index, entry.result)
            marks.setdefault(entry.index, entry.item)
        if not items.in_memory:
            step = max(1, len(marks) // _COMPARED_RESULTS)
            for index in list(marks)[::step][:_COMPARED_RESULTS]:
                if marks[index] not in (None, now := fingerprint(items[index])) and now == fingerprint(items[index]):
                    raise CheckpointError(
                        f"{path} has the results of other inputs: item {index} is not what it was. Give checkpoint= another name, or "
                        "remove the file to start over."
                    )
        return len(self.earlier)

    def writer(self) -> journal.ResultJournal | None:
        if self._path is None:
            return None
        return journal.ResultJournal(self._path, self._run, self._team.channel.rank)

    def finish(self, work: Work, queue: LocalQueue) -> None:
        """Rewrite the journal on the lowest rank that is there; the others wait, or take over if that one goes too."""
        if self._path is None or not work.settled.authors:
            return
        authors = [work.settled.authors.get(position) for position in range(len(work))]
        while not queue.is_settled():
            if queue.is_first():
                missing = journal.finish_journal(self._path, self._header, authors, self._run, work.settled.results)
                queue.settle()
                if missing:
                    text = f"{missing} results were no longer in {self._path}: something removed files there. They are written anew."
                    print(f"slipstream: {text}", file=sys.stderr, flush=True)
            else:
                work.stop_if_another_failed()
                time.sleep(_PAUSE)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
