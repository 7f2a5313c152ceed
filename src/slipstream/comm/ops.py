"""The other collectives over nested data: barrier, reduce, broadcast, pad, and sharing what one rank has.

Each is one guarded call (`channel.py`) for the whole tree: one flat payload per type, not one collective per tensor. Results own
their memory and the data of the user is never changed.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from slipstream.comm import codec, tree
from slipstream.comm.channel import Body, Channel, Limits, Turn
from slipstream.comm.guarded import Reader, announce, check_rank, refuse
from slipstream.comm.leaves import (
    Packed,
    as_tensor,
    is_entries,
    is_tensor_leaf,
    numbers_as_tensors,
    pack_object,
    spell_tensor,
    unpack_object,
)

__all__ = ["REDUCTIONS", "barrier", "broadcast", "broadcast_objects", "pad", "reduce", "share"]

REDUCTIONS = ("sum", "mean", "max", "min", "none")
_COMBINE = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}


def barrier(channel: Channel, limits: Limits, operation: str = "wait_for_everyone", trouble: str = "") -> str:
    """Returns when every rank has called it. `trouble` is told to the others: what another rank told comes back."""
    body = Body()
    body.add(numpy.frombuffer(trouble.encode()[:1024], dtype=numpy.uint8))
    with channel.turn(announce(operation, "", str), limits, patient=True) as turn:
        told = [data.tobytes().decode(errors="replace") for data in turn.exchange(body)]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text and rank != channel.rank), "")


# -- reduce -----------------------------------------------------------------------------------------------------------


def reduce(channel: Channel, limits: Limits, data: Any, reduction: str = "sum", scale: float = 1.0, *, operation: str = "reduce") -> Any:
    """Every tensor, array or number combined over the ranks, and then multiplied by `scale`; the same on all of them."""
    leaves = tree.flatten(data)
    name = f"{operation}({reduction})" if scale == 1.0 else f"{operation}({reduction}, scale={scale})"
    try:
        terms = [_Term(leaf, reduction) for leaf in leaves]
    except Exception as error:  # also what torch raises for a number that is too large: the others must hear of it
        raise refuse(channel, limits, name, error) from None
    packed = [term.pack for term in terms]
    text = tree.spell(data, lambda leaf: spell_tensor(numbers_as_tensors(leaf)))
    small = all(pack.on_host for pack in packed) and sum(pack.rows * pack.row_bytes + 16 for pack in packed) <= channel.room
    body = Body()
    if small and reduction != "none":
        for pack in packed:
            body.add(pack.bytes())
    with channel.turn(announce(name, text, lambda: text), limits) as turn:
        bodies = turn.exchange(body)
        if reduction == "none":
            results = [pack.tensor.clone() for pack in packed]
        else:
            results = _combine(bodies, packed, reduction) if small else _all_reduce(turn, packed, reduction, channel.world_size)
    return tree.unflatten(data, [term.finish(result, scale) for term, result in zip(terms, results, strict=True)])


_ADDED_AS = {
    **{
        dtype: dtype
        for dtype in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.int8,
            torch.uint8,
            torch.int32,
            torch.int64,
        )
    },
    torch.int16: torch.int32,
    torch.bool: torch.uint8,
}
"""The types that every backend can combine, and the types that go through one of these. Complex numbers go as their two parts."""
_CONVERT = {
    "float": (".float()", ".astype('float32')", "float(...)"),
    "int": (".long()", ".astype('int64')", "int(...)"),
}
"""What to write to convert a tensor, an array, and a number."""


class _Term:
    """One leaf of a reduce: in the form in which it is combined, and how it comes back from there."""

    __slots__ = ("dtype", "leaf", "pack", "shape")

    def __init__(self, leaf: Any, reduction: str) -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} is not known: write one of {', '.join(REDUCTIONS)}")
        value = numbers_as_tensors(leaf)
        if not is_tensor_leaf(value):
            raise TypeError(
                f"reduce got a {type(leaf).__name__}, which cannot be added up: pass tensors, arrays or numbers, or use gather for objects"
            )
        tensor = as_tensor(value)
        if reduction != "none":
            _check_type(leaf, tensor, reduction)
        self.leaf, self.dtype, self.shape = leaf, tensor.dtype, tensor.shape
        self.pack = Packed(torch.view_as_real(tensor) if tensor.is_complex() else tensor.to(_ADDED_AS.get(self.dtype, self.dtype)))

    def finish(self, result: torch.Tensor, scale: float) -> Any:
        """The combined tensor in the form that the leaf had."""
        result = result.reshape(self.pack.shape)
        result = torch.view_as_complex(result) if self.dtype.is_complex else result.to(self.dtype)
        if scale != 1.0:
            result = result * scale
        if isinstance(self.leaf, torch.Tensor):
            return result
        return result.numpy() if isinstance(self.leaf, numpy.ndarray) else result.item()


def _check_type(leaf: Any, tensor: torch.Tensor, reduction: str) -> None:
    """Refuses what some backend, some size or some number of processes could not combine: the answer is the same for all of them."""
    form = 0 if isinstance(leaf, torch.Tensor) else 1 if isinstance(leaf, numpy.ndarray) else 2
    spelled = f"the {type(leaf).__name__} {leaf}" if form == 2 else spell_tensor(leaf)
    if tensor.is_complex():
        if reduction in ("max", "min"):
            raise TypeError(f"{spelled} has no {reduction}, as complex numbers have no order: take the size first, e.g. with abs(...)")
        return
    if tensor.dtype not in _ADDED_AS:
        way = _CONVERT["float" if tensor.is_floating_point() else "int"][form]
        raise TypeError(f"{spelled} is of a type that cannot be combined between processes: convert it with {way} first")
    if reduction == "mean" and not tensor.is_floating_point():
        raise TypeError(f"the mean of {spelled} is not a whole number: convert it with {_CONVERT['float'][form]} first, or use 'sum'")
    if reduction == "sum" and tensor.dtype == torch.bool:
        raise TypeError(
            f"{spelled} cannot be added up: convert it with {_CONVERT['int'][form]} to count, or use 'max' for any and 'min' for all"
        )


def _combine(bodies: list[Any], packed: list[Packed], reduction: str) -> list[torch.Tensor]:
    """Everyone's tensors are here already: combined in the order of the ranks, so that all ranks get the same bits."""
    readers = [Reader(data) for data in bodies]
    results = []
    for pack in packed:
        stacked = torch.stack([_take(reader, pack) for reader in readers])
        results.append(getattr(stacked, _COMBINE[reduction])(dim=0).to(pack.tensor.dtype))
    return results


def _take(reader: Reader, pack: Packed) -> torch.Tensor:
    return pack.as_rows(torch.from_numpy(reader.take(pack.rows * pack.row_bytes)), pack.rows)


def _all_reduce(turn: Turn, packed: list[Packed], reduction: str, world_size: int) -> list[torch.Tensor]:
    """One all-reduce for each type and device, over a flat copy of its tensors."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, pack in enumerate(packed):
        groups.setdefault((pack.tensor.dtype, pack.tensor.device), []).append(index)
    results: list[torch.Tensor] = [pack.tensor for pack in packed]
    for members in groups.values():
        flat = torch.cat([packed[index].tensor.reshape(-1) for index in members])
        turn.all_reduce(flat, "sum" if reduction == "mean" else reduction)
        if reduction == "mean":
            flat /= world_size
        position = 0
        for index in members:
            size = packed[index].tensor.numel()
            results[index] = flat[position : position + size].clone()
            position += size
    return results


# -- broadcast --------------------------------------------------------------------------------------------------------


def broadcast(channel: Channel, limits: Limits, data: Any, from_process: int = 0, *, operation: str = "broadcast") -> Any:
    """The leaves of one rank on every rank; all ranks pass data of the same structure, types and shapes."""
    leaves = tree.flatten(data, is_entries)
    name = f"{operation} from rank {from_process}"
    try:
        check_rank(from_process, channel.world_size)
        packed = [Packed(leaf) if is_tensor_leaf(leaf) else None for leaf in leaves]
        body = _broadcast_body(leaves, packed) if channel.rank == from_process else Body()
    except Exception as error:  # whatever a foreign class raises when it is pickled: the others must hear of it
        raise refuse(channel, limits, name, error) from None
    text = tree.spell(data, lambda leaf: spell_tensor(leaf) if is_tensor_leaf(leaf) else "object", is_entries)
    with channel.turn(announce(name, text, lambda: text), limits) as turn:
        reader = Reader(turn.exchange(body, sender=from_process)[from_process])
        objects = iter(_take_objects(reader))
        results = []
        for leaf, pack in zip(leaves, packed, strict=True):
            if pack is None:
                results.append(unpack_object(next(objects), leaf))
            elif pack.on_host:
                results.append(pack.finish(_take(reader, pack).reshape(pack.shape).clone()))
            else:
                value = pack.tensor.clone()
                turn.broadcast(value, from_process)
                results.append(value.reshape(pack.shape))
    return tree.unflatten(data, results, is_entries)


def _broadcast_body(leaves: list[Any], packed: list[Packed | None]) -> Body:
    encoded = codec.encode([pack_object(leaf) for leaf, pack in zip(leaves, packed, strict=True) if pack is None])
    body = Body()
    body.add(numpy.array([len(encoded)], dtype=numpy.int64).view(numpy.uint8))
    body.add(numpy.frombuffer(encoded, dtype=numpy.uint8))
    for pack in packed:
        if pack is not None and pack.on_host:
            body.add(pack.bytes())
    return body


def _take_objects(reader: Reader) -> list[Any]:
    length = int.from_bytes(reader.take(8), "little")
    objects: list[Any] = codec.decode(reader.take(length))
    return objects


def broadcast_objects(
    channel: Channel, limits: Limits, values: list[Any], from_process: int = 0, *, operation: str = "broadcast_object_list"
) -> list[Any]:
    """The list of one rank, of the same length on all of them."""
    name = f"{operation} from rank {from_process}"
    body = Body()
    try:
        check_rank(from_process, channel.world_size)
        if channel.rank == from_process:
            body.add(numpy.frombuffer(codec.encode(list(values)), dtype=numpy.uint8))
    except Exception as error:  # whatever a foreign class raises when it is pickled: the others must hear of it
        raise refuse(channel, limits, name, error) from None
    text = f"a list of {len(values)} objects"
    with channel.turn(announce(name, text, lambda: text), limits) as turn:
        received: list[Any] = codec.decode(turn.exchange(body, sender=from_process)[from_process])
    return received


def share(channel: Channel, limits: Limits, tensor: torch.Tensor | None, *, operation: str = "copy_tensor_to_devices") -> torch.Tensor:
    """A tensor that exactly one rank has, on all of them."""
    body = Body()
    if tensor is not None:
        body.add(numpy.frombuffer(codec.encode(tensor), dtype=numpy.uint8))
    with channel.turn(announce(operation, "", lambda: "None" if tensor is None else spell_tensor(tensor)), limits) as turn:
        owned = [data.tobytes() for data in turn.exchange(body) if data.size]
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
    """Every tensor padded along `dim` to the largest size over the ranks; leaves without that dimension stay as they are.

    The ranks need the same number of dimensions; the sizes of the others may differ.
    """
    leaves = tree.flatten(data)
    try:
        sizes = [_size_along(leaf, dim) for leaf in leaves]
    except TypeError as error:
        raise refuse(channel, limits, operation, error) from None
    body = Body()
    body.add(numpy.array([-1 if size is None else size for size in sizes], dtype=numpy.int64).view(numpy.uint8))
    agreement = f"dim={dim} " + tree.spell(data, lambda leaf: f"{leaf.dtype} {len(leaf.shape)}" if is_tensor_leaf(leaf) else "object")
    call = announce(
        operation,
        agreement,
        lambda: f"dim={dim} " + tree.spell(data, lambda leaf: spell_tensor(leaf) if is_tensor_leaf(leaf) else type(leaf).__name__),
    )
    with channel.turn(call, limits) as turn:
        everyone = [received.view(numpy.int64).tolist() for received in turn.exchange(body)]
    largest = [max(sizes) for sizes in zip(*everyone, strict=True)]
    return tree.unflatten(
        data,
        [
            leaf if size is None else _padded(leaf, dim, target, pad_index, pad_first)
            for leaf, size, target in zip(leaves, sizes, largest, strict=True)
        ],
    )


def _size_along(leaf: Any, dim: int) -> int | None:
    if not is_tensor_leaf(leaf):
        return None
    tensor = as_tensor(leaf)
    return int(tensor.shape[dim]) if -tensor.ndim <= dim < tensor.ndim else None


def _padded(leaf: Any, dim: int, target: int, pad_index: float, pad_first: bool) -> Any:
    if leaf.shape[dim] == target:
        return leaf
    tensor = leaf if isinstance(leaf, torch.Tensor) else as_tensor(leaf)
    shape = list(tensor.shape)
    shape[dim] = target - shape[dim]
    filler = tensor.new_full(shape, pad_index)
    joined = torch.cat([filler, tensor] if pad_first else [tensor, filler], dim=dim)
    return joined if isinstance(leaf, torch.Tensor) else joined.numpy()
