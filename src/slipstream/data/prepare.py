"""From a script's `DataLoader` to a prepared one: which kind of loader it becomes, and the seed of its order.

`build` is what an Accelerator calls; `prepare_data_loader` is the same as a plain function. A loader that was prepared already
is given back, and one that another Accelerator prepared is prepared anew from the script's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from slipstream.comm import ops
from slipstream.data.batching import derive
from slipstream.data.dispatch import dispatch_loader
from slipstream.data.loader import PreparedLoader, get_sampler
from slipstream.data.mapped import MapLoader, samples_per_batch
from slipstream.data.options import DataLoaderConfiguration
from slipstream.data.order import mix, refuse_sharded
from slipstream.data.place import Place
from slipstream.data.reading import stay
from slipstream.data.stream import stream_loader, warn_of_slice_fn
from slipstream.errors import ConfigError
from slipstream.logging import get_logger
from slipstream.runtime.current import current
from slipstream.runtime.gradient_state import GradientState

__all__ = ["build", "prepare_data_loader", "seed_of"]


def build(
    loader: DataLoader[Any],
    *,
    place: Place,
    config: DataLoaderConfiguration,
    seed: int,
    device: torch.device | None,
    put_on_device: bool,
    gradient_state: GradientState,
    effective_batch_size: int | None = None,
    slice_fn: Callable[..., Any] | None = None,
) -> PreparedLoader:
    """The prepared loader of the kind that the script's loader and the configuration ask for."""
    if isinstance(loader, PreparedLoader):
        if loader.gradient_state is gradient_state:
            return loader
        loader = loader.original
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"a {type(loader).__name__} cannot be prepared as a loader: pass a torch.utils.data.DataLoader")
    config.check()
    _warn_of_seedable(config)
    refuse_sharded(loader)
    if isinstance(loader.dataset, IterableDataset):
        _refuse_own_iteration(type(loader))
    if loader.persistent_workers and not stay(loader):
        get_logger(__name__).warning(
            f"persistent_workers=True of the loader of {type(loader.dataset).__name__} has no effect: what it gives depends on the epoch, "
            "and workers that stay would never hear of the next one, so they are started for every pass."
        )
    settings: dict[str, Any] = {
        "place": place,
        "config": config,
        "seed": seed,
        "device": device,
        "put_on_device": put_on_device,
        "gradient_state": gradient_state,
    }
    if config.dispatch_batches:
        return dispatch_loader(loader, effective_batch_size=effective_batch_size, slice_fn=slice_fn, **settings)
    if isinstance(loader.dataset, IterableDataset):
        return stream_loader(loader, effective_batch_size=effective_batch_size, slice_fn=slice_fn, **settings)
    if slice_fn is not None:
        warn_of_slice_fn()
    if effective_batch_size is None:
        return MapLoader(loader, **settings)
    per_rank, steps = derive(effective_batch_size, samples_per_batch(loader), place.world_size, split=config.split_batches)
    return MapLoader(loader, samples_per_rank=per_rank, steps_per_update=steps, **settings)


def seed_of(loader: DataLoader[Any], config: DataLoaderConfiguration, ordinal: int = 0) -> int:
    """The seed of a loader's order on this rank: `data_seed`, else that of the loader's own generator, else the script's.

    `ordinal` numbers the loaders of a script, so that two of them are not shuffled alike; the first one has `data_seed` itself.

    >>> seed_of(DataLoader(range(4)), DataLoaderConfiguration(data_seed=7))
    7
    """
    if isinstance(loader, PreparedLoader):
        return loader.seed
    if config.data_seed is not None:
        return mix(config.data_seed, "loader", ordinal) if ordinal else config.data_seed
    for holder in (loader, get_sampler(loader)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            return int(generator.initial_seed())
    return mix(torch.initial_seed(), "loader", ordinal)


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
    """This process's part of a loader's batches, without an Accelerator; see `data/loader.py`.

    All processes call it, as rank 0 tells the others the seed of the order; not so if `data_seed`, or the place in
    `num_processes` and `process_index`, is given.

    An Accelerator does not know of such a loader: its `gather_for_metrics` drops no repeated samples of it, and its `backward` weighs
    nothing. Pass `gradient_state=accelerator.gradient_state`, or give the loader to `accelerator.prepare`, which prepares the script's
    own loader in it anew; so it is with a loader that was pickled or copied.

    >>> loader = prepare_data_loader(DataLoader(range(8), batch_size=2), num_processes=2, process_index=1)
    >>> [batch.tolist() for batch in loader]
    [[2, 3], [6, 7]]
    """
    _refuse(torch_device_mesh, rng_types)
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
    place = _place(num_processes, process_index)
    seed = seed_of(dataloader, config)
    if data_seed is None and place.compares and place.world_size > 1:
        seed = ops.broadcast_objects(runtime.channel(), runtime.limits, [seed], 0, operation="prepare_data_loader")[0]
    return build(
        dataloader,
        place=place,
        config=config,
        seed=seed,
        device=device,
        put_on_device=put_on_device,
        gradient_state=gradient_state or GradientState(),
        slice_fn=slice_fn_for_dispatch,
    )


def _place(num_processes: int | None, process_index: int | None) -> Place:
    """This process among those that share the data, or the place that was given by hand."""
    runtime = current()
    return Place(
        runtime.process.rank if process_index is None else process_index,
        runtime.process.world_size if num_processes is None else num_processes,
        runtime.channel,
        runtime.limits,
        compares=num_processes is None and process_index is None,
    )


def _refuse(torch_device_mesh: Any, rng_types: Sequence[Any] | None) -> None:
    """Arguments that the relative has and that mean nothing here."""
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
    """Streams are read by a loader of ours, so what a subclass does to batches would be lost."""
    iterates = next(base for base in kind.__mro__ if "__iter__" in vars(base))
    if not iterates.__module__.startswith(("torch.", "torchdata.")):
        raise ConfigError(
            f"the DataLoader given to prepare is a {kind.__name__} over an IterableDataset, whose own __iter__ would not be called: each "
            "process reads its part of the stream by itself. Do it in collate_fn, in the dataset, or to the batches of the prepared loader "
            "(skip_first_batches, too, is called on the prepared loader)."
        )


def _warn_of_seedable(config: DataLoaderConfiguration) -> None:
    if config.use_seedable_sampler is False and "told" not in config.__dict__:
        config.__dict__["told"] = True
        get_logger(__name__).warning(
            "use_seedable_sampler=False has no effect: the order of samples is always a function of seed and epoch. Leave it out."
        )
