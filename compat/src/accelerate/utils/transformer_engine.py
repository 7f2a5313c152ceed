"""Names of `accelerate.utils.transformer_engine`: Slipstream computes in float8 with torchao, and using one of them says so."""

from __future__ import annotations

import torch

from accelerate._forwarding import forward_names
from accelerate._unsupported import placeholders

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.utils.imports": "is_fp8_available is_hpu_available is_transformer_engine_available",
        "accelerate.utils.operations": "GatheredParameters",
    },
)
_placeholders = placeholders(__name__, "transformer_engine", functions="apply_fp8_autowrap contextual_fp8_autocast convert_model")
globals().update(_placeholders)


def has_transformer_engine_layers(model: torch.nn.Module) -> bool:
    """Return whether a model has layers of TransformerEngine, by the package that their classes come from."""
    return any(type(module).__module__.partition(".")[0] == "transformer_engine" for module in model.modules())


__all__ = sorted([*_placeholders, "has_transformer_engine_layers", *_forwarded])
