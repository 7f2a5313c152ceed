"""Send each rank its own part of what one rank has (`scatter`), and exchange a small value of every rank (`agree_or_raise`).

Both are one guarded call. A rank that has an exception instead of a value passes the exception: then every rank raises, and none is left
waiting. Parts may be any nesting of containers with tensors, arrays and plain data, and need not be alike. The ranks must agree on
`condition` where it is given, and on the user's line otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from slipstream.distributed import codec, pytree
from slipstream.distributed.call_site import call_site
from slipstream.distributed.codec import PackedTensor, tensor_from_bytes
from slipstream.distributed.guard import Body, BodyReader, Channel, CollectiveCall, Limits, check_rank, make_call
from slipstream.errors import DistributedOperationException

__all__ = ["scatter", "agree_or_raise"]

_STATUS_OK, _STATUS_ERROR = 0, 1
_MAX_ERROR_BYTES = 2000


def scatter(
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

    >>> from slipstream.distributed.guard import SingleProcessChannel
    >>> scatter(SingleProcessChannel(), Limits(), [{"ids": [1, 2]}])
    {'ids': [1, 2]}
    """
    check_rank(sender, channel.world_size)
    name = f"{operation} from rank {sender}"
    if channel.rank != sender:
        call = _scatter_call(name, condition, lambda: "(to be received)")
        with channel.turn(call, limits) as turn:
            return _receive_part(turn.exchange(Body(), sender=sender)[sender], channel, name, sender)
    trouble: Exception | None = None
    body = Body()
    try:
        if isinstance(parts, Exception):
            raise parts
        if parts is None or len(parts) != channel.world_size:
            given = "none" if parts is None else str(len(parts))
            raise ValueError(f"{operation} needs one part for each of {channel.world_size} processes, but rank {sender} has {given}")
        body = _scatter_body(parts, sender)
    except Exception as error:  # whatever a dataset or a foreign class raises: the others must hear of it
        trouble, body = error, _error_body(error)
    with channel.turn(_scatter_call(name, condition, lambda: _describe_parts(parts)), limits) as turn:
        turn.exchange(body, sender=sender)
    if trouble is not None:
        raise trouble
    assert isinstance(parts, Sequence)
    return parts[sender]


def agree_or_raise(channel: Channel, limits: Limits, value: Any, *, operation: str = "tell", condition: str | None = None) -> list[Any]:
    """The values of all ranks, in the order of the ranks: small plain data. A rank that passes an exception makes every rank raise.

    >>> from slipstream.distributed.guard import SingleProcessChannel
    >>> agree_or_raise(SingleProcessChannel(), Limits(), (3, True))
    [(3, True)]
    """
    body = _error_body(value) if isinstance(value, Exception) else Body()
    if not isinstance(value, Exception):
        body.add(_status_bytes(_STATUS_OK))
        body.add(_as_array(codec.encode(value)))
    with channel.turn(_scatter_call(operation, condition, lambda: ""), limits) as turn:
        bodies = turn.exchange(body)
        if isinstance(value, Exception):
            raise value
        told = []
        for rank, data in enumerate(bodies):
            _raise_remote_error(data, channel, operation, rank)
            told.append(codec.decode(data[16:]))
    return told


def _scatter_call(operation: str, condition: str | None, describe: Callable[[], str]) -> CollectiveCall:
    if condition is None:
        return make_call(operation, "", describe)
    return CollectiveCall(operation, condition, call_site(), lambda: f"{operation} ({condition}) {describe()}".rstrip())


def _describe_parts(parts: Any) -> str:
    return f"({type(parts).__name__} instead of data)" if isinstance(parts, Exception) else "(to be sent)"


# -- bodies -----------------------------------------------------------------------------------------------------------
#
# A flag of eight bytes; then, of a deal, where the part of each rank begins; then the parts. A part is the length of its description, the
# description (structure, types and shapes of the tensors, other leaves), and the bytes of the tensors, each aligned.


def _as_array(data: bytes) -> Any:
    return numpy.frombuffer(data, dtype=numpy.uint8)


def _status_bytes(value: int) -> Any:
    return _as_array(value.to_bytes(8, "little"))


def _error_body(error: Exception) -> Body:
    body = Body()
    body.add(_status_bytes(_STATUS_ERROR))
    body.add(_as_array(f"{type(error).__name__}: {error}".encode()[:_MAX_ERROR_BYTES]))
    return body


def _raise_remote_error(data: Any, channel: Channel, operation: str, rank: int) -> None:
    if data[0] == _STATUS_ERROR:
        told = data[16:].tobytes().decode(errors="replace")
        raise DistributedOperationException(
            f"{operation} ended on every process because rank {rank} raised {told}\n"
            f"(raised on rank {channel.rank}; the traceback of rank {rank} shows where)"
        )


def _scatter_body(parts: Sequence[Any], sender: int) -> Body:
    body = Body()
    body.add(_status_bytes(_STATUS_OK))
    starts = numpy.zeros(len(parts), dtype=numpy.int64)
    body.add(starts.view(numpy.uint8))  # written when the body is sent: filled in below
    for rank, part in enumerate(parts):
        if rank != sender:
            starts[rank] = _add_part(body, part)
    return body


def _add_part(body: Body, part: Any) -> int:
    raw: list[PackedTensor] = []
    others: list[Any] = []
    structure = _split_leaves(part, raw, others)
    kinds = [[str(pack.dtype)[6:], list(pack.shape), pack.is_array] for pack in raw]
    description = codec.encode([structure, kinds, others])
    start = body.add(_status_bytes(len(description)))
    body.add(_as_array(description))
    for pack in raw:
        body.add(pack.bytes() if pack.on_host else PackedTensor(pack.tensor.cpu()).bytes())
    return start


def _split_leaves(value: Any, raw: list[PackedTensor], others: list[Any]) -> Any:
    """The structure, with a number for each leaf: n for the n-th tensor that travels as raw bytes, -n for the n-th of the others.

    A list or tuple without such tensors is one leaf, whatever its length.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is numpy.ndarray:
        if _is_sent_raw(value):
            raw.append(PackedTensor(value))
            return len(raw)
    elif kind is dict:
        return {key: _split_leaves(item, raw, others) for key, item in value.items()}
    elif kind is list or kind is tuple:
        tensors, rest = len(raw), len(others)
        inner = [_split_leaves(item, raw, others) for item in value]
        if len(raw) > tensors:
            return inner if kind is list else tuple(inner)
        del others[rest:]
    elif pytree.is_node(value):
        return pytree.rebuild(value, [_split_leaves(item, raw, others) for _, item in pytree.children(value)])
    others.append(value)
    return -len(others)


def _is_sent_raw(leaf: Any) -> bool:
    """Plain tensors and arrays of numbers; other kinds of them keep their class on the way through the codec."""
    if type(leaf) is torch.Tensor:
        return leaf.layout is torch.strided and not (leaf.is_quantized or leaf.is_meta or leaf.is_nested)
    kind = leaf.dtype.kind
    return kind in "biufc" and leaf.dtype.isnative and leaf.dtype.itemsize <= (8 if kind == "f" else 16)


def _receive_part(data: Any, channel: Channel, operation: str, sender: int) -> Any:
    _raise_remote_error(data, channel, operation, sender)
    start = data[16 : 16 + 8 * channel.world_size].view(numpy.int64)[channel.rank]
    reader = BodyReader(data[start:])
    length = int.from_bytes(reader.take(8), "little")
    structure, kinds, others = codec.decode(reader.take(length))
    raw = [_read_tensor(reader, getattr(torch, dtype), shape, is_array) for dtype, shape, is_array in kinds]
    return pytree.map_leaves(lambda number: raw[number - 1] if number > 0 else others[-number - 1], structure)


def _read_tensor(reader: BodyReader, dtype: torch.dtype, shape: list[int], is_array: bool) -> Any:
    tensor = tensor_from_bytes(memoryview(reader.take(math.prod(shape) * dtype.itemsize)), dtype, shape)
    return tensor.numpy() if is_array else tensor
