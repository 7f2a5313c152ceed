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
from slipstream.distributed.codec import PackedTensor, is_plain_tensor, tensor_from_chunks
from slipstream.distributed.guard import Body, BodyReader, Channel, CollectiveCall, Limits, check_rank, make_call
from slipstream.errors import DistributedOperationException

__all__ = ["scatter", "agree_or_raise"]

_OK, _ERROR = bytes(8), bytes([1, *bytes(7)])
_MAX_ERROR_BYTES = 2000


def scatter(
    channel: Channel,
    limits: Limits,
    parts: Sequence[Any] | Exception | None,
    *,
    sender: int = 0,
    operation: str = "scatter",
    condition: str | None = None,
) -> Any:
    """Return this rank's part of what the sender has: `parts` is one for each rank there, or an exception, and is ignored elsewhere.

    The sender gets its own part as it is. Tensors of the other parts arrive on their rank's current device of the type that they were on.
    With an exception the sender raises it, and every other rank an error that quotes it.

    >>> scatter(Channel(), Limits(), [{"ids": [1, 2]}])
    {'ids': [1, 2]}
    """
    check_rank(sender, channel.world_size)
    name = f"{operation} from rank {sender}"
    if channel.rank != sender:
        with channel.guard(_scatter_call(name, condition, "(to be received)"), limits) as guarded:
            return _receive_part(guarded.exchange(Body(), sender=sender)[sender], channel, name, sender)
    failure: Exception | None = None
    description = "(to be sent)"
    try:
        if isinstance(parts, Exception):
            raise parts
        if parts is None or len(parts) != channel.world_size:
            given = "none" if parts is None else str(len(parts))
            raise ValueError(f"{operation} needs one part for each of {channel.world_size} processes, but rank {sender} has {given}")
        body = _scatter_body(parts, sender)
    except Exception as error:  # whatever a dataset or a class of the user's raises: the others must hear of it
        failure, body, description = error, _error_body(error), f"({type(error).__name__} instead of data)"
    with channel.guard(_scatter_call(name, condition, description), limits) as guarded:
        guarded.exchange(body, sender=sender)
    if failure is not None:
        raise failure
    assert isinstance(parts, Sequence)
    return parts[sender]


def agree_or_raise(
    channel: Channel,
    limits: Limits,
    value: Any,
    *,
    operation: str = "agree_or_raise",
    condition: str | None = None,
    remote_error: Callable[[int, str], Exception] | None = None,
) -> list[Any]:
    """Return the values of all ranks, in rank order: small plain data. A rank that passes an exception makes every rank raise.

    `remote_error` makes what is raised for the exception of another rank, of its rank and text; else a `DistributedOperationException`.

    >>> agree_or_raise(Channel(), Limits(), (3, True))
    [(3, True)]
    """
    failed = isinstance(value, Exception)
    body = _error_body(value) if failed else Body()
    if not failed:
        body.add_bytes(_OK)
        body.add_bytes(codec.encode(value))
    with channel.guard(_scatter_call(operation, condition, ""), limits) as guarded:
        bodies = guarded.exchange(body)
        if failed:
            raise value
        for rank, data in enumerate(bodies):
            _raise_remote_error(data, channel, operation, rank, remote_error)
        return [codec.decode(data[16:]) for data in bodies]


def _scatter_call(operation: str, condition: str | None, description: str) -> CollectiveCall:
    if condition is None:
        return make_call(operation, "", lambda: description)
    return CollectiveCall(operation, condition, call_site(), lambda: f"{operation} ({condition}) {description}".rstrip())


# -- bodies -----------------------------------------------------------------------------------------------------------
#
# A status of eight bytes; then, of a scatter, where the part of each rank begins; then the parts. A part is the length of its
# description, the description (structure, types and shapes of the tensors, other leaves), and the bytes of the tensors, each aligned.


def _error_body(error: Exception) -> Body:
    body = Body()
    body.add_bytes(_ERROR)
    notes = " ".join(getattr(error, "__notes__", ()))
    body.add_bytes(f"{type(error).__name__}: {error} {notes}".rstrip().encode()[:_MAX_ERROR_BYTES])
    return body


def _raise_remote_error(
    data: Any, channel: Channel, operation: str, rank: int, remote_error: Callable[[int, str], Exception] | None = None
) -> None:
    if data[0] != _ERROR[0]:
        return
    text = data[16:].tobytes().decode(errors="replace")
    if remote_error is not None:
        raise remote_error(rank, text)
    raise DistributedOperationException(
        f"{operation} ended on every process because rank {rank} raised {text}\n"
        f"(raised on rank {channel.rank}; the traceback of rank {rank} shows where)"
    )


def _scatter_body(parts: Sequence[Any], sender: int) -> Body:
    body = Body()
    body.add_bytes(_OK)
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
    kinds = [[str(pack.dtype)[6:], list(pack.shape), pack.is_array, pack.tensor.device.type] for pack in raw]
    description = codec.encode([structure, kinds, others])
    start = body.add_bytes(len(description).to_bytes(8, "little"))
    body.add_bytes(description)
    for pack in raw:
        body.add(pack.bytes() if pack.on_host else PackedTensor(pack.tensor.cpu()).bytes())
    return start


def _split_leaves(value: Any, raw: list[PackedTensor], others: list[Any]) -> Any:
    """Return the structure with a number for each leaf: n for the n-th tensor that travels as raw bytes, -n for the n-th of the others.

    A list or tuple without such tensors is one leaf, whatever its length.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is numpy.ndarray:
        if is_plain_tensor(value):
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


def _receive_part(data: Any, channel: Channel, operation: str, sender: int) -> Any:
    _raise_remote_error(data, channel, operation, sender)
    start = data[16 : 16 + 8 * channel.world_size].view(numpy.int64)[channel.rank]
    reader = BodyReader(data[start:])
    length = int.from_bytes(reader.take(8), "little")
    structure, kinds, others = codec.decode(reader.take(length), place=True)
    raw: list[Any] = []
    for name, shape, is_array, device in kinds:
        dtype = getattr(torch, name)
        tensor = tensor_from_chunks([reader.take(math.prod(shape) * dtype.itemsize)], dtype, shape)
        raw.append(tensor.numpy() if is_array else tensor.to(device))
    return pytree.map_leaves(lambda number: raw[number - 1] if number > 0 else others[-number - 1], structure)
