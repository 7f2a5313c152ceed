"""Collectives over nested data: gather, gather with gradient, reduce, broadcast, pad, barrier, and a check that values agree.

Each is one guarded call for the whole tree, not one collective per tensor. Results own their memory, except what `pad` has nothing to add
to, and the data of the user is never changed. Gather joins tensors and arrays along the first dimension, which may differ between ranks;
lists of records are concatenated, and any other leaf becomes a list with one value per rank. A channel and limits are passed in; no state
of the library is read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Protocol

import numpy
import torch

from slipstream.distributed import codec, pytree
from slipstream.distributed.codec import (
    PackedTensor,
    as_tensor,
    byte_view,
    convert_number,
    describe_tensor,
    empty_host_tensor,
    is_entries,
    is_tensor_leaf,
    pack_object,
    unpack_object,
)
from slipstream.distributed.guard import Body, BodyReader, Channel, GuardedCall, Limits, align, announce_failure, check_rank, make_call
from slipstream.distributed.heartbeat import format_ranks
from slipstream.errors import MismatchError

__all__ = [
    "REDUCTIONS", "ResultOrder", "broadcast", "broadcast_from_owner", "broadcast_objects", "check_agreement", "gather",
    "gather_objects", "gather_with_gradient", "pad", "reduce",
]


_SCALAR = -1
"""Stands for the number of rows of a tensor without dimensions."""


class ResultOrder(Protocol):
    """How results of split work are put back into the order of the input, without padding."""

    @property
    def total(self) -> int:
        """How many samples the whole input had; -1 if unknown. It must be the same on all ranks."""

    @property
    def batch_total(self) -> int:
        """How many samples the current batch of a loader has; 0 without one. It must be the same on all ranks."""

    @property
    def leaf_by_leaf(self) -> bool:
        """Whether each leaf is judged by itself (some hold samples, others do not), rather than all together."""

    @property
    def ranks(self) -> list[int] | None:
        """The ranks whose single values (numbers, texts, tensors without dimensions) are kept; None for all."""

    def order(self, counts: Sequence[int]) -> list[int] | None:
        """Return the positions of the results in their concatenation, given how many each rank has; None if they are not of the split."""


@contextmanager
def _announce_failures(channel: Channel, limits: Limits, operation: str) -> Iterator[None]:
    """Tell the other ranks of an exception in the block, whatever a class of the user's raises when it is encoded; then raise it."""
    try:
        yield
    except Exception as error:
        raise announce_failure(channel, limits, operation, error) from None


def gather_objects(
    channel: Channel,
    limits: Limits,
    value: Any,
    *,
    dst: int | None = None,
    arrange: ResultOrder | None = None,
    flat: bool = False,
    operation: str = "gather_object",
    reason: str = "",
) -> list[Any] | None:
    """Return the values of all ranks as a list, in rank order; `flat` joins them, as they are lists; with `dst`, only there.

    Tensors travel through host memory, and arrive on this process's current device of the type that they were on.
    `reason` says why this rank calls it, for the table of waiting ranks; it may differ between ranks.
    """
    kind = "a list" if flat else "one object"
    body = Body()
    with _announce_failures(channel, limits, operation):
        check_rank(dst, channel.world_size)
        body.add_bytes(codec.encode((_known_totals(arrange), value), transient=True))
    target = "" if dst is None else f" to rank {dst}"
    call = make_call(operation, kind + target, lambda: f"{kind} ({type(value).__name__}){target}")
    call.site += f" ({reason})" if reason else ""
    with channel.guard(call, limits) as guarded:
        bodies = guarded.exchange(body, receiver=dst)
        if dst not in (None, channel.rank):
            return None
        totals, values = zip(*(codec.decode(data, place=True, transient=True) for data in bodies), strict=True)
    if not flat:
        kept = _kept_ranks(arrange, totals)
        return list(values) if kept is None else [values[rank] for rank in kept]
    joined = [item for value in values for item in value]
    order = _agreed_order(arrange, totals, [[len(value) for value in values]])
    return joined if order is None else [joined[position] for position in order]


def gather(
    channel: Channel,
    limits: Limits,
    data: Any,
    *,
    dst: int | None = None,
    arrange: ResultOrder | None = None,
    operation: str = "gather",
    condition: str = "",
) -> Any:
    """Return the same structure with the leaves of all ranks joined; with `dst`, only on that rank, and None elsewhere.

    `condition` is a further text on which the ranks have to agree.
    """
    with _announce_failures(channel, limits, operation):
        check_rank(dst, channel.world_size)
        leaves = pytree.flatten(data, is_entries)
        packed = [PackedTensor(leaf) if is_tensor_leaf(leaf) else None for leaf in leaves]
        body = _gather_body(leaves, packed, _known_totals(arrange))
        agreement = pytree.describe_structure(data, _describe_agreed, is_entries)
    target = condition + ("" if dst is None else f" to rank {dst}")
    call = make_call(operation, agreement + target, lambda: pytree.describe_structure(data, _describe_shown, is_entries) + target)
    tensors = [pack for pack in packed if pack is not None]
    on_host = all(pack.on_host for pack in tensors)
    joined = _GatheredLeaves(tensors, has_objects=len(tensors) < len(packed))
    with channel.guard(call, limits) as guarded:
        # Device payloads go to every rank, so every rank needs everyone's rows.
        guarded.exchange(body, receiver=dst if on_host else None, place=joined.place, lead=joined.sizes.size)
        if dst not in (None, channel.rank) and on_host:
            return None
        guarded.together(lambda: joined.gather_device(guarded))
    if dst not in (None, channel.rank):
        return None
    return pytree.unflatten(data, joined.finish(leaves, packed, arrange), is_entries)


_Totals = tuple[int, int]
"""The totals of a `ResultOrder`, whole input and current batch."""


def _known_totals(arrange: ResultOrder | None) -> _Totals:
    return (-1, 0) if arrange is None else (arrange.total, arrange.batch_total)


def _kept_ranks(arrange: ResultOrder | None, totals: Sequence[_Totals]) -> list[int] | None:
    """Return the ranks whose single values are kept, if all ranks know the same totals; None for all."""
    return None if arrange is None or totals[0][0] < 0 or len(set(totals)) > 1 else arrange.ranks


def _agreed_order(arrange: ResultOrder | None, totals: Sequence[_Totals], counts: list[list[int]]) -> list[int] | None:
    """Return the order of results, if all ranks know the same split and every leaf that holds samples fits it."""
    if arrange is None or not counts or totals[0][0] < 0 or len(set(totals)) > 1:
        return None
    orders = [arrange.order(count) for count in counts]
    return orders[0] if all(order is not None for order in orders) else None


def _describe_agreed(leaf: Any) -> str:
    """Describe what has to agree."""
    if is_tensor_leaf(leaf):
        return describe_tensor(leaf, ragged=True)
    return "entries" if is_entries(leaf) else "object"


def _describe_shown(leaf: Any) -> str:
    """Describe what messages show."""
    if is_tensor_leaf(leaf):
        return describe_tensor(leaf)
    return f"{len(leaf)} entries" if is_entries(leaf) else type(leaf).__name__


def _gather_body(leaves: list[Any], packed: list[PackedTensor | None], totals: _Totals) -> Body:
    """Pack the row counts of the tensor leaves, then the objects, then the bytes of tensors in host memory."""
    others = [leaf for leaf, pack in zip(leaves, packed, strict=True) if pack is None]
    objects = [pack_object(list(leaf)) if is_entries(leaf) else leaf for leaf in others]
    encoded = codec.encode(objects, transient=True) if others else b""
    tensors = [pack for pack in packed if pack is not None]
    body = Body()
    rows = [_SCALAR if pack.is_scalar else pack.rows for pack in tensors]
    body.add_bytes(struct.pack(f"<{len(rows) + 3}q", *rows, *totals, len(encoded)))
    body.add_bytes(encoded)
    for pack in tensors:
        if pack.on_host:
            body.add(pack.bytes())
    return body


class _GatheredLeaves:
    """The contributions of all ranks, leaf by leaf."""

    def __init__(self, packed: list[PackedTensor], has_objects: bool) -> None:
        self._packed = packed
        self._has_objects = has_objects
        self.sizes = struct.Struct(f"<{len(packed) + 3}q")
        """What leads a body: the rows of each tensor, the totals of the split, and how many bytes the objects take."""
        self._encoded: list[Any] = []
        self.rows: list[tuple[int, ...]] = []
        self.scalars = [True] * len(packed)
        """Which leaves have no rows on any rank: a single value each."""
        self.tensors: list[torch.Tensor] = []
        self.totals: list[_Totals] = []

    def place(self, leads: list[Any]) -> list[list[Any]]:
        """Read how many rows each rank has, and return where its objects and the rows of its tensors in host memory belong."""
        for lead in leads:
            *counts, total, batch_total, length = self.sizes.unpack_from(lead)
            self.rows.append(tuple(1 if count == _SCALAR else count for count in counts))
            self.scalars = [scalar and count == _SCALAR for scalar, count in zip(self.scalars, counts, strict=True)]
            self.totals.append((total, batch_total))
            self._encoded.append(numpy.empty(length, dtype=numpy.uint8))
        places = [[encoded] for encoded in self._encoded]
        for index, pack in enumerate(self._packed):
            counts = [rows[index] for rows in self.rows]
            self.tensors.append(empty_host_tensor(pack.dtype, (sum(counts), *pack.row_shape)) if pack.on_host else pack.tensor)
            if pack.on_host:
                memory, end = numpy.frombuffer(byte_view(self.tensors[-1]), dtype=numpy.uint8), 0
                for parts, count in zip(places, counts, strict=True):
                    start, end = end, end + count * pack.row_bytes
                    parts.append(memory[start:end])
        return places

    def gather_device(self, guarded: GuardedCall) -> None:
        """Gather tensors in device memory over the device's own backend, as one flat payload padded to the longest.

        A process may hold tensors on several devices; each result is on the device of its leaf.
        """
        remote = [(index, pack) for index, pack in enumerate(self._packed) if not pack.on_host]
        longest = max((sum(align(rows[index] * pack.row_bytes) for index, pack in remote) for rows in self.rows), default=0)
        if not longest:
            for index, pack in remote:
                self.tensors[index] = pack.as_rows(pack.tensor.new_empty(0, dtype=torch.uint8), sum(rows[index] for rows in self.rows))
            return
        flat = torch.zeros(longest, dtype=torch.uint8, device=remote[0][1].tensor.device)
        own = BodyReader(flat)
        for _, pack in remote:
            own.take(pack.rows * pack.row_bytes).copy_(pack.tensor.view(-1).view(torch.uint8))
        readers = [BodyReader(data) for data in guarded.all_gather(flat).view(len(self.rows), longest)]
        for index, pack in remote:
            counts = [rows[index] for rows in self.rows]
            chunks = [reader.take(count * pack.row_bytes) for reader, count in zip(readers, counts, strict=True)]
            self.tensors[index] = pack.as_rows(torch.cat(chunks), sum(counts)).to(pack.tensor.device)

    def finish(self, leaves: list[Any], packed: list[PackedTensor | None], arrange: ResultOrder | None) -> list[Any]:
        results: list[Any] = []
        counts: list[list[int] | None] = []
        """How many samples each rank brought; None for a leaf that holds one value per rank."""
        supply = iter(enumerate(self.tensors))
        decoded = [codec.decode(encoded, place=True, transient=True) for encoded in self._encoded] if self._has_objects else []
        objects = iter(zip(*decoded, strict=True))
        for leaf, pack in zip(leaves, packed, strict=True):
            if pack is not None:
                index, result = next(supply)
                results.append(result)
                counts.append(None if self.scalars[index] else [rows[index] for rows in self.rows])
            elif is_entries(leaf):
                values = [unpack_object(value, leaf) for value in next(objects)]
                results.append([item for value in values for item in value])
                counts.append([len(value) for value in values])
            else:
                results.append(list(next(objects)))
                counts.append(None)
        if arrange is not None and arrange.leaf_by_leaf:
            kept = _kept_ranks(arrange, self.totals)
            orders = [kept if count is None else _agreed_order(arrange, self.totals, [count]) for count in counts]
        else:
            order = _agreed_order(arrange, self.totals, [count for count in counts if count is not None])
            orders = [None if count is None else order for count in counts]
        return [
            _finish_leaf(leaf, pack, result, order) for leaf, pack, result, order in zip(leaves, packed, results, orders, strict=True)
        ]


def _finish_leaf(leaf: Any, pack: PackedTensor | None, result: Any, order: list[int] | None) -> Any:
    if pack is not None:
        return pack.finish(result if order is None else _select_rows(result, order))
    if order is not None:
        result = [result[position] for position in order]
    return tuple(result) if isinstance(leaf, tuple) else result


def _select_rows(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return some rows in an order. Consecutive ones need no list of indices, for which a device would make the host wait."""
    start = order[0] if order else 0
    if order == list(range(start, start + len(order))):
        return tensor[start : start + len(order)].clone()
    return tensor[torch.tensor(order, dtype=torch.long, device=tensor.device)]


REDUCTIONS = ("sum", "mean", "max", "min", "none")
_COMBINE = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}


# -- reduce -----------------------------------------------------------------------------------------------------------


def reduce(channel: Channel, limits: Limits, data: Any, reduction: str = "sum", scale: float = 1.0, *, operation: str = "reduce") -> Any:
    """Combine every tensor, array or number over the ranks, and multiply by `scale`; the result is the same on all ranks."""
    leaves = pytree.flatten(data)
    name = f"{operation}({reduction})" if scale == 1.0 else f"{operation}({reduction}, scale={scale})"
    with _announce_failures(channel, limits, name):  # torch raises for a number that is too large
        terms = [_ReduceLeaf(leaf, reduction) for leaf in leaves]
    packed = [term.pack for term in terms]
    text = pytree.describe_structure(data, lambda leaf: describe_tensor(convert_number(leaf)))
    size = sum(align(pack.rows * pack.row_bytes) for pack in packed)
    small = all(pack.on_host for pack in packed) and size <= min(channel.max_inline_bytes, _COMBINED_LOCALLY // channel.world_size)
    body = Body()
    if small and reduction != "none":
        for pack in packed:
            body.add(pack.bytes())
    with channel.guard(make_call(name, text, lambda: text), limits) as guarded:
        bodies = guarded.exchange(body)
        if reduction == "none":
            results = [pack.tensor.clone() for pack in packed]
        else:
            results = _combine(bodies, packed, reduction) if small else guarded.together(lambda: _all_reduce(guarded, packed, reduction))
    return pytree.unflatten(data, [term.finish(result, scale) for term, result in zip(terms, results, strict=True)])


_COMBINED_LOCALLY = 1 << 20
"""Bytes of all ranks together up to which every rank gets all tensors and combines them itself."""
_REDUCED_ALONE = 1 << 20
"""Bytes from which the two copies of a tensor that shares an all-reduce cost more than one of its own."""
_REDUCIBLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
_REDUCE_DTYPES = {**dict(zip(_REDUCIBLE, _REDUCIBLE, strict=True)), torch.int16: torch.int32, torch.bool: torch.uint8}
"""The types that every backend can combine, and the types that are converted to one of these. Complex numbers travel as two parts."""
_HALF = (torch.float16, torch.bfloat16)
_CONVERSION_ADVICE = {
    "float": (".float()", ".astype('float32')", "float(...)"),
    "int": (".long()", ".astype('int64')", "int(...)"),
}
"""What to write to convert a tensor, an array, and a number."""


class _ReduceLeaf:
    """One leaf of a reduce: in the form in which it is combined, and how it comes back from there."""

    __slots__ = ("dtype", "leaf", "pack", "shape")

    def __init__(self, leaf: Any, reduction: str) -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} is not known: write one of {', '.join(REDUCTIONS)}")
        value = convert_number(leaf)
        if not is_tensor_leaf(value):
            raise TypeError(
                f"reduce got a {type(leaf).__name__}, which cannot be added up: pass tensors, arrays or numbers, or use gather for objects"
            )
        tensor = as_tensor(value)
        if reduction != "none":
            _check_type(leaf, tensor, reduction)
        self.leaf, self.dtype, self.shape = leaf, tensor.dtype, tensor.shape
        self.pack = PackedTensor(
            torch.view_as_real(tensor) if tensor.is_complex() else tensor.to(_REDUCE_DTYPES.get(self.dtype, self.dtype))
        )

    def finish(self, result: torch.Tensor, scale: float) -> Any:
        """Return the combined tensor in the form of the leaf."""
        result = result.reshape(self.pack.shape)
        result = torch.view_as_complex(result) if self.dtype.is_complex else result.to(self.dtype)
        if scale != 1.0:
            result = result * scale
        if isinstance(self.leaf, torch.Tensor):
            return result
        return result.numpy() if isinstance(self.leaf, numpy.ndarray) else result.item()


def _check_type(leaf: Any, tensor: torch.Tensor, reduction: str) -> None:
    """Refuse what some backend, size or number of processes could not combine, so that all of them give the same answer."""
    form = 0 if isinstance(leaf, torch.Tensor) else 1 if isinstance(leaf, numpy.ndarray) else 2
    spelled = f"the {type(leaf).__name__} {leaf}" if form == 2 else describe_tensor(leaf)
    if tensor.is_complex():
        if reduction in ("max", "min"):
            raise TypeError(f"{spelled} has no {reduction}, as complex numbers have no order: take the magnitude first, e.g. with abs(...)")
        return
    if tensor.dtype not in _REDUCE_DTYPES:
        way = _CONVERSION_ADVICE["float" if tensor.is_floating_point() else "int"][form]
        raise TypeError(f"{spelled} is of a type that cannot be combined between processes: convert it with {way} first")
    if reduction == "mean" and not tensor.is_floating_point():
        raise TypeError(
            f"the mean of {spelled} is not a whole number: convert it with {_CONVERSION_ADVICE['float'][form]} first, or use 'sum'"
        )
    if reduction == "sum" and tensor.dtype == torch.bool:
        raise TypeError(
            f"{spelled} cannot be added up: convert it with {_CONVERSION_ADVICE['int'][form]} to count, or use 'max' for any and 'min' "
            "for all"
        )


def _combine(bodies: list[Any], packed: list[PackedTensor], reduction: str) -> list[torch.Tensor]:
    """Combine tensors that have arrived with the headers, in rank order, so that all ranks get the same bits."""
    readers = [BodyReader(data) for data in bodies]
    results = []
    for pack in packed:
        stacked = torch.stack([_take_rows(reader, pack) for reader in readers])
        results.append(getattr(stacked, _COMBINE[reduction])(dim=0).to(pack.tensor.dtype))
    return results


def _take_rows(reader: BodyReader, pack: PackedTensor) -> torch.Tensor:
    return pack.as_rows(torch.from_numpy(reader.take(pack.rows * pack.row_bytes)), pack.rows)


def _all_reduce(guarded: GuardedCall, packed: list[PackedTensor], reduction: str) -> list[torch.Tensor]:
    """Run one all-reduce for each large tensor, in what becomes its result, and one for the others of each type and device."""
    groups: dict[Any, list[int]] = {}
    for index, pack in enumerate(packed):
        is_large = pack.rows * pack.row_bytes >= _REDUCED_ALONE
        groups.setdefault(index if is_large else (pack.tensor.dtype, pack.tensor.device), []).append(index)
    results: list[torch.Tensor] = [pack.tensor for pack in packed]
    for members in groups.values():
        flat = torch.cat([packed[index].tensor.reshape(-1) for index in members])  # a copy also of one
        adds = reduction in ("sum", "mean")
        total = flat.float() if adds and flat.dtype in _HALF else flat  # rounded once, as on one process
        guarded.all_reduce(total, "sum" if adds else reduction)
        if reduction == "mean":
            total /= guarded.world_size
        flat = total.to(flat.dtype)
        parts = torch.split(flat, [packed[index].tensor.numel() for index in members])
        for index, part in zip(members, parts, strict=True):
            results[index] = flat if len(members) == 1 else part.clone()
    return results


# -- broadcast --------------------------------------------------------------------------------------------------------


def broadcast(channel: Channel, limits: Limits, data: Any, from_process: int = 0, *, operation: str = "broadcast") -> Any:
    """Return the leaves of one rank on every rank; all ranks pass data of the same structure, types and shapes."""
    leaves = pytree.flatten(data, is_entries)
    name = f"{operation} from rank {from_process}"
    body = Body()
    with _announce_failures(channel, limits, name):
        check_rank(from_process, channel.world_size)
        packed = [PackedTensor(leaf) if is_tensor_leaf(leaf) else None for leaf in leaves]
        received = _BroadcastLeaves([pack for pack in packed if pack is not None], from_process)
        if channel.rank == from_process:
            _fill_broadcast_body(body, leaves, packed)
    text = pytree.describe_structure(data, lambda leaf: describe_tensor(leaf) if is_tensor_leaf(leaf) else "object", is_entries)
    with channel.guard(make_call(name, text, lambda: text), limits) as guarded:
        guarded.exchange(body, sender=from_process, place=received.place, lead=8)
        guarded.together(lambda: received.broadcast_device(guarded))
    tensors, objects = iter(received.tensors), iter(codec.decode(received.encoded, place=True, transient=True))
    results = [
        unpack_object(next(objects), leaf) if pack is None else pack.finish(next(tensors))
        for leaf, pack in zip(leaves, packed, strict=True)
    ]
    return pytree.unflatten(data, results, is_entries)


class _BroadcastLeaves:
    """What one rank sends, leaf by leaf."""

    def __init__(self, packed: list[PackedTensor], sender: int) -> None:
        self._packed = packed
        self._sender = sender
        self.encoded: Any = b""
        self.tensors = [empty_host_tensor(pack.dtype, pack.shape) if pack.on_host else pack.tensor for pack in packed]

    def place(self, leads: list[Any]) -> list[list[Any]]:
        """Return where the objects and the tensors in host memory belong."""
        self.encoded = numpy.empty(int.from_bytes(leads[self._sender][:8], "little"), dtype=numpy.uint8)
        host = [tensor for tensor, pack in zip(self.tensors, self._packed, strict=True) if pack.on_host]
        places: list[list[Any]] = [[] for _ in leads]
        places[self._sender] = [self.encoded, *(numpy.frombuffer(byte_view(tensor), dtype=numpy.uint8) for tensor in host)]
        return places

    def broadcast_device(self, guarded: GuardedCall) -> None:
        remote = [(index, pack) for index, pack in enumerate(self._packed) if not pack.on_host]
        results = _broadcast_device(guarded, [pack for _, pack in remote], self._sender)
        for (index, _), result in zip(remote, results, strict=True):
            self.tensors[index] = result


def _broadcast_device(guarded: GuardedCall, packed: list[PackedTensor], sender: int) -> list[torch.Tensor]:
    """Broadcast tensors in device memory over the device's own backend, as one flat payload; each result is on the device of its leaf."""
    sizes = [pack.rows * pack.row_bytes for pack in packed]
    total = sum(map(align, sizes))
    if not total:
        return [pack.tensor.clone() for pack in packed]
    flat = torch.zeros(total, dtype=torch.uint8, device=packed[0].tensor.device)
    own = BodyReader(flat)
    for pack, size in zip(packed, sizes, strict=True):
        own.take(size).copy_(pack.tensor.view(-1).view(torch.uint8))
    guarded.broadcast(flat, sender)
    received = BodyReader(flat)
    return [
        pack.as_rows(received.take(size).to(pack.tensor.device, copy=True), pack.rows).reshape(pack.shape)
        for pack, size in zip(packed, sizes, strict=True)
    ]


def _fill_broadcast_body(body: Body, leaves: list[Any], packed: list[PackedTensor | None]) -> None:
    encoded = codec.encode([pack_object(leaf) for leaf, pack in zip(leaves, packed, strict=True) if pack is None], transient=True)
    body.add_bytes(len(encoded).to_bytes(8, "little"))
    body.add_bytes(encoded)
    for pack in packed:
        if pack is not None and pack.on_host:
            body.add(pack.bytes())


def broadcast_objects(
    channel: Channel, limits: Limits, values: list[Any], from_process: int = 0, *, operation: str = "broadcast_object_list"
) -> list[Any]:
    """Return the list of one rank; all ranks pass a list of the same length. Tensors arrive as those of `gather_objects` do."""
    name = f"{operation} from rank {from_process}"
    body = Body()
    with _announce_failures(channel, limits, name):
        check_rank(from_process, channel.world_size)
        if channel.rank == from_process:
            body.add_bytes(codec.encode(list(values), transient=True))
    text = f"a list of {len(values)} objects"
    with channel.guard(make_call(name, text, lambda: text), limits) as guarded:
        received: list[Any] = codec.decode(guarded.exchange(body, sender=from_process)[from_process], place=True, transient=True)
    return received


def broadcast_from_owner(
    channel: Channel, limits: Limits, tensor: torch.Tensor | None, *, operation: str = "copy_tensor_to_devices"
) -> torch.Tensor:
    """Return the tensor that exactly one rank has, on all of them."""
    body = Body()
    with _announce_failures(channel, limits, operation):
        body.add_bytes(b"" if tensor is None else codec.encode(tensor))
    with channel.guard(make_call(operation, "", lambda: "None" if tensor is None else describe_tensor(tensor)), limits) as guarded:
        owned = [data.tobytes() for data in guarded.exchange(body) if data.size]
    if len(owned) != 1:
        raise ValueError(
            f"{operation} needs one process to pass a tensor and the others None, but {len(owned)} of {channel.world_size} passed one"
        )
    received: torch.Tensor = codec.decode(owned[0])
    return received


# -- pad --------------------------------------------------------------------------------------------------------------


def pad(
    channel: Channel,
    limits: Limits,
    data: Any,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    operation: str = "pad_across_processes",
) -> Any:
    """Pad every tensor along `dim` to the largest size over the ranks; leaves without that dimension stay as they are.

    The ranks need the same number of dimensions; the sizes of the others may differ.
    """
    leaves = pytree.flatten(data)
    with _announce_failures(channel, limits, operation):
        sizes = [_size_along(leaf, dim) for leaf in leaves]
    body = Body()
    body.add(numpy.array(sizes, dtype=numpy.int64).view(numpy.uint8))
    agreement = f"dim={dim} " + pytree.describe_structure(data, _describe_dimensions)
    call = make_call(operation, agreement, lambda: f"dim={dim} " + pytree.describe_structure(data, _describe_shown))
    with channel.guard(call, limits) as guarded:
        everyone = [received.view(numpy.int64).tolist() for received in guarded.exchange(body)]
    largest = [max(column) for column in zip(*everyone, strict=True)]
    padded = [
        leaf if size == _NO_SIZE else _pad_leaf(leaf, dim, target, pad_index, pad_first)
        for leaf, size, target in zip(leaves, sizes, largest, strict=True)
    ]
    return pytree.unflatten(data, padded)


_NO_SIZE = -1
"""The size of a leaf without the dimension that is padded."""


def _describe_dimensions(leaf: Any) -> str:
    return f"{leaf.dtype} {len(leaf.shape)}" if is_tensor_leaf(leaf) else "object"


def _size_along(leaf: Any, dim: int) -> int:
    if not is_tensor_leaf(leaf):
        return _NO_SIZE
    tensor = as_tensor(leaf)
    return int(tensor.shape[dim]) if -tensor.ndim <= dim < tensor.ndim else _NO_SIZE


def _pad_leaf(leaf: Any, dim: int, target: int, pad_index: float, pad_first: bool) -> Any:
    if leaf.shape[dim] == target:
        return leaf
    tensor = leaf if isinstance(leaf, torch.Tensor) else as_tensor(leaf)
    shape = list(tensor.shape)
    shape[dim] = target - shape[dim]
    filler = tensor.new_full(shape, pad_index)
    joined = torch.cat([filler, tensor] if pad_first else [tensor, filler], dim=dim)
    return joined if isinstance(leaf, torch.Tensor) else joined.numpy()


def gather_with_gradient(channel: Channel, limits: Limits, data: Any) -> Any:
    """Join nested tensors of all ranks along the first dimension; gradients flow back to every rank's own rows."""
    leaves = pytree.flatten(data)
    other = next((leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)), None)
    if other is not None:
        cause = TypeError(f"gather with gradient takes nested tensors, but there is a {type(other).__name__} in the data")
        raise announce_failure(channel, limits, "gather with gradient", cause)
    return pytree.unflatten(data, _GatherFunction.apply(channel, limits, *leaves))  # type: ignore[no-untyped-call]


class _GatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, channel: Channel, limits: Limits, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.tensor([[leaf.shape[0] if leaf.dim() else 1 for leaf in leaves]], device="cpu")
        wanted = "".join("1" if needed else "0" for needed in ctx.needs_input_grad[2:])
        everyone, joined = gather(
            channel, limits, (rows, list(leaves)), operation="gather with gradient", condition=f" with requires_grad {wanted}"
        )
        ctx.channel, ctx.limits = channel, limits
        ctx.shapes = [leaf.shape for leaf in leaves]
        ctx.starts = everyone[: channel.rank].sum(dim=0).tolist()
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]  # the same on all ranks; masks and ids have no gradient that could be added up
        wanted = [gradient for gradient, is_needed in zip(gradients, needed, strict=True) if is_needed]
        totals = iter(reduce(ctx.channel, ctx.limits, wanted, "sum", operation="gather backward"))
        own = [
            next(totals)[start : start + (shape[0] if shape else 1)].reshape(shape).clone() if is_needed else None  # it may be kept
            for start, shape, is_needed in zip(ctx.starts, ctx.shapes, needed, strict=True)
        ]
        return None, None, *own


_MAX_SHOWN = 5
_MAX_TEXT = 80
_AS_IT_IS = "="


def check_agreement(channel: Channel, limits: Limits, what: str, values: Mapping[str, Any]) -> None:
    """Raise MismatchError on every rank if a value of that name is not the same on all of them.

    >>> check_agreement(Channel(), Limits(), "weights", {"w": torch.ones(2)})
    """
    operation = f"check of {what}"
    with _announce_failures(channel, limits, operation):
        own = {name: _value_digest(value) for name, value in values.items()}
    digests = gather_objects(channel, limits, own, operation=operation)
    assert digests is not None
    names = sorted({name for digest in digests for name in digest})
    different = {name: [digest.get(name) for digest in digests] for name in names if len({digest.get(name) for digest in digests}) > 1}
    if not different:
        return
    lines = [f"  {name}: {_format_groups(found)}" for name, found in list(different.items())[:_MAX_SHOWN]]
    more = f"\n  and {len(different) - _MAX_SHOWN} more" if len(different) > _MAX_SHOWN else ""
    raise MismatchError(
        "\n".join([f"{what} should be the same on all processes, but {len(different)} of {len(names)} are not:", *lines])
        + f"{more}\n(raised on rank {channel.rank})"
    )


def _value_digest(value: Any) -> str:
    """Return text that is the same for equal values: the value itself, if it is a short text that a message can show."""
    if isinstance(value, str) and len(value) <= _MAX_TEXT:
        return _AS_IT_IS + value
    return blake2b(codec.encode(_canonical(value)), digest_size=12).hexdigest()


def _canonical(value: Any) -> Any:
    """Return the same for equal values, in whatever order their dicts and sets were filled."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    kind = type(value).__qualname__
    if isinstance(value, (set, frozenset)):
        return kind, sorted(codec.encode(_canonical(item)) for item in value)
    if isinstance(value, Mapping):
        pairs = [(codec.encode(_canonical(key)), _canonical(item)) for key, item in value.items()]
        return kind, sorted(pairs, key=itemgetter(0))
    if isinstance(value, (list, tuple)):
        return kind, [_canonical(item) for item in value]
    if pytree.is_node(value):
        return kind, [(name, _canonical(item)) for name, item in pytree.children(value)]
    return value


def _format_groups(found: list[str | None]) -> str:
    groups: dict[str | None, list[int]] = {}
    for rank, digest in enumerate(found):
        groups.setdefault(digest, []).append(rank)
    texts = {None: " (has none)"} | {digest: f" ({digest[1:]})" for digest in groups if digest and digest.startswith(_AS_IT_IS)}
    return " | ".join(format_ranks(ranks) + texts.get(digest, "") for digest, ranks in groups.items())
