"""Names of `accelerate.utils.deepspeed`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate.utils.dataclasses": "DistributedType",
        "accelerate.utils.imports": "is_bnb_available",
        "accelerate.utils.versions": "compare_versions",
    },
)
