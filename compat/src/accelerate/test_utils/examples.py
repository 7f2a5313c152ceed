"""Names of `accelerate.test_utils.examples`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
    },
)
