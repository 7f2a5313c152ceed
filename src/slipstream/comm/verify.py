"""The guard: what every process sends ahead of a collective, so that a mistake is an error and not a hang.

A call is described twice. `agreement` is the text that has to be the same on every rank (operation, structure, types, the
dimensions that may not differ); its digest travels in the header. `describe()` is the text for people (full shapes); it
travels only when digests differ. Headers are compared before any payload is touched, on every rank alike, so every rank
comes to the same verdict and raises the same table, and the group is as usable after it as before.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

__all__ = ["HEADER_SIZE", "Call", "Headers", "explain_mismatch", "inline_length", "suspicion"]

_LAYOUT = struct.Struct("<IQ16s4xQQ")
"""Mark of the format, sequence number, digest of the agreement, length of the body, and how much of it follows at once."""
_MAGIC = 0x534C5031
_AGREED = 28
"""The bytes at the beginning that have to be the same on all ranks."""
_LENGTH_AT = 32
_INLINE_AT = 40
_LONGEST_SHOWN = 600
HEADER_SIZE = _LAYOUT.size
"""Bytes of a header; what follows is aligned for every type of tensor."""


@lru_cache(maxsize=8192)
def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Call:
    """One call of a collective, as this process sees it."""

    __slots__ = ("agreement", "describe", "operation", "site")

    def __init__(self, operation: str, agreement: str, site: str, describe: Callable[[], str]) -> None:
        self.operation = operation
        """The name that the user called: gather, reduce, wait_for_everyone."""
        self.agreement = agreement
        """What must be the same on all ranks, as text."""
        self.site = site
        """The user's file:line."""
        self.describe = describe
        """What this rank passed, in full: only asked for when something is wrong."""

    def header(self, sequence: int, body_length: int, inline: int) -> bytes:
        """What travels ahead of the payload; `inline` bytes of body follow at once.

        >>> len(Call("gather", "float32(*)", "train.py:3", str).header(7, 8, 8))
        48
        """
        return _LAYOUT.pack(_MAGIC, sequence, _digest(f"{self.operation}\n{self.agreement}"), body_length, inline)


def inline_length(frame: bytes | bytearray) -> int:
    """How many bytes of body follow the header in its frame: all of them, or none where they do not fit."""
    return int.from_bytes(frame[_INLINE_AT : _INLINE_AT + 8], "little")


class Headers:
    """The headers of all ranks, as they stand at the beginning of their frames."""

    def __init__(self, frames: Sequence[bytearray], rank: int) -> None:
        self._raw = frames
        self._own = frames[rank]
        if any(raw[:4] != self._own[:4] for raw in frames):
            raise ValueError("another process sent something that is not a header: are all of them on the same version of slipstream?")

    def agree(self) -> bool:
        """Whether every rank is in the same call, with everything in it that has to be the same."""
        own = self._own[:_AGREED]
        return all(raw[:_AGREED] == own for raw in self._raw)

    def all_inline(self) -> bool:
        """Whether every body came with its header."""
        return all(raw[_LENGTH_AT : _LENGTH_AT + 8] == raw[_INLINE_AT : _INLINE_AT + 8] for raw in self._raw)

    def body_lengths(self) -> list[int]:
        """How many bytes each rank has to send besides its header."""
        return [int.from_bytes(raw[_LENGTH_AT : _LENGTH_AT + 8], "little") for raw in self._raw]


_EMPTY_ADVICE: Final = (
    "An empty list became float32: write torch.tensor(values, dtype=...), so that a process without values has the type of the others."
)


_LIST_ADVICE: Final = (
    "A list of nothing but tensors is structure, and has to be alike on all processes. gather_object joins lists of any length that hold "
    "anything."
)
_GATHERS: Final = ("gather ", "gather_for_metrics ")


def explain_mismatch(texts: Sequence[str], sequence: int) -> str:
    """The message for ranks that called different things, with ranks that did the same on one line.

    >>> texts = ["gather int64(2,) at a.py:1", "reduce(sum) int64(2,) at a.py:9", "gather int64(2,) at a.py:1"]
    >>> print(explain_mismatch(texts, 4))  # doctest: +ELLIPSIS
    The processes did not call the same thing as collective number 4, so nothing was transferred:
      ranks 0, 2: gather int64(2,) at a.py:1
      rank 1: reduce(sum) int64(2,) at a.py:9
    Every process has to make the same call at the same line, with the same structure, types and shapes, in the same order.
    Rank 1 alone is at a.py:9: is that under a condition that is true on rank 1 alone? Call it on every process, and keep under ...
    >>> explain_mismatch(["gather int64(2,) at a.py:1", "gather float32(0,) at a.py:1"], 4).splitlines()[-1]
    'An empty list became float32: write torch.tensor(values, dtype=...), so that a process without values has the type of the others.'
    """
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_by_text.setdefault(text, []).append(rank)
    begin = len(os.path.commonprefix(list(ranks_by_text)))
    lines = [f"  {_ranks(ranks)}: {_shorten(text, begin)}" for text, ranks in ranks_by_text.items()]
    return "\n".join(
        [
            f"The processes did not call the same thing as collective number {sequence}, so nothing was transferred:",
            *lines,
            "Every process has to make the same call at the same line, with the same structure, types and shapes, in the same order.",
            _alone(texts) or "Look for a call under a condition that is not true everywhere.",
            *([_LIST_ADVICE] if _are_lists(texts) else ()),
            *([_EMPTY_ADVICE] if any(" float32(0,)" in text for text in texts) else ()),
        ]
    )


def _are_lists(texts: Sequence[str]) -> bool:
    """Whether all ranks gather, and some of them a list."""
    fit = all(text.startswith(_GATHERS) and "(which could not be sent" not in text for text in texts)
    return fit and any("[" in text or " entries" in text for text in texts)


def _alone(texts: Sequence[str]) -> str:
    """A question about the line that one rank is at alone, if there is one: it names the condition that is most likely above it."""
    sites = [text.rpartition(" at ")[2] for text in texts]
    ranks = [rank for rank, site in enumerate(sites) if sites.count(site) == 1]
    if not ranks or (ranks[0] != 0 and len(ranks) > 1):
        return ""
    rank = ranks[0]
    opposite = f", or {sites[1]} under its opposite" if len(sites) == 2 else ""
    return (
        f"Rank {rank} alone is at {sites[rank]}: {suspicion(rank, len(texts))}{opposite}? Call it on every process, and keep under the "
        "condition what is done with the result."
    )


def suspicion(rank: int, world_size: int) -> str:
    """Under which condition a call most likely stands that this rank makes alone, as the beginning of a question.

    >>> suspicion(0, 4), suspicion(3, 4)
    ('is that under `if accelerator.is_main_process:`', 'is that under `if accelerator.is_last_process:`')
    """
    if rank == 0:
        return "is that under `if accelerator.is_main_process:`"
    if rank == world_size - 1 > 1:
        return "is that under `if accelerator.is_last_process:`"
    return f"is that under a condition that is true on rank {rank} alone"


def _shorten(text: str, begin: int) -> str:
    """A long text around the place where the texts begin to differ; the line of the call stays."""
    if len(text) <= _LONGEST_SHOWN:
        return text
    what, _, site = text.rpartition(" at ")
    start = max(0, begin - 100)
    return f"{what[:40]} ... {what[start : start + 300]} ... at {site}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
