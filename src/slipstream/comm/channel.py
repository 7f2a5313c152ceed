"""The channel: one generation of the process group, as the collectives see it.

A `Turn` is one guarded call. It sends the header (and a body that fits) to everyone over the wire; if all ranks agree, bodies that did not
fit follow in one collective of a gloo group. Waiting happens in short slices, so that Ctrl-C works, a lost rank is noticed, the
table of ranks is printed after `hang_warning` seconds and the wait ends with an exception at the limit. Nothing here knows what
the bytes mean: `gather.py` and `ops.py` do.

`Solo` is the channel of a single process: the same interface, and nothing to wait for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NoReturn, Protocol

import numpy
import torch

from slipstream.comm.beacon import Beacon
from slipstream.comm.meter import Meter
from slipstream.comm.verify import HEADER_SIZE, Call, Headers, explain_mismatch
from slipstream.comm.vigil import Limits, Vigil
from slipstream.comm.wire import ConnectionLost, Look, Wire
from slipstream.devices.table import CPU
from slipstream.errors import MismatchError, StateError

__all__ = ["Body", "Channel", "GroupChannel", "Limits", "Solo", "Turn", "aligned", "wait_in_slices"]

_SLICE = timedelta(milliseconds=200)
_HOST = CPU.type
_Array = Any
"""A one-dimensional numpy array of bytes."""


def aligned(position: int) -> int:
    """The next position at which a tensor of any type may begin.

    >>> aligned(16), aligned(17)
    (16, 32)
    """
    return -(-position // 16) * 16


class Body:
    """Bytes to send, in parts, each at an offset that is aligned for every type of tensor."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, _Array]] = []
        self.length = 0

    def add(self, part: _Array) -> int:
        """Appends bytes and says where they begin."""
        start = aligned(self.length)
        if part.size:
            self._parts.append((start, part))
        self.length = start + part.size
        return start

    def write_to(self, target: _Array) -> None:
        for start, part in self._parts:
            target[start : start + part.size] = part


class Turn(Protocol):
    """One guarded call under way: the header exchange comes first, then any payload on the data group."""

    def exchange(self, body: Body, *, sender: int | None = None, receiver: int | None = None) -> list[_Array]:
        """The bodies of all ranks (of `sender` only, or only on `receiver`; others get empty ones).

        They may lie in a buffer that the next call overwrites: copy what is kept.
        """

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> None: ...

    def broadcast(self, tensor: torch.Tensor, sender: int) -> None: ...


class Channel(Protocol):
    """What the collectives need of a process group."""

    rank: int
    world_size: int
    room: int
    """Bytes that ride in the header, so that a call costs one collective."""
    busy: str
    """Inside of what no collective may be called, because the other processes may never call it; empty: they may be called."""

    def turn(self, call: Call, limits: Limits, *, patient: bool = False) -> _TurnContext: ...


class _TurnContext(Protocol):
    def __enter__(self) -> Turn: ...

    def __exit__(self, *details: object) -> None: ...


class Solo:
    """One process: everything arrives at once, and what is sent is what comes back."""

    rank = 0
    world_size = 1
    room = sys.maxsize
    busy = ""

    def turn(self, call: Call, limits: Limits, *, patient: bool = False) -> Solo:
        if self.busy:
            _refuse_inside(self.busy, call, self.rank)
        return self

    def __enter__(self) -> Solo:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    def exchange(self, body: Body, *, sender: int | None = None, receiver: int | None = None) -> list[_Array]:
        own = numpy.empty(body.length, dtype=numpy.uint8)
        body.write_to(own)
        return [own]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> None:
        return None

    def broadcast(self, tensor: torch.Tensor, sender: int) -> None:
        return None


class GroupChannel:
    """Several processes: headers over a wire, large payloads over a gloo group, device memory over the data group."""

    def __init__(
        self,
        *,
        wire: Wire,
        control: Callable[[], Any],
        data: Any,
        sever: Callable[[], bool],
        beacon: Beacon,
        rank: int,
        world_size: int,
        generation: int,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.sequence = 0
        self.room = wire.room
        self.busy = ""
        self.broken: str | None = None
        """Why this generation can no longer be used; the next call opens another."""
        self.spoilt: str | None = None
        """Why torch's collectives no longer match between the ranks, while ours do; the next watched section opens another generation."""
        self.fit = True
        """Whether it is neither broken nor spoilt."""
        self.meters: Iterable[Meter] = ()
        """Where the time inside of calls is marked."""
        self.beacon = beacon
        self._wire = wire
        self._open_control = control
        self._control: Any = None
        self._data = data
        self._sever = sever
        self.begun = _counter(data)
        """How many collectives of torch's own group have begun so far."""
        beacon.count_with(self.begun)
        self._lock = threading.RLock()
        self._closing = threading.Lock()

    def turn(self, call: Call, limits: Limits, *, patient: bool = False) -> _GroupTurn:
        """Begins a guarded call; `patient` waits as long as the others show signs of life, up to `barrier_timeout`."""
        if self.busy:
            _refuse_inside(self.busy, call, self.rank)
        return _GroupTurn(self, call, limits, patient)

    def release(self, reason: str) -> tuple[Any, Any]:
        """Closes the wire and gives the groups back to their owner, who closes them."""
        self.broken, self.fit = self.broken or reason, False
        self._wire.close()
        groups = self._control, self._data
        self._control = self._data = None
        self._open_control = _nothing
        return groups

    def control(self) -> Any:
        """The gloo group for large payloads, opened when all ranks first have one to send."""
        if self._control is None:
            self._control = self._open_control()
        return self._control

    def give_up(self, reason: str) -> bool:
        """This generation cannot go on here: the others find the connection closed, also those that wait in a collective of torch.

        Gives back whether the connections of torch's own group could be ended: only then a wait in one of its collectives ends.
        """
        self.broken, self.fit = self.broken or reason, False
        with self._closing:  # the thread that waits and the one that watches may come to it together
            self._wire.close()
            return self._sever()

    def spoil(self, reason: str) -> None:
        """This rank stopped in the middle of torch's collectives: the next ones would be taken for the rest of these."""
        self.spoilt, self.fit = self.spoilt or reason, False

    # -- used by a turn -------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        self._lock.acquire()
        try:
            self.sequence += 1
            self.beacon.enter(self.generation, self.sequence, call.operation, call.site)
            if self.beacon.loss is not None:
                self.give_up(self.beacon.loss)
                Vigil(self.beacon, Limits()).lose()
        except BaseException:
            self._lock.release()
            raise

    def end(self) -> None:
        self.beacon.leave()
        self._lock.release()

    def exchange(self, turn: _GroupTurn, body: Body, sender: int | None, receiver: int | None) -> list[_Array]:
        """Every rank's header, and the body behind it if it fits; bodies that do not fit follow in one collective."""
        frames = self._send(turn, body, self._wire.room_of_one if sender == self.rank else self.room)
        headers = Headers(frames, self.rank)
        if not headers.agree():
            self._disagree(turn)
        if headers.all_inline():
            return [numpy.frombuffer(frame, dtype=numpy.uint8)[HEADER_SIZE:] for frame in frames]
        return self._exchange_bodies(turn, body, headers.body_lengths(), sender, receiver)

    def _send(self, turn: _GroupTurn, body: Body, room: int) -> list[bytearray]:
        inline = body.length if body.length <= room else 0
        header = turn.call.header(self.sequence, body.length, inline)
        if inline != body.length:
            return self._carry(turn, bytearray(header))
        frame = bytearray(HEADER_SIZE + body.length)
        frame[:HEADER_SIZE] = header
        body.write_to(numpy.frombuffer(frame, dtype=numpy.uint8)[HEADER_SIZE:])
        return self._carry(turn, frame)

    def _carry(self, turn: _GroupTurn, frame: bytearray) -> list[bytearray]:
        try:
            frames = self._wire.exchange(frame, turn.look)
        except ConnectionLost as lost:
            self._connection_lost(turn, lost)
        except BaseException as error:  # a wait that was given up, or interrupted, leaves half a frame behind
            self.give_up(f"{turn.call.operation} at {turn.call.site} was interrupted by {type(error).__name__}")
            raise
        if self._wire.ended():  # a rank that left after this call is no concern of it; one that gave it up is
            self.beacon.find_loss(0.0)
            if self.beacon.loss is not None:
                self.give_up(self.beacon.loss)
                turn.vigil().lose()
        return frames

    def _exchange_bodies(
        self, turn: _GroupTurn, body: Body, lengths: Sequence[int], sender: int | None, receiver: int | None
    ) -> list[_Array]:
        longest = aligned(max(lengths))
        own = torch.empty(longest, dtype=torch.uint8)
        body.write_to(own.numpy())
        if sender is not None:
            turn.wait(self.control().broadcast([own], _root(torch.distributed.BroadcastOptions, sender)))
            return [own.numpy()[: length if rank == sender else 0] for rank, length in enumerate(lengths)]
        if receiver is not None:
            rows = [torch.empty_like(own) for _ in lengths] if self.rank == receiver else []
            turn.wait(self.control().gather([rows] if rows else [], [own], _root(torch.distributed.GatherOptions, receiver)))
            return [row.numpy()[:length] for row, length in zip(rows, lengths, strict=False)] or [own.numpy()[:0] for _ in lengths]
        everything = torch.empty((self.world_size, longest), dtype=torch.uint8)
        turn.wait(self.control()._allgather_base(everything.view(-1), own))
        return [row[:length] for row, length in zip(everything.numpy(), lengths, strict=True)]

    def _disagree(self, turn: _GroupTurn) -> NoReturn:
        """All ranks come to the same verdict, so all send what they were about to do, and all raise."""
        text = Body()
        site = f" at {turn.call.site}".encode()
        told = turn.call.describe().encode()[: self.room - len(site)] + site
        text.add(numpy.frombuffer(told, dtype=numpy.uint8))
        texts = [frame[HEADER_SIZE:].decode(errors="replace") for frame in self._send(turn, text, self.room)]
        raise MismatchError(f"{explain_mismatch(texts, self.sequence)}\n(raised on rank {self.rank})")

    def data_group(self, tensor: torch.Tensor) -> Any:
        """Host memory goes over the control group, device memory over the data group."""
        return self.control() if tensor.device.type == _HOST else self._data

    def wait(self, work: Any, turn: _GroupTurn) -> None:
        """Waits for an operation of a group, as watchfully as for the wire."""
        try:
            wait_in_slices(work, turn.look)
        except ConnectionLost as lost:
            self._connection_lost(turn, lost)
        except BaseException as error:
            self.give_up(f"{turn.call.operation} at {turn.call.site} was interrupted by {type(error).__name__}")
            raise

    def _connection_lost(self, turn: _GroupTurn, lost: ConnectionLost) -> NoReturn:
        """A connection broke: the launcher, or what the other rank said before, tells why."""
        who = "another rank" if lost.rank is None else f"rank {lost.rank}"
        self.beacon.find_loss(1.5, f"the connection to {who} broke ({lost})")
        self.give_up(str(self.beacon.loss))
        turn.vigil().lose()


def _refuse_inside(what: str, call: Call, rank: int) -> NoReturn:
    """The same with any number of processes: a program that works with one must not hang with two."""
    raise StateError(
        f"{call.operation} at {call.site} was called inside {what}: every process gets another number of items, so the others may never "
        f"come to it. Call it after that, on every process.\n(raised on rank {rank})"
    )


def wait_in_slices(work: Any, look: Look) -> None:
    """Waits for an operation of a process group; `look` is called several times a second and may end the wait by raising."""
    while not _is_done(work):
        look()
    try:
        work.wait(_SLICE)  # at once: it has ended, and this says how
    except RuntimeError as error:
        raise ConnectionLost(None, str(error).splitlines()[0]) from None


def _is_done(work: Any) -> bool:
    """Whether an operation ends within a slice, well or badly."""
    try:
        work.wait(_SLICE)
    except RuntimeError:  # not yet, or it failed
        return bool(work.is_completed())
    return True


class _GroupTurn:
    """A call under way on a `GroupChannel`."""

    def __init__(self, channel: GroupChannel, call: Call, limits: Limits, patient: bool) -> None:
        self.channel = channel
        self.call = call
        self.limits = limits
        self.patient = patient
        self._vigil: Vigil | None = None

    def __enter__(self) -> _GroupTurn:
        self.channel.begin(self.call)
        self._marks = [(meter, meter.wait()) for meter in self.channel.meters]
        return self

    def __exit__(self, *details: object) -> None:
        for meter, begun in self._marks:
            meter.end_wait(begun)
        self.channel.end()

    def wait(self, work: Any) -> None:
        self.channel.wait(work, self)

    def vigil(self) -> Vigil:
        if self._vigil is None:
            self._vigil = Vigil(self.channel.beacon, self.limits, patient=self.patient)
        return self._vigil

    def look(self) -> None:
        """Called while waiting: reports a long wait, and ends one that cannot or may not go on."""
        self.vigil().look()

    def exchange(self, body: Body, *, sender: int | None = None, receiver: int | None = None) -> list[_Array]:
        return self.channel.exchange(self, body, sender, receiver)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty((self.channel.world_size * tensor.numel(),))
        self.wait(self.channel.data_group(tensor)._allgather_base(gathered, tensor))
        return gathered

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> None:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = getattr(torch.distributed.ReduceOp, operation.upper())
        self.wait(self.channel.data_group(tensor).allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, sender: int) -> None:
        self.wait(self.channel.data_group(tensor).broadcast([tensor], _root(torch.distributed.BroadcastOptions, sender)))


def _nothing() -> None:
    return None


def _counter(group: Any) -> Callable[[], int]:
    """Asks a group how many collectives it has begun; of one that does not count, the answer is more every time."""
    try:
        group._get_sequence_number_for_group()
    except RuntimeError:
        return count().__next__
    return group._get_sequence_number_for_group  # type: ignore[no-any-return]


def _root(options: Callable[[], Any], rank: int) -> Any:
    made = options()
    made.rootRank = rank
    return made
