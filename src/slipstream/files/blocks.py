"""Checksums of every block of a file, so that a part of it can be read and trusted without reading all of it.

A block is a mebibyte, the last one what remains. `BlockSums` takes the sums while a file is written, `BlockFile` reads: only the blocks
that are asked for, each of them once, compared with its sum, into memory of its own. What was compared is what is used, whatever happens
to the file afterwards.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from slipstream.errors import CheckpointError
from slipstream.files.digest import Bytes, Digest, bytes_of, digest

__all__ = ["BLOCK", "SUM", "BlockFile", "BlockSums", "sums_name"]

BLOCK: Final = 1 << 20
SUM: Final = 16
"""Bytes of a checksum."""

_PIECE: Final = 8 << 20
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def sums_name(name: str) -> str:
    """The name of the file that holds the sums of another.

    >>> sums_name("model-rank-00001-of-00002.safetensors")
    'model-rank-00001-of-00002.blocks'
    """
    return f"{name.removesuffix('.safetensors')}.blocks"


class BlockSums:
    """The sums of what passes through.

    >>> sums = BlockSums()
    >>> sum(map(len, sums.passing([bytes(BLOCK - 1), b"ab"]))) - BLOCK
    1
    >>> sums.taken().hex() == digest(bytes(BLOCK - 1) + b"a") + digest(b"b")
    True
    """

    def __init__(self) -> None:
        self._sums: list[bytes] = []
        self._running = Digest()
        self._room = BLOCK

    def passing(self, chunks: Iterable[Bytes]) -> Iterator[Bytes]:
        """The same chunks; once all have passed, `taken` has their sums."""
        for chunk in chunks:
            data = bytes_of(chunk)
            while data:
                part, data = data[: self._room], data[self._room :]
                self._running.update(part)
                self._room -= len(part)
                if not self._room:
                    self._end_block()
            yield chunk
        if self._room < BLOCK:
            self._end_block()

    def taken(self) -> bytes:
        """The sums, one after the other."""
        return b"".join(self._sums)

    def _end_block(self) -> None:
        self._sums.append(bytes.fromhex(self._running.hexdigest()))
        self._running, self._room = Digest(), BLOCK


class BlockFile:
    """An open file of `size` bytes and the sums of its blocks; `where` names it in errors. The descriptor stays the caller's."""

    def __init__(self, fd: int, size: int, sums: Bytes, where: str) -> None:
        there = os.fstat(fd).st_size
        if there != size:
            raise CheckpointError(f"{where} is damaged: it has {there:,} bytes, and it should have {size:,}")
        self._fd, self.size, self.where = fd, size, where
        self._sums = bytes_of(sums)
        self._filled = bytearray(-(-size // BLOCK))
        if len(self._sums) != SUM * len(self._filled):
            raise CheckpointError(f"{where} has {len(self._filled):,} blocks, and there are sums of {len(self._sums) / SUM:,g}")
        self._memory = _memory(size)
        self.fetched = 0
        """Bytes that were read so far."""

    def view(self, start: int, end: int) -> memoryview:
        """The memory of these bytes, read and compared. It can be written, and lives as long as a view of it."""
        if not 0 <= start <= end <= self.size:
            raise CheckpointError(f"{self.where} has {self.size:,} bytes, and {start:,} to {end:,} are asked for")
        for first, last in self._missing(start // BLOCK, -(-end // BLOCK)):
            self._read(first, last)
        return self._memory[start:end]

    def memory(self) -> memoryview:
        """All of its memory: zeros where nothing was read yet."""
        return self._memory

    def release(self) -> None:
        """Forgets what was read. Views that are in use keep their memory."""
        self._filled = bytearray(len(self._filled))
        self._memory = _memory(self.size)

    def _missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs of blocks from `first` until before `last` that were not read yet, each of a few mebibytes."""
        block = first
        while (block := self._filled.find(0, block, last)) >= 0:
            end = self._filled.find(1, block, last)
            end = min(last if end < 0 else end, block + _PIECE // BLOCK)
            yield block, end
            block = end

    def _read(self, first: int, last: int) -> None:
        start, end = first * BLOCK, min(last * BLOCK, self.size)
        piece, place = self._memory[start:end], start
        while piece:
            try:
                got = os.preadv(self._fd, [piece], place)
            except OSError as error:
                raise CheckpointError(f"{self.where} cannot be read at byte {place:,}: {error.strerror}.") from error
            if not got:
                raise CheckpointError(f"{self.where} ended after {place:,} bytes: it was changed while it was read.")
            piece, place, self.fetched = piece[got:], place + got, self.fetched + got
        for block in range(first, last):
            there = self._memory[block * BLOCK : min((block + 1) * BLOCK, self.size)]
            if digest(there) != self._sums[block * SUM : (block + 1) * SUM].hex():
                raise CheckpointError(f"{self.where} is damaged: its bytes from {block * BLOCK:,} on are not those that were written")
            self._filled[block] = 1


def _memory(size: int) -> memoryview:
    """Memory of this size of which only what is used takes room."""
    if not size:
        return memoryview(bytearray())
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE))
