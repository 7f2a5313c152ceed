"""Carry the headers of guarded calls between ranks, and close the connections of torch's gloo group when a wait cannot end.

`SocketTransport` keeps one TCP connection per pair of ranks: a plain socket is faster than waking gloo's sleeping threads, an exchange
can be abandoned by closing it, and the end of a connection names the rank. `GlooTransport` sends the same frames with one all-gather, for
worlds in which a connection per pair would be too many.

`GlooConnections` records the sockets that appear while torch opens its group, by descriptor and inode, and shuts them down on request:
neither destroying nor aborting a gloo group wakes a thread that waits in it (torch 2.13). Listening sockets are not touched, and groups
that the program opened itself are left alone.
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


class ConnectionLost(Exception):
    """The connection to another rank ended; `rank` is None where the wire cannot tell which."""

    def __init__(self, rank: int | None, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank


class Transport(Protocol):
    """Carries one frame of each rank to all ranks. A frame is a header and a body that fits into `room` bytes."""

    room: int
    room_of_one: int
    """The same, where one rank alone has a body to send."""

    def exchange(self, frame: bytearray, look: WaitCallback) -> list[bytearray]:
        """The frames of all ranks, this one's included, in the order of the ranks."""

    def ended(self) -> bool:
        """Whether another rank has closed its end by now, after what was received."""

    def close(self) -> None: ...


class SocketTransport:
    """One connection to each other rank."""

    room = _INLINE_LIMIT
    room_of_one = _SINGLE_SENDER_LIMIT

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = {other: _PeerSocket(other, connection) for other, connection in sorted(connections.items())}
        self._hangups = select.poll()
        for connection in connections.values():
            self._hangups.register(connection, getattr(select, "POLLRDHUP", 0))  # elsewhere than on Linux only an error shows

    def exchange(self, frame: bytearray, look: WaitCallback) -> list[bytearray]:
        for peer in self._peers.values():
            peer.send(frame, look)
        frames = {other: peer.receive(look) for other, peer in self._peers.items()}
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

    def send(self, frame: bytearray, look: WaitCallback) -> None:
        view = memoryview(frame)
        while view:
            try:
                view = view[self.connection.send(view) :]
                continue
            except TimeoutError:
                pass  # the other side does not read: look whether to go on
            except OSError as error:
                raise ConnectionLost(self.rank, str(error)) from None
            look()

    def receive(self, look: WaitCallback) -> bytearray:
        self._fill(HEADER_SIZE, look)
        size = HEADER_SIZE + inline_length(self._arrived)
        self._fill(size, look)
        frame, self._arrived = self._arrived[:size], self._arrived[size:]
        return frame

    def _fill(self, size: int, look: WaitCallback) -> None:
        while len(self._arrived) < size:
            data = self._receive()
            if data is None:
                look()
            else:
                self._arrived += data

    def _receive(self) -> bytes | None:
        """What has arrived; None if nothing did for a while."""
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return None
        except OSError as error:
            raise ConnectionLost(self.rank, str(error)) from None
        if not data:
            raise ConnectionLost(self.rank, "closed by the other side")
        return data


def connect_sockets(
    rank: int, listener: socket.socket, addresses: Mapping[int, tuple[str, int]], token: bytes, look: WaitCallback
) -> SocketTransport:
    """The connections of this rank to all others: to lower ranks it connects, from higher ranks it accepts.

    Whoever connects shows the token of this job first; a stranger is hung up on.
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
            look()
            continue
        other = _accept_peer(connection, token)
        if other in addresses and other not in connections:
            connections[other] = connection
        else:
            connection.close()
    return SocketTransport(rank, connections)


def _accept_peer(connection: socket.socket, token: bytes) -> int:
    """The rank of a caller who knows the token; -1 for a stranger."""
    connection.settimeout(5.0)
    hello = b""
    try:
        while len(hello) < _HELLO.size:
            data = connection.recv(_HELLO.size - len(hello))
            if not data:
                return -1
            hello += data
    except OSError:
        return -1
    shown, other = _HELLO.unpack(hello)
    return int(other) if hmac.compare_digest(shown, token) else -1


class GlooTransport:
    """Frames of a fixed size, in one all-gather of a gloo group."""

    def __init__(self, group: Any, world_size: int, wait: Callable[[Any, WaitCallback], None]) -> None:
        self.room = self.room_of_one = max(256, min(4096, 262144 // world_size)) - HEADER_SIZE
        self._group = group
        self._wait = wait
        self._send = torch.zeros(HEADER_SIZE + self.room, dtype=torch.uint8)
        self._receive = torch.zeros((world_size, HEADER_SIZE + self.room), dtype=torch.uint8)

    def exchange(self, frame: bytearray, look: WaitCallback) -> list[bytearray]:
        self._send.numpy()[: len(frame)] = numpy.frombuffer(frame, dtype=numpy.uint8)
        self._wait(self._group._allgather_base(self._receive.view(-1), self._send), look)
        blocks = [bytearray(block) for block in self._receive.numpy()]
        return [block[: HEADER_SIZE + inline_length(block)] for block in blocks]

    def ended(self) -> bool:
        return False  # gloo does not tell

    def close(self) -> None:
        self._group = None


_DESCRIPTOR_FOLDER = "/dev/fd"


class _Connection(NamedTuple):
    file: int
    inode: int
    ends: tuple[str, str]
    """This side and the other, as text."""


class GlooConnections:
    """The connections of one generation's default group; `sever` ends them."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._links: list[_Connection] = []
        self._abort: Callable[[], None] = _do_nothing

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What torch connects inside of the block is ours to end."""
        before = {link.inode for link in _list_connections()}
        yield
        found = [link for link in _list_connections() if link.inode not in before]
        self._store.set(f"links/{self._rank}", json.dumps([link.ends for link in found]))
        self._links = found if len(found) < self._world_size else self._confirmed(found)

    def also(self, abort: Callable[[], None]) -> None:
        """What ends the operations of backends that know how to end them: gloo does not."""
        self._abort = abort

    def sever(self) -> bool:
        """Ends the connections, so that whoever waits on them fails, here and there; whether they are known."""
        for link in self._links:
            with suppress(OSError), _duplicate_socket(link.file) as connection:  # closed already, or ended by the other side
                if os.fstat(connection.fileno()).st_ino == link.inode:
                    connection.shutdown(socket.SHUT_RDWR)
        self._abort()
        return len(self._links) == self._world_size - 1

    def _confirmed(self, found: list[_Connection]) -> list[_Connection]:
        keys = [f"links/{rank}" for rank in range(self._world_size) if rank != self._rank]
        try:
            self._store.wait(keys, timedelta(seconds=10))
        except RuntimeError:  # a rank that had just opened the group has ended: there is no telling, and nothing is touched
            return []
        others = {(there, here) for data in self._store.multi_get(keys) for here, there in json.loads(data.decode())}
        return [link for link in found if link.ends in others]


def _do_nothing() -> None:
    return None


def _list_connections() -> list[_Connection]:
    """The TCP connections of this process."""
    return [link for link in map(_read_connection, _open_files()) if link is not None]


def _open_files() -> list[int]:
    with suppress(FileNotFoundError):  # a system that does not list them
        return [int(name) for name in os.listdir(_DESCRIPTOR_FOLDER)]
    return []


def _duplicate_socket(file: int) -> socket.socket:
    """A second handle on an open socket; OSError if it is none."""
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        raise OSError(errno.ENOTSOCK, f"open file {file} is no socket")
    copy = os.dup(file)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # another file has taken the number in the meantime
        os.close(copy)
        raise


def _read_connection(file: int) -> _Connection | None:
    try:
        with _duplicate_socket(file) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            ends = tuple(f"{host} {port}" for host, port in (connection.getsockname()[:2], connection.getpeername()[:2]))
            return _Connection(file, os.fstat(connection.fileno()).st_ino, (ends[0], ends[1]))
    except OSError:  # no socket, not connected, or closed in the meantime
        return None


HEADER_LAYOUT = struct.Struct("<IQ16s4xQQ")
"""Mark of the format, sequence number, digest of the agreement, length of the body, and how much of it follows at once."""


HEADER_SIZE = HEADER_LAYOUT.size
"""Bytes of a header; what follows is aligned for every type of tensor."""


INLINE_AT = 40


def inline_length(frame: bytes | bytearray) -> int:
    """How many bytes of body follow the header in its frame: all of them, or none where they do not fit."""
    return int.from_bytes(frame[INLINE_AT : INLINE_AT + 8], "little")
