"""Carry what guarded calls exchange over sockets of our own, and close the connections of torch's gloo group when a wait cannot end.

A rank has a connection to the ranks at the distances 1, 2, 4, 8, ... on both sides. `SocketTransport.exchange` compares the fingerprints
of all ranks in as many hops as their number has binary digits, and takes small bodies along; larger ones follow along the ring of
neighbours, straight into the memory that the caller gives. In every hop a rank sends and receives at the same time, so no amount of data
makes two ranks wait for each other. A plain socket is faster than waking gloo's sleeping threads, an exchange can be abandoned by closing
it, and the end of a connection names the rank.

`GlooConnections` records the sockets that appear while torch opens its group, and shuts them down on request, so that a thread that waits
in gloo wakes up. Listening sockets are not touched, and groups that the program opened itself are left alone.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import select
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple

import numpy

__all__ = [
    "ALIGNMENT", "ConnectionLost", "Exchanged", "GlooConnections", "Inline", "SocketTransport", "WaitCallback", "connect_sockets",
    "find_neighbours",
]


WaitCallback = Callable[[], None]
"""Called several times a second while waiting; raises to end the wait."""
_Array = Any
"""A one-dimensional numpy array of bytes."""
_WAIT_SECONDS = 0.2
_INLINE_LIMIT = 1 << 18
"""The largest body that travels with the fingerprints: beyond it, receiving it where it stays saves more than the second exchange costs."""
_INLINE_TOTAL = 1 << 24
"""The most that the bodies of all ranks take together when they travel with the fingerprints."""
_READ_AHEAD = 1 << 16
_RELAY_BYTES = 1 << 22
"""What a rank holds of a stream that is meant for another rank."""
_REDUCED_BYTES = 1 << 20
"""How much of a sum is received before it is added: it stays in the cache."""
_MOST_VIEWS = 64
_HELLO = struct.Struct("<32sI")
_HELLO_SECONDS = 5.0
"""How long a caller may take to say who it is."""

_MARK = 0x534C5032
_HEADER = struct.Struct("<II24sQQ")
"""Format mark, whether ranks behind this message differ, fingerprint, size of the table, size of the bodies behind it."""
_ENTRY = struct.Struct("<IIQ")
"""A rank that has a body: the rank, how many bytes of it are in this message and whether these are all, and how many follow if not."""
_WHOLE = 1 << 31
ALIGNMENT = 16
"""Every body in a message begins at a multiple of this, so that a tensor of any type may begin there."""
_EMPTY = numpy.empty(0, dtype=numpy.uint8)


def find_neighbours(rank: int, world_size: int) -> list[int]:
    """Return the ranks that this one has a connection to.

    >>> find_neighbours(0, 2), find_neighbours(1, 16), len(find_neighbours(5, 16384))
    ([1], [0, 2, 3, 5, 9, 13, 15], 27)
    """
    return sorted({(rank + side * distance) % world_size for distance in _distances(world_size) for side in (1, -1)})


def _distances(world_size: int) -> list[int]:
    return [1 << power for power in range((world_size - 1).bit_length())]


class ConnectionLost(Exception):
    """The connection to another rank ended; `rank` is None where it cannot be told which."""

    def __init__(self, rank: int | None, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank


class Inline(NamedTuple):
    """What a rank sends of its body with the fingerprint."""

    data: bytearray
    """It ends at a multiple of `ALIGNMENT`, so that what follows it is aligned too."""
    size: int
    is_whole: bool


class Exchanged(NamedTuple):
    """What an exchange has brought, by rank."""

    agreed: bool
    """Whether all ranks had the same fingerprint; the same answer on all of them."""
    complete: bool
    """Whether every body has arrived whole."""
    bodies: list[_Array]
    """What has arrived of each body."""
    following: list[int]
    """How many bytes each rank sends if the bodies are not complete."""


class SocketTransport:
    """The connections of one rank to its neighbours; one thread at a time uses it."""

    def __init__(self, rank: int, world_size: int, connections: Mapping[int, socket.socket]) -> None:
        self.max_inline_bytes = min(_INLINE_LIMIT, _INLINE_TOTAL // world_size)
        """The largest body that is sent with the fingerprint."""
        self._rank = rank
        self._world_size = world_size
        self._peers = {other: _Peer(other, connection) for other, connection in sorted(connections.items())}
        self._hops = [
            _Hop(self._peers[(rank - distance) % world_size], self._peers[(rank + distance) % world_size], distance)
            for distance in _distances(world_size)
        ]
        self._hangups = select.poll()
        for connection in connections.values():
            self._hangups.register(connection, getattr(select, "POLLRDHUP", 0))  # elsewhere than on Linux only an error shows

    # -- small: with the fingerprint, to everybody ----------------------------------------------------------------

    def exchange(self, fingerprint: bytes, inline: Inline, following: int, check: WaitCallback) -> Exchanged:
        """Compare the fingerprints of all ranks, and bring every rank what the others have inlined.

        Before the hop over a distance, a rank knows so many ranks, from itself on; after it, twice as many. Of these it sends whether
        they agree, and their bodies, so that the messages of ranks without a body do not grow with the number of ranks.
        `following` is how many bytes this rank will send if the body of any rank is not whole.
        """
        has_body = inline.size or following
        table = _ENTRY.pack(self._rank, inline.size | (_WHOLE if inline.is_whole else 0), following) if has_body else b""
        bodies: list[Any] = [inline.data] if inline.size else []
        differs = False
        for hop in self._hops:
            wanted = self._world_size - hop.distance
            sent = (table, bodies) if hop.distance <= wanted else self._cut(table, bodies, wanted)
            header = _HEADER.pack(_MARK, differs, fingerprint, len(sent[0]), sum(map(len, sent[1])))
            message = _Message()
            hop.transfer(_Outgoing([header + sent[0], *sent[1]]), message.read(), check)
            differs = differs or message.differs or message.fingerprint != fingerprint
            table += message.table
            if len(message.bodies):
                bodies.append(message.bodies)
        return self._by_rank(not differs, table, bodies)

    def _cut(self, table: bytes, bodies: list[Any], wanted: int) -> tuple[bytes, list[Any]]:
        """Return what is known of the first so many ranks: the last hop would bring ranks twice if their number is no power of two."""
        entries = [(inline & ~_WHOLE, (rank - self._rank) % self._world_size < wanted) for rank, inline, _ in _ENTRY.iter_unpack(table)]
        kept = sum(is_wanted for _, is_wanted in entries)
        size = sum(_room(inline) for inline, is_wanted in entries if is_wanted)
        return table[: kept * _ENTRY.size], _first_bytes(bodies, size)

    def _by_rank(self, agreed: bool, table: bytes, bodies: list[Any]) -> Exchanged:
        found, following = [_EMPTY] * self._world_size, [0] * self._world_size
        parts = iter(bodies)
        part, position, complete = _EMPTY, 0, True
        for rank, inline, rest in _ENTRY.iter_unpack(table):
            size = inline & ~_WHOLE
            complete = complete and inline >= _WHOLE
            following[rank] = rest
            if size:
                while position == len(part):
                    part, position = numpy.frombuffer(next(parts), dtype=numpy.uint8), 0
                found[rank] = part[position : position + size]
                position += _room(size)
        return Exchanged(agreed, complete, found, following)

    # -- large: along the ring ------------------------------------------------------------------------------------

    def all_gather(self, own: Sequence[_Array], places: Sequence[Sequence[_Array]], check: WaitCallback) -> None:
        """Send `own` to all ranks, and receive what they send in the places of each; that of this rank is not written."""
        incoming = [place for distance in range(1, self._world_size) for place in places[(self._rank + distance) % self._world_size]]
        passed_on = [place for distance in range(1, self._world_size - 1) for place in places[(self._rank + distance) % self._world_size]]
        self._hops[0].transfer(_Outgoing([*own, *passed_on], ready=sum(map(len, own))), iter(incoming), check)

    def all_reduce(self, data: _Array, add: Callable[[slice, _Array], None], check: WaitCallback, unit: int) -> None:
        """Combine the data of all ranks in place, in units of so many bytes that belong together.

        Each rank ends up with one share of the sum: the share of a rank begins at the rank before it and goes round the ring, and every
        rank on its way adds its own to it with `add(where, received)`. Then the shares are gathered. So all ranks get the same bits.
        """
        world, size = self._world_size, len(data) // unit
        shares = [slice(rank * size // world * unit, (rank + 1) * size // world * unit) for rank in range(world)]
        piece = max(1, _REDUCED_BYTES // unit) * unit
        received = numpy.empty(min(piece, len(data)), dtype=numpy.uint8)

        def add_pieces(share: slice) -> Iterator[_Array]:
            for start in range(share.start, share.stop, piece):
                where = slice(start, min(start + piece, share.stop))
                yield received[: where.stop - start]
                add(where, received[: where.stop - start])

        for step in range(1, world):
            sent, taken = shares[(self._rank + step) % world], shares[(self._rank + step + 1) % world]
            self._hops[0].transfer(_Outgoing([data[sent]]), add_pieces(taken), check)
        self.all_gather([data[shares[self._rank]]], [[data[share]] for share in shares], check)

    def broadcast(self, places: Sequence[_Array], sender: int, check: WaitCallback) -> None:
        """Send the places of one rank to the others, each of which passes on what it has received."""
        is_sender, is_last = self._rank == sender, (self._rank - 1) % self._world_size == sender
        outgoing = _Outgoing([] if is_last else places, ready=None if is_sender else 0)
        self._hops[0].transfer(outgoing, iter([] if is_sender else places), check)

    def gather_at(self, receiver: int, places: Sequence[Sequence[_Array]], check: WaitCallback) -> None:
        """Receive what all other ranks send here with `gather_to`."""
        incoming = [place for distance in range(1, self._world_size) for place in places[(receiver + distance) % self._world_size]]
        self._hops[0].transfer(_Outgoing([]), iter(incoming), check)

    def gather_to(self, receiver: int, own: Sequence[_Array], following: Sequence[int], check: WaitCallback) -> None:
        """Send `own` towards one rank, and pass on what the ranks behind this one send there."""
        hop = self._hops[0]
        hop.transfer(_Outgoing(own), iter(()), check)
        own_distance = (self._rank - receiver) % self._world_size
        behind = sum(following[(receiver + distance) % self._world_size] for distance in range(own_distance + 1, self._world_size))
        held = memoryview(bytearray(min(behind, _RELAY_BYTES)))
        for start in range(0, behind, _RELAY_BYTES):
            part = held[: behind - start]
            hop.transfer(_Outgoing([part], ready=0), iter([part]), check)

    # -- the end --------------------------------------------------------------------------------------------------

    def ended(self) -> bool:
        """Whether a neighbour has closed its end by now, after what was received."""
        return bool(self._hangups.poll(0))

    def close(self) -> None:
        for peer in self._peers.values():
            peer.connection.close()


def _room(size: int) -> int:
    """Return how many bytes a body takes in a message."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _first_bytes(parts: Iterable[Any], size: int) -> list[Any]:
    found = []
    for part in parts:
        if size > 0:
            found.append(memoryview(part)[:size])
            size -= len(part)
    return found


class _Message:
    """A message of an exchange, as it is received."""

    differs = False
    fingerprint = b""
    table = b""
    bodies: Any = b""

    def read(self) -> Iterator[Any]:
        """Yield buffers to be filled, each when the one before is full."""
        header = bytearray(_HEADER.size)
        yield header
        mark, differs, self.fingerprint, table_size, bodies_size = _HEADER.unpack(header)
        if mark != _MARK:
            raise ValueError("another process sent something that is not a header: do all of them run the same version of slipstream?")
        self.differs = bool(differs)
        if table_size:
            table = bytearray(table_size)
            yield table
            self.table = bytes(table)
        if bodies_size:
            self.bodies = numpy.empty(bodies_size, dtype=numpy.uint8)
            yield self.bodies


class _Outgoing:
    """Bytes to be sent, from several buffers; with `ready`, only so many at first, and as many more as are received."""

    def __init__(self, views: Sequence[Any], ready: int | None = None) -> None:
        self._views = deque(memoryview(view) for view in views if len(view))
        self.unsent = sum(map(len, self._views))
        self.ready = self.unsent if ready is None else ready

    def send(self, peer: _Peer) -> bool:
        """Send what the connection takes; return whether it took anything."""
        room = min(self.ready, self.unsent)
        if not room:
            return False
        batch = []
        for view in islice(self._views, _MOST_VIEWS):
            batch.append(view[:room])
            room -= len(batch[-1])
            if not room:
                break
        sent = peer.send(batch)
        self.unsent -= sent
        self.ready -= sent
        rest = sent
        while rest:
            first = self._views.popleft()
            if rest < len(first):
                self._views.appendleft(first[rest:])
            rest -= min(rest, len(first))
        return sent > 0


class _Peer:
    """The connection to one rank, and what has arrived of what comes next."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self.rank = rank
        self.connection = connection
        self._buffer = memoryview(bytearray(_READ_AHEAD))
        self._arrived = self._buffer[:0]

    def send(self, views: list[memoryview]) -> int:
        try:
            return self.connection.sendmsg(views)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(self.rank, str(error)) from None

    def receive(self, view: memoryview) -> int:
        """Put what has arrived into a buffer, and return how much that is; small parts of what comes next are read ahead."""
        if not self._arrived:
            if len(view) >= _READ_AHEAD:
                return self._receive(view)
            self._arrived = self._buffer[: self._receive(self._buffer)]
        size = min(len(view), len(self._arrived))
        view[:size] = self._arrived[:size]
        self._arrived = self._arrived[size:]
        return size

    def _receive(self, view: memoryview) -> int:
        try:
            size = self.connection.recv_into(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(self.rank, str(error)) from None
        if not size:
            raise ConnectionLost(self.rank, "closed by the other side")
        return size


class _Hop:
    """Sends to the rank at a distance before this one while it receives from the rank at that distance behind."""

    def __init__(self, target: _Peer, source: _Peer, distance: int) -> None:
        self.distance = distance
        self._target = target
        self._source = source
        self._polls = {(sending, receiving): self._poll(sending, receiving) for sending in (False, True) for receiving in (False, True)}

    def _poll(self, sending: bool, receiving: bool) -> select.poll:
        found = select.poll()
        events = {self._target.connection: select.POLLOUT * sending}
        events[self._source.connection] = events.get(self._source.connection, 0) | select.POLLIN * receiving
        for connection, wanted in events.items():
            if wanted:
                found.register(connection, wanted)
        return found

    def transfer(self, outgoing: _Outgoing, incoming: Iterator[Any], check: WaitCallback) -> None:
        """Send all of `outgoing` and fill every buffer of `incoming`, both at once."""
        view = _next_view(incoming)
        next_check = time.monotonic() + _WAIT_SECONDS
        while True:
            moved = outgoing.send(self._target)
            if view is not None and (received := self._source.receive(view)):
                moved = True
                outgoing.ready += received
                view = view[received:] or _next_view(incoming)
            if view is None and not outgoing.unsent:
                return
            if not moved:
                self._polls[outgoing.ready > 0 and outgoing.unsent > 0, view is not None].poll(_WAIT_SECONDS * 1000)
                if time.monotonic() >= next_check:
                    check()
                    next_check = time.monotonic() + _WAIT_SECONDS


def _next_view(incoming: Iterator[Any]) -> memoryview | None:
    return next((memoryview(buffer) for buffer in incoming if len(buffer)), None)


def connect_sockets(
    rank: int,
    world_size: int,
    listener: socket.socket,
    addresses: Mapping[int, tuple[str, int]],
    token: bytes,
    check: WaitCallback,
) -> SocketTransport:
    """Connect this rank to its neighbours, of which these are the addresses: it connects to lower ranks and accepts higher ones.

    Whoever connects sends the token of this job first; any other connection is closed.
    """
    connections: dict[int, socket.socket] = {}
    for other, address in addresses.items():
        if other < rank:
            connections[other] = socket.create_connection(address, timeout=30.0)
            connections[other].sendall(_HELLO.pack(token, rank))
    listener.settimeout(_WAIT_SECONDS)
    while len(connections) < len(addresses):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            check()
            continue
        other = _accept_peer(connection, token)
        if other in addresses and other not in connections:
            connections[other] = connection
        else:
            connection.close()
    return SocketTransport(rank, world_size, connections)


def _accept_peer(connection: socket.socket, token: bytes) -> int:
    """Return the rank of a caller that knows the token, and -1 for any other."""
    deadline = time.monotonic() + _HELLO_SECONDS
    hello = b""
    try:
        while len(hello) < _HELLO.size:
            connection.settimeout(max(0.001, deadline - time.monotonic()))  # of all parts together: the others wait meanwhile
            data = connection.recv(_HELLO.size - len(hello))
            if not data:
                break
            hello += data
        shown, other = _HELLO.unpack(hello)
    except (OSError, struct.error):  # it says nothing in time, or hangs up
        return -1
    return int(other) if hmac.compare_digest(shown, token) else -1


class _Connection(NamedTuple):
    descriptor: int
    inode: int
    ends: tuple[str, str]
    """This side and the other, as text."""


class GlooConnections:
    """The connections of one generation's default group; `disconnect` shuts them down."""

    # torch internals: gloo tells neither which sockets it opened nor how to wake a thread that waits in it (neither destroying nor
    # aborting its group does), so its connections are found among the open descriptors of this process, by inode, and shut down. Tried on
    # torch 2.13; tests/distributed/test_watchdog.py notices. It can go when ProcessGroupGloo.abort() ends a wait.

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._connections: list[_Connection] = []
        self._of_subgroups: list[_Connection] = []
        self.abort_backend: Callable[[], object] = type(None)
        """Ends the operations of backends that can end them; gloo cannot."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what torch connects inside the block."""
        before = {connection.inode for connection in _list_connections()}
        yield
        found = [connection for connection in _list_connections() if connection.inode not in before]
        self._store.set(f"links/{self._rank}", json.dumps([connection.ends for connection in found]))
        self._connections = found if len(found) < self._world_size else self._confirm(found)

    @contextmanager
    def recording_subgroups(self) -> Iterator[None]:
        """Record what torch connects for groups of some of the ranks; `disconnect` shuts these down too."""
        before = {connection.inode for connection in _list_connections()}
        yield
        self._of_subgroups += [connection for connection in _list_connections() if connection.inode not in before]

    def disconnect(self) -> bool:
        """Shut the connections down, so that whoever waits on them fails, here and there; return whether all of them are known."""
        for known in self._connections + self._of_subgroups:
            with suppress(OSError), _duplicate_socket(known.descriptor) as connection:  # closed already, or ended by the other side
                if os.fstat(connection.fileno()).st_ino == known.inode:
                    connection.shutdown(socket.SHUT_RDWR)
        self.abort_backend()
        return len(self._connections) >= self._world_size - 1  # more, where the backend of a device has connections of its own

    def _confirm(self, found: list[_Connection]) -> list[_Connection]:
        """Return those that another rank has recorded as well: other threads may have connected something at the same time."""
        keys = [f"links/{rank}" for rank in range(self._world_size) if rank != self._rank]
        try:
            self._store.wait(keys, timedelta(seconds=10))
        except RuntimeError:  # a rank has ended right after it opened the group: nothing is certain, so nothing is touched
            return []
        others = {(there, here) for data in self._store.multi_get(keys) for here, there in json.loads(data.decode())}
        return [connection for connection in found if connection.ends in others]


def _list_connections() -> list[_Connection]:
    """Return the TCP connections of this process."""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except FileNotFoundError:  # a system that does not list them
        return []
    return [connection for connection in map(_read_connection, descriptors) if connection is not None]


def _duplicate_socket(descriptor: int) -> socket.socket:
    """Return a second handle on an open socket; OSError if the descriptor is none."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, f"open file {descriptor} is no socket")
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # another file has taken the number in the meantime
        os.close(copy)
        raise


def _read_connection(descriptor: int) -> _Connection | None:
    try:
        with _duplicate_socket(descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            here, there = (f"{host} {port}" for host, port in (connection.getsockname()[:2], connection.getpeername()[:2]))
            return _Connection(descriptor, os.fstat(connection.fileno()).st_ino, (here, there))
    except OSError:  # no socket, not connected, or closed in the meantime
        return None
