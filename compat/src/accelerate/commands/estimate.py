"""Names of `accelerate.commands.estimate`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.big_modeling": "init_empty_weights",
        "accelerate.commands.utils": "CustomArgumentParser",
        "accelerate.utils.imports": "is_timm_available is_transformers_available",
        "accelerate.utils.modeling": "calculate_maximum_sizes",
        "accelerate.utils.other": "convert_bytes",
    },
)
