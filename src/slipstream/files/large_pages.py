"""Fresh memory in large pages: a fresh page costs more than what is copied into it, and a large one a seventh of the same bytes in small.

1.2 GB are allocated in 60 ms instead of 390 ms (two cores of a virtual machine). But a virtual machine may have returned its free memory
to the host, and then a large page takes milliseconds; as soon as the pages of a `LargePages` have cost more than small ones would have,
the rest of its memory is given small ones. Where a system has no large pages, nothing changes.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["LargePages", "address_of"]

_SMALL_PAGES: Final = 0.5e-9
"""Seconds of a processor for a byte in small pages, with its copy; in large ones it takes a sixth."""
_GRACE: Final = 128 << 20
"""Bytes that may cost more before that counts: slow pages come in clusters. With 512 MB, a load of 1.2 GB into memory that the host had
taken back used 0.8 to 1.2 s of the processors, with 128 MB 0.2 to 0.5 s."""
_NEIGHBOURS: Final = 64 << 10
"""Bytes between two tensors that an allocator has put beside each other."""


class LargePages:
    """Memory that is about to be written for the first time, by any thread.

    >>> memory = memoryview(mmap.mmap(-1, 1 << 22))
    >>> pages = LargePages([memory])
    >>> with pages.watched(5):
    ...     memory[:5] = b"hello"
    """

    def __init__(self, parts: Iterable[memoryview]) -> None:
        self._spans = list(_page_spans(parts))
        self._saved = _GRACE * _SMALL_PAGES
        self._wanted = self._advise("MADV_HUGEPAGE")

    @contextmanager
    def watched(self, count: int) -> Iterator[None]:
        """Measure what writes so many bytes of the memory: the time of this thread, without waiting for a disk."""
        begin = time.thread_time()
        yield
        self._saved += count * _SMALL_PAGES - (time.thread_time() - begin)
        if self._wanted and self._saved < 0:
            self._wanted = False
            self._advise("MADV_NOHUGEPAGE")

    def _advise(self, name: str) -> bool:
        advice: int | None = getattr(mmap, name, None)
        return advice is not None and all([_madvise(start, size, advice) for start, size in self._spans])


def address_of(memory: memoryview) -> int:
    """Return the address of memory that can be written."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _page_spans(parts: Iterable[memoryview]) -> Iterator[tuple[int, int]]:
    """Yield address and size of memory in whole pages, neighbours as one: a large page may hold several tensors."""
    start = end = 0
    for first, size in sorted((address_of(part), len(part)) for part in parts if part and not part.readonly):
        if first - end > _NEIGHBOURS:
            if end > start:
                yield start, end - start
            start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = max(end, (first + size) // mmap.PAGESIZE * mmap.PAGESIZE)
    if end > start:
        yield start, end - start


@functools.lru_cache(maxsize=1)
def _system_library() -> Any:
    return ctypes.CDLL(None)


def _madvise(start: int, size: int, advice: int) -> bool:
    """Whether the system takes advice about memory; one without large pages does not."""
    call: Callable[..., int] | None = getattr(_system_library(), "madvise", None)
    return call is not None and call(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0
