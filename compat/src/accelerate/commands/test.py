"""Names of `accelerate.commands.test`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.test_utils.testing": "execute_subprocess_async path_in_accelerate_package",
    },
)
