"""Signals to the launcher, as something to look at instead of something that interrupts.

A handler only counts and wakes the launcher's wait; the launcher looks at `Requests` where it is safe to act. The first signal
asks it to stop the workers, the second one to kill them. SIGHUP stays ignored where it was ignored (`nohup`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

__all__ = ["Requests", "Stopped", "listening"]

_HANDLED: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name))


class Stopped(Exception):
    """The launcher was asked to stop, by this signal."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Requests:
    """What has been asked of the launcher so far."""

    def __init__(self) -> None:
        self.wake, self._waker = os.pipe()
        for end in (self.wake, self._waker):
            os.set_blocking(end, False)
        self.received: list[signal.Signals] = []
        self.previous: dict[signal.Signals, Any] = {}
        """What the signals did before; a worker goes back to it."""

    @property
    def stop(self) -> signal.Signals | None:
        """The first signal that asked to stop, or None."""
        return self.received[0] if self.received else None

    def check(self) -> None:
        """Raise `Stopped` when the launcher was asked to stop."""
        if self.received:
            raise Stopped(self.received[0])

    def hurry(self) -> bool:
        """Asked a second time: no more patience with the workers. Also empties the pipe that wakes the launcher."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 64):
                pass
        return len(self.received) > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"!")


@contextlib.contextmanager
def listening() -> Iterator[Requests]:
    """Collect signals instead of being interrupted by them, until the block ends."""
    requests = Requests()
    for signum in _HANDLED:
        before = signal.getsignal(signum)
        if before is signal.SIG_IGN and signum is signal.SIGHUP:
            continue
        requests.previous[signum] = before
        signal.signal(signum, requests._note)
    try:
        yield requests
    finally:
        for signum, before in requests.previous.items():
            signal.signal(signum, before)
        os.close(requests.wake)
        os.close(requests._waker)
