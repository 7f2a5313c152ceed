"""How rows get to rank 0: through the rendezvous store, without a collective, and without anybody waiting for anybody.

Each other rank has one key. It leaves a message there if rank 0 has taken the one before, and else keeps what it has to say for the
next time; rank 0 takes what it finds and deletes it. So the store never holds more than a message per rank, plus a last one at the end,
whoever is slow, stopped or gone. When rank 0 takes messages no more it says so (`close`): who comes later knows that nobody hears it.
A store that fails ends the exchange with one line in the log, and never the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slipstream.logging import get_logger
from slipstream.runtime.store import read_now

__all__ = ["Exchange"]

_PAUSE = 0.01


class Exchange:
    """The ledger's keys in the store. `store` gives the store as it is now; None for one process, or before a group was opened."""

    def __init__(self, store: Callable[[], Any], number: int, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != 0]
        self._key = f"ledger/{number}/{{}}".format
        self._failed: Any = None
        """The store that did not answer: another one may."""

    # -- ranks other than 0 ---------------------------------------------------------------------------------------

    def can_publish(self) -> bool:
        """Whether rank 0 has taken what this rank told before."""
        return bool(self._ask(lambda store: not store.check([self._key(self._rank)]), False))

    def publish(self, message: bytes) -> bool:
        """Leaves a message for rank 0; to be called where `can_publish` says so. Whether it was left."""
        return bool(self._ask(lambda store: _leave(store, self._key(self._rank), message), False))

    def publish_last(self, message: bytes) -> bool:
        """Leaves the last message, beside one that may not have been taken."""
        return bool(self._ask(lambda store: _leave(store, self._key(f"{self._rank}/last"), message), False))

    def is_closed(self) -> bool:
        """Whether rank 0 takes no messages any more: one that was left before this was asked may not have been taken."""
        return bool(self._ask(lambda store: store.check([self._key("closed")]), True))

    def take_back(self) -> bytes | None:
        """Takes the message of this rank that rank 0 has not taken, if there is one."""
        return self._take(self._key(self._rank))

    # -- rank 0 ---------------------------------------------------------------------------------------------------

    def collect(self) -> dict[int, bytes]:
        """What the others have left, which is gone from the store afterwards."""
        return {other: message for other in self._others if (message := self._take(self._key(other))) is not None}

    def collect_last(self, wait: float) -> dict[int, list[bytes]]:
        """All that is left of everybody: waits so many seconds for those who have not said their last word."""
        found: dict[int, list[bytes]] = {}
        missing, deadline = list(self._others), time.monotonic() + wait
        while True:
            for other in list(missing):
                last = self._take(self._key(f"{other}/last"))
                if last is not None:
                    missing.remove(other)
                    earlier = self._take(self._key(other))
                    found[other] = [last] if earlier is None else [earlier, last]
            if not missing or self._store() in (None, self._failed) or time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE)
        for other in missing:
            earlier = self._take(self._key(other))
            if earlier is not None:
                found[other] = [earlier]
        return found

    def close(self) -> dict[int, list[bytes]]:
        """Says that no messages are taken any more, and then takes what was left until then."""
        self._ask(lambda store: _leave(store, self._key("closed"), b"closed"), False)
        return self.collect_last(0.0)

    def _take(self, key: str) -> bytes | None:
        def take(store: Any) -> bytes | None:
            if not store.check([key]):
                return None
            message = read_now(store, key)
            return message if message is not None and store.delete_key(key) else None  # who deletes the key has the message

        found: bytes | None = self._ask(take, None)
        return found

    def _ask(self, what: Callable[[Any], Any], otherwise: Any) -> Any:
        store = self._store()
        if store is None or store is self._failed:
            return otherwise
        try:
            return what(store)
        except RuntimeError as error:  # torch's errors of stores: closed, not reached, too late
            self._failed = store
            told = next(iter(str(error).splitlines()), type(error).__name__)
            get_logger(__name__).warning(
                f"the ledger of rank {self._rank} does not reach the others any more ({told}): it goes on with this rank alone",
                main_process_only=False,
            )
            return otherwise


def _leave(store: Any, key: str, message: bytes) -> bool:
    store.set(key, message)
    store.check([key])  # `set` does not wait for an answer: now it is there
    return True
