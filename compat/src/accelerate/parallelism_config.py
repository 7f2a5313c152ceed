"""Names of `accelerate.parallelism_config`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.dataclasses": """DeepSpeedSequenceParallelConfig DistributedType TorchContextParallelConfig
            TorchTensorParallelConfig""",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream": "ParallelismConfig",
    },
)
