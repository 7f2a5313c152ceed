"""Compare what every rank is about to do before any payload is transferred, so that a mistake is an error and not a hang.

A `CollectiveCall` carries a text that must be the same on all ranks; its digest is exchanged together with the sequence number. If all
agree, small bodies have already arrived and larger ones follow, straight into the memory where they stay. If they disagree, every rank
says what it has called, every rank raises the same table, and the group remains usable. Waiting happens in short slices, so that Ctrl-C
works, a lost rank is noticed and long waits are reported. The base class `Channel` is the same interface for one process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import numpy
import torch

from slipstream.devices.table import CPU
from slipstream.distributed.call_site import call_site
from slipstream.distributed.codec import byte_view
from slipstream.distributed.heartbeat import Heartbeat, format_ranks
from slipstream.distributed.transport import ALIGNMENT, ConnectionLost, Exchanged, Inline, SocketTransport, WaitCallback
from slipstream.distributed.wait_monitor import Limits, WaitMonitor, guess_condition
from slipstream.errors import DistributedOperationException, MismatchError, StateError

if TYPE_CHECKING:
    from slipstream.observability.timing.meter import Meter

__all__ = [
    "Body", "BodyReader", "Channel", "CollectiveCall", "GroupChannel", "GuardedCall", "Limits", "Place", "align",
    "announce_failure", "check_rank", "encode_message", "explain_mismatch", "make_call", "wait_in_slices",
]


_LONGEST_SHOWN = 600
_DESCRIPTIONS_TOTAL = 1 << 24
"""The most bytes that the descriptions of all ranks take together when they disagree."""


_SAME_BARRIER: Final = MappingProxyType({"local_main_process_first": "main_process_first"})
"""Calls that meet each other when one is inside the other: ranks that wait before the outer block meet those that end the inner one."""


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
        """Returns what this rank passed, in full; called only for an error message."""

    def fingerprint(self, sequence: int) -> bytes:
        """Return the bytes that must be the same on all ranks.

        >>> len(CollectiveCall("gather", "float32(*)", "train.py:3", str).fingerprint(7))
        24
        """
        name = _SAME_BARRIER.get(self.operation, self.operation)
        return sequence.to_bytes(8, "little") + _agreement_digest(f"{name}\n{self.agreement}")


_EMPTY_ADVICE: Final = (
    "An empty list became float32: write torch.tensor(values, dtype=...), so that a process without values has the type of the others."
)


_LIST_ADVICE: Final = (
    "A list of nothing but tensors is structure, and has to be alike on all processes. gather_object joins lists of any length that hold "
    "anything."
)
_GATHER_NAMES: Final = ("gather ", "gather_for_metrics ")


def explain_mismatch(texts: Sequence[str], sequence: int) -> str:
    """Return the message for ranks that made different calls; ranks with the same call share a line.

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
    lines = [f"  {format_ranks(ranks)}: {_shorten(text, begin)}" for text, ranks in ranks_by_text.items()]
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
    """Return whether all ranks gather, and some of them a list."""
    fit = all(text.startswith(_GATHER_NAMES) and "(which could not be sent" not in text for text in texts)
    return fit and any("[" in text or " entries" in text for text in texts)


def _explain_lone_rank(texts: Sequence[str]) -> str:
    """Return a question about a line that only one rank is at, with the most likely condition around it; empty if there is none."""
    sites = [text.rpartition(" at ")[2] for text in texts]
    times = Counter(sites)
    ranks = [rank for rank, site in enumerate(sites) if times[site] == 1]
    if not ranks or (ranks[0] != 0 and len(ranks) > 1):
        return ""
    rank = ranks[0]
    opposite = f", or {sites[1]} under its opposite" if len(sites) == 2 else ""
    return (
        f"Rank {rank} alone is at {sites[rank]}: {guess_condition(rank, len(texts))}{opposite}? Call it on every process, and keep "
        "under the condition what is done with the result."
    )


def _shorten(text: str, begin: int) -> str:
    """Shorten a long text to the surroundings of the first difference, and keep the line of the call."""
    if len(text) <= _LONGEST_SHOWN:
        return text
    what, _, site = text.rpartition(" at ")
    start = max(0, begin - 100)
    return f"{what[:40]} ... {what[start : start + 300]} ... at {site}"


_COMBINED: Final[dict[str, Callable[..., torch.Tensor]]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_SLICE = timedelta(milliseconds=200)
_CPU = CPU.type
_Result = TypeVar("_Result")
_Array = Any
"""A one-dimensional numpy array of bytes."""


Place = Callable[[list[_Array]], Sequence[Sequence[_Array]]]
"""Given what leads the bodies of all ranks, returns for each rank the arrays that take the parts of its body behind that."""


def align(position: int) -> int:
    """Return the next position at which a tensor of any type may begin.

    >>> align(16), align(17)
    (16, 32)
    """
    return -(-position // ALIGNMENT) * ALIGNMENT


class Body:
    """Bytes to send, in parts, each at an offset that is aligned for every type of tensor."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, _Array]] = []
        self.length = 0

    def add(self, part: _Array) -> int:
        """Append bytes and return where they begin."""
        start = align(self.length)
        if part.size:
            self._parts.append((start, part))
        self.length = start + part.size
        return start

    def add_bytes(self, data: bytes) -> int:
        return self.add(numpy.frombuffer(data, dtype=numpy.uint8))

    def parts_behind(self, lead: int) -> list[_Array]:
        return [part for start, part in self._parts if start >= lead]

    def write_to(self, target: _Array) -> None:
        """Copy it to an array, or as many of its first parts as the array takes."""
        for start, part in self._parts:
            if start < target.size:
                target[start : start + part.size] = part

    def joined(self) -> _Array:
        """Return all of it in one array, without a copy if it has one part."""
        if len(self._parts) == 1:
            return self._parts[0][1]
        whole = numpy.empty(self.length, dtype=numpy.uint8)
        self.write_to(whole)
        return whole


class GuardedCall:
    """A guarded call in progress. This base class is for a single process, which receives what it sends."""

    world_size = 1

    def __enter__(self) -> GuardedCall:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    def exchange(
        self, body: Body, *, sender: int | None = None, receiver: int | None = None, place: Place | None = None, lead: int = 0
    ) -> list[_Array]:
        """Return the bodies of all ranks (of `sender` only, or only on `receiver`; others get empty ones).

        With `place`, return what leads them, the first `lead` bytes, and put everything else where `place` says.
        They may be views of what the user has passed: copy what you keep.
        """
        own = numpy.empty(body.length, dtype=numpy.uint8)
        body.write_to(own)
        if place is not None:
            _copy_parts([own], place([own]), lead)
        return [own]

    def together(self, operation: Callable[[], _Result]) -> _Result:
        """Return what an operation returns in which the other ranks take part; if it fails on one rank, their waits end too."""
        return operation()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> None:
        """Combine the tensor over the ranks, in place."""

    def broadcast(self, tensor: torch.Tensor, sender: int) -> None:
        """Overwrite the tensor with that of `sender`."""


def _copy_parts(bodies: Sequence[_Array], places: Sequence[Sequence[_Array]], lead: int) -> None:
    """Copy the parts behind the leads of whole bodies to their places."""
    for body, targets in zip(bodies, places, strict=True):
        end = lead
        for target in targets:
            start = align(end)
            end = start + target.size
            target[:] = body[start:end]


class Channel:
    """The interface that collectives need of a process group. This base class is the channel of a single process."""

    rank = 0
    world_size = 1
    max_inline_bytes = sys.maxsize
    """The largest body that is sent with the header, so that a call costs one exchange."""
    blocked_by = ""
    """The name of a block in which collectives are not allowed, because the other processes may never call them; or empty."""
    broken: str | None = None
    """Why the channel can no longer be used; the next call opens another."""

    def guard(self, call: CollectiveCall, limits: Limits, *, patient: bool = False) -> GuardedCall:
        """Return the context of a call; a `patient` call waits up to `barrier_timeout` while the others show signs of life."""
        if self.blocked_by:  # also with one process, because the program would hang with two
            raise StateError(
                f"{call.operation} at {call.site} was called inside {self.blocked_by}: processes get different numbers of items, so the "
                f"others may never make this call. Call it after that block, on every process.\n(raised on rank {self.rank})"
            )
        return self._begin(call, limits, patient)

    def _begin(self, call: CollectiveCall, limits: Limits, patient: bool) -> GuardedCall:
        return GuardedCall()


class GroupChannel(Channel):
    """The channel of several processes: host memory travels over sockets, device memory over torch's default group."""

    def __init__(
        self,
        *,
        transport: SocketTransport,
        data: Any,
        disconnect: Callable[[], bool],
        recording: Callable[[], AbstractContextManager[None]],
        heartbeat: Heartbeat,
        rank: int,
        world_size: int,
        generation: int,
        device: str | None = None,
    ) -> None:
        self.device = device
        """The type of device whose memory the data group takes; None for host memory alone."""
        self.unraised: DistributedOperationException | None = None
        """Why a wait on the device was ended, until the program has heard of it."""
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.sequence = 0
        self.max_inline_bytes = transport.max_inline_bytes
        self.torch_group_desynchronized: str | None = None
        """Why torch collectives no longer match between the ranks, though guarded ones do; the next watched section reopens the group."""
        self.meters: Iterable[Meter] = ()
        """Where the time inside calls is recorded."""
        self.recording = recording
        """A block in which torch opens groups of some of the ranks: their waits end with those of the default group."""
        self.heartbeat = heartbeat
        self.transport = transport
        self.data = data
        self.count_torch_collectives = _collective_counter(data)
        """Returns how many collectives torch's default group has begun."""
        heartbeat.count_with(self.count_torch_collectives)
        self.lock = threading.RLock()
        self._disconnect = disconnect
        self._aborting = threading.Lock()

    @property
    def usable(self) -> bool:
        """Whether both guarded and torch collectives can be called."""
        return self.broken is None and self.torch_group_desynchronized is None

    def _begin(self, call: CollectiveCall, limits: Limits, patient: bool) -> GuardedCall:
        return _GroupCall(self, call, limits, patient)

    def release(self, reason: str) -> Any:
        """Close the transport, and return torch's group, which the caller closes."""
        self.broken = self.broken or reason
        self.transport.close()
        group, self.data = self.data, None
        return group

    def abort(self, reason: str) -> bool:
        """End this generation by closing its connections, which also ends waits of other ranks in torch collectives.

        Return whether the connections of torch's default group were closed; if not, waits in its collectives do not end.
        """
        self.broken = self.broken or reason
        with self._aborting:  # the waiting thread and the heartbeat may both call it
            self.transport.close()
            return self._disconnect()


class _GroupCall(GuardedCall):
    """A call in progress on a `GroupChannel`."""

    def __init__(self, channel: GroupChannel, call: CollectiveCall, limits: Limits, patient: bool) -> None:
        self.world_size = channel.world_size
        self._channel = channel
        self._call = call
        self._limits = limits
        self._patient = patient
        self._monitor: WaitMonitor | None = None

    def __enter__(self) -> GuardedCall:
        channel = self._channel
        channel.lock.acquire()
        try:
            channel.sequence += 1
            channel.heartbeat.enter(channel.generation, channel.sequence, self._call.operation, self._call.site)
            if channel.heartbeat.peer_failure is not None:
                self._raise_peer_failure()
        except BaseException:
            channel.lock.release()
            raise
        self._marks = [(meter, meter.wait()) for meter in channel.meters]
        return self

    def __exit__(self, *details: object) -> None:
        for meter, begun in self._marks:
            meter.end_wait(begun)
        self._channel.heartbeat.leave()
        self._channel.lock.release()

    def exchange(
        self, body: Body, *, sender: int | None = None, receiver: int | None = None, place: Place | None = None, lead: int = 0
    ) -> list[_Array]:
        """Compare the calls, and take the body along if it fits; bodies that do not fit follow along the ring."""
        following = body.length if place is None else sum(part.size for part in body.parts_behind(lead))
        found = self._meet(body, lead, following)
        if not found.agreed:
            self._raise_mismatch()
        receives = receiver in (None, self._channel.rank)
        if not found.complete:
            return self.together(lambda: self._exchange_large(body, lead, found, sender, receiver, place))
        if place is not None and receives:
            _copy_parts(found.bodies, place(found.bodies), lead)
        return found.bodies

    def _meet(self, body: Body, lead: int, following: int) -> Exchanged:
        """Compare the calls of all ranks, and exchange the bodies, or what comes first of those that are too large."""
        channel = self._channel
        is_whole = body.length <= channel.max_inline_bytes
        size = body.length if is_whole else lead
        inline = Inline(bytearray(align(size)), size, is_whole)
        if size:
            body.write_to(numpy.frombuffer(inline.data, dtype=numpy.uint8))
        fingerprint = self._call.fingerprint(channel.sequence)
        found = self.together(lambda: channel.transport.exchange(fingerprint, inline, following, self._check))
        if channel.transport.ended():  # a rank may leave after this call, but must not abort it
            channel.heartbeat.find_peer_failure(0.0)
            if channel.heartbeat.peer_failure is not None:
                self._raise_peer_failure()
        return found

    def _exchange_large(
        self, body: Body, lead: int, found: Exchanged, sender: int | None, receiver: int | None, place: Place | None
    ) -> list[_Array]:
        transport, rank = self._channel.transport, self._channel.rank
        own = list(filter(len, [body.joined()] if place is None else body.parts_behind(lead)))
        if receiver not in (None, rank):
            transport.gather_to(receiver, own, found.following, self._check)
            return [numpy.empty(0, dtype=numpy.uint8)] * len(found.bodies)
        places = [[numpy.empty(size, dtype=numpy.uint8)] for size in found.following] if place is None else place(found.bodies)
        if sender is not None:
            transport.broadcast(own if rank == sender else places[sender], sender, self._check)
        elif receiver is not None:
            transport.gather_at(receiver, places, self._check)
        else:
            transport.all_gather(own, places, self._check)
        for target, part in zip(filter(len, places[rank]), own, strict=True):
            target[:] = part
        return found.bodies if place is not None else [array for (array,) in places]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a tensor in device memory."""
        gathered = tensor.new_empty((self._channel.world_size * tensor.numel(),))
        # torch internals: the flat all-gather has no public method on a group object, and `dist.all_gather_into_tensor` takes only
        # groups that torch created by name. Tried on torch 2.13; tests/distributed/test_collectives.py notices. It can go when
        # ProcessGroup.all_gather_into_tensor is public.
        self._wait(self._channel.data._allgather_base(gathered, tensor))
        return gathered

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> None:
        if tensor.device.type == _CPU:
            self._all_reduce_host(tensor, _COMBINED[operation])
            return
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = getattr(torch.distributed.ReduceOp, operation.upper())
        self._wait(self._channel.data.allreduce([tensor], options))

    def _all_reduce_host(self, tensor: torch.Tensor, combine: Callable[..., torch.Tensor]) -> None:
        def add(where: slice, received: _Array) -> None:
            own = tensor[where.start // unit : where.stop // unit]
            combine(own, torch.from_numpy(received).view(tensor.dtype), out=own)

        unit = tensor.element_size()
        data = numpy.frombuffer(byte_view(tensor), dtype=numpy.uint8)
        self.together(lambda: self._channel.transport.all_reduce(data, add, self._check, unit))

    def broadcast(self, tensor: torch.Tensor, sender: int) -> None:
        """Broadcast a tensor in device memory."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = sender
        self._wait(self._channel.data.broadcast([tensor], options))

    def _raise_mismatch(self) -> NoReturn:
        """Exchange descriptions of the calls, and raise; all ranks come here together."""
        limit = _DESCRIPTIONS_TOTAL // self._channel.world_size
        site = encode_message(f" at {self._call.site}", limit)
        description = Body()
        description.add_bytes(encode_message(self._call.describe(), limit - len(site)) + site)
        found = self._meet(description, 0, description.length)
        bodies = found.bodies
        if not found.complete:
            bodies = self.together(lambda: self._exchange_large(description, 0, found, None, None, None))
        texts = [body.tobytes().decode(errors="replace") for body in bodies]
        raise MismatchError(f"{explain_mismatch(texts, self._channel.sequence)}\n(raised on rank {self._channel.rank})")

    # -- waiting --------------------------------------------------------------------------------------------------

    def _wait(self, work: Any) -> None:
        self.together(lambda: wait_in_slices(work, self._check))

    def together(self, operation: Callable[[], _Result]) -> _Result:
        """Run an operation that waits for other ranks, and explain a broken connection by what the launcher or the other rank posted."""
        try:
            return operation()
        except ConnectionLost as lost:
            who = "another rank" if lost.rank is None else f"rank {lost.rank}"
            self._channel.heartbeat.find_peer_failure(1.5, f"the connection to {who} broke ({lost})")
            self._tell_others(self._channel.heartbeat.peer_failure)
            self._raise_peer_failure()
        except BaseException as error:  # an interrupted exchange may leave half a frame behind
            if isinstance(error, Exception) and self._channel.broken is None and not isinstance(error, DistributedOperationException):
                self._tell_others(f"rank {self._channel.rank} failed in {self._call.operation}: {type(error).__name__}: {error}")
            self._channel.abort(f"{self._call.operation} at {self._call.site} was interrupted by {type(error).__name__}")
            raise

    def _check(self) -> None:
        """Report a long wait, and raise if it cannot complete or has timed out."""
        if self._monitor is None:
            self._monitor = WaitMonitor(self._channel.heartbeat, self._limits, patient=self._patient)
        self._monitor.check()

    def _tell_others(self, cause: str | None) -> None:
        """Tell why this rank closes its connections: ranks that are not neighbours of a lost one notice only that."""
        heartbeat = self._channel.heartbeat
        if not heartbeat.is_mismatch:
            heartbeat.post("gave_up", generation=self._channel.generation, call=self._call.operation, because=cause)

    def _raise_peer_failure(self) -> NoReturn:
        self._channel.abort(str(self._channel.heartbeat.peer_failure))
        WaitMonitor(self._channel.heartbeat, self._limits, patient=self._patient).raise_peer_failure()


def wait_in_slices(work: Any, check: WaitCallback) -> None:
    """Wait for an operation of a process group; `check` is called several times a second and may end the wait by raising."""
    while not _is_done(work):
        check()
    try:
        work.wait(_SLICE)  # returns at once, and raises if the operation failed
    except RuntimeError as error:
        raise ConnectionLost(None, str(error).splitlines()[0]) from None


def _is_done(work: Any) -> bool:
    """Return whether an operation ends within a slice, successfully or not."""
    try:
        work.wait(_SLICE)
    except RuntimeError:  # not yet, or it failed
        return bool(work.is_completed())
    return True


def _collective_counter(group: Any) -> Callable[[], int]:
    """Return a function that counts the collectives a group has begun; for a group without a counter, it counts its own calls."""
    # torch internals: the sequence number of a group, with which a section knows whether torch's collectives have begun in it. Tried on
    # torch 2.13; tests/distributed/test_watchdog.py notices. It can go when torch tells which collective a rank waits in.
    # A group of several backends answers for one of them, or for none if that is not torch's own: so each backend is asked.
    counters = []
    for backend in {id(backend): backend for backend in map(group._get_backend, group._device_types)}.values():
        try:
            backend._get_sequence_number_for_group()
        except RuntimeError:  # it does not count
            continue
        counters.append(backend._get_sequence_number_for_group)
    if len(counters) == 1:
        return counters[0]  # type: ignore[no-any-return]
    return (lambda: sum(counter() for counter in counters)) if counters else count().__next__


_CALLABLE_FROM_ANY_LINE = {
    "wait_for_everyone", "main_process_first", "local_main_process_first", "destroy_process_group",
    "broadcast", "broadcast_object_list", "copy_tensor_to_devices", "gather_tensor_shape",
}
"""Calls that programs make from two branches on purpose: sender and receivers, those that wait before a block and after it."""


def make_call(operation: str, agreement: str, describe: Callable[[], str]) -> CollectiveCall:
    """Return a call made at the user's current line; `describe` is called only when the processes disagree.

    All processes must make a call that joins data at the same line. From two lines, a process has most likely missed a call, and its
    data would be joined with that of the next one.
    """
    site = call_site()
    if operation.partition(" ")[0] not in _CALLABLE_FROM_ANY_LINE:
        agreement = f"{agreement}\n{site}"
    return CollectiveCall(operation, agreement, site, lambda: f"{operation} {describe()}".rstrip())


def announce_failure(channel: Channel, limits: Limits, operation: str, cause: Exception) -> Exception:
    """Tell the other processes that this one cannot take part, so that they raise too; return the exception to raise here.

    If every process fails for the same reason, the headers agree, and each raises its own cause.
    """
    call = make_call(operation, f"refused: {cause}", lambda: f"(which could not be sent: {cause})")
    with channel.guard(call, limits) as guarded:
        guarded.exchange(Body())
    return cause


def encode_message(text: str, limit: int) -> bytes:
    """Return what other ranks show of a text, in at most so many bytes; one that is cut says how long it was.

    Names of files may hold characters that UTF-8 does not have.

    >>> encode_message("no file caf\\udce9.txt", 40), encode_message("a" * 100, 30)
    (b'no file caf\\\\udce9.txt', b'aaaaaaaaa ... (100 characters)')
    """
    data = text.encode(errors="backslashreplace")
    end = f" ... ({len(text)} characters)".encode()
    return data if len(data) <= limit else data[: max(0, limit - len(end))] + end


def check_rank(rank: int | None, world_size: int) -> None:
    """Raise for a rank that this job does not have."""
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not exist: this job has {world_size} processes, 0 to {world_size - 1}")


class BodyReader:
    """Reads the parts of a body in the order in which they were added, from an array or a flat tensor of bytes."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._position = 0

    def take(self, length: int) -> Any:
        start = align(self._position)
        self._position = start + length
        return self._data[start : start + length]
