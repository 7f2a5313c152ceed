"""Methods of `Accelerator` about data: loaders, their batches, uneven inputs, metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["DataMixin"]


class DataMixin:
    """The data side of `accelerate.Accelerator`. Its methods come before those of `slipstream.Accelerator`."""

    rng_types: list[Any] = ["generator"]
    """Random states that the first process sends to the others where a pass over a shuffled loader begins."""

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        **slipstream: Any,
    ) -> Any:
        """Return a `DataLoaderShard` of this process's part, or a `DataLoaderDispatcher`; see `accelerate.data_loader`."""
        keep = slipstream.pop("keep_batch_size", False)
        if slipstream:
            raise TypeError(f"prepare_data_loader() got an unexpected keyword argument {next(iter(slipstream))!r}")
        return self._prepare_loaders([data_loader], [device_placement], slice_fn_for_dispatch, keep)[0]

    def _prepare_loaders(
        self,
        loaders: Sequence[Any],
        placements: Sequence[bool | None],
        slice_fn: Callable[..., Any] | None = None,
        keep_batch_size: bool = False,
    ) -> list[Any]:
        if self._components.effective_batch_size is not None and not keep_batch_size:  # an option of Slipstream, with its loaders
            return super()._prepare_loaders(loaders, placements, slice_fn, keep_batch_size)
        prepared = [self._prepare_loader(loader, place, slice_fn) for loader, place in zip(loaders, placements, strict=True)]
        known = self._components.registry.loaders
        for loader in prepared:
            if not any(loader is other for other in known):
                known.append(loader)
        return prepared

    def _prepare_loader(self, loader: Any, place: bool | None, slice_fn: Callable[..., Any] | None) -> Any:
        import accelerate.data_loader
        from accelerate._loader_base import DataLoaderAdapter

        if isinstance(loader, DataLoaderAdapter) or getattr(loader, "_is_accelerate_prepared", False):
            return loader
        components, config = self._components, self._components.loader_config
        config.check()
        data_rank = components.data_rank
        build = getattr(accelerate.accelerator, "prepare_data_loader", accelerate.data_loader.prepare_data_loader)  # axolotl replaces it
        built = build(
            loader,
            self.device,
            num_processes=data_rank.world_size,
            process_index=data_rank.rank,
            split_batches=config.split_batches,
            put_on_device=self._moves_to_device(place),
            rng_types=self.rng_types.copy(),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn,
            use_seedable_sampler=bool(config.use_seedable_sampler),
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        built.config.resume = config.resume
        built._is_accelerate_prepared = True
        return built

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results of all processes, one for each sample; see `slipstream.Accelerator.gather_for_metrics`.

        With `use_gather_object` on several processes, tensors are lists of their rows, as in Accelerate: transformers' Trainer passes its
        predictions so (`eval_use_gather_object`).
        """
        if use_gather_object and isinstance(input_data, torch.Tensor) and input_data.ndim and self._components.data_rank.world_size > 1:
            input_data = list(input_data)
        active = self.gradient_state.active_dataloader
        if getattr(active, "hides_repeated_samples", False) and active.end_of_dataloader:
            from slipstream.logging import get_logger

            get_logger(__name__).warning_once(
                f"gather_for_metrics: the last batch of a stream ({type(active.dataset.dataset).__name__}) that workers read was filled "
                "with samples from its start, and how many is known to the workers alone: the result may hold repeated samples. Pass "
                "dispatch_batches=True, num_workers=0 or drop_last=True to be sure."
            )
        return super().gather_for_metrics(input_data, use_gather_object)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader like this one without its first batches; see `accelerate.data_loader.skip_first_batches`."""
        from accelerate.data_loader import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A block in which processes may run out of batches at different times; those that are done join the collectives of the others.

        `even_batches` stands in for the option of the prepared loaders while the block runs.
        """
        if self.num_processes > 1 and not str(self.distributed_type).startswith("MULTI_"):
            warnings.warn(
                "join_uneven_inputs is only supported for multi-GPU and multi-CPU training with replicas. With "
                f"{self.distributed_type} the block has no effect: loaders of prepare give every process as many batches.",
                stacklevel=3,
            )
            yield
            return
        with self._even_batches_as(even_batches), super().join_uneven_inputs(joinables):
            yield

    @contextmanager
    def _even_batches_as(self, even_batches: bool | None) -> Iterator[None]:
        from accelerate._batch_sharding import find_batch_sampler
        from accelerate._loader_base import find_shard

        before = []
        if even_batches is not None and self._components.data_rank.world_size > 1:
            for loader in self._dataloaders:
                shard = find_shard(find_batch_sampler(loader))
                if shard is None:
                    warnings.warn(
                        "join_uneven_inputs(even_batches=...) is only supported for map-style datasets: the loader of a "
                        f"{type(loader.dataset).__name__} stays as it is.",
                        stacklevel=4,
                    )
                else:
                    before.append((shard, shard.even_batches))
                    shard.even_batches = even_batches
        try:
            yield
        finally:
            for shard, value in before:
                shard.even_batches = value
