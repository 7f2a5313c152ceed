"""Open, close and reopen the process group, and hold what one process of a job shares (`Runtime`).

The rendezvous store is opened once and kept; each opening of the group is a generation with keys of its own, so nothing that a closed
group left behind is read again. A generation has torch's default group with the device's backend, for DDP, the user's own calls and
guarded calls with device memory, and a transport of our own for all other guarded calls. `StoreFlags` are values in the store that ranks
read without a collective, for use after one has failed. `Runtime` opens the group when a collective first needs it; settings belong to
the state objects, so one object never changes another's.
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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

# torch internals: the stubs of torch.distributed do not export these classes (torch 2.13); mypy notices when they do.
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from slipstream.config.sources import environment
from slipstream.devices.table import CPU, Family, default_family, import_plugin
from slipstream.distributed.barriers import barrier
from slipstream.distributed.call_site import call_site
from slipstream.distributed.cluster import Process
from slipstream.distributed.guard import Channel, GroupChannel, Limits
from slipstream.distributed.heartbeat import Heartbeat
from slipstream.distributed.transport import GlooConnections, SocketTransport, connect_sockets, find_neighbours
from slipstream.distributed.wait_monitor import WaitMonitor
from slipstream.distributed.watchdog import NullWatchdog, TorchCollectiveWatchdog
from slipstream.errors import ConfigError, StateError
from slipstream.launch.store import (
    StoreAddress,
    attempt_prefix,
    connect_store,
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
    """Return the store of this job, below the prefix of this attempt."""
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
            address = StoreAddress(process.master_addr, process.master_port)
            connect = partial(connect_store, patience=_CONNECT_TIMEOUT, limit=_ANSWER_TIMEOUT, check=type(None))
            store = connect(address, is_known=process.agent_store)
    return PrefixStore(attempt_prefix(process.run_id, process.attempt), store)


def read_now(store: Any, key: str) -> bytes | None:
    """Return the value of a key, or None, without waiting: `get` waits for a key that another rank has deleted since it was seen.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> store.set("a", "1")
    >>> read_now(store, "a"), read_now(store, "b"), store.check(["b"])
    (b'1', None, False)
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)  # changes nothing, and returns what is there
    return None if value == _ABSENT.encode() else value


def own_address(master_addr: str, environ: Mapping[str, str]) -> str:
    """Return where other machines reach this one: the address of the interface that gloo is told to use, or of the route to rank 0.

    The interface comes first, because a machine's own name often leads to its loopback interface.

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
    """Return a second connection to the same keys, so that a blocking call on one does not stop the other."""
    clone: Any = getattr(store, "clone", None)
    if clone is None:
        return store
    with short_name_lookups(), silence_stderr():
        made: Store = clone()
    return made


class StoreFlags:
    """Values that ranks leave in the store and read without a collective; a process without a store (yet) has none.

    >>> from torch.distributed import HashStore
    >>> flags = StoreFlags(HashStore())
    >>> flags.set("out of memory")
    >>> flags.is_set("out of memory"), flags.is_set("something else")
    (True, False)
    >>> flags.clear("out of memory")
    >>> flags.is_set("out of memory")
    False
    >>> flags.agree("name of the run", "first"), flags.agree("name of the run", "second")
    ('first', 'first')
    >>> flags.append("names", "a "), flags.append("names", "b"), flags.read("names"), flags.read("others")
    (None, None, 'a b', '')
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, name: str) -> None:
        """Set a flag."""
        if self._store is not None:
            self._store.add(f"flag/{name}", 1)  # unlike `set` this waits for the answer: the flag is set when it returns

    def is_set(self, name: str, wait: float = 0.0) -> bool:
        """Whether a flag is set; wait up to so many seconds for it."""
        deadline = time.monotonic() + wait
        while self._store is not None:
            if self._store.check([f"flag/{name}"]):
                return True
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        return False

    def agree(self, name: str, proposal: str) -> str:
        """Return the first proposal that any process made, without waiting; without a store, one's own."""
        if self._store is None:
            return proposal
        agreed: bytes = self._store.compare_set(f"flag/{name}", "", proposal)
        return agreed.decode()

    def append(self, name: str, text: str) -> None:
        """Append to a text that is empty at first."""
        if self._store is not None:
            self._store.append(f"flag/{name}", text)

    def read(self, name: str) -> str:
        """Return what was appended to a text so far, without waiting."""
        found = None if self._store is None else read_now(self._store, f"flag/{name}")
        return "" if found is None else found.decode()

    def clear(self, name: str) -> None:
        """Clear a flag."""
        if self._store is not None:
            self._store.delete_key(f"flag/{name}")


_LOOPBACK = "127.0.0.1"
_OPENING = "opening the process group"
_CLOSE_WAIT_SECONDS = 5.0
"""Seconds that a rank which leaves waits for the others to have connected."""


@dataclass(frozen=True)
class GroupSettings:
    """What torch's default group is opened with."""

    backend: str
    init_method: str | None = None
    by_device: str | None = None
    """The backend for each type of device, where the user named none: "cpu:gloo,..."."""
    device: str | None = None
    """The type of device whose memory the group takes; None for host memory alone."""

    @classmethod
    def of(cls, family: Family, init_method: str | None = None) -> GroupSettings:
        """Return the settings for a device family; imports the module that adds its backend to torch."""
        if family.backend_plugin is not None and family.is_available():
            import_plugin(family.backend_plugin)
        return cls(family.backend, init_method, family.group_backend, None if family is CPU else family.type)


class ProcessGroupManager:
    """The generations of this job's process group, as seen by one process."""

    def __init__(self, process: Process, *, child_of: int | None = None) -> None:
        self.process = process
        self.child_of = child_of
        """The process that has this rank, if this is a child of it."""
        self.store: Store | None = None
        """The rendezvous store, with the keys of this attempt; None before the group was first opened."""
        self._settings: GroupSettings | None = None
        self._heartbeat: Heartbeat | None = None
        self._channel: GroupChannel | None = None
        self._opened = 0
        self._lock = threading.RLock()

    @property
    def is_open(self) -> bool:
        """Whether the group is open now; a single process needs none."""
        return self._channel is not None and self._channel.broken is None

    @property
    def settings(self) -> GroupSettings | None:
        """What the group was opened with, if it is open."""
        return self._settings if self.is_open else None

    @property
    def generation(self) -> int:
        """How many groups were opened so far: a model prepared under another generation is wrapped again.

        A group that is out of step counts as closed: the next section of torch's collectives opens another.
        """
        return self._opened + (self._channel is not None and self._channel.torch_group_desynchronized is not None)

    @property
    def store_flags(self) -> StoreFlags:
        """Values that processes leave for each other outside any collective, whatever generation they are in."""
        return StoreFlags(self.store)

    def others_are_silent(self, seconds: float) -> bool:
        """Whether no other rank that this one waits for has shown a sign of life for so long."""
        return self._heartbeat is None or self._heartbeat.all_missing_silent(seconds)

    def group_channel(self, limits: Limits, settings: GroupSettings | None, *, usable: bool = False) -> GroupChannel:
        """Return the present generation; open one if there is none or the last one broke, and with `usable` also if it is out of step."""
        if self.child_of is not None:
            raise StateError(
                f"this is a child of process {self.child_of}, which is rank {self.process.rank}: a worker of a DataLoader, "
                "or another process that it started. Children take no part in collectives: call this in the process that was launched."
            )
        with self._lock:
            present = self._channel
            if present is not None and (present.broken is not None or (usable and not present.usable)):
                self.close(present.broken or str(present.torch_group_desynchronized))
                if present.unraised is not None:
                    raise present.unraised
            if self._channel is None:
                self._settings = self._settings or settings or GroupSettings.of(default_family(distributed=True))
                try:
                    self._channel = self._open(limits, self._settings)
                except ConfigError:
                    self._settings = None  # these cannot be used
                    raise
            return self._channel

    # -- opening --------------------------------------------------------------------------------------------------

    def _open(self, limits: Limits, settings: GroupSettings) -> GroupChannel:
        process = self.process
        if self.store is None:
            self.store = self._find_store(settings)
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(clone_connection(self.store), process.rank, process.world_size, process.host, os.getpid())
            self._heartbeat.start()
        generation = self._opened + 1
        store = PrefixStore(f"generation/{generation}", self.store)
        self._heartbeat.enter(generation, 0, _OPENING, call_site())
        self._heartbeat.new_generation()
        monitor = WaitMonitor(self._heartbeat, limits)
        connections = GlooConnections(store, process.rank, process.world_size)
        with contextlib.ExitStack() as closing:
            closing.callback(self._heartbeat.leave)
            listener = closing.enter_context(self._listen())
            self._announce(store, listener)
            self._meet(store, monitor)
            self._opened = generation  # used up from here on, whatever happens
            transport = self._connect(store, listener, monitor)
        data = self._default_group(store, limits, settings.by_device or settings.backend, connections)
        store.add("opened", 1)
        return GroupChannel(
            transport=transport,
            data=data,
            disconnect=connections.disconnect,
            recording=connections.recording_subgroups,
            heartbeat=self._heartbeat,
            rank=process.rank,
            world_size=process.world_size,
            generation=generation,
            device=settings.device,
        )

    def _find_store(self, settings: GroupSettings) -> Store:
        if dist.is_initialized():  # the user opened torch's group: meet where it met
            # torch internals: the store of the default group has no public name. Tried on torch 2.13; tests/distributed/test_state.py
            # notices. It can go when torch has a public way to reach it.
            return PrefixStore("slipstream", dist.distributed_c10d._get_default_store())
        if settings.init_method is not None:
            store, _, _ = next(rendezvous(settings.init_method, self.process.rank, self.process.world_size))
            return PrefixStore("slipstream", store)
        return open_store(self.process)

    def _listen(self) -> socket.socket:
        """Listen for the other ranks: on loopback on one machine, else on the interface that leads to rank 0."""
        address = _LOOPBACK if self.process.one_machine else own_address(str(self.process.master_addr), environment())
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=self.process.world_size)

    def _announce(self, store: Store, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        if self.process.rank == 0:
            store.set("token", secrets.token_hex(16))
        store.set(f"address/{self.process.rank}", f"{host} {port}")

    def _meet(self, store: Store, monitor: WaitMonitor) -> None:
        """Wait until every rank is about to open this generation: the rest takes milliseconds."""
        if store.add("arrived", 1) == self.process.world_size:
            store.set("complete", "")
        try:
            for pause in _poll_intervals():
                if store.check(["complete"]):
                    return
                monitor.check()
                time.sleep(pause)
        except BaseException:
            store.add("arrived", -1)  # this rank comes again, or not at all
            raise

    def _connect(self, store: Store, listener: socket.socket, monitor: WaitMonitor) -> SocketTransport:
        rank, world_size = self.process.rank, self.process.world_size
        neighbours = find_neighbours(rank, world_size)
        answers = store.multi_get(["token", *(f"address/{other}" for other in neighbours)])
        token, *places = [answer.decode() for answer in answers]
        addresses = {other: (place.split()[0], int(place.split()[1])) for other, place in zip(neighbours, places, strict=True)}
        return connect_sockets(rank, world_size, listener, addresses, token.encode(), monitor.check)

    def _default_group(self, store: Store, limits: Limits, backend: str, connections: GlooConnections) -> Any:
        if not dist.is_initialized():
            with connections.recording():
                dist.init_process_group(
                    backend,
                    store=PrefixStore("default", store),
                    rank=self.process.rank,
                    world_size=self.process.world_size,
                    timeout=timedelta(seconds=limits.timeout),
                )
            assert dist.group.WORLD is not None
            if dist.group.WORLD.name() == "undefined":
                # torch internals: with several backends of which one is a plugin's, torch compares its name in capitals with the same in
                # small letters, sets no default, and warns when the group is closed. Tried on torch 2.13; tests/testing/
                # test_pool_devices.py notices. It can go when torch compares them alike.
                dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
            connections.abort_backend = dist.group.WORLD.abort
        return dist.group.WORLD

    # -- closing --------------------------------------------------------------------------------------------------

    def leave_to_parent(self, parent: int) -> None:
        """In a forked child, take no part in the group of its parent, and close the connections that the fork has copied.

        Otherwise the child could send and receive in the place of its parent, and ranks would not notice the end of the parent while the
        child lives. Groups and stores of torch stay as they are: their destructors wait for threads that the child does not have.
        """
        self.child_of = parent
        if self._channel is not None:
            self._channel.broken = f"it belongs to process {parent}"
            self._channel.transport.close()

    def close(self, reason: str) -> None:
        """Close the present generation, if there is one, and tell ranks that still wait in it; the store stays open."""
        if self.child_of is not None:
            return
        channel, self._channel = self._channel, None
        if channel is None:
            return
        assert self._heartbeat is not None
        if channel.sequence == 0 and channel.broken is None:
            self._wait_until_opened(channel.generation)
        last = self._heartbeat.position()
        told = {"sequence": channel.sequence, "sections": self._heartbeat.sections, "last": last.call if last.operation else ""}
        self._heartbeat.publish()
        self._heartbeat.post("left", generation=channel.generation, site=reason, **told)
        is_broken = channel.broken is not None
        group = channel.release(reason)
        if is_broken:
            _leak_group(group)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait_until_opened(self, generation: int) -> None:
        """Wait a moment for ranks that are still connecting: gloo is done on one side before the other, which fails if this one leaves.

        After a collective everybody is connected, so only a process that ends before its first one has to wait.
        """
        assert self.store is not None
        store = PrefixStore(f"generation/{generation}", self.store)
        deadline = time.monotonic() + _CLOSE_WAIT_SECONDS
        with contextlib.suppress(RuntimeError):  # the server of the store is gone
            for pause in _poll_intervals():
                if store.add("opened", 0) >= self.process.world_size or time.monotonic() > deadline:
                    return
                time.sleep(pause)

    def abandon(self, operation: str, reason: str) -> None:
        """End the present generation although a rank may be in the middle of a call: every wait in it ends with an error.

        This includes what torch does by itself, such as the backward pass of DDP; the other ranks read `reason`.
        """
        channel = self._channel
        if channel is None or self.child_of is not None:
            return
        assert self._heartbeat is not None
        self._heartbeat.post("gave_up", generation=channel.generation, call=operation, because=reason)
        channel.abort(reason)
        self.close(reason)

    def end(self, reason: str) -> None:
        """Close the group and the store, at the end of the process or of a test."""
        if self.child_of is not None:
            return
        self.close(reason)
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None
        if self.store is not None:
            with contextlib.suppress(RuntimeError):  # the server has left first
                self._leave_store(self.store)
            self.store = None
        self._settings = None

    def _leave_store(self, store: Store) -> None:
        """Leave; a rank that serves the store waits a moment for the others, so that their last messages arrive."""
        gone, deadline = store.add("gone", 1), time.monotonic() + 5.0
        serves = self.process.rank == 0 and not self.process.agent_store
        while serves and gone < self.process.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = store.add("gone", 0)


def _poll_intervals() -> Iterator[float]:
    """Yield short pauses at first, as the others mostly are about to come, then a sixth of what was waited; in the end a few a second."""
    yield from (0.0005 * 1.2**attempt for attempt in range(31))
    yield from itertools.repeat(0.15)


def _leak_group(group: Any) -> None:
    """Keep a group alive until the end of the process.

    The destructor of a group with an operation that never completes would wait for it, holding the GIL.
    """
    # torch internals: one reference too many keeps the destructor from running. Tried on torch 2.13; tests/distributed/test_lost_ranks.py
    # notices. It can go when the destructor of ProcessGroupGloo does not wait for an aborted operation.
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def torch_group_is_open() -> bool:
    """Whether torch's own default group is open, opened by us or by the user."""
    return torch.distributed.is_available() and dist.is_initialized()


_ReplicaValues = Callable[[], Mapping[str, Any]]
"""Gives the values by name that should be the same on every rank."""


class Runtime(ProcessGroupManager):
    """The process group and what the state objects of one process share. There is one per process, held in `current.py`.

    >>> runtime = Runtime(Process())
    >>> runtime.channel().world_size
    1
    """

    def __init__(self, process: Process, limits: Limits | None = None, *, debug: bool = False, child_of: int | None = None) -> None:
        super().__init__(process, child_of=child_of)
        self.debug = debug
        """Whether values that should agree between ranks are compared, where no state object says so."""
        self.limits = limits or Limits()
        """The limits of calls that no state object makes."""
        self.pid = os.getpid()
        self.replicas: dict[str, _ReplicaValues] = {}
        """What `debug` compares between ranks at every barrier."""
        self.memory_watches: list[MemoryWatch] = []
        """Who knows the names of tensors, and where a snapshot of memory goes; see `observability/memory.py`."""
        self.warning_listeners: list[Callable[[str, str], None]] = []
        """Called with the name of the logger and the text of every warning that a logger of `get_logger` emits on this process."""
        self.warned: set[str] = set()
        """Warnings that were given once and are not repeated in this run."""
        self.meters: weakref.WeakSet[Meter] = weakref.WeakSet()
        """Where time in collectives is recorded: one for each ledger."""
        self.ledgers = itertools.count()
        """Numbers for ledgers: the first of each rank belong together, and so on."""
        self.savers = itertools.count()
        """Numbers for what saves checkpoints, in the same way."""
        self.sharded_models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Models that a strategy has sharded, with how: another Accelerator of the script may go on with them."""
        self.parameter_forms: dict[int, tuple[weakref.ref[Any], Any]] = {}
        """Parameters that were replaced when their model was sharded, or put together again, by identity, with what took their place."""
        self.follows_optimizers = False
        """Whether optimizers look for replaced parameters when they step."""
        self._single = Channel()

    def channel(self, limits: Limits | None = None, settings: GroupSettings | None = None) -> Channel:
        """Return the channel to the other processes; open the group if it is not open."""
        if self.process.world_size == 1:
            return self._single
        channel = self.group_channel(limits or self.limits, settings)
        channel.meters = self.meters
        return channel

    def watch(
        self, kind: str, limits: Limits | None = None, settings: GroupSettings | None = None, *, point_to_point: bool = False
    ) -> NullWatchdog:
        """Return a context for sections in which torch's own collectives run ("backward"); see `distributed/watchdog.py`.

        >>> with Runtime(Process()).watch("backward"):
        ...     pass
        """
        if self.process.world_size == 1:
            return NullWatchdog()
        limits = limits or self.limits
        channel = partial(self.group_channel, limits, settings, usable=True)
        return TorchCollectiveWatchdog(kind, limits, channel, point_to_point=point_to_point)

    def wait_for_everyone(self) -> None:
        """Wait for all processes, with the default limits."""
        barrier(self.channel(), self.limits)
