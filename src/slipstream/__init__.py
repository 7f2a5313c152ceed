"""Slipstream: plain PyTorch scripts, run distributed.

    from slipstream import PartialState

    state = PartialState()
    with state.split_between_processes(prompts) as mine:
        texts = generate(mine)
    everything = state.gather(texts)

The public names are found when they are first used, so `import slipstream` imports no torch. Helpers are in `slipstream.utils`.
Module paths that users of Accelerate write (`slipstream.state`, `slipstream.local_sgd`, ...) are in `accelerate_names.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.lazy import lazily as _lazily, offer as _offer

if TYPE_CHECKING:
    from slipstream.accelerator import Accelerator as Accelerator
    from slipstream.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from slipstream.config.sources import (
        clear_environment as clear_environment,
        get_int_from_env as get_int_from_env,
        parse_flag_from_env as parse_flag_from_env,
        patch_environment as patch_environment,
        str_to_bool as str_to_bool,
    )
    from slipstream.data.options import DataLoaderConfiguration as DataLoaderConfiguration
    from slipstream.data.prepare import prepare_data_loader as prepare_data_loader
    from slipstream.data.skip import skip_first_batches as skip_first_batches
    from slipstream.devices.packages import is_rich_available as is_rich_available
    from slipstream.devices.table import DistributedType as DistributedType
    from slipstream.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DistributedOperationException as DistributedOperationException,
        LaunchError as LaunchError,
        MismatchError as MismatchError,
        MissingCheckpointError as MissingCheckpointError,
        PeerLostError as PeerLostError,
        SlipstreamError as SlipstreamError,
        StateError as StateError,
        WaitTimeoutError as WaitTimeoutError,
    )
    from slipstream.inference.pipeline import prepare_pippy as prepare_pippy
    from slipstream.launch.target import PrepareForLaunch as PrepareForLaunch
    from slipstream.notebook import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
    from slipstream.offload.dispatch import (
        cpu_offload as cpu_offload,
        cpu_offload_with_hook as cpu_offload_with_hook,
        disk_offload as disk_offload,
        dispatch_model as dispatch_model,
    )
    from slipstream.offload.empty import init_empty_weights as init_empty_weights, init_on_device as init_on_device
    from slipstream.offload.lanes import layer_major as layer_major
    from slipstream.offload.load import (
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from slipstream.offload.planning.plan import infer_auto_device_map as infer_auto_device_map
    from slipstream.parallel.local_sgd import LocalSGD as LocalSGD
    from slipstream.precision.options import AutocastKwargs as AutocastKwargs, GradScalerKwargs as GradScalerKwargs
    from slipstream.runtime.batch_size import find_executable_batch_size as find_executable_batch_size
    from slipstream.runtime.gradient_state import GradientState as GradientState
    from slipstream.runtime.mapping import map_across_processes as map_across_processes
    from slipstream.runtime.rng import synchronize_rng_states as synchronize_rng_states
    from slipstream.runtime.state import AcceleratorState as AcceleratorState, PartialState as PartialState
    from slipstream.step.guards.finding import NonFiniteError as NonFiniteError
    from slipstream.step.profiling.options import ProfileKwargs as ProfileKwargs
    from slipstream.strategies.options import (
        DDPCommunicationHookType as DDPCommunicationHookType,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    )

__version__ = "0.1.0"

_HOMES = {
    "slipstream.accelerator": ("Accelerator",),
    "slipstream.config.handlers": ("InitProcessGroupKwargs",),
    "slipstream.config.sources": ("clear_environment", "get_int_from_env", "parse_flag_from_env", "patch_environment", "str_to_bool"),
    "slipstream.data.options": ("DataLoaderConfiguration",),
    "slipstream.data.prepare": ("prepare_data_loader",),
    "slipstream.data.skip": ("skip_first_batches",),
    "slipstream.devices.packages": ("is_rich_available",),
    "slipstream.devices.table": ("DistributedType",),
    "slipstream.errors": (
        "CheckpointError", "ConfigError", "DistributedOperationException", "LaunchError", "MismatchError", "MissingCheckpointError",
        "PeerLostError", "SlipstreamError", "StateError", "WaitTimeoutError",
    ),
    "slipstream.inference.pipeline": ("prepare_pippy",),
    "slipstream.launch.target": ("PrepareForLaunch",),
    "slipstream.notebook": ("debug_launcher", "notebook_launcher"),
    "slipstream.offload.dispatch": ("cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model"),
    "slipstream.offload.empty": ("init_empty_weights", "init_on_device"),
    "slipstream.offload.lanes": ("layer_major",),
    "slipstream.offload.load": ("load_checkpoint_and_dispatch", "load_checkpoint_in_model"),
    "slipstream.offload.planning.plan": ("infer_auto_device_map",),
    "slipstream.parallel.local_sgd": ("LocalSGD",),
    "slipstream.precision.options": ("AutocastKwargs", "GradScalerKwargs"),
    "slipstream.runtime.batch_size": ("find_executable_batch_size",),
    "slipstream.runtime.gradient_state": ("GradientState",),
    "slipstream.runtime.mapping": ("map_across_processes",),
    "slipstream.runtime.rng": ("synchronize_rng_states",),
    "slipstream.runtime.state": ("AcceleratorState", "PartialState"),
    "slipstream.step.guards.finding": ("NonFiniteError",),
    "slipstream.step.profiling.options": ("ProfileKwargs",),
    "slipstream.strategies.options": ("DDPCommunicationHookType", "DistributedDataParallelKwargs"),
}

__all__ = [
    "Accelerator", "AcceleratorState", "AutocastKwargs", "CheckpointError", "ConfigError", "DDPCommunicationHookType",
    "DataLoaderConfiguration", "DistributedDataParallelKwargs", "DistributedOperationException", "DistributedType", "GradScalerKwargs",
    "GradientState", "InitProcessGroupKwargs", "LaunchError", "LocalSGD", "MismatchError", "MissingCheckpointError", "NonFiniteError",
    "PartialState", "PeerLostError", "PrepareForLaunch", "ProfileKwargs", "SlipstreamError", "StateError", "WaitTimeoutError",
    "clear_environment", "cpu_offload", "cpu_offload_with_hook", "debug_launcher", "disk_offload", "dispatch_model",
    "find_executable_batch_size", "get_int_from_env", "infer_auto_device_map", "init_empty_weights", "init_on_device", "is_rich_available",
    "layer_major", "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "map_across_processes", "notebook_launcher",
    "parse_flag_from_env", "patch_environment", "prepare_data_loader", "prepare_pippy", "skip_first_batches", "str_to_bool",
    "synchronize_rng_states",
]

__getattr__, __dir__ = _lazily(__name__, _HOMES, submodules=("accelerator", "hooks", "inference", "logging", "tracking", "utils"))
_offer(__name__)
