"""Start and end of a work queue: what the processes agree on first, and the context in which items are handed out.

One small collective comes first: all processes exchange what they were given, and if it differs all raise. The costs of the items are
computed in shares, so that all have the same order. With `checkpoint=` the main process prepares the journal and every process reads it.
After that nothing is a collective.
"""

from __future__ import annotations

import os
import reprlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

# torch internals: the stubs of torch.distributed do not export it (torch 2.13); mypy notices when they do.
from torch._C._distributed_c10d import HashStore

from slipstream.config.handlers import check_count
from slipstream.distributed.guard import Channel, Limits
from slipstream.distributed.progress_bar import show_progress
from slipstream.distributed.scatter import agree_or_raise
from slipstream.distributed.split import split
from slipstream.distributed.work_queue import journal
from slipstream.distributed.work_queue.items import WorkItems, WorkUnits, check_cost, fingerprint, order_by_cost
from slipstream.distributed.work_queue.queue import WorkQueue
from slipstream.distributed.work_queue.work import Work, add_article, add_remark
from slipstream.errors import CheckpointError, ConfigError, MismatchError, PeerLostError

__all__ = ["WorkOptions", "WorkTeam", "check_balance", "open_work_queue"]

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
    slipstream.errors.ConfigError: batch_size=0: write a number of items from 1, or None to get the items one by one
    """

    batch_size: int | None = None
    key: Callable[[Any], float] | None = None
    checkpoint: str | os.PathLike[str] | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        size = self.batch_size
        if size is not None:
            check_count(size, f"batch_size={size!r}: write a number of items from 1, or None to get the items one by one")
        if self.key is not None and not callable(self.key):
            raise ConfigError(f"key={self.key!r} is no function: it says what an item costs, for example key=len")
        if self.progress not in (None, True, False):
            raise ConfigError(f"progress={self.progress!r}: write True, False, or None for a bar where there is a terminal")

    @property
    def path(self) -> Path | None:
        return None if self.checkpoint is None else Path(os.path.abspath(os.fspath(self.checkpoint)))


def check_balance(balance: str, apply_padding: bool, options: Mapping[str, Any]) -> None:
    """Refuse arguments of `split_between_processes` that do not go with a work queue, and options that need one.

    >>> check_balance("static", False, {"key": len})
    Traceback (most recent call last):
        ...
    slipstream.errors.ConfigError: key is for items that are handed out as processes become free: write balance="dynamic" too
    """
    if balance == "static":
        given = next(name for name, value in options.items() if value is not None)
        raise ConfigError(f'{given} is for items that are handed out as processes become free: write balance="dynamic" too')
    if balance != "dynamic":
        raise ConfigError(f'balance={balance!r}: write "static" (a part for each process) or "dynamic" (items as processes become free)')
    if apply_padding:
        raise ConfigError('apply_padding=True gives every process the same count, which balance="dynamic" does not: leave out one')


@dataclass(frozen=True)
class WorkTeam:
    """The processes that share the work, as one of them sees it."""

    channel: Channel
    limits: Limits
    store: Callable[[], Any]
    """Returns the rendezvous store, once the group is open; called with several processes only."""
    operation: str
    """What the user called, for messages."""

    def agree(self, value: Any) -> list[Any]:
        """Return the values of all processes, in rank order; if one passes an exception, all raise."""
        return agree_or_raise(self.channel, self.limits, value, operation=self.operation, remote_error=self._error_of_peer)

    def run(self, step: Callable[[], T]) -> list[T]:
        """Run a step and return the results of all processes; if it fails on one, all raise."""
        outcome: Any
        try:
            outcome = step()
        except Exception as error:  # whatever `key` or a dataset of the user's raises: the others must hear of it
            outcome = error
        return self.agree(outcome)

    def _error_of_peer(self, rank: int, text: str) -> Exception:
        """Return what another process's failure means here: a checkpoint error is everybody's, any other the cause of an end."""
        kind, _, message = text.partition(": ")
        if kind == CheckpointError.__name__:
            return CheckpointError(f"{message}\n(found on rank {rank}, raised on rank {self.channel.rank} too)")
        return PeerLostError(f"{self.operation} cannot begin on rank {self.channel.rank}, because it failed on rank {rank}: {text}")

    def block_collectives(self, inside: str) -> None:
        """Refuse collectives from here on, as this process is inside this block; empty: no longer."""
        self.channel.blocked_by = inside


@contextmanager
def open_work_queue(team: WorkTeam, inputs: Any, options: WorkOptions) -> Iterator[Work]:
    """Yield the work; when the block ends on all processes, the journal is in its final form."""
    items, own, name = _agree_on_inputs(team, inputs, options)
    costs = _compute_costs(team, items, options.key)
    order = range(len(items)) if costs is None else order_by_cost(costs)
    session = _JournalSession(team, options.path, journal.JournalHeader(len(items), own["inputs"]), name, items)
    rank, world_size = team.channel.rank, team.channel.world_size
    try:
        units = WorkUnits(order, options.batch_size or 1, without=session.earlier, costs=costs)
        queue = WorkQueue(HashStore() if world_size == 1 else team.store(), name, rank, world_size)
        work = Work(
            items,
            units,
            queue,
            batches=options.batch_size is not None,
            operation=team.operation,
            journal=session.writer(),
            earlier=session.earlier,
            advice=session.advice,
            block_collectives=team.block_collectives,
        )
        before = len(session.earlier)
        try:
            with show_progress(options.progress, is_main=rank == 0, finished=queue.finished_items, total=len(items), before=before):
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


def _agree_on_inputs(team: WorkTeam, inputs: Any, options: WorkOptions) -> tuple[WorkItems, dict[str, Any], str]:
    """Return the items, their description and the name of this work; raise on every process if they were not given the same."""
    own: dict[str, Any] = {}
    collected: list[WorkItems] = []

    def describe() -> dict[str, Any]:
        items = WorkItems(inputs, team.operation)
        collected.append(items)
        own.update(count=len(items), inputs=items.fingerprint(), batch_size=options.batch_size)
        own.update(key=options.key is not None, checkpoint=str(options.path or ""))
        return {**own, "name": secrets.token_hex(8)}

    described = team.run(describe)
    (items,) = collected
    for what in own:
        rank = next((rank for rank, entry in enumerate(described) if entry[what] != described[0][what]), None)
        if rank is None:
            continue
        shown = f"{described[0][what]!r} on rank 0, {described[rank][what]!r} on rank {rank}"
        if what in ("count", "inputs"):
            counts = f"{described[0]['count']} items on rank 0, {described[rank]['count']} on rank {rank}"
            shown = counts if what == "count" else _describe_difference(team, items, rank)
            shown, what = f"{shown}. Every process has to pass the same items in the same order", "inputs"
        raise MismatchError(f"{team.operation} was given different {what}: {shown}\n(raised on rank {team.channel.rank})")
    return items, own, str(described[0]["name"])


def _describe_difference(team: WorkTeam, items: WorkItems, rank: int) -> str:
    """Describe how the inputs of this rank and rank 0 differ, which have the same length; every process calls it."""
    seen = range(min(len(items), _COMPARED_ITEMS) if items.in_memory else 0)
    kinds = team.agree((type(items.inputs).__name__, [fingerprint(items[position]) for position in seen]))
    (kind, marks), (other, theirs) = kinds[0], kinds[rank]
    position = next((place for place, pair in enumerate(zip(marks, theirs, strict=False)) if pair[0] != pair[1]), None)
    shown = team.agree("" if position is None or kind != other or not items.in_memory else reprlib.repr(items[position]))
    if kind != other:
        return f"{add_article(kind)} on rank 0, {add_article(other)} on rank {rank}"
    if position is None:
        return f"the same number on rank 0 and on rank {rank}, but others"
    return f"item {position} is {shown[0]} on rank 0 and {shown[rank]} on rank {rank}"


def _compute_costs(team: WorkTeam, items: WorkItems, key: Callable[[Any], float] | None) -> list[float] | None:
    """Return what every item costs, each process having asked for its share; None without a key."""
    if key is None:
        return None

    def ask(position: int) -> float:
        item = items[position]
        try:
            cost = key(item)
        except Exception as error:  # whatever a function of the user's raises
            where = f"for item {position} on rank {team.channel.rank}"
            add_remark(error, f"({team.operation}: raised by key, which says what an item costs, {where})")
            raise
        return check_cost(cost, position)

    share = split(range(len(items)), team.channel.rank, team.channel.world_size).value
    return [cost for part in team.run(lambda: [ask(position) for position in share]) for cost in part]


class _JournalSession:
    """The journal from the beginning of the work to its end, if there is one."""

    def __init__(self, team: WorkTeam, path: Path | None, header: journal.JournalHeader, run: str, items: WorkItems) -> None:
        self._team, self._path, self._header, self._run = team, path, header, run
        self._lock: int | None = None
        self.earlier: dict[int, Any] = {}
        """The results of an interrupted run, by position."""
        self.advice = " What was finished is lost; with checkpoint=FILE the next run resumes from there."
        if path is None:
            return
        self.advice = f" What was finished is in {path}, and the next run resumes from there."
        team.run(lambda: self._prepare(path) if team.channel.rank == 0 else None)
        try:
            counts = team.run(lambda: self._read(path, items))
            if len(set(counts)) > 1:
                raise CheckpointError(
                    f"the processes do not see the same {path} (finished items by rank: {counts}): it has to lie in a folder that all "
                    "machines share"
                )
        except BaseException:
            self.close()
            raise

    def _prepare(self, path: Path) -> None:
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

    def finish(self, work: Work, queue: WorkQueue) -> None:
        """Rewrite the journal on the lowest rank that is there; the others wait for it, or do it if that rank is lost too."""
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
