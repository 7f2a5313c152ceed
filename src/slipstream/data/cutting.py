"""Batches that are cut: how many samples a ready-made batch holds, and the part of each rank of a batch of all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any

import numpy
import torch

from slipstream.comm import tree
from slipstream.comm.leaves import is_entries, is_items
from slipstream.data.plan import Piece
from slipstream.runtime.gradient_state import Shares
from slipstream.runtime.split import real_counts

__all__ = ["Cut", "CutItems", "cut_for_ranks", "cut_rows", "samples_in"]

Cut = Callable[..., Any]
"""`cut(data, slice, process_index=, num_processes=)`: some samples of a batch."""

_END = object()
"""After the last item: items may be None."""


@dataclass(frozen=True)
class CutItems:
    """A plan for items that are batches of all ranks: each is cut along its first dimension (`batch_size=None` with `split_batches`).

    What does not come out even is shared out as it is: the samples of a ready-made batch cannot be joined with others.

    >>> plan = CutItems(2, lambda item: item)
    >>> [[piece.tolist() for piece, _, _ in plan.pieces(iter([torch.arange(4), torch.arange(3)]), rank)] for rank in range(2)]
    [[[0, 1], [0, 1]], [[2, 3], [2]]]
    """

    world_size: int
    collate: Callable[[Any], Any]
    cut: Cut | None = None

    def pieces(self, order: Iterator[Any], rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[Piece]:
        """The pieces of a rank; one batch is read ahead. With a `head` (the beginning), the batches stand at `start` already."""
        items = order
        if head is None:
            head = list(islice(order, 1))
            items = islice(chain(head, order), start, None)
        item = next(items, _END)
        full = samples_in(head[0]) if head else 0
        while item is not _END:
            following = next(items, _END)
            real = tuple(real_counts(samples_in(item), self.world_size))
            given = tuple(max(1, count) for count in real)
            begin = sum(real[:rank]) if real[rank] else 0
            place = slice(begin, begin + given[rank])
            batch = self.collate(item)
            if self.cut is None:
                piece = cut_rows(batch, place, process_index=rank, num_processes=self.world_size)
            else:
                piece = self.cut(batch, place, process_index=rank, num_processes=self.world_size)
            even = len(set(real)) == 1 and sum(real) == full
            yield piece, None if even else Shares(given, real, True, full), following is _END
            item = following


def samples_in(batch: Any) -> int:
    """How many samples a ready-made batch holds: the first dimension of its first tensor, array or list; 1 where it has none.

    >>> samples_in({"x": torch.ones(4, 2)}), samples_in([{"text": "a", "x": torch.ones(4)}]), samples_in("a")
    (4, 1, 1)
    """
    for leaf in tree.flatten(batch, is_entries):
        if isinstance(leaf, (torch.Tensor, numpy.ndarray)):
            if leaf.ndim:
                return int(leaf.shape[0])
        elif is_entries(leaf):
            return len(leaf)
    return 1


def cut_for_ranks(cut: Cut, whole: Any, sizes: Sequence[int], ranks: Sequence[int], world_size: int, *, samples: bool = True) -> list[Any]:
    """A batch of some ranks, cut into theirs; with `samples`, it was made of as many as `sizes` say and may hold lists of them.

    >>> cut_for_ranks(cut_rows, [torch.ones(3), torch.zeros(3)], [1, 1], [0, 1], 2)
    [[tensor([1., 1., 1.])], [tensor([0., 0., 0.])]]
    """
    if cut is cut_rows and samples:
        cut = partial(cut_rows, rows=sum(sizes))
    ends = accumulate(sizes)
    return [
        cut(whole, slice(end - size, end), process_index=rank, num_processes=world_size)
        for rank, size, end in zip(ranks, sizes, ends, strict=True)
    ]


def cut_rows(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None, *, rows: int | None = None
) -> Any:
    """Some samples of a batch: tensors, arrays and lists sliced along their first dimension; what belongs to the whole batch stays.

    `rows` is how many samples it holds; None takes that from the batch. A list of as many tensors is one of samples, unless the tensors
    themselves have as many rows; where both could be meant, it is refused.

    >>> cut_rows({"x": torch.arange(4), "text": ["a", "b", "c", "d"], "scale": 2.0}, slice(1, 3))
    {'x': tensor([1, 2]), 'text': ['b', 'c'], 'scale': 2.0}
    >>> cut_rows([torch.zeros(3, 2), torch.ones(3, 2)], slice(1, 2), rows=2)
    [tensor([[1., 1.],
            [1., 1.],
            [1., 1.]])]
    """
    known = samples_in(data) if rows is None else rows

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, numpy.ndarray)):
            return leaf if not leaf.ndim else _checked(leaf, leaf.shape[0], known)[tensor_slice]
        return _checked(leaf, len(leaf), known)[tensor_slice] if isinstance(leaf, (list, tuple)) else leaf

    return tree.map_leaves(cut, data, lambda node: is_items(node) or _holds_samples(node, known, certain=rows is not None))


def _holds_samples(node: Any, rows: int, *, certain: bool) -> bool:
    """Whether a list is one of samples, rather than the parts of a batch, which all have as many rows."""
    if not isinstance(node, (list, tuple)) or tree.is_namedtuple(node) or len(node) != rows:
        return False
    if not all(_has_rows(part, rows) for part in node):
        return True
    if certain and rows > 1 and len({_kinds(part) for part in node}) == 1:
        raise ValueError(
            f"a batch of {rows} samples is to be cut for the processes, and it is (or holds) a {type(node).__name__} of {rows}, each with "
            f"{rows} rows: that could be {rows} samples, or {rows} parts of all samples. Let collate_fn return a dict of its parts, or "
            "pass slice_fn_for_dispatch=..., or another batch_size."
        )
    return False


def _kinds(part: Any) -> tuple[Any, ...]:
    """What samples have in common."""
    return tuple((leaf.dtype, leaf.ndim) if isinstance(leaf, (torch.Tensor, numpy.ndarray)) else type(leaf) for leaf in tree.flatten(part))


def _has_rows(part: Any, rows: int) -> bool:
    """Whether a part of a batch has one row for each sample."""
    if isinstance(part, (torch.Tensor, numpy.ndarray)):
        return bool(part.ndim) and part.shape[0] == rows
    if isinstance(part, (list, tuple)) and not tree.is_namedtuple(part):
        return len(part) == rows or (not is_items(part) and all(_has_rows(one, rows) for one in part))
    return not tree.is_node(part) or all(_has_rows(one, rows) for _, one in tree.children(part))


def _checked(leaf: Any, length: int, rows: int) -> Any:
    if length != rows:
        raise ValueError(
            f"a batch of {rows} samples is to be cut for the processes, but it holds a {type(leaf).__name__} of length {length}, of which "
            "it cannot be told what belongs to which sample. Pass slice_fn_for_dispatch=..., or leave split_batches out."
        )
    return leaf
