"""The flat namespace of helpers: `from slipstream.utils import set_seed, gather_object`.

Each name is imported from its own module on first use; nothing is defined here. `utils.pyi` shows the names to type checkers. Module
paths below it that users of Accelerate write (`slipstream.utils.operations`, ...) are listed in `public_names.py`.
"""

from __future__ import annotations

from slipstream.public_names import lazy_attributes

_NAMES = {
    "big_models.device_map.plan": "DeviceMap get_balanced_memory get_max_memory infer_auto_device_map",
    "big_models.device_map.validation": "check_device_map",
    "big_models.device_map.sizes": """CustomDtype calculate_maximum_sizes check_tied_parameters_in_config
        check_tied_parameters_on_same_device compute_module_sizes dtype_byte_size find_tied_parameters get_max_layer_size
        id_tensor_storage named_module_tensors retie_parameters""",
    "big_models.hooks.module_tensors": "align_module_device has_offloaded_params set_module_tensor_to_device",
    "big_models.layer_major": "layer_major",
    "big_models.load": "load_checkpoint_and_dispatch load_checkpoint_in_model load_state_dict",
    "big_models.quantization_config": "BnbQuantizationConfig TorchaoQuantizationConfig has_4bit_bnb_layers",
    "big_models.quantize": "load_and_quantize_model",
    "big_models.weight_store.offload_folder": """extract_submodules_state_dict load_offloaded_weight load_offloaded_weights
        offload_state_dict offload_weight save_offload_index""",
    "big_models.weight_store.weights": "OffloadedWeightsLoader PrefixedDataset",
    "checkpoint.manifest": """MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME
        SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME""",
    "checkpoint.fsdp_io": "load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer",
    "checkpoint.model_io": "clean_state_dict_for_safetensors",
    "checkpoint.object_file": "load save",
    "config.files": "write_basic_config",
    "config.fsdp2": "convert_config_to_fsdp2",
    "config.handlers": "GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler ProjectConfiguration",
    "config.sources": """clear_environment disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading get_int_from_env
        parse_choice_from_env parse_flag_from_env patch_environment str_to_bool""",
    "data.loader": "get_sampler",
    "data.options": "DataLoaderConfiguration",
    "data.prepare": "prepare_data_loader skip_first_batches",
    "devices.memory": "clear_device_cache convert_bytes release_memory should_reduce_batch_size",
    "devices.packages": """compare_versions deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_aim_available
        is_amdsmi_available is_bitsandbytes_multi_backend_available is_bnb_available is_boto3_available is_clearml_available
        is_comet_ml_available is_datasets_available is_deepspeed_available is_dvclive_available is_fp8_available is_import_timer_available
        is_lomo_available is_matplotlib_available is_megatron_lm_available is_mlflow_available is_msamp_available is_numpy_available
        is_pandas_available is_peft_available is_pippy_available is_pynvml_available is_pytest_available is_rich_available
        is_sagemaker_available is_schedulefree_available is_swanlab_available is_tensorboard_available is_timm_available
        is_torch_distributed_available is_torch_version is_torchao_available is_torchdata_available
        is_torchdata_stateful_dataloader_available is_torchvision_available is_tqdm_available is_trackio_available
        is_transformer_engine_available is_transformer_engine_mxfp8_available is_transformers_available is_triton_available
        is_wandb_available is_weights_only_available torchao_required""",
    "devices.table": """DistributedType RNGType is_bf16_available is_cuda_available is_fp16_available is_habana_gaudi1 is_hpu_available
        is_mlu_available is_mps_available is_musa_available is_neuron_available is_npu_available is_rocm_available is_sdaa_available
        is_torch_xla_available is_xccl_available is_xpu_available""",
    "distributed.functional": """broadcast broadcast_object_list copy_tensor_to_devices gather gather_object gather_tensor_shape
        map_across_processes pad_across_processes reduce set_seed synchronize_rng_state synchronize_rng_states wait_for_everyone""",
    "distributed.helpers": """check_os_kernel get_free_port get_module_children_bottom_up get_module_class_from_name get_pretty_name
        is_port_in_use merge_dicts recursive_getattr""",
    "distributed.progress_bar": "tqdm",
    "distributed.pytree": """CannotPadNestedTensorWarning ConvertOutputsToFp32 TensorInformation concatenate convert_outputs_to_fp32
        convert_to_fp32 find_batch_size find_device get_data_structure get_shape honor_type ignorant_find_batch_size initialize_tensors
        is_namedtuple is_tensor_information is_torch_tensor listify pad_input_tensors recursively_apply send_to_device slice_tensors""",
    "errors": "DistributedOperationException",
    "files.sizes": "convert_file_size_to_int",
    "inference.pipeline": "prepare_pippy",
    "launch.worker_main": "PrepareForLaunch",
    "observability.guards.findings": "NonFiniteError",
    "observability.memory": "MemorySnapshot memory_snapshot",
    "observability.options": "GuardKwargs LedgerKwargs PROFILE_PATTERN_NAME ProfileKwargs",
    "observability.profiler": "merge_traces top_operators",
    "observability.timing.report": "LedgerReport",
    "observability.trackers.registry": "LoggerType",
    "parallel.compile": """DynamoBackend TorchDynamoPlugin compile_regions compile_regions_fsdp2 has_compiled_regions has_repeated_blocks
        is_compiled_module is_repeated_blocks""",
    "parallel.parallelism_config": "ParallelismConfig get_model_tp_size model_has_dtensor",
    "parallel.unwrap": "extract_model_from_parallel is_peft_model",
    "precision.autocast": "get_mixed_precision_context_manager",
    "precision.fp8": "convert_model_to_fp8_ao filter_first_and_last_linear_layers has_ao_layers",
    "precision.policy": """AORecipeKwargs AutocastKwargs FP8BackendType FP8RecipeKwargs GradScalerKwargs MSAMPRecipeKwargs PrecisionType
        TERecipeKwargs""",
    "precision.scaler": "get_grad_scaler",
    "strategies.ddp_options": "DDPCommunicationHookType DistributedDataParallelKwargs",
    "strategies.fsdp_functions": """ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict
        fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler
        get_parameters_from_modules""",
    "strategies.fsdp_options": "FullyShardedDataParallelPlugin",
    "training.batch_size": "find_executable_batch_size",
}

__all__, __getattr__, __dir__ = lazy_attributes(__name__, _NAMES)
__path__: list[str] = []  # modules below it are found by the finder of public_names.py
