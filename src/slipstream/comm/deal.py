"""Dealing out: one rank has a part for every rank, and each gets its own. And telling: a small value of every rank, on all of them.

Both are one guarded call. A part is any nesting of containers with tensors, arrays, texts and plain data; tensors and arrays
travel as raw bytes behind one description of the part, so the number of tensors does not matter, and they arrive writable and
with memory of their own. Ranks need not know beforehand what they will get, and parts need not look alike.

A rank that has an exception instead of a value passes that: then no rank is left waiting for it, and every rank raises. Calls of a
loop come from lines that may differ between ranks (one of them draws a progress bar), so what has to agree is a text that names
the call, `condition`, where it is given, and the user's line otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from slipstream.comm import codec, tree
from slipstream.comm.channel import Body, Channel, Limits
from slipstream.comm.guarded import Reader, announce, check_rank
from slipstream.comm.leaves import Packed
from slipstream.comm.sites import call_site
from slipstream.comm.tensor_memory import copied
from slipstream.comm.verify import Call
from slipstream.errors import DistributedOperationException

__all__ = ["deal", "tell"]

_GOOD, _TROUBLE = 0, 1
_LONGEST_TROUBLE = 2000


def deal(
    channel: Channel,
    limits: Limits,
    parts: Sequence[Any] | Exception | None,
    *,
    sender: int = 0,
    operation: str = "deal",
    condition: str | None = None,
) -> Any:
    """This rank's part of what the sender has: `parts` is one for each rank there, or an exception, and is not looked at elsewhere.

    The sender gets its own part as it is. With an exception the sender raises it, and every other rank an error that tells it.

    >>> from slipstream.comm.channel import Solo
    >>> deal(Solo(), Limits(), [{"ids": [1, 2]}])
    {'ids': [1, 2]}
    """
    check_rank(sender, channel.world_size)
    name = f"{operation} from rank {sender}"
    if channel.rank != sender:
        call = _call(name, condition, lambda: "(to be received)")
        with channel.turn(call, limits) as turn:
            return _take(turn.exchange(Body(), sender=sender)[sender], channel, name, sender)
    trouble: Exception | None = None
    body = Body()
    try:
        if isinstance(parts, Exception):
            raise parts
        if parts is None or len(parts) != channel.world_size:
            given = "none" if parts is None else str(len(parts))
            raise ValueError(f"{operation} needs one part for each of {channel.world_size} processes, but rank {sender} has {given}")
        body = _dealt_body(parts, sender)
    except Exception as error:  # whatever a dataset or a foreign class raises: the others must hear of it
        trouble, body = error, _trouble_body(error)
    with channel.turn(_call(name, condition, lambda: _spelled(parts)), limits) as turn:
        turn.exchange(body, sender=sender)
    if trouble is not None:
        raise trouble
    assert isinstance(parts, Sequence)
    return parts[sender]


def tell(channel: Channel, limits: Limits, value: Any, *, operation: str = "tell", condition: str | None = None) -> list[Any]:
    """The values of all ranks, in the order of the ranks: small plain data. A rank that passes an exception makes every rank raise.

    >>> from slipstream.comm.channel import Solo
    >>> tell(Solo(), Limits(), (3, True))
    [(3, True)]
    """
    body = _trouble_body(value) if isinstance(value, Exception) else Body()
    if not isinstance(value, Exception):
        body.add(_flag(_GOOD))
        body.add(_bytes(codec.encode(value)))
    with channel.turn(_call(operation, condition, lambda: ""), limits) as turn:
        bodies = turn.exchange(body)
        if isinstance(value, Exception):
            raise value
        told = []
        for rank, data in enumerate(bodies):
            _check_trouble(data, channel, operation, rank)
            told.append(codec.decode(data[16:]))
    return told


def _call(operation: str, condition: str | None, describe: Callable[[], str]) -> Call:
    if condition is None:
        return announce(operation, "", describe)
    return Call(operation, condition, call_site(), lambda: f"{operation} ({condition}) {describe()}".rstrip())


def _spelled(parts: Any) -> str:
    return f"({type(parts).__name__} instead of data)" if isinstance(parts, Exception) else "(to be sent)"


# -- bodies -----------------------------------------------------------------------------------------------------------
#
# A flag of eight bytes; then, of a deal, where the part of each rank begins; then the parts. A part is the length of its description, the
# description (structure, types and shapes of the tensors, other leaves), and the bytes of the tensors, each aligned.


def _bytes(data: bytes) -> Any:
    return numpy.frombuffer(data, dtype=numpy.uint8)


def _flag(value: int) -> Any:
    return _bytes(value.to_bytes(8, "little"))


def _trouble_body(error: Exception) -> Body:
    body = Body()
    body.add(_flag(_TROUBLE))
    body.add(_bytes(f"{type(error).__name__}: {error}".encode()[:_LONGEST_TROUBLE]))
    return body


def _check_trouble(data: Any, channel: Channel, operation: str, rank: int) -> None:
    if data[0] == _TROUBLE:
        told = data[16:].tobytes().decode(errors="replace")
        raise DistributedOperationException(
            f"{operation} ended on every process because rank {rank} raised {told}\n"
            f"(raised on rank {channel.rank}; the traceback of rank {rank} shows where)"
        )


def _dealt_body(parts: Sequence[Any], sender: int) -> Body:
    body = Body()
    body.add(_flag(_GOOD))
    starts = numpy.zeros(len(parts), dtype=numpy.int64)
    body.add(starts.view(numpy.uint8))  # written when the body is sent: filled in below
    for rank, part in enumerate(parts):
        if rank != sender:
            starts[rank] = _add_part(body, part)
    return body


def _add_part(body: Body, part: Any) -> int:
    raw: list[Packed] = []
    others: list[Any] = []
    structure = _apart(part, raw, others)
    kinds = [[str(pack.dtype)[6:], list(pack.shape), pack.is_array] for pack in raw]
    description = codec.encode([structure, kinds, others])
    start = body.add(_flag(len(description)))
    body.add(_bytes(description))
    for pack in raw:
        body.add(pack.bytes() if pack.on_host else Packed(pack.tensor.cpu()).bytes())
    return start


def _apart(value: Any, raw: list[Packed], others: list[Any]) -> Any:
    """The structure, with a number for each leaf: n for the n-th tensor that travels as raw bytes, -n for the n-th of the others.

    A list or tuple without such tensors is one leaf, whatever its length.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is numpy.ndarray:
        if _travels_raw(value):
            raw.append(Packed(value))
            return len(raw)
    elif kind is dict:
        return {key: _apart(item, raw, others) for key, item in value.items()}
    elif kind is list or kind is tuple:
        tensors, rest = len(raw), len(others)
        inner = [_apart(item, raw, others) for item in value]
        if len(raw) > tensors:
            return inner if kind is list else tuple(inner)
        del others[rest:]
    elif tree.is_node(value):
        return tree.rebuild(value, [_apart(item, raw, others) for _, item in tree.children(value)])
    others.append(value)
    return -len(others)


def _travels_raw(leaf: Any) -> bool:
    """Plain tensors and arrays of numbers; other kinds of them keep their class on the way through the codec."""
    if type(leaf) is torch.Tensor:
        return leaf.layout is torch.strided and not (leaf.is_quantized or leaf.is_meta or leaf.is_nested)
    kind = leaf.dtype.kind
    return kind in "biufc" and leaf.dtype.isnative and leaf.dtype.itemsize <= (8 if kind == "f" else 16)


def _take(data: Any, channel: Channel, operation: str, sender: int) -> Any:
    _check_trouble(data, channel, operation, sender)
    start = data[16 : 16 + 8 * channel.world_size].view(numpy.int64)[channel.rank]
    reader = Reader(data[start:])
    length = int.from_bytes(reader.take(8), "little")
    structure, kinds, others = codec.decode(reader.take(length))
    raw = [_tensor(reader, getattr(torch, dtype), shape, is_array) for dtype, shape, is_array in kinds]
    return tree.map_leaves(lambda number: raw[number - 1] if number > 0 else others[-number - 1], structure)


def _tensor(reader: Reader, dtype: torch.dtype, shape: list[int], is_array: bool) -> Any:
    tensor = copied(memoryview(reader.take(math.prod(shape) * dtype.itemsize)), dtype, shape)
    return tensor.numpy() if is_array else tensor
