"""What is wanted of quantised weights: one record for bitsandbytes, with the names that users know, and one for torchao.

Values are checked when a record is made: what cannot be is an error that names the field, and what it could have been.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from slipstream.errors import ConfigError
from slipstream.offload.planning.sizes import CustomDtype

__all__ = ["BnbQuantizationConfig", "QuantizationConfig", "TorchaoQuantizationConfig"]

_NAMED: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "fp32": torch.float32, "float32": torch.float32,
        "fp16": torch.float16, "float16": torch.float16,
        "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    }
)  # fmt: skip
_GROUPS: Final = (32, 64, 128)


def _dtype(given: Any, name: str) -> torch.dtype:
    found: Any = _NAMED.get(given.removeprefix("torch.")) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or found not in _NAMED.values():
        raise ConfigError(f"{name}={given!r} is no type to compute in. Write 'fp16', 'bf16' or 'fp32', or the types of torch.")
    return found


def _names(given: Any, name: str) -> list[str] | None:
    if given is not None and (isinstance(given, str) or not all(isinstance(one, str) for one in given)):
        raise ConfigError(f"{name}={given!r} is no list of names of modules. Write a list, such as ['lm_head'].")
    return None if given is None else list(given)


def _flag(given: Any, name: str) -> None:
    if not isinstance(given, bool):
        raise ConfigError(f"{name}={given!r} is neither True nor False.")


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
            _flag(getattr(self, name), name)
        if self.load_in_8bit == self.load_in_4bit:
            both = "both" if self.load_in_8bit else "neither"
            raise ConfigError(f"{both} of load_in_8bit and load_in_4bit was asked for. Set one of them to True.")
        if (
            isinstance(self.llm_int8_threshold, bool)
            or not isinstance(self.llm_int8_threshold, (int, float))
            or self.llm_int8_threshold < 0
        ):
            raise ConfigError(f"llm_int8_threshold={self.llm_int8_threshold!r} is no number from 0 on; 0 means that there are no outliers.")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigError(f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r} is not known. Write 'fp4' or 'nf4'.")
        self.bnb_4bit_compute_dtype = _dtype(self.bnb_4bit_compute_dtype, "bnb_4bit_compute_dtype")
        default = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self._by_default = self.torch_dtype is None
        self.torch_dtype = default if self.torch_dtype is None else _dtype(self.torch_dtype, "torch_dtype")
        self.skip_modules = _names(self.skip_modules, "skip_modules")
        self.keep_in_fp32_modules = _names(self.keep_in_fp32_modules, "keep_in_fp32_modules")

    @property
    def unasked_dtype(self) -> torch.dtype | None:
        """What the rest of the model becomes without being asked to; None if `torch_dtype` was given."""
        return self.torch_dtype if self._by_default else None

    @property
    def target_dtype(self) -> torch.dtype | CustomDtype:
        """What a converted weight counts for in a plan."""
        return torch.int8 if self.load_in_8bit else CustomDtype.INT4

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


@dataclass
class TorchaoQuantizationConfig:
    """Weights of 8 or 4 bits by torchao, which runs on processors too: weights are stored so, products are computed in the model's type.

    8 bits: one scale for each row, or for each `group_size` numbers of it. 4 bits: a scale and a zero point for each `group_size` numbers
    (128 by default; 32, 64 or 128), in layers whose rows can be divided so and whose number of rows is a multiple of 16; the others stay
    as they are, and that is said. `torch_dtype` is what the model becomes before; by default it keeps its types. `skip_modules` and
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
            raise ConfigError(f"weight_bits={self.weight_bits!r} cannot be. Write 8 or 4.")
        if self.weight_bits == 4 and self.group_size is None:
            self.group_size = _GROUPS[-1]
        size = self.group_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"group_size={size!r} is no number of weights. Write one of {', '.join(map(str, _GROUPS))}.")
        if self.weight_bits == 4 and size not in _GROUPS:
            raise ConfigError(f"group_size={size!r} is not there in 4 bits. Write one of {', '.join(map(str, _GROUPS))}.")
        self.torch_dtype = None if self.torch_dtype is None else _dtype(self.torch_dtype, "torch_dtype")
        self.skip_modules = _names(self.skip_modules, "skip_modules")
        self.keep_in_fp32_modules = _names(self.keep_in_fp32_modules, "keep_in_fp32_modules")

    @property
    def target_dtype(self) -> torch.dtype | CustomDtype:
        """What a converted weight counts for in a plan."""
        return torch.int8 if self.weight_bits == 8 else CustomDtype.INT4

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


QuantizationConfig = BnbQuantizationConfig | TorchaoQuantizationConfig
