"""Names of `accelerate.utils.bnb`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.big_modeling": "dispatch_model init_empty_weights",
        "accelerate.utils.dataclasses": "BnbQuantizationConfig",
        "accelerate.utils.imports": "is_4bit_bnb_available is_8bit_bnb_available",
        "accelerate.utils.modeling": """find_tied_parameters get_balanced_memory infer_auto_device_map load_checkpoint_in_model
            set_module_tensor_to_device""",
        "accelerate.utils.offload": "offload_weight",
        "slipstream.big_models.quantize": """get_keys_to_not_convert get_parameter_device get_quantized_model_device_map
            quantize_and_offload_8bit replace_with_bnb_layers""",
        "slipstream.utils": "has_4bit_bnb_layers load_and_quantize_model",
    },
)
