"""Names of `accelerate.commands.config.cluster`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "ClusterConfig",
        "accelerate.utils.dataclasses": "ComputeEnvironment DistributedType",
        "accelerate.utils.imports": """is_deepspeed_available is_fp8_available is_hpu_available is_mlu_available is_mps_available
            is_msamp_available is_musa_available is_neuron_available is_npu_available is_sdaa_available
            is_torchao_available is_transformer_engine_available is_transformers_available
            is_xpu_available""",
    },
)
