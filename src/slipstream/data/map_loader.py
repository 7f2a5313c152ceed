"""`MapLoader`: the prepared loader of map-style datasets, read by torch's own DataLoader through a batch sampler of ours.

The user's loader is kept as it is. A copy of it with our batch sampler and generator does the reading, so that workers, pinned memory,
`collate_fn` and subclasses work as the user wrote them. Persistent workers are kept from pass to pass; a second pass while they are busy
starts workers of its own. With `batch_size=None` the size of a batch is known only after reading, so ranks exchange sizes in one small
guarded call per batch.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, MapDataPipe
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from slipstream.config.handlers import check_count
from slipstream.data.epoch_state import LoadedPosition
from slipstream.data.fingerprint import OpenedOrder, open_agreed_order
from slipstream.data.loader import HandedBatch, PreparedLoader, attempt, clone, keeps_workers
from slipstream.data.options import LoaderSettings
from slipstream.data.order import announce_epoch, known_length, list_samplers, torch_sampler_kind
from slipstream.data.plan import (
    BatchPlan,
    BatchSplitPlan,
    RankPiece,
    RoundRobinPlan,
    SampleOrder,
    count_pieces,
    count_samples,
    trim_order_to_updates,
)
from slipstream.data.random_state import SeededDataset, WorkerInit, derive_seed, seed_loader
from slipstream.data.sampler_state import SamplerOrder
from slipstream.distributed.gradient_state import BatchShares, LoaderPass
from slipstream.distributed.scatter import agree_or_raise
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["DataLoaderCopy", "MapLoader", "RankBatchSampler", "iterate_unprofiled", "samples_per_batch"]


# torch internals: whether a profiler runs (torch 2.13). There is no public way to ask. tests/data/test_loader_profile.py notices a change.
_is_profiled = torch._C._autograd._profiler_enabled

_EXHAUSTED = object()


class RankBatchSampler:
    """The batch sampler of one rank: what torch's machinery reads the positions from.

    Iterating over it gives this rank's batches of the epoch that comes next. The script's own batch sampler is `batch_sampler`.
    """

    def __init__(self, loader: MapLoader) -> None:
        self._loader = loader
        self.pending: Iterator[Any] | None = None
        """What an iteration reads; set while one begins."""
        self.asked = False

    def __iter__(self) -> Iterator[Any]:
        self.asked = True
        # torch's iterator with workers asks twice when it is made, and draws from the second
        return self._loader._preview() if self.pending is None else self.pending

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the script's loader."""
        return self._loader.original.batch_sampler

    @property
    def sampler(self) -> Any:
        """The sampler of the script's loader."""
        return self._loader.get_sampler()

    @property
    def batch_size(self) -> int | None:
        """Samples per batch and rank; None where batches have sizes of their own."""
        return self._loader.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a short last batch is dropped."""
        return self._loader.drop_last


def iterate_unprofiled(iterator: Any) -> Iterator[Any]:
    """Yield the batches of torch's iterator without its profiler mark, a tenth of a small batch's time, unless a profiler runs."""
    # torch internals: `_next_data` is `next(iterator)` without the mark for a profiler (torch 2.13). tests/data/test_loader_profile.py and
    # tests/data/test_map_loader.py notice a change; it can go when torch marks batches only for a profiler that runs.
    read = iterator._next_data
    while True:
        try:
            batch = next(iterator) if _is_profiled() else read()
        except StopIteration:
            return
        yield batch


class DataLoaderCopy:
    """Copies of the script's loader that read: their positions and their generator are ours."""

    def __init__(self, original: DataLoader[Any], owner: MapLoader) -> None:
        self.feed = RankBatchSampler(weakref.proxy(owner))  # a cycle would keep workers that stay beyond the prepared loader
        self.seeds = original.num_workers > 0 and not isinstance(original.dataset, MapDataPipe)
        """Whether workers draw random numbers of each batch's own."""
        workers = {"dataset": SeededDataset(original.dataset), "worker_init_fn": WorkerInit(original.worker_init_fn)} if self.seeds else {}
        self.loader = _copy_loader(original, self.feed, persistent_workers=keeps_workers(original), **workers)
        self.busy = False

    def read(self, positions: Iterator[Any], seed: int, first: int) -> Iterator[Any]:
        loader, feed = self.loader, self.feed
        if self.seeds:
            positions = zip(positions, repeat(seed), count(first), strict=False)
        if loader.persistent_workers:
            if not self.busy:
                return self._read_persistently(positions, seed)
            # The workers that stay are at work for another pass: this one has workers of its own.
            loader = _copy_loader(loader, feed, persistent_workers=False)
        return self._begin(loader, positions, seed)

    def _read_persistently(self, positions: Iterator[Any], seed: int) -> Iterator[Any]:
        self.busy = True
        try:
            yield from self._begin(self.loader, positions, seed)
        finally:
            self.busy = False

    def _begin(self, loader: DataLoader[Any], positions: Iterator[Any], seed: int) -> Iterator[Any]:
        seed_loader(loader, seed)
        feed = self.feed
        feed.pending, feed.asked = positions, False
        iterator = iter(loader)
        if not feed.asked:
            return self._begun_late(iterator, type(loader))
        feed.pending = None
        return iterate_unprofiled(iterator) if type(iterator) is _SingleProcessDataLoaderIter else iterator

    def _begun_late(self, iterator: Iterator[Any], kind: type) -> Iterator[Any]:
        """Yield the batches of a subclass whose iteration begins with its first batch."""
        first = next(iterator, _EXHAUSTED)
        self.feed.pending = None
        if first is _EXHAUSTED:
            return
        if not self.feed.asked:
            raise ConfigError(
                f"the DataLoader given to prepare is a {kind.__name__}, whose __iter__ does not read its batch_sampler: each process would "
                "read everything. Let it call super().__iter__(), or pass a plain DataLoader."
            )
        yield first
        yield from iterator


def _copy_loader(original: DataLoader[Any], feed: RankBatchSampler, **changes: Any) -> DataLoader[Any]:
    kind = type(original)
    if any(base.__module__.startswith("torchdata.") for base in kind.__mro__):
        kind = DataLoader  # the position is kept by us; everything else of it is torch's
    loader = object.__new__(kind)
    index_sampler = "sampler" if original.batch_sampler is None else "batch_sampler"
    ours = {index_sampler: feed, "generator": torch.Generator(), "_iterator": None, "in_order": True, **changes}
    loader.__dict__.update({**original.__dict__, **ours})
    return loader


def samples_per_batch(loader: DataLoader[Any]) -> int | None:
    """Return the batch size, where batches are consecutive samples of the sampler's order; None where the user decides about batches.

    >>> samples_per_batch(DataLoader(range(4), batch_size=2)), samples_per_batch(DataLoader(range(4), batch_size=None))
    (2, None)
    """
    batch_sampler: Any = loader.batch_sampler
    if torch_sampler_kind(batch_sampler) == "BatchSampler":
        return int(batch_sampler.batch_size)
    return loader.batch_size if batch_sampler is None else None


class MapLoader(PreparedLoader):
    """A prepared loader of map-style data."""

    def __init__(self, original: DataLoader[Any], settings: LoaderSettings) -> None:
        super().__init__(original, settings)
        self._engine: DataLoaderCopy | None = None
        self._nominal = 0
        """Samples in the first batch that is ready-made (`batch_size=None`), which is taken for a full one; 0 as long as none was read."""
        self._plan = self._make_plan()
        self._ordering = self._make_ordering()
        if original.num_workers and not getattr(original, "in_order", True):
            get_logger(__name__).warning(
                "in_order=False of a DataLoader has no effect once it is prepared: batches stay in order, "
                "as all ranks read the same global batches and a position can be resumed."
            )

    def _make_plan(self) -> BatchPlan | RoundRobinPlan | BatchSplitPlan:
        original, ranks, split = self.original, self.data_rank.world_size, self.config.split_batches
        batch_sampler: Any = original.batch_sampler
        if batch_sampler is None:
            if split:
                raise ConfigError(
                    "split_batches=True cuts batches, and a DataLoader with batch_size=None has none to cut before its data is read. "
                    "Write DataLoaderConfiguration(dispatch_batches=True), which cuts what was read, or split_batches=False."
                )
            return BatchPlan(ranks, ranks, self.policy, aligned=False)
        size = samples_per_batch(original)
        if size is None:
            nominal = getattr(batch_sampler, "batch_size", None)
            kind: type[RoundRobinPlan] | type[BatchSplitPlan] = BatchSplitPlan if split else RoundRobinPlan
            return kind(ranks, nominal if isinstance(nominal, int) and nominal > 0 else None, self.policy)
        return BatchPlan(ranks, self._global_batch_size(size), self.policy, batch_sampler.drop_last)

    def _make_ordering(self) -> SamplerOrder:
        original: Any = self.original
        ahead = 4 + (original.num_workers or 0) * (original.prefetch_factor or 2) + 2 * (self.steps_per_update or 0)
        return SamplerOrder(self._units, original.dataset, ahead)

    # -- settings -------------------------------------------------------------------------------------------------

    def _replan(self) -> None:
        self._plan = self._make_plan()

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]  # an attribute of torch's that can be read here
        """The batch sampler of this rank; that of the script is its `batch_sampler`. None where batching is off."""
        return None if self.original.batch_sampler is None else RankBatchSampler(self)

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples per batch and rank; None where batches have sizes of their own."""
        return self._given[0] if isinstance(self._plan, BatchPlan) and self.original.batch_sampler is not None else None

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler, from the next iteration on."""
        original = clone(self.original, sampler=sampler)
        batch_sampler: Any = original.batch_sampler
        if batch_sampler is not None:
            if not hasattr(batch_sampler, "sampler"):
                raise ConfigError(
                    f"set_sampler on a loader whose batches come from a {type(batch_sampler).__name__}: it has no sampler to replace. "
                    "Prepare a DataLoader with another batch sampler."
                )
            original.__dict__["batch_sampler"] = clone(batch_sampler, sampler=sampler)
        self.original, self._engine = original, None
        self._plan, self._ordering = self._make_plan(), self._make_ordering()

    # -- what the base asks ---------------------------------------------------------------------------------------

    @property
    def _units(self) -> Any:
        """What gives the order: the sampler, or the batch sampler where whole batches are dealt out or cut."""
        original = self.original
        if not isinstance(self._plan, BatchPlan):
            return original.batch_sampler
        return original.sampler if original.batch_sampler is None else original.batch_sampler.sampler  # type: ignore[attr-defined]

    @property
    def _given(self) -> tuple[int, ...]:
        plan = self._plan
        if self._nominal:
            return (self._nominal,) * plan.world_size
        if isinstance(plan, BatchPlan):
            return plan.full_counts
        each = plan.nominal or 1
        if isinstance(plan, RoundRobinPlan):
            return (each,) * plan.world_size
        return BatchPlan(plan.world_size, each, "exact").given

    @property
    def _stride(self) -> int:
        plan = self._plan
        return plan.size if isinstance(plan, BatchPlan) else plan.world_size if isinstance(plan, RoundRobinPlan) else 1

    @property
    def total_batch_size(self) -> int:
        """Samples in a full batch of all ranks together."""
        return self._plan.size if isinstance(self._plan, BatchPlan) and not self._nominal else sum(self._given)

    def _count(self, start: int) -> int:
        length = len(self._units)
        if self._per_update:
            length -= length % self._per_update
        return count_pieces(self._plan, length, start, self.data_rank.rank)

    @property
    def _per_update(self) -> int:
        """Samples of an update, where short ones are dropped; else 0."""
        plan = self._plan
        return plan.size * (self.steps_per_update or 0) if isinstance(plan, BatchPlan) and plan.drop_last else 0

    def _known_remainder(self, start: int) -> int:
        length = known_length(self._units)
        if length is None or not isinstance(self._plan, BatchPlan) or self.original.batch_sampler is None:
            return -1
        return self._plan.remainder(max(0, length - start), self._plan.offset_in_batch(start))

    @property
    def _kind(self) -> str:
        return "positions" if self.original.batch_sampler is None else "samples" if isinstance(self._plan, BatchPlan) else "batches"

    def _length(self) -> int | None:
        return known_length(self._units)

    # -- position -------------------------------------------------------------------------------------------------

    _extra_keys = ("order", "nominal")

    def _extra_state(self, loader_pass: LoaderPass | None, samples: int) -> dict[str, Any]:
        order = self._ordering.state(loader_pass, samples)
        found = {} if order is None else {"order": order}
        return {**found, "nominal": self._nominal} if self._nominal else found

    def _check_extra_state(self, state: Mapping[str, Any]) -> None:
        self._ordering.check(state.get("order"))
        nominal = state.get("nominal", 0)
        check_count(nominal, f"the state of a loader has nominal={nominal!r}: a batch size is a whole number from 0", least=0)

    def _load_extra_state(self, position: LoadedPosition) -> LoadedPosition:
        self._ordering.restore(position.extra.get("order"), over=position.left or position.ended)
        self._nominal = position.extra.get("nominal", 0)
        return position

    # -- the order of a pass --------------------------------------------------------------------------------------

    def _order(
        self, epoch: int, start: int = 0, loader_pass: LoaderPass | None = None, loaded: LoadedPosition | None = None
    ) -> OpenedOrder:
        saved = loaded.extra.get("order") if loaded is not None and (loaded.epoch, loaded.samples) == (epoch, start) else None
        block = max(1, self._stride)
        how = {"seed": self.seed, "epoch": epoch, "block": block, "version": self._epochs.order_version}
        order, head = self._ordering.open(loader_pass, **how, start=start, saved=saved)
        if self._per_update:
            order = trim_order_to_updates(order, self._per_update, 0 if head is None else start % self._per_update)
        return order, head

    def _preview(self) -> Iterator[Any]:
        (order, _), plan, rank = self._order(self._epochs.next), self._plan, self.data_rank.rank
        if isinstance(plan, BatchPlan) and isinstance(order, SampleOrder):
            return plan.iterate_listed(order, rank)
        return (piece for piece, _, _ in plan.pieces(order, rank))

    def _batches(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        original = self.original
        announce_epoch([original.dataset, *list_samplers(original)[1:]], epoch)
        epochs = self._epochs
        loader_pass = epochs.live[-1] if epochs.live else None
        order, head = open_agreed_order(self, epoch, start, lambda: self._order(epoch, start, loader_pass, epochs.loaded))
        plan = self._plan
        if isinstance(plan, BatchPlan) and isinstance(order, SampleOrder):
            batches = self._known(plan, order, epoch, start)
        else:
            batches = self._drawn(plan.pieces(order, self.data_rank.rank, start, head=head), epoch, start)
        return self._measured(batches, epoch) if self._counts_rows else batches

    def _known(self, plan: BatchPlan, order: SampleOrder, epoch: int, start: int) -> Iterator[HandedBatch]:
        """Yield the batches of an order that is known beforehand, counting down."""
        rank, total, offset = self.data_rank.rank, max(0, len(order) - start), plan.offset_in_batch(start)
        full = last = plan.full
        left = plan.count(total, rank, offset)
        short = plan.remainder(total, offset)
        if short and (plan.policy != "ragged" or plan.share_last_batch(short).given[rank]):
            last = plan.share_last_batch(short)
        batches = self._read(plan.iterate_listed(order, rank, start), epoch, start // plan.size)
        if offset and total >= plan.size - offset and left:  # what was left of a global batch comes first
            first = plan.share_first_batch(offset)
            if first is not None and first.given[rank]:
                left -= 1
                last = last if left else first
                for batch in islice(batches, 1):
                    yield batch, first, not left, left
        for batch in batches:
            left -= 1
            if left:
                yield batch, full, False, left
            else:
                yield batch, last, True, 0

    @property
    def _counts_rows(self) -> bool:
        """Whether batches are ready-made, and all ranks have as many of them."""
        return self.original.batch_sampler is None and self.policy != "ragged"

    def _measured(self, handed: Iterator[HandedBatch], epoch: int) -> Iterator[HandedBatch]:
        """Yield ready-made batches; how many samples each rank has is exchanged once they are read."""
        data_rank, previous, step = self.data_rank, None, 0
        if data_rank.world_size > 1 and not data_rank.compares:  # it was given by hand: there may be nobody to ask
            yield from handed
            return
        channel = None if data_rank.world_size == 1 else data_rank.channel()
        while True:
            if channel is None:
                next_batch = next(handed, None)
                given: tuple[int, ...] = (0 if next_batch is None else count_samples(next_batch[0]),)
            else:
                next_batch = own = attempt(partial(next, handed, None))
                if not isinstance(own, Exception):
                    own = 0 if next_batch is None else attempt(partial(count_samples, next_batch[0]))
                name = f"batch {step} of pass {epoch} over {self._name}"
                given = tuple(agree_or_raise(channel, data_rank.limits, own, operation="next batch", condition=name))
            if next_batch is None:
                return
            batch, dealt, end, left = next_batch
            self._nominal = self._nominal or given[0]
            counted = [1] * len(given) if dealt is None else dealt.real
            real = tuple(size if counts else 0 for size, counts in zip(given, counted, strict=True))
            full = self._nominal * len(given)
            shares = None if set(real) == {self._nominal} else BatchShares(given, real, self.policy != "even", full)
            previous = shares = previous if shares == previous else shares
            yield batch, shares, end, left
            step += 1

    def _drawn(self, pieces: Iterator[RankPiece], epoch: int, start: int) -> Iterator[HandedBatch]:
        """Yield the batches of an order that is drawn while it is read; what is known of a batch travels beside it."""
        ahead: deque[tuple[BatchShares | None, bool]] = deque()

        def positions() -> Iterator[Any]:
            for piece, shares, end in pieces:
                if not ahead:
                    self._learn(piece, shares)
                ahead.append((shares, end))
                yield piece

        expected = self._count(start) if hasattr(self._units, "__len__") else None
        for batch in self._read(positions(), epoch, start // self._stride):
            shares, end = ahead.popleft()
            if expected is not None:
                expected = max(1, expected - 1)  # more come, whatever the sampler said of its length
            yield batch, shares, end, 0 if end else expected

    def _learn(self, piece: Any, shares: BatchShares | None) -> None:
        """Take the first batch of a batch sampler that does not say how large its batches are for a full one."""
        plan, ranks = self._plan, self.data_rank.world_size
        if not isinstance(plan, BatchPlan) and plan.nominal is None:
            full = ranks * len(piece) if shares is None else shares.full
            self._plan = replace(plan, nominal=full // ranks if isinstance(plan, RoundRobinPlan) else full)

    # -- reading --------------------------------------------------------------------------------------------------

    def _read(self, positions: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        """Yield the batches at these positions, read by torch; `first` is the number of the first one in its epoch."""
        if self.original.batch_sampler is None:
            positions = (piece[0] for piece in positions)
        if self._engine is None:
            self._engine = DataLoaderCopy(self.original, self)
        return self._engine.read(positions, derive_seed(self.seed, epoch, "workers", self.data_rank.rank), first)

    def skipping(self, num_batches: int) -> PreparedLoader:
        """As `PreparedLoader.skipping`, with workers of its own: persistent ones of this loader may end earlier or later."""
        twin = super().skipping(num_batches)
        twin.__dict__["_engine"] = None
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None}
