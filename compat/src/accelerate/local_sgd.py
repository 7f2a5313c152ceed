"""Names of `accelerate.local_sgd`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.accelerator": "Accelerator",
        "accelerate.utils.dataclasses": "DistributedType",
        "slipstream": "LocalSGD",
    },
)
