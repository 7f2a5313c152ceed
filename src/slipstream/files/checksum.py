"""Checksums of files: XXH3 with 128 bits, as hexadecimal text, of a whole file or of every mebibyte of it.

Checksums find damage at the speed of memory; they do not protect against an attacker. `Digest` accepts bytes in pieces and releases the
interpreter lock for large ones. `BlockChecksums` computes the checksum of each block while a file is written, and `VerifiedBlockFile`
reads only the requested blocks, each once and verified, into its own memory.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Protocol, TypeAlias

import xxhash

from slipstream.errors import CheckpointError

__all__ = [
    "BLOCK_SIZE", "BlockChecksums", "ByteSource", "Bytes", "Digest", "SUM_SIZE", "VerifiedBlockFile", "checksums_name", "digest",
    "view_bytes",
]


Bytes: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
"""What can be written and checksummed without a copy; a memoryview has to be contiguous."""


Digest = xxhash.xxh3_128
"""A running checksum: `update(data)`, which releases the interpreter lock for large pieces, and `hexdigest()`."""


def digest(data: Bytes) -> str:
    """Return the checksum of these bytes, as 32 hexadecimal digits.

    >>> digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def view_bytes(data: Bytes) -> memoryview:
    """Return the bytes behind a buffer of any type and shape, without a copy.

    >>> import array
    >>> len(view_bytes(memoryview(array.array("d", [1.0, 2.0]))))
    16
    """
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty one of several dimensions cannot be cast


BLOCK_SIZE: Final = 1 << 20
SUM_SIZE: Final = 16
"""Bytes of a checksum."""

_PIECE: Final = 8 << 20
_KEPT_BLOCKS: Final = 2
"""Blocks that stay in memory between reads: neighbours in a file often share one."""
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def checksums_name(name: str) -> str:
    """Return the name of the file that holds the sums of another.

    >>> checksums_name("model-rank-00001-of-00002.safetensors")
    'model-rank-00001-of-00002.blocks'
    """
    return f"{name.removesuffix('.safetensors')}.blocks"


class BlockChecksums:
    """The sums of what passes through.

    >>> sums = BlockChecksums()
    >>> sum(map(len, sums.passing([bytes(BLOCK_SIZE - 1), b"ab"]))) - BLOCK_SIZE
    1
    >>> sums.taken().hex() == digest(bytes(BLOCK_SIZE - 1) + b"a") + digest(b"b")
    True
    """

    def __init__(self) -> None:
        self._sums: list[bytes] = []
        self._running = Digest()
        self._room = BLOCK_SIZE

    def passing(self, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        """Yield the same chunks; once all have passed, `taken` has their sums."""
        for chunk in chunks:
            data = view_bytes(chunk)
            while data:
                part, data = data[: self._room], data[self._room :]
                self._running.update(part)
                self._room -= len(part)
                if not self._room:
                    self._end_block()
            yield chunk
        if self._room < BLOCK_SIZE:
            self._end_block()

    def taken(self) -> bytes:
        """Return the sums, one after the other."""
        return b"".join(self._sums)

    def _end_block(self) -> None:
        self._sums.append(self._running.digest())
        self._running, self._room = Digest(), BLOCK_SIZE


class ByteSource(Protocol):
    """Something whose bytes can be read at any offset: a file, or an object of a store."""

    def size(self) -> int:
        """Return how many bytes it has."""

    def read_at(self, offset: int, into: memoryview) -> int:
        """Read bytes from `offset` on, and return how many were read; 0 at the end."""


class _OpenFile:
    def __init__(self, fd: int, where: str) -> None:
        self._fd, self._where = fd, where

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read_at(self, offset: int, into: memoryview) -> int:
        try:
            return os.preadv(self._fd, [into], offset)
        except OSError as error:
            raise CheckpointError(f"{self._where} cannot be read at byte {offset:,}: {error.strerror}.") from error


class VerifiedBlockFile:
    """A file of `size` bytes and the sums of its blocks; `where` names it in errors. A descriptor stays the caller's."""

    def __init__(self, source: int | ByteSource, size: int, sums: Bytes, where: str) -> None:
        self._source = _OpenFile(source, where) if isinstance(source, int) else source
        there = self._source.size()
        if there != size:
            raise CheckpointError(f"{where} is damaged: it has {there:,} bytes, and it should have {size:,}")
        self.size, self.where = size, where
        self._sums = view_bytes(sums)
        self._filled = bytearray(-(-size // BLOCK_SIZE))
        if len(self._sums) != SUM_SIZE * len(self._filled):
            raise CheckpointError(f"{where} has {len(self._filled):,} blocks, and there are sums of {len(self._sums) / SUM_SIZE:,g}")
        self._memory = _reserve_memory(size)
        self._recent: deque[int] = deque(maxlen=_KEPT_BLOCKS)
        self.fetched = 0
        """Bytes that were read so far."""

    def view(self, start: int, end: int) -> memoryview:
        """Return the memory of these bytes, read and compared. It can be written, and lives as long as a view of it."""
        if not 0 <= start <= end <= self.size:
            raise CheckpointError(f"{self.where} has {self.size:,} bytes, and {start:,} to {end:,} were requested")
        for first, last in self._missing(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            self._read(first, last)
        return self._memory[start:end]

    def read_into(self, start: int, end: int, into: memoryview) -> None:
        """Read bytes into memory of the caller, compared. Blocks that lie inside are not kept here; those at the ends are, for a while."""
        first, last = -(-start // BLOCK_SIZE), len(self._filled) if end == self.size else end // BLOCK_SIZE
        if last - first < 1 or not 0 <= start <= end <= self.size:
            into[:] = self.view(start, end)
        else:
            head, tail = first * BLOCK_SIZE - start, min(last * BLOCK_SIZE, self.size) - start
            if head:
                into[:head] = self.view(start, start + head)
            for block in range(first, last, _PIECE // BLOCK_SIZE):
                until = min(block + _PIECE // BLOCK_SIZE, last)
                self._read_blocks(block, until, into[block * BLOCK_SIZE - start : min(until * BLOCK_SIZE, self.size) - start])
            if start + tail < end:
                into[tail:] = self.view(start + tail, end)
        self.trim()

    def trim(self) -> None:
        """Give back the memory of what was read, but for the last few blocks. Views are not to be used any more."""
        if self._filled.count(1) <= _KEPT_BLOCKS:
            return
        kept = {block for block in self._recent if self._filled[block]}
        memory = self._memory.obj
        if not isinstance(memory, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            self.release()
            return
        block = -1
        while (block := self._filled.find(1, block + 1)) >= 0:
            if block not in kept:
                self._filled[block] = 0
                memory.madvise(mmap.MADV_DONTNEED, block * BLOCK_SIZE, min(BLOCK_SIZE, self.size - block * BLOCK_SIZE))

    def memory(self) -> memoryview:
        """Return all of its memory: zeros where nothing was read yet."""
        return self._memory

    def release(self) -> None:
        """Forget what was read. Views that are in use keep their memory."""
        self._filled = bytearray(len(self._filled))
        self._memory = _reserve_memory(self.size)

    def _missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield runs of blocks from `first` until before `last` that were not read yet, each of a few mebibytes."""
        block = first
        while (block := self._filled.find(0, block, last)) >= 0:
            end = self._filled.find(1, block, last)
            end = min(last if end < 0 else end, block + _PIECE // BLOCK_SIZE)
            yield block, end
            block = end

    def _read(self, first: int, last: int) -> None:
        self._read_blocks(first, last, self._memory[first * BLOCK_SIZE : min(last * BLOCK_SIZE, self.size)])
        self._filled[first:last] = bytes([1]) * (last - first)
        self._recent.extend(range(max(first, last - _KEPT_BLOCKS), last))

    def _read_blocks(self, first: int, last: int, memory: memoryview) -> None:
        """Read whole blocks into memory, and compare them with their sums."""
        place, piece = first * BLOCK_SIZE, memory
        while piece:
            got = self._source.read_at(place, piece)
            if not got:
                raise CheckpointError(f"{self.where} ended after {place:,} bytes: it was changed while it was read.")
            piece, place, self.fetched = piece[got:], place + got, self.fetched + got
        for block in range(first, last):
            there = memory[(block - first) * BLOCK_SIZE : (block - first + 1) * BLOCK_SIZE]
            if digest(there) != self._sums[block * SUM_SIZE : (block + 1) * SUM_SIZE].hex():
                raise CheckpointError(f"{self.where} is damaged: its bytes from {block * BLOCK_SIZE:,} on are not those that were written")


def _reserve_memory(size: int) -> memoryview:
    """Return memory of this size; pages are allocated on first use."""
    if not size:
        return memoryview(bytearray())
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE))
