"""Names of `accelerate.commands.config.config_args`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.dataclasses": "ComputeEnvironment DistributedType SageMakerDistributedType",
    },
)
