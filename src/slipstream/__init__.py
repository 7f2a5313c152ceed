"""Slipstream: plain PyTorch scripts, run distributed.

    from slipstream import PartialState

    state = PartialState()
    with state.split_between_processes(prompts) as mine:
        texts = generate(mine)
    everything = state.gather(texts)

Public names are imported on first use, so `import slipstream` imports no torch. `__init__.pyi` shows them to type checkers. Helpers are
in `slipstream.utils`. Module paths that users of Accelerate write (`slipstream.state`, ...) are listed in `public_names.py`.
"""

from __future__ import annotations

from slipstream.public_names import lazy_attributes, register_module_paths

__version__ = "0.1.0"

_NAMES = {
    "accelerator.accelerator": "Accelerator",
    "big_models.device_map.plan": "infer_auto_device_map",
    "big_models.dispatch": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model",
    "big_models.empty_weights": "init_empty_weights init_on_device",
    "big_models.layer_major": "layer_major",
    "big_models.load": "load_checkpoint_and_dispatch load_checkpoint_in_model",
    "config.handlers": "InitProcessGroupKwargs",
    "config.sources": "clear_environment get_int_from_env parse_flag_from_env patch_environment str_to_bool",
    "data.options": "DataLoaderConfiguration",
    "data.prepare": "prepare_data_loader skip_first_batches",
    "devices.packages": "is_rich_available",
    "devices.table": "DistributedType",
    "distributed.functional": "map_across_processes synchronize_rng_states",
    "distributed.gradient_state": "GradientState",
    "distributed.state": "AcceleratorState PartialState",
    "errors": """CheckpointError ConfigError DistributedOperationException LaunchError MismatchError MissingCheckpointError PeerLostError
        SlipstreamError StateError WaitTimeoutError""",
    "inference.pipeline": "prepare_pippy",
    "launch.worker_main": "PrepareForLaunch",
    "notebook": "debug_launcher notebook_launcher",
    "observability.guards.findings": "NonFiniteError",
    "observability.options": "ProfileKwargs",
    "parallel.local_sgd": "LocalSGD",
    "parallel.parallelism_config": "ParallelismConfig",
    "precision.policy": "AutocastKwargs GradScalerKwargs",
    "strategies.ddp_options": "DDPCommunicationHookType DistributedDataParallelKwargs",
    "strategies.fsdp_options": "FullyShardedDataParallelPlugin",
    "training.batch_size": "find_executable_batch_size",
}

__all__, __getattr__, __dir__ = lazy_attributes(
    __name__, _NAMES, submodules=("accelerator", "hooks", "inference", "logging", "tracking", "utils")
)
register_module_paths()
