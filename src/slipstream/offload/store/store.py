"""The store: when a block is about to run, the ones after it are asked for, and those that had to pass through are given back.

What comes after a block is learned from the pass before, and is at first the order in which blocks were made. Asking and giving back
are advice to the kernel; whatever happens, a block's tensors have the values of the file. In the common case (everything fits) entering
a block costs a few look-ups.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from slipstream.devices.host import host_memory
from slipstream.offload.store.around import Around
from slipstream.offload.store.blocks import Block
from slipstream.offload.store.residency import Residency, decide

__all__ = ["OnPages", "Store", "Turns"]


class Turns(Protocol):
    """Somebody who says when a thread may go on to a block; see `lanes.py`."""

    def arrive(self, block: Block) -> None:
        """Returns when it is this thread's turn to run the block."""


class Store:
    """All blocks of one model, and the memory that they may take: `limit` bytes, or as much as there is."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.turns: Turns | None = None
        self.blocks: list[Block] = []
        self.said: set[str] = set()
        """Warnings about its blocks that were given."""
        self._plan: Residency | None = None
        self._around: Around | None = None
        self._after: dict[tuple[int, int], int] = {}
        self._last: Block | None = None
        self._before_last: Block | None = None
        self._faults = 0
        self._passing: list[Block] = []
        """Those whose pages were asked for and will be given back."""
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        return self  # what it describes is the files, which a copy of the model shares

    def add(self, block: Block) -> Block:
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

    def enter(self, block: Block) -> Sequence[torch.Tensor]:
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

    def recall(self, block: Block) -> None:
        """A backward comes to what a block computed: the pages that its graph refers to, and those of the block before it, are needed.

        What a graph holds in a buffer is in memory already.
        """
        with self._lock:
            kept = self._settled().kept
            coming = [one for one in (block, self.blocks[max(0, block.number - 1)]) if one.number not in kept]
            for passed in [one for one in self._passing if not one.active and one not in coming]:
                passed.give_back()
                self._passing.remove(passed)
            for one in coming:
                if not one.asked:
                    one.ask()
                    self._passing.append(one)
            if not block.present:
                block.wait()

    def leave(self, block: Block) -> None:
        """A block has run. Its memory is given back when another one is entered."""
        with self._lock:
            block.active -= 1

    def following(self, block: Block) -> Block:
        """The block that is expected after this one."""
        before = self._before_last if self._last is block else self._last
        return self._next(before, block)

    def peek(self, block: Block) -> Sequence[torch.Tensor]:
        """The tensors of a block that was asked for and does not run yet."""
        with self._lock:
            found = None if self._around is None else self._around.finish(block)
            return block.tensors if found is None else found

    def restore(self, block: Block) -> None:
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
            self._plan = decide([block.size for block in self.blocks], self.limit, [block.name for block in self.blocks])
            passing = [block for block in self.blocks if block.number not in self._plan.kept]
            if sum(block.size for block in passing) > host_memory().available:
                self._around = Around(max(block.room for block in passing), 1 + self._plan.ahead)
        return self._plan

    def _next(self, before: Block | None, block: Block) -> Block:
        """What came last time after these two; else one further in the same direction."""
        if before is None or before is block:
            return self.blocks[(block.number + 1) % len(self.blocks)]
        known = self._after.get((before.number, block.number))
        if known is None:
            known = block.number - 1 if before.number == block.number + 1 else block.number + 1
        return self.blocks[known % len(self.blocks)]

    def _move_to(self, block: Block) -> None:
        plan, last = self._settled(), self._last
        if last is not None and self._before_last is not None:
            self._after[self._before_last.number, last.number] = block.number
        if last is None or block.number <= last.number:
            self._begin_pass()
        self._before_last, self._last = last, block
        coming = [block]
        for _ in range(plan.ahead):
            coming.append(self._next(coming[-2] if len(coming) > 1 else last, coming[-1]))
        for passed in [one for one in self._passing if not one.active and one not in coming]:
            passed.give_back()
            self._passing.remove(passed)
        if self._around is not None:
            self._around.drop(coming)
        for one in coming:
            self._ask(one, passing=one.number not in plan.kept)

    def _ask(self, block: Block, *, passing: bool) -> None:
        if passing and self._around is not None:
            self._around.start(block)
        elif not block.asked:
            block.ask()
            self._passing += [block] if passing else []

    def _begin_pass(self) -> None:
        """Once in a pass: the files are still what they were, and what was taken for resident is so."""
        for file in {part[0] for block in self.blocks for part in block.parts}:
            file.check()
        faults = _reads()
        if faults != self._faults:  # something had to be read from a disk, perhaps a block whose pages the kernel had taken away
            self._faults = faults
            for block in self.blocks:
                if block not in self._passing:
                    block.asked = block.present = False


def _reads() -> int:
    """How often this process had to wait for a page from a disk, where the system counts that."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class OnPages:
    """A bundle of a module that runs on the CPU: its tensors are the file's pages, or a buffer with their bytes."""

    __slots__ = ("block", "store")

    def __init__(self, store: Store, block: Block) -> None:
        self.store, self.block = store, block

    def __deepcopy__(self, memo: dict[int, Any]) -> OnPages:
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
