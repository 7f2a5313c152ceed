"""Quantization configs for bitsandbytes and torchao, and how each library converts one linear layer.

Configs are checked when they are made: an error names the field and the values that it takes. The libraries are imported when a layer is
converted, not before. torchao's 8 and 4 bit weights also run on CPUs; 4 bits need a multiple of 16 rows there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from slipstream.big_models.device_map.sizes import CustomDtype, parse_torch_dtype
from slipstream.config.handlers import check_count
from slipstream.devices.packages import compare_versions, import_quietly, silence_libraries, version_of
from slipstream.devices.table import CPU
from slipstream.errors import ConfigError
from slipstream.precision.autocast import transfer_hooks

__all__ = [
    "BitsandbytesConverter", "BnbQuantizationConfig", "QuantizationConfig", "TorchaoConverter", "TorchaoQuantizationConfig",
    "has_4bit_bnb_layers", "quantize_rows",
]


_SHORT_NAMES: Final[Mapping[str, str]] = MappingProxyType({"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"})
_GROUP_SIZES: Final = (32, 64, 128)


def _parse_dtype(given: Any, name: str) -> torch.dtype:
    found = parse_torch_dtype(_SHORT_NAMES.get(given, given) if isinstance(given, str) else given, name)
    if found not in (torch.float32, torch.float16, torch.bfloat16):
        raise ConfigError(f"{name}={given!r} is not a dtype to compute in. Write 'fp16', 'bf16' or 'fp32', or the dtypes of torch.")
    return found


def _check_names(given: Any, name: str) -> list[str] | None:
    if given is not None and (isinstance(given, str) or not all(isinstance(module, str) for module in given)):
        raise ConfigError(f"{name}={given!r} is not a list of module names. Write a list, such as ['lm_head'].")
    return None if given is None else list(given)


@dataclass
class BnbQuantizationConfig:
    """Weights of 8 or 4 bits by bitsandbytes.

    `load_in_8bit` (LLM.int8: columns in which inputs exceed `llm_int8_threshold` are computed in 16 bits) or `load_in_4bit` (`fp4` or
    `nf4`; scales are quantised too with `bnb_4bit_use_double_quant`; products are computed in `bnb_4bit_compute_dtype`). `torch_dtype` is
    what the rest of the model becomes: by default float16 beside 8 bits, and the type that is computed in beside 4. Modules that
    `skip_modules` names are left alone (by default the output head and tied modules), those of `keep_in_fp32_modules` become float32.

    >>> BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bf16").torch_dtype
    torch.bfloat16
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is neither True nor False.")
        if self.load_in_8bit == self.load_in_4bit:
            both = "both" if self.load_in_8bit else "neither"
            raise ConfigError(f"{both} of load_in_8bit and load_in_4bit is set. Set one of them to True.")
        threshold = self.llm_int8_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or threshold < 0:
            raise ConfigError(f"llm_int8_threshold={threshold!r} is not a non-negative number; 0 means that there are no outliers.")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigError(f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not supported. Write 'fp4' or 'nf4'.")
        self.bnb_4bit_compute_dtype = _parse_dtype(self.bnb_4bit_compute_dtype, "bnb_4bit_compute_dtype")
        default = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self._by_default = self.torch_dtype is None
        self.torch_dtype = default if self.torch_dtype is None else _parse_dtype(self.torch_dtype, "torch_dtype")
        self.skip_modules = _check_names(self.skip_modules, "skip_modules")
        self.keep_in_fp32_modules = _check_names(self.keep_in_fp32_modules, "keep_in_fp32_modules")

    @property
    def unasked_dtype(self) -> torch.dtype | None:
        """The dtype of the rest of the model if it is the default; None if `torch_dtype` was given."""
        return self.torch_dtype if self._by_default else None

    @property
    def target_dtype(self) -> torch.dtype | CustomDtype:
        """The dtype that a converted weight counts with in a device map."""
        return torch.int8 if self.load_in_8bit else CustomDtype.INT4

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


@dataclass
class TorchaoQuantizationConfig:
    """Weights of 8 or 4 bits by torchao, which also runs on CPUs: only storage is quantized, products are computed in the model's dtype.

    8 bits: one scale for each row, or for each `group_size` numbers of it. 4 bits: a scale and a zero point for each `group_size` numbers
    (128 by default; 32, 64 or 128), in layers whose rows can be divided so and whose number of rows is a multiple of 16; the others stay
    as they are, with a warning. `torch_dtype` is what the model becomes before; by default it keeps its types. `skip_modules` and
    `keep_in_fp32_modules` as in `BnbQuantizationConfig`.

    >>> TorchaoQuantizationConfig(weight_bits=4).group_size
    128
    """

    weight_bits: int = 8
    group_size: int | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    torch_dtype: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.weight_bits, bool) or self.weight_bits not in (8, 4):
            raise ConfigError(f"weight_bits={self.weight_bits!r} is not supported. Write 8 or 4.")
        if self.weight_bits == 4 and self.group_size is None:
            self.group_size = _GROUP_SIZES[-1]
        size = self.group_size
        if size is not None:
            check_count(size, f"group_size={size!r} is not a number of weights. Write one of {', '.join(map(str, _GROUP_SIZES))}.")
        if self.weight_bits == 4 and size not in _GROUP_SIZES:
            raise ConfigError(f"group_size={size!r} is not supported with 4 bits. Write one of {', '.join(map(str, _GROUP_SIZES))}.")
        self.torch_dtype = None if self.torch_dtype is None else _parse_dtype(self.torch_dtype, "torch_dtype")
        self.skip_modules = _check_names(self.skip_modules, "skip_modules")
        self.keep_in_fp32_modules = _check_names(self.keep_in_fp32_modules, "keep_in_fp32_modules")

    @property
    def target_dtype(self) -> torch.dtype | CustomDtype:
        """The dtype that a converted weight counts with in a device map."""
        return torch.int8 if self.weight_bits == 8 else CustomDtype.INT4

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


QuantizationConfig = BnbQuantizationConfig | TorchaoQuantizationConfig


class BitsandbytesConverter:
    """Converts linear layers by the config."""

    def __init__(self, config: BnbQuantizationConfig) -> None:
        self._config = config
        self._library = _import_bitsandbytes()

    def refuses(self, layer: nn.Linear) -> str:
        """Return why a layer cannot be converted; "" if it can."""
        return ""

    def convert(self, layer: nn.Linear, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Return a layer with the weights of this one in fewer bits; an empty one on the meta device."""
        made: nn.Module = self._empty(layer)
        weight = layer.weight.detach()
        if not weight.is_meta:
            made.weight = self._weight(weight, made).to(device)
            if layer.bias is not None:
                made.bias = nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)
        made.requires_grad_(False)
        made.train(layer.training)
        transfer_hooks(layer, made)
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


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in 8 bits, and the largest absolute value of each row, which is encoded as 127."""
    data, scale, _ = _import_bitsandbytes().functional.int8_vectorwise_quant(weight.to(torch.float16))
    return data, scale


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether any layer of a model has weights of 4 bits by bitsandbytes.

    >>> has_4bit_bnb_layers(nn.Linear(2, 2))
    False
    """
    library = sys.modules.get("bitsandbytes")
    return library is not None and any(isinstance(module, library.nn.Linear4bit) for module in model.modules())


def _import_bitsandbytes() -> Any:
    remedy = "pip install 'slipstream[bitsandbytes]'. TorchaoQuantizationConfig does the same through torchao."
    return import_quietly("bitsandbytes", "BnbQuantizationConfig works through bitsandbytes", remedy)


_ROW_MULTIPLE: Final = 16
_TORCHAO: Final = "0.18"
"""The earliest version with the parts that are used here, as the extra `quantize` declares it."""
_CPU_INT4_MODULE: Final = "torchao.prototype.quantization.int4.inference_workflow"


class TorchaoConverter:
    """Converts linear layers by the config."""

    def __init__(self, config: TorchaoQuantizationConfig) -> None:
        self._config = config
        self._library = _import_torchao("torchao.quantization")
        if not compare_versions(version_of("torchao") or _TORCHAO, ">=", _TORCHAO):
            raise ConfigError(_torchao_needed())

    def refuses(self, layer: nn.Linear) -> str:
        """Return why a layer cannot be converted; "" if it can."""
        group = self._config.group_size
        if group is not None and layer.in_features % group:
            return f"its {layer.in_features} columns are not a multiple of group_size={group}"
        if self._config.weight_bits == 4 and layer.out_features % _ROW_MULTIPLE:
            return f"its {layer.out_features} rows are not a multiple of {_ROW_MULTIPLE}"
        return ""

    def convert(self, layer: nn.Linear, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Quantize the weight of the layer and return it."""
        layer.weight = nn.Parameter(layer.weight.detach().to(device, dtype), requires_grad=False)
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)
        try:
            with silence_libraries():
                self._library.quantize_(layer, self._how(device))
        except ImportError as error:  # kernels of some devices are in packages of their own
            raise ConfigError(
                f"torchao cannot make weights of {self._config.weight_bits} bits on {device} here: {error}. Install that package, or use "
                "TorchaoQuantizationConfig(8) or a BnbQuantizationConfig."
            ) from error
        return layer

    def _how(self, device: torch.device) -> Any:
        group = self._config.group_size
        if self._config.weight_bits == 8:
            granularity = self._library.PerRow() if group is None else _import_torchao("torchao.quantization.granularity").PerGroup(group)
            return self._library.Int8WeightOnlyConfig(granularity=granularity, set_inductor_config=False)
        if device.type == CPU.type:
            return _import_torchao(_CPU_INT4_MODULE).PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
        return self._library.Int4WeightOnlyConfig(group_size=group, set_inductor_config=False)


def _import_torchao(name: str) -> Any:
    try:
        with silence_libraries():
            return importlib.import_module(name)
    except ImportError as error:  # it is not there, or imports what the installed torch does not have
        raise ConfigError(f"{_torchao_needed()} Importing {name} failed: {error}") from None


def _torchao_needed() -> str:
    return (
        f"TorchaoQuantizationConfig works through torchao {_TORCHAO} or later; installed are torchao {version_of('torchao')} and "
        f"torch {version_of('torch')}. pip install 'slipstream[quantize]' gets it, with a torch that it runs on."
    )
