"""The plan of a pass: an order of samples becomes global batches, and each global batch becomes one slice per data rank.

A global batch is `size` consecutive samples of the order, and rank r reads the r-th contiguous slice of it, so the global batches are the
same for any number of ranks. A custom batch sampler and `batch_size=None` give whole batches, which are distributed in rounds
(`RoundRobinPlan`) or split (`BatchSplitPlan`, `ItemSplitPlan`). A pass may begin at any position, also inside a global batch: the rest of
that batch is shared first, so that all later batches are the same as in a pass from the start. `drop_last` drops a short global batch
as a whole. Otherwise the `LastBatchPolicy` decides about a short last batch:

* `exact` (default): each rank reads its slice as in a full batch. A rank without samples repeats some, with weight 0.
* `even`: the batch is padded with samples from the start of the order, so that every rank has a full batch. One process reads it as it is.
* `ragged`: the samples are shared as evenly as possible without repeats, so a rank may have one batch less.

`BatchShares` says how a batch was shared; None means that every rank has the same full share. The module also derives batch size and
accumulation steps from `effective_batch_size`, and slices batches that were read whole. Everything here is pure: no randomness and no
communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain, cycle, islice
from typing import Any, Literal

import numpy
import torch
from numpy.typing import NDArray

from slipstream.config.handlers import check_count
from slipstream.distributed import pytree
from slipstream.distributed.codec import is_entries, is_items
from slipstream.distributed.gradient_state import BatchShares
from slipstream.distributed.split import count_per_rank
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = [
    "BatchPlan", "BatchSplitPlan", "ComputedOrder", "ItemSplitPlan", "LastBatchPolicy", "Order", "RankPiece", "RoundRobinPlan",
    "SampleOrder", "SliceFunction", "count_pieces", "count_samples", "keep_full_groups", "mark_last", "seek", "slice_for_ranks",
    "slice_rows", "split_effective_batch", "trim_order_to_updates",
]


LastBatchPolicy = Literal["even", "exact", "ragged"]
"""What happens to a short last batch."""

RankPiece = tuple[Any, "BatchShares | None", bool]
"""A rank's slice of one global batch (samples, or a whole batch), how the batch was shared, and whether it is the last one."""


_CHUNK_LENGTH = 4096


class ComputedOrder(ABC):
    """An order whose samples are computed from their positions (`permutation.py`)."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    @abstractmethod
    def look_up(self, positions: NDArray[numpy.uint64]) -> list[Any]:
        """Return the samples at these positions, nested in lists as the positions are in an array."""


class SampleOrder:
    """An order of samples of known length: the first `length` of a sequence, of an array with eight bytes per sample, or computed ones."""

    def __init__(self, values: Any, length: int | None = None) -> None:
        self.values = values
        self.length = len(values) if length is None else length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[Any]:
        """Yield the samples from a position on."""
        for begin in range(start, self.length, _CHUNK_LENGTH):
            yield from self.take(begin, begin + _CHUNK_LENGTH)

    def take(self, start: int, stop: int) -> list[Any]:
        """Return the samples at these positions as Python objects; fewer at the end of the order."""
        stop = min(stop, self.length)
        if isinstance(self.values, ComputedOrder):
            return self.values.look_up(numpy.arange(start, max(start, stop), dtype=numpy.uint64))
        taken = self.values[start:stop]
        return taken.tolist() if isinstance(taken, numpy.ndarray) else list(taken)

    def take_each(self, begins: range, width: int) -> Iterator[list[Any]]:
        """Yield the `width` samples at each of these positions; those of computed orders are computed many at a time."""
        if not isinstance(self.values, ComputedOrder):
            yield from (self.take(begin, begin + width) for begin in begins)
            return
        offsets = numpy.arange(width, dtype=numpy.uint64)
        together = max(1, _CHUNK_LENGTH // max(1, width))
        for first in range(0, len(begins), together):
            own = begins[first : first + together]
            yield from self.values.look_up(numpy.arange(own.start, own.stop, own.step, dtype=numpy.uint64)[:, None] + offsets)


Order = SampleOrder | Iterator[Any]
"""An order that is known, or one that is drawn while it is read."""


@dataclass(frozen=True)
class BatchPlan:
    """Global batches of `size` consecutive samples, each cut into one contiguous slice per rank.

    >>> plan = BatchPlan(world_size=2, size=4, policy="even")
    >>> plan.share_last_batch(1)
    BatchShares(given=(2, 2), real=(1, 0), weighed=False, full=4)
    >>> [list(piece for piece, _, _ in plan.pieces(iter(range(5)), rank)) for rank in range(2)]
    [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    >>> BatchPlan(world_size=2, size=4).share_last_batch(1)
    BatchShares(given=(1, 2), real=(1, 0), weighed=True, full=4)
    """

    world_size: int
    size: int
    """Samples in a full global batch."""
    policy: LastBatchPolicy = "exact"
    drop_last: bool = False
    aligned: bool = True
    """Whether batches begin at multiples of `size`, wherever a pass begins."""

    def __post_init__(self) -> None:
        if self.policy == "even" and self.size % self.world_size:
            raise ConfigError(
                f"split_batches=True cuts batches of batch_size={self.size} into {self.world_size} equal slices, one per process, but "
                f"{self.size} is not a multiple of {self.world_size}. Write batch_size={_nearest_multiples(self.size, self.world_size)}, "
                "or even_batches=False for unequal slices."
            )

    @cached_property
    def given(self) -> tuple[int, ...]:
        """Samples that each rank reads of a full batch."""
        return tuple(count_per_rank(self.size, self.world_size))

    @cached_property
    def full(self) -> BatchShares | None:
        """How a full batch is shared."""
        return None if self.size % self.world_size == 0 else self._share_out(self.size)

    @property
    def full_counts(self) -> tuple[int, ...]:
        """Samples that each rank is handed of a full batch, with padding."""
        return self.given if self.full is None else self.full.given

    def share_last_batch(self, left: int) -> BatchShares:
        """Return how a short last batch of `left` samples is shared."""
        if self.policy == "ragged":
            return self._share_out(left)
        real, before = [], 0
        for count in self.given:
            real.append(min(count, max(0, left - before)))
            before += count
        if self.policy == "exact":
            given = tuple(own or max(1, count) for own, count in zip(real, self.given, strict=True))
        else:
            given = self.given if self.world_size > 1 else tuple(real)
        return BatchShares(given, tuple(real), self.policy == "exact", self.size)

    def offset_in_batch(self, start: int) -> int:
        """Return how many samples of the global batch at a position come before it."""
        return start % self.size if self.aligned else 0

    def share_first_batch(self, offset: int) -> BatchShares | None:
        """Return how a batch is shared whose first `offset` samples were read before; None for a full batch that is shared evenly."""
        return self._share_out(self.size - offset) if offset else self.full

    def _share_out(self, samples: int) -> BatchShares:
        real = tuple(count_per_rank(samples, self.world_size))
        given = real if self.policy == "ragged" else tuple(max(1, count) for count in real)
        return BatchShares(given, real, True, self.size)

    def count(self, samples: int, rank: int = 0, offset: int = 0) -> int:
        """Return how many batches a rank reads of the samples, beginning at an offset in a batch; equal on all ranks, unless ragged."""
        if offset and samples >= self.size - offset:
            first = self._share_out(self.size - offset)
            return (first.given[rank] > 0) + self.count(samples - self.size + offset, rank)
        whole, left = divmod(samples, self.size)
        if not left or self.drop_last:
            has_short = False
        elif self.policy == "ragged":
            has_short = self.share_last_batch(left).given[rank] > 0
        else:
            has_short = True
        if self.policy == "ragged" and self.given[rank] == 0:  # more ranks than samples in a batch
            return 0
        return whole + has_short

    def remainder(self, samples: int, offset: int = 0) -> int:
        """Return the number of samples in a short last batch that is not dropped, else 0."""
        if offset and samples >= self.size - offset:
            samples -= self.size - offset
        return 0 if self.drop_last else samples % self.size

    # -- an order of known length ----------------------------------------------------------------------------------

    def iterate_listed(self, order: SampleOrder, rank: int, start: int = 0) -> Iterator[list[Any]]:
        """Yield the slices of a rank of a listed order, from a position on.

        Only the rank's own positions are read, so the cost per batch does not grow with the number of ranks, unlike in `pieces`.
        """
        size = self.size
        first = sum(self.given[:rank])
        last = first + self.given[rank]
        length = len(order)
        if (offset := self.offset_in_batch(start)) and length - start >= size - offset:
            samples = order.take(start, start + size - offset)
            piece = self._piece(samples, self.share_first_batch(offset), rank, lambda: order.take(0, 1))
            start += size - offset
            if piece:
                yield piece
        whole = (length - start) // size if start < length else 0
        if last > first or self.policy == "exact":
            begins = range(start + first, start + first + whole * size, size)
            yield from order.take_each(begins, last - first) if last > first else (order.take(0, 1) for _ in begins)
        left = (length - start) % size if start < length else 0
        if left and not self.drop_last:
            samples = order.take(length - left, length)
            piece = self._piece(samples, self.share_last_batch(left), rank, lambda: order.take(0, min(length, size)))
            if piece:
                yield piece

    # -- an order that is drawn while it is read --------------------------------------------------------------------

    def pieces(self, order: Order, rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[RankPiece]:
        """Yield the slices of a rank; one global batch of positions (not of data) is drawn ahead to know which one is the last.

        `head` is the beginning of the order (empty if it does not matter), if the order is already at `start`.
        """
        size = self.size
        offset = self.offset_in_batch(start)
        head, samples = seek(order, start, head, size)
        whole = size - offset
        batch = list(islice(samples, whole))
        first = head or batch
        while batch:
            following = list(islice(samples, size)) if len(batch) == whole else []
            if self.drop_last and len(following) < size:
                following = []
            if len(batch) == whole:
                shares = self.share_first_batch(size - whole)
            elif self.drop_last:
                return
            else:
                shares = self.share_last_batch(len(batch))
            piece = self._piece(batch, shares, rank, lambda: first)
            if piece:
                yield piece, shares, self._is_last(following, rank)
            batch, whole = following, size

    def _is_last(self, following: Sequence[Any], rank: int) -> bool:
        if self.policy != "ragged" or len(following) in (0, self.size):
            return not following
        return self.share_last_batch(len(following)).given[rank] == 0

    def _piece(self, samples: Sequence[Any], shares: BatchShares | None, rank: int, head: Callable[[], Sequence[Any]]) -> list[Any]:
        """Return a rank's slice of a global batch; padding is taken from the head of the order."""
        given = self.given if shares is None else shares.given
        if shares is not None and shares.weighed:
            first = sum(shares.real[:rank])
            own = list(samples[first : first + shares.real[rank]])
            return own or ([] if self.policy == "ragged" else list(islice(cycle(head()), given[rank])))
        first = sum(given[:rank])
        own = list(samples[first : first + given[rank]])
        missing = given[rank] - len(own)
        if missing:
            skipped = max(0, first - len(samples))
            own += islice(cycle(head()), skipped, skipped + missing)
        return own


@dataclass(frozen=True)
class RoundRobinPlan:
    """Whole batches in rounds: rank r takes the r-th batch of each round of `world_size`.

    >>> plan = RoundRobinPlan(world_size=2, nominal=2, policy="even")
    >>> [[(batch, shares and shares.real) for batch, shares, _ in plan.pieces(iter(["ab", "cd", "ef"]), rank)] for rank in range(2)]
    [[('ab', None), ('ef', (2, 0))], [('cd', None), ('ab', (2, 0))]]
    """

    world_size: int
    nominal: int | None = None
    """Samples in a full batch; None takes the size of the first one."""
    policy: LastBatchPolicy = "exact"
    measure: Callable[[Any], int] = len
    """The size of a batch; 1 where a batch is one position of the dataset."""

    def count(self, batches: int, rank: int = 0) -> int:
        """Return how many of the batches a rank reads."""
        whole, left = divmod(batches, self.world_size)
        return whole + (left > rank if self.policy == "ragged" else left > 0)

    def pieces(self, batches: Order, rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[RankPiece]:
        """Yield the batches of a rank; one round of batches of positions (not of data) is drawn ahead. `head` as in `BatchPlan`."""
        ranks = self.world_size
        head, batches = seek(batches, start, head, ranks)
        nominal = self.nominal or (self.measure(head[0]) if head else 1)
        dealt = list(islice(batches, ranks))
        while dealt:
            following = list(islice(batches, ranks)) if len(dealt) == ranks else []
            shares = self._shares(dealt, head, nominal)
            end = not following if self.policy != "ragged" else len(following) <= rank
            if rank < len(dealt):
                yield dealt[rank], shares, end
            elif self.policy != "ragged":
                yield self._filler(head, rank - len(dealt)), shares, end
            dealt = following

    def _filler(self, head: Sequence[Any], position: int) -> Any:
        return head[position % len(head)] if self.policy == "even" else head[0]

    def _shares(self, dealt: Sequence[Any], start: Sequence[Any], nominal: int) -> BatchShares | None:
        sizes = tuple(map(self.measure, dealt))
        absent = self.world_size - len(sizes)
        if not absent and all(size == nominal for size in sizes):
            return None
        fillers = [] if self.policy == "ragged" else [self.measure(self._filler(start, position)) for position in range(absent)]
        given = sizes + (tuple(fillers) or (0,) * absent)
        return BatchShares(given, sizes + (0,) * absent, self.policy != "even", nominal * self.world_size)


@dataclass(frozen=True)
class BatchSplitPlan:
    """Batches of any size (of a custom batch sampler), each cut into one slice per rank.

    >>> plan = BatchSplitPlan(world_size=2, policy="even")
    >>> [[batch for batch, _, _ in plan.pieces(iter(["abcd", "efg"]), rank)] for rank in range(2)]
    [[['a', 'b'], ['e', 'f']], [['c', 'd'], ['g', 'a']]]
    """

    world_size: int
    nominal: int | None = None
    """Samples in a full batch; None takes the size of the first one."""
    policy: LastBatchPolicy = "exact"

    def count(self, batches: int, rank: int = 0) -> int:
        """Return how many of the batches a rank reads a slice of: all."""
        return batches

    def pieces(self, batches: Order, rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[RankPiece]:
        """Yield the slices of a rank; one batch of positions (not of data) is drawn ahead. `head` as in `BatchPlan`."""
        head, batches = seek(batches, start, head, 1)
        first: Sequence[Any] = head[0] if head else ()
        nominal = self.nominal or len(first) or 1
        for batch, is_last in mark_last(batches):
            size = len(batch)
            padded = -(-size // self.world_size) * self.world_size if self.policy == "even" else size
            plan = BatchPlan(self.world_size, max(1, padded), self.policy)
            shares = plan.full if size == padded else plan.share_last_batch(size)
            piece = plan._piece(batch, shares, rank, lambda: first)
            if shares is not None or size != nominal:
                real = plan.given if shares is None else shares.real
                shares = BatchShares(plan.given if shares is None else shares.given, real, self.policy != "even", nominal)
            if piece:
                yield piece, shares, is_last


def count_pieces(plan: BatchPlan | RoundRobinPlan | BatchSplitPlan | ItemSplitPlan, length: int, start: int, rank: int = 0) -> int:
    """Return how many batches a rank reads of an order of known length, from a position on."""
    left = max(0, length - start)
    return plan.count(left, rank, plan.offset_in_batch(start)) if isinstance(plan, BatchPlan) else plan.count(left, rank)


def _nearest_multiples(number: int, of: int) -> str:
    below = number - number % of
    return f"{below} or {below + of}" if below else f"{of}"


def seek(order: Order, start: int, head: Sequence[Any] | None, size: int) -> tuple[Sequence[Any], Iterator[Any]]:
    """Return the first `size` items of an order, and the order from `start` on; with a `head`, it is there already.

    >>> head, rest = seek(SampleOrder(range(10)), 7, None, 2)
    >>> head, list(rest)
    ([0, 1], [7, 8, 9])
    """
    if head is not None:
        return head, iter(order)
    if isinstance(order, SampleOrder):
        return order.take(0, size), order.iterate(start)
    head = list(islice(order, size))
    return head, islice(chain(head, order), start, None)


def mark_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each item and whether it is the last one; one item is read ahead."""
    for item in items:
        for following in items:
            yield item, False
            item = following
        yield item, True


def split_effective_batch(effective: int, batch_size: int | None, world_size: int, *, split: bool = False) -> tuple[int, int]:
    """Return (samples per device and batch, batches per update), whose product over all processes is the effective batch size.

    `batch_size` is the largest size that fits on a device; the largest divisor up to it is taken. If that is less than half of
    what fits, a warning names a better number. `split`: `batch_size` is for all processes together.

    >>> split_effective_batch(64, 16, 2), split_effective_batch(64, 12, 2), split_effective_batch(64, 100, 2)
    ((16, 2), (8, 4), (32, 1))
    """
    check_count(effective, f"effective_batch_size={effective!r}: write a whole number of samples from 1, e.g. 64")
    if split and batch_size is not None:
        batch_size = max(1, batch_size // world_size)
    if batch_size is None:
        raise ConfigError(
            f"effective_batch_size={effective} needs a loader with a batch_size, the most that fits a device; this loader has none "
            "(batch_size=None or a batch sampler of its own). Give it a batch_size, or use gradient_accumulation_steps."
        )
    if effective % world_size:
        raise ConfigError(
            f"effective_batch_size={effective} cannot be shared evenly by {world_size} processes. Write effective_batch_size="
            f"{_nearest_multiples(effective, world_size)}, or start a number of processes that divides {effective}."
        )
    each = effective // world_size
    per_device = next(size for size in range(min(batch_size, each), 0, -1) if each % size == 0)
    if 2 * per_device < min(batch_size, each):
        fitting = batch_size * world_size
        better = max(1, round(effective / fitting)) * fitting
        get_logger(__name__).warning(
            f"effective_batch_size={effective} on {world_size} processes is {each} samples for each, whose largest divisor up to "
            f"batch_size={batch_size} is {per_device}: an update takes {each // per_device} small batches. "
            f"effective_batch_size={better} keeps batches of {batch_size}."
        )
    return per_device, each // per_device


def trim_order_to_updates(order: Order, samples: int, begun: int = 0) -> Order:
    """Return an order without the samples after the last full update; `begun` samples of an update came before an iterator.

    >>> list(trim_order_to_updates(iter(range(8)), 3))
    [0, 1, 2, 3, 4, 5]
    """
    if isinstance(order, Iterator):
        return keep_full_groups(order, samples, begun)
    return SampleOrder(order.values, len(order) - len(order) % samples)


def keep_full_groups(items: Iterator[Any], size: int, begun: int = 0) -> Iterator[Any]:
    """Yield the items of full groups of `size`; `begun` items of the first group came before. A short last group is dropped."""
    group: list[Any] = []
    for item in items:
        group.append(item)
        if len(group) + begun == size:
            yield from group
            group.clear()
            begun = 0


SliceFunction = Callable[..., Any]
"""`cut(data, slice, process_index=, num_processes=)`: some samples of a batch."""


@dataclass(frozen=True)
class ItemSplitPlan:
    """A plan for items that are global batches: each is sliced along its first dimension (`batch_size=None` with `split_batches`).

    Uneven batches are shared as they are, because samples of a ready-made batch cannot be joined with others.

    >>> plan = ItemSplitPlan(2, lambda item: item)
    >>> [[piece.tolist() for piece, _, _ in plan.pieces(iter([torch.arange(4), torch.arange(3)]), rank)] for rank in range(2)]
    [[[0, 1], [0, 1]], [[2, 3], [2]]]
    """

    world_size: int
    collate: Callable[[Any], Any]
    cut: SliceFunction | None = None
    """None for `slice_rows`."""

    def count(self, items: int, rank: int = 0) -> int:
        """Return how many of the items a rank reads a slice of: all."""
        return items

    def pieces(self, order: Order, rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[RankPiece]:
        """Yield the slices of a rank; one batch is read ahead. `head` as in `BatchPlan`."""
        head, items = seek(order, start, head, 1)
        full = count_samples(head[0]) if head else 0
        for item, is_last in mark_last(items):
            real = tuple(count_per_rank(count_samples(item), self.world_size))
            given = tuple(max(1, count) for count in real)
            begin = sum(real[:rank]) if real[rank] else 0
            rows = slice(begin, begin + given[rank])
            piece = (self.cut or slice_rows)(self.collate(item), rows, process_index=rank, num_processes=self.world_size)
            even = len(set(real)) == 1 and sum(real) == full
            yield piece, None if even else BatchShares(given, real, True, full), is_last


def count_samples(batch: Any) -> int:
    """Return the number of samples in a ready-made batch: the first dimension of its first tensor, array or list; 1 without one.

    >>> count_samples({"x": torch.ones(4, 2)}), count_samples([{"text": "a", "x": torch.ones(4)}]), count_samples("a")
    (4, 1, 1)
    """
    for leaf in pytree.flatten(batch, is_entries):
        if isinstance(leaf, (torch.Tensor, numpy.ndarray)):
            if leaf.ndim:
                return int(leaf.shape[0])
        elif is_entries(leaf):
            return len(leaf)
    return 1


def slice_for_ranks(
    cut: SliceFunction, whole: Any, sizes: Sequence[int], ranks: Sequence[int], world_size: int, *, samples: bool = True
) -> list[Any]:
    """Cut a batch into slices of `sizes` for these ranks; with `samples`, it was collated from `sum(sizes)` samples and may hold lists.

    >>> slice_for_ranks(slice_rows, [torch.ones(3), torch.zeros(3)], [1, 1], [0, 1], 2)
    [[tensor([1., 1., 1.])], [tensor([0., 0., 0.])]]
    """
    if cut is slice_rows and samples:
        cut = partial(slice_rows, rows=sum(sizes))
    ends = accumulate(sizes)
    return [
        cut(whole, slice(end - size, end), process_index=rank, num_processes=world_size)
        for rank, size, end in zip(ranks, sizes, ends, strict=True)
    ]


def slice_rows(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None, *, rows: int | None = None
) -> Any:
    """Return some samples of a batch: tensors, arrays and lists sliced along their first dimension; other values are kept.

    `rows` is the number of samples in the batch; None derives it. A list of that many tensors is a list of samples, unless the tensors
    themselves have that many rows; an ambiguous list is an error.

    >>> slice_rows({"x": torch.arange(4), "text": ["a", "b", "c", "d"], "scale": 2.0}, slice(1, 3))
    {'x': tensor([1, 2]), 'text': ['b', 'c'], 'scale': 2.0}
    >>> slice_rows([torch.zeros(3, 2), torch.ones(3, 2)], slice(1, 2), rows=2)
    [tensor([[1., 1.],
            [1., 1.],
            [1., 1.]])]
    """
    known = count_samples(data) if rows is None else rows

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, numpy.ndarray)):
            return leaf if not leaf.ndim else _check_rows(leaf, leaf.shape[0], known)[tensor_slice]
        return _check_rows(leaf, len(leaf), known)[tensor_slice] if isinstance(leaf, (list, tuple)) else leaf

    return pytree.map_leaves(cut, data, lambda node: is_items(node) or _holds_samples(node, known, certain=rows is not None))


def _holds_samples(node: Any, rows: int, *, certain: bool) -> bool:
    """Return whether a list holds samples, rather than parts of a batch, each with a row per sample."""
    if not isinstance(node, (list, tuple)) or pytree.is_namedtuple(node) or len(node) != rows:
        return False
    if not all(_has_rows(part, rows) for part in node):
        return True
    if certain and rows > 1 and len({_leaf_types(part) for part in node}) == 1:
        raise ValueError(
            f"a batch of {rows} samples is to be cut for the processes, and it is (or holds) a {type(node).__name__} of {rows}, each with "
            f"{rows} rows: that could be {rows} samples, or {rows} parts of all samples. Let collate_fn return a dict of its parts, or "
            "pass slice_fn_for_dispatch=..., or another batch_size."
        )
    return False


def _leaf_types(part: Any) -> tuple[Any, ...]:
    """Return the dtype and dimensions, or the type, of each leaf."""
    return tuple(
        (leaf.dtype, leaf.ndim) if isinstance(leaf, (torch.Tensor, numpy.ndarray)) else type(leaf) for leaf in pytree.flatten(part)
    )


def _has_rows(part: Any, rows: int) -> bool:
    """Return whether a part of a batch has one row per sample."""
    if isinstance(part, (torch.Tensor, numpy.ndarray)):
        return bool(part.ndim) and part.shape[0] == rows
    if isinstance(part, (list, tuple)) and not pytree.is_namedtuple(part):
        return len(part) == rows or (not is_items(part) and all(_has_rows(inner, rows) for inner in part))
    return not pytree.is_node(part) or all(_has_rows(child, rows) for _, child in pytree.children(part))


def _check_rows(leaf: Any, length: int, rows: int) -> Any:
    if length != rows:
        raise ValueError(
            f"a batch of {rows} samples is to be cut for the processes, but it holds a {type(leaf).__name__} of length {length}, of which "
            "it cannot be told what belongs to which sample. Pass slice_fn_for_dispatch=..., or leave split_batches out."
        )
    return leaf
