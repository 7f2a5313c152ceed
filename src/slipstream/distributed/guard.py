"""Compare what every rank is about to do before any payload is transferred, so that a mistake is an error and not a hang.

A `CollectiveCall` carries a text that must be the same on all ranks; its digest travels in a small header with the sequence number. If
the headers agree, small bodies have already arrived with them and larger ones follow in one collective of a gloo group. If they disagree,
every rank raises the same table and the group remains usable. Waiting happens in short slices, so that Ctrl-C works, a lost rank is
noticed and long waits are reported. `SingleProcessChannel` is the same interface for one process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import numpy
import torch

from slipstream.devices.table import CPU
from slipstream.distributed.call_site import call_site
from slipstream.distributed.heartbeat import Heartbeat
from slipstream.distributed.transport import HEADER_LAYOUT, HEADER_SIZE, INLINE_AT, ConnectionLost, Transport, WaitCallback
from slipstream.distributed.wait_monitor import Limits, WaitMonitor, guess_condition
from slipstream.errors import MismatchError, StateError

if TYPE_CHECKING:
    from slipstream.observability.timing.meter import Meter

__all__ = [
    "Body", "BodyReader", "Channel", "CollectiveCall", "GroupChannel", "GuardedCall", "Headers", "Limits", "SingleProcessChannel", "align",
    "announce_failure", "check_rank", "explain_mismatch", "make_call", "wait_in_slices",
]


_MAGIC = 0x534C5031
_AGREED = 28
"""The bytes at the beginning that have to be the same on all ranks."""
_LENGTH_AT = 32
_LONGEST_SHOWN = 600


@lru_cache(maxsize=8192)
def _agreement_digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class CollectiveCall:
    """One call of a collective, as this process sees it."""

    __slots__ = ("agreement", "describe", "operation", "site")

    def __init__(self, operation: str, agreement: str, site: str, describe: Callable[[], str]) -> None:
        self.operation = operation
        """The name that the user called: gather, reduce, wait_for_everyone."""
        self.agreement = agreement
        """What must be the same on all ranks, as text."""
        self.site = site
        """The user's file:line."""
        self.describe = describe
        """What this rank passed, in full: only asked for when something is wrong."""

    def header(self, sequence: int, body_length: int, inline: int) -> bytes:
        """What travels ahead of the payload; `inline` bytes of body follow at once.

        >>> len(CollectiveCall("gather", "float32(*)", "train.py:3", str).header(7, 8, 8))
        48
        """
        return HEADER_LAYOUT.pack(_MAGIC, sequence, _agreement_digest(f"{self.operation}\n{self.agreement}"), body_length, inline)


class Headers:
    """The headers of all ranks, as they stand at the beginning of their frames."""

    def __init__(self, frames: Sequence[bytearray], rank: int) -> None:
        self._raw = frames
        self._own = frames[rank]
        if any(raw[:4] != self._own[:4] for raw in frames):
            raise ValueError("another process sent something that is not a header: are all of them on the same version of slipstream?")

    def agree(self) -> bool:
        """Whether every rank is in the same call, with everything in it that has to be the same."""
        own = self._own[:_AGREED]
        return all(raw[:_AGREED] == own for raw in self._raw)

    def all_inline(self) -> bool:
        """Whether every body came with its header."""
        return all(raw[_LENGTH_AT : _LENGTH_AT + 8] == raw[INLINE_AT : INLINE_AT + 8] for raw in self._raw)

    def body_lengths(self) -> list[int]:
        """How many bytes each rank has to send besides its header."""
        return [int.from_bytes(raw[_LENGTH_AT : _LENGTH_AT + 8], "little") for raw in self._raw]


_EMPTY_ADVICE: Final = (
    "An empty list became float32: write torch.tensor(values, dtype=...), so that a process without values has the type of the others."
)


_LIST_ADVICE: Final = (
    "A list of nothing but tensors is structure, and has to be alike on all processes. gather_object joins lists of any length that hold "
    "anything."
)
_GATHER_NAMES: Final = ("gather ", "gather_for_metrics ")


def explain_mismatch(texts: Sequence[str], sequence: int) -> str:
    """The message for ranks that called different things, with ranks that did the same on one line.

    >>> texts = ["gather int64(2,) at a.py:1", "reduce(sum) int64(2,) at a.py:9", "gather int64(2,) at a.py:1"]
    >>> print(explain_mismatch(texts, 4))  # doctest: +ELLIPSIS
    The processes did not call the same thing as collective number 4, so nothing was transferred:
      ranks 0, 2: gather int64(2,) at a.py:1
      rank 1: reduce(sum) int64(2,) at a.py:9
    Every process has to make the same call at the same line, with the same structure, types and shapes, in the same order.
    Rank 1 alone is at a.py:9: is that under a condition that is true on rank 1 alone? Call it on every process, and keep under ...
    >>> explain_mismatch(["gather int64(2,) at a.py:1", "gather float32(0,) at a.py:1"], 4).splitlines()[-1]
    'An empty list became float32: write torch.tensor(values, dtype=...), so that a process without values has the type of the others.'
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_by_text.setdefault(text, []).append(rank)
    begin = len(os.path.commonprefix(list(ranks_by_text)))
    lines = [f"  {_format_ranks(ranks)}: {_shorten(text, begin)}" for text, ranks in ranks_by_text.items()]
    return "\n".join(
        [
            f"The processes did not call the same thing as collective number {sequence}, so nothing was transferred:",
            *lines,
            "Every process has to make the same call at the same line, with the same structure, types and shapes, in the same order.",
            _explain_lone_rank(texts) or "Look for a call under a condition that is not true everywhere.",
            *([_LIST_ADVICE] if _gather_lists(texts) else ()),
            *([_EMPTY_ADVICE] if any(" float32(0,)" in text for text in texts) else ()),
        ]
    )


def _gather_lists(texts: Sequence[str]) -> bool:
    """Whether all ranks gather, and some of them a list."""
    fit = all(text.startswith(_GATHER_NAMES) and "(which could not be sent" not in text for text in texts)
    return fit and any("[" in text or " entries" in text for text in texts)


def _explain_lone_rank(texts: Sequence[str]) -> str:
    """A question about the line that one rank is at alone, if there is one: it names the condition that is most likely above it."""
    sites = [text.rpartition(" at ")[2] for text in texts]
    ranks = [rank for rank, site in enumerate(sites) if sites.count(site) == 1]
    if not ranks or (ranks[0] != 0 and len(ranks) > 1):
        return ""
    rank = ranks[0]
    opposite = f", or {sites[1]} under its opposite" if len(sites) == 2 else ""
    return (
        f"Rank {rank} alone is at {sites[rank]}: {guess_condition(rank, len(texts))}{opposite}? Call it on every process, and keep "
        "under the "
        "condition what is done with the result."
    )


def _shorten(text: str, begin: int) -> str:
    """A long text around the place where the texts begin to differ; the line of the call stays."""
    if len(text) <= _LONGEST_SHOWN:
        return text
    what, _, site = text.rpartition(" at ")
    start = max(0, begin - 100)
    return f"{what[:40]} ... {what[start : start + 300]} ... at {site}"


def _format_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


_SLICE = timedelta(milliseconds=200)
_CPU = CPU.type
_Array = Any
"""A one-dimensional numpy array of bytes."""


def align(position: int) -> int:
    """The next position at which a tensor of any type may begin.

    >>> align(16), align(17)
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
        start = align(self.length)
        if part.size:
            self._parts.append((start, part))
        self.length = start + part.size
        return start

    def write_to(self, target: _Array) -> None:
        for start, part in self._parts:
            target[start : start + part.size] = part


class GuardedCall(Protocol):
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

    def turn(self, call: CollectiveCall, limits: Limits, *, patient: bool = False) -> _GuardedCallContext: ...


class _GuardedCallContext(Protocol):
    def __enter__(self) -> GuardedCall: ...

    def __exit__(self, *details: object) -> None: ...


class SingleProcessChannel:
    """One process: everything arrives at once, and what is sent is what comes back."""

    rank = 0
    world_size = 1
    room = sys.maxsize
    busy = ""

    def turn(self, call: CollectiveCall, limits: Limits, *, patient: bool = False) -> SingleProcessChannel:
        if self.busy:
            _raise_if_inside(self.busy, call, self.rank)
        return self

    def __enter__(self) -> SingleProcessChannel:
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
        wire: Transport,
        control: Callable[[], Any],
        data: Any,
        sever: Callable[[], bool],
        beacon: Heartbeat,
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
        self.begun = _collective_counter(data)
        """How many collectives of torch's own group have begun so far."""
        beacon.count_with(self.begun)
        self._lock = threading.RLock()
        self._closing = threading.Lock()

    def turn(self, call: CollectiveCall, limits: Limits, *, patient: bool = False) -> _GroupCall:
        """Begins a guarded call; `patient` waits as long as the others show signs of life, up to `barrier_timeout`."""
        if self.busy:
            _raise_if_inside(self.busy, call, self.rank)
        return _GroupCall(self, call, limits, patient)

    def release(self, reason: str) -> tuple[Any, Any]:
        """Closes the wire and gives the groups back to their owner, who closes them."""
        self.broken, self.fit = self.broken or reason, False
        self._wire.close()
        groups = self._control, self._data
        self._control = self._data = None
        self._open_control = _no_group
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

    def begin(self, call: CollectiveCall) -> None:
        self._lock.acquire()
        try:
            self.sequence += 1
            self.beacon.enter(self.generation, self.sequence, call.operation, call.site)
            if self.beacon.loss is not None:
                self.give_up(self.beacon.loss)
                WaitMonitor(self.beacon, Limits()).lose()
        except BaseException:
            self._lock.release()
            raise

    def end(self) -> None:
        self.beacon.leave()
        self._lock.release()

    def exchange(self, turn: _GroupCall, body: Body, sender: int | None, receiver: int | None) -> list[_Array]:
        """Every rank's header, and the body behind it if it fits; bodies that do not fit follow in one collective."""
        frames = self._send(turn, body, self._wire.room_of_one if sender == self.rank else self.room)
        headers = Headers(frames, self.rank)
        if not headers.agree():
            self._disagree(turn)
        if headers.all_inline():
            return [numpy.frombuffer(frame, dtype=numpy.uint8)[HEADER_SIZE:] for frame in frames]
        return self._exchange_bodies(turn, body, headers.body_lengths(), sender, receiver)

    def _send(self, turn: _GroupCall, body: Body, room: int) -> list[bytearray]:
        inline = body.length if body.length <= room else 0
        header = turn.call.header(self.sequence, body.length, inline)
        if inline != body.length:
            return self._carry(turn, bytearray(header))
        frame = bytearray(HEADER_SIZE + body.length)
        frame[:HEADER_SIZE] = header
        body.write_to(numpy.frombuffer(frame, dtype=numpy.uint8)[HEADER_SIZE:])
        return self._carry(turn, frame)

    def _carry(self, turn: _GroupCall, frame: bytearray) -> list[bytearray]:
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
        self, turn: _GroupCall, body: Body, lengths: Sequence[int], sender: int | None, receiver: int | None
    ) -> list[_Array]:
        longest = align(max(lengths))
        own = torch.empty(longest, dtype=torch.uint8)
        body.write_to(own.numpy())
        if sender is not None:
            turn.wait(self.control().broadcast([own], _root_options(torch.distributed.BroadcastOptions, sender)))
            return [own.numpy()[: length if rank == sender else 0] for rank, length in enumerate(lengths)]
        if receiver is not None:
            rows = [torch.empty_like(own) for _ in lengths] if self.rank == receiver else []
            turn.wait(self.control().gather([rows] if rows else [], [own], _root_options(torch.distributed.GatherOptions, receiver)))
            return [row.numpy()[:length] for row, length in zip(rows, lengths, strict=False)] or [own.numpy()[:0] for _ in lengths]
        everything = torch.empty((self.world_size, longest), dtype=torch.uint8)
        turn.wait(self.control()._allgather_base(everything.view(-1), own))
        return [row[:length] for row, length in zip(everything.numpy(), lengths, strict=True)]

    def _disagree(self, turn: _GroupCall) -> NoReturn:
        """All ranks come to the same verdict, so all send what they were about to do, and all raise."""
        text = Body()
        site = f" at {turn.call.site}".encode()
        told = turn.call.describe().encode()[: self.room - len(site)] + site
        text.add(numpy.frombuffer(told, dtype=numpy.uint8))
        texts = [frame[HEADER_SIZE:].decode(errors="replace") for frame in self._send(turn, text, self.room)]
        raise MismatchError(f"{explain_mismatch(texts, self.sequence)}\n(raised on rank {self.rank})")

    def data_group(self, tensor: torch.Tensor) -> Any:
        """Host memory goes over the control group, device memory over the data group."""
        return self.control() if tensor.device.type == _CPU else self._data

    def wait(self, work: Any, turn: _GroupCall) -> None:
        """Waits for an operation of a group, as watchfully as for the wire."""
        try:
            wait_in_slices(work, turn.look)
        except ConnectionLost as lost:
            self._connection_lost(turn, lost)
        except BaseException as error:
            self.give_up(f"{turn.call.operation} at {turn.call.site} was interrupted by {type(error).__name__}")
            raise

    def _connection_lost(self, turn: _GroupCall, lost: ConnectionLost) -> NoReturn:
        """A connection broke: the launcher, or what the other rank said before, tells why."""
        who = "another rank" if lost.rank is None else f"rank {lost.rank}"
        self.beacon.find_loss(1.5, f"the connection to {who} broke ({lost})")
        self.give_up(str(self.beacon.loss))
        turn.vigil().lose()


def _raise_if_inside(what: str, call: CollectiveCall, rank: int) -> NoReturn:
    """The same with any number of processes: a program that works with one must not hang with two."""
    raise StateError(
        f"{call.operation} at {call.site} was called inside {what}: every process gets another number of items, so the others may never "
        f"come to it. Call it after that, on every process.\n(raised on rank {rank})"
    )


def wait_in_slices(work: Any, look: WaitCallback) -> None:
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


class _GroupCall:
    """A call under way on a `GroupChannel`."""

    def __init__(self, channel: GroupChannel, call: CollectiveCall, limits: Limits, patient: bool) -> None:
        self.channel = channel
        self.call = call
        self.limits = limits
        self.patient = patient
        self._vigil: WaitMonitor | None = None

    def __enter__(self) -> _GroupCall:
        self.channel.begin(self.call)
        self._marks = [(meter, meter.wait()) for meter in self.channel.meters]
        return self

    def __exit__(self, *details: object) -> None:
        for meter, begun in self._marks:
            meter.end_wait(begun)
        self.channel.end()

    def wait(self, work: Any) -> None:
        self.channel.wait(work, self)

    def vigil(self) -> WaitMonitor:
        if self._vigil is None:
            self._vigil = WaitMonitor(self.channel.beacon, self.limits, patient=self.patient)
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
        self.wait(self.channel.data_group(tensor).broadcast([tensor], _root_options(torch.distributed.BroadcastOptions, sender)))


def _no_group() -> None:
    return None


def _collective_counter(group: Any) -> Callable[[], int]:
    """Asks a group how many collectives it has begun; of one that does not count, the answer is more every time."""
    try:
        group._get_sequence_number_for_group()
    except RuntimeError:
        return count().__next__
    return group._get_sequence_number_for_group  # type: ignore[no-any-return]


def _root_options(options: Callable[[], Any], rank: int) -> Any:
    made = options()
    made.rootRank = rank
    return made


_CALLABLE_FROM_ANY_LINE = frozenset(
    {
        "wait_for_everyone",
        "main_process_first",
        "local_main_process_first",
        "destroy_process_group",
        "broadcast",
        "broadcast_object_list",
        "copy_tensor_to_devices",
        "gather_tensor_shape",
    }
)
"""Calls that programs make from two branches on purpose: who sends and who receives, who waits before and who after."""


def make_call(operation: str, agreement: str, describe: Callable[[], str]) -> CollectiveCall:
    """A call made at the user's present line; `describe` is asked only when the processes disagree.

    A call that joins everyone's data has to be made at the same line by all: from two lines it is most likely one that a process
    misses, and its data would be mixed with that of the next.
    """
    site = call_site()
    if operation.partition(" ")[0] not in _CALLABLE_FROM_ANY_LINE:
        agreement = f"{agreement}\n{site}"
    return CollectiveCall(operation, agreement, site, lambda: f"{operation} {describe()}".rstrip())


def announce_failure(channel: Channel, limits: Limits, operation: str, cause: Exception) -> Exception:
    """Tells the other processes that this one cannot take part, so that they raise too; gives back what to raise here.

    Where every process refuses for the same reason they agree, and each raises its own cause.
    """
    call = make_call(operation, f"refused: {cause}", lambda: f"(which could not be sent: {cause})")
    with channel.turn(call, limits) as turn:
        turn.exchange(Body())
    return cause


def check_rank(rank: int | None, world_size: int) -> None:
    """Raises for a rank that this job does not have."""
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not exist: this job has {world_size} processes, 0 to {world_size - 1}")


class BodyReader:
    """Takes the parts of a body out again, in the order in which they were added; of an array or a flat tensor of bytes."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._position = 0

    def take(self, length: int) -> Any:
        start = align(self._position)
        self._position = start + length
        return self._data[start : start + length]
