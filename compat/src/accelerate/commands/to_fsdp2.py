"""Names of `accelerate.commands.to_fsdp2`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.utils": "CustomArgumentParser",
        "slipstream.utils": "convert_config_to_fsdp2",
    },
)
