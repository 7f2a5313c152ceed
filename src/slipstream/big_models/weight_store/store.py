"""The weight store: which blocks of a model stay in memory, which are prefetched, and which are given back.

When a block is about to run, the next ones are prefetched; what comes next is learned from the previous pass. Under a memory limit some
blocks stay resident for good and the others pass through a small window, which is the best choice for a cyclic order. Blocks that no page
cache of this machine can hold are read with direct I/O into a few reused buffers. On an accelerator the next block is copied through
pinned memory on a side stream while the current one runs.

A block's tensors always have the values of the file.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from slipstream.big_models.weight_store.mapped_file import WeightBlock
from slipstream.devices.memory import convert_bytes, host_memory
from slipstream.devices.table import family_of
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = [
    "BlockScheduler", "BlockTransfer", "DeviceBundle", "DirectBlockReader", "PREFETCHED_BLOCKS", "PageBundle", "Residency", "WeightStore",
    "decide_residency",
]


PREFETCHED_BLOCKS = 2
"""Blocks that are asked for ahead: one that is being read, and one behind it that keeps the disk busy."""


@dataclass(frozen=True)
class Residency:
    """What `decide_residency` found."""

    kept: frozenset[int]
    """The numbers of the blocks that stay."""
    ahead: int
    """How many blocks are asked for ahead of the one that runs."""


def decide_residency(sizes: Sequence[int], limit: int | None, names: Sequence[str] = ()) -> Residency:
    """The blocks that stay within `limit` bytes (None: no limit), beside the window for those that do not.

    >>> decide_residency([10, 10, 10, 10, 10, 10], limit=45)
    Residency(kept=frozenset({0}), ahead=2)
    >>> decide_residency([10, 10], limit=100).kept == {0, 1}
    True
    >>> decide_residency([10, 30], limit=20, names=["embed", "head"])
    Traceback (most recent call last):
    slipstream.errors.ConfigError: head needs 30 bytes in memory to run, and the limit for weights that are offloaded is 20 bytes. ...
    """
    if limit is None or sum(sizes) <= limit:
        return Residency(frozenset(range(len(sizes))), PREFETCHED_BLOCKS)
    largest = max(sizes)
    if largest > limit:
        number = sizes.index(largest)
        raise ConfigError(
            f"{names[number] if names else f'block {number}'} needs {convert_bytes(largest)} in memory to run, and the limit for weights "
            f"that are offloaded is {convert_bytes(limit)}. Give a limit of at least {convert_bytes(largest)} (three times that, to read "
            "ahead), or offload smaller modules."
        )
    ahead = min(PREFETCHED_BLOCKS, limit // largest - 1)
    left = limit - (1 + ahead) * largest
    kept = []
    for number, size in enumerate(sizes):
        if size <= left:
            kept.append(number)
            left -= size
    return Residency(frozenset(kept), ahead)


_READER_THREADS: Final = 2
"""So that a disk which finishes one block has the next one already."""


class DirectBlockReader:
    """Up to `count` buffers of `room` bytes, and the blocks that are in them or on their way."""

    def __init__(self, room: int, count: int) -> None:
        self._room = room
        self._free: list[mmap.mmap] = []
        self._left = count
        self._filled: dict[WeightBlock, Future[list[torch.Tensor]]] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._process = 0

    def start(self, block: WeightBlock) -> None:
        """Begins to read a block, unless it is under way or no buffer is free."""
        if self._process != os.getpid():  # threads do not survive a fork, and what they were reading never ends
            self._process, self._readers, self._filled = os.getpid(), None, {}
        memory = self._buffer() if block not in self._filled else None
        if memory is None:
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="slipstream: reading weights")
        self._filled[block] = self._readers.submit(block.read, memory)

    def finish(self, block: WeightBlock) -> list[torch.Tensor] | None:
        """The tensors of a block when they have been read; None if no buffer was free for it."""
        reading = self._filled.get(block) if self._process == os.getpid() else None
        return None if reading is None else reading.result()

    def drop(self, keep: list[WeightBlock]) -> None:
        """Forgets blocks that have run, but for these and those that still run."""
        for block in [entry for entry in self._filled if not entry.active and entry not in keep]:
            del self._filled[block]

    def forget(self, block: WeightBlock) -> None:
        """What was read of a block is not used again."""
        self._filled.pop(block, None)

    def _buffer(self) -> memoryview | None:
        if not self._free and not self._left:
            return None
        if not self._free:
            self._left -= 1
            self._free.append(mmap.mmap(-1, self._room, **_anonymous_mapping()))
        memory = self._free.pop()
        view = memoryview(memory)
        weakref.finalize(view, self._free.append, memory).atexit = False  # tensors hold the view, not the memory itself
        return view


def _anonymous_mapping() -> dict[str, Any]:
    return {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


class BlockScheduler(Protocol):
    """Somebody who says when a thread may go on to a block; see `lanes.py`."""

    def arrive(self, block: WeightBlock) -> None:
        """Returns when it is this thread's turn to run the block."""


class WeightStore:
    """All blocks of one model, and the memory that they may take: `limit` bytes, or as much as there is."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.turns: BlockScheduler | None = None
        self.blocks: list[WeightBlock] = []
        self.said: set[str] = set()
        """Warnings about its blocks that were given."""
        self._plan: Residency | None = None
        self._around: DirectBlockReader | None = None
        self._after: dict[tuple[int, int], int] = {}
        self._last: WeightBlock | None = None
        self._before_last: WeightBlock | None = None
        self._faults = 0
        self._passing: list[WeightBlock] = []
        """Those whose pages were asked for and will be given back."""
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightStore:
        return self  # what it describes is the files, which a copy of the model shares

    def add(self, block: WeightBlock) -> WeightBlock:
        """Takes a block in; blocks come in the order in which the model is expected to run them."""
        with self._lock:
            block.number = len(self.blocks)
            self.blocks.append(block)
            self._plan = None
        return block

    @property
    def kept(self) -> frozenset[int]:
        """The numbers of the blocks that stay in memory once they have been read."""
        return self._settled().kept

    @property
    def reads_around(self) -> bool:
        """Whether the other blocks are read past the page cache: there is no room for them in it."""
        self._settled()
        return self._around is not None

    def enter(self, block: WeightBlock) -> Sequence[torch.Tensor]:
        """A block is about to run: its tensors."""
        with self._lock:
            if self._last is not block:
                self._move_to(block)
            elif not block.active:
                block.check()
            block.active += 1
            found = None if self._around is None else self._around.finish(block)
            if found is None and not block.present:
                block.wait()
                self._passing += [block] if block.number not in self._settled().kept and block not in self._passing else []
            return block.tensors if found is None else found

    def recall(self, block: WeightBlock) -> None:
        """A backward comes to what a block computed: the pages that its graph refers to, and those of the block before it, are needed.

        What a graph holds in a buffer is in memory already.
        """
        with self._lock:
            kept = self._settled().kept
            coming = [entry for entry in (block, self.blocks[max(0, block.number - 1)]) if entry.number not in kept]
            for passed in [entry for entry in self._passing if not entry.active and entry not in coming]:
                passed.give_back()
                self._passing.remove(passed)
            for entry in coming:
                if not entry.asked:
                    entry.ask()
                    self._passing.append(entry)
            if not block.present:
                block.wait()

    def leave(self, block: WeightBlock) -> None:
        """A block has run. Its memory is given back when another one is entered."""
        with self._lock:
            block.active -= 1

    def following(self, block: WeightBlock) -> WeightBlock:
        """The block that is expected after this one."""
        before = self._before_last if self._last is block else self._last
        return self._next(before, block)

    def peek(self, block: WeightBlock) -> Sequence[torch.Tensor]:
        """The tensors of a block that was asked for and does not run yet."""
        with self._lock:
            found = None if self._around is None else self._around.finish(block)
            return block.tensors if found is None else found

    def restore(self, block: WeightBlock) -> None:
        """Somebody has written into the tensors of a block: they have the values of the file again."""
        with self._lock:
            block.restore()
            self._last = self._before_last = None
            if self._around is not None:
                self._around.forget(block)

    def release(self) -> None:
        """Gives back all memory of blocks that are not running; they are read again when they are used."""
        with self._lock:
            for block in self.blocks:
                if not block.active:
                    block.give_back()
            self._passing = [block for block in self._passing if block.active]
            self._last = self._before_last = None
            if self._around is not None:
                self._around.drop([])

    def _settled(self) -> Residency:
        if self._plan is None:
            self._plan = decide_residency([block.size for block in self.blocks], self.limit, [block.name for block in self.blocks])
            passing = [block for block in self.blocks if block.number not in self._plan.kept]
            if sum(block.size for block in passing) > host_memory().available:
                self._around = DirectBlockReader(max(block.room for block in passing), 1 + self._plan.ahead)
        return self._plan

    def _next(self, before: WeightBlock | None, block: WeightBlock) -> WeightBlock:
        """What came last time after these two; else one further in the same direction."""
        if before is None or before is block:
            return self.blocks[(block.number + 1) % len(self.blocks)]
        known = self._after.get((before.number, block.number))
        if known is None:
            known = block.number - 1 if before.number == block.number + 1 else block.number + 1
        return self.blocks[known % len(self.blocks)]

    def _move_to(self, block: WeightBlock) -> None:
        plan, last = self._settled(), self._last
        if last is not None and self._before_last is not None:
            self._after[self._before_last.number, last.number] = block.number
        if last is None or block.number <= last.number:
            self._begin_pass()
        self._before_last, self._last = last, block
        coming = [block]
        for _ in range(plan.ahead):
            coming.append(self._next(coming[-2] if len(coming) > 1 else last, coming[-1]))
        for passed in [entry for entry in self._passing if not entry.active and entry not in coming]:
            passed.give_back()
            self._passing.remove(passed)
        if self._around is not None:
            self._around.drop(coming)
        for entry in coming:
            self._ask(entry, passing=entry.number not in plan.kept)

    def _ask(self, block: WeightBlock, *, passing: bool) -> None:
        if passing and self._around is not None:
            self._around.start(block)
        elif not block.asked:
            block.ask()
            self._passing += [block] if passing else []

    def _begin_pass(self) -> None:
        """Once in a pass: the files are still what they were, and what was taken for resident is so."""
        for file in {part[0] for block in self.blocks for part in block.parts}:
            file.check()
        faults = _count_major_faults()
        if faults != self._faults:  # something had to be read from a disk, perhaps a block whose pages the kernel had taken away
            self._faults = faults
            for block in self.blocks:
                if block not in self._passing:
                    block.asked = block.present = False


def _count_major_faults() -> int:
    """How often this process had to wait for a page from a disk, where the system counts that."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class PageBundle:
    """A bundle of a module that runs on the CPU: its tensors are the file's pages, or a buffer with their bytes."""

    __slots__ = ("block", "store")

    def __init__(self, store: WeightStore, block: WeightBlock) -> None:
        self.store, self.block = store, block

    def __deepcopy__(self, memo: dict[int, Any]) -> PageBundle:
        return self

    def arrive(self) -> None:
        """Called before the tensors are taken; returns when it is this thread's turn."""
        if self.store.turns is not None:
            self.store.turns.arrive(self.block)

    def take(self) -> Sequence[torch.Tensor]:
        """The tensors, whose pages have been asked for."""
        return self.store.enter(self.block)

    def give_back(self) -> None:
        """The module has run."""
        self.store.leave(self.block)

    def restore(self) -> None:
        """The tensors were written to, and shall be what they were."""
        self.store.restore(self.block)

    def recall(self) -> None:
        """A backward is about to use the tensors again."""
        self.store.recall(self.block)


_STAGING_BUFFERS = 2
_ALIGNMENT = 64


class BlockTransfer:
    """The way of blocks onto one device."""

    def __init__(self, device: torch.device, namespace: Any = None) -> None:
        self.device = device
        self._namespace = family_of(device).module() if namespace is None else namespace
        self._stream: Any = self._side_stream()
        self._stages: list[tuple[torch.Tensor | None, Any]] = [(None, None)] * _STAGING_BUFFERS
        self._turn = 0
        self._coming: dict[WeightBlock, tuple[list[torch.Tensor], Any]] = {}

    def _side_stream(self) -> Any:
        make = getattr(self._namespace, "Stream", None)
        if make is None:
            get_logger(__name__).warning(
                f"Weights are copied to {self.device} when they are needed: torch has no streams for such devices, so nothing goes ahead."
            )
            return None
        return make(device=self.device)

    def start(self, block: WeightBlock, tensors: Sequence[torch.Tensor]) -> None:
        """Begins to copy the tensors of a block, unless they are under way."""
        if self._stream is None or block in self._coming:
            return
        staged = self._staged(tensors)
        with self._namespace.stream(self._stream):
            copies = [tensor.to(self.device, non_blocking=True) for tensor in staged]
            event = self._stream.record_event()
        memory, _ = self._stages[self._turn]
        self._stages[self._turn] = (memory, event)
        self._turn = (self._turn + 1) % _STAGING_BUFFERS
        self._coming[block] = (copies, event)

    def finish(self, block: WeightBlock, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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

    def keep(self, blocks: Sequence[WeightBlock]) -> None:
        """Drops copies of other blocks, which nobody came for."""
        self._coming = {block: coming for block, coming in self._coming.items() if block in blocks}

    def _staged(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors in the pinned memory whose turn it is, once its last copy is through."""
        places, total = [], 0
        for tensor in tensors:
            places.append(total)
            total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
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


class DeviceBundle(PageBundle):
    """A bundle of a module that runs on an accelerator; copies of the next block are made while it runs."""

    __slots__ = ("transfer",)

    def __init__(self, store: WeightStore, block: WeightBlock, transfer: BlockTransfer) -> None:
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
