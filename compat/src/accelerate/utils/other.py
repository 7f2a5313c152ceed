"""Names of `accelerate.utils.other`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate._object_files": "load save",
        "accelerate.commands.config.default": "write_basic_config",
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils.dataclasses": "DistributedType",
        "accelerate.utils.imports": """is_deepspeed_available is_numpy_available is_torch_distributed_available
            is_torch_xla_available is_weights_only_available""",
        "accelerate.utils.modeling": "id_tensor_storage",
        "accelerate.utils.transformer_engine": "convert_model",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream.utils": """check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_fsdp2
            convert_bytes extract_model_from_parallel get_free_port get_model_tp_size
            get_module_children_bottom_up get_pretty_name has_compiled_regions has_repeated_blocks
            is_compiled_module is_port_in_use is_repeated_blocks merge_dicts model_has_dtensor
            recursive_getattr wait_for_everyone""",
    },
)
