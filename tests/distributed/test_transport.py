"""The transport alone, its ranks as threads of one process: who learns what, in how many messages, and what a lost rank does to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from slipstream.distributed import transport
from slipstream.distributed.guard import align
from slipstream.distributed.transport import (
    ConnectionLost,
    Exchanged,
    Inline,
    SocketTransport,
    connect_sockets,
    find_neighbours,
)

WORLDS = [2, 3, 4, 5, 6, 7, 8, 13, 16]


@dataclass
class Sent:
    """What one rank has given to its sockets."""

    messages: int = 0
    size: int = 0


class CountingSocket(socket.socket):
    sent: Sent

    def sendmsg(self, buffers: Any, *rest: Any) -> int:
        size = super().sendmsg(buffers, *rest)
        self.sent.messages += 1
        self.sent.size += size
        return size


@contextmanager
def mesh(world: int) -> Iterator[tuple[list[SocketTransport], list[Sent]]]:
    """The transports of all ranks of a world, connected, and what each of them has sent."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    sent = [Sent() for _ in range(world)]
    listener = socket.create_server(("127.0.0.1", 0))
    for rank in range(world):
        for other in find_neighbours(rank, world):
            if rank < other:
                calling = socket.create_connection(listener.getsockname())
                for mine, theirs, end in ((rank, other, calling), (other, rank, listener.accept()[0])):
                    ends[mine][theirs] = CountingSocket(fileno=end.detach())
                    ends[mine][theirs].sent = sent[mine]  # type: ignore[attr-defined]
    transports = [SocketTransport(rank, world, connections) for rank, connections in enumerate(ends)]
    try:
        yield transports, sent
    finally:
        listener.close()
        for transport in transports:
            transport.close()


def never() -> None:
    """A check of the wait that finds nothing."""


def at_once(transports: list[SocketTransport], call: Callable[[int, SocketTransport], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(transports)) as threads:
        return [future.result(60) for future in [threads.submit(call, rank, one) for rank, one in enumerate(transports)]]


def inline(data: bytes, *, is_whole: bool = True) -> Inline:
    return Inline(bytearray(data) + bytes(align(len(data)) - len(data)), len(data), is_whole)


def text_of(rank: int) -> bytes:
    return b"" if rank % 3 == 1 else f"rank {rank}".encode() * (rank + 1)


@pytest.mark.parametrize("world", WORLDS)
def test_exchange_brings_every_body(world: int) -> None:
    """Every rank gets the body of every rank, also in worlds that are no power of two, call after call."""

    def call(rank: int, transport: SocketTransport) -> list[Exchanged]:
        data = text_of(rank)
        return [transport.exchange(bytes(24), inline(data), len(data), never) for _ in range(3)]

    with mesh(world) as (transports, _):
        for found in at_once(transports, call):
            for exchanged in found:
                assert exchanged.agreed
                assert exchanged.complete
                assert [body.tobytes() for body in exchanged.bodies] == [text_of(rank) for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
def test_exchange_finds_any_difference(world: int) -> None:
    """One rank with another fingerprint: all ranks hear that they differ, whoever it is."""
    with mesh(world) as (transports, _):
        for odd in range(world):
            prints = [bytes([rank == odd] * 24) for rank in range(world)]
            found = at_once(transports, lambda rank, transport, prints=prints: transport.exchange(prints[rank], inline(b""), 0, never))
            assert [exchanged.agreed for exchanged in found] == [False] * world


@pytest.mark.parametrize(("world", "hops"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (16, 4), (64, 6)])
def test_barrier_is_logarithmic(world: int, hops: int) -> None:
    """Without bodies a rank sends one message of 48 bytes for every doubling of the world."""
    with mesh(world) as (transports, sent):
        at_once(transports, lambda rank, transport: transport.exchange(bytes(24), inline(b""), 0, never))
        assert sent == [Sent(hops, 48 * hops)] * world


@pytest.mark.parametrize("world", WORLDS)
def test_gather_sends_each_body_once(world: int) -> None:
    """What all ranks send together is every body to every other rank, once, with 16 bytes for each and 48 for each message."""
    with mesh(world) as (transports, sent):
        at_once(transports, lambda rank, transport: transport.exchange(bytes(24), inline(bytes(64)), 64, never))
        hops = (world - 1).bit_length()
        assert sent == [Sent(hops, 48 * hops + (world - 1) * (64 + 16))] * world


def test_connections_are_logarithmic() -> None:
    """A rank of 16,384 has 27 connections."""
    assert [len(find_neighbours(0, world)) for world in (2, 4, 64, 96, 16384)] == [1, 3, 11, 12, 27]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_large_bodies_pass_each_other(world: int) -> None:
    """Megabytes in all directions at once, of different sizes, and received where they stay."""
    sizes = [(rank + 1) * 3_000_001 for rank in range(world)]

    def call(rank: int, transport: SocketTransport) -> bool:
        own = numpy.full(sizes[rank], rank, dtype=numpy.uint8)
        places = [[numpy.zeros(1000, numpy.uint8), numpy.zeros(0, numpy.uint8), numpy.zeros(size - 1000, numpy.uint8)] for size in sizes]
        transport.all_gather([own[:5], own[5:]], places, never)
        return all((place == other).all() for other in range(world) if other != rank for place in places[other])

    with mesh(world) as (transports, _):
        assert all(at_once(transports, call))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_large_body_of_one_rank(world: int) -> None:
    """A broadcast reaches everybody, whoever sends; a gather reaches one rank, and the others hold little of it."""
    size = 9_000_000

    def send(rank: int, transport: SocketTransport, sender: int) -> bool:
        place = numpy.full(size, rank, dtype=numpy.uint8)
        transport.broadcast([place[:7], place[7:]], sender, never)
        return bool((place == sender).all())

    def collect(rank: int, transport: SocketTransport, receiver: int) -> bool:
        own = numpy.full(size, rank, dtype=numpy.uint8)
        if rank != receiver:
            transport.gather_to(receiver, [own], [size] * world, never)
            return True
        places = [[numpy.empty(size, numpy.uint8)] for _ in range(world)]
        transport.gather_at(receiver, places, never)
        return all((places[other][0] == other).all() for other in range(world) if other != rank)

    with mesh(world) as (transports, _):
        for one in range(world):
            assert all(at_once(transports, lambda rank, transport, one=one: send(rank, transport, one)))
            assert all(at_once(transports, lambda rank, transport, one=one: collect(rank, transport, one)))


def test_lost_rank_is_named_in_a_large_exchange() -> None:
    """A rank that ends in the middle of megabytes ends the wait of its neighbours with its number."""

    def call(rank: int, transport: SocketTransport) -> Any:
        own = numpy.zeros(20_000_000, dtype=numpy.uint8)
        if rank == 1:
            transport._hops[0]._source.receive(memoryview(own)[:1000])
            transport.close()
            return None
        with pytest.raises(ConnectionLost) as caught:
            transport.all_gather([own], [[own.copy()] for _ in range(2)], never)
        return caught.value.rank

    with mesh(2) as (transports, _):
        assert at_once(transports, call) == [1, None]


def test_wait_is_checked() -> None:
    """A rank that does not come is waited for, and the wait ends when the check says so, also in the middle of megabytes."""
    asked = threading.Event()

    def check() -> None:
        asked.set()
        raise TimeoutError("enough")

    with mesh(2) as (transports, _):
        own = numpy.zeros(20_000_000, dtype=numpy.uint8)
        with pytest.raises(TimeoutError, match="enough"):
            transports[0].all_gather([own], [[own], [own.copy()]], check)
        assert asked.is_set()


class SlowCaller:
    """A connection to who sends a byte every four seconds of its own clock."""

    now = 0.0
    timeout = 0.0

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds

    def recv(self, size: int) -> bytes:
        self.now += min(4.0, self.timeout)
        if self.timeout < 4.0:
            raise TimeoutError
        return b"t"


def test_slow_caller_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says a byte now and then does not keep the ranks from meeting."""
    caller = SlowCaller()
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: caller.now))
    assert transport._accept_peer(caller, b"t" * 32) == -1  # type: ignore[arg-type]
    assert caller.now == 5.0


def test_strangers_are_turned_away() -> None:
    """Who does not know the token of the job, or says nothing, is no rank."""
    listener = socket.create_server(("127.0.0.1", 0))
    stranger = socket.create_connection(listener.getsockname())
    stranger.sendall(b"x" * 36)
    token = b"t" * 32

    def low() -> SocketTransport:
        return connect_sockets(0, 2, listener, {1: ("", 0)}, token, never)

    def high() -> SocketTransport:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            return connect_sockets(1, 2, unused, {0: listener.getsockname()[:2]}, token, never)

    with ThreadPoolExecutor(2) as threads, listener, stranger:
        transports = [future.result(30) for future in (threads.submit(low), threads.submit(high))]
        found = at_once(transports, lambda rank, transport: transport.exchange(bytes(24), inline(bytes([rank])), 1, never))
        assert [[body.tolist() for body in exchanged.bodies] for exchanged in found] == [[[0], [1]]] * 2
        assert stranger.recv(1) == b""
        for transport in transports:
            transport.close()
