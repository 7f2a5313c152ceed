"""Files that are mapped into memory: pages of them are requested, waited for, released, or read past the cache.

The mapping is private: writes into it never reach the file. Views of the bytes keep the mapping alive, not the descriptor, which the
`MappedFile` owns. The header of a safetensors file is read once for each mapping.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

from slipstream.errors import CheckpointError
from slipstream.files.disk import set_direct_io
from slipstream.files.paths import ConfinedFolder
from slipstream.files.safetensors_layout import SafetensorsLayout, read_layout

__all__ = ["MappedFile", "Span", "open_mapped_file"]

Span = tuple[int, int]
"""The first byte, and the one after the last."""

_PAGE: Final = mmap.PAGESIZE
_PREFETCH_CHUNK: Final = 1 << 20
"""Bytes requested in one call: of a longer range Linux prefetches only the beginning (the read-ahead size of the disk)."""
_POPULATE_READ: Final = 22
"""Linux 5.14 and later: maps all pages of a range at once, and waits for those that are being read."""


class MappedFile:
    """A mapped file; `buffer` has its bytes. It owns the descriptor `fd`, and closes it with the last reference to it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "notes.txt").write_bytes(b"slipstream")
    ...     file = open_mapped_file(Path(folder, "notes.txt"))
    ...     file.size, file.buffer[:4]
    (10, b'slip')
    """

    def __init__(self, fd: int, where: str) -> None:
        self.where = where
        self._fd = fd
        self._seen = _file_state(fd)
        self.size = os.fstat(fd).st_size
        self.buffer: Any = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) if self.size else bytearray()
        self._address: int | None = None
        self._direct: bool | None = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if (fd := getattr(self, "_fd", -1)) >= 0:
            close(fd)

    @cached_property
    def layout(self) -> SafetensorsLayout:
        """The layout of a safetensors file; its header is read and checked once."""
        view = memoryview(self.buffer)
        return read_layout(lambda offset, count: view[offset : offset + count], self.size, self.where)

    def check(self) -> None:
        """Raise if the file was changed or truncated since it was opened: the next access to a truncated one would kill the process."""
        if _file_state(self._fd) != self._seen:
            raise CheckpointError(
                f"{self.where} was changed while weights in it are in use. Write new weights to a new file and rename it to this name: "
                "processes that have the old file open keep it. Load the model again."
            )

    def request(self, span: Span) -> None:
        """Ask the kernel to read these bytes, without waiting."""
        if hasattr(os, "posix_fadvise"):
            for start in range(span[0], span[1], _PREFETCH_CHUNK):
                os.posix_fadvise(self._fd, start, min(_PREFETCH_CHUNK, span[1] - start), os.POSIX_FADV_WILLNEED)
        elif hasattr(mmap, "MADV_WILLNEED"):
            start = span[0] // _PAGE * _PAGE
            self.buffer.madvise(mmap.MADV_WILLNEED, start, span[1] - start)

    def wait(self, span: Span) -> None:
        """Wait until these bytes are in memory: computing on pages that are still being read would block at each of them.

        Other threads continue meanwhile. On systems without such a call the pages are read on first access.
        """
        if sys.platform != "linux":  # elsewhere that number may mean something else
            return
        start = span[0] // _PAGE * _PAGE
        if self._address is None:
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        _libc().madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(span[1] - start), _POPULATE_READ)

    def give_back(self, span: Span) -> None:
        """Release the whole pages among these bytes: they are read again on the next use, and may stay in the page cache."""
        start, end = _whole_pages(span)
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED, start, end - start)

    def restore(self, span: Span) -> None:
        """Discard what was written to these bytes, so that they have the values of the file again."""
        self.give_back(span)
        start, end = _whole_pages(span)
        edges = [(span[0], start), (end, span[1])] if start < end else [span]
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as fresh:  # pages shared with other tensors are not released: copied instead
            for start, end in edges:
                self.buffer[start:end] = fresh[start:end]

    def read_direct(self, start: int, into: memoryview, needed: int) -> None:
        """Read `needed` bytes from `start` on with direct I/O; `start` and the length of `into` are multiples of a sector."""
        if self._direct is None:
            self._direct = set_direct_io(self._fd, True)
        done = 0
        while done < needed:
            try:
                count = os.preadv(self._fd, [into[done:]], start + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = set_direct_io(self._fd, False)  # some file systems accept the flag and then require larger reads
                continue
            if not count:
                raise CheckpointError(f"{self.where} ended early: it was shortened while weights in it are in use. Load the model again.")
            done += count
            if done % _PAGE and done < needed:
                self._direct = set_direct_io(self._fd, False)


def _whole_pages(span: Span) -> Span:
    return -(-span[0] // _PAGE) * _PAGE, span[1] // _PAGE * _PAGE


def open_mapped_file(path: Path) -> MappedFile:
    """Map the file at a path that the user has named; only a regular file is mapped."""
    real = Path(os.path.realpath(path))
    with ConfinedFolder(real.parent) as folder:
        fd = folder.open(real.name)
    return MappedFile(fd, str(path))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _file_state(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return (found.st_size, found.st_mtime_ns)
