"""Notes that processes leave for each other in the rendezvous store: read without a collective, in whatever group a process is.

They are for what has to be known when a collective has failed, and why. A note is there or not; whoever left it takes it back.
"""

from __future__ import annotations

import time
from typing import Any

from slipstream.runtime.store import read_now

__all__ = ["Notes"]


class Notes:
    """The notes of a job; without a store (one process, or none opened yet) there are none.

    >>> from torch.distributed import HashStore
    >>> notes = Notes(HashStore())
    >>> notes.leave("out of memory")
    >>> notes.has("out of memory"), notes.has("something else")
    (True, False)
    >>> notes.take_back("out of memory")
    >>> notes.has("out of memory")
    False
    >>> notes.agree("name of the run", "first"), notes.agree("name of the run", "second")
    ('first', 'first')
    >>> notes.append("names", "a "), notes.append("names", "b"), notes.read("names"), notes.read("others")
    (None, None, 'a b', '')
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def leave(self, name: str) -> None:
        """Leaves a note."""
        if self._store is not None:
            self._store.add(f"note/{name}", 1)  # unlike `set` this waits for the answer: the note is there when it returns

    def has(self, name: str, wait: float = 0.0) -> bool:
        """Whether there is a note; one that is about to be left is waited for, for so many seconds."""
        deadline = time.monotonic() + wait
        while self._store is not None:
            if self._store.check([f"note/{name}"]):
                return True
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        return False

    def agree(self, name: str, proposal: str) -> str:
        """What all processes call something: the first proposal that was made; nobody waits for anybody. Alone, one's own."""
        if self._store is None:
            return proposal
        agreed: bytes = self._store.compare_set(f"note/{name}", "", proposal)
        return agreed.decode()

    def append(self, name: str, text: str) -> None:
        """Adds to a text that is empty at first."""
        if self._store is not None:
            self._store.append(f"note/{name}", text)

    def read(self, name: str) -> str:
        """What was added to a text so far; nobody waits."""
        found = None if self._store is None else read_now(self._store, f"note/{name}")
        return "" if found is None else found.decode()

    def take_back(self, name: str) -> None:
        """Takes a note back."""
        if self._store is not None:
            self._store.delete_key(f"note/{name}")
