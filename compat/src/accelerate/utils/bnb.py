"""Weights in 8 and 4 bits through bitsandbytes: `accelerate.utils.bnb`."""

from __future__ import annotations

import os
from typing import Any

import torch

from accelerate._forwarding import forward_names

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.big_modeling": "dispatch_model init_empty_weights",
        "accelerate.utils.dataclasses": "BnbQuantizationConfig",
        "accelerate.utils.imports": "is_4bit_bnb_available is_8bit_bnb_available",
        "accelerate.utils.modeling": """find_tied_parameters get_balanced_memory infer_auto_device_map load_checkpoint_in_model
            set_module_tensor_to_device""",
        "accelerate.utils.offload": "offload_weight",
        "slipstream.big_models.quantize": """get_keys_to_not_convert get_parameter_device get_quantized_model_device_map
            quantize_and_offload_8bit replace_with_bnb_layers""",
        "slipstream.utils": "has_4bit_bnb_layers",
    },
)

__all__ = [*_forwarded, "load_and_quantize_model"]


def load_and_quantize_model(
    model: torch.nn.Module,
    bnb_quantization_config: Any,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: dict[str, int | str | torch.device] | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> torch.nn.Module:
    """Replace linear layers by those of bitsandbytes, load their weights, and return the model. Without bitsandbytes: an ImportError.

    `offload_state_dict` has no effect: no state dict is ever in memory.
    """
    from accelerate.utils.dataclasses import BnbQuantizationConfig
    from accelerate.utils.imports import is_bnb_available
    from slipstream.utils import load_and_quantize_model as quantize

    if isinstance(bnb_quantization_config, BnbQuantizationConfig) and not is_bnb_available():
        raise ImportError(
            "BnbQuantizationConfig needs bitsandbytes, which is not installed: pip install bitsandbytes. On a machine without CUDA, "
            "slipstream.utils.TorchaoQuantizationConfig does the same through torchao."
        )
    return quantize(
        model,
        bnb_quantization_config,
        weights_location=weights_location,
        device_map=device_map,
        no_split_module_classes=no_split_module_classes,
        max_memory=max_memory,
        offload_folder=offload_folder,
        offload_state_dict=offload_state_dict,
    )
