"""The runtime: what one process of a job shares, however many state objects look at it.

It knows who this process is and opens the group when a collective first needs it. Settings (precision, limits, device) belong to the
objects that were given them, not to the runtime, so that one object never changes another's.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from slipstream.comm.channel import Channel, GroupChannel, Limits, Solo
from slipstream.comm.engine import Unwatched, Watch
from slipstream.comm.meter import Meter
from slipstream.devices.table import best_family
from slipstream.errors import ConfigError, StateError
from slipstream.runtime.group import Group, GroupSettings
from slipstream.runtime.notes import Notes
from slipstream.runtime.process import Process
from slipstream.runtime.turns import wait_for_everyone

if TYPE_CHECKING:
    from slipstream.runtime.memory.watch import MemoryWatch

__all__ = ["Runtime"]

_Replica = Callable[[], Mapping[str, Any]]
"""Gives the values by name that should be the same on every rank."""


class Runtime:
    """One per process, held in `current.py`.

    >>> runtime = Runtime(Process())
    >>> runtime.channel().world_size
    1
    """

    def __init__(self, process: Process, limits: Limits | None = None, *, debug: bool = False, child_of: int | None = None) -> None:
        self.process = process
        self.child_of = child_of
        """The process that has this rank, if this is a child of it."""
        self.debug = debug
        """Whether values that should agree between ranks are compared, outside of state objects that say so themselves."""
        self.limits = limits or Limits()
        """The limits of calls that no state object makes."""
        self.pid = os.getpid()
        self.replicas: dict[str, _Replica] = {}
        """What `debug` compares between ranks at every barrier."""
        self.memory_watches: list[MemoryWatch] = []
        """Who knows what tensors are called, and where a snapshot of memory goes; see `runtime/memory/watch.py`."""
        self.hearers: list[Callable[[str, str], None]] = []
        """Called with the name of the logger and the text of every warning that a logger of `get_logger` gives on this process."""
        self.told: set[str] = set()
        """What was said once, and is not to be said again in this run."""
        self.meters: weakref.WeakSet[Meter] = weakref.WeakSet()
        """Where time in collectives is marked: one for each ledger."""
        self.ledgers = itertools.count()
        """Numbers for ledgers: the first of each rank belong together, and so on."""
        self.savers = itertools.count()
        """Numbers for what saves checkpoints, in the same way."""
        self._solo = Solo()
        self._lock = threading.Lock()
        self._group: Group | None = None

    @property
    def is_open(self) -> bool:
        """Whether the group is open now; a single process needs none."""
        return self._group is not None and self._group.is_open

    @property
    def settings(self) -> GroupSettings | None:
        """What the group was opened with, if it is open."""
        return self._group.settings if self._group is not None and self._group.is_open else None

    @property
    def generation(self) -> int:
        """How many groups were opened so far: a model prepared under another generation is wrapped again.

        One that is no longer fit for torch's collectives counts as over: the next section of them opens another.
        """
        return self._group.generation + self._group.is_spoilt if self._group is not None else 0

    def channel(self, limits: Limits | None = None, settings: GroupSettings | None = None) -> Channel:
        """The way to the other processes; opens the group if it is not open."""
        if self.process.world_size == 1:
            return self._solo
        return self._group_channel(limits, settings)

    def watch(self, kind: str, limits: Limits | None = None, settings: GroupSettings | None = None) -> Watch | Unwatched:
        """For sections in which torch's own collectives run ("backward"); see `comm/engine.py`. Made once, entered often.

        >>> with Runtime(Process()).watch("backward"):
        ...     pass
        """
        if self.process.world_size == 1:
            return Unwatched()
        return Watch(kind, limits or self.limits, lambda: self._group_channel(limits, settings, fit=True))

    def _group_channel(self, limits: Limits | None, settings: GroupSettings | None, *, fit: bool = False) -> GroupChannel:
        if self.child_of is not None:
            raise StateError(
                f"this is a child of process {self.child_of}, which is rank {self.process.rank}: a worker of a DataLoader, "
                "or another process that it started. Children take no part in collectives: call this in the process that was launched."
            )
        with self._lock:
            if self._group is None:
                self._group = Group(self.process, settings or _default_settings())
        try:
            channel = self._group.channel(limits or self.limits, fit=fit)
        except ConfigError:
            self._group = None  # with settings that cannot be used, nothing is open
            raise
        channel.meters = self.meters
        return channel

    def wait_for_everyone(self) -> None:
        """A barrier with the default limits; see `runtime/turns.py`."""
        wait_for_everyone(self.channel(), self.limits)

    def close(self, reason: str) -> None:
        """Closes the group; the next call that needs one opens another."""
        if self._group is not None:
            self._group.close(reason)

    def abandon(self, operation: str, reason: str) -> None:
        """Ends the group although somebody may be in the middle of a call: see `Group.abandon`."""
        if self._group is not None:
            self._group.abandon(operation, reason)

    @property
    def store(self) -> Any:
        """The rendezvous store of several processes; None for a single one, and before the group was first opened."""
        return None if self._group is None else self._group.store

    @property
    def notes(self) -> Notes:
        """Where processes leave notes for each other, outside of any collective; see `runtime/notes.py`."""
        return Notes(None) if self._group is None else self._group.notes

    def others_are_silent(self, seconds: float) -> bool:
        """Whether no other process that this one waits for has shown a sign of life for so long."""
        return self._group is None or self._group.others_are_silent(seconds)

    def end(self, reason: str) -> None:
        """Closes the group and forgets the store."""
        if self._group is not None:
            self._group.end(reason)
            self._group = None


def _default_settings() -> GroupSettings:
    return GroupSettings(backend=best_family(distributed=True).backend)
