"""A block: the tensors that one module needs when it runs, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream.offload.store.mapped import MappedFile, Span, joined

__all__ = ["Block"]


class Block:
    """Tensors in mapped files that are used together."""

    __slots__ = ("active", "asked", "name", "number", "parts", "size", "tensors")

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], spans: Sequence[tuple[MappedFile, Span]]) -> None:
        self.name = name
        self.number = -1
        self.tensors = tensors
        self.active = 0
        """How many are running on it now."""
        self.asked = False
        """Its pages have been asked for, and not been given back since."""
        files: dict[MappedFile, list[Span]] = {}
        for file, span in spans:
            files.setdefault(file, []).append(span)
        self.parts = tuple((file, span) for file, found in files.items() for span in joined(found))
        self.size = sum(span[1] - span[0] for _, span in self.parts)

    def ask(self) -> None:
        """Begins to read what is not in memory, and does not wait."""
        for file, span in self.parts:
            file.ask(span)
        self.asked = True

    def give_back(self, *, evict: bool) -> None:
        """Gives the memory back; the next use reads again."""
        for file, span in self.parts:
            file.give_back(span, evict=evict)
        self.asked = False
