"""Weights of linear layers as torchao stores them in 8 or 4 bits. The library is imported when a layer is converted, and not before.

On a processor 4 bits go through the kernel that torch itself has for them; it wants a multiple of 16 rows.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
from torch import nn

from slipstream.devices.quiet import quiet
from slipstream.devices.table import CPU
from slipstream.errors import ConfigError
from slipstream.offload.quantize.config import TorchaoQuantizationConfig

__all__ = ["Torchao"]

_ROWS: Final = 16
_ON_PROCESSORS: Final = "torchao.prototype.quantization.int4.inference_workflow"


class Torchao:
    """Converts linear layers as the config says."""

    def __init__(self, config: TorchaoQuantizationConfig) -> None:
        self._config = config
        self._library = _module("torchao.quantization")

    def refuses(self, layer: nn.Linear) -> str:
        """Why a layer cannot be converted; "" if it can."""
        group = self._config.group_size
        if group is not None and layer.in_features % group:
            return f"its {layer.in_features} columns are no multiple of group_size={group}"
        if self._config.weight_bits == 4 and layer.out_features % _ROWS:
            return f"its {layer.out_features} rows are no multiple of {_ROWS}"
        return ""

    def convert(self, layer: nn.Linear, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The same layer, with its weight in fewer bits."""
        layer.weight = nn.Parameter(layer.weight.detach().to(device, dtype), requires_grad=False)
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)
        with quiet():
            self._library.quantize_(layer, self._how(device))
        return layer

    def _how(self, device: torch.device) -> Any:
        group = self._config.group_size
        if self._config.weight_bits == 8:
            granularity = self._library.PerRow() if group is None else _module("torchao.quantization.granularity").PerGroup(group)
            return self._library.Int8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)
        if device.type == CPU.type:
            return _module(_ON_PROCESSORS).PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
        return self._library.Int4WeightOnlyConfig(group_size=group, set_inductor_config=False)


def _module(name: str) -> Any:
    try:
        with quiet():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"TorchaoQuantizationConfig works through torchao, which is not installed in a version that has {name} ({error}): "
            "pip install 'slipstream[quantize]'"
        ) from None
