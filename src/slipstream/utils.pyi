from slipstream.big_models.device_map.plan import (
    DeviceMap as DeviceMap,
    get_balanced_memory as get_balanced_memory,
    get_max_memory as get_max_memory,
    infer_auto_device_map as infer_auto_device_map,
)
from slipstream.big_models.device_map.sizes import (
    CustomDtype as CustomDtype,
    calculate_maximum_sizes as calculate_maximum_sizes,
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    compute_module_sizes as compute_module_sizes,
    dtype_byte_size as dtype_byte_size,
    find_tied_parameters as find_tied_parameters,
    get_max_layer_size as get_max_layer_size,
    id_tensor_storage as id_tensor_storage,
    named_module_tensors as named_module_tensors,
    retie_parameters as retie_parameters,
)
from slipstream.big_models.device_map.validation import check_device_map as check_device_map
from slipstream.big_models.hooks.module_tensors import (
    align_module_device as align_module_device,
    has_offloaded_params as has_offloaded_params,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from slipstream.big_models.layer_major import layer_major as layer_major
from slipstream.big_models.load import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
    load_state_dict as load_state_dict,
)
from slipstream.big_models.quantization_config import (
    BnbQuantizationConfig as BnbQuantizationConfig,
    TorchaoQuantizationConfig as TorchaoQuantizationConfig,
    has_4bit_bnb_layers as has_4bit_bnb_layers,
)
from slipstream.big_models.quantize import load_and_quantize_model as load_and_quantize_model
from slipstream.big_models.weight_store.offload_folder import (
    extract_submodules_state_dict as extract_submodules_state_dict,
    load_offloaded_weight as load_offloaded_weight,
    load_offloaded_weights as load_offloaded_weights,
    offload_state_dict as offload_state_dict,
    offload_weight as offload_weight,
    save_offload_index as save_offload_index,
)
from slipstream.big_models.weight_store.weights import OffloadedWeightsLoader as OffloadedWeightsLoader, PrefixedDataset as PrefixedDataset
from slipstream.checkpoint.fsdp_io import (
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    merge_fsdp_weights as merge_fsdp_weights,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from slipstream.checkpoint.manifest import (
    MODEL_NAME as MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    RNG_STATE_NAME as RNG_STATE_NAME,
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
    SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME,
    SCHEDULER_NAME as SCHEDULER_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
)
from slipstream.checkpoint.model_io import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from slipstream.checkpoint.object_file import load as load, save as save
from slipstream.config.files import write_basic_config as write_basic_config
from slipstream.config.fsdp2 import convert_config_to_fsdp2 as convert_config_to_fsdp2
from slipstream.config.handlers import (
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    ProjectConfiguration as ProjectConfiguration,
)
from slipstream.config.sources import (
    clear_environment as clear_environment,
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    get_int_from_env as get_int_from_env,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    str_to_bool as str_to_bool,
)
from slipstream.data.loader import get_sampler as get_sampler
from slipstream.data.options import DataLoaderConfiguration as DataLoaderConfiguration
from slipstream.data.prepare import prepare_data_loader as prepare_data_loader, skip_first_batches as skip_first_batches
from slipstream.devices.memory import (
    clear_device_cache as clear_device_cache,
    convert_bytes as convert_bytes,
    release_memory as release_memory,
    should_reduce_batch_size as should_reduce_batch_size,
)
from slipstream.devices.packages import (
    compare_versions as compare_versions,
    deepspeed_required as deepspeed_required,
    is_4bit_bnb_available as is_4bit_bnb_available,
    is_8bit_bnb_available as is_8bit_bnb_available,
    is_aim_available as is_aim_available,
    is_amdsmi_available as is_amdsmi_available,
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    is_bnb_available as is_bnb_available,
    is_boto3_available as is_boto3_available,
    is_clearml_available as is_clearml_available,
    is_comet_ml_available as is_comet_ml_available,
    is_datasets_available as is_datasets_available,
    is_deepspeed_available as is_deepspeed_available,
    is_dvclive_available as is_dvclive_available,
    is_fp8_available as is_fp8_available,
    is_import_timer_available as is_import_timer_available,
    is_lomo_available as is_lomo_available,
    is_matplotlib_available as is_matplotlib_available,
    is_megatron_lm_available as is_megatron_lm_available,
    is_mlflow_available as is_mlflow_available,
    is_msamp_available as is_msamp_available,
    is_numpy_available as is_numpy_available,
    is_pandas_available as is_pandas_available,
    is_peft_available as is_peft_available,
    is_pippy_available as is_pippy_available,
    is_pynvml_available as is_pynvml_available,
    is_pytest_available as is_pytest_available,
    is_rich_available as is_rich_available,
    is_sagemaker_available as is_sagemaker_available,
    is_schedulefree_available as is_schedulefree_available,
    is_swanlab_available as is_swanlab_available,
    is_tensorboard_available as is_tensorboard_available,
    is_timm_available as is_timm_available,
    is_torch_distributed_available as is_torch_distributed_available,
    is_torch_version as is_torch_version,
    is_torchao_available as is_torchao_available,
    is_torchdata_available as is_torchdata_available,
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    is_torchvision_available as is_torchvision_available,
    is_tqdm_available as is_tqdm_available,
    is_trackio_available as is_trackio_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    is_transformers_available as is_transformers_available,
    is_triton_available as is_triton_available,
    is_wandb_available as is_wandb_available,
    is_weights_only_available as is_weights_only_available,
    torchao_required as torchao_required,
)
from slipstream.devices.table import (
    DistributedType as DistributedType,
    RNGType as RNGType,
    is_bf16_available as is_bf16_available,
    is_cuda_available as is_cuda_available,
    is_fp16_available as is_fp16_available,
    is_habana_gaudi1 as is_habana_gaudi1,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_rocm_available as is_rocm_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_xccl_available as is_xccl_available,
    is_xpu_available as is_xpu_available,
)
from slipstream.distributed.functional import (
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    copy_tensor_to_devices as copy_tensor_to_devices,
    gather as gather,
    gather_object as gather_object,
    gather_tensor_shape as gather_tensor_shape,
    map_across_processes as map_across_processes,
    pad_across_processes as pad_across_processes,
    reduce as reduce,
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
    wait_for_everyone as wait_for_everyone,
)
from slipstream.distributed.helpers import (
    check_os_kernel as check_os_kernel,
    get_free_port as get_free_port,
    get_module_children_bottom_up as get_module_children_bottom_up,
    get_module_class_from_name as get_module_class_from_name,
    get_pretty_name as get_pretty_name,
    is_port_in_use as is_port_in_use,
    merge_dicts as merge_dicts,
    recursive_getattr as recursive_getattr,
)
from slipstream.distributed.progress_bar import tqdm as tqdm
from slipstream.distributed.pytree import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    TensorInformation as TensorInformation,
    concatenate as concatenate,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
    find_batch_size as find_batch_size,
    find_device as find_device,
    get_data_structure as get_data_structure,
    get_shape as get_shape,
    honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size,
    initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    listify as listify,
    pad_input_tensors as pad_input_tensors,
    recursively_apply as recursively_apply,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from slipstream.errors import DistributedOperationException as DistributedOperationException
from slipstream.files.sizes import convert_file_size_to_int as convert_file_size_to_int
from slipstream.inference.pipeline import prepare_pippy as prepare_pippy
from slipstream.launch.worker_main import PrepareForLaunch as PrepareForLaunch
from slipstream.observability.guards.findings import NonFiniteError as NonFiniteError
from slipstream.observability.memory import MemorySnapshot as MemorySnapshot, memory_snapshot as memory_snapshot
from slipstream.observability.options import (
    PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME,
    GuardKwargs as GuardKwargs,
    LedgerKwargs as LedgerKwargs,
    ProfileKwargs as ProfileKwargs,
)
from slipstream.observability.profiler import merge_traces as merge_traces, top_operators as top_operators
from slipstream.observability.timing.report import LedgerReport as LedgerReport
from slipstream.observability.trackers.registry import LoggerType as LoggerType
from slipstream.parallel.compile import (
    DynamoBackend as DynamoBackend,
    TorchDynamoPlugin as TorchDynamoPlugin,
    compile_regions as compile_regions,
    compile_regions_fsdp2 as compile_regions_fsdp2,
    has_compiled_regions as has_compiled_regions,
    has_repeated_blocks as has_repeated_blocks,
    is_compiled_module as is_compiled_module,
    is_repeated_blocks as is_repeated_blocks,
)
from slipstream.parallel.parallelism_config import (
    ParallelismConfig as ParallelismConfig,
    get_model_tp_size as get_model_tp_size,
    model_has_dtensor as model_has_dtensor,
)
from slipstream.parallel.unwrap import extract_model_from_parallel as extract_model_from_parallel, is_peft_model as is_peft_model
from slipstream.precision.autocast import get_mixed_precision_context_manager as get_mixed_precision_context_manager
from slipstream.precision.fp8 import (
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
    has_ao_layers as has_ao_layers,
)
from slipstream.precision.policy import (
    AORecipeKwargs as AORecipeKwargs,
    AutocastKwargs as AutocastKwargs,
    FP8BackendType as FP8BackendType,
    FP8RecipeKwargs as FP8RecipeKwargs,
    GradScalerKwargs as GradScalerKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
    PrecisionType as PrecisionType,
    TERecipeKwargs as TERecipeKwargs,
)
from slipstream.precision.scaler import get_grad_scaler as get_grad_scaler
from slipstream.strategies.ddp_options import (
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
)
from slipstream.strategies.fsdp_functions import (
    ensure_weights_retied as ensure_weights_retied,
    fsdp2_apply_ac as fsdp2_apply_ac,
    fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
    fsdp2_prepare_auto_wrap_policy as fsdp2_prepare_auto_wrap_policy,
    fsdp2_prepare_model as fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler as get_fsdp2_grad_scaler,
    get_parameters_from_modules as get_parameters_from_modules,
)
from slipstream.strategies.fsdp_options import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from slipstream.training.batch_size import find_executable_batch_size as find_executable_batch_size
