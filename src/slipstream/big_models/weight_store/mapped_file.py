"""Memory-mapped files of weights, and blocks: the tensors that one module needs, with the byte ranges that they lie in.

Tensors are views of the file's pages, which the kernel reads when they are used. The mapping is private: what a script writes into such a
tensor never reaches the file. Prefetching pages and giving them back is advice to the kernel and changes no value. A file that was
truncated while it is mapped would kill the process at the next access, so `check` raises an error first.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.checkpoint.tensor_bytes import from_buffer
from slipstream.errors import CheckpointError
from slipstream.files.disk import set_direct_io
from slipstream.files.paths import ConfinedFolder
from slipstream.files.safetensors_layout import SafetensorsLayout, read_layout

__all__ = ["MappedFile", "Span", "WeightBlock", "merge_spans", "open_mapped_file"]


Span = tuple[int, int]
"""The first byte, and the one after the last."""

_PAGE: Final = mmap.PAGESIZE
_PREFETCH_CHUNK: Final = 1 << 20
"""Bytes that are asked for in one call: of more, Linux takes only the beginning (as much as the disk reads ahead at most)."""
_POPULATE_READ: Final = 22
"""Linux 5.14 and later: maps all pages of a range at once, and waits for those that are being read."""


class MappedFile:
    """A mapped file; takes over the descriptor `fd`, and closes it when nobody uses a tensor of it any more.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "numbers").write_bytes(bytes([1, 0, 2, 0]))
    ...     file = open_mapped_file(Path(folder, "numbers"))
    ...     file.tensor("I16", (2,), 0, 4)
    tensor([1, 2], dtype=torch.int16)
    """

    def __init__(self, fd: int, where: str) -> None:
        self.where = where
        self._fd = fd
        self._seen = _file_state(fd)
        self.size = os.fstat(fd).st_size
        self._map: Any = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) if self.size else bytearray()
        self._address: int | None = None
        self._direct: bool | None = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if (fd := getattr(self, "_fd", -1)) >= 0:
            close(fd)

    def layout(self) -> SafetensorsLayout:
        """Where the tensors lie, if it is a safetensors file; its header is read and checked."""
        view = memoryview(self._map)
        return read_layout(lambda offset, count: view[offset : offset + count], self.size, self.where)

    def tensor(self, dtype: str, shape: Iterable[int], start: int, end: int) -> torch.Tensor:
        """The tensor of these bytes, on the file's own pages; `dtype` as safetensors names it."""
        return from_buffer(self._map, dtype, shape, start, end)

    def check(self) -> None:
        """An error if somebody has changed or shortened the file since it was opened."""
        if _file_state(self._fd) != self._seen:
            raise CheckpointError(
                f"{self.where} was changed while weights in it are in use. Write new weights to a new file and rename it to this name: "
                "who has the old one open keeps it. Load the model again."
            )

    def ask(self, span: Span) -> None:
        """The kernel begins to read these bytes, and this does not wait for it."""
        if hasattr(os, "posix_fadvise"):
            for start in range(span[0], span[1], _PREFETCH_CHUNK):
                os.posix_fadvise(self._fd, start, min(_PREFETCH_CHUNK, span[1] - start), os.POSIX_FADV_WILLNEED)
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
            self._direct = set_direct_io(self._fd, True)
        done = 0
        while done < needed:
            try:
                count = os.preadv(self._fd, [into[done:]], start + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = set_direct_io(self._fd, False)  # the file system allows it, and then wants larger pieces
                continue
            if not count:
                raise CheckpointError(f"{self.where} ended early: it was shortened while weights in it are in use. Load the model again.")
            done += count
            if done % _PAGE and done < needed:
                self._direct = set_direct_io(self._fd, False)


def open_mapped_file(path: Path) -> MappedFile:
    """The file at a path that the user has named; only a regular file is mapped."""
    real = Path(os.path.realpath(path))
    with ConfinedFolder(real.parent) as folder:
        fd = folder.open(real.name)
    return MappedFile(fd, str(path))


def merge_spans(spans: Iterable[Span], gap: int = _PAGE) -> Iterator[Span]:
    """The same bytes in as few spans as there can be; those less than `gap` apart become one.

    >>> list(merge_spans([(0, 10), (5000, 6000), (10, 20)], gap=16))
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


def _file_state(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return (found.st_size, found.st_mtime_ns)


_SECTOR: Final = 4096
"""Reads past the page cache begin and end at multiples of this."""


class WeightBlock:
    """Tensors that are used together; `spans` says for each in which bytes of which file it lies, None if it is in memory."""

    __slots__ = ("active", "asked", "name", "number", "parts", "present", "size", "spans", "tensors")

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], spans: Sequence[tuple[MappedFile, Span] | None]) -> None:
        self.name = name
        self.number = -1
        self.tensors = tensors
        self.spans = spans
        self.active = 0
        """How many are running on it now."""
        self.asked = False
        """Its pages have been asked for, and not been given back since."""
        self.present = False
        """It has been waited for, too."""
        files: dict[MappedFile, list[Span]] = {}
        for place in spans:
            if place is not None:
                files.setdefault(place[0], []).append(place[1])
        self.parts = tuple((file, span) for file, found in files.items() for span in merge_spans(found))
        self.size = sum(span[1] - span[0] for _, span in self.parts)

    @property
    def room(self) -> int:
        """Bytes of a buffer that takes all of its parts, each with the sectors around it."""
        return sum(end - start for start, end in map(_sector_span, (span for _, span in self.parts)))

    def check(self) -> None:
        """An error if one of its files has changed."""
        for file, _ in self.parts:
            file.check()

    def ask(self) -> None:
        """Begins to read what is not in memory, and does not wait."""
        for file, span in self.parts:
            file.ask(span)
        self.asked = True

    def wait(self) -> None:
        """Returns when all of it is in memory."""
        for file, span in self.parts:
            file.wait(span)
        self.present = True

    def give_back(self) -> None:
        """Gives the memory back; the next use reads again."""
        for file, span in self.parts:
            file.give_back(span)
        self.asked = self.present = False

    def restore(self) -> None:
        """Its tensors on pages have the values of the file again."""
        for file, span in self.parts:
            file.restore(span)
        self.asked = self.present = False

    def read(self, buffer: memoryview) -> list[torch.Tensor]:
        """Its tensors, read from the disk into a buffer (of `room` bytes at least) that they keep alive."""
        held = torch.frombuffer(buffer, dtype=torch.uint8)
        starts: dict[tuple[MappedFile, Span], int] = {}
        filled = 0
        for file, span in self.parts:
            start, end = _sector_span(span)
            file.read_around(start, buffer[filled : filled + end - start], span[1] - start)
            starts[file, span] = filled - start
            filled += end - start
        return [self._in(held, starts, index) for index in range(len(self.tensors))]

    def _in(self, held: torch.Tensor, starts: dict[tuple[MappedFile, Span], int], index: int) -> torch.Tensor:
        place, like = self.spans[index], self.tensors[index]
        if place is None or not like.numel():
            return like
        file, (start, end) = place
        base = next(begun for (part, span), begun in starts.items() if part is file and span[0] <= start and end <= span[1])
        if (base + start) % like.itemsize:  # cannot be read in place; neither could its pages, so `like` is a copy already
            return like
        return held[base + start : base + end].view(like.dtype).view(like.shape)


def _sector_span(span: Span) -> Span:
    return (span[0] // _SECTOR * _SECTOR, -(-span[1] // _SECTOR) * _SECTOR)
