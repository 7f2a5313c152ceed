"""Layers of bitsandbytes in the place of linear ones. The library is imported when a layer is made, and not before."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from slipstream.devices.quiet import import_quietly
from slipstream.offload.quantize.config import BnbQuantizationConfig
from slipstream.precision.swap import hand_over_hooks

__all__ = ["Bitsandbytes", "has_4bit_bnb_layers", "quantized_rows"]


class Bitsandbytes:
    """Converts linear layers as the config says."""

    def __init__(self, config: BnbQuantizationConfig) -> None:
        self._config = config
        self._library = _bitsandbytes()

    def refuses(self, layer: nn.Linear) -> str:
        """Why a layer cannot be converted; "" if it can."""
        return ""

    def convert(self, layer: nn.Linear, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """A layer with the weights of this one in fewer bits; on the meta device one that waits for its weights."""
        made: nn.Module = self._empty(layer)
        weight = layer.weight.detach()
        if not weight.is_meta:
            made.weight = self._weight(weight, made).to(device)
            if layer.bias is not None:
                made.bias = nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)
        made.requires_grad_(False)
        made.train(layer.training)
        hand_over_hooks(layer, made)
        return made

    def _empty(self, layer: nn.Linear) -> Any:
        sizes = (layer.in_features, layer.out_features, layer.bias is not None)
        if self._config.load_in_8bit:
            return self._library.nn.Linear8bitLt(
                *sizes, has_fp16_weights=False, threshold=float(self._config.llm_int8_threshold), device="meta"
            )
        return self._library.nn.Linear4bit(
            *sizes,
            compute_dtype=self._config.bnb_4bit_compute_dtype,
            compress_statistics=self._config.bnb_4bit_use_double_quant,
            quant_type=self._config.bnb_4bit_quant_type,
            device="meta",
        )

    def _weight(self, weight: torch.Tensor, made: Any) -> Any:
        if self._config.load_in_8bit:
            return self._library.nn.Int8Params(weight.to(torch.float16), requires_grad=False, has_fp16_weights=False)
        return self._library.nn.Params4bit(
            weight.to(self._config.bnb_4bit_compute_dtype),
            requires_grad=False,
            compress_statistics=self._config.bnb_4bit_use_double_quant,
            quant_type=self._config.bnb_4bit_quant_type,
            module=made,
        )


def quantized_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in 8 bits, and the largest absolute value of each row, which 127 stands for."""
    data, scale, _ = _bitsandbytes().functional.int8_vectorwise_quant(weight.to(torch.float16))
    return data, scale


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether any layer of a model has weights of 4 bits by bitsandbytes.

    >>> has_4bit_bnb_layers(nn.Linear(2, 2))
    False
    """
    library = sys.modules.get("bitsandbytes")
    return library is not None and any(isinstance(module, library.nn.Linear4bit) for module in model.modules())


def _bitsandbytes() -> Any:
    remedy = "pip install 'slipstream[bitsandbytes]'. TorchaoQuantizationConfig does the same through torchao."
    return import_quietly("bitsandbytes", "BnbQuantizationConfig works through bitsandbytes", remedy)
