"""Names of `accelerate.utils.megatron_lm`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate.utils.imports": "is_megatron_lm_available",
        "accelerate.utils.operations": "recursively_apply send_to_device",
        "slipstream": "prepare_data_loader",
    },
)
