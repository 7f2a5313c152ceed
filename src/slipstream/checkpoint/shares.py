"""What this rank holds of a tensor that is sharded over ranks (torch's `DTensor`), as a box of it; and the way back.

Nothing here communicates, and nothing imports torch's package of such tensors: while nobody else has, there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.checkpoint.pieces import Box, Place, whole
from slipstream.checkpoint.raw import DTYPES, storable
from slipstream.errors import CheckpointError

__all__ = ["Share", "is_sharded", "like", "replicated_like", "share_of", "shares_held", "wanted"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Share:
    """What a rank holds of a tensor."""

    tensor: torch.Tensor
    """The rank's own elements: no copy."""
    place: Place
    owned: bool
    """Whether it is this rank that stores them: one of those that hold the same."""


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor of which other ranks may hold parts.

    >>> is_sharded(torch.ones(2)), is_sharded(3)
    (False, False)
    """
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor):
        return False
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def share_of(tensor: Any, where: str) -> Share:
    """What this rank holds of a sharded tensor; `where` begins the messages."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{where} is a sum of which every rank has a summand ({tensor.placements}). Reduce it before it is saved.")
    coordinate = tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    if coordinate is None:  # this rank is not one of those that share it
        return Share(torch.empty((0,) * len(shape), dtype=tensor.dtype), Place(shape, Box(shape, (0,) * len(shape))), False)
    box = wanted(tensor)
    local = storable(tensor.to_local().detach(), where)
    if local.dtype not in DTYPES:
        raise CheckpointError(f"{where} is a sharded tensor of {local.dtype}, which a file of pieces cannot hold. Convert it.")
    if tuple(local.shape) != box.shape:
        raise CheckpointError(f"{where} should have the shape {list(box.shape)} on this rank, by its placements, not {list(local.shape)}.")
    first = all(place == 0 for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
    empty = 0 in shape and all(place == 0 for place in coordinate)  # somebody has to say that it is there
    return Share(local, Place(shape, box), first and (box.volume > 0 or empty))


def wanted(tensor: Any) -> Box:
    """Which part of the whole a tensor holds on this rank: all of it, unless it is sharded.

    >>> wanted(torch.ones(2, 3))
    Box(offset=(0, 0), shape=(2, 3))
    """
    if not is_sharded(tensor):
        return whole(tensor.shape)
    if tensor.device_mesh.get_coordinate() is None:
        return Box((0,) * tensor.dim(), (0,) * tensor.dim())
    (chunk,) = tensor.__create_chunk_list__()
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def like(target: Any, local: torch.Tensor) -> Any:
    """A tensor that is sharded as `target` is, of which this rank holds these elements."""
    kind = sys.modules["torch.distributed.tensor"].DTensor
    local = local.to(target.device)
    return kind.from_local(
        local, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def replicated_like(target: Any, full: torch.Tensor) -> Any:
    """A tensor that every rank which shares `target` holds whole."""
    package = sys.modules["torch.distributed.tensor"]
    placements = [package.Replicate() for _ in target.placements]
    return package.DTensor.from_local(full.to(target.device), target.device_mesh, placements, run_check=False)


def shares_held(tensors: Mapping[str, Any], where: str) -> dict[str, Share]:
    """What this rank holds of those that are sharded, by name; `where` says whose they are."""
    return {name: share_of(value, f"{name!r} of {where}") for name, value in tensors.items() if is_sharded(value)}
