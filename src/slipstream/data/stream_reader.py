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
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from slipstream.data.fingerprint import fingerprint
from slipstream.data.loader import keeps_workers
from slipstream.data.plan import (
    BatchPlan,
    BatchSplitPlan,
    ItemSplitPlan,
    RoundRobinPlan,
    SliceFunction,
    count_samples,
    keep_full_groups,
    mark_last,
    slice_for_ranks,
)
from slipstream.data.random_state import WorkerInit, derive_seed, reseed, seed_loader
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
    "BatchRecipe", "GlobalBatch", "RankPlan", "STREAM_STATE_KEYS", "SavedStreamPosition", "StreamBatchReader", "StreamRead", "StreamSource",
    "WorkerPosition", "return_unchanged", "trim_batches_to_updates",
]


RankPlan = BatchPlan | RoundRobinPlan | BatchSplitPlan | ItemSplitPlan
"""What each rank reads of an order, or of batches that are cut."""


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
    worker: Any = None
    """The position of the worker that made it (a `WorkerPosition`)."""


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
        """Yield the batches made of these items, from a position on; with a head they stand there. `before` is called ahead of each."""
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


@dataclass(frozen=True)
class StreamRead:
    """What one pass reads of a stream, in this process or in workers."""

    dataset: Any
    recipe: BatchRecipe
    seed: int
    pipeline: int
    """The seed of pipelines of torch, the same on all ranks."""
    shard: tuple[int, int] = (0, 1)
    """Rank and world size, for pipelines that share themselves out."""
    careful: bool = False
    may_skip: bool = True
    """Whether the dataset's own `skip` leads to a position of this epoch."""
    digest: bool = False
    """Whether the first global batch carries a fingerprint of its items."""

    def reader(self, seed: int | None = None, *, alone: bool = True, quiet: bool = False) -> ItemReader:
        """Return what reads the items; `alone`: no other worker reads the same dataset."""
        recipe = self.recipe
        return ItemReader(
            self.dataset,
            recipe.block,
            self.seed if seed is None else seed,
            self.pipeline,
            self.shard,
            careful=self.careful,
            aligned=recipe.aligned,
            may_skip=self.may_skip and alone,
            quiet=quiet,
        )


class _WorkerDataset(IterableDataset[GlobalBatch]):
    """The dataset of a worker: the script's dataset, made into messages there."""

    def __init__(self, read: StreamRead, workers: Sequence[WorkerPosition]) -> None:
        self.dataset = read.dataset
        self.read = read
        self.workers = workers
        """One for each worker, in the order in which they hand out."""
        self.seed: int | torch.Tensor = 0
        """That of the pass; in memory that is shared, for workers that stay."""

    def __iter__(self) -> Iterator[GlobalBatch]:
        info, recipe = get_worker_info(), self.read.recipe
        worker = next(worker for worker in self.workers if info is None or worker.role == info.id)
        if worker.over:
            return
        marks = RecentPositions(8)
        own, block = derive_seed(int(self.seed), "worker", worker.role), recipe.block
        reader = self.read.reader(own, alone=len(self.workers) == 1, quiet=True)
        items, head = reader.open(worker.items, worker.mark, needs_head=True, note=lambda position, mark: marks.note(0, position, mark))
        digest = None
        if self.read.digest:
            first = list(islice(items, block)) if head is None else head
            items = chain(first, items) if head is None else items
            digest = fingerprint(first)
        read = worker.items - (worker.items % block if recipe.aligned else 0)
        numbers = count(worker.items // block)
        for message in recipe.messages(items, worker.items, head, digest, lambda: reseed(derive_seed(own, next(numbers)))):
            read += block
            yield message._replace(worker=WorkerPosition(worker.role, read, marks.at(0, read, block), message.end))


class _IteratorDataset(IterableDataset[Any]):
    """An iterator in the form that torch's loader takes, for its pinning of memory."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


def return_unchanged(message: Any) -> Any:
    """Return what it was given."""
    return message


class StreamBatchReader:
    """Reads with the workers and memory that the script's loader asks for; keeps workers that are persistent."""

    def __init__(self, original: DataLoader[Any]) -> None:
        self.original = original
        self._kept: tuple[_WorkerDataset, DataLoader[Any]] | None = None
        self._busy = False
        """Whether the workers that stay are at work for another pass."""
        self._stay = keeps_workers(original)

    @property
    def has_workers(self) -> bool:
        """Whether other processes do the reading."""
        return self.original.num_workers > 0

    def here(self, messages: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
        """Yield what is read in this process, in pinned memory if the script's loader asks for that."""
        if not self.original.pin_memory:
            return messages
        loader = DataLoader(
            _IteratorDataset(messages), batch_size=None, collate_fn=return_unchanged, pin_memory=True, generator=torch.Generator()
        )
        seed_loader(loader, 0)  # nothing uses it, but without one torch draws from the random state of the script
        return iter(loader)

    def in_workers(self, read: StreamRead, start: int, workers: Sequence[WorkerPosition] | None) -> Iterator[GlobalBatch]:
        """Yield what workers read; one message is taken ahead, as the workers do not know of each other's ends.

        `start` is in items. Where it was saved how far each worker was, each continues there; else one worker seeks, and several read
        from the beginning, and whole messages are dropped.
        """
        workers, dropped = self._worker_starts(read, start, workers)
        persistent = self._stay and not self._busy and not any(worker.items for worker in workers)
        kept = self._kept
        if persistent and kept is not None and kept[0].dataset is read.dataset and kept[0].read.recipe == read.recipe:
            reading, loader = kept
        else:
            reading = _WorkerDataset(read, workers)
            if persistent:
                reading.seed = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
            loader = self._loader(reading, persistent)
            self._kept = (reading, loader) if persistent else self._kept
        if isinstance(reading.seed, torch.Tensor):
            reading.seed.fill_(read.seed)
        else:
            reading.seed = read.seed
        seed_loader(loader, derive_seed(read.seed, "workers"))
        messages = self._occupied(loader) if loader.persistent_workers else iter(loader)
        return _drop_first(_mark_last(GlobalBatch(*message) for message in messages), dropped)

    def _worker_starts(
        self, read: StreamRead, start: int, workers: Sequence[WorkerPosition] | None
    ) -> tuple[Sequence[WorkerPosition], int]:
        """Return where the workers begin, and how many messages are dropped after that."""
        dataset, count = read.dataset, self.original.num_workers
        if not start:
            return [WorkerPosition(role) for role in range(count)], 0
        if workers is None and count > 1:
            warn_of_slow_seek(dataset, start // read.recipe.block, "batches")
            return [WorkerPosition(role) for role in range(count)], start // read.recipe.block
        workers = [WorkerPosition(0, start)] if workers is None else workers
        can_skip = callable(getattr(dataset, "skip", None))
        skips = count == 1 and can_skip and read.may_skip
        if not skips and any(worker.items and not worker.over and (worker.mark is None or not worker.mark.seeks) for worker in workers):
            warn_of_slow_seek(dataset, sum(worker.items for worker in workers), "epoch" if can_skip and count == 1 else "items")
        return workers, 0

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
            worker_init_fn=WorkerInit(original.worker_init_fn, tuple(worker.role for worker in reading.workers)),
            multiprocessing_context=original.multiprocessing_context,
            generator=torch.Generator(),
            prefetch_factor=original.prefetch_factor,
            persistent_workers=persistent,
        )


def _mark_last(messages: Iterator[GlobalBatch]) -> Iterator[GlobalBatch]:
    return (message._replace(end=is_last) for message, is_last in mark_last(messages))


def _drop_first(messages: Iterator[GlobalBatch], steps: int) -> Iterator[GlobalBatch]:
    """Yield what follows so many messages; the fingerprint of the first one is passed on."""
    digest = None
    for message in islice(messages, steps):
        digest = digest or message.digest
    for message in messages:
        yield message if digest is None else message._replace(digest=digest)
        digest = None


def trim_batches_to_updates(messages: Iterator[GlobalBatch], steps: int, begun: int = 0) -> Iterator[GlobalBatch]:
    """Yield the messages of full updates of `steps`, of which `begun` came before; reads two updates ahead.

    >>> list(message.sizes for message in trim_batches_to_updates((GlobalBatch([], [n], None, n == 4, None) for n in range(5)), 2))
    [[0], [1], [2], [3]]
    """
    return _mark_last(keep_full_groups(messages, steps, begun))


STREAM_STATE_KEYS = ("dataset", "random", "workers", "parts", "part", "full")
"""Names of what the position of a stream holds besides numbers."""


@dataclass(frozen=True)
class SavedStreamPosition:
    """What leads to a saved position."""

    epoch: int
    samples: int
    mark: StreamPosition | None
    workers: Sequence[WorkerPosition] | None


class StreamSource:
    """What one process reads of a stream, and the positions in it."""

    def __init__(self, original: DataLoader[Any], dataset: Any, ahead: int = 0) -> None:
        """`ahead`: how many global batches are read ahead of the script, besides the one that is always."""
        self.original = original
        self.dataset = dataset
        self.reader = StreamBatchReader(original)
        self.saved: SavedStreamPosition | None = None
        """The position that was loaded."""
        self._ahead = ahead + 4
        self._recent = RecentPositions(self._ahead)
        self._worker_positions: dict[tuple[int, int], tuple[WorkerPosition, ...]] = {}
        """How far the workers are, in the order in which they hand out, by epoch and position."""

    # -- reading --------------------------------------------------------------------------------------------------

    def messages(
        self, read: StreamRead, *, epoch: int, start: int, needs_head: bool = True, head: list[Any] | None = None
    ) -> Iterator[GlobalBatch]:
        """Yield the batches from a position on; positions are recorded, and recorded ones are used."""
        saved = self._find_position(epoch, start) if start else None
        if self.reader.has_workers:
            workers = None if saved is None else saved.workers
            return self._followed(self.reader.in_workers(read, start, workers), read.recipe, epoch, start, workers)
        mark = None if saved is None else saved.mark
        items, head = read.reader().open(start, mark, needs_head=needs_head, head=head, note=self.note(epoch))
        return self.reader.here(read.recipe.messages(items, start, head))

    def note(self, epoch: int) -> Callable[[int, StreamPosition], None]:
        """Return what records the positions of a pass."""
        return lambda position, mark: self._recent.note(epoch, position, mark)

    def can_seek(self, dataset: Any, epoch: int, start: int) -> bool:
        """Return whether this position can be found without reading everything before it."""
        saved = self._find_position(epoch, start)
        return supports_skip(dataset, epoch) or (saved is not None and saved.mark is not None and saved.mark.seeks)

    def _find_position(self, epoch: int, start: int) -> SavedStreamPosition | None:
        """Return what leads to this position, if it was loaded, or if a pass of this process got there."""
        if self.saved is not None and (self.saved.epoch, self.saved.samples) == (epoch, start):
            return self.saved
        workers = self._worker_positions.get((epoch, start))
        mark = self._recent.at(epoch, start, 0)
        return None if mark is None and workers is None else SavedStreamPosition(epoch, start, mark, workers)

    def _followed(
        self, messages: Iterator[GlobalBatch], recipe: BatchRecipe, epoch: int, start: int, begun: Sequence[WorkerPosition] | None
    ) -> Iterator[GlobalBatch]:
        """Yield the messages, and record how far the workers are after each."""
        order = tuple(begun or (WorkerPosition(role) for role in range(self.original.num_workers)))
        position = start - (start % recipe.block if recipe.aligned else 0)
        if begun is None and start:  # whole messages were dropped: nothing is known of the workers
            yield from messages
            return
        for message in messages:
            position += recipe.block
            worker = WorkerPosition(*message.worker)
            index = next(index for index, other in enumerate(order) if other.role == worker.role)
            order = (*order[index + 1 :], *order[:index], worker)
            self._worker_positions[epoch, position] = order
            if len(self._worker_positions) > self._ahead:
                del self._worker_positions[next(iter(self._worker_positions))]
            yield message

    # -- positions ------------------------------------------------------------------------------------------------

    def state(self, epoch: int, position: int, recipe: BatchRecipe) -> dict[str, Any]:
        """Return what leads back to a position, in plain data."""
        order = self._worker_positions.get((epoch, position))
        if order is not None:
            return {"workers": [_encode_worker_position(worker) for worker in order]}
        if self.reader.has_workers:
            return {}
        return encode_stream_position(self._recent.at(epoch, position, recipe.block))

    def check(self, state: Mapping[str, Any]) -> SavedStreamPosition:
        """Return the position in a saved state; raise a `ConfigError` where it cannot be one. Change nothing."""
        name = type(self.dataset).__name__
        given = state.get("workers")
        if given is not None and (not isinstance(given, list) or not all(_is_worker_position(worker) for worker in given)):
            raise ConfigError(f"the state of a loader of {name} says how far its workers were, in a way that cannot be read")
        workers = [
            WorkerPosition(worker["role"], worker["items"], decode_stream_position(worker), worker["over"]) for worker in given or []
        ]
        roles = sorted(worker.role for worker in workers)
        if roles != list(range(len(roles))):
            raise ConfigError(f"the state of a loader of {name} has workers {roles}: each is there once, from 0")
        mark = decode_stream_position(state)
        seeks = any(position is not None and position.seeks for position in (mark, *(worker.mark for worker in workers)))
        if seeks and not callable(getattr(self.dataset, "load_state_dict", None)):
            raise ConfigError(
                f"the state of a dataset was saved with this position, and {name} has no load_state_dict: give the loader the same dataset"
            )
        return SavedStreamPosition(state["epoch"], state["samples"], mark, None if given is None else workers)

    def load(self, saved: SavedStreamPosition) -> None:
        """Let a pass that begins at that position continue there; warn if another number of workers reads in another order."""
        workers, mark, count = saved.workers, saved.mark, self.original.num_workers
        before, now = len(workers) if workers is not None else 1 if mark is not None else count, max(1, count)
        if max(1, before) != now and saved.samples:
            get_logger(__name__).warning(
                f"the position of {type(self.dataset).__name__} was saved with {before} workers, and there are {now} now: several "
                "workers read in another order, so in this epoch some samples may come twice and others never. Use num_workers as it was."
            )
        if workers is not None and len(workers) != count:
            mark = workers[0].mark if len(workers) == 1 else None
            workers = None
        elif workers is None and mark is not None and count == 1:
            workers = [WorkerPosition(0, saved.samples, mark)]
        self.saved = SavedStreamPosition(saved.epoch, saved.samples, mark, workers)


def _encode_worker_position(worker: WorkerPosition) -> dict[str, Any]:
    return {"role": worker.role, "items": worker.items, "over": worker.over, **encode_stream_position(worker.mark)}


def _is_worker_position(worker: Any) -> bool:
    if not isinstance(worker, Mapping) or not {"role", "items", "over"} <= set(worker) <= {"role", "items", "over", "dataset", "random"}:
        return False
    numbers = all(type(worker[name]) is int and 0 <= worker[name] < 2**53 for name in ("role", "items"))
    return numbers and isinstance(worker["over"], bool)
