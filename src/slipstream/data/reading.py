"""From the items of a stream to batches: in this process, or in the workers of a loader.

A `Recipe` says how: which ranks' batches are made of the items, by which plan, collated and cut by what. Reading gives a `Message` for each
global batch: the batches of those ranks, and what is known of them. The plan reads one global batch ahead, so the end is known.

What it promises: items are drawn a global batch at a time, inside random states of the reader's own (`randomness.py`); the batches
are made outside of them, as ranks make different ones. A worker's `get_worker_info().dataset` is the script's dataset, as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, tee
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, default_collate, get_worker_info

from slipstream.comm.nested import concatenate
from slipstream.data.cutting import Cut, cut_for_ranks, samples_in
from slipstream.data.fingerprint import fingerprint
from slipstream.data.items import Mark, Marks, Reader, say_reading
from slipstream.data.order import mix
from slipstream.data.plan import Piece, Plan
from slipstream.data.randomness import reseed
from slipstream.data.seeding import Begin
from slipstream.runtime.gradient_state import Shares

__all__ = [
    "Engine",
    "Message",
    "Recipe",
    "Slicer",
    "Turn",
    "as_it_is",
    "changes_by_epoch",
    "stay",
    "whole_updates",
]


class Slicer(Protocol):
    """A plan: what each rank reads of an order (`plan.py`), or of batches that are cut (`CutItems`)."""

    @property
    def world_size(self) -> int: ...

    def pieces(self, order: Iterator[Any], rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[Piece]: ...


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
    turn: Any = None
    """Where the worker stands that made it (a `Turn`)."""


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

    @property
    def aligned(self) -> bool:
        """Whether global batches begin at multiples of their size, wherever reading begins."""
        return isinstance(self.plan, Plan) and self.plan.aligned

    def messages(
        self,
        items: Iterator[Any],
        start: int = 0,
        head: Sequence[Any] | None = None,
        digest: bytes | None = None,
        before: Callable[[], None] | None = None,
    ) -> Iterator[Message]:
        """The batches made of these items, from a position on; with a head they stand there. `before` is called ahead of each."""
        feeds = tee(items, len(self.ranks)) if len(self.ranks) > 1 else (items,)
        plans = [self.plan.pieces(feed, rank, start, head=head) for feed, rank in zip(feeds, self.ranks, strict=True)]
        for pieces in zip(*plans, strict=True):
            _, shares, end = pieces[0]
            own = [piece for piece, _, _ in pieces]
            sizes = [len(piece) if self.batched else samples_in(piece) for piece in own]
            if before is not None:
                before()
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


# -- workers ----------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """Where one worker stands in a pass."""

    role: int
    """Which part of the data it reads: its number when the pass began at the start."""
    items: int = 0
    """How many items it has read and handed on."""
    mark: Mark | None = None
    over: bool = False
    """Whether it has read all of its part."""


class _Reading(IterableDataset[Message]):
    """The dataset of a worker: the script's dataset, made into messages there."""

    def __init__(
        self,
        dataset: Any,
        recipe: Recipe,
        turns: Sequence[Turn],
        *,
        pipeline: int,
        place: tuple[int, int],
        digest: bool,
        careful: bool,
        may_skip: bool,
    ) -> None:
        self.dataset = dataset
        self.recipe = recipe
        self.turns = turns
        """One for each worker, in the order in which they hand out."""
        self.pipeline = pipeline
        self.place = place
        self.digest = digest
        self.careful = careful
        self.may_skip = may_skip
        self.seed: int | torch.Tensor = 0
        """That of the pass; in memory that is shared, for workers that stay."""

    def __iter__(self) -> Iterator[Message]:
        info, seed, recipe = get_worker_info(), int(self.seed), self.recipe
        turn = next(turn for turn in self.turns if info is None or turn.role == info.id)
        if turn.over:
            return
        marks = Marks(8)
        own, block = mix(seed, "worker", turn.role), recipe.block
        reader = Reader(
            self.dataset,
            block,
            own,
            self.pipeline,
            self.place,
            careful=self.careful,
            aligned=recipe.aligned,
            may_skip=self.may_skip and len(self.turns) == 1,
            quiet=True,
        )
        items, head = reader.open(turn.items, turn.mark, needs_head=True, note=lambda position, mark: marks.note(0, position, mark))
        digest = None
        if self.digest:
            first = list(islice(items, block)) if head is None else head
            items = chain(first, items) if head is None else items
            digest = fingerprint(first)
        read = turn.items - (turn.items % block if recipe.aligned else 0)
        numbers = count(turn.items // block)
        for message in recipe.messages(items, turn.items, head, digest, lambda: reseed(mix(own, next(numbers)))):
            read += block
            yield message._replace(turn=Turn(turn.role, read, marks.at(0, read, block), message.end))


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
        self._kept: tuple[Any, Recipe, _Reading, DataLoader[Any]] | None = None
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
        turns: Sequence[Turn] | None = None,
        digest: bool = False,
        careful: bool = False,
        may_skip: bool = True,
    ) -> Iterator[Message]:
        """What workers read; one message is taken ahead, as the workers do not know of each other's ends.

        `pipeline` and `place` (rank, world size) are for pipelines that share themselves out: a seed that all ranks have. `start` is in
        items. Where it was saved how far each worker was (`turns`), each goes on there; else one worker seeks, and several read from the
        beginning, and whole messages are dropped. `may_skip`: whether the dataset's own `skip` leads to a position of this epoch.
        """
        turns, steps = self._turns(dataset, recipe, start, turns, may_skip)
        persistent = self._stay and not self._busy and not any(turn.items for turn in turns)
        if persistent and self._kept is not None and self._kept[0] is dataset and self._kept[1] == recipe:
            reading, loader = self._kept[2:]
        else:
            reading = _Reading(dataset, recipe, turns, pipeline=pipeline, place=place, digest=digest, careful=careful, may_skip=may_skip)
            if persistent:
                reading.seed = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
            loader = self._loader(reading, persistent)
            self._kept = (dataset, recipe, reading, loader) if persistent else self._kept
        if isinstance(reading.seed, torch.Tensor):
            reading.seed.fill_(seed)
        else:
            reading.seed = seed
        assert loader.generator is not None
        loader.generator.manual_seed(mix(seed, "workers"))
        messages = self._occupied(loader) if loader.persistent_workers else iter(loader)
        return _after(_ending(messages), steps)

    def _turns(self, dataset: Any, recipe: Recipe, start: int, turns: Sequence[Turn] | None, may_skip: bool) -> tuple[Sequence[Turn], int]:
        """Where the workers begin, and how many messages are dropped after that."""
        workers = self.original.num_workers
        if not start:
            return [Turn(role) for role in range(workers)], 0
        if turns is None and workers > 1:
            say_reading(dataset, start // recipe.block, "batches")
            return [Turn(role) for role in range(workers)], start // recipe.block
        turns = [Turn(0, start)] if turns is None else turns
        can_skip = callable(getattr(dataset, "skip", None))
        skips = workers == 1 and can_skip and may_skip
        if not skips and any(turn.items and not turn.over and (turn.mark is None or not turn.mark.seeks) for turn in turns):
            say_reading(dataset, sum(turn.items for turn in turns), "epoch" if can_skip and workers == 1 else "items")
        return turns, 0

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
            worker_init_fn=Begin(original.worker_init_fn, tuple(turn.role for turn in reading.turns)),
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
