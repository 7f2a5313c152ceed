"""Send each rank its own part of what one rank has (`scatter`), and exchange a small value of every rank (`agree_or_raise`).

Both are one guarded call. A rank that has an exception instead of a value passes the exception: then every rank raises, and none is left
waiting. Parts may be any nesting of containers with tensors, arrays and plain data, and need not be alike. A `ScatterSeries` describes a
structure once for many calls. The ranks must agree on `condition` where it is given, and on the user's line otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from slipstream.devices.table import CPU
from slipstream.distributed import codec, pytree
from slipstream.distributed.call_site import call_site
from slipstream.distributed.codec import PackedTensor, is_plain_tensor, tensor_from_chunks
from slipstream.distributed.guard import Body, BodyReader, Channel, CollectiveCall, Limits, check_rank, encode_message, make_call
from slipstream.errors import DistributedOperationException

__all__ = ["ScatterSeries", "agree_or_raise", "scatter"]

_OK, _ERROR = bytes(8), bytes([1, *bytes(7)])
_MAX_ERROR_BYTES = 2000
_CPU = CPU.type


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
    return ScatterSeries(sender, operation).transfer(channel, limits, parts, condition=condition)[0]


class ScatterSeries:
    """Scatters of one sender, one after the other, which send the description of a structure only when it is new.

    Every rank makes one, and makes the same calls with it. After an exception, structures count as new again on all of them.

    >>> series = ScatterSeries()
    >>> series.transfer(Channel(), Limits(), [{"ids": [1, 2]}], note=b"to everyone")
    ({'ids': [1, 2]}, b'to everyone')
    """

    def __init__(self, sender: int = 0, operation: str = "scatter") -> None:
        self._sender = sender
        self._operation = operation
        self._sent: dict[int, dict[Any, int]] = {}
        """On the sender, the layouts that each rank knows, with their numbers."""
        self._received: dict[int, Any] = {}
        """On the others, the layouts that they know by their numbers."""

    def transfer(
        self,
        channel: Channel,
        limits: Limits,
        parts: Sequence[Any] | Exception | None,
        *,
        note: bytes = b"",
        condition: str | None = None,
    ) -> tuple[Any, bytes]:
        """Return this rank's part and the note of the sender, which is the same for all; see `scatter`."""
        try:
            return self._transfer(channel, limits, parts, note, condition)
        except BaseException:
            self._sent.clear()
            self._received.clear()
            raise

    def _transfer(
        self, channel: Channel, limits: Limits, parts: Sequence[Any] | Exception | None, note: bytes, condition: str | None
    ) -> tuple[Any, bytes]:
        sender = self._sender
        check_rank(sender, channel.world_size)
        name = f"{self._operation} from rank {sender}"
        if channel.rank != sender:
            with channel.guard(_scatter_call(name, condition, "(to be received)"), limits) as guarded:
                data = guarded.exchange(Body(), sender=sender)[sender]
                _raise_remote_error(data, channel, name, sender)
                return _read_part(data, channel, self._received)
        failure: Exception | None = None
        description = "(to be sent)"
        try:
            if isinstance(parts, Exception):
                raise parts
            if parts is None or len(parts) != channel.world_size:
                given = "none" if parts is None else str(len(parts))
                needed = f"one part for each of {channel.world_size} processes"
                raise ValueError(f"{self._operation} needs {needed}, but rank {sender} has {given}")
            body = self._pack(parts, note)
        except Exception as error:  # whatever a dataset or a class of the user's raises: the others must hear of it
            failure, body, description = error, _error_body(error), f"({type(error).__name__} instead of data)"
        with channel.guard(_scatter_call(name, condition, description), limits) as guarded:
            guarded.exchange(body, sender=sender)
        if failure is not None:
            raise failure
        assert isinstance(parts, Sequence)
        return parts[sender], note

    def _pack(self, parts: Sequence[Any], note: bytes) -> Body:
        body = Body()
        head = numpy.zeros(2 + len(parts), dtype=numpy.int64)
        head[1] = len(note)
        body.add(head.view(numpy.uint8))  # written when the body is sent: filled in below
        body.add_bytes(note)
        for rank, part in enumerate(parts):
            if rank != self._sender:
                head[2 + rank] = _add_part(body, part, self._sent.setdefault(rank, {}))
        return body


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
# Eight bytes of status; then, of a scatter, the length of the note, where the part of each rank begins, the note, and the parts. A part
# begins with numbers: how many of them there are, the number of its layout, the lengths of the description and of the other leaves, and the
# sizes of the tensors' dimensions. Then come the description (structure, types and devices; empty if the rank knows the layout), the other
# leaves (empty without any), and the bytes of the tensors. Everything is aligned.


def _error_body(error: Exception) -> Body:
    body = Body()
    body.add_bytes(_ERROR)
    notes = " ".join(getattr(error, "__notes__", ()))
    body.add_bytes(encode_message(f"{type(error).__name__}: {error} {notes}".rstrip(), _MAX_ERROR_BYTES))
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


def _add_part(body: Body, part: Any, known: dict[Any, int]) -> int:
    raw: list[Any] = []
    others: list[Any] = []
    layout = _find_layout(part, raw, others)
    number = -1 if layout is None else known.get(layout, -1)
    description = b""
    if number < 0:
        description = codec.encode([_number_leaves(part, [0, 0]), [_describe_tensor(tensor) for tensor in raw]])
        if layout is not None and len(known) < _MAX_LAYOUTS:
            number = known[layout] = len(known)
    rest = codec.encode(others) if others else b""
    sizes = [size for tensor in raw for size in tensor.shape]
    numbers = numpy.array([4 + len(sizes), number, len(description), len(rest), *sizes], dtype=numpy.int64)
    start = body.add(numbers.view(numpy.uint8))
    for data in filter(None, (description, rest)):
        body.add_bytes(data)
    for tensor in raw:
        packed = PackedTensor(tensor)
        body.add(packed.bytes() if packed.on_host else PackedTensor(packed.tensor.cpu()).bytes())
    return start


_MAX_LAYOUTS = 64
"""Of a series with more of them, later ones are described each time."""
_OTHER = "other"


def _find_layout(value: Any, raw: list[Any], others: list[Any]) -> Any:
    """Collect the tensors that travel as raw bytes and the other leaves; return what tells layouts apart, as something hashable.

    A list or tuple without such tensors is one leaf, whatever its length. None is returned for containers whose layout is described each
    time: of classes of their own, and dicts with keys that are not text (1 and True would be the same).
    """
    kind = type(value)
    if kind is torch.Tensor:
        if is_plain_tensor(value):
            raw.append(value)
            return value.dtype, value.ndim, value.device.type
    elif kind is numpy.ndarray:
        if is_plain_tensor(value):
            raw.append(value)
            return value.dtype.char, value.ndim
    elif kind is dict:
        found = [_find_layout(item, raw, others) for item in value.values()]
        return None if None in found or set(map(type, value)) - {str} else (dict, tuple(value), *found)
    elif kind is list or kind is tuple:
        tensors, rest = len(raw), len(others)
        found = [_find_layout(item, raw, others) for item in value]
        if len(raw) > tensors:
            return None if None in found else (kind, *found)
        del others[rest:]
    elif pytree.is_node(value):
        for _, item in pytree.children(value):
            _find_layout(item, raw, others)
        return None
    others.append(value)
    return _OTHER


def _number_leaves(value: Any, counts: list[int]) -> Any:
    """Return the structure with a number for each leaf, as `_find_layout` collects them: n for the n-th raw tensor, -n for the n-th other.

    `counts` is how many there were of both before.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is numpy.ndarray:
        if is_plain_tensor(value):
            counts[0] += 1
            return counts[0]
    elif kind is dict:
        return {key: _number_leaves(item, counts) for key, item in value.items()}
    elif kind is list or kind is tuple:
        tensors, rest = counts
        inner = [_number_leaves(item, counts) for item in value]
        if counts[0] > tensors:
            return inner if kind is list else tuple(inner)
        counts[1] = rest
    elif pytree.is_node(value):
        return pytree.rebuild(value, [_number_leaves(item, counts) for _, item in pytree.children(value)])
    counts[1] += 1
    return -counts[1]


def _describe_tensor(tensor: Any) -> list[Any]:
    """Return dtype, number of dimensions, whether it is an array, and type of device."""
    packed = PackedTensor(tensor)
    return [str(packed.dtype)[6:], len(packed.shape), packed.is_array, packed.tensor.device.type]


def _read_part(data: Any, channel: Channel, known: dict[int, Any]) -> tuple[Any, bytes]:
    """Return this rank's part of a body, and the note; new layouts are added to the known ones."""
    ranks = channel.world_size
    head = data[: 8 * (2 + ranks)].view(numpy.int64)
    reader = BodyReader(data)
    reader.take(head.nbytes)
    note = reader.take(int(head[1])).tobytes()
    start = int(head[2 + channel.rank])
    reader = BodyReader(data[start:])
    count = int(data[start : start + 8].view(numpy.int64)[0])
    _, number, description, rest, *sizes = reader.take(8 * count).view(numpy.int64).tolist()
    if description:
        layout = codec.decode(reader.take(description))
        if number >= 0:
            known[number] = layout
    else:
        layout = known[number]
    structure, kinds = layout
    others = codec.decode(reader.take(rest), place=True) if rest else []
    raw: list[Any] = []
    for name, dimensions, is_array, device in kinds:
        dtype, shape, sizes = getattr(torch, name), sizes[:dimensions], sizes[dimensions:]
        tensor = tensor_from_chunks([reader.take(math.prod(shape) * dtype.itemsize)], dtype, shape)
        raw.append(tensor.numpy() if is_array else tensor if device == _CPU else tensor.to(device))
    return _put_leaves(structure, raw, others), note


def _put_leaves(structure: Any, raw: Sequence[Any], others: Sequence[Any]) -> Any:
    kind = type(structure)
    if kind is int:
        return raw[structure - 1] if structure > 0 else others[-structure - 1]
    if kind is dict:
        return {key: _put_leaves(item, raw, others) for key, item in structure.items()}
    if kind is list:
        return [_put_leaves(item, raw, others) for item in structure]
    if kind is tuple:
        return tuple([_put_leaves(item, raw, others) for item in structure])
    return pytree.rebuild(structure, [_put_leaves(item, raw, others) for _, item in pytree.children(structure)])
