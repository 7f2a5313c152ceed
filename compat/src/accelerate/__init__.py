"""The import name `accelerate`, provided by Slipstream.

A translation layer: the names, signatures and structures that scripts and libraries written for Accelerate 1.15 rely on, over the runtime
of Slipstream. Slipstream itself never imports it. What exists here only because a client needs it names that client.
"""

import os

from accelerate._forwarding import forward_names
from accelerate._installation import warn_of_original

__version__ = "1.15.0+slipstream"
__slipstream_programs__ = "test_utils"  # messages name the user's line: files of the drop-in do not count, except those of these programs

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.accelerator": "Accelerator",
        "accelerate.big_modeling": """cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights init_on_device
            load_checkpoint_and_dispatch""",
        "accelerate.data_loader": "skip_first_batches",
        "accelerate.inference": "prepare_pippy",
        "accelerate.launchers": "debug_launcher notebook_launcher",
        "accelerate.parallelism_config": "ParallelismConfig",
        "accelerate.state": "PartialState",
        "accelerate.utils": """AutocastKwargs DataLoaderConfiguration DDPCommunicationHookType DeepSpeedPlugin
            DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs
            ProfileKwargs find_executable_batch_size infer_auto_device_map is_rich_available load_checkpoint_in_model
            synchronize_rng_states""",
    },
    unlisted={
        "accelerate.data_loader": "prepare_data_loader",
        "accelerate.local_sgd": "LocalSGD",
        "accelerate.state": "AcceleratorState GradientState",
        "accelerate.utils": "PrepareForLaunch clear_environment get_int_from_env parse_flag_from_env patch_environment str_to_bool",
        "slipstream": """CheckpointError ConfigError DistributedOperationException LaunchError MismatchError MissingCheckpointError
            NonFiniteError PeerLostError SlipstreamError StateError WaitTimeoutError layer_major map_across_processes""",
    },
    submodules="""accelerator big_modeling checkpointing commands data_loader hooks inference launchers local_sgd logging memory_utils
        optimizer parallelism_config scheduler state test_utils tracking utils""",
)

warn_of_original()
if os.environ.get("ACCELERATE_ENABLE_RICH", "").lower() in ("1", "true", "yes", "on", "y", "t"):
    from accelerate.utils.imports import is_rich_available

    if is_rich_available():
        from accelerate.utils import rich  # noqa: F401
