"""The properties of `Accelerator` that return its settings, and `arguments()`, which rebuilds an Accelerator with the same settings.

Attributes of engines and mesh axes that this version does not have return the value that scripts expect without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from slipstream.accelerator.components import AcceleratorBase
from slipstream.data.options import DataLoaderConfiguration
from slipstream.precision.policy import FP8BackendType

__all__ = ["SettingsMixin"]

_WITHOUT_ENGINE: Mapping[str, Any] = MappingProxyType(
    {
        "deepspeed_config": None,
        "deepspeed_engine_wrapped": None,
        "deepspeed_plugin": None,
        "delayed_fp8_autocast": False,
        "flag_tensor": None,
        "has_lomo_optimizer": False,
        "msamp_recipe_handler": None,
        "should_save_model": True,
        "te_recipe_handler": None,
        "tensor_parallel_rank": 0,
    }
)
"""Attributes that scripts read to find out which engine is in use, with the value that they have without it."""
_ENGINE_ONLY = ("context_parallel_rank", "deepspeed_ulysses_dl_adapter", "lomo_backward", "pipeline_parallel_rank")
"""Attributes that make no sense without their engine."""


class SettingsMixin(AcceleratorBase):
    """The settings of this Accelerator."""

    def arguments(self) -> dict[str, Any]:
        """Return arguments that build an Accelerator with the present settings of this one.

        >>> from slipstream import Accelerator
        >>> accelerator = Accelerator(cpu=True, split_batches=True)
        >>> accelerator.gradient_accumulation_steps = 4
        >>> twin = Accelerator(**accelerator.arguments())
        >>> twin.split_batches, twin.gradient_accumulation_steps
        (True, 4)
        """
        components, asked = self._components, self._given
        other_ways = ("split_batches", "project_dir", "dynamo_backend", "gradient_accumulation_steps")
        now: dict[str, Any] = {
            "mixed_precision": components.state.mixed_precision,
            "dataloader_config": replace(components.loader_config),
            "project_config": replace(self.project_configuration),
        }
        if components.dynamo is not None:
            now["dynamo_plugin"] = replace(components.dynamo)
        if components.effective_batch_size is None:
            now["gradient_accumulation_plugin"] = replace(components.gradient_state.plugin)
        return {**{name: value for name, value in asked.items() if name not in other_ways}, **now}

    # -- data -----------------------------------------------------------------------------------------------------

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """The options of loaders; what is changed here counts for loaders that are prepared afterwards."""
        return self._components.loader_config

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        if not isinstance(value, DataLoaderConfiguration):
            raise TypeError(f"dataloader_config = {value!r}: write accelerator.dataloader_config = DataLoaderConfiguration(...)")
        self._components.loader_config = replace(value)

    @property
    def split_batches(self) -> bool:
        """See `DataLoaderConfiguration.split_batches`."""
        return self._components.loader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """See `DataLoaderConfiguration.dispatch_batches`."""
        return self._components.loader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """See `DataLoaderConfiguration.even_batches`."""
        return self._components.loader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._components.loader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """True: the order of samples is always a function of the seed and the epoch."""
        return True

    @property
    def non_blocking(self) -> bool:
        """See `DataLoaderConfiguration.non_blocking`."""
        return self._components.loader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """See `DataLoaderConfiguration.use_stateful_dataloader`."""
        return self._components.loader_config.use_stateful_dataloader

    @property
    def effective_batch_size(self) -> int | None:
        """Samples per update over all processes, if that was fixed."""
        return self._components.effective_batch_size

    # -- placement and stepping -----------------------------------------------------------------------------------

    @property
    def device_placement(self) -> bool:
        """Whether models and batches are moved to the device."""
        return self._components.device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step with updates rather than with every call."""
        return self._components.step_scheduler_with_optimizer

    @property
    def rng_types(self) -> list[str]:
        """Kinds of random state that are synchronised from rank 0 when a loader starts."""
        return self._components.rng_types

    # -- files ----------------------------------------------------------------------------------------------------

    @property
    def project_dir(self) -> str | None:
        """The folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder of trackers."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatic checkpoint."""
        return self.project_configuration.iteration

    # -- handlers -------------------------------------------------------------------------------------------------

    @property
    def ddp_handler(self) -> Any:
        """The DistributedDataParallelKwargs that were given, or None."""
        return self._handlers.ddp

    @property
    def scaler_handler(self) -> Any:
        """The GradScalerKwargs that were given, or None."""
        return self._handlers.scaler

    @property
    def init_handler(self) -> Any:
        """The InitProcessGroupKwargs that were given, or None."""
        return self._handlers.init

    @property
    def autocast_handler(self) -> Any:
        """The AutocastKwargs that were given, or None."""
        return self._handlers.autocast

    @property
    def profile_handler(self) -> Any:
        """The ProfileKwargs that were given, or None."""
        return self._handlers.profile

    @property
    def fp8_recipe_handler(self) -> Any:
        """The AORecipeKwargs that were given, or None."""
        return self._handlers.fp8

    @property
    def ao_recipe_handler(self) -> Any:
        """See `fp8_recipe_handler`."""
        return self._handlers.fp8

    @property
    def has_fp8_handler(self) -> bool:
        """Whether AORecipeKwargs were given."""
        return self._handlers.fp8 is not None

    @property
    def fp8_enabled(self) -> bool:
        """Whether models compute in float8."""
        return self._components.state.mixed_precision == "fp8"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in float8."""
        return FP8BackendType.AO if self.fp8_enabled else FP8BackendType.NO

    @property
    def native_amp(self) -> bool:
        """Whether autocast of torch is in use."""
        return self._components.precision.policy.autocast_dtype is not None

    # -- sharding -------------------------------------------------------------------------------------------------

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over the processes."""
        return self._components.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """See `is_fsdp2`."""
        return self.is_fsdp2

    @property
    def parallelism_config(self) -> Any:
        """The ParallelismConfig that was given, or None."""
        return self._components.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """torch's mesh, where models are sharded or sizes were given; else None. Every process has to ask for it the first time."""
        state, mesh = self._components.state, self._components.strategy.mesh
        if mesh is None and state.parallelism_config is not None and state.use_distributed:
            state.channel()  # opens the process group
            return state.parallelism_config.get_device_mesh(state.device.type)
        return mesh

    @property
    def data_parallel_rank(self) -> int:
        """Which part of a global batch this process gets."""
        return self._components.data_rank.rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which shard of the model this process holds; 0 for a replica."""
        mesh = self._components.strategy.mesh
        return 0 if mesh is None else int(mesh.get_local_rank("dp_shard"))

    # -- engines that are not in this version ---------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in _WITHOUT_ENGINE:
            return _WITHOUT_ENGINE[name]
        if name in _ENGINE_ONLY:
            reason = "the engine or package that it belongs to is not in this version"
            raise AttributeError(f"Accelerator.{name} is not in this version of slipstream: {reason}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
