"""Large files, straight to the disk: past the page cache, while the next piece is being copied and checksummed.

    this thread    copy a piece into a free buffer, checksum it    copy, checksum    copy, checksum    copy, checksum    ...
    one writer                                                     write             ...               write             ...
    the other one                                                                    write             ...               ...

There are two writers because a disk that finishes one piece should have the next one already. Direct writing needs buffers and offsets
that are multiples of a block, so pieces are gathered in buffers of their own (10 MiB altogether); the end of the file, which seldom is
one, goes through the page cache. Where a file system refuses direct writing, at the start or in the middle, the rest goes through the
page cache too. Copying, checksumming and writing leave the lock of the interpreter to others, so that a training loop goes on beside it.
Nothing is durable before the caller has synced the file.

What it never does: leave its threads behind, whichever side fails, or hide an error of a writer.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from slipstream.files.digest import Bytes, Digest, bytes_of

if TYPE_CHECKING:
    from slipstream.files.disk import Disk

__all__ = ["SMALLEST", "copy_bytes", "set_direct", "write_direct"]

SMALLEST: Final = 8 << 20
"""Files from this size on are worth it: below, buffers and threads cost more than the page cache."""

_PIECE: Final = 2 << 20
_PIECES: Final = 5
_WRITERS: Final = 2
_BLOCK: Final = max(4096, mmap.PAGESIZE)
_SMALL_COPY: Final = 1 << 16


def set_direct(fd: int, wanted: bool) -> bool:
    """Whether reads and writes of an open file pass by the page cache from now on; False where its file system cannot do that."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return wanted


def write_direct(disk: Disk, fd: int, chunks: Iterable[Bytes], size: int) -> tuple[int, str]:
    """Write these bytes, `size` altogether, to an empty file that was opened so; gives back how many there were, and their checksum."""
    disk._allocate(fd, size)  # a full disk shows now, and not after half of the file
    step = min(_PIECE, -(-size // _BLOCK) * _BLOCK)
    memory = memoryview(mmap.mmap(-1, _PIECES * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    writers = _Writers(disk, fd, [memory[start : start + step] for start in range(0, len(memory), step)])
    running, done = Digest(), 0
    try:
        for piece in _filled(chunks, writers.free):
            running.update(piece)
            writers.write(piece, done)
            done += len(piece)
    finally:
        writers.finish()
    writers.check()
    return done, running.hexdigest()


def _filled(chunks: Iterable[Bytes], free: queue.SimpleQueue[memoryview]) -> Iterator[memoryview]:
    """The same bytes in buffers that are full, but for the last one."""
    buffer, used = free.get(), 0
    for chunk in chunks:
        data = bytes_of(chunk)
        while data:
            count = min(len(data), len(buffer) - used)
            copy_bytes(buffer[used : used + count], data[:count])
            data, used = data[count:], used + count
            if used == len(buffer):
                yield buffer
                buffer, used = free.get(), 0
    if used:
        yield buffer[:used]


def copy_bytes(into: memoryview, data: memoryview) -> None:
    """Copy bytes; while many are copied, other threads of Python go on."""
    if len(data) < _SMALL_COPY:
        into[:] = data
        return
    import numpy  # its copy of a large array leaves the lock of the interpreter to others; that of a memoryview keeps it

    numpy.copyto(numpy.frombuffer(into, numpy.uint8), numpy.frombuffer(data, numpy.uint8))


class _Writers:
    """The threads that write. An error ends the writing, not the threads: buffers keep coming back, and `check` raises it."""

    def __init__(self, disk: Disk, fd: int, buffers: list[memoryview]) -> None:
        self._disk = disk
        self._fd = fd
        self._direct = True
        self._error: BaseException | None = None
        self._tasks: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self.free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for buffer in buffers:
            self.free.put(buffer)
        self._threads = [threading.Thread(target=self._run, name="slipstream: writing a file", daemon=True) for _ in range(_WRITERS)]
        for thread in self._threads:
            thread.start()

    def write(self, piece: memoryview, offset: int) -> None:
        """Have this written; the buffer comes back through `free`."""
        self.check()
        self._tasks.put((piece, offset))

    def finish(self) -> None:
        """Wait until all is written, or something went wrong."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Raise what went wrong in a thread."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            piece, offset = task
            if self._error is None:
                try:
                    self._write(piece, offset)
                except BaseException as error:  # raised in the thread that waits, by `check`
                    self._error = error
            self.free.put(piece)

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            direct = self._direct
            if direct and (offset % _BLOCK or len(data) % _BLOCK):
                self._no_longer_direct()
            try:
                count = self._disk._write_some(self._fd, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._no_longer_direct()  # a file system that allows it, and then wants larger blocks
                continue
            data, offset = data[count:], offset + count

    def _no_longer_direct(self) -> None:
        """From here on through the page cache, for every writer: the way is a property of the open file."""
        self._disk._set_direct(self._fd, False)
        self._direct = False
