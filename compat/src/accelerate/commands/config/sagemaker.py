"""Names of `accelerate.commands.config.sagemaker`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "SageMakerConfig",
        "accelerate.utils.dataclasses": "ComputeEnvironment SageMakerDistributedType",
        "accelerate.utils.imports": "is_boto3_available",
    },
)
