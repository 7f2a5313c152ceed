"""Names of `accelerate.commands.accelerate_cli`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.commands.config": "get_config_parser",
        "accelerate.commands.env": "env_command_parser",
        "accelerate.commands.estimate": "estimate_command_parser",
        "accelerate.commands.launch": "launch_command_parser",
        "accelerate.commands.merge": "merge_command_parser",
        "accelerate.commands.test": "test_command_parser",
        "accelerate.commands.to_fsdp2": "to_fsdp2_command_parser",
        "accelerate.commands.tpu": "tpu_command_parser",
        "accelerate.commands.utils": "CustomArgumentParser",
    },
)
