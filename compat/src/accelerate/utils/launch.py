"""Names of `accelerate.utils.launch`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "SageMakerConfig",
        "accelerate.utils.dataclasses": "DistributedType DynamoBackend PrecisionType SageMakerDistributedType",
        "accelerate.utils.environment": "str_to_bool",
        "accelerate.utils.imports": """is_fp8_available is_hpu_available is_mlu_available is_musa_available is_neuron_available
            is_npu_available is_sdaa_available is_torch_xla_available is_xpu_available""",
        "accelerate.utils.other": "get_free_port is_port_in_use merge_dicts",
        "accelerate.utils.versions": "compare_versions",
        "slipstream": "PrepareForLaunch",
    },
)
