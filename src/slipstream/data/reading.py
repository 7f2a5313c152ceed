"""From the items of a stream to batches: in this process, or in the workers of a loader.

A `Recipe` says how: which ranks' batches are made of the items, by which plan, collated and cut by what. Reading gives a `Message` for each
global batch: the batches of those ranks, and what is known of them. The plan reads one global batch ahead, so the end is known.

What it promises: items are drawn a global batch at a time, inside random states of the reader's own (`randomness.py`); the batches
are made outside of them, as ranks make different ones. A worker's `get_worker_info().dataset` is the script's dataset, as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, tee
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from slipstream.comm import tree
from slipstream.comm.leaves import is_items
from slipstream.comm.nested import concatenate
from slipstream.data.fingerprint import fingerprint
from slipstream.data.order import mix
from slipstream.data.plan import Piece
from slipstream.data.randomness import OwnRandom
from slipstream.data.shards import settle_pipeline
from slipstream.logging import get_logger
from slipstream.runtime.gradient_state import Shares
from slipstream.runtime.split import real_counts

__all__ = [
    "Cut",
    "CutItems",
    "Engine",
    "Message",
    "Recipe",
    "Slicer",
    "as_it_is",
    "cut_for_ranks",
    "cut_rows",
    "in_blocks",
    "open_items",
    "samples_in",
    "say_reading",
]

Cut = Callable[..., Any]
"""`cut(data, slice, process_index=, num_processes=)`: some samples of a batch."""


_END = object()
"""After the last item: items may be None."""


class Slicer(Protocol):
    """A plan: what each rank reads of an order (`plan.py`), or of batches that are cut (`CutItems`)."""

    @property
    def world_size(self) -> int: ...

    def pieces(self, order: Iterator[Any], rank: int, start: int = 0) -> Iterator[Piece]: ...


class Message(NamedTuple):
    """What was read of one global batch."""

    batches: list[Any]
    """One for each rank that the recipe names."""
    sizes: list[int]
    """Samples in each of them."""
    shares: Shares | None
    end: bool
    """Whether it is the last one (of this worker, in a worker)."""
    digest: bytes | None
    """A fingerprint of all its items, of the first message, if asked for."""


@dataclass(frozen=True)
class Recipe:
    """How items become the batches of some ranks."""

    plan: Slicer
    block: int
    """Items of a global batch."""
    ranks: tuple[int, ...]
    """Whose batches are made."""
    collate: Callable[[Any], Any]
    batched: bool = True
    """Whether pieces are lists of samples; else an item is a batch already (`batch_size=None`)."""
    cut: Cut | None = None
    """Makes the batch of each rank from that of all; without it each is collated by itself."""

    def messages(self, items: Iterator[Any], start: int = 0, digest: bytes | None = None) -> Iterator[Message]:
        """The batches made of these items, from a position on."""
        feeds = tee(items, len(self.ranks)) if len(self.ranks) > 1 else (items,)
        for pieces in zip(*(self.plan.pieces(feed, rank, start) for feed, rank in zip(feeds, self.ranks, strict=True)), strict=True):
            _, shares, end = pieces[0]
            own = [piece for piece, _, _ in pieces]
            sizes = [len(piece) if self.batched else samples_in(piece) for piece in own]
            yield Message(self._batches(own, sizes), sizes, shares, end, digest)
            digest = None

    def _batches(self, pieces: list[Any], sizes: list[int]) -> list[Any]:
        if self.cut is None:
            return [self.collate(piece) for piece in pieces]
        if self.batched:
            whole = self.collate([sample for piece in pieces for sample in piece])
        else:
            whole = concatenate([self.collate(piece) for piece in pieces])
        lists = self.batched and self.collate is not default_collate
        return cut_for_ranks(self.cut, whole, sizes, self.ranks, self.plan.world_size, samples=lists)


# -- batches that are cut ---------------------------------------------------------------------------------------------


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

    def pieces(self, order: Iterator[Any], rank: int, start: int = 0) -> Iterator[Piece]:
        """The pieces of a rank; one batch is read ahead."""
        head = next(order, _END)
        items = islice(order if head is _END else chain([head], order), start, None)
        item = next(items, _END)
        full = 0 if head is _END else samples_in(head)
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

    >>> samples_in({"x": torch.ones(4, 2)}), samples_in({"text": ["a", "b"]}), samples_in("a")
    (4, 2, 1)
    """
    for leaf in tree.flatten(batch, is_items):
        if isinstance(leaf, (torch.Tensor, numpy.ndarray)):
            if leaf.ndim:
                return int(leaf.shape[0])
        elif is_items(leaf):
            return len(leaf)
    return 1


def cut_for_ranks(
    cut: Cut, whole: Any, sizes: Sequence[int], ranks: Sequence[int], world_size: int, *, samples: bool = True
) -> list[Any]:
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


# -- items ------------------------------------------------------------------------------------------------------------


def in_blocks(
    dataset: Any, block: int, scope: OwnRandom | None, *, careful: bool = False, before: Callable[[int], None] | None = None
) -> Iterator[Any]:
    """The items of a stream, drawn a block at a time inside random states of the reader's own.

    Unless `careful`, a stream that drew no random number for its first block is trusted not to draw any. `before` is called ahead of
    each block with the number of items read so far.
    """
    if scope is None:
        yield from dataset
        return
    with scope:
        stream = iter(dataset)
    read, first = 0, True
    items: list[Any] = []
    while first or len(items) == block:
        if not (first or careful or scope.used or before):
            yield from stream
            return
        first = False
        if before is not None:
            before(read)
        with scope:
            items = list(islice(stream, block))
        read += len(items)
        yield from items


def open_items(
    dataset: Any, block: int, start: int, read: Callable[[Any], Iterator[Any]], *, needs_head: bool
) -> tuple[Iterator[Any], int]:
    """The items of a stream around a position, and how many of them come before it: seeking where the dataset can.

    With `needs_head` the first block comes first in any case, as a short last batch is completed from it.
    """
    skip = getattr(dataset, "skip", None)
    if not start or not callable(skip):
        if start:
            say_reading(dataset, start, "items")
        return read(dataset), start
    if not needs_head:
        return read(skip(start)), 0
    head = list(islice(read(dataset), block))
    return chain(head, read(skip(start))), len(head)


def say_reading(dataset: Any, count: int, what: str) -> None:
    """One line about a seek that has to read."""
    get_logger(__name__).warning(
        f"{count} {what} of {type(dataset).__name__} are read and dropped to get to the position: "
        + ("the order of several workers can only be found by reading" if what == "batches" else "it has no skip(n) to seek with")
    )


class _Reading(IterableDataset[Message]):
    """The dataset of a worker: the script's dataset, made into messages there."""

    def __init__(self, dataset: Any, recipe: Recipe, *, pipeline: int, place: tuple[int, int], digest: bool, scoped: bool) -> None:
        self.dataset = dataset
        self.recipe = recipe
        self.pipeline = pipeline
        self.place = place
        self.digest = digest
        self.scope = OwnRandom() if scoped else None
        self.passes = 0

    def __iter__(self) -> Iterator[Message]:
        settle_pipeline(self.dataset, mix(self.pipeline, self.passes), *self.place)
        self.passes += 1
        items = in_blocks(self.dataset, self.recipe.block, self.scope, careful=True)
        if not self.digest:
            return self.recipe.messages(items)
        first = list(islice(items, self.recipe.block))
        return self.recipe.messages(chain(first, items), 0, fingerprint(first))


class _Begin:
    """What a worker does first: it shows the script's dataset to the script's code, which knows nothing of ours."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        reading: Any = info.dataset
        object.__setattr__(info, "dataset", reading.dataset)  # it is frozen
        if self.init is not None:
            self.init(worker)


class _Once(IterableDataset[Any]):
    """An iterator in the form that torch's loader takes, for its pinning of memory."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


def as_it_is(message: Any) -> Any:
    """What it was given."""
    return message


class Engine:
    """Reads with what the script's loader says about workers and memory; keeps the workers of a loader that wants to keep them."""

    def __init__(self, original: DataLoader[Any]) -> None:
        self.original = original
        self._kept: tuple[Any, Recipe, DataLoader[Any]] | None = None

    @property
    def has_workers(self) -> bool:
        """Whether other processes do the reading."""
        return self.original.num_workers > 0

    def here(self, messages: Iterator[Message]) -> Iterator[Message]:
        """What is read in this process, in pinned memory if the script's loader wants that."""
        if not self.original.pin_memory:
            return messages
        return iter(DataLoader(_Once(messages), batch_size=None, collate_fn=as_it_is, pin_memory=True))

    def in_workers(
        self,
        dataset: Any,
        recipe: Recipe,
        *,
        seed: int,
        pipeline: int,
        place: tuple[int, int] = (0, 1),
        digest: bool = False,
        scoped: bool = False,
    ) -> Iterator[Message]:
        """What workers read; one message is taken ahead, as the workers do not know of each other's ends.

        `pipeline` and `place` (rank, world size) are for pipelines that share themselves out: a seed that all ranks have.
        """
        if self._kept is not None and self._kept[0] is dataset and self._kept[1] == recipe:
            loader = self._kept[2]
        else:
            reading = _Reading(dataset, recipe, pipeline=pipeline, place=place, digest=digest, scoped=scoped)
            loader = self._loader(reading)
            self._kept = (dataset, recipe, loader) if self.original.persistent_workers else None
        assert loader.generator is not None
        loader.generator.manual_seed(mix(seed, "workers"))
        return _ending(iter(loader))

    def _loader(self, reading: _Reading) -> DataLoader[Any]:
        original: Any = self.original
        return DataLoader(
            reading,
            batch_size=None,
            collate_fn=as_it_is,
            num_workers=original.num_workers,
            pin_memory=original.pin_memory,
            timeout=original.timeout,
            worker_init_fn=_Begin(original.worker_init_fn),
            multiprocessing_context=original.multiprocessing_context,
            generator=torch.Generator(),
            prefetch_factor=original.prefetch_factor,
            persistent_workers=original.persistent_workers,
        )


def _ending(messages: Iterator[Sequence[Any]]) -> Iterator[Message]:
    present = next(messages, None)
    while present is not None:
        following = next(messages, None)
        yield Message(*present)._replace(end=following is None)
        present = following
