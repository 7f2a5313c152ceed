"""Open, close and reopen the process group, and hold what one process of a job shares (`Runtime`).

The rendezvous store is opened once and kept; each opening of the group is a generation with keys of its own, so nothing that a closed
group left behind is read again. A generation has torch's default group with the device's backend, for DDP and the user's own calls, and a
gloo group with our own transport for guarded calls. `StoreFlags` are values in the store that ranks read without a collective, for use
after one has failed. `Runtime` opens the group when a collective first needs it; settings belong to the state objects, so one object
never changes another's.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous

from slipstream.config.sources import environment
from slipstream.devices.table import best_family
from slipstream.distributed.barriers import wait_for_everyone
from slipstream.distributed.call_site import call_site
from slipstream.distributed.cluster import Process
from slipstream.distributed.guard import Channel, GroupChannel, Limits, SingleProcessChannel, wait_in_slices
from slipstream.distributed.heartbeat import Heartbeat
from slipstream.distributed.transport import MAX_SOCKET_RANKS, GlooConnections, GlooTransport, Transport, connect_sockets
from slipstream.distributed.wait_monitor import WaitMonitor
from slipstream.distributed.watchdog import NullWatchdog, TorchCollectiveWatchdog
from slipstream.errors import ConfigError, StateError
from slipstream.launch.store import (
    StoreAddress,
    attempt_prefix,
    connect_store as connect_to,
    local_address_towards,
    open_listener,
    serve_store,
    short_name_lookups,
    silence_stderr,
)

if TYPE_CHECKING:
    from slipstream.observability.memory import MemoryWatch
    from slipstream.observability.timing.meter import Meter

__all__ = [
    "GroupSettings", "ProcessGroupManager", "Runtime", "StoreFlags", "clone_connection", "open_store", "own_address", "read_now",
    "torch_group_is_open",
]


_ABSENT = "\0absent"
"""What no value of ours is."""

_CONNECT_TIMEOUT = 120.0
"""Seconds that rank 0 may take to appear."""
_ANSWER_TIMEOUT = 300.0
"""Seconds without an answer after which a connection counts as lost."""


def open_store(process: Process) -> Store:
    """The store of this job, below the prefix of this attempt."""
    if process.master_addr is None or process.master_port is None:
        raise StateError(
            f"this is process {process.rank} of {process.world_size} (told by {process.cluster}), but nothing says where they meet: "
            "set MASTER_ADDR and MASTER_PORT, or start the script with `slipstream launch`"
        )
    with short_name_lookups():
        if process.rank == 0 and not process.agent_store:
            host = "127.0.0.1" if process.one_machine else process.master_addr
            store: Store = serve_store(*open_listener(host, process.master_port, "MASTER_PORT"))
        else:
            store = connect_to(
                StoreAddress(process.master_addr, process.master_port), patience=_CONNECT_TIMEOUT, limit=_ANSWER_TIMEOUT, check=_do_nothing
            )
    return PrefixStore(attempt_prefix(process.run_id, process.attempt), store)


def read_now(store: Any, key: str) -> bytes | None:
    """The value of a key, or None; never a wait, as `get` is for a key that another rank has deleted since it was seen.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> store.set("a", "1")
    >>> read_now(store, "a"), read_now(store, "b"), store.check(["b"])
    (b'1', None, False)
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)  # which changes nothing, and gives what is there
    return None if value == _ABSENT.encode() else value


def _do_nothing() -> None:
    return None


def own_address(master_addr: str, environ: Mapping[str, str]) -> str:
    """Where other machines reach this one: the address of the interface that gloo is told to use, or of the way to the main process.

    The interface counts for more, as a machine's own name often leads to its loopback interface.

    >>> own_address("127.0.0.1", {})
    '127.0.0.1'
    """
    import psutil

    name = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    entries = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        found = [entry.address for entry in entries if entry.family == family and "%" not in entry.address]
        if found:
            return str(found[0])
    return local_address_towards(master_addr)


def clone_connection(store: Store) -> Store:
    """A connection of its own to the same keys, so that a blocking call on one does not stop the other."""
    clone: Any = getattr(store, "clone", None)
    if clone is None:
        return store
    with short_name_lookups(), silence_stderr():
        made: Store = clone()
    return made


class StoreFlags:
    """The notes of a job; without a store (one process, or none opened yet) there are none.

    >>> from torch.distributed import HashStore
    >>> notes = StoreFlags(HashStore())
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


_LOOPBACK = "127.0.0.1"
_OPENING = "opening the process group"
_CLOSE_WAIT_SECONDS = 5.0
"""Seconds that a rank which leaves waits for the others to have connected."""


@dataclass(frozen=True)
class GroupSettings:
    """What torch's default group is opened with."""

    backend: str
    init_method: str | None = None


class ProcessGroupManager:
    """The generations of this job's process group, as seen by one process of several."""

    def __init__(self, process: Process, settings: GroupSettings) -> None:
        self.process = process
        self.settings = settings
        self.generation = 0
        self._store: Store | None = None
        self._beacon: Heartbeat | None = None
        self._channel: GroupChannel | None = None
        self._lock = threading.RLock()

    @property
    def is_open(self) -> bool:
        return self._channel is not None and self._channel.broken is None

    @property
    def is_spoilt(self) -> bool:
        """Whether torch's own collectives no longer match in the present generation: models have to be prepared for the next."""
        return self._channel is not None and self._channel.spoilt is not None

    def channel(self, limits: Limits, *, fit: bool = False) -> GroupChannel:
        """The present generation; opens one if there is none or the last one broke, and with `fit` also if it is spoilt."""
        with self._lock:
            if self._channel is not None and (self._channel.broken is not None or (fit and self._channel.spoilt is not None)):
                self.close(self._channel.broken or str(self._channel.spoilt))
            if self._channel is None:
                self._channel = self._open(limits)
            return self._channel

    # -- opening --------------------------------------------------------------------------------------------------

    def _open(self, limits: Limits) -> GroupChannel:
        process = self.process
        if self._store is None:
            self._store = self._find_store()
        if self._beacon is None:
            self._beacon = Heartbeat(clone_connection(self._store), process.rank, process.world_size, process.host, os.getpid())
            self._beacon.start()
        generation = self.generation + 1
        store = PrefixStore(f"generation/{generation}", self._store)
        self._beacon.enter(generation, 0, _OPENING, call_site())
        self._beacon.new_generation()
        vigil = WaitMonitor(self._beacon, limits)
        links = GlooConnections(store, process.rank, process.world_size)
        with contextlib.ExitStack() as closing:
            closing.callback(self._beacon.leave)
            listener = closing.enter_context(self._listen())
            self._announce(store, listener)
            self._meet(store, vigil)
            self.generation = generation  # from here on it is spent, whatever happens
            control = cache(partial(self._control_group, store, limits))  # a second one would meet at the addresses of the first
            wire = self._wire(store, listener, control, vigil)
        data = self._default_group(store, limits, links)
        store.add("opened", 1)
        return GroupChannel(
            wire=wire,
            control=control,
            data=data,
            sever=links.sever,
            beacon=self._beacon,
            rank=process.rank,
            world_size=process.world_size,
            generation=generation,
        )

    def _find_store(self) -> Store:
        if dist.is_initialized():  # the user opened torch's group: meet where it met
            return PrefixStore("slipstream", dist.distributed_c10d._get_default_store())
        if self.settings.init_method is not None:
            store, _, _ = next(rendezvous(self.settings.init_method, self.process.rank, self.process.world_size))
            return PrefixStore("slipstream", store)
        return open_store(self.process)

    def _listen(self) -> socket.socket:
        """Where the other ranks connect to: loopback on one machine, else the interface that leads to the main process."""
        address = _LOOPBACK if self.process.one_machine else own_address(str(self.process.master_addr), environment())
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=self.process.world_size)

    def _announce(self, store: Store, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        if self.process.rank == 0:
            store.set("token", secrets.token_hex(16))
        store.set(f"address/{self.process.rank}", f"{host} {port}")

    def _meet(self, store: Store, vigil: WaitMonitor) -> None:
        """Waits until every rank is about to open this generation: what follows is then a matter of milliseconds."""
        if store.add("arrived", 1) == self.process.world_size:
            store.set("complete", "")
        try:
            for pause in _poll_intervals():
                if store.check(["complete"]):
                    return
                vigil.look()
                time.sleep(pause)
        except BaseException:
            store.add("arrived", -1)  # the others are not to count on this rank; it comes again, or not at all
            raise

    def _wire(self, store: Store, listener: socket.socket, control: Callable[[], Any], vigil: WaitMonitor) -> Transport:
        world_size = self.process.world_size
        if world_size > MAX_SOCKET_RANKS:
            return GlooTransport(control(), world_size, wait_in_slices)
        answers = store.multi_get(["token", *(f"address/{rank}" for rank in range(world_size))])
        token, *places = [answer.decode() for answer in answers]
        addresses = {rank: (place.split()[0], int(place.split()[1])) for rank, place in enumerate(places)}
        return connect_sockets(self.process.rank, listener, addresses, token.encode(), vigil.look)

    def _control_group(self, store: Store, limits: Limits) -> Any:
        """The gloo group for large payloads: our own vigil decides how long a wait may take, so its limit is a longer one."""
        limit = timedelta(seconds=max(limits.timeout, 1800.0) + 60.0)
        place = PrefixStore("control", store), self.process.rank, self.process.world_size
        if not self.process.one_machine:
            return ProcessGroupGloo(*place, limit)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        return ProcessGroupGloo(*place, options)

    def _default_group(self, store: Store, limits: Limits, links: GlooConnections) -> Any:
        if not dist.is_initialized():
            with links.recording():
                dist.init_process_group(
                    self.settings.backend,
                    store=PrefixStore("default", store),
                    rank=self.process.rank,
                    world_size=self.process.world_size,
                    timeout=timedelta(seconds=limits.timeout),
                )
            assert dist.group.WORLD is not None
            links.also(dist.group.WORLD.abort)
        return dist.group.WORLD

    # -- closing --------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Closes the present generation, if there is one, and tells ranks that still wait in it; the store stays."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        assert self._beacon is not None
        if channel.sequence == 0 and channel.broken is None:
            self._wait_until_opened(channel.generation)
        last = self._beacon.place()
        told = {"sequence": channel.sequence, "sections": self._beacon.sections, "last": last.call if last.operation else ""}
        self._beacon.publish()
        self._beacon.post("left", generation=channel.generation, site=reason, **told)
        is_broken = channel.broken is not None
        groups = channel.release(reason)
        if is_broken:
            _leak_groups(groups)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait_until_opened(self, generation: int) -> None:
        """Waits a moment for ranks that are still connecting: gloo is done on one side before the other, which fails if this one leaves.

        A collective tells that everybody was connected, so only a process that ends before its first one has to ask.
        """
        assert self._store is not None
        store = PrefixStore(f"generation/{generation}", self._store)
        deadline = time.monotonic() + _CLOSE_WAIT_SECONDS
        try:
            for pause in _poll_intervals():
                if store.add("opened", 0) >= self.process.world_size or time.monotonic() > deadline:
                    return
                time.sleep(pause)
        except RuntimeError:  # the server of the store is gone, and with it those who served it
            return

    def abandon(self, operation: str, reason: str) -> None:
        """Ends the present generation although somebody may be in the middle of it: every wait in it ends with an error.

        That is true of what torch does by itself, too, such as the backward pass of DDP; the other ranks read `reason`.
        """
        channel = self._channel
        if channel is None:
            return
        assert self._beacon is not None
        self._beacon.post("gave_up", generation=channel.generation, call=operation, because=reason)
        channel.give_up(reason)
        self.close(reason)

    @property
    def store(self) -> Store | None:
        """The rendezvous store, with the keys of this attempt; None before the group was first opened."""
        return self._store

    @property
    def notes(self) -> StoreFlags:
        """What ranks leave for each other in the store, whatever generation they are in."""
        return StoreFlags(self._store)

    def others_are_silent(self, seconds: float) -> bool:
        """Whether no other rank that we wait for has shown a sign of life for so long."""
        return self._beacon is None or self._beacon.all_missing_silent(seconds)

    def end(self, reason: str) -> None:
        """Closes the group and the store: for the end of the process, or of a test."""
        self.close(reason)
        if self._beacon is not None:
            self._beacon.stop()
            self._beacon = None
        if self._store is not None:
            self._leave_store(self._store)
            self._store = None

    def _leave_store(self, store: Store) -> None:
        """A rank that serves the store waits a moment for the others, so that their last words find it."""
        try:
            gone = store.add("gone", 1)
            deadline = time.monotonic() + 5.0
            while (
                self.process.rank == 0 and not self.process.agent_store and gone < self.process.world_size and time.monotonic() < deadline
            ):
                time.sleep(0.02)
                gone = store.add("gone", 0)
        except RuntimeError:  # the server has left before us, which is what this rank is about to do
            return


def _poll_intervals() -> Iterator[float]:
    """Short looks at first, as the others are mostly about to come; then a few a second."""
    yield from (0.0005 * 1.5**attempt for attempt in range(14))
    yield from itertools.repeat(0.15)


def _leak_groups(groups: tuple[Any, ...]) -> None:
    """A group with an operation that never completes must not be destroyed: its destructor would wait for it, holding the GIL."""
    for group in filter(None, groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def torch_group_is_open() -> bool:
    """Whether torch's own default group is open, by us or by the user."""
    return torch.distributed.is_available() and dist.is_initialized()


_ReplicaValues = Callable[[], Mapping[str, Any]]
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
        self.replicas: dict[str, _ReplicaValues] = {}
        """What `debug` compares between ranks at every barrier."""
        self.memory_watches: list[MemoryWatch] = []
        """Who knows what tensors are called, and where a snapshot of memory goes; see `observability/memory.py`."""
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
        self._solo = SingleProcessChannel()
        self._lock = threading.Lock()
        self._group: ProcessGroupManager | None = None

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

    def watch(
        self, kind: str, limits: Limits | None = None, settings: GroupSettings | None = None
    ) -> TorchCollectiveWatchdog | NullWatchdog:
        """For sections in which torch's own collectives run ("backward"); see `distributed/watchdog.py`. Made once, entered often.

        >>> with Runtime(Process()).watch("backward"):
        ...     pass
        """
        if self.process.world_size == 1:
            return NullWatchdog()
        return TorchCollectiveWatchdog(kind, limits or self.limits, lambda: self._group_channel(limits, settings, fit=True))

    def _group_channel(self, limits: Limits | None, settings: GroupSettings | None, *, fit: bool = False) -> GroupChannel:
        if self.child_of is not None:
            raise StateError(
                f"this is a child of process {self.child_of}, which is rank {self.process.rank}: a worker of a DataLoader, "
                "or another process that it started. Children take no part in collectives: call this in the process that was launched."
            )
        with self._lock:
            if self._group is None:
                self._group = ProcessGroupManager(self.process, settings or _default_settings())
        try:
            channel = self._group.channel(limits or self.limits, fit=fit)
        except ConfigError:
            self._group = None  # with settings that cannot be used, nothing is open
            raise
        channel.meters = self.meters
        return channel

    def wait_for_everyone(self) -> None:
        """A barrier with the default limits; see `distributed/barriers.py`."""
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
    def notes(self) -> StoreFlags:
        """Where processes leave notes for each other, outside of any collective; see `distributed/process_group.py`."""
        return StoreFlags(None) if self._group is None else self._group.notes

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
