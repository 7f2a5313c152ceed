"""A file read as a whole, with its checksum on the way, into memory of its own.

The memory is an anonymous mapping of the file's size, never more, that the result keeps alive; tensors can be views of it, and it can be
written. What is read is what the checksum was made of: later changes of the file change nothing. A file that is shorter or longer than
announced is refused before anything is allocated for it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from slipstream.errors import CheckpointError
from slipstream.files.digest import Digest

__all__ = ["read_digest", "read_whole"]

_PIECE: Final = 4 << 20
_READERS: Final = 2


def read_whole(fd: int, size: int, *, digest: bool = True, where: str = "the file") -> tuple[memoryview, str]:
    """All `size` bytes of an open file, and their checksum ("" with `digest=False`); `where` names the file in errors.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.write(b"slipstream")
    ...     file.flush()
    ...     buffer, checksum = read_whole(file.fileno(), 10)
    >>> bytes(buffer), checksum[:8]
    (b'slipstream', '63f9f393')
    """
    _check_size(fd, size, where)
    memory = _memory(size)
    running = Digest()
    for piece in _filled(fd, memory, where):
        if digest:
            running.update(piece)
    _check_size(fd, size, where)
    return memory, running.hexdigest() if digest else ""


def _filled(fd: int, memory: memoryview, where: str) -> Iterator[memoryview]:
    """The memory, piece by piece, as it is read from the file. Of a large file two pieces are read at a time.

    One reader alone waits for the disk, or for fresh pages of memory, half of the time.
    """
    pieces = [(memory[done : done + _PIECE], done) for done in range(0, len(memory), _PIECE)]
    if len(pieces) < 4:
        for piece, done in pieces:
            _fill(fd, piece, done, where)
            yield piece
        return
    with ThreadPoolExecutor(_READERS, thread_name_prefix="slipstream-read") as readers:
        reads = [readers.submit(_fill, fd, piece, done, where) for piece, done in pieces]
        try:
            for read, (piece, _) in zip(reads, pieces, strict=True):
                read.result()
                yield piece
        finally:
            for read in reads:
                read.cancel()


def read_digest(fd: int, size: int, *, where: str = "the file") -> str:
    """The checksum of all `size` bytes of an open file, which are not kept."""
    _check_size(fd, size, where)
    memory = _memory(min(size, _PIECE))
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


def _memory(size: int) -> memoryview:
    if size == 0:
        return memoryview(bytearray())
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # not shared with processes that are forked later
    if size >= _PIECE and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)  # a fault for every 2 MiB instead of every 4 KiB
    return memoryview(mapped)


def _fill(fd: int, piece: memoryview, offset: int, where: str) -> None:
    while piece:
        try:
            got = os.preadv(fd, [piece], offset)
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read at byte {offset:,}: {error.strerror}.") from error
        if not got:
            raise CheckpointError(f"{where} ended after {offset:,} bytes: it was changed while it was read.")
        piece, offset = piece[got:], offset + got
