"""Names of `accelerate.commands.config`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config": "config_command_parser",
        "accelerate.commands.config.config_args": "load_config_from_file",
        "accelerate.commands.config.default": "default_command_parser",
        "accelerate.commands.config.update": "update_command_parser",
    },
)
