"""Gather: the leaves of all ranks joined in the order of the ranks, in one guarded call for the whole tree.

Tensors and arrays are joined along the first dimension, which may differ between ranks; a tensor without dimensions counts as one
row. A list is concatenated, entry by entry (texts, ids, records that may hold tensors), unless it has tensors among its entries or holds
nothing but tensors: then it is structure, as dicts, tuples and dataclasses are. A tuple of single values is concatenated, too. Any other
leaf becomes a list of one value per rank. `arrange` puts samples into another order and drops repeated ones (see `runtime/split.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy
import torch

from slipstream.comm import codec, tree
from slipstream.comm.channel import Body, Channel, Limits, Turn, aligned
from slipstream.comm.guarded import Reader, announce, check_rank, refuse
from slipstream.comm.leaves import Packed, is_entries, is_tensor_leaf, pack_object, spell_tensor, unpack_object
from slipstream.comm.tensor_memory import concatenated

__all__ = ["Arrange", "gather", "gather_objects"]

_SCALAR = -1
"""Stands for the number of rows of a tensor without dimensions."""


class Arrange(Protocol):
    """How results of split work are put back: the order of the input, without what only padded a part."""

    @property
    def total(self) -> int:
        """How many samples the whole input had, as far as this rank knows; -1 for not known. All ranks have to know the same."""

    @property
    def leaf_by_leaf(self) -> bool:
        """Whether each leaf is judged by itself (some hold samples, others do not), rather than all together."""

    @property
    def ranks(self) -> list[int] | None:
        """The ranks of which values that are one per rank (numbers, texts, tensors without dimensions) are kept; None for all."""

    def order(self, counts: Sequence[int]) -> list[int] | None:
        """Given how many samples each rank brought: positions in their concatenation; None if these are not results of the split."""


def gather_objects(
    channel: Channel,
    limits: Limits,
    value: Any,
    *,
    dst: int | None = None,
    arrange: Arrange | None = None,
    flat: bool = False,
    operation: str = "gather_object",
    reason: str = "",
) -> list[Any] | None:
    """The values of all ranks as a list, in the order of the ranks; `flat` joins them, as they are lists; with `dst`, only there.

    `reason`: why this rank calls it, for the table of who waits where; it may be another on each rank.
    """
    kind = "a list" if flat else "one object"
    body = Body()
    try:
        check_rank(dst, channel.world_size)
        body.add(numpy.frombuffer(codec.encode([_total(arrange), value]), dtype=numpy.uint8))
    except Exception as error:  # whatever a foreign class raises when it is pickled: the others must hear of it
        raise refuse(channel, limits, operation, error) from None
    target = "" if dst is None else f" to rank {dst}"
    call = announce(operation, kind + target, lambda: f"{kind} ({type(value).__name__}){target}")
    call.site += f" ({reason})" if reason else ""
    with channel.turn(call, limits) as turn:
        bodies = turn.exchange(body, receiver=dst)
        told = [codec.decode(data) for data in bodies] if dst in (None, channel.rank) else None
    if told is None:
        return None
    values = [value for _, value in told]
    if not flat:
        kept = _kept_ranks(arrange, [total for total, _ in told])
        return values if kept is None else [values[rank] for rank in kept]
    joined = [item for value in values for item in value]
    order = _agreed(arrange, [total for total, _ in told], [[len(value) for value in values]])
    return joined if order is None else [joined[position] for position in order]


def gather(
    channel: Channel,
    limits: Limits,
    data: Any,
    *,
    dst: int | None = None,
    arrange: Arrange | None = None,
    operation: str = "gather",
    condition: str = "",
) -> Any:
    """The same structure with the leaves of all ranks joined; with `dst`, only on that rank, and None elsewhere.

    `condition` is a text on which the ranks have to agree besides.
    """
    try:
        check_rank(dst, channel.world_size)
        leaves = tree.flatten(data, is_entries)
        packed = [Packed(leaf) if is_tensor_leaf(leaf) else None for leaf in leaves]
        body = _body(leaves, packed, _total(arrange))
        agreement = tree.spell(data, _open, is_entries)
    except Exception as error:  # whatever a foreign class raises when it is pickled: the others must hear of it
        raise refuse(channel, limits, operation, error) from None
    target = condition + ("" if dst is None else f" to rank {dst}")
    call = announce(operation, agreement + target, lambda: tree.spell(data, _full, is_entries) + target)
    tensors = [pack for pack in packed if pack is not None]
    on_host = all(pack.on_host for pack in tensors)
    with channel.turn(call, limits) as turn:
        # Device payloads go to every rank, so every rank needs everyone's rows.
        bodies = turn.exchange(body, receiver=dst if on_host else None)
        if dst not in (None, channel.rank) and on_host:
            return None
        joined = _Joined(turn, bodies, tensors, has_objects=len(tensors) < len(packed))
    if dst not in (None, channel.rank):
        return None
    return tree.unflatten(data, joined.finish(leaves, packed, arrange), is_entries)


def _total(arrange: Arrange | None) -> int:
    return -1 if arrange is None else arrange.total


def _kept_ranks(arrange: Arrange | None, totals: Sequence[int]) -> list[int] | None:
    """The ranks of which single values are kept, if all ranks know of the same samples; None for all."""
    return None if arrange is None or totals[0] < 0 or len(set(totals)) > 1 else arrange.ranks


def _agreed(arrange: Arrange | None, totals: Sequence[int], counts: list[list[int]]) -> list[int] | None:
    """The arrangement, if all ranks know it for the same split and every leaf that holds samples fits it."""
    if arrange is None or not counts or totals[0] < 0 or len(set(totals)) > 1:
        return None
    orders = [arrange.order(count) for count in counts]
    return orders[0] if all(order is not None for order in orders) else None


def _open(leaf: Any) -> str:
    """What has to agree."""
    if is_tensor_leaf(leaf):
        return spell_tensor(leaf, ragged=True)
    return "entries" if is_entries(leaf) else "object"


def _full(leaf: Any) -> str:
    """What is shown."""
    if is_tensor_leaf(leaf):
        return spell_tensor(leaf)
    return f"{len(leaf)} entries" if is_entries(leaf) else type(leaf).__name__


def _body(leaves: list[Any], packed: list[Packed | None], total: int) -> Body:
    """The rows of every tensor leaf, then the objects, then the bytes of tensors in host memory."""
    others = [leaf for leaf, pack in zip(leaves, packed, strict=True) if pack is None]
    encoded = codec.encode([pack_object(list(leaf)) if is_entries(leaf) else leaf for leaf in others]) if others else b""
    tensors = [pack for pack in packed if pack is not None]
    body = Body()
    sizes = struct.pack(f"<{len(tensors) + 2}q", *[_SCALAR if pack.is_scalar else pack.rows for pack in tensors], total, len(encoded))
    body.add(numpy.frombuffer(sizes, dtype=numpy.uint8))
    body.add(numpy.frombuffer(encoded, dtype=numpy.uint8))
    for pack in tensors:
        if pack.on_host:
            body.add(pack.bytes())
    return body


class _Joined:
    """What all ranks brought, leaf by leaf."""

    def __init__(self, turn: Turn, bodies: list[Any], tensors: list[Packed], has_objects: bool) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.objects: list[list[Any]] = []
        self.scalars = [True] * len(tensors)
        """Of which leaves no rank has rows: one value each."""
        host: list[list[Any]] = [[] for _ in tensors]
        self.totals: list[int] = []
        sizes = struct.Struct(f"<{len(tensors) + 2}q")
        for data in bodies:
            reader = Reader(data)
            *told, total, length = sizes.unpack(reader.take(sizes.size))
            rows = [1 if count == _SCALAR else count for count in told]
            self.scalars = [scalar and count == _SCALAR for scalar, count in zip(self.scalars, told, strict=True)]
            self.totals.append(total)
            encoded = reader.take(length)
            self.rows.append(tuple(rows))
            self.objects.append(codec.decode(encoded) if has_objects else [])
            for pack, count, chunks in zip(tensors, rows, host, strict=True):
                if pack.on_host:
                    chunks.append(reader.take(count * pack.row_bytes))
        totals = [sum(counts) for counts in zip(*self.rows, strict=True)]
        self.tensors = [
            concatenated(chunks, pack.dtype, (total, *pack.row_shape)) if pack.on_host else pack.tensor
            for pack, chunks, total in zip(tensors, host, totals, strict=True)
        ]
        self._gather_device(turn, tensors)

    def _gather_device(self, turn: Turn, tensors: list[Packed]) -> None:
        """Tensors in device memory travel over the device's own backend: one flat payload, padded to the longest."""
        remote = [(index, pack) for index, pack in enumerate(tensors) if not pack.on_host]
        if not remote:
            return
        longest = max(sum(aligned(rows[index] * pack.row_bytes) for index, pack in remote) for rows in self.rows)
        flat = torch.zeros(longest, dtype=torch.uint8, device=remote[0][1].tensor.device)
        own = Reader(flat)
        for _, pack in remote:
            own.take(pack.rows * pack.row_bytes).copy_(pack.tensor.view(-1).view(torch.uint8))
        readers = [Reader(data) for data in turn.all_gather(flat).view(len(self.rows), longest)]
        for index, pack in remote:
            counts = [rows[index] for rows in self.rows]
            chunks = [reader.take(count * pack.row_bytes) for reader, count in zip(readers, counts, strict=True)]
            self.tensors[index] = pack.as_rows(torch.cat(chunks), sum(counts))

    def finish(self, leaves: list[Any], packed: list[Packed | None], arrange: Arrange | None) -> list[Any]:
        results: list[Any] = []
        counts: list[list[int] | None] = []
        """How many samples each rank brought; None for a leaf that holds one value per rank."""
        supply = iter(enumerate(self.tensors))
        objects = iter(zip(*self.objects, strict=True))
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
            orders = [kept if count is None else _agreed(arrange, self.totals, [count]) for count in counts]
        else:
            order = _agreed(arrange, self.totals, [count for count in counts if count is not None])
            orders = [None if count is None else order for count in counts]
        return [
            _finish_leaf(leaf, pack, result, order) for leaf, pack, result, order in zip(leaves, packed, results, orders, strict=True)
        ]


def _finish_leaf(leaf: Any, pack: Packed | None, result: Any, order: list[int] | None) -> Any:
    if pack is not None:
        return pack.finish(result if order is None else result[torch.tensor(order, dtype=torch.long, device=result.device)])
    if order is not None:
        result = [result[position] for position in order]
    return tuple(result) if isinstance(leaf, tuple) else result
