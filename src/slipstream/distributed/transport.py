"""Carry the headers of guarded calls between ranks, and close the connections of torch's gloo group when a wait cannot end.

`SocketTransport` keeps one TCP connection per pair of ranks: a plain socket is faster than waking gloo's sleeping threads, an exchange
can be abandoned by closing it, and the end of a connection names the rank. `GlooTransport` sends the same frames with one all-gather, for
worlds in which a connection per pair would be too many.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import numpy
import torch

__all__ = [
    "ConnectionLost", "GlooConnections", "GlooTransport", "HEADER_LAYOUT", "HEADER_SIZE", "INLINE_AT", "MAX_SOCKET_RANKS",
    "SocketTransport", "Transport", "WaitCallback", "connect_sockets", "inline_length",
]


WaitCallback = Callable[[], None]
"""Called several times a second while waiting; raises to end the wait."""
MAX_SOCKET_RANKS = 64
"""Ranks up to which every pair has a connection."""
_WAIT_SLICE = 0.2
_INLINE_LIMIT = 8192
_SINGLE_SENDER_LIMIT = 131072
"""What the buffers of a socket take even if both sides should send so much by mistake, and none reads."""
_HELLO = struct.Struct("<32sI")


HEADER_LAYOUT = struct.Struct("<IQ16s4xQQ")
"""Format mark, sequence number, digest of the agreement, length of the body, and how much of it follows at once."""
HEADER_SIZE = HEADER_LAYOUT.size
"""Bytes of a header; what follows is aligned for every type of tensor."""
INLINE_AT = 40


def inline_length(frame: bytes | bytearray) -> int:
    """Return how many bytes of body follow the header in its frame: all of them, or none where they do not fit."""
    return int.from_bytes(frame[INLINE_AT : INLINE_AT + 8], "little")


class ConnectionLost(Exception):
    """The connection to another rank ended; `rank` is None where the transport cannot tell which."""

    def __init__(self, rank: int | None, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank


class Transport(Protocol):
    """Carries one frame of each rank to all ranks. A frame is a header and a body of up to `max_inline_bytes` bytes."""

    max_inline_bytes: int
    max_inline_bytes_single_sender: int
    """The same, where one rank alone has a body to send."""

    def exchange(self, frame: bytearray, check: WaitCallback) -> list[bytearray]:
        """Send a frame, and return the frames of all ranks, this one's included, in rank order."""

    def ended(self) -> bool:
        """Whether another rank has closed its end by now, after what was received."""

    def close(self) -> None: ...


class SocketTransport:
    """One connection to each other rank."""

    max_inline_bytes = _INLINE_LIMIT
    max_inline_bytes_single_sender = _SINGLE_SENDER_LIMIT

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = {other: _PeerSocket(other, connection) for other, connection in sorted(connections.items())}
        self._hangups = select.poll()
        for connection in connections.values():
            self._hangups.register(connection, getattr(select, "POLLRDHUP", 0))  # elsewhere than on Linux only an error shows

    def exchange(self, frame: bytearray, check: WaitCallback) -> list[bytearray]:
        for peer in self._peers.values():
            peer.send(frame, check)
        frames = {other: peer.receive(check) for other, peer in self._peers.items()}
        frames[self._rank] = frame
        return [frames[rank] for rank in range(len(frames))]

    def ended(self) -> bool:
        return bool(self._hangups.poll(0))

    def close(self) -> None:
        for peer in self._peers.values():
            peer.connection.close()


class _PeerSocket:
    """The connection to one rank, and what has arrived of its next frame."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_WAIT_SLICE)
        self.rank = rank
        self.connection = connection
        self._arrived = bytearray()

    def send(self, frame: bytearray, check: WaitCallback) -> None:
        view = memoryview(frame)
        while view:
            try:
                view = view[self.connection.send(view) :]
            except TimeoutError:  # the other side does not read
                check()
            except OSError as error:
                raise ConnectionLost(self.rank, str(error)) from None

    def receive(self, check: WaitCallback) -> bytearray:
        self._fill(HEADER_SIZE, check)
        size = HEADER_SIZE + inline_length(self._arrived)
        self._fill(size, check)
        frame, self._arrived = self._arrived[:size], self._arrived[size:]
        return frame

    def _fill(self, size: int, check: WaitCallback) -> None:
        while len(self._arrived) < size:
            try:
                data = self.connection.recv(1 << 16)
            except TimeoutError:
                check()
                continue
            except OSError as error:
                raise ConnectionLost(self.rank, str(error)) from None
            if not data:
                raise ConnectionLost(self.rank, "closed by the other side")
            self._arrived += data


def connect_sockets(
    rank: int, listener: socket.socket, addresses: Mapping[int, tuple[str, int]], token: bytes, check: WaitCallback
) -> SocketTransport:
    """Connect this rank to all others: it connects to lower ranks and accepts higher ones.

    Whoever connects sends the token of this job first; any other connection is closed.
    """
    connections: dict[int, socket.socket] = {}
    for other, address in addresses.items():
        if other < rank:
            connections[other] = socket.create_connection(address, timeout=30.0)
            connections[other].sendall(_HELLO.pack(token, rank))
    listener.settimeout(_WAIT_SLICE)
    while len(connections) < len(addresses) - 1:
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
    return SocketTransport(rank, connections)


def _accept_peer(connection: socket.socket, token: bytes) -> int:
    """Return the rank of a caller that knows the token, and -1 for any other."""
    connection.settimeout(5.0)
    hello = b""
    try:
        while len(hello) < _HELLO.size and (data := connection.recv(_HELLO.size - len(hello))):
            hello += data
        shown, other = _HELLO.unpack(hello)
    except (OSError, struct.error):  # it says nothing in time, or hangs up
        return -1
    return int(other) if hmac.compare_digest(shown, token) else -1


class GlooTransport:
    """Frames of a fixed size, in one all-gather of a gloo group."""

    def __init__(self, group: Any, world_size: int, wait: Callable[[Any, WaitCallback], None]) -> None:
        self.max_inline_bytes = self.max_inline_bytes_single_sender = max(256, min(4096, 262144 // world_size)) - HEADER_SIZE
        self._group = group
        self._wait = wait
        self._send = torch.zeros(HEADER_SIZE + self.max_inline_bytes, dtype=torch.uint8, device="cpu")
        self._receive = torch.zeros((world_size, HEADER_SIZE + self.max_inline_bytes), dtype=torch.uint8, device="cpu")

    def exchange(self, frame: bytearray, check: WaitCallback) -> list[bytearray]:
        self._send.numpy()[: len(frame)] = numpy.frombuffer(frame, dtype=numpy.uint8)
        # torch internals: see `_GroupCall.all_gather` in guard.py.
        self._wait(self._group._allgather_base(self._receive.view(-1), self._send), check)
        blocks = [bytearray(block) for block in self._receive.numpy()]
        return [block[: HEADER_SIZE + inline_length(block)] for block in blocks]

    def ended(self) -> bool:
        return False  # gloo does not tell

    def close(self) -> None:
        self._group = None


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
