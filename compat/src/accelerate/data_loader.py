"""Prepared loaders: each process reads its part (`DataLoaderShard`), or the first one reads for all (`DataLoaderDispatcher`).

Which samples come in which batch of which process is as in Accelerate, for every combination of options; see `_batch_sharding.py` for the
rules and `_loader_base.py` for what a pass does. Where Accelerate gives results that are silently wrong, these loaders do not: a skipped
loader and its original count epochs together, `skip_first_batches` skips batches of all processes also where one dispatches, and ragged
batches and text can be dispatched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate._batch_sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    find_batch_sampler,
    find_sampler_holder,
    get_sampler,
)
from accelerate._forwarding import forward_names
from accelerate._loader_base import DataLoaderAdapter, DataLoaderStateMixin, EqualShares, make_data_rank  # noqa: F401  # names that clients import
from accelerate._random_snapshot import Snapshot, take_snapshot
from slipstream.config.handlers import check_count
from slipstream.data.loader import HandedBatch, PreparedLoader, attempt
from slipstream.data.options import DataRank
from slipstream.data.prepare import skip_first_batches as _skip_first_batches
from slipstream.distributed import collectives
from slipstream.distributed.gradient_state import LoaderPass
from slipstream.distributed.scatter import agree_or_raise, scatter
from slipstream.errors import ConfigError
from slipstream.utils import concatenate, find_batch_size, recursively_apply, slice_tensors

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.logging": "get_logger",
        "accelerate.state": "GradientState PartialState",
        "accelerate.utils.dataclasses": "DistributedType RNGType",
        "accelerate.utils.imports": "is_datasets_available is_torch_xla_available is_torchdata_stateful_dataloader_available",
        "accelerate.utils.operations": "broadcast broadcast_object_list get_data_structure initialize_tensors send_to_device",
        "accelerate.utils.random": "synchronize_rng_states",
        "accelerate.utils.versions": "compare_versions is_torch_version",
    },
)
__all__ = sorted(
    [
        "BatchSamplerShard", "DataLoaderAdapter", "DataLoaderDispatcher", "DataLoaderShard", "DataLoaderStateMixin", "IterableDatasetShard",
        "MpDeviceLoaderWrapper", "SeedableRandomSampler", "SkipBatchSampler", "SkipDataLoader", "concatenate", "find_batch_size",
        "get_sampler", "prepare_data_loader", "skip_first_batches", "slice_tensors", *_forwarded,
    ]
)  # fmt: skip

_LOADER_ARGUMENTS = {
    "num_workers": 0, "collate_fn": None, "pin_memory": False, "timeout": 0, "worker_init_fn": None, "multiprocessing_context": None,
    "generator": None, "prefetch_factor": None, "persistent_workers": False, "pin_memory_device": "", "in_order": True,
}  # fmt: skip
"""Arguments of a `DataLoader` that do not say which samples come when, with their defaults."""


class DataLoaderShard(DataLoaderAdapter):
    """A loader of the batches of this process, moved to its device.

    >>> loader = DataLoaderShard(list(range(10)), batch_size=4)
    >>> [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
    [([0, 1, 2, 3], False), ([4, 5, 6, 7], False), ([8, 9], True)]
    >>> loader.iteration, loader.remainder
    (1, 2)
    """

    def __init__(
        self,
        dataset: Any,
        device: Any = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, _device=device, _non_blocking=_non_blocking, **kwargs)
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration


class SkipDataLoader(DataLoaderAdapter):
    """A loader without its first batches, in every pass.

    >>> [batch.tolist() for batch in SkipDataLoader(list(range(6)), batch_size=2, skip_batches=2)]
    [[4, 5]]
    """

    def __init__(self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any) -> None:
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches


class DataLoaderDispatcher(DataLoaderAdapter):
    """A loader that the first process reads for all of them: each is sent its part.

    With `split_batches` every batch of the base loader is cut into as many slices as there are processes; otherwise the processes get
    one batch each. `slice_fn(batch, slice, process_index=, num_processes=)` cuts in another way.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, _non_blocking=_non_blocking, **kwargs)
        from accelerate.state import PartialState

        self.state = PartialState()
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration

    @property
    def _each(self) -> int:
        batching = self._batching
        size = getattr(batching, "batch_size", None) if batching is not None else self.base_dataloader.batch_size
        if not isinstance(size, int) or size < 1:
            return 1
        return max(1, size // self.data_rank.world_size) if self.split_batches else size

    @property
    def _stride(self) -> int:
        return self.total_batch_size if self._kind in ("samples", "stream") else self._reads

    @property
    def _reads(self) -> int:  # type: ignore[override]
        """Batches of the base loader that are read for one batch of all processes."""
        return 1 if self.split_batches else self.data_rank.world_size

    def _count(self, start: int) -> int:
        whole, rest = divmod(len(self.base_dataloader), self._reads)
        return max(0, whole + (rest > 0 and not self._drop_last) + self._skipped - start // self._stride)

    def __len__(self) -> int:
        """Return how many batches a pass has."""
        return max(0, self._count(self._skipped * self._stride) - self.skip_batches)

    def _known_remainder(self, start: int) -> int:
        return -1

    def _skip_base(self, skip: int, begin: Snapshot, head: int = 0) -> Iterator[Any]:
        reads = self._reads
        if not skip or self._drop_last or self.data_rank.world_size == 1 or self.use_stateful_dataloader:
            return super()._skip_base(skip * reads, begin)
        reader = super()._skip_base(skip * reads, begin, head=reads)  # the last batch is filled with the first samples
        self._first_round = list(islice(reader, reads))
        return reader

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: the state is taken before the next batches are read."""

    # -- a pass ---------------------------------------------------------------------------------------------------

    def _batches(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        loader_pass = self._epochs.live[-1]
        self._announce_epoch(epoch)
        data_rank = self.data_rank
        rounds = self._read_rounds(loader_pass) if data_rank.rank == 0 else self._keep_in_step(loader_pass)
        number, end = loader_pass.begun_at, False
        total = self._count_known(loader_pass)
        while not end:
            parts = attempt(lambda: next(rounds, [None] * data_rank.world_size)) if data_rank.rank == 0 else None
            part = self._send(parts)
            if part is None:
                return
            batch, given, real, end = part
            shares = EqualShares(tuple(given), tuple(real), False, max(self.total_batch_size, sum(real))) if end else None
            number += 1
            if end:
                self._final_remainder = sum(real)
            yield batch, shares, end, 0 if end else None if total is None else max(1, total - number + loader_pass.begun_at)

    def _keep_in_step(self, loader_pass: LoaderPass) -> Iterator[list[Any]]:
        """Draw what torch draws where the first process begins to read, so that random states that are equal stay so."""
        if loader_pass.sampler_start is None:  # else it was drawn before the position was saved
            loader_pass.sampler_start = {"begin": take_snapshot(self._generators)}
            base: Any = self.base_dataloader
            torch.empty((), dtype=torch.int64).random_(generator=base.generator)
            if base.num_workers and not self._is_stream:  # workers are told their first samples at once
                next(iter(base.sampler if base.batch_sampler is None else base.batch_sampler), None)
        return iter(())

    def _send(self, parts: Any) -> Any:
        data_rank = self.data_rank
        if data_rank.world_size == 1:
            if isinstance(parts, Exception):
                raise parts
            return parts[0]
        return scatter(data_rank.channel(), data_rank.limits, parts, operation="next batch", condition=f"of a loader of {self._name}")

    def _read_rounds(self, loader_pass: LoaderPass) -> Iterator[list[Any]]:
        """Yield the parts of each batch of all processes, after the next one was read."""
        self._first_round: list[Any] = []
        rounds = self._rounds(self._open_base(loader_pass))
        present = next(rounds, None)
        while present is not None:
            self._keep_state()
            loader_pass.order = take_snapshot() if self.base_dataloader.num_workers == 0 else None
            following = next(rounds, None)
            if following is None and self.dl_state_dict is not None:
                self.dl_state_dict["_iterator_finished"] = True
            if not self._first_round and self.data_rank.world_size > 1 and not self._drop_last:  # a copy: the script decides how long
                self._first_round = [recursively_apply(torch.clone, batch) for batch in present]  # a batch lives
            yield self._cut(present, last=following is None)
            present = following

    def _rounds(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        while found := list(islice(batches, self._reads)):
            if self._drop_last and len(found) < self._reads:
                return
            yield found

    def _cut(self, batches: list[Any], *, last: bool) -> list[Any]:
        """Return for each process: its batch, the samples that each one got, how many of them are not repeated, whether it is the last."""
        ranks, sizes = self.data_rank.world_size, [_rows(batch) for batch in batches]
        if ranks == 1:
            return [(batches[0], sizes, sizes, last)]
        cuts = self.split_batches or self.slice_fn is not slice_tensors
        if not cuts and len(batches) == ranks and (len(set(sizes)) == 1 or (not last and sum(sizes) % ranks)):
            return [(batch, sizes, sizes, last) for batch in batches]
        try:
            return self._sliced(_join(batches), last=last)
        except (TypeError, RuntimeError):  # text, or tensors of different lengths: batches stay whole
            if cuts:
                raise
        missing = ranks - len(batches)
        dealt = [*batches, *islice(cycle(self._first_round), missing)]
        return [(batch, [_rows(other) for other in dealt], [*sizes, *[0] * missing], last) for batch in dealt]

    def _sliced(self, whole: Any, *, last: bool) -> list[Any]:
        """Return the slices of a batch of all processes; the last one is filled with the first samples."""
        ranks, total = self.data_rank.world_size, _rows(whole)
        each, rest = divmod(total, ranks)
        if rest and last and not self._drop_last:
            whole = concatenate([whole, slice_tensors(_join(self._first_round), slice(0, ranks))], dim=0)
            each += 1
        real = [min(each, max(0, total - rank * each)) for rank in range(ranks)]
        pieces = (
            self.slice_fn(whole, slice(rank * each, (rank + 1) * each), process_index=rank, num_processes=ranks) for rank in range(ranks)
        )
        return [(piece, [each] * ranks, real, last) for piece in pieces]


def _join(batches: Sequence[Any]) -> Any:
    return batches[0] if len(batches) == 1 else concatenate(list(batches), dim=0)


def _rows(batch: Any) -> int:
    """Return the number of samples in a batch; 1 if it has no tensors."""
    try:
        return find_batch_size(batch) or 1
    except (TypeError, ValueError):
        return 1


class MpDeviceLoaderWrapper:
    """The loader of torch-xla around a prepared one. XLA devices are not supported by the drop-in."""

    def __init__(self, dataloader: DataLoaderShard, device: torch.device) -> None:
        from accelerate._unsupported import raise_unsupported

        raise_unsupported(f"MpDeviceLoaderWrapper(device={device})", "xla")


# -- preparing --------------------------------------------------------------------------------------------------------


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """Return a loader of the part of this process, or one that the first process reads for all (`dispatch_batches`).

    >>> loader = prepare_data_loader(DataLoader(list(range(8)), batch_size=2), num_processes=2, process_index=1)
    >>> [batch.tolist() for batch in loader]
    [[2, 3], [6, 7]]
    """
    stream = isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and stream
    if dispatch_batches and not put_on_device:
        raise ConfigError("Using `dispatch_batches=True` requires `put_on_device=True`: the parts that are sent end up on the device")
    data_rank = _choose_data_rank(num_processes, process_index, torch_device_mesh)
    _check_split_batches(dataloader, split_batches, dispatch_batches, data_rank.world_size)
    sampler = get_sampler(dataloader) if not stream else None
    generator = None
    seeded = isinstance(sampler, SeedableRandomSampler) and data_seed is None  # with a seed of its own; a given one replaces it
    if isinstance(sampler, RandomSampler) and use_seedable_sampler and not seeded:
        sampler = _make_seedable(sampler, data_seed, data_rank)
        _replace_sampler(dataloader, sampler)
    elif hasattr(sampler, "generator") and data_rank.world_size > 1 and not dispatch_batches:
        if not use_seedable_sampler or not _has_same_seed(sampler, data_rank):
            generator = _own_generator(sampler)
    elif sampler is not None:
        generator = getattr(sampler, "generator", None)
    common = _copied_arguments(dataloader, use_stateful_dataloader) | {"_drop_last": dataloader.drop_last, "_non_blocking": non_blocking}
    common |= {"use_stateful_dataloader": use_stateful_dataloader, "torch_device_mesh": torch_device_mesh, "_data_rank": data_rank}
    if dispatch_batches:
        batching = _same_batching(dataloader)
        built: Any = DataLoaderDispatcher(
            dataloader.dataset, split_batches, slice_fn=slice_fn_for_dispatch, _device=device, **common, **batching
        )
        return built
    dataset, batching = _share_out(dataloader, data_rank, split_batches, even_batches)
    if rng_types is not None and generator is None and "generator" in rng_types:
        rng_types.remove("generator")  # in place: Accelerate changes the list of the caller, too
    return DataLoaderShard(
        dataset, device if put_on_device else None, rng_types, generator, **common, **batching
    )  # fmt: skip


def _choose_data_rank(num_processes: int | None, process_index: int | None, mesh: Any) -> DataRank:
    """Return which part this process reads; processes that differ in other axes of a mesh than those of data parallelism read the same."""
    if mesh is None:
        return make_data_rank(num_processes, process_index)
    index, count = 0, 1
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name in ("dp", "fsdp", "dp_replicate", "dp_shard"):
            index, count = index * mesh.size(axis) + mesh.get_local_rank(axis), count * mesh.size(axis)
    return make_data_rank(count, index)


def _check_split_batches(dataloader: DataLoader[Any], split_batches: bool, dispatch: bool, processes: int) -> None:
    if not split_batches:
        return
    size = dataloader.batch_size if dataloader.batch_size is not None else getattr(find_batch_sampler(dataloader), "batch_size", None)
    if size is not None and size > 1 and size % processes:
        raise ConfigError(
            f"split_batches=True, and the batch size {size} is not a round multiple of the {processes} processes: write "
            f"batch_size={(size // processes + 1) * processes}, or leave split_batches out"
        )


def _make_seedable(sampler: RandomSampler, data_seed: int | None, data_rank: DataRank) -> SeedableRandomSampler:
    """Return a sampler with the same order on every process: the seed of the first one, unless one is given."""
    generator = sampler.generator if sampler.generator is not None else torch.Generator()
    made = SeedableRandomSampler(
        sampler.data_source, replacement=sampler.replacement, num_samples=sampler._num_samples, generator=generator, data_seed=data_seed
    )
    if data_seed is None and data_rank.compares:
        shared = collectives.broadcast_objects(
            data_rank.channel(), data_rank.limits, [made.initial_seed], 0, operation="seed of the order of a loader"
        )
        made.initial_seed = shared[0]
    return made


def _own_generator(sampler: Any) -> torch.Generator:
    """Give a sampler a generator, whose state the first process sends to the others where a pass begins."""
    generator: torch.Generator | None = sampler.generator
    if generator is None:
        generator = sampler.generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return generator


def _has_same_seed(sampler: Any, data_rank: DataRank) -> bool:
    """Return whether a sampler draws the same on every process: it is seeded by epoch, or all processes have the same seed."""
    if isinstance(sampler, SeedableRandomSampler) or not data_rank.compares:
        return True
    seeds = agree_or_raise(data_rank.channel(), data_rank.limits, torch.initial_seed(), operation="seed of the order of a loader")
    return len(set(seeds)) == 1


def _replace_sampler(dataloader: DataLoader[Any], sampler: Any) -> None:
    holder = find_sampler_holder(dataloader)
    object.__setattr__(holder, "sampler", sampler)


def _copied_arguments(dataloader: Any, stateful: bool) -> dict[str, Any]:
    """Return the arguments of a loader that do not say which samples come when."""
    found = {name: getattr(dataloader, name, default) for name, default in _LOADER_ARGUMENTS.items()}
    if stateful and hasattr(dataloader, "snapshot_every_n_steps"):
        found["snapshot_every_n_steps"] = dataloader.snapshot_every_n_steps
    return found


def _same_batching(dataloader: Any) -> dict[str, Any]:
    """Return the arguments that say which samples come in a batch."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {"batch_size": None, "sampler": dataloader.sampler}
    return {"batch_sampler": dataloader.batch_sampler}


def _share_out(dataloader: Any, data_rank: DataRank, split: bool, even: bool) -> tuple[Any, dict[str, Any]]:
    """Return the dataset and the batching of the loader of one process."""
    dataset, batching = dataloader.dataset, _same_batching(dataloader)
    ranks, rank = data_rank.world_size, data_rank.rank
    if ranks == 1:
        return dataset, batching
    if not isinstance(dataset, IterableDataset):
        batches = find_batch_sampler(dataloader)
        if batches is None:
            return dataset, {"batch_size": None, "sampler": _ItemShard(dataloader.sampler, ranks, rank, even)}
        shard = BatchSamplerShard(batches, ranks, rank, split, even)
        if dataloader.batch_sampler is None:  # the dataset is asked for whole batches
            return dataset, {"batch_size": None, "sampler": shard}
        return dataset, {"batch_sampler": shard}
    if split and dataloader.batch_size is not None:
        batching["batch_size"] = max(1, dataloader.batch_size // ranks)
    elif getattr(dataset, "n_shards", 0) >= ranks and hasattr(dataset, "shard"):  # streams of the package datasets share out their files
        return dataset.shard(num_shards=ranks, index=rank), batching
    size = 1 if dataloader.batch_size is None else dataloader.batch_size
    return IterableDatasetShard(dataset, size, dataloader.drop_last, ranks, rank, split), batching


class _ItemShard:
    """The items of one process out of a sampler, for loaders without batches (`batch_size=None`)."""

    def __init__(self, sampler: Any, num_processes: int, process_index: int, even_batches: bool) -> None:
        self.sampler = sampler
        self._batches = BatchSamplerShard(BatchSampler(sampler, 1, False), num_processes, process_index, even_batches=even_batches)

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler which epoch it is."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


# -- skipping ---------------------------------------------------------------------------------------------------------


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader like this one without the first batches, in every pass; both count their epochs together.

    >>> [batch.tolist() for batch in skip_first_batches(DataLoader(list(range(6)), batch_size=2), 2)]
    [[4, 5]]
    """
    check_count(num_batches, f"skip_first_batches(num_batches={num_batches!r}): write a whole number from 0", least=0)
    if isinstance(dataloader, PreparedLoader) and not isinstance(dataloader, DataLoaderAdapter):
        return _skip_first_batches(dataloader, num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"skip_first_batches was given a {type(dataloader).__name__}; it takes a DataLoader, prepared or not. "
            f"Write itertools.islice(..., {num_batches}, None) to skip items of another iterable."
        )
    base: Any = dataloader.base_dataloader if isinstance(dataloader, DataLoaderAdapter) else dataloader
    stateful = bool(getattr(dataloader, "use_stateful_dataloader", False))
    arguments = _copied_arguments(base, stateful)
    batches = find_batch_sampler(base)
    by_sampler = not isinstance(base.dataset, IterableDataset) and batches is not None
    if by_sampler:
        per_batch = dataloader._reads if isinstance(dataloader, DataLoaderDispatcher) else 1
        skipping = SkipBatchSampler(batches, num_batches * per_batch)
        arguments |= {"batch_sampler": skipping} if base.batch_sampler is not None else {"batch_size": None, "sampler": skipping}
    else:
        arguments |= _same_batching(base)
    if not isinstance(dataloader, DataLoaderAdapter):
        if by_sampler:
            return DataLoader(base.dataset, **arguments)
        return SkipDataLoader(base.dataset, num_batches, **arguments)
    return _skip_prepared(dataloader, num_batches, by_sampler, arguments)


def _skip_prepared(loader: DataLoaderAdapter, num_batches: int, by_sampler: bool, arguments: dict[str, Any]) -> DataLoaderAdapter:
    """Return a loader of the same class that skips; it shares the epochs and positions of the one that it was made of."""
    skip = loader.skip_batches + (0 if by_sampler else num_batches)
    common = {"skip_batches": skip, "use_stateful_dataloader": loader.use_stateful_dataloader, "_data_rank": loader.data_rank}
    dataset, device = loader.base_dataloader.dataset, loader.device if loader.put_on_device else None
    if isinstance(loader, DataLoaderDispatcher):
        made: Any = DataLoaderDispatcher(
            dataset, loader.split_batches, _drop_last=loader._drop_last, _non_blocking=loader.non_blocking, slice_fn=loader.slice_fn,
            torch_device_mesh=loader.torch_device_mesh, _device=device, **common, **arguments,
        )  # fmt: skip
    elif isinstance(loader, DataLoaderShard):
        made = DataLoaderShard(
            dataset, device, loader.rng_types, loader.synchronized_generator, _drop_last=loader._drop_last,
            _non_blocking=loader.non_blocking, torch_device_mesh=loader.torch_device_mesh, **common, **arguments,
        )  # fmt: skip
    else:
        made = SkipDataLoader(dataset, **common, **arguments)
    made._epochs = loader._epochs
    made._skipped = loader._skipped + (num_batches if by_sampler else 0)
    made.gradient_state, made.config = loader.gradient_state, loader.config
    return made


