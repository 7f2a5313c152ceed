"""Names of `accelerate.commands.env`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "load_config_from_file",
        "accelerate.utils.imports": "is_mps_available",
    },
)
