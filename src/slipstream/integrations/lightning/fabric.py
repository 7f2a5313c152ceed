"""`SlipstreamFabricStrategy`: Lightning's `Fabric` on Slipstream's processes, replicas or shards, data and checkpoints.

Fabric leaves the loop to the script. The strategy does for `fabric.setup`, `backward`, `clip_gradients`, `save` and `load` what the one in
`trainer.py` does for the `Trainer`. Fabric does not say what a loader is for, so a short last batch is padded as Lightning does it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins.precision.precision import Precision
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.rank_zero import rank_zero_only

from slipstream.errors import CheckpointError, ConfigError
from slipstream.integrations.lightning.checkpoints import (
    FolderContent,
    check_not_a_folder,
    gather_whole,
    is_folder_path,
    is_slipstream_folder,
    read_folder,
    shard_optimizer_state,
    write_folder,
)
from slipstream.integrations.lightning.data import ShardedLoader, find_global_sampler
from slipstream.integrations.lightning.precision import replace_precision
from slipstream.integrations.lightning.runtime import ForwardModule, HostedRuntime
from slipstream.integrations.lightning.strategy_mixin import StrategyMixin
from slipstream.strategies.ddp import Replicated

__all__ = ["SlipstreamFabricStrategy"]

_LAYOUT = "slipstream_layout"
"""Which model and optimizer of a folder has which name in the state that was saved."""


class _SyncControl(_BackwardSyncControl):  # type: ignore[misc]
    """`fabric.no_backward_sync`."""

    def __init__(self, runtime: HostedRuntime) -> None:
        self._runtime = runtime

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._runtime.no_sync(module) if enabled else nullcontext()


class SlipstreamFabricStrategy(StrategyMixin, ParallelStrategy):  # type: ignore[misc]
    """Run a `lightning.Fabric` on Slipstream: `Fabric(strategy=SlipstreamFabricStrategy(), devices=2, accelerator="cpu")`.

    The options are those of `SlipstreamStrategy`, without `last_batch`.
    """

    host = "Fabric"

    def __init__(
        self,
        parallel: str | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Precision | None = None,
        **options: Any,
    ) -> None:
        self._begin(parallel, options)
        if options.get("last_batch", "pad") != "pad":
            raise ConfigError("SlipstreamFabricStrategy(last_batch='exact'): Fabric does not say what a loader is for; leave it out")
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._backward_sync_control = _SyncControl(self.runtime)
        self._trained: weakref.WeakKeyDictionary[Any, list[torch.nn.Module]] = weakref.WeakKeyDictionary()

    # -- processes ------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Precision:
        """The precision plugin: ours for mixed precision."""
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        self._check_precision(plugin)
        self._precision = plugin

    def _configure_launcher(self) -> None:
        self._check_devices()
        if self.num_processes * self.num_nodes > 1:  # one process needs no launcher, and leaves no variables behind
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _set_world_ranks(self) -> None:
        self._name_ranks()
        rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Set up the device and open the process group."""
        super().setup_environment()
        self._set_world_ranks()
        self.precision = self._open(self.precision, replace_precision)

    # -- models and optimizers ------------------------------------------------------------------------------------

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model."""
        if not any(parameter.requires_grad for parameter in module.parameters()) and not self.runtime.shards:
            return self.runtime.prepare(module, trains=False)
        return self.runtime.prepare(module)

    def setup_module_and_optimizers(self, module: torch.nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        """Wrap a model, and let its optimizers work on the parameters that it has now."""
        strategy = self.runtime.components.strategy
        strategy.expect(optimizers)
        prepared = self.setup_module(module)
        self._trained.clear()
        strategy.expect([])
        return prepared, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Let an optimizer work on the parameters that its model has now."""
        self.runtime.components.strategy.map_optimizer(optimizer)
        return optimizer

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move a model to the device of this process, unless it is to be sharded."""
        self.runtime.components.strategy.move(module, self.root_device)

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, watched and reduced by us."""
        precision = self.precision
        precision.pre_backward(tensor, module)
        self.runtime.backward(tensor, partial(precision.backward, tensor, module, *args, **kwargs))
        precision.post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, after a check that gradients are averaged."""
        if "closure" not in kwargs:
            self.runtime.check_reduced(self._models_of(optimizer))
        return super().optimizer_step(optimizer, **kwargs)

    def _models_of(self, optimizer: Any) -> list[torch.nn.Module]:
        """Return the models that an optimizer trains, looked up once."""
        known = self._trained.get(optimizer)
        if known is None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            owners, _ = self.runtime.components.stepper.owners(parameters)
            known = self._trained[optimizer] = [owner.prepared for owner in owners]
        return known

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Clip gradients to a norm, and return the norm that they had on all ranks."""
        self.precision.unscale_gradients(optimizer)
        norm = self.runtime.clip_norm(optimizer, max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: pass error_if_nonfinite=False to go on with it")
        return norm

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: float) -> None:
        """Clip each entry of the gradients."""
        self.precision.unscale_gradients(optimizer)
        self.runtime.clip_value(optimizer, clip_val)

    # -- data -----------------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What Fabric makes samplers of: the order of all samples where we share them."""
        if self.runtime.options.shard_data:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Share a loader that Fabric gave an order of all samples."""
        if not self.runtime.options.shard_data or find_global_sampler(dataloader, self.world_size) is None:
            return dataloader
        return ShardedLoader(dataloader, self.global_rank, self.world_size, lambda: "pad")

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine a tensor over the ranks; anything else is returned as it is."""
        return self.runtime.reduce(tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the weights under the names of the script's model; sharded ones as they are."""
        state: dict[str, Any] = _inner(module).state_dict()
        return state

    def load_module_state_dict(self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load weights; sharded models keep their part of them."""
        _inner(module).load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Save a folder in our format, or a file of Lightning, by the path."""
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        if is_folder_path(path, self.runtime.options.checkpoint_format):
            self._refuse_storage_options(storage_options)
            self._write_folder(path, state, converted)
            return
        if self.runtime.shards:
            converted = {name: gather_whole(value, keep=self.is_global_zero) for name, value in converted.items()}

        def write() -> None:
            check_not_a_folder(path)
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint=converted, path=path, storage_options=storage_options)

        self.runtime.run_together("save_checkpoint", write)

    def _write_folder(self, path: Any, state: dict[str, Any], converted: dict[str, Any]) -> None:
        records = self.runtime.components.stepper.models
        models: dict[str, int] = {}
        optimizers: dict[str, int] = {}
        for name, value in state.items():
            if isinstance(value, torch.nn.Module):
                number = next((place for place, record in enumerate(records) if record.original is _inner(value)), None)
                if number is not None and number not in models.values():
                    models[name] = number
            elif isinstance(value, torch.optim.Optimizer):
                optimizers[name] = len(optimizers)
        rest = {name: value for name, value in converted.items() if name not in models and name not in optimizers}
        rest[_LAYOUT] = {"models": models, "optimizers": optimizers}
        weights = {number: converted[name] for name, number in models.items()}
        assert self.runtime.accelerator is not None
        step = next((value for name, value in state.items() if "step" in name and type(value) is int and value >= 0), 0)
        write_folder(self.runtime.accelerator, path, FolderContent(rest, weights, [state[name] for name in optimizers]), step)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of either format into the objects of a state, and return what is left of it."""
        found = _read(path) if is_slipstream_folder(path) else self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        if not state:
            return dict(found)
        if isinstance(state, (torch.nn.Module, torch.optim.Optimizer)):
            self._load_object(state, found, strict)
            return {}
        if strict and (missing := [name for name in state if name not in found]):
            raise KeyError(f"{path} has no {', '.join(map(repr, missing))}; it has {', '.join(map(repr, found))}. Or pass strict=False.")
        for name, value in list(state.items()):
            if name not in found:
                continue
            stored = found.pop(name)
            if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                self._load_object(value, stored, strict)
            else:
                state[name] = stored
        return dict(found)

    def _load_object(self, target: Any, stored: Any, strict: bool) -> None:
        if isinstance(target, torch.nn.Module):
            self.load_module_state_dict(target, stored, strict)
        elif isinstance(target, torch.optim.Optimizer) and self.runtime.shards:
            target.load_state_dict(shard_optimizer_state(target, stored))
        else:
            target.load_state_dict(stored)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of this strategy."""
        cls._register(strategy_registry)


def _inner(module: torch.nn.Module) -> Any:
    """Return the script's model inside what `setup_module` returned."""
    return module.module if isinstance(module, (Replicated, ForwardModule)) else module


def _read(path: Any) -> dict[str, Any]:
    content = read_folder(path)
    found = dict(content.rest)
    layout = found.pop(_LAYOUT, None)
    if layout is None:
        raise CheckpointError(f"{path} was saved by a Trainer, and not by fabric.save: pass it to trainer.fit(ckpt_path=...)")
    found |= {name: content.weights[number] for name, number in layout["models"].items()}
    return found | {name: content.optimizers[number] for name, number in layout["optimizers"].items()}
