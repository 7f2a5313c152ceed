"""The guard: what every process sends ahead of a collective, so that a mistake is an error and not a hang.

A call is described twice. `agreement` is the text that has to be the same on every rank (operation, structure, types, the
dimensions that may not differ); its digest travels in the header. `describe()` is the text for people (full shapes); it
travels only when digests differ. Headers are compared before any payload is touched, on every rank alike, so every rank
comes to the same verdict and raises the same table, and the group is as usable after it as before.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

__all__ = ["HEADER_SIZE", "Call", "Header", "explain_mismatch"]

_LAYOUT = struct.Struct("<IQ16s8sQ")
_MAGIC = 0x534C5031
HEADER_SIZE = 48
"""Bytes of a header, rounded up so that what follows is aligned for every type of tensor."""


@lru_cache(maxsize=8192)
def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


@dataclass(frozen=True)
class Call:
    """One call of a collective, as this process sees it."""

    operation: str
    """The name that the user called: gather, reduce, wait_for_everyone."""
    agreement: str
    """What must be the same on all ranks, as text."""
    site: str
    """The user's file:line."""
    describe: Callable[[], str]
    """What this rank passed, in full: only asked for when something is wrong."""

    def __str__(self) -> str:
        return f"{self.operation} at {self.site}"


@dataclass(frozen=True)
class Header:
    """What travels ahead of a payload: 48 bytes."""

    sequence: int
    agreement: bytes
    site: bytes
    body_length: int

    @classmethod
    def of(cls, call: Call, sequence: int, body_length: int) -> Header:
        """
        >>> call = Call("gather", "gather float32(*)", "train.py:3", lambda: "float32(2,)")
        >>> header = Header.of(call, 7, 8)
        >>> Header.unpack(header.pack()) == header
        True
        """
        return cls(sequence, _digest(f"{call.operation}\n{call.agreement}", 16), _digest(call.site, 8), body_length)

    def pack(self) -> bytes:
        return _LAYOUT.pack(_MAGIC, self.sequence, self.agreement, self.site, self.body_length).ljust(HEADER_SIZE, b"\0")

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header:
        magic, sequence, agreement, site, body_length = _LAYOUT.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError("another process sent something that is not a header: are all of them on the same version?")
        return cls(sequence, agreement, site, body_length)

    def agrees(self, other: Header) -> bool:
        return self.agreement == other.agreement and self.sequence == other.sequence


def explain_mismatch(texts: Sequence[str], sequence: int) -> str:
    """The message for ranks that called different things, with ranks that did the same on one line.

    >>> print(explain_mismatch(["gather int64(2,) at a.py:1", "reduce(sum) int64(2,) at a.py:9", "gather int64(2,) at a.py:1"], 4))
    The processes did not call the same thing as collective number 4, so nothing was transferred:
      ranks 0, 2: gather int64(2,) at a.py:1
      rank 1: reduce(sum) int64(2,) at a.py:9
    Every process has to make the same call with the same structure, types and shapes, in the same order.
    Look for a call under a condition that is not true everywhere.
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_by_text.setdefault(text, []).append(rank)
    lines = [f"  {_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    return "\n".join(
        [
            f"The processes did not call the same thing as collective number {sequence}, so nothing was transferred:",
            *lines,
            "Every process has to make the same call with the same structure, types and shapes, in the same order.",
            "Look for a call under a condition that is not true everywhere.",
        ]
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
