"""Reading past the page cache, for models that no cache of this machine can hold: into a few buffers that are used again.

Filling the cache with pages that will be gone before they are needed again costs memory, time and what others have in it. Blocks are
read ahead by threads, straight from the disk. A buffer is used again when nobody holds a tensor on it any more, whoever that was: an
output that is a view of a weight, or a graph that waits for its backward, keeps its values.
"""

from __future__ import annotations

import mmap
import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch

from slipstream.offload.store.blocks import Block

__all__ = ["Around"]

_READERS: Final = 2
"""So that a disk which finishes one block has the next one already."""


class Around:
    """Up to `count` buffers of `room` bytes, and the blocks that are in them or on their way."""

    def __init__(self, room: int, count: int) -> None:
        self._room = room
        self._free: list[mmap.mmap] = []
        self._left = count
        self._filled: dict[Block, Future[list[torch.Tensor]]] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._process = 0

    def start(self, block: Block) -> None:
        """Begins to read a block, unless it is under way or no buffer is free."""
        if self._process != os.getpid():  # threads do not survive a fork, and what they were reading never ends
            self._process, self._readers, self._filled = os.getpid(), None, {}
        memory = self._buffer() if block not in self._filled else None
        if memory is None:
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="slipstream: reading weights")
        self._filled[block] = self._readers.submit(block.read, memory)

    def finish(self, block: Block) -> list[torch.Tensor] | None:
        """The tensors of a block when they have been read; None if no buffer was free for it."""
        reading = self._filled.get(block) if self._process == os.getpid() else None
        return None if reading is None else reading.result()

    def drop(self, keep: list[Block]) -> None:
        """Forgets blocks that have run, but for these and those that still run."""
        for block in [one for one in self._filled if not one.active and one not in keep]:
            del self._filled[block]

    def forget(self, block: Block) -> None:
        """What was read of a block is not used again."""
        self._filled.pop(block, None)

    def _buffer(self) -> memoryview | None:
        if not self._free and not self._left:
            return None
        if not self._free:
            self._left -= 1
            self._free.append(mmap.mmap(-1, self._room, **_private()))
        memory = self._free.pop()
        view = memoryview(memory)
        weakref.finalize(view, self._free.append, memory).atexit = False  # tensors hold the view, not the memory itself
        return view


def _private() -> dict[str, Any]:
    return {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
