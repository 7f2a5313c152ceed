"""Names of `accelerate.commands.config.config_utils`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.menu.selection_menu": "BulletMenu",
        "accelerate.utils.dataclasses": """ComputeEnvironment DistributedType DynamoBackend FP8BackendType PrecisionType
            SageMakerDistributedType""",
    },
)
