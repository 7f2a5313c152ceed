"""A file read as a whole, with its checksum on the way, into memory of its own.

The memory is an anonymous mapping of the file's size, never more, that the result keeps alive; tensors can be views of it, and it can be
written. What is read is what the checksum was made of: later changes of the file change nothing. A file that is shorter or longer than
announced is refused before anything is allocated for it.

A file that nobody else reads, and of which nothing is in the page cache, is read straight from the disk: putting it into the cache first
would take its size in memory once more, and a copy.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

from slipstream.errors import CheckpointError
from slipstream.files.digest import Digest
from slipstream.files.direct import set_direct

__all__ = ["read_digest", "read_whole"]

_PIECE: Final = 4 << 20
_READERS: Final = 2
_READERS_OF_A_DISK: Final = 4
_FEWEST_PIECES: Final = 4
_PROBES: Final = 8
_SLOW: Final = 0.004
"""Seconds of a processor for a piece: a copy and two large pages take about one millisecond."""


def read_whole(
    fd: int,
    size: int,
    *,
    digest: bool = True,
    where: str = "the file",
    alone: bool = False,
    advance: Callable[[int], object] = lambda count: None,
) -> tuple[memoryview, str]:
    """All `size` bytes of an open file, and their checksum ("" with `digest=False`); `where` names the file in errors.

    `alone`: no other process or thread is reading the same file, so that it need not go through the page cache if it is not there.
    `advance` is told how many bytes more are there.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(b"slipstream")
    ...     file.flush()
    ...     buffer, checksum = read_whole(file.fileno(), 10)
    >>> bytes(buffer), checksum[:8]
    (b'slipstream', '63f9f393')
    """
    _check_size(fd, size, where)
    memory = _memory(size, where)
    running = Digest()
    for piece in _filled(fd, memory, where, alone=alone):
        if digest:
            running.update(piece)
        advance(len(piece))
    _check_size(fd, size, where)
    return memory, running.hexdigest() if digest else ""


def _filled(fd: int, memory: memoryview, where: str, *, alone: bool) -> Iterator[memoryview]:
    """The memory, piece by piece, as it is read from the file. Of a large file several pieces are read at a time.

    One reader alone waits for the disk, or for fresh pages of memory, half of the time.
    """
    pieces = [(memory[done : done + _PIECE], done) for done in range(0, len(memory), _PIECE)]
    if len(pieces) < _FEWEST_PIECES:
        for piece, done in pieces:
            _fill(fd, piece, done, where)
            yield piece
        return
    direct = alone and not _is_cached(fd, len(memory)) and set_direct(fd, True)
    pages = _LargePages(memory)

    def fill(piece: memoryview, done: int) -> None:
        with pages.watched():
            _fill(fd, piece, done, where, direct=direct)

    with ThreadPoolExecutor(_READERS_OF_A_DISK if direct else _READERS, thread_name_prefix="slipstream-read") as readers:
        reads = [readers.submit(fill, piece, done) for piece, done in pieces[:-1]]
        try:
            for read, (piece, _) in zip(reads, pieces, strict=False):
                read.result()
                yield piece
        finally:
            for read in reads:
                read.cancel()
    if direct:
        set_direct(fd, False)  # the end of a file is seldom that of a block
    _fill(fd, *pieces[-1], where)
    yield pieces[-1][0]


def _is_cached(fd: int, size: int) -> bool:
    """Whether some of a file is in the page cache; True where that cannot be told."""
    at_once = getattr(os, "RWF_NOWAIT", 0)
    byte = bytearray(1)
    for offset in range(0, size, -(-size // _PROBES)):
        try:
            os.preadv(fd, [byte], offset, at_once)
        except BlockingIOError:
            continue
        except OSError:  # a file system, or a system, that cannot say
            return True
        return True
    return False


def read_digest(fd: int, size: int, *, where: str = "the file") -> str:
    """The checksum of all `size` bytes of an open file, which are not kept."""
    _check_size(fd, size, where)
    memory = _memory(min(size, _PIECE), where)
    running = Digest()
    for done in range(0, size, _PIECE):
        piece = memory[: min(_PIECE, size - done)]
        _fill(fd, piece, done, where)
        running.update(piece)
    _check_size(fd, size, where)
    return running.hexdigest()


def _check_size(fd: int, size: int, where: str) -> None:
    there = os.fstat(fd).st_size
    if there != size:
        raise CheckpointError(f"{where} has {there:,} bytes, and it should have {size:,}: it is damaged or belongs to another save.")


def _memory(size: int, where: str) -> memoryview:
    if size == 0:
        return memoryview(bytearray())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > there:  # a file of holes takes no space on the disk, and a system that promises too much memory would never come to an end
        raise CheckpointError(f"{where} has {size:,} bytes, more than the {there:,} bytes of memory that this machine has.")
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with processes that are forked later
    except OSError as error:
        raise CheckpointError(f"There is no memory for the {size:,} bytes of {where}: {error.strerror}.") from error
    return memoryview(mapped)


class _LargePages:
    """Memory in large pages, as long as the system has them at hand.

    They cost a third of what the same memory costs in small ones. But a virtual machine may have given those that are free back to its
    host, and getting them again takes ten times as long; as soon as that shows, the rest is taken in small ones.
    """

    def __init__(self, memory: memoryview) -> None:
        self._mapped: Any = memory.obj
        self._wanted = self._advise("MADV_HUGEPAGE")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around what touches one piece of the memory: the time of this thread counts, without that of waiting for a disk."""
        begin = time.thread_time()
        yield
        if self._wanted and time.thread_time() - begin > _SLOW:
            self._wanted = False
            self._advise("MADV_NOHUGEPAGE")

    def _advise(self, name: str) -> bool:
        advice = getattr(mmap, name, None)
        if advice is None:
            return False
        try:
            self._mapped.madvise(advice)
        except OSError:  # a system without large pages
            return False
        return True


def _fill(fd: int, piece: memoryview, offset: int, where: str, *, direct: bool = False) -> None:
    while piece:
        try:
            got = os.preadv(fd, [piece], offset)
        except OSError as error:
            if error.errno == errno.EINVAL and direct:  # a file system that allows it, and then does not do it
                set_direct(fd, False)
                direct = False
                continue
            raise CheckpointError(f"{where} cannot be read at byte {offset:,}: {error.strerror}.") from error
        if not got:
            raise CheckpointError(f"{where} ended after {offset:,} bytes: it was changed while it was read.")
        piece, offset = piece[got:], offset + got
