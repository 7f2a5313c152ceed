"""Prepare a `DataLoader`, and skip its first batches.

`build_loader` chooses the kind of prepared loader; `prepare_data_loader` is the same without an Accelerator. A loader that this
Accelerator prepared is returned as it is, and one that another Accelerator prepared is prepared again from the user's loader.
`skip_first_batches` seeks: no data is read to get there, unless the dataset of a plain loader is an iterable one without `skip`, which is
a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from slipstream.config.handlers import check_count
from slipstream.data.loader import PreparedLoader, clone, get_sampler, keeps_workers
from slipstream.data.map_loader import MapLoader, samples_per_batch
from slipstream.data.options import DataLoaderConfiguration, DataRank, LoaderSettings
from slipstream.data.order import refuse_distributed_sampler
from slipstream.data.plan import split_effective_batch
from slipstream.data.random_state import derive_seed
from slipstream.distributed import collectives
from slipstream.distributed.current import current
from slipstream.distributed.gradient_state import GradientState
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["build_loader", "choose_seed", "prepare_data_loader", "skip_first_batches"]


def build_loader(loader: DataLoader[Any], settings: LoaderSettings) -> PreparedLoader:
    """Build the prepared loader of the kind that the script's loader and the configuration ask for."""
    config, data_rank, slice_fn = settings.config, settings.data_rank, settings.slice_fn
    if isinstance(loader, PreparedLoader):
        if loader.gradient_state is settings.gradient_state:
            return loader
        loader = loader.original
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"a {type(loader).__name__} cannot be prepared as a loader: pass a torch.utils.data.DataLoader")
    config.check()
    _warn_of_seedable(config)
    refuse_distributed_sampler(loader)
    if isinstance(loader.dataset, IterableDataset):
        _refuse_own_iteration(type(loader))
    if loader.persistent_workers and not keeps_workers(loader):
        get_logger(__name__).warning(
            f"persistent_workers=True of the loader of {type(loader.dataset).__name__} has no effect: what it gives depends on the epoch, "
            "and workers that stay would never hear of the next one, so they are started for every pass."
        )
    if settings.effective_batch_size is not None:
        per_rank, steps = split_effective_batch(
            settings.effective_batch_size, samples_per_batch(loader), data_rank.world_size, split=config.split_batches
        )
        settings = replace(settings, samples_per_rank=per_rank, steps_per_update=steps)
    if config.dispatch_batches:
        from slipstream.data.dispatch_loader import DispatchLoader

        get_logger(__name__).info(f"rank 0 reads {type(loader.dataset).__name__} for all {data_rank.world_size} processes")
        return DispatchLoader(loader, settings)
    if slice_fn is not None:
        get_logger(__name__).warning("slice_fn_for_dispatch has no effect without dispatch_batches=True: each rank collates its samples")
    if isinstance(loader.dataset, IterableDataset):
        from slipstream.data.stream_loader import build_stream_loader

        return build_stream_loader(loader, settings)
    return MapLoader(loader, settings)


def choose_seed(loader: DataLoader[Any], config: DataLoaderConfiguration, ordinal: int = 0) -> int:
    """Return the seed of a loader's order on this rank: `data_seed`, else that of the loader's own generator, else the script's.

    `ordinal` numbers the loaders of a script, so that two of them are not shuffled alike; the first one has `data_seed` itself.

    >>> choose_seed(DataLoader(range(4)), DataLoaderConfiguration(data_seed=7))
    7
    """
    if isinstance(loader, PreparedLoader):
        return loader.seed
    if config.data_seed is not None:
        return derive_seed(config.data_seed, "loader", ordinal) if ordinal else config.data_seed
    for holder in (loader, get_sampler(loader)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            return int(generator.initial_seed())
    return derive_seed(torch.initial_seed(), "loader", ordinal)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = False,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool | None = None,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    gradient_state: GradientState | None = None,
) -> PreparedLoader:
    """Return a loader of this process's part of the batches, without an Accelerator; see `data/loader.py`.

    All processes call it, as rank 0 sends the others the seed of the order, unless `data_seed`, or `num_processes` and
    `process_index`, are given.

    An Accelerator does not know of such a loader: its `gather_for_metrics` drops no repeated samples of it, and its `backward` weighs
    nothing. Pass `gradient_state=accelerator.gradient_state`, or give the loader to `accelerator.prepare`, which prepares the script's
    own loader again. The same holds for a loader that was pickled or copied.

    >>> loader = prepare_data_loader(DataLoader(range(8), batch_size=2), num_processes=2, process_index=1)
    >>> [batch.tolist() for batch in loader]
    [[2, 3], [6, 7]]
    """
    _check_unused_arguments(torch_device_mesh, rng_types)
    runtime = current()
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    rank = runtime.process.rank if process_index is None else process_index
    ranks = runtime.process.world_size if num_processes is None else num_processes
    is_own = num_processes is None and process_index is None
    data_rank = DataRank(rank, ranks, runtime.channel, runtime.limits, compares=is_own)
    seed = choose_seed(dataloader, config)
    if data_seed is None and data_rank.compares and data_rank.world_size > 1:
        seed = collectives.broadcast_objects(runtime.channel(), runtime.limits, [seed], 0, operation="prepare_data_loader")[0]
    settings = LoaderSettings(
        data_rank=data_rank,
        config=config,
        seed=seed,
        device=device,
        put_on_device=put_on_device,
        gradient_state=gradient_state or GradientState(),
        slice_fn=slice_fn_for_dispatch,
    )
    return build_loader(dataloader, settings)


def _check_unused_arguments(torch_device_mesh: Any, rng_types: Sequence[Any] | None) -> None:
    """Raise or warn for arguments of Accelerate that have no effect here."""
    if torch_device_mesh is not None:
        raise ConfigError(
            "prepare_data_loader(torch_device_mesh=...) is not read: say how many processes share the data and which of them this one is, "
            "with num_processes= and process_index= (for processes that see the same data, the same index)."
        )
    if rng_types:
        get_logger(__name__).warning(
            f"prepare_data_loader(rng_types={list(rng_types)}) has no effect: the order is a function of seed and epoch, "
            "and no random state has to agree between processes. Call synchronize_rng_states(...) where yours should."
        )


def _refuse_own_iteration(kind: type) -> None:
    """Raise for a subclass with its own `__iter__`: streams are read by a loader of ours, so it would not be called."""
    iterates = next(base for base in kind.__mro__ if "__iter__" in vars(base))
    if not iterates.__module__.startswith(("torch.", "torchdata.")):
        raise ConfigError(
            f"the DataLoader given to prepare is a {kind.__name__} over an IterableDataset, whose own __iter__ would not be called: each "
            "process reads its part of the stream by itself. Do it in collate_fn, in the dataset, or to the batches of the prepared loader "
            "(skip_first_batches, too, is called on the prepared loader)."
        )


def _warn_of_seedable(config: DataLoaderConfiguration) -> None:
    if config.use_seedable_sampler is False and "_warned" not in config.__dict__:
        config.__dict__["_warned"] = True
        get_logger(__name__).warning(
            "use_seedable_sampler=False has no effect: the order of samples is always a function of seed and epoch. Leave it out."
        )


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader that begins after `num_batches` batches of the present epoch in its first pass, and from the start in later ones.

    The present epoch is the one being read or left by `break`, if it got that far; else the next one. A pass of which only one batch
    was read, and not trained on, is not left: that was a look at the data.

    After `load_state` the present epoch is that of the loaded position, and `num_batches` counts from its start, not from the position:
    the number of batches that the checkpoint stands at leads to the position itself, exactly. At the end of an epoch, 0 means the next.

    >>> list(skip_first_batches(DataLoader(range(6), batch_size=2), 2))
    [tensor([4, 5])]
    """
    check_count(num_batches, f"skip_first_batches(num_batches={num_batches!r}): write a whole number from 0", least=0)
    if isinstance(dataloader, PreparedLoader):
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"skip_first_batches was given a {type(dataloader).__name__}; it takes a DataLoader, prepared or not. "
            f"Write itertools.islice(..., {num_batches}, None) to skip items of another iterable."
        )
    return _copy_skipping(dataloader, num_batches)


def _copy_skipping(loader: DataLoader[Any], num_batches: int) -> DataLoader[Any]:
    """Return a copy of a plain loader, of its own class, whose first pass begins later."""
    if num_batches == 0:
        return clone(loader, _iterator=None)
    if isinstance(loader.dataset, IterableDataset):
        return _SkippingStreamLoader(loader, num_batches)
    index_sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return clone(loader, _iterator=None, **{index_sampler: _SkippingSampler(getattr(loader, index_sampler), num_batches)})


class _SkippingSampler:
    """A sampler or batch sampler without its first items, once."""

    def __init__(self, inner: Any, skipped: int) -> None:
        self._inner = inner
        self._skipped = skipped

    def __iter__(self) -> Iterator[Any]:
        skipped, self._skipped = self._skipped, 0
        return islice(iter(self._inner), skipped, None)

    def __len__(self) -> int:
        return max(0, len(self._inner) - self._skipped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._inner, name)


class _SkippingStreamLoader(DataLoader[Any]):
    """A plain loader of an iterable dataset without its first batches, once."""

    _original: DataLoader[Any]
    _skipped: int

    def __init__(self, loader: DataLoader[Any], skipped: int) -> None:
        # that of DataLoader is not called: the attributes are those of the loader
        self.__dict__.update({**loader.__dict__, "_iterator": None})
        self.__dict__.update({"_original": loader, "_skipped": skipped})

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # an iterator of ours where batches are skipped
        skipped, self._skipped = self._skipped, 0
        if not skipped:
            return iter(self._original)
        skip = getattr(self._original.dataset, "skip", None)
        if callable(skip) and self._original.num_workers == 0:  # what several workers share is the dataset's affair
            return iter(clone(self._original, _iterator=None, dataset=skip(skipped * (self._original.batch_size or 1))))
        get_logger(__name__).warning(
            f"skip_first_batches reads {skipped} batches to skip them: {type(self._original.dataset).__name__} has no skip(n) to seek with"
        )
        return islice(iter(self._original), skipped, None)

    def __len__(self) -> int:
        return max(0, len(self._original) - self._skipped)
