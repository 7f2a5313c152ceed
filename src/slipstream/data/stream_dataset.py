"""Iterable datasets: how one is sharded over ranks, and how its items are read from any position.

A dataset may be sharded already, offer a protocol (`shard` with `num_shards`, `split_by_rank`, a datapipe with `sharding_filter`), or
neither; finding out reads no item. Items are read one global batch at a time inside random states of the reader's own. A position is
reached by the dataset's saved `state_dict`, else by its `skip(n)` where that gives the same items, else by reading and dropping what
comes before, with a warning because it takes time. `skip(n)` is not trusted in a later epoch of a dataset that orders itself by epoch,
and where random numbers are drawn the first block is compared with what was saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from slipstream.data.random_state import RandomStates, RandomStateScope, decode_random_states, digest_random_states, encode_random_states
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = [
    "ItemReader", "RecentPositions", "ShardDecision", "StreamPosition", "decode_stream_position", "encode_stream_position",
    "has_exact_state", "iterate_blocks", "keeps_own_state", "prepare_datapipe", "shard_dataset", "supports_skip", "warn_of_slow_seek",
]


_RANK_NAMES = ("rank", "process_index")
_WORLD_NAMES = ("world_size", "num_replicas", "num_processes")


@dataclass(frozen=True)
class ShardDecision:
    """What a dataset said."""

    dataset: Any
    """What this rank reads: its own part, or everything where `own` is False."""
    own: bool
    reason: str
    """Why, for a message; it goes on after the name of the dataset."""
    doubt: str = ""
    """What looks wrong or costs time, for a warning."""


def shard_dataset(dataset: Any, rank: int, world_size: int) -> ShardDecision:
    """Return what this rank reads of a dataset, as far as the dataset says.

    >>> shard_dataset(iter([1, 2]), 0, 2)
    ShardDecision(dataset=<list_iterator object at ...>, own=False, reason='does not say how to share it out', doubt='')
    """
    return _find_existing_shard(dataset, rank, world_size) or _shard_by_protocol(dataset, rank, world_size)


def _find_existing_shard(dataset: Any, rank: int, world_size: int) -> ShardDecision | None:
    split = getattr(dataset, "_distributed", None)  # left by datasets.distributed.split_dataset_by_node
    if split is not None:
        place = getattr(split, "rank", None), getattr(split, "world_size", None)
        return _check_existing_shard(dataset, "was split by node already", place, (rank, world_size))
    own = _first_number(dataset, _RANK_NAMES)
    world = _first_number(dataset, _WORLD_NAMES)
    if own is None or world is None or world[1] <= 1:
        return None
    reason = f"has {own[0]}={own[1]} and {world[0]}={world[1]}, so it is shared out already"
    return _check_existing_shard(dataset, reason, (own[1], world[1]), (rank, world_size))


def _check_existing_shard(dataset: Any, reason: str, found: tuple[Any, Any], here: tuple[int, int]) -> ShardDecision:
    doubt = f"it is set up for rank {found[0]} of {found[1]}, but this is rank {here[0]} of {here[1]}: data may be read twice, or never"
    return ShardDecision(dataset, True, reason, "" if found == here else doubt)


def _first_number(dataset: Any, names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = getattr(dataset, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return name, value
    return None


def _shard_by_protocol(dataset: Any, rank: int, world_size: int) -> ShardDecision:
    if callable(getattr(dataset, "split_by_rank", None)):
        part = dataset.split_by_rank(rank, world_size)
        return ShardDecision(dataset if part is None else part, True, "gives each process its part (split_by_rank)")
    count = _first_number(dataset, ("num_shards", "n_shards"))
    if count is not None and callable(getattr(dataset, "shard", None)):
        name, shards = count
        if shards and shards % world_size == 0:
            part = dataset.shard(num_shards=world_size, index=rank)
            return ShardDecision(part, True, f"has {name}={shards}: each process reads its own shards")
        doubt = (
            f"it has {name}={shards}, which {world_size} processes cannot share evenly, so they share its samples. Stored in a multiple of "
            f"{world_size} shards, each process would read its own"
        )
        return ShardDecision(dataset, False, f"has {name}={shards}, no multiple of the {world_size} processes", doubt)
    if _has_sharding_filter(dataset):
        return ShardDecision(dataset, True, "is a pipeline with a sharding_filter")
    return ShardDecision(dataset, False, "does not say how to share it out")


def _has_sharding_filter(dataset: Any) -> bool:
    if not isinstance(dataset, IterDataPipe):
        return False
    waiting = [traverse_dps(dataset)]
    while waiting:
        for pipe, inner in waiting.pop().values():
            if callable(getattr(pipe, "apply_sharding", None)):
                return True
            waiting.append(inner)
    return False


def prepare_datapipe(dataset: Any, seed: int, rank: int, world_size: int) -> None:
    """Seed the shuffling of a pipeline of torch and tell its filter who reads, before a pass; other datasets are left alone.

    Ranks come first and their workers second, so that an item is read by the same rank however many workers there are.
    """
    if not isinstance(dataset, IterDataPipe):
        return
    apply_random_seed(dataset, torch.Generator().manual_seed(seed))
    worker = get_worker_info()
    if worker is None:
        apply_sharding(dataset, world_size, rank)
    else:
        apply_sharding(dataset, world_size * worker.num_workers, worker.id * world_size + rank)


_NOT_SAVED: Any = ...
"""In place of a state that was not saved, which may be None; it stays the same object between processes."""


@dataclass(frozen=True)
class StreamPosition:
    """What leads back to the end of a block."""

    dataset: Any = _NOT_SAVED
    """The state of a dataset that keeps one."""
    random: RandomStates | None = None
    """The random states of the reader, if any number was drawn."""
    after: str | None = None
    """A digest of those that the block after it left; of a mark that was saved."""
    block: int = 0
    """How large that block was."""

    @property
    def seeks(self) -> bool:
        """Whether nothing has to be read to get there."""
        return self.dataset is not _NOT_SAVED


class RecentPositions:
    """The marks of the last few blocks of a pass: a reader is ahead of the script."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._marks: dict[tuple[int, int], StreamPosition] = {}

    def note(self, epoch: int, position: int, mark: StreamPosition) -> None:
        """Record that the block which ends here was read."""
        self._marks[epoch, position] = mark
        if len(self._marks) > self._keep:
            del self._marks[next(iter(self._marks))]

    def at(self, epoch: int, position: int, block: int) -> StreamPosition | None:
        """Return the mark of a position, with what is known of the block after it."""
        mark = self._marks.get((epoch, position))
        later = [place for place in self._marks if place[0] == epoch and place[1] > position]
        following = self._marks[min(later)].random if later else None
        if mark is None or following is None or mark.random is None:
            return mark
        return StreamPosition(mark.dataset, mark.random, digest_random_states(following), block)


def encode_stream_position(mark: StreamPosition | None) -> dict[str, Any]:
    """Return a mark as plain data."""
    found: dict[str, Any] = {}
    if mark is not None and mark.dataset is not _NOT_SAVED:
        found["dataset"] = mark.dataset
    if mark is not None and mark.random is not None:
        found["random"] = {**encode_random_states(mark.random), "after": mark.after, "block": mark.block}
    return found


def decode_stream_position(state: Mapping[str, Any]) -> StreamPosition | None:
    """Return the mark in a saved state; None where there is none, a `ConfigError` where it cannot be one."""
    random = state.get("random")
    if random is None:
        return StreamPosition(state["dataset"]) if "dataset" in state else None
    after, block = (random.get("after"), random.get("block")) if isinstance(random, Mapping) else (0, 0)
    if not (after is None or isinstance(after, str)) or isinstance(block, bool) or not isinstance(block, int):
        raise ConfigError(f"the random state of a stream that was saved cannot be read: {str(random)[:80]}")
    return StreamPosition(state.get("dataset", _NOT_SAVED), decode_random_states(random), after, block)


def keeps_own_state(dataset: Any) -> bool:
    """Return whether the position that a dataset keeps itself leads back exactly.

    One that can also skip may leave out of its state what a shuffle holds in memory, so its `skip` is preferred; of a stream of Hugging
    Face datasets it is known which stages do that.
    """
    if not all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    return not callable(getattr(dataset, "skip", None)) or has_exact_state(dataset)


# Stages of streams of `datasets` whose state is the place in their sources: all but the shuffle buffer, whose examples are not saved, and
# batched maps over Arrow tables. The names are private; tried with datasets 3.0 to 5.2. A stage that is not listed means that the stream
# is read up to the position, as before; tests/data/test_hub_datasets.py notices a change of names.
_EXACT_STAGES = frozenset({
    "ArrowExamplesIterable", "CyclingMultiSourcesExamplesIterable", "ExamplesIterable", "FilteredExamplesIterable",
    "FormattedExamplesIterable", "MappedExamplesIterable", "RandomlyCyclingMultiSourcesExamplesIterable", "RebatchedArrowExamplesIterable",
    "RepeatExamplesIterable", "SelectColumnsIterable", "SkipExamplesIterable", "StepExamplesIterable", "TakeExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
})  # fmt: skip


def has_exact_state(dataset: Any) -> bool:
    """Return whether this is a stream of Hugging Face datasets whose `state_dict` leads back exactly."""
    if not _is_hub_stream(dataset):
        return False
    waiting: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        stage = waiting.pop()
        if type(stage).__name__ not in _EXACT_STAGES or (getattr(stage, "batched", False) and getattr(stage, "formatting", None)):
            return False
        waiting.extend(getattr(stage, "ex_iterables", ()))
        if getattr(stage, "ex_iterable", None) is not None:
            waiting.append(stage.ex_iterable)
    return True


def _is_hub_stream(dataset: Any) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets" and callable(getattr(dataset, "load_state_dict", None))


def supports_skip(dataset: Any, epoch: int) -> bool:
    """Return whether `skip(n)` of a dataset leads to a position of an epoch.

    One that is told the epoch may order a later one anew, while what its `skip` gives keeps the order of the first: so those of datasets do
    with their shards.
    """
    return callable(getattr(dataset, "skip", None)) and not (epoch and callable(getattr(dataset, "set_epoch", None)))


def iterate_blocks(
    dataset: Any,
    block: int,
    scope: RandomStateScope,
    *,
    careful: bool = False,
    first: int | None = None,
    after: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """Yield the items of a stream, drawn a block at a time inside random states of the reader's own.

    Unless `careful`, a stream that drew no random number for its first block is trusted not to draw any. `first` is the size of the first
    block; `after` is called after each one with the number of items read so far.
    """
    with scope:
        stream = iter(dataset)
    wanted, read, trusted = block if first is None else first, 0, False
    while not trusted:
        with scope:
            items = list(islice(stream, wanted))
        read += len(items)
        if after is not None and items:
            after(read)
        yield from items
        if len(items) < wanted:
            return
        wanted = block
        trusted = not (careful or scope.used)
    yield from stream


def warn_of_slow_seek(dataset: Any, count: int, what: str) -> None:
    """Warn of a seek that has to read."""
    name = type(dataset).__name__
    why = {
        "items": "it has no skip(n) to seek with",
        "epoch": "it orders itself by epoch, and its skip(n) keeps the order of the first one",
        "batches": "the order of several workers can only be found by reading",
        "drawn": "it draws random numbers for every item, which seeking would leave out",
    }[what]
    counted = "batches" if what == "batches" else "items"
    get_logger(__name__).warning(f"{count} {counted} of {name} are read and dropped to get to the position: {why}")


@dataclass(frozen=True)
class ItemReader:
    """Reads a stream in one process."""

    dataset: Any
    block: int
    seed: int
    """Of the random states that items are drawn in."""
    pipeline: int
    """The seed of pipelines of torch."""
    place: tuple[int, int] = (0, 1)
    """Rank and world size, for pipelines that share themselves out."""
    careful: bool = False
    aligned: bool = True
    """Whether blocks begin at multiples of their size, wherever reading begins."""
    may_skip: bool = True
    """Whether `skip` means what it says in this epoch (`supports_skip`); where several workers share a dataset, that is the dataset's
    affair.
    """
    quiet: bool = False
    """Whether it says nothing when it reads to seek."""

    def read(
        self,
        dataset: Any,
        position: int = 0,
        scope: RandomStateScope | None = None,
        note: Callable[[int, StreamPosition], None] | None = None,
    ) -> Iterator[Any]:
        """Yield the items of a dataset that stands at a position."""
        prepare_datapipe(dataset, self.pipeline, *self.place)
        scope = RandomStateScope(self.seed) if scope is None else scope
        stateful = dataset is self.dataset and keeps_own_state(dataset)
        seekable = stateful or self._skip is not None

        def after(read: int) -> None:
            if note is not None and (stateful or (seekable and scope.used)):
                state = copy.deepcopy(dataset.state_dict()) if stateful else _NOT_SAVED
                note(position + read, StreamPosition(state, scope.capture() if scope.used else None))

        careful, first = self.careful or (stateful and note is not None), self.block - self._phase(position)
        return iterate_blocks(dataset, self.block, scope, careful=careful, first=first, after=None if note is None else after)

    def open(
        self,
        start: int,
        saved: StreamPosition | None,
        *,
        needs_head: bool,
        head: list[Any] | None = None,
        note: Callable[[int, StreamPosition], None] | None = None,
    ) -> tuple[Iterator[Any], list[Any] | None]:
        """Return the items from a position on, with a head (the first block, if needed) where they stand there; else from the first on.

        A `head` that was read already is not read again: a dataset that keeps a position of its own stands behind it.
        """
        if not start:
            return self.read(self.dataset, note=note), None
        if head is None:
            head = list(islice(self.read(self.dataset), self.block)) if needs_head else []
        if saved is not None and note is not None:
            note(start, saved)
        if saved is not None and saved.dataset is not _NOT_SAVED:
            self.dataset.load_state_dict(copy.deepcopy(saved.dataset))
            scope = RandomStateScope(self.seed)
            if saved.random is not None:
                scope.resume(saved.random)
            return self._read_on(self.read(self.dataset, start, scope, note)), head
        found = self._skipped(start, saved, note)
        if found is not None:
            return found, head
        if not self.quiet:
            warn_of_slow_seek(self.dataset, start, self._why_not)
        return islice(self.read(self.dataset, note=note), start, None), head

    def _read_on(self, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the items; a stream of Hugging Face datasets then forgets the position, which it would begin at again."""
        for item in items:
            if _is_hub_stream(self.dataset):
                self.dataset.load_state_dict({})
            yield item
            break
        yield from items

    def _skipped(
        self, start: int, saved: StreamPosition | None, note: Callable[[int, StreamPosition], None] | None
    ) -> Iterator[Any] | None:
        """Yield the items after what the dataset skips by itself; None where it cannot, or where it would draw other random numbers."""
        skip = self._skip
        if skip is None:
            return None
        if saved is None or saved.random is None:
            return self._after_skipping(skip, start, RandomStateScope(self.seed), note)
        if saved.after is None or saved.block != self.block or self._phase(start):  # there is nothing to compare with
            return None
        for captured in (None, saved.random):
            scope = RandomStateScope(self.seed)
            if captured is not None:
                scope.resume(captured)
            items = self._after_skipping(skip, start, scope, note)
            first = list(islice(items, self.block))
            if digest_random_states(scope.capture()) == saved.after:
                return chain(first, items)
        return None

    @property
    def _skip(self) -> Callable[[int], Any] | None:
        skip = getattr(self.dataset, "skip", None)
        return skip if self.may_skip and callable(skip) else None

    @property
    def _why_not(self) -> str:
        """Why this position is not found by `skip`."""
        if self._skip is not None:
            return "drawn"
        return "epoch" if callable(getattr(self.dataset, "skip", None)) else "items"

    def _phase(self, position: int) -> int:
        return position % self.block if self.aligned else 0

    def _after_skipping(
        self, skip: Callable[[int], Any], start: int, scope: RandomStateScope, note: Callable[[int, StreamPosition], None] | None
    ) -> Iterator[Any]:
        with scope:
            rest = skip(start)
        return self.read(rest, start, scope, note)
