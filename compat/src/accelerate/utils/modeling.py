"""Names of `accelerate.utils.modeling`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState",
        "accelerate.utils.dataclasses": "AutocastKwargs CustomDtype DistributedType",
        "accelerate.utils.imports": """is_hpu_available is_mlu_available is_mps_available is_musa_available is_npu_available
            is_peft_available is_sdaa_available is_torch_xla_available is_tqdm_available
            is_xpu_available""",
        "accelerate.utils.memory": "clear_device_cache",
        "accelerate.utils.offload": "load_offloaded_weight offload_weight save_offload_index",
        "accelerate.utils.tqdm": "tqdm",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream": "infer_auto_device_map load_checkpoint_in_model",
        "slipstream.big_models.device_map.plan": "clean_device_map fallback_allocate",
        "slipstream.big_models.device_map.sizes": """compute_module_total_buffer_size get_module_leaves get_module_size_with_ties
            get_non_persistent_buffers""",
        "slipstream.big_models.hooks.module_tensors": "check_device_same get_state_dict_from_offload get_state_dict_offloaded_model",
        "slipstream.utils": """SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME align_module_device
            calculate_maximum_sizes check_device_map check_tied_parameters_in_config
            check_tied_parameters_on_same_device compute_module_sizes convert_file_size_to_int
            dtype_byte_size find_tied_parameters get_balanced_memory get_grad_scaler get_max_layer_size
            get_max_memory get_mixed_precision_context_manager has_offloaded_params id_tensor_storage
            is_peft_model load_offloaded_weights load_state_dict named_module_tensors retie_parameters
            set_module_tensor_to_device""",
    },
)
