"""The wire: how the headers of a guarded call, with the bodies that ride in them, get from every rank to every other.

`Sockets` is one TCP connection for each pair of ranks. It is written by hand for three reasons. Between two calls of a training loop
the threads of a gloo group have gone to sleep, and waking them costs more than all of our own work; a plain socket is three times as
fast there. An exchange that is given up can be dropped by closing the sockets, while an operation of gloo cannot be taken
back. And the end of a connection says at once which rank it was. What does not fit into a header still travels by gloo.

`Gloo` sends the same frames with one all-gather: for worlds in which a connection for every pair would be too many.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy
import torch

from slipstream.comm.verify import HEADER_SIZE, inline_length

__all__ = ["LARGEST_MESH", "ConnectionLost", "Gloo", "Look", "Sockets", "Wire", "connect_sockets"]

Look = Callable[[], None]
"""Called several times a second while waiting; raises to end the wait."""
LARGEST_MESH = 64
"""Ranks up to which every pair has a connection."""
_SLICE = 0.2
_ROOM = 8192
_ROOM_OF_ONE = 131072
"""What the buffers of a socket take even if both sides should send so much by mistake, and none reads."""
_HELLO = struct.Struct("<32sI")


class ConnectionLost(Exception):
    """The connection to another rank ended; `rank` is None where the wire cannot tell which."""

    def __init__(self, rank: int | None, cause: str) -> None:
        super().__init__(cause)
        self.rank = rank


class Wire(Protocol):
    """Carries one frame of each rank to all ranks. A frame is a header and a body that fits into `room` bytes."""

    room: int
    room_of_one: int
    """The same, where one rank alone has a body to send."""

    def exchange(self, frame: bytearray, look: Look) -> list[bytearray]:
        """The frames of all ranks, this one's included, in the order of the ranks."""

    def ended(self) -> bool:
        """Whether another rank has closed its end by now, after what was received."""

    def close(self) -> None: ...


class Sockets:
    """One connection to each other rank."""

    room = _ROOM
    room_of_one = _ROOM_OF_ONE

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = {other: _Peer(other, connection) for other, connection in sorted(connections.items())}
        self._hangups = select.poll()
        for connection in connections.values():
            self._hangups.register(connection, getattr(select, "POLLRDHUP", 0))  # elsewhere than on Linux only an error shows

    def exchange(self, frame: bytearray, look: Look) -> list[bytearray]:
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


class _Peer:
    """The connection to one rank, and what has arrived of its next frame."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SLICE)
        self.rank = rank
        self.connection = connection
        self._arrived = bytearray()

    def send(self, frame: bytearray, look: Look) -> None:
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

    def receive(self, look: Look) -> bytearray:
        self._fill(HEADER_SIZE, look)
        size = HEADER_SIZE + inline_length(self._arrived)
        self._fill(size, look)
        frame, self._arrived = self._arrived[:size], self._arrived[size:]
        return frame

    def _fill(self, size: int, look: Look) -> None:
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


def connect_sockets(rank: int, listener: socket.socket, addresses: Mapping[int, tuple[str, int]], token: bytes, look: Look) -> Sockets:
    """The connections of this rank to all others: to lower ranks it connects, from higher ranks it accepts.

    Whoever connects shows the token of this job first; a stranger is hung up on.
    """
    connections: dict[int, socket.socket] = {}
    for other, address in addresses.items():
        if other < rank:
            connections[other] = socket.create_connection(address, timeout=30.0)
            connections[other].sendall(_HELLO.pack(token, rank))
    listener.settimeout(_SLICE)
    while len(connections) < len(addresses) - 1:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            look()
            continue
        other = _greet(connection, token)
        if other in addresses and other not in connections:
            connections[other] = connection
        else:
            connection.close()
    return Sockets(rank, connections)


def _greet(connection: socket.socket, token: bytes) -> int:
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


class Gloo:
    """Frames of a fixed size, in one all-gather of a gloo group."""

    def __init__(self, group: Any, world_size: int, wait: Callable[[Any, Look], None]) -> None:
        self.room = self.room_of_one = max(256, min(4096, 262144 // world_size)) - HEADER_SIZE
        self._group = group
        self._wait = wait
        self._send = torch.zeros(HEADER_SIZE + self.room, dtype=torch.uint8)
        self._receive = torch.zeros((world_size, HEADER_SIZE + self.room), dtype=torch.uint8)

    def exchange(self, frame: bytearray, look: Look) -> list[bytearray]:
        self._send.numpy()[: len(frame)] = numpy.frombuffer(frame, dtype=numpy.uint8)
        self._wait(self._group._allgather_base(self._receive.view(-1), self._send), look)
        blocks = [bytearray(block) for block in self._receive.numpy()]
        return [block[: HEADER_SIZE + inline_length(block)] for block in blocks]

    def ended(self) -> bool:
        return False  # gloo does not tell

    def close(self) -> None:
        self._group = None
