"""`DataLoaderAdapter`: what all prepared loaders of the drop-in share.

A loader here is a prepared loader of Slipstream whose batches and their order are those of Accelerate. It stands around a torch (or
torchdata) loader that already reads the part of this process, reads one batch ahead as Accelerate does, and tells `GradientState` which
batch is the last. `iteration` counts passes that were read to their end. From Slipstream come the position in checkpoints, results of
`gather_for_metrics` without repeated samples, and the ledger of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate._batch_sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    find_batch_sampler,
    find_sampler_holder,
    get_sampler,
)
from accelerate._gradient_state import GradientState
from accelerate._random_snapshot import (
    Snapshot,
    check_snapshot,
    decode_snapshot,
    encode_snapshot,
    kept_random_states,
    put_back,
    same_states,
    take_snapshot,
)
from slipstream.data.epoch_state import LoadedPosition, PassStart
from slipstream.data.loader import HandedBatch, PreparedLoader, clone
from slipstream.data.options import DataRank, LoaderSettings
from slipstream.distributed.current import current
from slipstream.distributed.gradient_state import BatchShares, LoaderPass
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["DataLoaderAdapter", "DataLoaderStateMixin", "EqualShares", "find_shard", "make_data_rank"]

_END: Any = object()
_READS_WITHOUT_DRAWING = 3
"""After so many batches that drew no random number, the states before each batch are no longer kept."""


@dataclass(frozen=True)
class EqualShares(BatchShares):
    """How a last batch was shared; its losses count as those of every other batch, as in Accelerate."""

    @property
    def counted(self) -> tuple[int, ...]:
        """The same number for every process."""
        return (self.full // len(self.given),) * len(self.given)


def make_data_rank(num_processes: int | None = None, process_index: int | None = None) -> DataRank:
    """Return which part of the data this process reads; by default it is one of all processes."""
    runtime = current()
    process = runtime.process
    world = process.world_size if num_processes is None else num_processes
    rank = process.rank if process_index is None else process_index
    own = (rank, world) == (process.rank, process.world_size)
    return DataRank(rank, world, runtime.channel, runtime.limits, compares=own and world > 1)


def find_shard(batch_sampler: Any) -> BatchSamplerShard | None:
    """Return the `BatchSamplerShard` in a chain of batch samplers."""
    while isinstance(batch_sampler, SkipBatchSampler):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler if isinstance(batch_sampler, BatchSamplerShard) else None


class DataLoaderStateMixin:
    """Tells `GradientState` about a loader: `begin()` where a pass begins, `end()` where it ends, `end_of_dataloader` on the last batch.

    A class of a script that inherits from it sets `gradient_state` and assigns `end_of_dataloader` and `remainder`.
    """

    end_of_dataloader: Any = False
    remainder: int = -1
    gradient_state: Any
    steps_per_update = None
    reads_ahead_in_groups = False
    paired_loader = None
    handed = 0
    shares = None

    def reset(self) -> None:
        """Forget what is known of the pass before."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Begin a pass."""
        self.reset()
        if not getattr(self, "_drop_last", False):
            with suppress(Exception):  # whatever a loader without a length raises: the remainder stays unknown
                length = getattr(self.dataset, "total_dataset_length", len(self.dataset))  # type: ignore[attr-defined]
                self.remainder = length % self.total_batch_size  # type: ignore[attr-defined]
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """End a pass."""
        self.gradient_state._remove_dataloader(self)


class DataLoaderAdapter(DataLoaderStateMixin, PreparedLoader):
    """A loader around `base_dataloader`, a torch `DataLoader` or a torchdata `StatefulDataLoader`, whose attributes it shows.

    With `use_stateful_dataloader` it is an instance of `StatefulDataLoader`, and `state_dict()` is that of torchdata as of the batch
    handed out last. Otherwise `state_dict()` is the position that Slipstream's checkpoints hold.
    """

    end_of_dataloader = PreparedLoader.end_of_dataloader
    handed = PreparedLoader.handed
    shares = PreparedLoader.shares
    _extra_keys = ("order", "stateful")
    orders_as_accelerate = True
    """Read by Slipstream where it loads a checkpoint of Accelerate: a count of batches means the same samples here."""

    def __init__(self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any) -> None:
        device, non_blocking = kwargs.pop("_device", None), kwargs.pop("_non_blocking", False)
        data_rank = kwargs.pop("_data_rank", None)
        kind = _stateful_kind() if use_stateful_dataloader else DataLoader
        base = kind(dataset, batch_sampler=batch_sampler, **kwargs)
        self._adapt(base, use_stateful_dataloader, data_rank, device, non_blocking)

    def _adapt(self, base: Any, stateful: bool, data_rank: DataRank | None, device: Any, non_blocking: bool) -> None:
        from accelerate.utils.dataclasses import DataLoaderConfiguration

        shard = find_shard(find_batch_sampler(base))
        if data_rank is None and (shard or isinstance(base.dataset, IterableDatasetShard)):
            of = shard or base.dataset
            data_rank = make_data_rank(of.num_processes, of.process_index)
        config = DataLoaderConfiguration(
            non_blocking=non_blocking, use_stateful_dataloader=stateful, even_batches=getattr(shard, "even_batches", True)
        )
        settings = LoaderSettings(
            data_rank=data_rank or make_data_rank(), config=config, seed=0, gradient_state=GradientState(), device=device,
            put_on_device=device is not None,
        )  # fmt: skip
        PreparedLoader.__init__(self, base, settings)
        self.base_dataloader = base
        self.use_stateful_dataloader = stateful
        self.skip_batches = 0
        self.rng_types: list[Any] | None = None
        self.synchronized_generator: torch.Generator | None = None
        self._drop_last = False
        self._skipped = 0
        """How many batches of each pass the sampler leaves out (`skip_first_batches`)."""
        self.dl_state_dict: dict[str, Any] | None = None
        """The state of torchdata's loader as of the batch handed out last; None before the first."""
        self._final_remainder: int | None = None
        """`remainder` from the last batch on, where the base would not know it."""
        if stateful:
            self.__class__ = _with_stateful(type(self))

    # -- Accelerate's attributes ----------------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        """How many passes were read to their end; the epoch of the present or next pass."""
        return self._epochs.next

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._epochs.next = value

    @property
    def _non_blocking(self) -> bool:
        return self.non_blocking

    @property
    def seed(self) -> int:
        """The seed of a sampler whose order is a function of seed and epoch; otherwise 0."""
        sampler = self.get_sampler()
        return sampler.initial_seed % 2**64 if isinstance(sampler, SeedableRandomSampler) else 0

    @property
    def remainder(self) -> int:  # type: ignore[override]
        """Samples in the last batch of all processes if it is not full; 0 if it is, -1 for not known."""
        return self.__dict__.get("_remainder", -1) if self._final_remainder is None else self._final_remainder

    @remainder.setter
    def remainder(self, value: int) -> None:
        self.__dict__["_remainder"] = value

    def reset(self) -> None:
        """Forget what is known of the pass before."""
        self.current, self._final_remainder, self.remainder = None, None, -1

    def begin(self) -> None:
        """Tell `GradientState` that this loader is being read; iterating does that by itself."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, and tell it the samplers and the dataset."""
        super().set_epoch(epoch)
        self._announce_epoch(epoch)

    def _announce_epoch(self, epoch: int) -> None:
        holder: Any = self._batching
        told = [self.base_dataloader.dataset, self.base_dataloader.sampler if holder is None else None]
        while holder is not None:
            told.append(holder)
            inner = getattr(holder, "batch_sampler", None)
            holder = getattr(holder, "sampler", None) if inner is None else inner
        for target in told:
            if hasattr(target, "set_epoch"):
                target.set_epoch(epoch)

    @property
    def _batching(self) -> Any:
        """What gives the batches of the base loader; None if there is no batch sampler."""
        return find_batch_sampler(self.base_dataloader)

    @property
    def total_batch_size(self) -> int:
        """Samples in a full batch of all processes together."""
        return self._each * self.data_rank.world_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset."""
        dataset: Any = self.base_dataloader.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)

    def get_sampler(self) -> Any:
        """Return the innermost sampler."""
        return get_sampler(self.base_dataloader)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the innermost sampler, from the next pass on."""
        holder = find_sampler_holder(self.base_dataloader)
        if holder is self.base_dataloader:
            object.__setattr__(holder, "sampler", sampler)  # torch's loader refuses an assignment after it was made
        else:
            holder.sampler = sampler

    # -- what the base of prepared loaders asks -------------------------------------------------------------------

    @property
    def _each(self) -> int:
        """Samples of each process in a full batch; 1 if sizes vary."""
        batching = self._batching
        shard = find_shard(batching)
        if shard is not None and shard.split_batches:
            return int(shard.batch_size) // shard.num_processes
        size = getattr(batching, "batch_size", None) if batching is not None else self.base_dataloader.batch_size
        return size if isinstance(size, int) and size > 0 else 1

    @property
    def _given(self) -> tuple[int, ...]:
        return (self._each,) * self.data_rank.world_size

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.base_dataloader.dataset, IterableDataset)

    @property
    def _kind(self) -> str:
        base = self.base_dataloader
        if self._is_stream:
            return "ready" if base.batch_size is None else "stream"
        if self._batching is None:
            return "positions"
        return "samples" if isinstance(getattr(self._batching, "batch_size", None), int) else "batches"

    @property
    def _stride(self) -> int:
        if self._kind in ("samples", "stream"):
            return self.total_batch_size
        return 1 if getattr(find_shard(self._batching), "split_batches", False) else self.data_rank.world_size

    def _length(self) -> int | None:
        try:
            return len(self.get_sampler()) if self._kind == "samples" else None
        except TypeError:  # a sampler without a length, or none
            return None

    def _count(self, start: int) -> int:
        return max(0, len(self.base_dataloader) + self._skipped - start // self._stride)

    def __len__(self) -> int:
        """Return how many batches a pass has."""
        return max(0, len(self.base_dataloader) - self.skip_batches)

    def _known_remainder(self, start: int) -> int:
        length = self._length()
        if length is None or self._is_dropped:
            return -1
        return length % self.total_batch_size

    @property
    def _is_dropped(self) -> bool:
        return bool(self._drop_last or getattr(self._batching, "drop_last", self.base_dataloader.drop_last))

    # -- a pass ---------------------------------------------------------------------------------------------------

    def _start(self) -> tuple[PassStart, int]:
        epochs = self._epochs
        skipped = self._skipped + self.skip_batches
        if skipped:
            loaded = epochs.loaded if epochs.waits else None
            continues = loaded is not None and loaded.epoch == epochs.next and loaded.samples == skipped * self._stride
            return PassStart(epochs.next, skipped, skipped * self._stride, loaded=continues), skipped * self._stride
        start = epochs.following(self.gradient_state.trained)
        return start, start.samples or 0

    def _open(self, loader_pass: LoaderPass) -> None:
        loaded = self._epochs.loaded if self._epochs.waits else None
        super()._open(loader_pass)
        self._final_remainder = None
        self._epochs.next = loader_pass.epoch  # the pass counts where it ends
        if loaded is not None and loaded.epoch == loader_pass.epoch and (not loaded.left or loader_pass.begun_at):
            loader_pass.sampler_start = loaded.extra.get("order")

    def _finish(self, loader_pass: LoaderPass, exhausted: bool) -> None:
        epochs, now = self._epochs, self.gradient_state.trained
        epochs.live.remove(loader_pass)
        trained = loader_pass.trained != now
        if trained:
            epochs.record_trained(loader_pass)
        loader_pass.enclosing_passes = ()
        if epochs.waits:  # a position was loaded inside of the pass
            return
        loaded = epochs.loaded
        if exhausted:
            self.last_pass = loader_pass
            epochs.next, epochs.left = loader_pass.epoch + 1, None
        elif loader_pass.resumed and loader_pass.handed <= 1 and not trained and loaded is not None:  # a look at the loaded position
            epochs.load(self._load_extra_state(loaded), resume=True, trained=now)
            epochs.next = loaded.epoch
        else:
            epochs.left = loader_pass

    def _batches(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        loader_pass = self._epochs.live[-1]
        self._announce_epoch(epoch)
        return self._look_ahead(self._open_base(loader_pass), loader_pass)

    def _look_ahead(self, batches: Iterator[Any], loader_pass: LoaderPass) -> Iterator[HandedBatch]:
        """Yield each batch after the next one was read, which tells whether it is the last."""
        total = self._count_known(loader_pass)
        number, idle = 0, 0 if self.base_dataloader.num_workers == 0 else _READS_WITHOUT_DRAWING
        batch = next(batches, _END)
        while batch is not _END:
            self._keep_state()
            before = take_snapshot() if idle < _READS_WITHOUT_DRAWING else None
            loader_pass.order = before
            following = next(batches, _END)
            end = following is _END
            if before is not None and not end:
                idle = idle + 1 if same_states(before, take_snapshot()) else 0
            number += 1
            if end:
                self._finish_state()
            yield batch, self._last_shares() if end else None, end, 0 if end else None if total is None else max(1, total - number)
            batch = following

    def _finish_state(self) -> None:
        """Note that all batches were read."""
        if self.dl_state_dict is not None:
            self.dl_state_dict["_iterator_finished"] = True
        known, shares = self._known_remainder(0), self._last_shares()
        if self._kind == "batches" or shares is None:  # batches of no certain size, or this process had none of the last batch
            self._final_remainder = known

    def _count_known(self, loader_pass: LoaderPass) -> int | None:
        """Return how many batches the pass has; None if that is not certain."""
        if self._is_stream:
            return None
        try:
            return self._count(loader_pass.start)
        except TypeError:  # a sampler without a length
            return None

    def _last_shares(self) -> BatchShares | None:
        """Return how the last batch was shared; None if it is full, or if that is not known."""
        full, ranks = self.total_batch_size, self.data_rank.world_size
        shard = find_shard(self._batching)
        of: Any = shard if shard is not None else self.base_dataloader.dataset
        if isinstance(of, BatchSamplerShard | IterableDatasetShard):
            given, real = of.last_round
            if len(given) != ranks or not given[self.data_rank.rank] or (given == real and sum(real) == full):
                return None
            return EqualShares(given, real, False, full)
        rest = self._known_remainder(0)
        return EqualShares((rest,), (rest,), False, full) if rest > 0 and ranks == 1 else None

    @property
    def hides_repeated_samples(self) -> bool:
        """Whether the last batch may hold repeated samples of which only workers know."""
        base: Any = self.base_dataloader
        if not isinstance(base.dataset, IterableDatasetShard) or self.data_rank.world_size == 1:
            return False
        return base.num_workers > 0 and not self._is_dropped

    # -- reading the base -----------------------------------------------------------------------------------------

    @property
    def _generators(self) -> list[torch.Generator | None]:
        """The generators that the order is drawn from: that of the sampler, and that of the loader."""
        found = [getattr(self.get_sampler(), "generator", None), self.base_dataloader.generator]
        return [generator if isinstance(generator, torch.Generator) else None for generator in found]

    def _open_base(self, loader_pass: LoaderPass) -> Iterator[Any]:
        """Return the batches of a pass, which may begin in the middle of the epoch."""
        saved = loader_pass.sampler_start
        if saved is None or "begin" not in saved:
            self._synchronize()
            loader_pass.sampler_start = {"begin": take_snapshot(self._generators)}
            reader = iter(self.base_dataloader)
            return islice(reader, self.skip_batches * self._reads, None) if self.skip_batches else reader
        return self._reopen_base(loader_pass, saved)

    def _synchronize(self) -> None:
        if self.rng_types:
            from accelerate.utils.random import synchronize_rng_states

            synchronize_rng_states(self.rng_types, self.synchronized_generator)

    def _reopen_base(self, loader_pass: LoaderPass, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Return the batches from a loaded position on: draw the saved order again, and go to the position without reading."""
        begin = saved["begin"] if isinstance(saved["begin"], tuple) else decode_snapshot(saved["begin"])
        loader_pass.sampler_start = {"begin": begin}
        ahead = saved.get("ahead") if loader_pass.resumed else None
        with kept_random_states():  # what torch draws where a pass begins is not drawn again
            reader = self._skip_base(0 if saved.get("stateful") else loader_pass.begun_at - self._skipped, begin)
        if ahead is None:
            return reader
        with kept_random_states():  # the batch that was read ahead drew from these states
            put_back(ahead if isinstance(ahead, tuple) else decode_snapshot(ahead))
            first = list(islice(reader, self._reads))
        return _handed_over(first, reader)

    _reads = 1
    """Batches of the base loader that are read for one batch of this loader."""

    def _skip_base(self, skip: int, begin: Snapshot, head: int = 0) -> Iterator[Any]:
        """Return the batches of the base loader without the first ones; the very first (`head`) are read nevertheless, and come first."""
        base: Any = self.base_dataloader
        if self._is_stream:
            put_back(begin, self._generators)
            reader = iter(base)
            first = list(islice(reader, head))
            for _ in islice(reader, max(0, skip - head)):
                pass
            return _handed_over(first, reader)
        which = "sampler" if base.batch_sampler is None else "batch_sampler"
        original = getattr(base, which)
        if hasattr(original, "state_dict") and self.use_stateful_dataloader:  # a sampler of torchdata, which was given its state
            return iter(base)
        order = _RedrawnOrder(original, skip, head, begin, self.get_sampler(), base.generator)
        if not self.use_stateful_dataloader:
            return iter(clone(base, _iterator=None, **{which: order}))
        object.__setattr__(base, which, order)  # torchdata skips as far as its state says; a loader refuses other ways to assign it
        try:
            return iter(base)
        finally:
            object.__setattr__(base, which, original)

    # -- positions ------------------------------------------------------------------------------------------------

    def _keep_state(self) -> None:
        """Keep the state of torchdata's loader as of the batch that is handed out next, before another one is read."""
        if self.use_stateful_dataloader:
            self.dl_state_dict = self.base_dataloader.state_dict()
            self.adjust_state_dict_for_prefetch()

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: the state is taken before the next batch is read."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torchdata's loader with `use_stateful_dataloader`, else the position as `capture_position`."""
        if not self.use_stateful_dataloader:
            return self.capture_position()
        state: dict[str, Any] = self.base_dataloader.state_dict() if self.dl_state_dict is None else self.dl_state_dict
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], **options: Any) -> None:
        """Load what `state_dict` returned: the next pass continues there."""
        if self.use_stateful_dataloader:
            self.base_dataloader.load_state_dict(state_dict)
            self.dl_state_dict = dict(state_dict)
        else:
            self.restore_position(state_dict, **{"resume": True, **options})

    def capture_position(self) -> dict[str, Any]:
        """Return the position as plain data, for a checkpoint."""
        return PreparedLoader.state_dict(self)

    def check_position(self, state: Any) -> None:
        """Raise unless this is a position of such a loader."""
        PreparedLoader.check_state_dict(self, state)

    def restore_position(self, state: Mapping[str, Any], *, resume: bool | None = None) -> None:
        """Load a position; with `resume` the next pass continues there, else it begins the same epoch in the same order."""
        resume = self.config.resumes if resume is None else resume
        PreparedLoader.load_state_dict(self, state, resume=resume)
        loaded, left = self._epochs.loaded, self._epochs.left
        assert loaded is not None
        if isinstance(sampler := self.get_sampler(), SeedableRandomSampler):
            sampler.initial_seed = state["seed"]
        if left is not None:
            left.sampler_start = loaded.extra.get("order")
        if loaded.left and not loaded.ended and not self._is_over(loaded):
            self._epochs.next = loaded.epoch  # a pass that was left begins anew here
        own = (state.get("stateful") or {}).get("place") == [self.data_rank.rank, self.data_rank.world_size]
        if self.use_stateful_dataloader and resume and own and not loaded.left:
            self.load_state_dict(state["stateful"]["state"])
            loaded.extra["order"] = {**loaded.extra["order"], "stateful": True}

    def _extra_state(self, loader_pass: LoaderPass | None, samples: int) -> dict[str, Any]:
        if loader_pass is None or loader_pass.sampler_start is None:
            return {}
        start: Mapping[str, Any] = loader_pass.sampler_start
        order = {"begin": _encoded(start["begin"])}
        ahead: Snapshot | None = loader_pass.order
        if ahead is not None and loader_pass.done == loader_pass.handed:
            order["ahead"] = _encoded(ahead)
        found: dict[str, Any] = {"order": order}
        if self.dl_state_dict is not None:
            place = [self.data_rank.rank, self.data_rank.world_size]
            found["stateful"] = {"place": place, "state": self.dl_state_dict}
        return found

    def _check_extra_state(self, state: Mapping[str, Any]) -> None:
        order = state.get("order")
        for name in ("begin", "ahead"):
            if order is not None and name in order:
                check_snapshot(order[name])

    def _load_extra_state(self, position: LoadedPosition) -> LoadedPosition:
        batches, rest = divmod(position.samples, self._stride)
        if self._kind == "samples" and rest and not position.ended and position.samples != self._length():
            get_logger(__name__).warning(
                f"the position of a loader of {self._name} is {position.samples} samples into an epoch, and its batches have "
                f"{self._stride} samples of all processes now: {rest} of them come twice."
            )
        return position if position.ended else replace(position, batches=batches)

    # -- copies ---------------------------------------------------------------------------------------------------

    def skipping(self, num_batches: int) -> Any:
        """See `skip_first_batches`."""
        from accelerate.data_loader import skip_first_batches

        return skip_first_batches(self, num_batches)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.gradient_state = GradientState()

    def __reduce__(self) -> Any:
        return _unpickle, (_plain_class(type(self)), self.use_stateful_dataloader, self.__getstate__())


class _RedrawnOrder:
    """What a sampler gave in a pass that began with these random states: its first `head` items, and those after `skip`.

    The states are put back while the order is drawn, and are as before when an item is handed out.
    """

    def __init__(self, inner: Any, skip: int, head: int, begin: Snapshot, sampler: Any, loader_generator: Any) -> None:
        self._inner, self._skip, self._head = inner, skip, head
        self._begin, self._sampler, self._loader_generator = begin, sampler, loader_generator

    def __iter__(self) -> Iterator[Any]:
        with kept_random_states(), self._generator_as_saved():
            put_back(self._begin, [getattr(self._sampler, "generator", None), self._loader_generator])
            torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)  # as torch's loader for its workers
            items = iter(self._inner)
            chosen = chain(islice(items, self._head), islice(items, max(0, self._skip - self._head), None))
            first = list(islice(chosen, 1))
        yield from first
        yield from chosen

    @contextmanager
    def _generator_as_saved(self) -> Iterator[None]:
        """Let the sampler draw from a generator if it did, and otherwise not: on another number of processes it has one, or none."""
        sampler, state = self._sampler, (self._begin[3] or [None])[0]
        present = getattr(sampler, "generator", None)
        if not hasattr(sampler, "generator") or (present is None) is (state is None):
            yield
            return
        sampler.generator = torch.Generator() if present is None else None
        try:
            yield
        finally:
            if present is not None:
                sampler.generator = present

    def __len__(self) -> int:
        return max(0, len(self._inner) - self._skip)


def _handed_over(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    """Yield all, and keep no reference: a batch that is alive counts as one that the script has yet to train on."""
    while first:
        yield first.pop(0)
    yield from rest


def _encoded(snapshot: Any) -> dict[str, Any]:
    return encode_snapshot(snapshot) if isinstance(snapshot, tuple) else snapshot


def _stateful_kind() -> Any:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise ConfigError(
            "use_stateful_dataloader=True needs the package torchdata (0.8 or newer), which is not installed: pip install torchdata. "
            "Without it, `DataLoaderConfiguration(resume='auto')` lets loaders continue by themselves after load_state."
        ) from None
    return StatefulDataLoader


_stateful_classes: dict[type, type] = {}


def _with_stateful(kind: type) -> type:
    """Return the class that is also a `StatefulDataLoader`."""
    if kind not in _stateful_classes:
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_plain": kind}
        _stateful_classes[kind] = type(kind.__name__, (kind, _stateful_kind()), names)
    return _stateful_classes[kind]


def _plain_class(kind: type) -> type:
    found: type = kind.__dict__.get("_plain", kind)
    return found


def _unpickle(kind: type, stateful: bool, state: dict[str, Any]) -> Any:
    loader = object.__new__(_with_stateful(kind) if stateful else kind)
    loader.__setstate__(state)
    return loader
