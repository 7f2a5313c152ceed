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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal

from torch.utils.data import DataLoader

from slipstream.data.epoch_state import LoadedPosition
from slipstream.data.fingerprint import fingerprint
from slipstream.data.loader import HandedBatch, PreparedLoader, attempt
from slipstream.data.options import LoaderSettings
from slipstream.data.order import announce_epoch
from slipstream.data.plan import BatchPlan, ItemSplitPlan, RoundRobinPlan, count_pieces, count_samples
from slipstream.data.random_state import RandomStateScope, derive_seed
from slipstream.data.stream_dataset import ShardDecision, shard_dataset, supports_skip, warn_of_slow_seek
from slipstream.data.stream_reader import (
    STREAM_STATE_KEYS,
    BatchRecipe,
    GlobalBatch,
    StreamRead,
    StreamSource,
    return_unchanged,
    trim_batches_to_updates,
)
from slipstream.distributed.gradient_state import BatchShares, LoaderPass
from slipstream.distributed.scatter import agree_or_raise, scatter
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["StreamLoader", "StreamMode", "build_stream_loader"]

StreamMode = Literal["whole", "own", "turns"]
"""Who reads what: one process everything, each rank a part of its own, or every rank everything by turns."""


def build_stream_loader(loader: DataLoader[Any], settings: LoaderSettings) -> StreamLoader:
    """Build the prepared loader of an `IterableDataset`, and log who reads what."""
    data_rank, dataset = settings.data_rank, loader.dataset
    if data_rank.world_size == 1:
        return StreamLoader(loader, settings, "whole", dataset)
    decision = shard_dataset(dataset, data_rank.rank, data_rank.world_size)
    _log_shard_decision(type(dataset).__name__, decision)
    return StreamLoader(loader, settings, "own" if decision.own else "turns", decision.dataset)


def _log_shard_decision(name: str, decision: ShardDecision) -> None:
    logger = get_logger(__name__)
    if decision.own:
        logger.info(f"{name} {decision.reason}; each process reads a part of its own")
        doubt = f"{name} {decision.reason}, but {decision.doubt}"
    else:
        logger.info(f"{name} {decision.reason}; every process reads all of it and keeps its slice of each global batch")
        doubt = f"{name} is read by every process: {decision.doubt}"
    if decision.doubt:
        logger.warning(doubt)


class StreamLoader(PreparedLoader):
    """A prepared loader of iterable data."""

    def __init__(self, original: DataLoader[Any], settings: LoaderSettings, mode: StreamMode, dataset: Any) -> None:
        """`dataset` is what this rank reads."""
        super().__init__(original, settings)
        self.mode: StreamMode = mode
        self._dataset = dataset
        self._is_compared = mode != "turns"
        self._nominal = 1
        self._full = 0
        """Samples in a full batch of parts that come in batches: the largest of the first ones; 0 as long as none was read."""
        self._source = self._make_source()
        self._recipe()  # what cannot be is said now

    def _make_source(self) -> StreamSource:
        return StreamSource(self.original, self._dataset, 2 * (self.steps_per_update or 0))

    # -- how batches are made ---------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples per batch and rank; None where items are batches already."""
        return None if self.original.batch_size is None else self._given[0]

    def _recipe(self) -> BatchRecipe:
        """Return how this rank makes its batches of what it reads."""
        original, data_rank, split = self.original, self.data_rank, self.config.split_batches
        own = self.mode == "own"
        ranks, rank = (1, 0) if own else (data_rank.world_size, data_rank.rank)
        if original.batch_size is None:
            if split and not own:
                return BatchRecipe(ItemSplitPlan(ranks, original.collate_fn), 1, (rank,), return_unchanged, batched=False)
            dealing = RoundRobinPlan(ranks, None, self.policy, count_samples)
            return BatchRecipe(dealing, ranks, (rank,), original.collate_fn, batched=False)
        size = self._size
        if own:
            size = max(1, BatchPlan(data_rank.world_size, size, "exact").given[data_rank.rank])
        plan = BatchPlan(ranks, size, self.policy, original.drop_last)
        return BatchRecipe(plan, size, (rank,), original.collate_fn)

    @property
    def _size(self) -> int:
        """Samples in a full batch of all ranks."""
        assert self.original.batch_size is not None
        return self._global_batch_size(self.original.batch_size)

    # -- what the base asks ---------------------------------------------------------------------------------------

    @property
    def _given(self) -> tuple[int, ...]:
        ranks = self.data_rank.world_size
        if self.original.batch_size is None:
            return (self._nominal,) * ranks
        return BatchPlan(ranks, self._size, self.policy if self.mode == "turns" else "exact").full_counts

    @property
    def _stride(self) -> int:
        if self.original.batch_size is not None:
            return self._size
        return 1 if self._cuts_items else self.data_rank.world_size

    @property
    def _cuts_items(self) -> bool:
        return self.original.batch_size is None and self.config.split_batches and self.mode != "own"

    def _count(self, start: int) -> int:
        """Return the count of batches, where the dataset has a length and all ranks read the same one."""
        if self.mode == "own":
            raise TypeError(
                f"the loader of {type(self._dataset).__name__} has no length: each process reads a part of its own, and all go on until "
                "the longest one ends, which shows when it is there. Iterate, and ask accelerator.gradient_state.end_of_dataloader."
            )
        length = len(self._dataset)
        if self._drops_updates:
            length -= length % (self._size * self._drops_updates)
        return count_pieces(self._recipe().plan, length, start, self.data_rank.rank)

    @property
    def _drops_updates(self) -> int:
        """Batches of an update, where short ones are dropped; else 0."""
        return self.steps_per_update or 0 if self.original.drop_last and self.mode != "own" else 0

    # -- reading --------------------------------------------------------------------------------------------------

    def _batches(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        announce_epoch([self._dataset], epoch)
        if self.mode == "own":
            return self._own_batches(epoch, self._messages(epoch, self._own_start(start)), start)
        if not self._is_compared:
            return self._compare_first(epoch, start)
        return self._shared_batches(self._messages(epoch, start), start)

    def _own_start(self, start: int) -> int:
        """Convert a position of all ranks to items of this rank's own part: it has read as many batches as the others."""
        return start // self._stride * self._recipe().block

    def _shared_batches(self, messages: Iterator[GlobalBatch], start: int) -> Iterator[HandedBatch]:
        """Yield the batches of ranks that all read the same."""
        if steps := self._drops_updates:
            messages = trim_batches_to_updates(messages, steps, start // self._size % steps)
        for message in messages:
            self._note(message)
            yield message.batches[0], message.shares, message.end, 0 if message.end else None

    def _note(self, message: GlobalBatch) -> None:
        if message.shares is None and self.original.batch_size is None:
            self._nominal = message.sizes[0]

    def _messages(self, epoch: int, start: int, *, digest: bool = False, head: list[Any] | None = None) -> Iterator[GlobalBatch]:
        """Yield what this rank reads, after so many items."""
        read = self._make_read(epoch, digest=digest)
        return self._source.messages(read, epoch=epoch, start=start, needs_head=self._needs_head, head=head)

    def _make_read(self, epoch: int, *, digest: bool = False) -> StreamRead:
        """Return what is read in an epoch: with the same seed on all ranks that read the same."""
        rank, own = self.data_rank, self.mode == "own"
        return StreamRead(
            self._dataset,
            self._recipe(),
            seed=derive_seed(self.seed, epoch, "stream", *([rank.rank] if own else [])),
            pipeline=derive_seed(self.seed, epoch, "pipeline"),
            shard=(rank.rank, rank.world_size) if own else (0, 1),
            careful=self.mode == "turns",
            may_skip=supports_skip(self._dataset, epoch),
            digest=digest,
        )

    @property
    def _needs_head(self) -> bool:
        """Whether the start of the pass matters: a short last batch is completed from it, or it says how large a full batch is."""
        return (self.policy == "even" and self.mode == "turns") or self.original.batch_size is None

    # -- position -------------------------------------------------------------------------------------------------

    _extra_keys = STREAM_STATE_KEYS

    @property
    def _kind(self) -> str:
        return "stream" if self.original.batch_size is not None else "ready"

    @property
    def data_parts(self) -> int:  # type: ignore[override]  # it may turn out with the first batch
        return self.data_rank.world_size if self.mode == "own" else 1

    def _position(self, loader_pass: LoaderPass) -> int:
        return loader_pass.start + loader_pass.done * self._stride if self.mode == "own" else super()._position(loader_pass)

    def _extra_state(self, loader_pass: LoaderPass | None, samples: int) -> dict[str, Any]:
        """Return `dataset`, the state of a dataset that keeps one and cannot skip, and `parts`, how many processes read parts of their own.

        With parts of their own, it is that of one of them (`part`), and of no use to another.
        """
        parts: dict[str, Any] = {}
        if self.mode == "own":
            parts, samples = {"parts": self.data_rank.world_size, "part": self.data_rank.rank, "full": self._full}, self._own_start(samples)
        return parts if loader_pass is None or not samples else {**parts, **self._source.state(loader_pass.epoch, samples, self._recipe())}

    def _check_extra_state(self, state: Mapping[str, Any]) -> None:
        parts, part, full = state.get("parts", 1), state.get("part", 0), state.get("full", 0)
        if not type(parts) is type(part) is type(full) is int or not 0 <= part < parts or full < 0:
            raise ConfigError(
                f"the state of a loader is that of part {part!r} of {parts!r}, with {full!r} samples in a full batch: these are whole "
                "numbers, and parts of processes are counted from 0"
            )
        self._source.check(state)

    def _load_extra_state(self, position: LoadedPosition) -> LoadedPosition:
        ranks = self.data_rank.world_size
        parts = position.extra.get("parts", ranks if self.mode == "own" else None)
        if position.samples and not position.left and parts not in (None, ranks):
            get_logger(__name__).warning(
                f"the position of {type(self._dataset).__name__} cannot be carried to {ranks} processes: {parts} of them read parts of "
                f"their own when it was saved, which are shared out in another way now. Epoch {position.epoch} begins at its start, so "
                f"what was read of it comes again; run {parts} processes to go on at the position."
            )
            return replace(position, batches=0, samples=0, extra={})
        samples, extra = position.samples, position.extra
        if self.mode == "own":
            samples, self._full = self._own_start(samples), extra.get("full", 0)
            self._nominal = self._full or 1
            if extra.get("part") != self.data_rank.rank:  # that of another process: each finds its own place by seeking
                extra = {}
        self._source.load(self._source.check({"epoch": position.epoch, "samples": samples, **extra}))
        return position

    # -- by turns: is it the same stream everywhere? -----------------------------------------------------------------

    def _compare_first(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        """Yield the first pass of ranks that take turns: they compare what they read before anything is handed out."""
        if self._source.reader.has_workers:
            return self._compare_in_workers(epoch, start)
        read = self._make_read(epoch)
        items = read.reader().read(self._dataset, note=self._source.note(epoch))
        head = attempt(lambda: list(islice(items, read.recipe.block)))
        same = self._agree(epoch, head if isinstance(head, Exception) else fingerprint(head))
        if start and same and self._source.can_seek(self._dataset, epoch, start):
            return self._shared_batches(self._messages(epoch, start, head=head), start)
        recipe, items = self._recipe(), chain(head, items)
        position = start = start if same else self._own_start(start)
        if start:
            warn_of_slow_seek(self._dataset, start, "items")
        messages = self._source.reader.here(recipe.messages(items, start))
        return self._shared_batches(messages, position) if same else self._own_batches(epoch, messages, start)

    def _compare_in_workers(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        messages = self._messages(epoch, start, digest=True)
        first = attempt(lambda: next(messages, None))
        found = first if isinstance(first, Exception) or first is None else first.digest
        if not self._agree(epoch, found):  # what came is slices: begin again, in workers that know nothing of this attempt
            del messages
            return self._own_batches(epoch, self._messages(epoch, self._own_start(start)), start)
        return self._shared_batches(chain([] if first is None else [first], messages), start)

    def _agree(self, epoch: int, found: bytes | Exception | None) -> bool:
        """Return whether all ranks read the same; if not, each has a part of its own from now on."""
        rank, name = self.data_rank, self._batch_name(epoch, 0)
        digests = agree_or_raise(rank.channel(), rank.limits, found, operation="comparison of streams", condition=name)
        self._is_compared = True
        if len(set(digests)) == 1:
            return True
        self.mode = "own"
        get_logger(__name__).warning(
            f"the processes read different data from {type(self._dataset).__name__}, so it is shared out already: each process keeps "
            "what it reads. Give the dataset `rank` and `world_size` attributes to say so, and nothing is compared. If it should "
            "have been the same, look for random numbers that do not come from Python's, numpy's or torch's global generators."
        )
        return False

    # -- each rank has a part of its own -----------------------------------------------------------------------------

    def _own_batches(self, epoch: int, messages: Iterator[GlobalBatch], start: int) -> Iterator[HandedBatch]:
        """Yield batches of own parts: ranks exchange how much they have, and one that ran out repeats a batch that counts nothing."""
        if self.uneven:  # the script deals with ranks that end at different times: nobody has to know of the others
            yield from ((message.batches[0], None, message.end, 0 if message.end else None) for message in messages)
            return
        channel, limits, ranks = self.data_rank.channel, self.data_rank.limits, self.data_rank.world_size
        batch: Any = None
        held = 0
        full: tuple[int, ...] = () if self.original.batch_size is None and not (start and self._full) else self._given
        previous: BatchShares | None = None
        step = 0
        while True:
            found = attempt(lambda: next(messages, None))
            if found is None and step == 0 and start:
                found = attempt(lambda: self._last_of_part(epoch))
                batch, held, found = (found.batches[0], found.sizes[0], None) if isinstance(found, GlobalBatch) else (None, 0, found)
            if isinstance(found, GlobalBatch):
                batch, held = found.batches[0], found.sizes[0]
            count, more = (found.sizes[0], not found.end) if isinstance(found, GlobalBatch) else (0, False)
            own: Any = found if isinstance(found, Exception) else (count, more, held)
            answers = agree_or_raise(channel(), limits, own, operation="next batch", condition=self._batch_name(epoch, step))
            real, given = tuple(answer[0] for answer in answers), [answer[2] for answer in answers]
            if not any(real):
                return
            if step == 0:
                full = full or (max(real),) * ranks
                self._nominal = self._full = max(full)
                batch = self._lend(epoch, batch, given)
                held = given[self.data_rank.rank]
            shares = None if real == full else BatchShares(tuple(given), real, True, sum(full))
            previous = shares = previous if shares == previous else shares
            end = not any(answer[1] for answer in answers)
            yield batch, shares, end, 0 if end else None
            if end:
                return
            step += 1

    def _last_of_part(self, epoch: int) -> GlobalBatch | None:
        """Return the last batch of this rank's part, which it repeats after its end; a pass that begins after that reads it."""
        with RandomStateScope(0):  # what is drawn for it has no meaning
            return next(iter(deque(self._messages(epoch, 0), maxlen=1)), None)

    def _lend(self, epoch: int, batch: Any, given: list[int]) -> Any:
        """Give a rank that has no data at all a batch of one that has."""
        if all(given):
            return batch
        giver, own = next(rank for rank, count in enumerate(given) if count), given[self.data_rank.rank]
        parts = [None if count else batch for count in given] if self.data_rank.rank == giver else None
        given[:] = [count or given[giver] for count in given]
        name = self._batch_name(epoch, 0)
        lent = scatter(self.data_rank.channel(), self.data_rank.limits, parts, sender=giver, operation="loan of a batch", condition=name)
        return batch if own else lent

    def _batch_name(self, epoch: int, step: int) -> str:
        """Return what ranks at the same batch agree on; the lines from which they ask for it may differ."""
        return f"batch {step} of pass {epoch} over {self._name}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_source": self._make_source()}
