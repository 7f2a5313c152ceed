"""Names of `accelerate.utils`."""

from __future__ import annotations

from typing import Any

from accelerate._forwarding import forward_names
from accelerate.utils.tqdm import tqdm  # noqa: F401  # the function, which importing the module of that name would hide

__all__, _find, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.default": "write_basic_config",
        "accelerate.parallelism_config": "ParallelismConfig",
        "accelerate.utils.ao": "convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers",
        "accelerate.utils.bnb": "has_4bit_bnb_layers load_and_quantize_model",
        "accelerate.utils.constants": """MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME
            RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME
            SCHEDULER_NAME TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME
            XPU_PROFILING_AVAILABLE_PYTORCH_VERSION""",
        "accelerate.utils.dataclasses": """AORecipeKwargs AutocastKwargs BnbQuantizationConfig ComputeEnvironment CustomDtype
            DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
            DeepSpeedSequenceParallelConfig DistributedDataParallelKwargs DistributedType DynamoBackend
            FP8RecipeKwargs FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
            InitProcessGroupKwargs KwargsHandler LoggerType MSAMPRecipeKwargs MegatronLMPlugin
            PrecisionType ProfileKwargs ProjectConfiguration RNGType SageMakerDistributedType
            TERecipeKwargs TensorInformation TorchContextParallelConfig TorchDynamoPlugin
            TorchTensorParallelConfig TorchTensorParallelPlugin add_model_config_to_megatron_parser""",
        "accelerate.utils.environment": """are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support
            clear_environment convert_dict_to_env_variables get_cpu_distributed_information
            get_current_device_type get_gpu_info get_int_from_env parse_choice_from_env
            parse_flag_from_env patch_environment purge_accelerate_environment set_numa_affinity
            str_to_bool""",
        "accelerate.utils.fsdp_utils": """disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied
            fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model
            fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler load_fsdp_model load_fsdp_optimizer
            merge_fsdp_weights save_fsdp_model save_fsdp_optimizer""",
        "accelerate.utils.imports": """deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_aim_available
            is_amdsmi_available is_bf16_available is_bitsandbytes_multi_backend_available
            is_bnb_available is_boto3_available is_clearml_available is_comet_ml_available
            is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available
            is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available
            is_import_timer_available is_lomo_available is_matplotlib_available is_megatron_lm_available
            is_mlflow_available is_mlu_available is_mps_available is_msamp_available is_musa_available
            is_neuron_available is_npu_available is_pandas_available is_peft_available
            is_pippy_available is_pynvml_available is_pytest_available is_rich_available
            is_rocm_available is_sagemaker_available is_schedulefree_available is_sdaa_available
            is_swanlab_available is_tensorboard_available is_timm_available is_torch_xla_available
            is_torchao_available is_torchdata_available is_torchdata_stateful_dataloader_available
            is_torchvision_available is_trackio_available is_transformer_engine_available
            is_transformer_engine_mxfp8_available is_transformers_available is_triton_available
            is_wandb_available is_weights_only_available is_xccl_available is_xpu_available
            torchao_required""",
        "accelerate.utils.launch": """PrepareForLaunch prepare_deepspeed_cmd_env prepare_multi_gpu_env
            prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu""",
        "accelerate.utils.megatron_lm": """AbstractTrainStep BertTrainStep GPTTrainStep MegatronLMDummyDataLoader
            MegatronLMDummyScheduler T5TrainStep avg_losses_across_data_parallel_group""",
        "accelerate.utils.memory": "find_executable_batch_size release_memory",
        "accelerate.utils.modeling": """align_module_device calculate_maximum_sizes check_device_map check_tied_parameters_in_config
            check_tied_parameters_on_same_device compute_module_sizes convert_file_size_to_int
            dtype_byte_size find_tied_parameters get_balanced_memory get_grad_scaler get_max_layer_size
            get_max_memory get_mixed_precision_context_manager has_offloaded_params id_tensor_storage
            infer_auto_device_map is_peft_model load_checkpoint_in_model load_offloaded_weights
            load_state_dict named_module_tensors retie_parameters set_module_tensor_to_device""",
        "accelerate.utils.offload": """OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight
            offload_state_dict offload_weight save_offload_index""",
        "accelerate.utils.operations": """CannotPadNestedTensorWarning GatheredParameters broadcast broadcast_object_list concatenate
            convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size find_device
            gather gather_object get_data_structure honor_type ignorant_find_batch_size
            initialize_tensors is_namedtuple is_tensor_information is_torch_tensor listify
            pad_across_processes pad_input_tensors recursively_apply reduce send_to_device slice_tensors""",
        "accelerate.utils.other": """check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed
            compile_regions_fsdp2 convert_bytes extract_model_from_parallel get_model_tp_size
            get_module_children_bottom_up get_pretty_name has_compiled_regions is_compiled_module
            is_port_in_use load merge_dicts model_has_dtensor recursive_getattr save wait_for_everyone""",
        "accelerate.utils.random": "set_seed synchronize_rng_state synchronize_rng_states",
        "accelerate.utils.torch_xla": "install_xla",
        "accelerate.utils.tqdm": "tqdm",
        "accelerate.utils.transformer_engine": "apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers",
        "accelerate.utils.versions": "compare_versions is_torch_version",
    },
    unlisted={
        "accelerate.big_modeling": "load_checkpoint_and_dispatch",
        "accelerate.commands.to_fsdp2": "convert_config_to_fsdp2",
        "accelerate.data_loader": "get_sampler prepare_data_loader skip_first_batches",
        "accelerate.inference": "prepare_pippy",
        "accelerate.utils.dataclasses": "FP8BackendType",
        "accelerate.utils.fsdp_utils": "fsdp2_prepare_auto_wrap_policy get_module_class_from_name get_parameters_from_modules",
        "accelerate.utils.imports": "is_numpy_available is_torch_distributed_available is_tqdm_available",
        "accelerate.utils.memory": "clear_device_cache should_reduce_batch_size",
        "accelerate.utils.operations": "ConvertOutputsToFp32 DistributedOperationException gather_tensor_shape get_shape",
        "accelerate.utils.other": "get_free_port has_repeated_blocks is_repeated_blocks",
        "slipstream.utils": """DeviceMap GuardKwargs LedgerKwargs LedgerReport MemorySnapshot NonFiniteError TorchaoQuantizationConfig
            layer_major map_across_processes memory_snapshot merge_traces top_operators""",
    },
    submodules="""ao bnb constants dataclasses deepspeed environment fsdp_utils imports launch megatron_lm memory modeling offload
        operations other random torch_xla transformer_engine versions""",
)

_WITH_DEEPSPEED = (
    "DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper", "DummyOptim", "DummyScheduler",
    "HfDeepSpeedConfig", "get_active_deepspeed_plugin", "map_pytorch_optim_to_deepspeed",
)  # fmt: skip
"""Names that are here only where the package deepspeed is installed: transformers asks for it by them."""


def __getattr__(name: str) -> Any:
    if name in _WITH_DEEPSPEED:
        from accelerate.utils import deepspeed
        from accelerate.utils.imports import is_deepspeed_available

        if is_deepspeed_available():
            return getattr(deepspeed, name)
    return _find(name)
