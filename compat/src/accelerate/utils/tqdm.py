"""Names of `accelerate.utils.tqdm`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "PartialState",
        "accelerate.utils.imports": "is_tqdm_available",
        "slipstream.utils": "tqdm",
    },
)
