"""Names of `accelerate.memory_utils`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
    },
)
