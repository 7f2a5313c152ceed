"""Sharded tensors put together on the main process, one at a time, for files that hold whole weights.

Every rank makes a `FullTensors` of the same tensors in the same order. The main process reads them in that order and holds one full tensor
at a time; the others send it their parts. Whoever fails in between still takes part until the end, so no rank is left waiting: the error
is raised where the ranks agree on the outcome.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slipstream.checkpoint.shard_layout import Box
from slipstream.checkpoint.sharded import LocalShard, is_sharded, local_shard
from slipstream.checkpoint.tensor_bytes import tensor_bytes

if TYPE_CHECKING:
    from slipstream.checkpoint.saver import Saver

__all__ = ["FullTensors"]


class FullTensors:
    """Sharded tensors in the order in which the main process will read them."""

    def __init__(self, saver: Saver, tensors: Mapping[Any, torch.Tensor], operation: str) -> None:
        """Agree on who stores which part of which tensor; every rank has to call it."""
        state = saver.components.state
        self._sharded = {key: value for key, value in tensors.items() if is_sharded(value)}
        self._rank, self._main = state.process_index, state.is_main_process
        self._watch = state.runtime.watch(operation, state.limits)
        self._shards: dict[Any, LocalShard] = {}
        self._boxes = saver.run_and_agree(operation, self._describe)
        self._numbers = {key: number for number, key in enumerate(self._sharded)}
        self._left = deque(self._sharded)
        self._buffer: torch.Tensor | None = None

    def _describe(self) -> list[Any]:
        self._shards = {key: local_shard(value, repr(key)) for key, value in self._sharded.items()}
        return [
            [list(shard.position.box.offset), list(shard.position.box.shape)] if shard.owned else None for shard in self._shards.values()
        ]

    def __enter__(self) -> FullTensors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, Exception):
            self.finish()

    def finish(self) -> None:
        """Take part in what is left, so that every rank comes to the end."""
        while self._left:
            self._gather()

    def read(self, name: str, tensor: torch.Tensor) -> memoryview:
        """Return the bytes of a tensor on the main process, put together if it is sharded. Ask in the order of the tensors.

        They are valid until the next call: there is one buffer for all.
        """
        if not is_sharded(tensor):
            return tensor_bytes(tensor)
        assert self._sharded[self._left[0]] is tensor, name
        full = self._gather()
        assert full is not None
        return tensor_bytes(full)

    def _gather(self) -> torch.Tensor | None:
        """Return the next full tensor on the main process; on the others, send the part that this rank stores."""
        key = self._left.popleft()
        own, number = self._shards[key], self._numbers[key]
        boxes: Sequence[Box | None] = [
            None if entry[number] is None else Box(tuple(entry[number][0]), tuple(entry[number][1])) for entry in self._boxes
        ]
        with self._watch, torch.no_grad():
            if not self._main:
                if own.owned and own.tensor.numel():
                    dist.send(_as_bytes(own.tensor.contiguous()), 0)
                return None
            full = self._empty_full(own)
            for rank, box in enumerate(boxes):
                if box is None or not box.volume:
                    continue
                place = full[box.slices()]
                if rank == self._rank:
                    place.copy_(own.tensor)
                elif place.is_contiguous():
                    dist.recv(_as_bytes(place), rank)
                else:
                    part = torch.empty(box.shape, dtype=full.dtype, device=full.device)
                    dist.recv(_as_bytes(part), rank)
                    place.copy_(part)
            return full


    def _empty_full(self, own: LocalShard) -> torch.Tensor:
        """Return room for a full tensor, used again: whoever writes a tensor still holds it when it asks for the next one."""
        if self._buffer is None:
            largest = max(value.nbytes for value in self._sharded.values())
            self._buffer = torch.empty(largest, dtype=torch.uint8, device=own.tensor.device)
        shape, dtype = own.position.shape, own.tensor.dtype
        return self._buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor: a backend may not send every type of elements."""
    return tensor.view(-1).view(torch.uint8)
