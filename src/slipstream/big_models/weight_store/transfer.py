"""Copies of weight blocks on an accelerator: made through pinned memory on a side stream, the next block while the current one runs.

A thread of its own fills the pinned buffers, which may have to wait for the disk, and starts the copies: the thread that runs the model
goes on, and the kernels of a block and the copy of the next one run at the same time. A block is used after its copy has ended (the
stream of the caller waits for it, the host does not), and a pinned buffer is filled again after the copy from it has ended. Where the
device has no room for a second block, nothing is prefetched.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import torch

from slipstream.big_models.weight_store.store import PageBundle, WeightBlock, WeightStore
from slipstream.devices.table import Family, family_of
from slipstream.logging import get_logger

__all__ = ["BlockTransfer", "DeviceBundle"]

_STAGING_BUFFERS: Final = 2
_ALIGNMENT: Final = 64
_STAGED_TYPES: Final = (torch.Tensor, torch.nn.Parameter)


_Made = TypeVar("_Made")


class _DeviceCopy(NamedTuple):
    """The tensors of a block on the device, and the event after their copies."""

    tensors: list[torch.Tensor]
    event: Any


@dataclass
class _StagingBuffer:
    """Pinned memory, and the event after the last copy from it."""

    memory: torch.Tensor | None = None
    event: Any = None


class BlockTransfer:
    """Copies blocks to one device. `ahead`: whether there is room on it for the next block beside the one that runs."""

    def __init__(self, device: torch.device, family: Family | None = None, *, ahead: bool = True) -> None:
        self.device = device
        self._family = family_of(device) if family is None else family
        self._stream: Any = self._side_stream()
        self._ahead = ahead and self._stream is not None
        self._stages = [_StagingBuffer() for _ in range(_STAGING_BUFFERS)]
        self._turn = 0
        self._coming: dict[WeightBlock, Future[_DeviceCopy | None]] = {}
        self._present: dict[WeightBlock, _DeviceCopy] = {}
        self._lock = threading.Lock()
        """For the two above: threads may run the model at the same time."""
        self._thread: ThreadPoolExecutor | None = None
        self._process = 0

    def _side_stream(self) -> Any:
        if not self._family.has("Stream"):
            get_logger(__name__).warning(
                f"Weights are copied to {self.device} when they are needed: torch has no streams for such devices, so nothing is prefetched"
            )
            return None
        return self._family.ask("Stream", device=self.device)

    def start(self, block: WeightBlock, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Start to copy a block, unless it is on the device or on its way, or there is no room for it; `tensors` returns its tensors."""
        with self._lock:
            self._check_process()
            if self._ahead and block not in self._present and block not in self._coming:
                self._coming[block] = self._submit(partial(self._prefetch, block, tensors))

    def finish(self, block: WeightBlock, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the copies of a block; the device waits for them, the host does not."""
        if self._stream is None:
            with torch.inference_mode(False):  # copies of that mode could not be weights outside of it
                return [tensor.to(self.device) for tensor in tensors]
        with self._lock:
            self._check_process()
            found, coming = self._present.get(block), self._coming.pop(block, None)
        if found is None and coming is not None:
            found = coming.result()
        if found is None:
            found = self._copy_now(tensors)
        with self._lock:
            self._present[block] = found
        current = self._family.ask("current_stream", device=self.device)
        current.wait_event(found.event)
        for tensor in found.tensors:
            tensor.record_stream(current)
        return found.tensors

    def keep(self, blocks: Collection[WeightBlock]) -> None:
        """Discard the copies of all other blocks."""
        with self._lock:
            self._present = {block: copy for block, copy in self._present.items() if block in blocks}
            self._coming = {block: copy for block, copy in self._coming.items() if block in blocks}

    def forget(self, block: WeightBlock) -> None:
        """Discard the copy of a block."""
        with self._lock:
            self._present.pop(block, None)

    def _copy_now(self, tensors: Sequence[torch.Tensor]) -> _DeviceCopy:
        work = partial(self._copy, tensors)
        try:
            return self._submit(work).result()
        except torch.OutOfMemoryError:
            pass  # again below, when the error no longer holds what was copied
        self.keep(())
        return self._submit(work).result()

    def _check_process(self) -> None:
        if self._process != os.getpid():  # threads do not survive a fork, so their copies never end
            self._process, self._thread, self._coming = os.getpid(), None, {}

    def _submit(self, work: Callable[[], _Made]) -> Future[_Made]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipstream: copying weights")
        return self._thread.submit(work)

    # -- in the thread ----------------------------------------------------------------------------------------------------

    def _prefetch(self, block: WeightBlock, tensors: Callable[[], Sequence[torch.Tensor]]) -> _DeviceCopy | None:
        """Return the copy of a block; None if the device has no room for it beside the block that runs."""
        try:
            return self._copy(tensors())
        except torch.OutOfMemoryError:
            self._ahead = False  # an attempt that fails is slow: it empties the cache of the allocator
            get_logger(__name__).warning(
                f"{self.device} has no room for {block.name} beside the block that runs: from now on weights are copied when they are "
                "needed, which is slower. Leave more of the device free (max_memory), or divide the model into smaller blocks."
            )
            return None

    def _copy(self, tensors: Sequence[torch.Tensor]) -> _DeviceCopy:
        stage = self._stages[self._turn]
        self._turn = (self._turn + 1) % _STAGING_BUFFERS
        staged = self._staged(tensors, stage)
        with self._family.ask("stream", self._stream):
            try:
                copies = [tensor.to(self.device, non_blocking=True) for tensor in staged]
            finally:
                stage.event = self._stream.record_event()
        return _DeviceCopy(copies, stage.event)

    def _staged(self, tensors: Sequence[torch.Tensor], stage: _StagingBuffer) -> list[torch.Tensor]:
        """Return the tensors in a pinned buffer, once its previous copy has ended."""
        places, total = [], 0
        for tensor in tensors:
            places.append(total)
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if stage.event is not None and not stage.event.query():
            stage.event.synchronize()
        if stage.memory is None or stage.memory.numel() < total:
            stage.memory = None  # before the larger one is made
            stage.memory = torch.empty(total, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
        memory = stage.memory
        return [
            memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor) if _can_be_staged(tensor) else tensor
            for tensor, place in zip(tensors, places, strict=True)
        ]


def _can_be_staged(tensor: torch.Tensor) -> bool:
    """Return whether a copy of the bytes is the tensor: not of one that is made of others, nor of one with strides of its own."""
    return type(tensor) in _STAGED_TYPES and tensor.numel() > 0 and tensor.is_contiguous()


class DeviceBundle(PageBundle):
    """The tensors of a module that runs on an accelerator; those of the next block are copied while it runs."""

    __slots__ = ("transfer",)

    def __init__(self, store: WeightStore, block: WeightBlock, transfer: BlockTransfer) -> None:
        super().__init__(store, block)
        self.transfer = transfer

    def take(self) -> Sequence[torch.Tensor]:
        """Return copies on the device, and start to copy the next block."""
        tensors = self.store.enter(self.block)
        try:
            copies = self.transfer.finish(self.block, tensors)
        except BaseException:  # the device is full, or the disk fails
            self.store.leave(self.block)
            raise
        following = self.store.following(self.block)
        self.transfer.keep((self.block, following))
        if following is not self.block:
            self.transfer.start(following, partial(self.store.peek, following))
        return copies

    def give_back(self) -> None:
        """Release the copies, unless other calls come to this block: see `layer_major.py`."""
        self.store.leave(self.block)
        if self.store.turns is None:
            self.transfer.forget(self.block)

    def restore(self) -> None:
        """Discard the copies, which were written to."""
        self.transfer.forget(self.block)

    def recall(self) -> None:
        """Do nothing: the autograd graph holds the copies themselves."""
