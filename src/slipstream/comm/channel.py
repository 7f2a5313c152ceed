"""The channel: one generation of the process group, as the collectives see it.

A `Turn` is one guarded call. It sends the header (and a body that fits) to everyone in a single all-gather on the control group,
a gloo group of its own whose time limits are ours; if all ranks agree, bodies that did not fit follow in one second
collective. Waiting happens in short slices, so that Ctrl-C works, a lost rank is noticed, the table of ranks is printed after
`hang_warning` seconds and the wait ends with an exception at the limit. Nothing here knows tensors' meaning: `ops.py` does.

`Solo` is the channel of a single process: the same interface, and nothing to wait for.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import numpy
import torch

from slipstream.comm.beacon import Beacon
from slipstream.comm.verify import HEADER_SIZE, Call, Headers, explain_mismatch
from slipstream.comm.vigil import Limits, Vigil
from slipstream.errors import DistributedOperationException, MismatchError

__all__ = ["Body", "Channel", "GroupChannel", "Limits", "Solo", "Turn", "aligned"]

_SLICE = timedelta(milliseconds=200)
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

    def turn(self, call: Call, limits: Limits, *, patient: bool = False) -> _TurnContext: ...


class _TurnContext(Protocol):
    def __enter__(self) -> Turn: ...

    def __exit__(self, *details: object) -> None: ...


class Solo:
    """One process: everything arrives at once, and what is sent is what comes back."""

    rank = 0
    world_size = 1
    room = sys.maxsize

    def turn(self, call: Call, limits: Limits, *, patient: bool = False) -> Solo:
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
    """Several processes over a control group (gloo) and a data group (the device's backend)."""

    def __init__(self, *, control: Any, data: Any, beacon: Beacon, rank: int, world_size: int, generation: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self.sequence = 0
        self.broken: str | None = None
        """Why this generation can no longer be used; the next call opens another."""
        self.beacon = beacon
        self._control = control
        self._data = data
        self._block = max(256, min(4096, 262144 // world_size))
        self._send = torch.zeros(self._block, dtype=torch.uint8)
        self._receive = torch.zeros((world_size, self._block), dtype=torch.uint8)
        self._send_bytes: _Array = self._send.numpy()
        self._receive_bytes: _Array = self._receive.numpy()
        self.room = self._block - HEADER_SIZE
        self._lock = threading.RLock()
        self._sites_warned: set[tuple[bytes, ...]] = set()

    def turn(self, call: Call, limits: Limits, *, patient: bool = False) -> _GroupTurn:
        """Begins a guarded call; `patient` waits as long as the others show signs of life, up to `barrier_timeout`."""
        return _GroupTurn(self, call, limits, patient)

    def release(self) -> tuple[Any, Any]:
        """Gives the groups back to their owner, who closes them."""
        groups = self._control, self._data
        self._control = self._data = None
        return groups

    # -- used by a turn -------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> None:
        self._lock.acquire()
        try:
            self.sequence += 1
            self.beacon.enter(self.generation, self.sequence, call.operation, call.site)
            if self.beacon.loss is not None:
                self.broken = self.beacon.loss
                Vigil(self.beacon, call.operation, call.site, Limits()).lose()
        except BaseException:
            self._lock.release()
            raise

    def end(self) -> None:
        self.beacon.leave()
        self._lock.release()

    def exchange(self, turn: _GroupTurn, body: Body, sender: int | None, receiver: int | None) -> list[_Array]:
        """One all-gather of every rank's block, the header and a body that fits; bodies that do not fit follow in a second one."""
        header = turn.call.header(self.sequence, body.length)
        self._send_bytes[:HEADER_SIZE] = numpy.frombuffer(header, dtype=numpy.uint8)
        if body.length <= self.room:
            body.write_to(self._send_bytes[HEADER_SIZE:])
        turn.wait(self._control._allgather_base(self._receive.view(-1), self._send))
        headers = Headers(self._receive_bytes, self.rank)
        if not headers.agree():
            self._disagree(turn)
        sites = headers.sites()
        if sites is not None and sites not in self._sites_warned:
            self._warn_of_sites(turn.call, sites)
        lengths = headers.body_lengths()
        if max(lengths) <= self.room:
            return [block[HEADER_SIZE : HEADER_SIZE + length] for block, length in zip(self._receive_bytes, lengths, strict=True)]
        return self._exchange_bodies(turn, body, lengths, sender, receiver)

    def _exchange_bodies(
        self, turn: _GroupTurn, body: Body, lengths: Sequence[int], sender: int | None, receiver: int | None
    ) -> list[_Array]:
        longest = aligned(max(lengths))
        own = torch.empty(longest, dtype=torch.uint8)
        body.write_to(own.numpy())
        if sender is not None:
            turn.wait(self._control.broadcast([own], _root(torch.distributed.BroadcastOptions, sender)))
            return [own.numpy()[: length if rank == sender else 0] for rank, length in enumerate(lengths)]
        if receiver is not None:
            rows = [torch.empty_like(own) for _ in lengths] if self.rank == receiver else []
            turn.wait(self._control.gather([rows] if rows else [], [own], _root(torch.distributed.GatherOptions, receiver)))
            return [row.numpy()[:length] for row, length in zip(rows, lengths, strict=False)] or [own.numpy()[:0] for _ in lengths]
        everything = torch.empty((self.world_size, longest), dtype=torch.uint8)
        turn.wait(self._control._allgather_base(everything.view(-1), own))
        return [row[:length] for row, length in zip(everything.numpy(), lengths, strict=True)]

    def _disagree(self, turn: _GroupTurn) -> NoReturn:
        """All ranks come to the same verdict, so all send what they were about to do, and all raise."""
        text = f"{turn.call.describe()} at {turn.call.site}".encode()[: self._block]
        self._send_bytes[:] = 0
        self._send_bytes[: len(text)] = numpy.frombuffer(text, dtype=numpy.uint8)
        turn.wait(self._control._allgather_base(self._receive.view(-1), self._send))
        texts = [block.tobytes().rstrip(b"\0").decode(errors="replace") for block in self._receive_bytes]
        raise MismatchError(f"{explain_mismatch(texts, self.sequence)}\n(raised on rank {self.rank})")

    def _warn_of_sites(self, call: Call, sites: tuple[bytes, ...]) -> None:
        """The same call from different lines may be right (two branches) or a call that one rank misses: said once."""
        self._sites_warned.add(sites)
        others = ", ".join(str(rank) for rank, site in enumerate(sites) if site != sites[self.rank])
        warnings.warn(
            f"{call.operation} number {self.sequence} was called at {call.site} on rank {self.rank}, and at another line on rank {others}. "
            "If these are not meant to be one call, a process misses a call and results are mixed up.",
            stacklevel=2,
        )

    def data_group(self, tensor: torch.Tensor) -> Any:
        """Host memory goes over the control group, device memory over the data group."""
        return self._control if tensor.device.type == self._send.device.type else self._data

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait(self, work: Any, turn: _GroupTurn) -> None:
        """Waits in slices: a wait that takes longer than one is watched by a vigil."""
        vigil: Vigil | None = None
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._connection_lost(turn, error)
            vigil = vigil or turn.vigil()
            try:
                vigil.look()
            except DistributedOperationException as error:
                self.broken = str(error).splitlines()[0]
                raise

    def _connection_lost(self, turn: _GroupTurn, error: RuntimeError) -> None:
        """gloo says only that a connection broke: the launcher, or the others' silence, says whose."""
        self.broken = "a connection broke"
        notice = self.beacon.exit_notice(wait=1.5)
        self.beacon.loss = (
            str(notice) if notice else self.beacon.loss or f"the connection to another rank broke ({str(error).splitlines()[0]})"
        )
        turn.vigil().lose()


class _GroupTurn:
    """A call under way on a `GroupChannel`."""

    def __init__(self, channel: GroupChannel, call: Call, limits: Limits, patient: bool) -> None:
        self.channel = channel
        self.call = call
        self.limits = limits
        self.patient = patient

    def __enter__(self) -> _GroupTurn:
        self.channel.begin(self.call)
        return self

    def __exit__(self, *details: object) -> None:
        self.channel.end()

    def wait(self, work: Any) -> None:
        self.channel.wait(work, self)

    def vigil(self) -> Vigil:
        return Vigil(self.channel.beacon, self.call.operation, self.call.site, self.limits, patient=self.patient)

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


def _root(options: Callable[[], Any], rank: int) -> Any:
    made = options()
    made.rootRank = rank
    return made
