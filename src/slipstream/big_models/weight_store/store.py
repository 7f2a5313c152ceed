"""The weight store: memory-mapped weights; decides which blocks of a model stay in memory, are prefetched, or are released.

Tensors are views of a file's pages, which the kernel reads on first use. The mapping is private: writes into such a tensor never reach the
file. When a block is about to run, the next ones are prefetched, in the order of the previous pass. Under a memory limit some blocks stay
resident and the others pass through a small window, which is optimal for a cyclic order. `transfer.py` copies blocks to accelerators.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from slipstream.big_models.device_map.plan import PREFETCHED_BLOCKS
from slipstream.devices.memory import convert_bytes, host_memory
from slipstream.errors import ConfigError
from slipstream.files.mapped_file import MappedFile, Span

__all__ = [
    "BlockScheduler", "DirectBlockReader", "PageBundle", "Residency", "WeightBlock", "WeightStore", "decide_residency", "merge_spans",
]


# --- blocks ------------------------------------------------------------------------------------------------------------------


def merge_spans(spans: Iterable[Span], gap: int = mmap.PAGESIZE) -> Iterator[Span]:
    """Yield the same bytes in as few spans as possible; those less than `gap` apart become one.

    >>> list(merge_spans([(0, 10), (5000, 6000), (10, 20)], gap=16))
    [(0, 20), (5000, 6000)]
    """
    current: Span | None = None
    for span in sorted(spans):
        if current is not None and span[0] - current[1] < gap:
            current = (current[0], max(current[1], span[1]))
            continue
        if current is not None:
            yield current
        current = span
    if current is not None:
        yield current


_SECTOR: Final = 4096
"""Direct reads begin and end at multiples of this."""


class WeightBlock:
    """Tensors that are used together; `spans` has the file and bytes of each, or None if it is in memory."""

    __slots__ = ("active", "requested", "name", "number", "owned", "parts", "present", "size", "spans", "tensors")

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], spans: Sequence[tuple[MappedFile, Span] | None]) -> None:
        self.name = name
        self.number = -1
        self.tensors = tensors
        self.spans = spans
        self.active = 0
        """The number of callers that run on it now."""
        self.requested = False
        """Whether its pages were requested and not released since."""
        self.present = False
        """Whether its pages are in memory: requested, and waited for."""
        files: dict[MappedFile, list[Span]] = {}
        for place in spans:
            if place is not None:
                files.setdefault(place[0], []).append(place[1])
        self.owned = tuple((file, span) for file, found in files.items() for span in merge_spans(found, gap=1))
        """The bytes of its tensors, which are released; a tensor between them may be in use elsewhere, and have been written to."""
        self.parts = tuple((file, span) for file, found in files.items() for span in merge_spans(found))
        """What is read: the same with small gaps between them, in fewer calls."""
        self.size = sum(span[1] - span[0] for _, span in self.parts)

    @property
    def room(self) -> int:
        """Bytes of a buffer for all of its spans, each rounded to sectors."""
        return sum(end - start for start, end in map(_sector_span, (span for _, span in self.parts)))

    def check(self) -> None:
        """Raise if one of its files has changed."""
        for file, _ in self.parts:
            file.check()

    def request(self) -> None:
        """Request what is not in memory, without waiting."""
        for file, span in self.parts:
            file.request(span)
        self.requested = True

    def wait(self) -> None:
        """Wait until all of it is in memory."""
        for file, span in self.parts:
            file.wait(span)
        self.present = True

    def give_back(self) -> None:
        """Release the memory; the next use reads again."""
        for file, span in self.owned:
            file.give_back(span)
        self.requested = self.present = False

    def restore(self) -> None:
        """Discard what was written to its tensors."""
        for file, span in self.owned:
            file.restore(span)
        self.requested = self.present = False

    def read(self, buffer: memoryview) -> list[torch.Tensor]:
        """Read its tensors with direct I/O into a buffer of at least `room` bytes, which the tensors keep alive."""
        held = torch.frombuffer(buffer, dtype=torch.uint8)
        starts: dict[tuple[MappedFile, Span], int] = {}
        filled = 0
        for file, span in self.parts:
            start, end = _sector_span(span)
            file.read_direct(start, buffer[filled : filled + end - start], span[1] - start)
            starts[file, span] = filled - start
            filled += end - start
        return [self._in(held, starts, index) for index in range(len(self.tensors))]

    def _in(self, held: torch.Tensor, starts: dict[tuple[MappedFile, Span], int], index: int) -> torch.Tensor:
        place, like = self.spans[index], self.tensors[index]
        if place is None or not like.numel():
            return like
        file, (start, end) = place
        base = next(base for (part, span), base in starts.items() if part is file and span[0] <= start and end <= span[1])
        if (base + start) % like.itemsize:  # cannot be read in place; neither could its pages, so `like` is a copy already
            return like
        return held[base + start : base + end].view(like.dtype).view(like.shape)


def _sector_span(span: Span) -> Span:
    return (span[0] // _SECTOR * _SECTOR, -(-span[1] // _SECTOR) * _SECTOR)


# --- residency ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Residency:
    """Which blocks stay in memory, and how many are prefetched."""

    kept: frozenset[int]
    """The numbers of the blocks that stay."""
    ahead: int
    """The number of prefetched blocks."""


def decide_residency(sizes: Sequence[int], limit: int | None, names: Sequence[str] = ()) -> Residency:
    """Return the blocks that stay resident within `limit` bytes (None: no limit), beside the window for the others.

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
"""Two, so that the disk has the next block queued when it finishes one."""


class DirectBlockReader:
    """Reads blocks with direct I/O into up to `count` buffers of `room` bytes.

    Used if the blocks together exceed the free memory: in the page cache they would evict each other and the data of other processes.
    It is kept beside mapped pages because it is faster in that case: 512 MB take 0.63 s and 0.05 s of CPU time; with pages that are
    prefetched, waited for and released they take 0.79 to 0.96 s and 0.21 s (2 cores, cold cache).
    """

    def __init__(self, room: int, count: int) -> None:
        self._room = room
        self._free: list[mmap.mmap] = []
        self._left = count
        self._filled: dict[WeightBlock, Future[list[torch.Tensor]]] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._process = 0

    def start(self, block: WeightBlock) -> None:
        """Start to read a block, unless it is being read or no buffer is free."""
        if self._process != os.getpid():  # threads do not survive a fork, so their reads never finish
            self._process, self._readers, self._filled = os.getpid(), None, {}
        memory = self._buffer() if block not in self._filled else None
        if memory is None:
            return
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="slipstream: reading weights")
        self._filled[block] = self._readers.submit(block.read, memory)

    def finish(self, block: WeightBlock) -> list[torch.Tensor] | None:
        """Wait for the tensors of a block and return them; None if no buffer was free for it."""
        reading = self.pending(block)
        return None if reading is None else reading.result()

    def pending(self, block: WeightBlock) -> Future[list[torch.Tensor]] | None:
        """Return the read of a block that was started; None if no buffer was free for it."""
        return self._filled.get(block) if self._process == os.getpid() else None

    def drop(self, keep: list[WeightBlock]) -> None:
        """Discard the buffers of blocks that are neither running nor in `keep`."""
        for block in [block for block in self._filled if not block.active and block not in keep]:
            del self._filled[block]

    def forget(self, block: WeightBlock) -> None:
        """Discard the buffer of a block."""
        self._filled.pop(block, None)

    def _buffer(self) -> memoryview | None:
        if not self._free and not self._left:
            return None
        if not self._free:
            self._left -= 1
            flags: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
            self._free.append(mmap.mmap(-1, self._room, **flags))
        memory = self._free.pop()
        view = memoryview(memory)
        weakref.finalize(view, self._free.append, memory).atexit = False  # tensors hold the view, not the memory itself
        return view


class BlockScheduler(Protocol):
    """Decides when a thread may enter a block; see `layer_major.py`."""

    def arrive(self, block: WeightBlock) -> None:
        """Wait until it is this thread's turn to run the block."""


class WeightStore:
    """All blocks of one model, and the memory that they may take: `limit` bytes, or all there is."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.turns: BlockScheduler | None = None
        self.blocks: list[WeightBlock] = []
        self.warned: set[str] = set()
        """Kinds of warnings about its blocks that were logged."""
        self._plan: Residency | None = None
        self._direct_reader: DirectBlockReader | None = None
        self._after: dict[tuple[int, int], int] = {}
        self._last: WeightBlock | None = None
        self._before_last: WeightBlock | None = None
        self._faults = 0
        self._transient: list[WeightBlock] = []
        """Blocks whose pages were requested and will be released."""
        self._settled = False
        """Whether every block is in memory and stays there: moving on requests and releases nothing."""
        self._files: set[MappedFile] = set()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightStore:
        return self  # a copy of the model shares the files

    def add(self, block: WeightBlock) -> WeightBlock:
        """Add a block; blocks come in the order in which the model is expected to run them."""
        with self._lock:
            block.number = len(self.blocks)
            self.blocks.append(block)
            self._files.update(file for file, _ in block.parts)
            self._plan, self._settled = None, False
        return block

    @property
    def kept(self) -> frozenset[int]:
        """The numbers of the blocks that stay in memory once they have been read."""
        return self._residency().kept

    @property
    def reads_directly(self) -> bool:
        """Whether the other blocks are read with direct I/O, because they exceed the free memory."""
        self._residency()
        return self._direct_reader is not None

    def enter(self, block: WeightBlock) -> Sequence[torch.Tensor]:
        """Return the tensors of a block that is about to run, and prefetch the next ones."""
        with self._lock:
            last = self._last
            if self._settled and last is not None and block.number > last.number:
                self._before_last, self._last = last, block
                block.active += 1
                return block.tensors
            if last is not block:
                self._move_to(block)
            elif not block.active:
                block.check()
            block.active += 1
            found = self._read_directly(block)
            if found is None and not block.present:
                block.wait()
                self._transient += [block] if block.number not in self._residency().kept and block not in self._transient else []
            return block.tensors if found is None else found

    def recall(self, block: WeightBlock) -> None:
        """Request the pages of a block and of the one before it, because a backward pass reached the block's outputs.

        Buffers that the autograd graph holds are in memory already.
        """
        with self._lock:
            kept = self._residency().kept
            coming = [needed for needed in (block, self.blocks[max(0, block.number - 1)]) if needed.number not in kept]
            self._drop_passed(coming)
            for needed in coming:
                if not needed.requested:
                    needed.request()
                    self._transient.append(needed)
            if not block.present:
                block.wait()

    def leave(self, block: WeightBlock) -> None:
        """Record that a block has run. Its memory is released when another block is entered."""
        with self._lock:
            block.active -= 1

    def following(self, block: WeightBlock) -> WeightBlock:
        """Return the block that is expected after this one."""
        before = self._before_last if self._last is block else self._last
        return self._next(before, block)

    def peek(self, block: WeightBlock) -> Sequence[torch.Tensor]:
        """Return the tensors of a block that was requested and does not run yet; others may enter while this waits for the disk."""
        with self._lock:
            reading = None if self._direct_reader is None else self._direct_reader.pending(block)
        return block.tensors if reading is None else reading.result()

    def _read_directly(self, block: WeightBlock) -> list[torch.Tensor] | None:
        return None if self._direct_reader is None else self._direct_reader.finish(block)

    def restore(self, block: WeightBlock) -> None:
        """Discard what was written into the tensors of a block."""
        with self._lock:
            block.restore()
            self._last = self._before_last = None
            self._settled = False
            if self._direct_reader is not None:
                self._direct_reader.forget(block)

    def release(self) -> None:
        """Release all memory of blocks that are not running; they are read again on the next use."""
        with self._lock:
            for block in self.blocks:
                if not block.active:
                    block.give_back()
            self._transient = [block for block in self._transient if block.active]
            self._last = self._before_last = None
            self._settled = False
            if self._direct_reader is not None:
                self._direct_reader.drop([])

    def _residency(self) -> Residency:
        if self._plan is None:
            self._plan = decide_residency([block.size for block in self.blocks], self.limit, [block.name for block in self.blocks])
            passing = [block for block in self.blocks if block.number not in self._plan.kept]
            if sum(block.size for block in passing) > host_memory().available:
                self._direct_reader = DirectBlockReader(max(block.room for block in passing), 1 + self._plan.ahead)
        return self._plan

    def _next(self, before: WeightBlock | None, block: WeightBlock) -> WeightBlock:
        """Return the block that followed these two last time; else the next one in the same direction."""
        if before is None or before is block:
            return self.blocks[(block.number + 1) % len(self.blocks)]
        known = self._after.get((before.number, block.number))
        if known is None:
            known = block.number - 1 if before.number == block.number + 1 else block.number + 1
        return self.blocks[known % len(self.blocks)]

    def _move_to(self, block: WeightBlock) -> None:
        plan, last = self._residency(), self._last
        if last is not None and self._before_last is not None:
            self._after[self._before_last.number, last.number] = block.number
        if last is None or block.number <= last.number:
            self._begin_pass()
        self._before_last, self._last = last, block
        coming = [block]
        for _ in range(plan.ahead):
            coming.append(self._next(coming[-2] if len(coming) > 1 else last, coming[-1]))
        self._drop_passed(coming)
        if self._direct_reader is not None:
            self._direct_reader.drop(coming)
        for needed in coming:
            self._request(needed, passing=needed.number not in plan.kept)

    def _drop_passed(self, keep: Sequence[WeightBlock]) -> None:
        for block in [block for block in self._transient if not block.active and block not in keep]:
            block.give_back()
            self._transient.remove(block)

    def _request(self, block: WeightBlock, *, passing: bool) -> None:
        if passing and self._direct_reader is not None:
            self._direct_reader.start(block)
        elif not block.requested:
            block.request()
            self._transient += [block] if passing else []

    def _begin_pass(self) -> None:
        """Check once per pass that the files are unchanged, and that resident blocks were not evicted."""
        for file in self._files:
            file.check()
        faults = _count_major_faults()
        if faults != self._faults:  # a page had to be read, perhaps of a block that the kernel had evicted
            self._faults = faults
            for block in self.blocks:
                if block not in self._transient:
                    block.requested = block.present = False
        self._settled = all(block.present and block.number in self._residency().kept for block in self.blocks)


def _count_major_faults() -> int:
    """Return the number of major page faults of this process; 0 if the system does not count them."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class PageBundle:
    """The tensors of a module that runs on the CPU: views of the file's pages, or of a buffer with their bytes."""

    __slots__ = ("block", "store")

    def __init__(self, store: WeightStore, block: WeightBlock) -> None:
        self.store, self.block = store, block

    def __deepcopy__(self, memo: dict[int, Any]) -> PageBundle:
        return self

    def arrive(self) -> None:
        """Wait until it is this thread's turn."""
        if self.store.turns is not None:
            self.store.turns.arrive(self.block)

    def take(self) -> Sequence[torch.Tensor]:
        """Return the tensors, whose pages were requested."""
        return self.store.enter(self.block)

    def give_back(self) -> None:
        """Record that the module has run."""
        self.store.leave(self.block)

    def restore(self) -> None:
        """Restore the tensors, which were written to."""
        self.store.restore(self.block)

    def recall(self) -> None:
        """Bring the tensors back for a backward pass."""
        self.store.recall(self.block)
