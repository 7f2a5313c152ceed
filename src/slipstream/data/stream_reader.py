"""From the items of an iterable dataset to the batches of some ranks, in this process or in DataLoader workers.

A `BatchRecipe` names the ranks, the plan, the collate function and how a batch is cut. Reading yields one `GlobalBatch` at a time and
stays one ahead, so that the last one is known. `StreamSource` records what leads back to each position, with workers the position of each
of them, and resumes there in the same turns. Batches are made outside of the reader's random states, as ranks make different ones. In a
worker, `get_worker_info().dataset` is the user's dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, tee
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from slipstream.data.fingerprint import fingerprint
from slipstream.data.loader import keeps_workers
from slipstream.data.plan import BatchPlan, RankPiece, SliceFunction, count_samples, slice_for_ranks
from slipstream.data.random_state import WorkerInit, derive_seed, reseed
from slipstream.data.stream_dataset import (
    ItemReader,
    RecentPositions,
    StreamPosition,
    decode_stream_position,
    encode_stream_position,
    supports_skip,
    warn_of_slow_seek,
)
from slipstream.distributed.gradient_state import BatchShares
from slipstream.distributed.pytree import concatenate
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = [
    "BatchRecipe", "GlobalBatch", "RankPlan", "STREAM_STATE_KEYS", "SavedStreamPosition", "StreamBatchReader", "StreamSource",
    "WorkerPosition", "return_unchanged", "trim_batches_to_updates",
]


class RankPlan(Protocol):
    """A plan: what each rank reads of an order (`plan.py`), or of batches that are cut (`ItemSplitPlan`)."""

    @property
    def world_size(self) -> int: ...

    def pieces(self, order: Iterator[Any], rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[RankPiece]: ...


class GlobalBatch(NamedTuple):
    """What was read of one global batch."""

    batches: list[Any]
    """One for each rank that the recipe names."""
    sizes: list[int]
    """Samples in each of them."""
    shares: BatchShares | None
    end: bool
    """Whether it is the last one (of this worker, in a worker)."""
    digest: bytes | None
    """A fingerprint of all its items, of the first message, if asked for."""
    turn: Any = None
    """Where the worker stands that made it (a `WorkerPosition`)."""


@dataclass(frozen=True)
class BatchRecipe:
    """How items become the batches of some ranks."""

    plan: RankPlan
    block: int
    """Items of a global batch."""
    ranks: tuple[int, ...]
    """Whose batches are made."""
    collate: Callable[[Any], Any]
    batched: bool = True
    """Whether pieces are lists of samples; else an item is a batch already (`batch_size=None`)."""
    cut: SliceFunction | None = None
    """Makes the batch of each rank from that of all; without it each is collated by itself."""

    @property
    def aligned(self) -> bool:
        """Whether global batches begin at multiples of their size, wherever reading begins."""
        return isinstance(self.plan, BatchPlan) and self.plan.aligned

    def messages(
        self,
        items: Iterator[Any],
        start: int = 0,
        head: Sequence[Any] | None = None,
        digest: bytes | None = None,
        before: Callable[[], None] | None = None,
    ) -> Iterator[GlobalBatch]:
        """The batches made of these items, from a position on; with a head they stand there. `before` is called ahead of each."""
        feeds = tee(items, len(self.ranks)) if len(self.ranks) > 1 else (items,)
        plans = [self.plan.pieces(feed, rank, start, head=head) for feed, rank in zip(feeds, self.ranks, strict=True)]
        for pieces in zip(*plans, strict=True):
            _, shares, end = pieces[0]
            own = [piece for piece, _, _ in pieces]
            sizes = [len(piece) if self.batched else count_samples(piece) for piece in own]
            if before is not None:
                before()
            yield GlobalBatch(self._batches(own, sizes), sizes, shares, end, digest)
            digest = None

    def _batches(self, pieces: list[Any], sizes: list[int]) -> list[Any]:
        if self.cut is None:
            return [self.collate(piece) for piece in pieces]
        if self.batched:
            whole = self.collate([sample for piece in pieces for sample in piece])
        else:
            whole = concatenate([self.collate(piece) for piece in pieces])
        lists = self.batched and self.collate is not default_collate
        return slice_for_ranks(self.cut, whole, sizes, self.ranks, self.plan.world_size, samples=lists)


# -- workers ----------------------------------------------------------------------------------------------------------


class WorkerPosition(NamedTuple):
    """Where one worker stands in a pass."""

    role: int
    """Which part of the data it reads: its number when the pass began at the start."""
    items: int = 0
    """How many items it has read and handed on."""
    mark: StreamPosition | None = None
    over: bool = False
    """Whether it has read all of its part."""


class _WorkerDataset(IterableDataset[GlobalBatch]):
    """The dataset of a worker: the script's dataset, made into messages there."""

    def __init__(
        self,
        dataset: Any,
        recipe: BatchRecipe,
        turns: Sequence[WorkerPosition],
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

    def __iter__(self) -> Iterator[GlobalBatch]:
        info, seed, recipe = get_worker_info(), int(self.seed), self.recipe
        turn = next(turn for turn in self.turns if info is None or turn.role == info.id)
        if turn.over:
            return
        marks = RecentPositions(8)
        own, block = derive_seed(seed, "worker", turn.role), recipe.block
        reader = ItemReader(
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
        for message in recipe.messages(items, turn.items, head, digest, lambda: reseed(derive_seed(own, next(numbers)))):
            read += block
            yield message._replace(turn=WorkerPosition(turn.role, read, marks.at(0, read, block), message.end))


class _IteratorDataset(IterableDataset[Any]):
    """An iterator in the form that torch's loader takes, for its pinning of memory."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


def return_unchanged(message: Any) -> Any:
    """What it was given."""
    return message


class StreamBatchReader:
    """Reads with what the script's loader says about workers and memory; keeps the workers of a loader that wants to keep them."""

    def __init__(self, original: DataLoader[Any]) -> None:
        self.original = original
        self._kept: tuple[Any, BatchRecipe, _WorkerDataset, DataLoader[Any]] | None = None
        self._busy = False
        """Whether the workers that stay are at work for another pass."""
        self._stay = keeps_workers(original)

    @property
    def has_workers(self) -> bool:
        """Whether other processes do the reading."""
        return self.original.num_workers > 0

    def here(self, messages: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        """What is read in this process, in pinned memory if the script's loader wants that."""
        if not self.original.pin_memory:
            return messages
        return iter(DataLoader(_IteratorDataset(messages), batch_size=None, collate_fn=return_unchanged, pin_memory=True))

    def in_workers(
        self,
        dataset: Any,
        recipe: BatchRecipe,
        *,
        seed: int,
        pipeline: int,
        place: tuple[int, int] = (0, 1),
        start: int = 0,
        turns: Sequence[WorkerPosition] | None = None,
        digest: bool = False,
        careful: bool = False,
        may_skip: bool = True,
    ) -> Iterator[GlobalBatch]:
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
            reading = _WorkerDataset(
                dataset, recipe, turns, pipeline=pipeline, place=place, digest=digest, careful=careful, may_skip=may_skip
            )
            if persistent:
                reading.seed = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
            loader = self._loader(reading, persistent)
            self._kept = (dataset, recipe, reading, loader) if persistent else self._kept
        if isinstance(reading.seed, torch.Tensor):
            reading.seed.fill_(seed)
        else:
            reading.seed = seed
        assert loader.generator is not None
        loader.generator.manual_seed(derive_seed(seed, "workers"))
        messages = self._occupied(loader) if loader.persistent_workers else iter(loader)
        return _drop_first(_mark_last(messages), steps)

    def _turns(
        self, dataset: Any, recipe: BatchRecipe, start: int, turns: Sequence[WorkerPosition] | None, may_skip: bool
    ) -> tuple[Sequence[WorkerPosition], int]:
        """Where the workers begin, and how many messages are dropped after that."""
        workers = self.original.num_workers
        if not start:
            return [WorkerPosition(role) for role in range(workers)], 0
        if turns is None and workers > 1:
            warn_of_slow_seek(dataset, start // recipe.block, "batches")
            return [WorkerPosition(role) for role in range(workers)], start // recipe.block
        turns = [WorkerPosition(0, start)] if turns is None else turns
        can_skip = callable(getattr(dataset, "skip", None))
        skips = workers == 1 and can_skip and may_skip
        if not skips and any(turn.items and not turn.over and (turn.mark is None or not turn.mark.seeks) for turn in turns):
            warn_of_slow_seek(dataset, sum(turn.items for turn in turns), "epoch" if can_skip and workers == 1 else "items")
        return turns, 0

    def _occupied(self, loader: DataLoader[Any]) -> Iterator[Any]:
        self._busy = True
        try:
            yield from loader
        finally:
            self._busy = False

    def _loader(self, reading: _WorkerDataset, persistent: bool) -> DataLoader[Any]:
        original: Any = self.original
        return DataLoader(
            reading,
            batch_size=None,
            collate_fn=return_unchanged,
            num_workers=original.num_workers,
            pin_memory=original.pin_memory,
            timeout=original.timeout,
            worker_init_fn=WorkerInit(original.worker_init_fn, tuple(turn.role for turn in reading.turns)),
            multiprocessing_context=original.multiprocessing_context,
            generator=torch.Generator(),
            prefetch_factor=original.prefetch_factor,
            persistent_workers=persistent,
        )


def _mark_last(messages: Iterator[Sequence[Any]]) -> Iterator[GlobalBatch]:
    present = next(messages, None)
    while present is not None:
        following = next(messages, None)
        yield GlobalBatch(*present)._replace(end=following is None)
        present = following


def _drop_first(messages: Iterator[GlobalBatch], steps: int) -> Iterator[GlobalBatch]:
    """What follows so many messages; the fingerprint of the first one goes on with it."""
    digest = None
    for message in islice(messages, steps):
        digest = digest or message.digest
    for message in messages:
        yield message if digest is None else message._replace(digest=digest)
        digest = None


def trim_batches_to_updates(messages: Iterator[GlobalBatch], steps: int, begun: int = 0) -> Iterator[GlobalBatch]:
    """Messages without those left over after the last full update of `steps`, of which `begun` came before; reads two updates ahead.

    >>> list(message.sizes for message in trim_batches_to_updates((GlobalBatch([], [n], None, n == 4, None) for n in range(5)), 2))
    [[0], [1], [2], [3]]
    """
    ready: list[GlobalBatch] = []
    update: list[GlobalBatch] = []
    for message in messages:
        update.append(message)
        if len(update) + begun == steps:
            yield from ready
            ready, update, begun = update, [], 0
    yield from ready[:-1]
    for message in ready[-1:]:
        yield message._replace(end=True)


STREAM_STATE_KEYS = ("dataset", "random", "workers", "parts", "part", "full")
"""Names of what the position of a stream holds besides numbers."""


@dataclass(frozen=True)
class SavedStreamPosition:
    """What leads to a saved position."""

    epoch: int
    samples: int
    mark: StreamPosition | None
    turns: Sequence[WorkerPosition] | None


class StreamSource:
    """What one process reads of a stream, and the places in it."""

    def __init__(self, original: DataLoader[Any], dataset: Any, ahead: int = 0) -> None:
        """`ahead`: how many global batches are read ahead of the script, besides the one that is always."""
        self.original = original
        self.dataset = dataset
        self.engine = StreamBatchReader(original)
        self.saved: SavedStreamPosition | None = None
        """The place that was loaded."""
        self._ahead = ahead + 4
        self._marks = RecentPositions(self._ahead)
        self._rotas: dict[tuple[int, int], tuple[WorkerPosition, ...]] = {}
        """How far the workers are, in the order of their turns, by epoch and position."""

    # -- reading --------------------------------------------------------------------------------------------------

    def messages(
        self,
        dataset: Any,
        recipe: BatchRecipe,
        *,
        epoch: int,
        start: int,
        seed: int,
        pipeline: int,
        place: tuple[int, int] = (0, 1),
        careful: bool = False,
        needs_head: bool = True,
        head: list[Any] | None = None,
        digest: bool = False,
    ) -> Iterator[GlobalBatch]:
        """The batches from a position on; places are noted, and those that were are used."""
        saved = self._found(epoch, start) if start else None
        may_skip = supports_skip(dataset, epoch)
        if self.engine.has_workers:
            turns = None if saved is None else saved.turns
            messages = self.engine.in_workers(
                dataset,
                recipe,
                seed=seed,
                pipeline=pipeline,
                place=place,
                start=start,
                turns=turns,
                digest=digest,
                careful=careful,
                may_skip=may_skip,
            )
            return self._followed(messages, recipe, epoch, start, turns)
        reader = self.reader(dataset, recipe, seed, pipeline, place, careful=careful, may_skip=may_skip)
        mark = None if saved is None else saved.mark
        items, head = reader.open(start, mark, needs_head=needs_head, head=head, note=self.note(epoch))
        return self.engine.here(recipe.messages(items, start, head))

    def reader(
        self, dataset: Any, recipe: BatchRecipe, seed: int, pipeline: int, place: tuple[int, int], *, careful: bool, may_skip: bool = True
    ) -> ItemReader:
        """What reads the items in this process."""
        return ItemReader(dataset, recipe.block, seed, pipeline, place, careful=careful, aligned=recipe.aligned, may_skip=may_skip)

    def note(self, epoch: int) -> Callable[[int, StreamPosition], None]:
        """Takes the marks of a pass."""
        return lambda position, mark: self._marks.note(epoch, position, mark)

    def can_seek(self, dataset: Any, epoch: int, start: int) -> bool:
        """Whether this position can be found without reading everything before it."""
        saved = self._found(epoch, start)
        return supports_skip(dataset, epoch) or (saved is not None and saved.mark is not None and saved.mark.seeks)

    def _found(self, epoch: int, start: int) -> SavedStreamPosition | None:
        """What leads to this position, if it was loaded, or if a pass of this process got there."""
        if self.saved is not None and (self.saved.epoch, self.saved.samples) == (epoch, start):
            return self.saved
        turns = self._rotas.get((epoch, start))
        mark = self._marks.at(epoch, start, 0)
        return None if mark is None and turns is None else SavedStreamPosition(epoch, start, mark, turns)

    def _followed(
        self, messages: Iterator[GlobalBatch], recipe: BatchRecipe, epoch: int, start: int, begun: Sequence[WorkerPosition] | None
    ) -> Iterator[GlobalBatch]:
        """Notes how far the workers are after each message."""
        rota = tuple(begun or (WorkerPosition(role) for role in range(self.original.num_workers)))
        position = start - (start % recipe.block if recipe.aligned else 0)
        if begun is None and start:  # whole messages were dropped: nothing is known of the workers
            yield from messages
            return
        for message in messages:
            position += recipe.block
            turn = WorkerPosition(*message.turn)
            place = next(place for place, entry in enumerate(rota) if entry.role == turn.role)
            rota = (*rota[place + 1 :], *rota[:place], turn)
            self._rotas[epoch, position] = rota
            if len(self._rotas) > self._ahead:
                del self._rotas[next(iter(self._rotas))]
            yield message

    # -- places ---------------------------------------------------------------------------------------------------

    def state(self, epoch: int, position: int, recipe: BatchRecipe) -> dict[str, Any]:
        """What leads back to a position, in plain data."""
        rota = self._rotas.get((epoch, position))
        if rota is not None:
            return {"workers": [_encode_worker_position(turn) for turn in rota]}
        if self.engine.has_workers:
            return {}
        return encode_stream_position(self._marks.at(epoch, position, recipe.block))

    def check(self, state: Mapping[str, Any]) -> SavedStreamPosition:
        """The place in a saved state; a `ConfigError` where it cannot be one. Changes nothing."""
        name = type(self.dataset).__name__
        workers = state.get("workers")
        if workers is not None and (not isinstance(workers, list) or not all(_is_worker_position(turn) for turn in workers)):
            raise ConfigError(f"the state of a loader of {name} says how far its workers were, in a way that cannot be read")
        roles = sorted(turn["role"] for turn in workers or [])
        if roles != list(range(len(roles))):
            raise ConfigError(f"the state of a loader of {name} has workers {roles}: each is there once, from 0")
        turns = (
            None
            if workers is None
            else [WorkerPosition(worker["role"], worker["items"], decode_stream_position(worker), worker["over"]) for worker in workers]
        )
        mark = decode_stream_position(state)
        keeps = [entry for entry in (mark, *(turn.mark for turn in turns or [])) if entry is not None and entry.seeks]
        if keeps and not callable(getattr(self.dataset, "load_state_dict", None)):
            raise ConfigError(
                f"the state of a dataset was saved with this position, and {name} has no load_state_dict: give the loader the same dataset"
            )
        return SavedStreamPosition(state["epoch"], state["samples"], mark, turns)

    def load(self, saved: SavedStreamPosition) -> None:
        """Goes on at that place when a pass begins there; tells if another number of workers reads in another order."""
        turns, mark, workers = saved.turns, saved.mark, self.original.num_workers
        before, now = len(turns) if turns is not None else 1 if mark is not None else workers, max(1, workers)
        if max(1, before) != now and saved.samples:
            get_logger(__name__).warning(
                f"the position of {type(self.dataset).__name__} was saved with {before} workers, and there are {now} now: several "
                "workers read in another order, so in this epoch some samples may come twice and others never. Use num_workers as it was."
            )
        if turns is not None and len(turns) != workers:
            mark = turns[0].mark if len(turns) == 1 else None
            turns = None
        elif turns is None and mark is not None and workers == 1:
            turns = [WorkerPosition(0, saved.samples, mark)]
        self.saved = SavedStreamPosition(saved.epoch, saved.samples, mark, turns)


def _encode_worker_position(turn: WorkerPosition) -> dict[str, Any]:
    return {"role": turn.role, "items": turn.items, "over": turn.over, **encode_stream_position(turn.mark)}


def _is_worker_position(turn: Any) -> bool:
    if not isinstance(turn, Mapping) or not {"role", "items", "over"} <= set(turn) <= {"role", "items", "over", "dataset", "random"}:
        return False
    numbers = all(type(turn[name]) is int and 0 <= turn[name] < 2**53 for name in ("role", "items"))
    return numbers and isinstance(turn["over"], bool)
