"""Names of `accelerate.commands.merge`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.utils": "CustomArgumentParser",
        "accelerate.utils.fsdp_utils": "merge_fsdp_weights",
    },
)
