"""The process group of this process: opened when it is first needed, closed and opened again any number of times.

The store stays; each opening is a generation with keys of its own, so nothing that a closed group left behind is ever read. A
generation has two groups: torch's default group with the device's backend (for DDP and for the user's own calls), and a control
group on gloo for the headers of our collectives, whose waits are timed by us.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous

from slipstream.comm.beacon import Beacon
from slipstream.comm.channel import GroupChannel, Limits, wait_in_slices
from slipstream.comm.links import Links
from slipstream.comm.sites import call_site
from slipstream.comm.vigil import Vigil
from slipstream.comm.wire import LARGEST_MESH, Gloo, Wire, connect_sockets
from slipstream.config.sources import environment
from slipstream.runtime.notes import Notes
from slipstream.runtime.process import Process
from slipstream.runtime.store import connect, own_address, second_connection

__all__ = ["Group", "GroupSettings", "torch_group_is_open"]

_LOOPBACK = "127.0.0.1"
_OPENING = "opening the process group"
_LAST_MOMENT = 5.0
"""Seconds that a rank which leaves waits for the others to have connected."""


@dataclass(frozen=True)
class GroupSettings:
    """What torch's default group is opened with."""

    backend: str
    init_method: str | None = None


class Group:
    """The generations of this job's process group, as seen by one process of several."""

    def __init__(self, process: Process, settings: GroupSettings) -> None:
        self.process = process
        self.settings = settings
        self.generation = 0
        self._store: Store | None = None
        self._beacon: Beacon | None = None
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
            self._beacon = Beacon(second_connection(self._store), process.rank, process.world_size, process.host, os.getpid())
            self._beacon.start()
        generation = self.generation + 1
        store = PrefixStore(f"generation/{generation}", self._store)
        self._beacon.enter(generation, 0, _OPENING, call_site())
        self._beacon.new_generation()
        vigil = Vigil(self._beacon, limits)
        links = Links(store, process.rank, process.world_size)
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
        return connect(self.process)

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

    def _meet(self, store: Store, vigil: Vigil) -> None:
        """Waits until every rank is about to open this generation: what follows is then a matter of milliseconds."""
        if store.add("arrived", 1) == self.process.world_size:
            store.set("complete", "")
        try:
            for pause in _pauses():
                if store.check(["complete"]):
                    return
                vigil.look()
                time.sleep(pause)
        except BaseException:
            store.add("arrived", -1)  # the others are not to count on this rank; it comes again, or not at all
            raise

    def _wire(self, store: Store, listener: socket.socket, control: Callable[[], Any], vigil: Vigil) -> Wire:
        world_size = self.process.world_size
        if world_size > LARGEST_MESH:
            return Gloo(control(), world_size, wait_in_slices)
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

    def _default_group(self, store: Store, limits: Limits, links: Links) -> Any:
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
            _keep_forever(groups)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait_until_opened(self, generation: int) -> None:
        """Waits a moment for ranks that are still connecting: gloo is done on one side before the other, which fails if this one leaves.

        A collective tells that everybody was connected, so only a process that ends before its first one has to ask.
        """
        assert self._store is not None
        store = PrefixStore(f"generation/{generation}", self._store)
        deadline = time.monotonic() + _LAST_MOMENT
        try:
            for pause in _pauses():
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
    def notes(self) -> Notes:
        """What ranks leave for each other in the store, whatever generation they are in."""
        return Notes(self._store)

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


def _pauses() -> Iterator[float]:
    """Short looks at first, as the others are mostly about to come; then a few a second."""
    yield from (0.0005 * 1.5**attempt for attempt in range(14))
    yield from itertools.repeat(0.15)


def _keep_forever(groups: tuple[Any, ...]) -> None:
    """A group with an operation that never completes must not be destroyed: its destructor would wait for it, holding the GIL."""
    for group in filter(None, groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def torch_group_is_open() -> bool:
    """Whether torch's own default group is open, by us or by the user."""
    return torch.distributed.is_available() and dist.is_initialized()
