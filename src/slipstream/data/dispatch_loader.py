"""`DispatchLoader`: rank 0 reads for every rank and scatters the batches (`dispatch_batches=True`).

Each global batch is one guarded call: every rank receives its batch, how the global batch was shared, and whether it is the last one.
Batches of different ranks are never concatenated, so text, ragged tensors and any structure work. With `split_batches` the global batch
is sliced along its first dimension, or by the user's `slice_fn`. The other ranks never touch the dataset, the random state of rank 0
moves no more than theirs, and if reading fails every rank raises.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice, tee
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from slipstream.data.epoch_state import EpochState, LoadedPosition
from slipstream.data.loader import HandedBatch, PreparedLoader, attempt
from slipstream.data.map_loader import MapLoader
from slipstream.data.options import LoaderSettings
from slipstream.data.order import announce_epoch, list_samplers
from slipstream.data.plan import (
    BatchPlan,
    ItemSplitPlan,
    LastBatchPolicy,
    RankPiece,
    RoundRobinPlan,
    SliceFunction,
    count_pieces,
    count_samples,
    seek,
    slice_for_ranks,
    slice_rows,
)
from slipstream.data.random_state import RandomStateScope, derive_seed
from slipstream.data.stream_dataset import supports_skip
from slipstream.data.stream_reader import (
    STREAM_STATE_KEYS,
    BatchRecipe,
    GlobalBatch,
    StreamRead,
    StreamSource,
    return_unchanged,
    trim_batches_to_updates,
)
from slipstream.devices.table import CPU
from slipstream.distributed.gradient_state import BatchShares, LoaderPass
from slipstream.distributed.pytree import recursively_apply
from slipstream.distributed.scatter import ScatterSeries

__all__ = ["DispatchLoader"]


class DispatchLoader(PreparedLoader):
    """A prepared loader whose data rank 0 reads."""

    def __init__(self, original: DataLoader[Any], settings: LoaderSettings) -> None:
        super().__init__(original, settings)
        self._slice_fn = settings.slice_fn
        self._nominal = 1
        self._source = self._make_source()

    def _make_source(self) -> _StreamDispatchSource | _MapDispatchSource:
        cut = self._slice_fn or (slice_rows if self.config.split_batches and self.data_rank.world_size > 1 else None)
        if isinstance(self.original.dataset, IterableDataset):
            return _StreamDispatchSource(self, cut, self.policy)
        return _MapDispatchSource(self, cut, self.policy)

    @property
    def policy(self) -> LastBatchPolicy:
        """What happens to a short last batch: `even` or `exact` (see `plan.py`). All ranks take part in every dealing, also if `uneven`."""
        return "even" if self.config.even_batches and not self.uneven else "exact"

    def _replan(self) -> None:
        self._source = self._make_source()

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Samples per batch and rank; None where batches have sizes of their own."""
        size = self._source.size
        return None if size is None else self._given[0]

    # -- what the base asks ---------------------------------------------------------------------------------------

    @property
    def _given(self) -> tuple[int, ...]:
        if self._source.size is None:
            return (self._nominal,) * self.data_rank.world_size
        return BatchPlan(self.data_rank.world_size, self._source.size, self.policy).full_counts

    @property
    def _stride(self) -> int:
        return self._source.stride

    def _count(self, start: int) -> int:
        return self._source.count(start)

    # -- position: what rank 0 noted, as it alone reads -----------------------------------------------------------

    @property
    def _kind(self) -> str:
        return self._source.kind

    def _length(self) -> int | None:
        return self._source.length()

    @property
    def _extra_keys(self) -> tuple[str, ...]:  # type: ignore[override]  # by what is read
        return self._source.extras

    def _extra_state(self, loader_pass: LoaderPass | None, samples: int) -> dict[str, Any]:
        return self._source.extra_state(loader_pass, samples)

    def _check_extra_state(self, state: Mapping[str, Any]) -> None:
        self._source.check_extra_state(state)

    def _load_extra_state(self, position: LoadedPosition) -> LoadedPosition:
        self._source.load_extra_state(position)
        return position

    def _batches(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        channel, limits = self.data_rank.channel, self.data_rank.limits
        source = self._parts(epoch, start) if self.data_rank.rank == 0 else None
        series = ScatterSeries(operation="next batch")
        previous: BatchShares | None = None
        step, end = 0, False
        while not end:
            parts, note = (None, b"") if source is None else _attempt_next(source)
            name = f"batch {step} of pass {epoch}"  # and not whose: the others may have no dataset at all
            batch, note = series.transfer(channel(), limits, parts, note=note, condition=name)
            if not note:  # there is nothing at all
                return
            shares, end, left, self._nominal = _read_note(note)
            if source is None and self._pins:
                batch = recursively_apply(torch.Tensor.pin_memory, batch, test_type=_is_host_tensor)
            previous = shares = previous if shares == previous else shares
            yield batch, shares, end, left
            step += 1

    @property
    def _pins(self) -> bool:
        """Whether the script wants batches in pinned memory, and there is a device to copy them to; torch does it where it reads."""
        return self.original.pin_memory and self._move is not None

    def _parts(self, epoch: int, start: int) -> Iterator[tuple[list[Any], bytes]]:
        """On rank 0, yield what is dealt out, one batch for each rank, and what all of them are told of it."""
        ranks = self.data_rank.world_size
        nominal = self._nominal
        left = self._source.known_count(start)
        epochs = self._epochs
        loader_pass = epochs.live[-1] if epochs.live else LoaderPass(epoch, start)
        for message in self._source.messages(loader_pass, start, epochs):
            shares = message.shares
            if shares is None:
                nominal = message.sizes[0]
            left = None if left is None else max(1, left - 1)
            after = 0 if message.end else left
            yield message.batches, _write_note(shares, message.end, after, nominal)
            if message.end:
                return
        yield [None] * ranks, b""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_source": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._source = self._make_source()


_NOTE = struct.Struct("<?qq")
"""Of a batch: whether it is the last one, how many follow (-1: unknown), samples of a full one. How it was shared follows as JSON."""


def _write_note(shares: BatchShares | None, end: bool, left: int | None, nominal: int) -> bytes:
    plain = b"" if shares is None else json.dumps([shares.given, shares.real, shares.weighed, shares.full]).encode()
    return _NOTE.pack(end, -1 if left is None else left, nominal) + plain


def _read_note(note: bytes) -> tuple[BatchShares | None, bool, int | None, int]:
    """Return what `_write_note` was given.

    >>> shares = BatchShares((2, 1), (2, 0), True, 4)
    >>> _read_note(_write_note(shares, True, None, 2)) == (shares, True, None, 2)
    True
    """
    end, left, nominal = _NOTE.unpack_from(note)
    shares = None
    if len(note) > _NOTE.size:
        given, real, weighed, full = json.loads(note[_NOTE.size :])
        shares = BatchShares(tuple(given), tuple(real), weighed, full)
    return shares, end, None if left < 0 else left, nominal


def _attempt_next(source: Iterator[tuple[list[Any], bytes]]) -> tuple[Any, bytes]:
    """Return the next parts and their note, or the exception, which the other ranks must get before all raise."""
    found = attempt(partial(next, source))
    return (found, b"") if isinstance(found, Exception) else found


def _is_host_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == CPU.type and leaf.layout is torch.strided


# -- what rank 0 reads ------------------------------------------------------------------------------------------------


def _make_ready_batch_recipe(
    owner: DispatchLoader, cut: SliceFunction | None, policy: LastBatchPolicy, collate: Callable[[Any], Any]
) -> BatchRecipe:
    """Return the recipe for items that are batches already."""
    ranks = owner.data_rank.world_size
    everyone = tuple(range(ranks))
    if owner.config.split_batches:
        return BatchRecipe(ItemSplitPlan(ranks, collate, cut), 1, everyone, return_unchanged, batched=False)
    return BatchRecipe(RoundRobinPlan(ranks, None, policy, count_samples), ranks, everyone, collate, batched=False, cut=cut)


class _StreamDispatchSource:
    """Iterable data."""

    def __init__(self, owner: DispatchLoader, cut: SliceFunction | None, policy: LastBatchPolicy) -> None:
        original, ranks = owner.original, owner.data_rank.world_size
        self.policy, self.dataset = policy, original.dataset  # and not the owner: workers end with it, and not when the cycle is found
        if original.batch_size is None:
            self.size = None
            self.recipe = _make_ready_batch_recipe(owner, cut, policy, original.collate_fn)
        else:
            self.size = owner._global_batch_size(original.batch_size)
            plan = BatchPlan(ranks, self.size, policy, original.drop_last)
            self.recipe = BatchRecipe(plan, self.size, tuple(range(ranks)), original.collate_fn, cut=cut)
        self.stride = self.recipe.block
        self.per_update = owner.steps_per_update or 0 if original.drop_last else 0
        """Batches of an update, where short ones are dropped; else 0."""
        self.source = StreamSource(original, self.dataset, 2 * self.per_update)
        self.kind = "ready" if self.size is None else "stream"
        self.extras = STREAM_STATE_KEYS

    def length(self) -> int | None:
        return None

    def extra_state(self, loader_pass: LoaderPass | None, samples: int) -> dict[str, Any]:
        return {} if loader_pass is None or not samples else self.source.state(loader_pass.epoch, samples, self.recipe)

    def check_extra_state(self, state: Mapping[str, Any]) -> None:
        self.source.check(state)

    def load_extra_state(self, position: LoadedPosition) -> None:
        self.source.load(self.source.check({"epoch": position.epoch, "samples": position.samples, **position.extra}))

    def count(self, start: int) -> int:
        length = len(self.dataset)  # type: ignore[arg-type]  # a dataset without a length says so itself
        if self.per_update:
            length -= length % (self.stride * self.per_update)
        return count_pieces(self.recipe.plan, length, start)

    def known_count(self, start: int) -> int | None:
        return None  # a stream may promise a length that it does not keep

    def messages(self, loader_pass: LoaderPass, start: int, epochs: EpochState) -> Iterator[GlobalBatch]:
        dataset, epoch, steps = self.dataset, loader_pass.epoch, self.per_update
        announce_epoch([dataset], epoch)
        pipeline, skips = derive_seed(epochs.seed, epoch, "pipeline"), supports_skip(dataset, epoch)
        read = StreamRead(dataset, self.recipe, derive_seed(epochs.seed, epoch, "stream"), pipeline, may_skip=skips)
        messages = self.source.messages(read, epoch=epoch, start=start, needs_head=self.policy == "even" or self.size is None)
        return trim_batches_to_updates(messages, steps, start // self.stride % steps) if steps else messages


class _MapDispatchSource:
    """Map-style data: torch reads it from positions, which are those that the ranks would read themselves."""

    def __init__(self, owner: DispatchLoader, cut: SliceFunction | None, policy: LastBatchPolicy) -> None:
        original = self.original = owner.original
        self.cut, self.ranks = cut, owner.data_rank.world_size
        self.alone = original.batch_sampler is None
        """Whether a position gives a batch that is ready-made."""
        settings = LoaderSettings(
            data_rank=replace(owner.data_rank, rank=0, world_size=1 if self.alone else self.ranks),
            config=replace(
                owner.config, split_batches=owner.config.split_batches and not self.alone, even_batches=policy == "even"
            ),
            seed=owner.seed,
            gradient_state=owner.gradient_state,
            samples_per_rank=owner._per_rank,
            steps_per_update=owner.steps_per_update,
        )
        self.reader = MapLoader(original, settings)
        plan = self.reader._plan
        self.size = plan.size if isinstance(plan, BatchPlan) and not self.alone else None
        self.recipe = _make_ready_batch_recipe(owner, cut, policy, return_unchanged) if self.alone else None
        self.stride = self.reader._stride if self.recipe is None else self.recipe.block
        self.kind, self.extras = self.reader._kind, self.reader._extra_keys

    def length(self) -> int | None:
        return self.reader._length()

    def extra_state(self, loader_pass: LoaderPass | None, samples: int) -> dict[str, Any]:
        return self.reader._extra_state(loader_pass, samples)

    def check_extra_state(self, state: Mapping[str, Any]) -> None:
        self.reader._check_extra_state(state)

    def load_extra_state(self, position: LoadedPosition) -> None:
        self.reader._load_extra_state(position)

    def count(self, start: int) -> int:
        if self.recipe is None:
            return self.reader._count(start)
        return count_pieces(self.recipe.plan, len(self.reader._units), start)

    def known_count(self, start: int) -> int | None:
        return self.count(start) if hasattr(self.reader._units, "__len__") else None

    def messages(self, loader_pass: LoaderPass, start: int, epochs: EpochState) -> Iterator[GlobalBatch]:
        reader, original, epoch = self.reader, self.original, loader_pass.epoch
        reader._epochs.seed, reader._epochs.order_version = epochs.seed, epochs.order_version
        announce_epoch([original.dataset, *list_samplers(original)[1:]], epoch)
        order, head = reader._order(epoch, start, loader_pass, epochs.loaded)
        if start:  # what completes the last batch comes from the head, and nothing else that comes before is read
            head, walk = seek(order, start, head, self.stride)
        else:
            walk = iter(order)
        if self.recipe is None:
            return self._together(walk, head, epoch, start)
        begun = [] if head is None else list(self._scoped(reader._read(([position] for position in head), epoch, 0), epoch, 0))
        items = self._scoped(reader._read(([position] for position in walk), epoch, start), epoch, start)
        return self.recipe.messages(items, start, begun) if start else self.recipe.messages(items)

    def _together(self, walk: Iterator[Any], head: Sequence[Any] | None, epoch: int, start: int) -> Iterator[GlobalBatch]:
        """Yield the batches of all ranks; what is known of a global batch travels beside its positions."""
        plan, ranks, lists = self.reader._plan, self.ranks, self.original.collate_fn is not default_collate
        ahead: deque[tuple[RankPiece, ...]] = deque()

        def positions() -> Iterator[Any]:
            plans = [plan.pieces(feed, rank, start, head=head) for rank, feed in enumerate(tee(walk, ranks))]
            for pieces in zip(*plans, strict=True):
                ahead.append(pieces)
                own = [piece for piece, _, _ in pieces]
                yield from own if self.cut is None else [list(chain.from_iterable(own))]

        first = start // self.stride * (ranks if self.cut is None else 1)
        batches = self._scoped(self.reader._read(positions(), epoch, first), epoch, first)
        while read := list(islice(batches, ranks if self.cut is None else 1)):
            pieces = ahead.popleft()
            sizes = [len(piece) for piece, _, _ in pieces]
            _, shares, end = pieces[0]
            cut = read if self.cut is None else slice_for_ranks(self.cut, read[0], sizes, range(ranks), ranks, samples=lists)
            yield GlobalBatch(cut, sizes, shares, end, None)

    def _scoped(self, batches: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        """Read inside random states of each batch's own, as long as the data draws any; workers have states of their own anyway."""
        if self.original.num_workers:
            return batches
        return _read_with_batch_seeds(batches, derive_seed(self.reader.seed, epoch, "stream"), first)


def _read_with_batch_seeds(batches: Iterator[Any], seed: int, first: int) -> Iterator[Any]:
    """Yield batches, each read inside random states that are a function of its number, unless the first one draws nothing."""
    for number in count(first):
        scope = RandomStateScope(derive_seed(seed, number))
        with scope:
            read = list(islice(batches, 1))
        yield from read
        if not read:
            return
        if number == first and not scope.used:
            yield from batches
            return

