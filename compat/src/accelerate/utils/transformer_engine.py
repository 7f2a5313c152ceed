"""Names of `accelerate.utils.transformer_engine`."""

from accelerate._forwarding import forward_names

__all__, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.imports": "is_hpu_available is_transformer_engine_available",
        "accelerate.utils.operations": "GatheredParameters",
    },
)
