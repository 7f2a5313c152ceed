"""A block: the tensors that one module needs when it runs, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from slipstream.offload.store.mapped import MappedFile, Span, joined

__all__ = ["Block"]

_SECTOR: Final = 4096
"""Reads past the page cache begin and end at multiples of this."""


class Block:
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
        self.parts = tuple((file, span) for file, found in files.items() for span in joined(found))
        self.size = sum(span[1] - span[0] for _, span in self.parts)

    @property
    def room(self) -> int:
        """Bytes of a buffer that takes all of its parts, each with the sectors around it."""
        return sum(end - start for start, end in map(_outer, (span for _, span in self.parts)))

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
            start, end = _outer(span)
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


def _outer(span: Span) -> Span:
    return (span[0] // _SECTOR * _SECTOR, -(-span[1] // _SECTOR) * _SECTOR)
