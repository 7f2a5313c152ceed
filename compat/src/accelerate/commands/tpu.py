"""Names of `accelerate.commands.tpu`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "load_config_from_file",
    },
)
