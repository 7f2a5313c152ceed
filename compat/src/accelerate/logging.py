"""Names of `accelerate.logging`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "PartialState",
        "slipstream.logging": "MultiProcessAdapter get_logger",
    },
    unlisted={"slipstream.logging": "JsonFormatter"},
)
