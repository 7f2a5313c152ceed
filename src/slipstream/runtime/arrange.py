"""Putting gathered results back: the order of the input, without what only padded a part."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.comm.gather import Arrange
from slipstream.runtime.split import Part, lengths, real_counts, restore_order

__all__ = ["arrangement"]


def arrangement(part: Part | None) -> Arrange | None:
    """How to arrange one result per item of the part that was split last; None where the order of the ranks is right as it is.

    It applies only to results whose count on every rank is the count of items that the rank was given.

    >>> from slipstream.runtime.split import split
    >>> arrange = arrangement(split(["a", "b", "c"], 0, 2, apply_padding=True))
    >>> arrange([2, 2]), arrange([1, 1])
    ([0, 1, 2], None)
    """
    if part is None or not (part.dealt or part.apply_padding):
        return None

    def arrange(counts: Sequence[int]) -> list[int] | None:
        if not part.used_up or list(counts) != lengths(part.total, part.world_size, part.apply_padding):
            return None
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        real = [list(range(start, start + count)) for start, count in zip(starts, real_counts(part.total, part.world_size), strict=True)]
        order: list[int] = restore_order(real, part.dealt)
        return order

    return arrange
