"""`StreamLoader`: the prepared loader of iterable datasets.

Who reads what is decided once, by asking the dataset.

* One process reads the stream as it is.
* `own`: each rank reads a part of its own. Before each batch the ranks exchange sizes in one small guarded call; a rank that has run out is
  handed a batch that counts nothing until all are done, and a rank that leaves the loop alone is named.
* `turns`: every rank reads the whole stream and takes its slice of each global batch. Before the first one ranks compare what they read: a
  stream that was sharded without saying so is read as `own`, with a warning, so that no data is lost.

What a stream draws is a function of (seed, epoch), and the script's random state stays as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from slipstream.data.dispatch_loader import build_dispatch_loader
from slipstream.data.epoch_state import EpochPass, LoadedPosition
from slipstream.data.fingerprint import fingerprint
from slipstream.data.loader import HandedBatch, PreparedLoader
from slipstream.data.options import DataLoaderConfiguration, DataRank
from slipstream.data.order import announce_epoch
from slipstream.data.plan import BatchPlan, ItemSplitPlan, LastBatchPolicy, RoundRobinPlan, count_samples, split_effective_batch
from slipstream.data.random_state import RandomStateScope, derive_seed
from slipstream.data.stream_dataset import ShardDecision, shard_dataset, warn_of_slow_seek
from slipstream.data.stream_reader import (
    STREAM_STATE_KEYS,
    BatchRecipe,
    GlobalBatch,
    StreamSource,
    return_unchanged,
    trim_batches_to_updates,
)
from slipstream.distributed.gradient_state import BatchShares, GradientState
from slipstream.distributed.scatter import agree_or_raise, scatter
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["StreamLoader", "StreamMode", "build_stream_loader", "warn_of_slice_fn"]

StreamMode = Literal["whole", "own", "turns"]
"""Who reads what: one process everything, each rank a part of its own, or every rank everything by turns."""


def build_stream_loader(
    loader: DataLoader[Any],
    *,
    place: DataRank,
    config: DataLoaderConfiguration,
    seed: int,
    device: torch.device | None,
    put_on_device: bool,
    gradient_state: GradientState,
    effective_batch_size: int | None = None,
    slice_fn: Callable[..., Any] | None = None,
) -> PreparedLoader:
    """What `prepare` makes of the loader of an `IterableDataset`; says which way it took."""
    settings: dict[str, Any] = {
        "place": place,
        "config": config,
        "seed": seed,
        "device": device,
        "put_on_device": put_on_device,
        "gradient_state": gradient_state,
    }
    if config.dispatch_batches:
        return build_dispatch_loader(loader, effective_batch_size=effective_batch_size, slice_fn=slice_fn, **settings)
    if slice_fn is not None:
        warn_of_slice_fn()
    per_rank = None
    if effective_batch_size is not None:
        per_rank, settings["steps_per_update"] = split_effective_batch(
            effective_batch_size, loader.batch_size, place.world_size, split=config.split_batches
        )
    dataset, name = loader.dataset, type(loader.dataset).__name__
    if place.world_size == 1:
        return StreamLoader(loader, way="whole", dataset=dataset, samples_per_rank=per_rank, **settings)
    answer = shard_dataset(dataset, place.rank, place.world_size)
    _log_shard_decision(name, answer)
    return StreamLoader(loader, way="own" if answer.own else "turns", dataset=answer.dataset, samples_per_rank=per_rank, **settings)


def warn_of_slice_fn() -> None:
    """One line about an argument without effect."""
    get_logger(__name__).warning("slice_fn_for_dispatch has no effect without dispatch_batches=True: each rank collates its samples")


def _log_shard_decision(name: str, answer: ShardDecision) -> None:
    logger = get_logger(__name__)
    if answer.own:
        logger.info(f"{name} {answer.reason}; each process reads a part of its own")
    else:
        logger.info(f"{name} {answer.reason}; every process reads all of it and keeps its slice of each global batch")
    if answer.doubt:
        logger.warning(f"{name} {answer.reason}, but {answer.doubt}" if answer.own else f"{name} is read by every process: {answer.doubt}")


class StreamLoader(PreparedLoader):
    """A prepared loader of iterable data."""

    def __init__(
        self, original: DataLoader[Any], *, way: StreamMode, dataset: Any, samples_per_rank: int | None = None, **settings: Any
    ) -> None:
        """`dataset` is what this rank reads; `samples_per_rank` the batch size, if that is not what the script's loader says."""
        super().__init__(original, **settings)
        self.way: StreamMode = way
        self._dataset = dataset
        self._per_rank = samples_per_rank
        self._compared = way != "turns"
        self._nominal = 1
        self._full = 0
        """Samples in a full batch of parts that come in batches: the largest of the first ones; 0 as long as none was read."""
        self._source = self._make_source()
        self._recipe()  # what cannot be is said now

    def _make_source(self) -> StreamSource:
        return StreamSource(self.original, self._dataset, 2 * (self.steps_per_update or 0))

    # -- how batches are made ---------------------------------------------------------------------------------------

    @property
    def policy(self) -> LastBatchPolicy:
        """What happens to a short last batch of ranks that take turns: `even`, `exact` or `ragged` (see `plan.py`)."""
        return "ragged" if self.uneven else "even" if self.config.even_batches else "exact"

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples per batch and rank; None where items are batches already."""
        return None if self.original.batch_size is None else self._given[0]

    def _recipe(self) -> BatchRecipe:
        """How this rank makes its batches of what it reads."""
        original, place, split = self.original, self.place, self.config.split_batches
        own = self.way == "own"
        ranks, rank = (1, 0) if own else (place.world_size, place.rank)
        if original.batch_size is None:
            if split and not own:
                return BatchRecipe(ItemSplitPlan(ranks, original.collate_fn), 1, (rank,), return_unchanged, batched=False)
            dealing = RoundRobinPlan(ranks, None, self.policy, count_samples)
            return BatchRecipe(dealing, ranks, (rank,), original.collate_fn, batched=False)
        size = self._size
        if own:
            size = max(1, BatchPlan(place.world_size, size, "exact").given[place.rank])
        plan = BatchPlan(ranks, size, self.policy, original.drop_last)
        return BatchRecipe(plan, size, (rank,), original.collate_fn)

    @property
    def _size(self) -> int:
        """Samples in a full batch of all ranks."""
        assert self.original.batch_size is not None
        if self._per_rank is not None:
            return self._per_rank * self.place.world_size
        return self.original.batch_size * (1 if self.config.split_batches else self.place.world_size)

    # -- what the base asks ---------------------------------------------------------------------------------------

    @property
    def _given(self) -> tuple[int, ...]:
        ranks = self.place.world_size
        if self.original.batch_size is None:
            return (self._nominal,) * ranks
        plan = BatchPlan(ranks, self._size, self.policy if self.way == "turns" else "exact")
        return plan.given if plan.full is None else plan.full.given

    @property
    def _stride(self) -> int:
        if self.original.batch_size is not None:
            return self._size
        return 1 if self._cuts_items else self.place.world_size

    @property
    def _cuts_items(self) -> bool:
        return self.original.batch_size is None and self.config.split_batches and self.way != "own"

    def _count(self, start: int) -> int:
        """As far as the dataset has a length and all ranks read the same one."""
        if self.way == "own":
            raise TypeError(
                f"the loader of {type(self._dataset).__name__} has no length: each process reads a part of its own, and all go on until "
                "the longest one ends, which shows when it is there. Iterate, and ask accelerator.gradient_state.end_of_dataloader."
            )
        length = len(self._dataset)
        if self._drops_updates:
            length -= length % (self._size * self._drops_updates)
        samples = max(0, length - start)
        plan: Any = self._recipe().plan
        if isinstance(plan, BatchPlan):
            return plan.count(samples, self.place.rank, plan.phase(start))
        return samples if self._cuts_items else int(plan.count(samples, self.place.rank))

    @property
    def _drops_updates(self) -> int:
        """Batches of an update, where short ones are dropped; else 0."""
        return self.steps_per_update or 0 if self.original.drop_last and self.way != "own" else 0

    # -- reading --------------------------------------------------------------------------------------------------

    def _batches(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        announce_epoch([self._dataset], epoch)
        if self.way == "own":
            return self._own_batches(epoch, self._messages(epoch, self._own_start(start)), start)
        if not self._compared:
            return self._compare_first(epoch, start)
        return self._shared_batches(self._messages(epoch, start), start)

    def _own_start(self, start: int) -> int:
        """A position of all ranks together, in items of this rank's own part: it has read as many batches as the others."""
        return start // self._stride * self._recipe().block

    def _shared_batches(self, messages: Iterator[GlobalBatch], start: int) -> Iterator[HandedBatch]:
        """All ranks read the same: what is known of the stream is known to all."""
        if steps := self._drops_updates:
            messages = trim_batches_to_updates(messages, steps, start // self._size % steps)
        for message in messages:
            self._note(message)
            yield message.batches[0], message.shares, message.end, 0 if message.end else None

    def _note(self, message: GlobalBatch) -> None:
        if message.shares is None and self.original.batch_size is None:
            self._nominal = message.sizes[0]

    def _messages(self, epoch: int, start: int, *, digest: bool = False, head: list[Any] | None = None) -> Iterator[GlobalBatch]:
        """What this rank reads, after so many items."""
        own = self.way == "own"
        return self._source.messages(
            self._dataset,
            self._recipe(),
            epoch=epoch,
            start=start,
            seed=self._reading_seed(epoch),
            pipeline=derive_seed(self.seed, epoch, "pipeline"),
            place=(self.place.rank, self.place.world_size) if own else (0, 1),
            careful=self.way == "turns",
            needs_head=self._needs_head,
            head=head,
            digest=digest,
        )

    @property
    def _needs_head(self) -> bool:
        """Whether the start of the pass matters: a short last batch is completed from it, or it says how large a full batch is."""
        return (self.policy == "even" and self.way == "turns") or self.original.batch_size is None

    def _reading_seed(self, epoch: int) -> int:
        """The same on all ranks that read the same."""
        return derive_seed(self.seed, epoch, "stream", self.place.rank) if self.way == "own" else derive_seed(self.seed, epoch, "stream")

    # -- position -------------------------------------------------------------------------------------------------

    _extras = STREAM_STATE_KEYS

    @property
    def _kind(self) -> str:
        return "stream" if self.original.batch_size is not None else "ready"

    @property
    def _parts_of_their_own(self) -> int:
        return self.place.world_size if self.way == "own" else 1

    def _moved(self, turn: EpochPass) -> int:
        return turn.start + turn.done * self._stride if self.way == "own" else super()._moved(turn)

    def _place_state(self, turn: EpochPass | None, samples: int) -> dict[str, Any]:
        """`dataset` is the state of a dataset that keeps one and cannot skip; `parts`, how many processes read parts of their own.

        With parts of their own, it is that of one of them (`part`), and of no use to another.
        """
        parts: dict[str, Any] = {}
        if self.way == "own":
            parts, samples = {"parts": self.place.world_size, "part": self.place.rank, "full": self._full}, self._own_start(samples)
        return parts if turn is None or not samples else {**parts, **self._source.state(turn.epoch, samples, self._recipe())}

    def _check_place(self, state: Mapping[str, Any]) -> None:
        parts, part, full = state.get("parts", 1), state.get("part", 0), state.get("full", 0)
        if not type(parts) is type(part) is type(full) is int or not 0 <= part < parts or full < 0:
            raise ConfigError(
                f"the state of a loader is that of part {part!r} of {parts!r}, with {full!r} samples in a full batch: these are whole "
                "numbers, and parts of processes are counted from 0"
            )
        self._source.check(state)

    def _load_place(self, position: LoadedPosition) -> LoadedPosition:
        ranks = self.place.world_size
        parts = position.extra.get("parts", ranks if self.way == "own" else None)
        if position.samples and not position.left and parts not in (None, ranks):
            get_logger(__name__).warning(
                f"the position of {type(self._dataset).__name__} cannot be carried to {ranks} processes: {parts} of them read parts of "
                f"their own when it was saved, which are shared out in another way now. Epoch {position.epoch} begins at its start, so "
                f"what was read of it comes again; run {parts} processes to go on at the position."
            )
            return replace(position, batches=0, samples=0, extra={})
        samples, extra = position.samples, position.extra
        if self.way == "own":
            samples, self._full = self._own_start(samples), extra.get("full", 0)
            self._nominal = self._full or 1
            if extra.get("part") != self.place.rank:  # that of another process: each finds its own place by seeking
                extra = {}
        self._source.load(self._source.check({"epoch": position.epoch, "samples": samples, **extra}))
        return position

    # -- by turns: is it the same stream everywhere? -----------------------------------------------------------------

    def _compare_first(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        """The first pass of ranks that take turns: they compare what they read before anything is handed out."""
        if self._source.engine.has_workers:
            return self._compare_in_workers(epoch, start)
        recipe, pipeline = self._recipe(), derive_seed(self.seed, epoch, "pipeline")
        reader = self._source.reader(self._dataset, recipe, self._reading_seed(epoch), pipeline, (0, 1), careful=True)
        items = reader.read(self._dataset, note=self._source.note(epoch))
        head = self._attempt(lambda: list(islice(items, recipe.block)))
        same = self._agree(epoch, head if isinstance(head, Exception) else fingerprint(head))
        if start and same and self._source.can_seek(self._dataset, epoch, start):
            return self._shared_batches(self._messages(epoch, start, head=head), start)
        recipe, items = self._recipe(), chain(head, items)
        position = start = start if same else self._own_start(start)
        if start:
            warn_of_slow_seek(self._dataset, start, "items")
        messages = self._source.engine.here(recipe.messages(items, start))
        return self._shared_batches(messages, position) if same else self._own_batches(epoch, messages, start)

    def _compare_in_workers(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        messages = self._messages(epoch, start, digest=True)
        first = self._attempt(lambda: next(messages, None))
        found = first if isinstance(first, Exception) or first is None else first.digest
        if not self._agree(epoch, found):  # what came is slices: begin again, in workers that know nothing of this attempt
            del messages
            return self._own_batches(epoch, self._messages(epoch, self._own_start(start)), start)
        return self._shared_batches(chain([] if first is None else [first], messages), start)

    def _attempt(self, read: Callable[[], Any]) -> Any:
        """What was read, or what went wrong: the other ranks have to hear of that."""
        try:
            return read()
        except Exception as error:  # handed on: every rank raises
            return error

    def _agree(self, epoch: int, found: bytes | Exception | None) -> bool:
        """Whether all ranks read the same; if not, each has a part of its own from now on."""
        place = self.place
        told = agree_or_raise(place.channel(), place.limits, found, operation="comparison of streams", condition=self._name(epoch, 0))
        self._compared = True
        if len(set(told)) == 1:
            return True
        self.way = "own"
        get_logger(__name__).warning(
            f"the processes read different data from {type(self._dataset).__name__}, so it is shared out already: each process keeps "
            "what it reads. Give the dataset `rank` and `world_size` attributes to say so, and nothing is compared. If it should "
            "have been the same, look for random numbers that do not come from Python's, numpy's or torch's global generators."
        )
        return False

    # -- each rank has a part of its own -----------------------------------------------------------------------------

    def _own_batches(self, epoch: int, messages: Iterator[GlobalBatch], start: int) -> Iterator[HandedBatch]:
        """Ranks tell each other how much they have; those that have run out go on with what counts nothing until all have."""
        if self.uneven:  # the script deals with ranks that end at different times: nobody has to know of the others
            yield from ((message.batches[0], None, message.end, 0 if message.end else None) for message in messages)
            return
        place = self.place
        channel, limits, ranks = place.channel, place.limits, place.world_size
        batch: Any = None
        held = 0
        full: tuple[int, ...] = () if self.original.batch_size is None and not (start and self._full) else self._given
        previous: BatchShares | None = None
        step = 0
        while True:
            found = self._attempt(lambda: next(messages, None))
            if found is None and step == 0 and start:
                found = self._attempt(lambda: self._last_of_part(epoch))
                batch, held, found = (found.batches[0], found.sizes[0], None) if isinstance(found, GlobalBatch) else (None, 0, found)
            if isinstance(found, GlobalBatch):
                batch, held = found.batches[0], found.sizes[0]
            count, more = (found.sizes[0], not found.end) if isinstance(found, GlobalBatch) else (0, False)
            own: Any = found if isinstance(found, Exception) else (count, more, held)
            told = agree_or_raise(channel(), limits, own, operation="next batch", condition=self._name(epoch, step))
            real, given = tuple(entry[0] for entry in told), [entry[2] for entry in told]
            if not any(real):
                return
            if step == 0:
                full = full or (max(real),) * ranks
                self._nominal = self._full = max(full)
                batch = self._lend(epoch, batch, given)
                held = given[place.rank]
            shares = None if real == full else BatchShares(tuple(given), real, True, sum(full))
            previous = shares = previous if shares == previous else shares
            end = not any(entry[1] for entry in told)
            yield batch, shares, end, 0 if end else None
            if end:
                return
            step += 1

    def _last_of_part(self, epoch: int) -> GlobalBatch | None:
        """The last batch of this rank's part, with which it goes on after its end: of a pass that begins after that, it is read for it."""
        with RandomStateScope(0):  # what is drawn for it has no meaning
            return next(iter(deque(self._messages(epoch, 0), maxlen=1)), None)

    def _lend(self, epoch: int, batch: Any, given: list[int]) -> Any:
        """A rank that has no data at all gets a batch of one that has, to go on with."""
        if all(given):
            return batch
        giver, own = next(rank for rank, count in enumerate(given) if count), given[self.place.rank]
        parts = [None if count else batch for count in given] if self.place.rank == giver else None
        given[:] = [count or given[giver] for count in given]
        name = self._name(epoch, 0)
        lent = scatter(self.place.channel(), self.place.limits, parts, sender=giver, operation="loan of a batch", condition=name)
        return batch if own else lent

    def _name(self, epoch: int, step: int) -> str:
        """What ranks that are at the same batch agree on; from which line they ask for it may differ."""
        return f"batch {step} of pass {epoch} over {type(self.original.dataset).__name__}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_source": self._make_source()}
