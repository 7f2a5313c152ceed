"""Checksums: XXH3 of 128 bits, as hexadecimal text. They find damage, at the speed of memory; they are no signature against an attacker."""

from __future__ import annotations

import mmap
from typing import TypeAlias

import xxhash

__all__ = ["Bytes", "Digest", "bytes_of", "digest"]

Bytes: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
"""What can be written and checksummed without a copy; a memoryview has to be contiguous."""


class Digest:
    """A checksum of bytes that come in pieces; large pieces are taken without the lock of the interpreter.

    >>> running = Digest()
    >>> running.update(b"slip")
    >>> running.update(b"stream")
    >>> running.hexdigest() == digest(b"slipstream")
    True
    """

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running = xxhash.xxh3_128()

    def update(self, data: Bytes) -> None:
        """Take in the next piece."""
        self._running.update(data)

    def hexdigest(self) -> str:
        """The checksum of all pieces so far, as 32 hexadecimal digits."""
        return self._running.hexdigest()


def digest(data: Bytes) -> str:
    """The checksum of these bytes, as 32 hexadecimal digits.

    >>> digest(b"")
    '99aa06d3014798d86001c324468d497f'
    """
    return xxhash.xxh3_128_hexdigest(data)


def bytes_of(data: Bytes) -> memoryview:
    """The bytes behind a buffer of any type and shape, without a copy.

    >>> import array
    >>> len(bytes_of(memoryview(array.array("d", [1.0, 2.0]))))
    16
    """
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty one of several dimensions cannot be cast
