"""`prepare`: wrap models, optimizers, data loaders and schedulers, and return them in the order in which they were given.

Models are prepared first whatever their position, then optimizers, loaders and schedulers, because each refers to the ones before.
Objects of other types are returned unchanged. A container of objects to prepare is an error, because it would be returned unprepared.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from slipstream.accelerator.components import AcceleratorBase
from slipstream.data.loader import PreparedLoader
from slipstream.data.options import LoaderSettings
from slipstream.data.prepare import build_loader, choose_seed, skip_first_batches
from slipstream.devices.memory import release_memory
from slipstream.devices.table import CPU
from slipstream.distributed import collectives
from slipstream.errors import ConfigError, StateError
from slipstream.parallel.compile import compile_in_place, compile_model
from slipstream.training.optimizer import AcceleratedOptimizer, move_state
from slipstream.training.scheduler import AcceleratedScheduler
from slipstream.training.stepper import time_forward

__all__ = ["PreparationMixin"]

_PREPARE_ORDER = ("model", "optimizer", "loader", "scheduler")


class PreparationMixin(AcceleratorBase):
    """The `prepare` methods."""

    def prepare(
        self,
        *args: Any,
        device_placement: Sequence[bool | None] | None = None,
        device_map: Any = None,
        offload_folder: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Prepare objects for this run and return them in order.

        `device_map` (a dict, or "auto") dispatches a model over devices, memory and disk; see `big_models/dispatch.py`. Weights for the
        disk are written to `offload_folder`, or to a temporary folder.

        >>> from slipstream import Accelerator
        >>> model, number = Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2), 7)
        >>> type(model).__name__, number
        ('Linear', 7)
        """
        places = _placement_by_object(device_placement, len(args))
        _check_objects(args, self._components.data_rank.world_size)
        if device_map is not None:
            from slipstream.big_models.prepare import dispatch_for_prepare

            dispatch_for_prepare([argument for argument in args if isinstance(argument, torch.nn.Module)], device_map, offload_folder)
        elif offload_folder is not None:
            raise ConfigError(f"prepare(offload_folder={str(offload_folder)!r}) needs device_map, which says what is offloaded.")
        results: list[Any] = list(args)
        loaders_before = len(self._components.registry.loaders)
        kinds = [_kind(argument) for argument in args]
        positions = {kind: [index for index, entry in enumerate(kinds) if entry == kind] for kind in _PREPARE_ORDER}
        self._components.strategy.expect([args[index] for index in positions["optimizer"]])
        for index in positions["model"]:
            results[index] = self.prepare_model(args[index], places[index])
        self._components.strategy.expect([])
        for index in positions["optimizer"]:
            results[index] = self.prepare_optimizer(args[index], places[index])
        loaders = [args[index] for index in positions["loader"]]
        placed = [places[index] for index in positions["loader"]]
        for index, loader in zip(positions["loader"], self._prepare_loaders(loaders, placed), strict=True):
            results[index] = loader
        for index in positions["scheduler"]:
            results[index] = self.prepare_scheduler(args[index])
            results[index].loaders_before = min(results[index].loaders_before, loaders_before)
        return results[0] if len(results) == 1 else tuple(results)

    # -- models ---------------------------------------------------------------------------------------------------

    def prepare_model(self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> torch.nn.Module:
        """Move one model to the device, apply precision, compile and wrap it; with `evaluation_mode` it is not wrapped."""
        components = self._components
        known = components.stepper.find(model)
        original = compile_in_place(components.strategy.unwrap(model)) if known is None else known.original
        known = known or components.stepper.find(original)
        time_forward(original, None)
        apart, moves = self.verify_device_map(original), self._moves_to_device(device_placement)
        if apart:
            from slipstream.big_models.prepare import check_not_trained_together

            check_not_trained_together(original, 1 if evaluation_mode else components.data_rank.world_size)
            evaluation_mode |= components.data_rank.world_size > 1
        else:
            components.strategy.check(original, _present_device(original) if moves else components.state.device)
        if moves and not apart:
            if evaluation_mode:
                original.to(components.state.device)
            else:
                components.strategy.move(original, components.state.device)
        components.precision.apply(original)
        if components.dynamo is not None:
            compile_model(original, components.dynamo)
        before = None if known is None else known.prepared
        prepared = original if evaluation_mode else components.strategy.prepare(original, before)
        time_forward(prepared, components.ledger.meter)
        for optimizer in components.registry.optimizers:
            if components.strategy.map_optimizer(optimizer.optimizer):
                optimizer.forget()
        if evaluation_mode:
            return prepared  # not trained here: an earlier record of the model stays as it is
        if known is None or prepared is not before or not known.has_same_parameters():
            components.stepper.add(original, prepared)
            if prepared is not original and components.stepper.guards is not None:
                components.stepper.guards.watch_inputs(prepared)
            if components.state.debug and components.strategy.replicated:
                components.state.expect_equal(f"weights of {type(original).__name__}", partial(_current_weights, weakref.ref(original)))
        return prepared

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a device map dispatched the model, so that several processes cannot train it together."""
        if not any(hasattr(module, "hf_device_map") for module in model.modules()):
            return False
        from slipstream.big_models.prepare import is_dispatched

        return is_dispatched(model)

    def _moves_to_device(self, device_placement: bool | None) -> bool:
        return self._components.device_placement if device_placement is None else device_placement

    def unwrap_model(self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> torch.nn.Module:
        """Return the user's model inside any wrappers; see `parallel/unwrap.py`."""
        from slipstream.parallel.unwrap import extract_model_from_parallel

        inner: torch.nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return inner

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the weights of a model under the names that it has without wrappers.

        Of a sharded model every process gets the whole weights, in host memory; all processes have to call it.
        """
        return self._components.strategy.full_state(self.unwrap_model(model, keep_torch_compile=False) if unwrap else model)

    # -- optimizers and schedulers --------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer so that it steps where an update ends; see `training/optimizer.py`."""
        components = self._components
        known = components.registry.find_optimizer(optimizer)
        if known is not None:
            return known
        if isinstance(optimizer, AcceleratedOptimizer) and optimizer.stepper is components.stepper:  # after free_memory
            optimizer.forget()
            components.registry.optimizers.append(optimizer)
            return optimizer
        if isinstance(optimizer, AcceleratedOptimizer):
            raise StateError(
                f"this {type(optimizer.optimizer).__name__} was prepared by another Accelerator, and follows its updates: "
                "prepare the original optimizer (or a new one), not the one that the other returned"
            )
        if self._moves_to_device(device_placement) and optimizer.state and components.state.device.type != CPU.type:
            move_state(optimizer)
        components.strategy.map_optimizer(optimizer)
        prepared = self._wrap_optimizer(optimizer)
        components.registry.optimizers.append(prepared)
        if components.ledger.meter is not None:
            components.ledger.meter.without_optimizer = False
        return prepared

    def _wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
        components = self._components
        return AcceleratedOptimizer(optimizer, components.stepper, components.strategy.step if components.strategy.averages else None)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a scheduler so that it steps once per update; see `training/scheduler.py`."""
        components = self._components
        for known in components.registry.schedulers:
            if scheduler is known or scheduler is known.scheduler:
                return known
        prepared = self._wrap_scheduler(scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler)
        components.registry.schedulers.append(prepared)
        return prepared

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        components = self._components
        state, registry = components.state, weakref.ref(components.registry)  # which will hold the scheduler
        repeats = components.scheduler_steps_per_process and not components.loader_config.split_batches
        return AcceleratedScheduler(
            scheduler,
            components.gradient_state,
            lambda optimizer: found.find_optimizer(optimizer) if (found := registry()) is not None else None,
            step_with_optimizer=components.step_scheduler_with_optimizer,
            moves=components.state.num_processes if repeats else 1,
            check_same=lambda value: state.verify_replicas(metric=float(value)),
            on_first_step=None if components.stepper.guards is None else components.stepper.guards.look_at_schedule,
            loaders_before=len(components.registry.loaders),
        )

    # -- loaders --------------------------------------------------------------------------------------------------

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        *,
        keep_batch_size: bool = False,
    ) -> PreparedLoader:
        """Return a loader of this process's part of each global batch; see `data/loader.py`.

        With `keep_batch_size` the batch size is not derived from `effective_batch_size`, as for evaluation.
        """
        return self._prepare_loaders([data_loader], [device_placement], slice_fn_for_dispatch, keep_batch_size)[0]

    def _prepare_loaders(
        self,
        loaders: Sequence[Any],
        placements: Sequence[bool | None],
        slice_fn: Callable[..., Any] | None = None,
        keep_batch_size: bool = False,
    ) -> list[PreparedLoader]:
        components = self._components
        prepared = []
        for loader, place, seed in zip(loaders, placements, self._seeds(loaders), strict=True):
            settings = LoaderSettings(
                data_rank=components.data_rank,
                config=components.loader_config,
                seed=seed,
                device=components.state.device,
                put_on_device=self._moves_to_device(place),
                gradient_state=components.gradient_state,
                effective_batch_size=None if keep_batch_size else components.effective_batch_size,
                slice_fn=slice_fn,
            )
            built = build_loader(loader, settings)
            if components.rng_types:
                from slipstream.distributed.functional import synchronize_rng_states

                built.at_start = partial(synchronize_rng_states, components.rng_types)
            if built not in components.registry.loaders:
                components.registry.loaders.append(built)
            prepared.append(built)
        return prepared

    def _seeds(self, loaders: Sequence[Any]) -> list[int]:
        """Return the seeds of rank 0, so that all ranks read in the same order."""
        components = self._components
        first = len(components.registry.loaders)
        seeds = [choose_seed(loader, components.loader_config, first + number) for number, loader in enumerate(loaders)]
        if not seeds or components.data_rank.world_size == 1:
            return seeds
        shared: list[int] = collectives.broadcast_objects(components.state.channel(), components.state.limits, seeds, 0)
        return shared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that starts after `num_batches` batches; see `data/prepare.py`."""
        return skip_first_batches(dataloader, num_batches)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A block in which processes may run out of batches at different times; those that are done join the collectives of the others.

        With `even_batches=False` loaders return what each process has, without padding, while the block runs.
        """
        if isinstance(joinables, torch.nn.Module):
            raise TypeError(f"join_uneven_inputs got a {type(joinables).__name__}: write a list of prepared models, [model]")
        loaders = self._components.registry.loaders if even_batches is not None else []
        before = [(loader, loader.uneven) for loader in loaders]
        stepper = self._components.stepper
        for loader in loaders:
            loader.set_uneven(even_batches is False)
        stepper.joined = self._components.data_rank.world_size > 1
        try:
            with self._components.strategy.join([joinable for joinable in joinables if isinstance(joinable, torch.nn.Module)]):
                yield
        finally:
            stepper.joined = False
            for loader, uneven in before:
                loader.set_uneven(uneven)

    # -- memory ---------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects and cached memory; assign the result to the names: `model, = free_memory(model)`."""
        components = self._components
        components.stepper.forget()
        components.registry.forget()
        components.gradient_state.forget()
        components.state.runtime.replicas.clear()
        count = len(objects)
        del objects
        release_memory()
        return [None] * count

    def clear(self, *objects: Any) -> list[None]:
        """See `free_memory`."""
        return self.free_memory(*objects)


def _current_weights(model: weakref.ref[torch.nn.Module]) -> dict[str, Any]:
    """Return the weights of a model that is still alive."""
    present = model()
    return {} if present is None else present.state_dict()


def _present_device(model: torch.nn.Module) -> torch.device:
    """Return the device of a model that is about to be moved; none of its parameters may be on meta."""
    return next((parameter.device for parameter in model.parameters() if parameter.device.type != "meta"), torch.device(CPU.type))


def _kind(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return "model"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, DataLoader):
        return "loader"
    is_scheduler = isinstance(value, torch.optim.lr_scheduler.LRScheduler | AcceleratedScheduler) or (
        callable(getattr(value, "step", None)) and isinstance(getattr(value, "optimizer", None), torch.optim.Optimizer)
    )
    return "scheduler" if is_scheduler else "other"


def _check_objects(objects: Sequence[Any], world_size: int) -> None:
    for thing in objects:
        if world_size > 1 and _kind(thing) == "other" and hasattr(thing, "__iter__") and hasattr(thing, "dataset"):
            warnings.warn(
                f"prepare returns the {type(thing).__name__} unchanged, because it is not a DataLoader: every process reads all of it, "
                "unless it shares its data between processes itself",
                stacklevel=3,
            )
        if isinstance(thing, type) and issubclass(thing, torch.nn.Module | torch.optim.Optimizer | DataLoader):
            raise ConfigError(f"prepare was given the class {thing.__name__}, not an object of it: write {thing.__name__}(...)")
        if isinstance(thing, (list, tuple, dict)):
            inside = list(thing.values()) if isinstance(thing, dict) else thing
            found = next((item for item in inside if _kind(item) != "other"), None)
            if found is not None:
                raise ConfigError(
                    f"prepare was given a {type(thing).__name__} with a {type(found).__name__} in it, which would be returned unprepared: "
                    "pass the objects themselves, e.g. prepare(*objects)"
                )
    seen: dict[int, torch.optim.Optimizer] = {}
    for thing in objects:
        if not isinstance(thing, torch.optim.Optimizer):
            continue
        for parameter in (parameter for group in thing.param_groups for parameter in group["params"]):
            if seen.setdefault(id(parameter), thing) is not thing:
                raise ConfigError(
                    f"prepare was given two optimizers ({type(seen[id(parameter)]).__name__}, {type(thing).__name__}) that share a "
                    f"parameter of shape {tuple(parameter.shape)}: both would update it. Give each parameter to one of them."
                )


def _placement_by_object(device_placement: Sequence[bool | None] | None, count: int) -> Sequence[bool | None]:
    if device_placement is None:
        return [None] * count
    if not isinstance(device_placement, (list, tuple)) or len(device_placement) != count:
        raise ConfigError(f"prepare(device_placement={device_placement!r}): it is a list with one entry for each of the {count} objects")
    return device_placement
