"""Blocks on an accelerator: while one runs, the next is on its way through pinned memory on a stream of its own.

A stage is a piece of pinned host memory as large as a block; two take turns. What a device family has no streams for is copied when it
is needed, and that is said once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slipstream.devices.table import family_of
from slipstream.logging import get_logger
from slipstream.offload.store.blocks import Block
from slipstream.offload.store.store import OnPages, Store

__all__ = ["OnDevice", "Transfer"]

_STAGES = 2
_ALIGNED = 64


class Transfer:
    """The way of blocks onto one device."""

    def __init__(self, device: torch.device, namespace: Any = None) -> None:
        self.device = device
        self._namespace = family_of(device).module() if namespace is None else namespace
        self._stream: Any = self._side_stream()
        self._stages: list[tuple[torch.Tensor | None, Any]] = [(None, None)] * _STAGES
        self._turn = 0
        self._coming: dict[Block, tuple[list[torch.Tensor], Any]] = {}

    def _side_stream(self) -> Any:
        make = getattr(self._namespace, "Stream", None)
        if make is None:
            get_logger(__name__).warning(
                f"Weights are copied to {self.device} when they are needed: torch has no streams for such devices, so nothing goes ahead."
            )
            return None
        return make(device=self.device)

    def start(self, block: Block, tensors: Sequence[torch.Tensor]) -> None:
        """Begins to copy the tensors of a block, unless they are under way."""
        if self._stream is None or block in self._coming:
            return
        staged = self._staged(tensors)
        with self._namespace.stream(self._stream):
            copies = [tensor.to(self.device, non_blocking=True) for tensor in staged]
            event = self._stream.record_event()
        memory, _ = self._stages[self._turn]
        self._stages[self._turn] = (memory, event)
        self._turn = (self._turn + 1) % _STAGES
        self._coming[block] = (copies, event)

    def finish(self, block: Block, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies of a block; the device waits for them, the host does not."""
        if self._stream is None:
            return [tensor.to(self.device) for tensor in tensors]
        self.start(block, tensors)
        copies, event = self._coming.pop(block)
        present = self._namespace.current_stream(self.device)
        present.wait_event(event)
        for copy in copies:
            copy.record_stream(present)
        return copies

    def keep(self, blocks: Sequence[Block]) -> None:
        """Drops copies of other blocks, which nobody came for."""
        self._coming = {block: coming for block, coming in self._coming.items() if block in blocks}

    def _staged(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors in the pinned memory whose turn it is, once its last copy is through."""
        places, total = [], 0
        for tensor in tensors:
            places.append(total)
            total += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        memory, event = self._stages[self._turn]
        if event is not None:
            event.synchronize()
        if memory is None or memory.numel() < total:
            memory = torch.empty(total, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
            self._stages[self._turn] = (memory, None)
        staged = []
        for tensor, place in zip(tensors, places, strict=True):
            room = memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape) if tensor.numel() else tensor
            staged.append(room.copy_(tensor) if tensor.numel() else tensor)
        return staged


class OnDevice(OnPages):
    """A bundle of a module that runs on an accelerator; copies of the next block are made while it runs."""

    __slots__ = ("transfer",)

    def __init__(self, store: Store, block: Block, transfer: Transfer) -> None:
        super().__init__(store, block)
        self.transfer = transfer

    def take(self) -> Sequence[torch.Tensor]:
        """Copies on the device."""
        return self.transfer.finish(self.block, self.store.enter(self.block))

    def give_back(self) -> None:
        """The module has been started on the device: while it runs there, the next one is brought here."""
        self.store.leave(self.block)
        following = self.store.following(self.block)
        self.transfer.keep([following])
        if following is not self.block:
            self.transfer.start(following, self.store.peek(following))

    def recall(self) -> None:
        """A graph holds the copies themselves."""
