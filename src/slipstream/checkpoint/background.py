"""Work that goes on behind the training: at most one piece at a time, and its failure is raised at the next call.

The thread is no daemon, so a script that ends waits for it. A failure is also logged when it happens, because there may be no next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from slipstream.errors import CheckpointError
from slipstream.logging import get_logger

__all__ = ["Background"]


class Background:
    """One piece of work behind the caller.

    >>> background, done = Background(), []
    >>> background.start("the list", lambda: done.append(1))
    >>> background.wait()
    >>> done
    [1]
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._name = ""
        self._failure: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, name: str, work: Callable[[], object]) -> None:
        """Runs work behind the caller; what came before it is waited for, and its failure raised."""
        self.wait()
        self._name = name
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"slipstream: {name}")
        self._thread.start()

    def wait(self) -> None:
        """Returns when the work is done; raises what went wrong in it, once."""
        if self._thread is not None:
            self._thread.join()  # one who interrupts this does not forget the work
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{self._name}, which was written behind the training, failed: {failure}") from failure

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # raised by the next call; whoever makes none reads it in the log
            self._failure = error
            get_logger(__name__).error(f"{self._name} was not saved: {error}", main_process_only=False)
