"""Copies of a run's tensors for async saving: the run goes on and changes its tensors, the copies keep the values of the call.

Tensors on the CPU are copied in the call. Those on a device are copied into pinned memory by the device itself, in the order of its
stream: after the kernels that were started before the call, and before those that come later, whoever starts them. So the host does not
wait, and no later change gets into a copy. (A side stream would let the next kernels begin earlier, but then every writer of a weight,
also one in the user's code, would have to wait for it.) `Snapshot.ready` waits for the copies; whoever writes them to a file calls it.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import numpy
import torch

from slipstream.checkpoint.capture import ModelPart, ShardedPart, Snapshot, StatePart
from slipstream.devices.late_read import completion_event
from slipstream.devices.memory import available_cores
from slipstream.distributed.codec import byte_view
from slipstream.files.large_pages import LargePages
from slipstream.logging import get_logger

__all__ = ["Arena"]

_COPY_SIZE: Final = 64 << 20
"""Bytes that a thread copies at once: copies larger than half the processor's cache bypass it, and are nearly twice as fast."""
_SMALL_TENSOR: Final = 256 << 10
"""Bytes from which on a tensor is worth a task for a thread."""
_SMALL_COPY: Final = 8 << 20
_COPIERS: Final = 4
_ALIGNMENT: Final = 64
_PINNED_BLOCK: Final = 1 << 30
"""Bytes of a block of pinned memory: torch rounds each up to a power of two, so one block for all could take twice the memory."""
_Bytes: TypeAlias = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]
_Part = TypeVar("_Part", StatePart, ModelPart, ShardedPart)


class Arena:
    """Memory for copies of a run's tensors, kept from one save to the next, because fresh pages cost as much as the copy.

    Copying 1.2 GB takes 0.05 s, and 0.07 s into fresh memory; in small pages that would be 0.22 s (two cores of a virtual machine).
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._pages = LargePages([])
        self._pending: list[tuple[_Bytes, _Bytes]] = []
        """Pairs of target and source that are still to be copied."""
        self._events: dict[torch.device, Any] = {}
        """An event for each device that copies late."""
        self._can_pin = True

    def keep(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with copies of all tensors, which are valid until the next call."""
        _wait(self._events.values())  # of a save that failed before it did
        tensors = list(snapshot.tensors())
        places = self._reserve(tensors)
        with torch.no_grad():
            copies = {id(tensor): self._copy(tensor.detach(), *place) for tensor, place in zip(tensors, places, strict=True)}
        for device, event in self._events.items():
            event.record(torch.accelerator.current_stream(device))
        pending, self._pending = self._pending, []
        _copy_bytes(pending, self._pages)

        def copied(part: _Part) -> _Part:
            return replace(part, tensors={name: copies[id(tensor)] for name, tensor in part.tensors.items()})

        return Snapshot(
            facts=snapshot.facts,
            own=copied(snapshot.own),
            models=tuple(replace(copied(model), extra=model.extra and copied(model.extra)) for model in snapshot.models),
            optimizers=tuple(map(copied, snapshot.optimizers)),
            training=snapshot.training and copied(snapshot.training),
            objects=tuple(map(copied, snapshot.objects)),
            shards=tuple(map(copied, snapshot.shards)),
            ready=partial(_wait, list(self._events.values())),
        )

    def _reserve(self, tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
        """Return a block and an offset for a copy of each tensor; the memory is pinned if a device can copy into it late."""
        devices = {tensor.device for tensor in tensors if not tensor.is_cpu} if self._can_pin else ()
        self._events = {device: event for device in devices if (event := completion_event(device)) is not None}
        pinned = bool(self._events)
        sizes, places = [0], []
        for tensor in tensors:
            size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            if pinned and sizes[-1] and sizes[-1] + size > _PINNED_BLOCK:
                sizes.append(0)
            places.append((len(sizes) - 1, sizes[-1]))
            sizes[-1] += size
        enough = len(self._blocks) >= len(sizes) and all(block.numel() >= size for block, size in zip(self._blocks, sizes, strict=False))
        if not enough or (pinned and not self._blocks[0].is_pinned()):
            self._blocks = []  # released before more is allocated
            self._blocks = self._allocate(sizes, pinned=pinned)
            self._pages = LargePages(map(byte_view, self._blocks))
        return places

    def _allocate(self, sizes: list[int], *, pinned: bool) -> list[torch.Tensor]:
        if pinned:
            try:
                return [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for size in sizes]
            except RuntimeError as error:  # the system limits such memory, or torch has none for this device
                self._can_pin, self._events = False, {}
                get_logger(__name__).warning(
                    f"save_state(async_save=True) waits for copies from the device: {sum(sizes):,} bytes of host memory cannot be pinned "
                    f"({str(error).splitlines()[0][:200]})"
                )
        return [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]

    def _copy(self, tensor: torch.Tensor, block: int, start: int) -> torch.Tensor:
        size = tensor.nbytes
        room = self._blocks[block][start : start + size]
        place = room.view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cpu:  # resolved there: a late copy is not yet there to be changed by the host
            return place.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=tensor.device in self._events)
        if size < _SMALL_TENSOR or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return place.copy_(tensor)
        into, data = room.numpy(), tensor.view(-1).view(torch.uint8).numpy()
        self._pending += [(into[start : start + _COPY_SIZE], data[start : start + _COPY_SIZE]) for start in range(0, size, _COPY_SIZE)]
        return place


def _wait(events: Iterable[Any]) -> None:
    for event in events:
        if not event.query():
            event.synchronize()


def _copy_bytes(pending: list[tuple[_Bytes, _Bytes]], pages: LargePages) -> None:
    """Copy all pairs, with several threads for large amounts.

    Unlike torch's threads, these have no barrier after every tensor, so a thread that waits for a core does not delay the others.
    """
    tasks = iter(pending)

    def copy() -> None:
        for into, data in tasks:
            with pages.watched(data.nbytes):
                numpy.copyto(into, data)

    if sum(data.nbytes for _, data in pending) <= _SMALL_COPY:
        copy()
        return
    with ThreadPoolExecutor(min(_COPIERS, available_cores()), thread_name_prefix="slipstream: copying for a save") as copiers:
        for copier in [copiers.submit(copy) for _ in range(_COPIERS)]:
            copier.result()
