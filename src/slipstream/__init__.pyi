from slipstream.accelerator.accelerator import Accelerator as Accelerator
from slipstream.big_models.device_map.plan import infer_auto_device_map as infer_auto_device_map
from slipstream.big_models.dispatch import (
    cpu_offload as cpu_offload,
    cpu_offload_with_hook as cpu_offload_with_hook,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
)
from slipstream.big_models.empty_weights import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from slipstream.big_models.layer_major import layer_major as layer_major
from slipstream.big_models.load import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from slipstream.config.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from slipstream.config.sources import (
    clear_environment as clear_environment,
    get_int_from_env as get_int_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    str_to_bool as str_to_bool,
)
from slipstream.data.options import DataLoaderConfiguration as DataLoaderConfiguration
from slipstream.data.prepare import prepare_data_loader as prepare_data_loader, skip_first_batches as skip_first_batches
from slipstream.devices.packages import is_rich_available as is_rich_available
from slipstream.devices.table import DistributedType as DistributedType
from slipstream.distributed.functional import map_across_processes as map_across_processes, synchronize_rng_states as synchronize_rng_states
from slipstream.distributed.gradient_state import GradientState as GradientState
from slipstream.distributed.state import AcceleratorState as AcceleratorState, PartialState as PartialState
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
from slipstream.launch.worker_main import PrepareForLaunch as PrepareForLaunch
from slipstream.notebook import debug_launcher as debug_launcher, notebook_launcher as notebook_launcher
from slipstream.observability.guards.findings import NonFiniteError as NonFiniteError
from slipstream.observability.options import ProfileKwargs as ProfileKwargs
from slipstream.parallel.local_sgd import LocalSGD as LocalSGD
from slipstream.parallel.parallelism_config import ParallelismConfig as ParallelismConfig
from slipstream.precision.policy import AutocastKwargs as AutocastKwargs, GradScalerKwargs as GradScalerKwargs
from slipstream.strategies.ddp_options import (
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
)
from slipstream.strategies.fsdp_options import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from slipstream.training.batch_size import find_executable_batch_size as find_executable_batch_size

__version__: str
