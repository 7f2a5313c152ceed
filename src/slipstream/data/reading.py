"""From the items of a stream to batches: in this process, or in the workers of a loader.

A `Recipe` says how: which ranks' batches are made of the items, by which plan, collated and cut by what. Reading gives a `Message` for each
global batch: the batches of those ranks, and what is known of them. The plan reads one global batch ahead, so the end is known.

What it promises: items are drawn a global batch at a time, inside random states of the reader's own (`randomness.py`); the batches
are made outside of them, as ranks make different ones. A worker's `get_worker_info().dataset` is the script's dataset, as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, tee
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, default_collate, get_worker_info

from slipstream.comm.nested import concatenate
from slipstream.data.cutting import Cut, cut_for_ranks, samples_in
from slipstream.data.fingerprint import fingerprint
from slipstream.data.order import mix
from slipstream.data.plan import Piece
from slipstream.data.randomness import OwnRandom
from slipstream.data.shards import settle_pipeline
from slipstream.logging import get_logger
from slipstream.runtime.gradient_state import Shares

__all__ = [
    "Engine",
    "Message",
    "Recipe",
    "Slicer",
    "as_it_is",
    "changes_by_epoch",
    "in_blocks",
    "open_items",
    "say_reading",
    "stay",
    "whole_updates",
]


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


def say_reading(dataset: Any, count: int, what: str, again: int = 0) -> None:
    """One line about a seek that has to read; `again` items before the position cannot be told apart and are handed out again."""
    get_logger(__name__).warning(
        f"{count} {what} of {type(dataset).__name__} are read and dropped to get to the position: "
        + ("the order of several workers can only be found by reading" if what == "batches" else "it has no skip(n) to seek with")
        + (f", and only in whole batches, so {again} items are handed out again" if again else "")
    )


class _Reading(IterableDataset[Message]):
    """The dataset of a worker: the script's dataset, made into messages there."""

    def __init__(
        self, dataset: Any, recipe: Recipe, *, start: int, pipeline: int, place: tuple[int, int], digest: bool, scoped: bool
    ) -> None:
        self.dataset = dataset
        self.recipe = recipe
        self.start = start
        self.pipeline = pipeline
        self.place = place
        self.digest = digest
        self.scope = OwnRandom() if scoped else None

    def __iter__(self) -> Iterator[Message]:
        settle_pipeline(self.dataset, self.pipeline, *self.place)
        items = in_blocks(self.dataset, self.recipe.block, self.scope, careful=True)
        if not self.digest:
            return self.recipe.messages(items, self.start)
        first = list(islice(items, self.recipe.block))
        return self.recipe.messages(chain(first, items), self.start, fingerprint(first))


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


def stay(original: DataLoader[Any]) -> bool:
    """Whether workers are kept from pass to pass: where the script wants it and the dataset is the same in every pass.

    Workers hold the dataset as it was when they began, so one that is told the epoch needs new ones.
    """
    return original.persistent_workers and not changes_by_epoch(original.dataset)


def changes_by_epoch(dataset: Any) -> bool:
    """Whether a dataset is told something before each pass: the epoch, or the seed of a pipeline.

    >>> changes_by_epoch([1, 2])
    False
    """
    return callable(getattr(dataset, "set_epoch", None)) or isinstance(dataset, IterDataPipe)


class Engine:
    """Reads with what the script's loader says about workers and memory; keeps the workers of a loader that wants to keep them."""

    def __init__(self, original: DataLoader[Any]) -> None:
        self.original = original
        self._kept: tuple[Any, Recipe, DataLoader[Any]] | None = None
        self._busy = False
        """Whether the workers that stay are at work for another pass."""
        self._stay = stay(original)

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
        start: int = 0,
        digest: bool = False,
        scoped: bool = False,
    ) -> Iterator[Message]:
        """What workers read; one message is taken ahead, as the workers do not know of each other's ends.

        `pipeline` and `place` (rank, world size) are for pipelines that share themselves out: a seed that all ranks have. `start` is in
        items. One worker reads and drops them; several take turns, so whole messages are dropped, and what is left over is read again.
        """
        steps, left = divmod(start, recipe.block)
        if start:
            say_reading(dataset, steps, "batches", again=left if self.original.num_workers > 1 else 0)
        alone = self.original.num_workers == 1
        begin = start if alone else 0
        persistent = self._stay and not self._busy and not begin
        if persistent and self._kept is not None and self._kept[0] is dataset and self._kept[1] == recipe:
            loader = self._kept[2]
        else:
            reading = _Reading(dataset, recipe, start=begin, pipeline=pipeline, place=place, digest=digest, scoped=scoped)
            loader = self._loader(reading, persistent)
            self._kept = (dataset, recipe, loader) if persistent else self._kept
        assert loader.generator is not None
        loader.generator.manual_seed(mix(seed, "workers"))
        messages = self._occupied(loader) if loader.persistent_workers else iter(loader)
        return _after(_ending(messages), 0 if alone else steps)

    def _occupied(self, loader: DataLoader[Any]) -> Iterator[Any]:
        self._busy = True
        try:
            yield from loader
        finally:
            self._busy = False

    def _loader(self, reading: _Reading, persistent: bool) -> DataLoader[Any]:
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
            persistent_workers=persistent,
        )


def _ending(messages: Iterator[Sequence[Any]]) -> Iterator[Message]:
    present = next(messages, None)
    while present is not None:
        following = next(messages, None)
        yield Message(*present)._replace(end=following is None)
        present = following


def _after(messages: Iterator[Message], steps: int) -> Iterator[Message]:
    """What follows so many messages; the fingerprint of the first one goes on with it."""
    digest = None
    for message in islice(messages, steps):
        digest = digest or message.digest
    for message in messages:
        yield message if digest is None else message._replace(digest=digest)
        digest = None


def whole_updates(messages: Iterator[Message], steps: int, begun: int = 0) -> Iterator[Message]:
    """Messages without those left over after the last full update of `steps`, of which `begun` came before; reads two updates ahead.

    >>> list(message.sizes for message in whole_updates((Message([], [n], None, n == 4, None) for n in range(5)), 2))
    [[0], [1], [2], [3]]
    """
    ready: list[Message] = []
    update: list[Message] = []
    for message in messages:
        update.append(message)
        if len(update) + begun == steps:
            yield from ready
            ready, update, begun = update, [], 0
    yield from ready[:-1]
    for message in ready[-1:]:
        yield message._replace(end=True)
