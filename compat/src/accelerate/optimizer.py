"""Names of `accelerate.optimizer`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState GradientState",
        "accelerate.utils.dataclasses": "DistributedType",
        "accelerate.utils.imports": "is_lomo_available is_torch_xla_available",
        "accelerate.utils.operations": "honor_type",
        "slipstream.training.optimizer": "AcceleratedOptimizer move_to_device",
    },
)
