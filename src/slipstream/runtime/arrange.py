"""Putting gathered results back: the order of the input, without what only padded a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.comm.gather import Arrange
from slipstream.runtime.split import Part, lengths, real_counts, restore_order

__all__ = ["arrangement"]


def arrangement(part: Part | None) -> Arrange | None:
    """How to arrange one result per item of the part that was split last; None where the order of the ranks is right as it is.

    It applies only to results whose count on every rank is the count of items that the rank was given.

    >>> from slipstream.runtime.split import split
    >>> arrange = arrangement(split(["a", "b", "c"], 0, 2, apply_padding=True))
    >>> arrange.order([2, 2]), arrange.order([1, 1])
    ([0, 1, 2], None)
    """
    return _Arrangement(part) if part is not None and (part.dealt or part.apply_padding) else None


@dataclass(frozen=True)
class _Arrangement:
    part: Part
    leaf_by_leaf: bool = False
    ranks: None = None

    @property
    def total(self) -> int:
        return self.part.total if self.part.used_up else -1

    def order(self, counts: Sequence[int]) -> list[int] | None:
        part = self.part
        if list(counts) != lengths(part.total, part.world_size, part.apply_padding):
            return None
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        real = [list(range(start, start + count)) for start, count in zip(starts, real_counts(part.total, part.world_size), strict=True)]
        order: list[int] = restore_order(real, part.dealt)
        return order
