"""One file of weights, mapped: its tensors are views of the file's pages, which the kernel reads when they are used.

The mapping is private: what a script writes into such a tensor stays in its process and never reaches the file. Pages can be asked for
ahead and given back; both are advice that changes no value. A file that was shortened while it is mapped would end the process at the
next touch, so `check` says in words that it changed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.checkpoint.raw import from_buffer
from slipstream.errors import CheckpointError
from slipstream.files.direct import set_direct
from slipstream.files.inside import Folder
from slipstream.files.tensors import Layout, read_layout

__all__ = ["MappedFile", "Span", "joined", "open_file"]

Span = tuple[int, int]
"""The first byte, and the one after the last."""

_PAGE: Final = mmap.PAGESIZE
_ASKED: Final = 1 << 20
"""Bytes that are asked for in one call: of more, Linux takes only the beginning (as much as the disk reads ahead at most)."""
_POPULATE_READ: Final = 22
"""Linux 5.14 and later: maps all pages of a range at once, and waits for those that are being read."""


class MappedFile:
    """A mapped file; takes over the descriptor `fd`, and closes it when nobody uses a tensor of it any more.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "numbers").write_bytes(bytes([1, 0, 2, 0]))
    ...     file = open_file(Path(folder, "numbers"))
    ...     file.tensor("I16", (2,), 0, 4)
    tensor([1, 2], dtype=torch.int16)
    """

    def __init__(self, fd: int, where: str) -> None:
        self.where = where
        self._fd = fd
        self._seen = _state(fd)
        self.size = os.fstat(fd).st_size
        self._map: Any = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) if self.size else bytearray()
        self._address: int | None = None
        self._direct: bool | None = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if (fd := getattr(self, "_fd", -1)) >= 0:
            close(fd)

    def layout(self) -> Layout:
        """Where the tensors lie, if it is a safetensors file; its header is read and checked."""
        view = memoryview(self._map)
        return read_layout(lambda offset, count: view[offset : offset + count], self.size, self.where)

    def tensor(self, dtype: str, shape: Iterable[int], start: int, end: int) -> torch.Tensor:
        """The tensor of these bytes, on the file's own pages; `dtype` as safetensors names it."""
        return from_buffer(self._map, dtype, shape, start, end)

    def check(self) -> None:
        """An error if somebody has changed or shortened the file since it was opened."""
        if _state(self._fd) != self._seen:
            raise CheckpointError(
                f"{self.where} was changed while weights in it are in use. Write new weights to a new file and rename it to this name: "
                "who has the old one open keeps it. Load the model again."
            )

    def ask(self, span: Span) -> None:
        """The kernel begins to read these bytes, and this does not wait for it."""
        if hasattr(os, "posix_fadvise"):
            for start in range(span[0], span[1], _ASKED):
                os.posix_fadvise(self._fd, start, min(_ASKED, span[1] - start), os.POSIX_FADV_WILLNEED)
        elif hasattr(mmap, "MADV_WILLNEED"):
            start = span[0] // _PAGE * _PAGE
            self._map.madvise(mmap.MADV_WILLNEED, start, span[1] - start)

    def wait(self, span: Span) -> None:
        """Returns when these bytes are in memory. Computing on pages that are still being read would stop at each of them.

        Other threads go on meanwhile. Where the system does not know how, the pages come when they are touched.
        """
        if sys.platform != "linux":  # elsewhere that number may mean something else
            return
        start = span[0] // _PAGE * _PAGE
        if self._address is None:
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _libc().madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(span[1] - start), _POPULATE_READ)

    def give_back(self, span: Span) -> None:
        """This process gives the pages of these bytes back, but for those that other bytes share; the machine may keep them cached."""
        start, end = -(-span[0] // _PAGE) * _PAGE, span[1] // _PAGE * _PAGE
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)

    def restore(self, span: Span) -> None:
        """These bytes are those of the file again, whatever was written to them."""
        self.give_back(span)
        inner_start, inner_end = -(-span[0] // _PAGE) * _PAGE, span[1] // _PAGE * _PAGE
        edges = [(span[0], inner_start), (inner_end, span[1])] if inner_start < inner_end else [span]
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as fresh:  # pages that others share are not given back: copied instead
            for start, end in edges:
                self._map[start:end] = fresh[start:end]

    def read_around(self, start: int, into: memoryview, needed: int) -> None:
        """Reads `needed` bytes from `start` on past the page cache; `start` and the length of `into` are multiples of a sector."""
        if self._direct is None:
            self._direct = set_direct(self._fd, True)
        done = 0
        while done < needed:
            try:
                count = os.preadv(self._fd, [into[done:]], start + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = set_direct(self._fd, False)  # the file system allows it, and then wants larger pieces
                continue
            if not count:
                raise CheckpointError(f"{self.where} ended early: it was shortened while weights in it are in use. Load the model again.")
            done += count
            if done % _PAGE and done < needed:
                self._direct = set_direct(self._fd, False)


def open_file(path: Path) -> MappedFile:
    """The file at a path that the user has named; only a regular file is mapped."""
    real = Path(os.path.realpath(path))
    with Folder(real.parent) as folder:
        fd = folder.open(real.name)
    return MappedFile(fd, str(path))


def joined(spans: Iterable[Span], gap: int = _PAGE) -> Iterator[Span]:
    """The same bytes in as few spans as there can be; those less than `gap` apart become one.

    >>> list(joined([(0, 10), (5000, 6000), (10, 20)], gap=16))
    [(0, 20), (5000, 6000)]
    """
    begun: Span | None = None
    for span in sorted(spans):
        if begun is not None and span[0] - begun[1] < gap:
            begun = (begun[0], max(begun[1], span[1]))
            continue
        if begun is not None:
            yield begun
        begun = span
    if begun is not None:
        yield begun


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _state(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return (found.st_size, found.st_mtime_ns)
