"""Names of `accelerate.test_utils.training`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.dataclasses": "DistributedType",
    },
)
