"""`RankReports`: what every rank reports under one key reaches the main process through the store, and nobody waits for anybody.

Each rank adds its report under a key that all of them share. The main process keeps its own, and takes those whose key every rank has
reported to, whenever it looks. A key to which some ranks never come is forgotten when enough others follow it. So the store never holds
more than a few reports of a rank. A store that fails ends the reports with one line in the log, and never the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from slipstream.logging import get_logger
from slipstream.runtime.store import read_now

__all__ = ["RankReports"]

_PENDING = 8
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
            self._ask(lambda: _leave(store, self._name(key, self._rank), data))
        self._pending.append((key, data, note))
        if len(self._pending) > _PENDING:
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


def _leave(store: Any, key: str, data: bytes) -> None:
    store.set(key, data)
    store.check([key])  # `set` does not wait for an answer: now it is there
