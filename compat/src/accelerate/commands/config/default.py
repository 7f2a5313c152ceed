"""Names of `accelerate.commands.config.default`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config.config_args": "ClusterConfig",
        "accelerate.commands.config.config_utils": "SubcommandHelpFormatter",
        "slipstream.utils": "write_basic_config",
    },
)
