"""The precision policy: which dtype is used for parameters, compute, gradient reduction and outputs; and the options of mixed precision.

Under autocast, outputs are cast to float32 by default, so that a loss computed from them is a float32 number: in bfloat16 it would have
three digits. `outputs_to_fp32=False` leaves outputs as they were computed. A precision that the device cannot compute in, or that would
have no effect on these parameters, is an error or a warning at `prepare`; it never silently becomes another one. Options are checked when
they are made, and the recipe of an FP8 engine that does not run here is an error that names the one that does.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from slipstream.config.handlers import KwargsHandler
from slipstream.devices.packages import installed
from slipstream.devices.table import CPU, StringEnum, family_of, is_fp16_available
from slipstream.errors import ConfigError

__all__ = [
    "AORecipeKwargs", "AutocastKwargs", "FP8BackendType", "FP8RecipeKwargs", "GradScalerKwargs", "MSAMPRecipeKwargs", "PrecisionPolicy",
    "PrecisionType", "TERecipeKwargs", "check_device", "check_parameters", "make_policy",
]


class PrecisionType(StringEnum):
    """The values of `mixed_precision`.

    >>> "bf16" in PrecisionType, str(PrecisionType.FP16)
    (True, 'fp16')
    """

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class FP8BackendType(StringEnum):
    """Packages that train in float8. AO (torchao) is the one that runs here.

    >>> FP8BackendType.AO.value
    'AO'
    """

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


@dataclass
class AutocastKwargs(KwargsHandler):
    """How `torch.autocast` is entered.

    >>> AutocastKwargs(cache_enabled=False).to_kwargs()
    {'cache_enabled': False}
    """

    enabled: bool = True
    """False: autocast is off inside, also within an outer autocast."""
    cache_enabled: bool | None = None
    """Whether weights are cast once per pass instead of at every use; None leaves it to torch."""

    def __post_init__(self) -> None:
        _check_flag(self, "enabled")
        _check_flag(self, "cache_enabled", or_none=True)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """How the scale of the loss moves in fp16: it falls after an overflow, and rises after `growth_interval` updates without one.

    >>> GradScalerKwargs(init_scale=1024.0).to_kwargs()
    {'init_scale': 1024.0}
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    """False: the loss is not scaled, so small gradients may vanish in float16."""

    def __post_init__(self) -> None:
        _check_flag(self, "enabled")
        _check_number(self, "init_scale", "above 0", lambda value: value > 0)
        _check_number(self, "growth_factor", "above 1 (1 would never grow)", lambda value: value > 1)
        _check_number(self, "backoff_factor", "between 0 and 1", lambda value: 0 < value < 1)
        _check_number(self, "growth_interval", "a whole number from 1", lambda value: isinstance(value, int) and value >= 1)


@dataclass
class AORecipeKwargs(KwargsHandler):
    """How linear layers are converted to float8 by torchao.

    >>> AORecipeKwargs(pad_inner_dim=True).to_kwargs()
    {'pad_inner_dim': True}
    """

    config: Any = None
    """A `torchao.float8.Float8LinearConfig`; None: torchao's own default, emulated on devices without float8."""
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    """Called with a layer and its name: whether to convert it. None: all but the first and last whose sizes are multiples of 16."""
    pad_inner_dim: bool | None = None
    """Pad products whose inner size (the rows of a batch, in a gradient) is no multiple of 16, at the cost of memory. Part of `config`, if
    one is given."""
    enable_fsdp_float8_all_gather: bool | None = None
    """Gather shards in float8: not supported, True is refused. Their format is that of the plugin's `mixed_precision_policy`."""

    def __post_init__(self) -> None:
        if self.module_filter_func is not None and not callable(self.module_filter_func):
            raise ConfigError(
                f"AORecipeKwargs(module_filter_func={self.module_filter_func!r}): a function is needed that is called with a layer and "
                "its name and says whether to convert it; leave it out to convert all but the first and last linear layers"
            )
        _check_flag(self, "pad_inner_dim", or_none=True)
        _check_flag(self, "enable_fsdp_float8_all_gather", or_none=True)
        if self.config is not None and self.pad_inner_dim is not None and self.pad_inner_dim != getattr(self.config, "pad_inner_dim", None):
            raise ConfigError(
                f"AORecipeKwargs(pad_inner_dim={self.pad_inner_dim}) contradicts its config, which says "
                f"pad_inner_dim={getattr(self.config, 'pad_inner_dim', None)}: write it in Float8LinearConfig(pad_inner_dim=...) alone"
            )
        if self.enable_fsdp_float8_all_gather or getattr(self.config, "enable_fsdp_float8_all_gather", False):
            raise ConfigError(
                "AORecipeKwargs(enable_fsdp_float8_all_gather=True) gathers sharded weights in float8, which is not supported: they are "
                "gathered in the format of FullyShardedDataParallelPlugin(mixed_precision_policy=...). Leave it out."
            )


class _UnavailableRecipe(KwargsHandler):
    """A recipe of an engine that does not run here: making one says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} is the recipe of an engine that does not run here: fp8 runs through torchao. "
            "Write AORecipeKwargs(), or leave the recipe out for its defaults."
        )


class TERecipeKwargs(_UnavailableRecipe):
    """The recipe of TransformerEngine, which does not run here: making one is a `ConfigError` that says what to write instead."""


class MSAMPRecipeKwargs(_UnavailableRecipe):
    """The recipe of MS-AMP, which does not run here: making one is a `ConfigError` that says what to write instead."""


class FP8RecipeKwargs(_UnavailableRecipe):
    """The old recipe of TransformerEngine and MS-AMP together: making one is a `ConfigError` that says what to write instead."""


def _check_flag(handler: KwargsHandler, name: str, *, or_none: bool = False) -> None:
    value = getattr(handler, name)
    if not isinstance(value, bool) and not (or_none and value is None):
        choices = "True, False or None" if or_none else "True or False"
        raise ConfigError(f"{type(handler).__name__}({name}={value!r}): write {choices}")


def _check_number(handler: KwargsHandler, name: str, wanted: str, fits: Callable[[Any], bool]) -> None:
    value = getattr(handler, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or not fits(value):
        usual = type(handler)()
        raise ConfigError(f"{type(handler).__name__}({name}={value!r}): it must be {wanted}; the default is {getattr(usual, name)}")


_AUTOCAST_DTYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class PrecisionPolicy:
    """The formats of one precision; made by `make_policy`.

    >>> print(make_policy("bf16"))
    bf16: parameters float32, compute bfloat16, gradients reduced in float32, outputs cast to float32
    """

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    output: torch.dtype | None = None
    mixed_precision: str = "no"
    autocast: bool = True
    """False: autocast was turned off by the user (`AutocastKwargs(enabled=False)`)."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What autocast casts to; None where there is none to install."""
        return _AUTOCAST_DTYPES[self.mixed_precision]

    def for_model(self, model: torch.nn.Module) -> PrecisionPolicy:
        """Return the policy as it is for a model, whose parameters may have been loaded in another format.

        >>> print(make_policy("no").for_model(torch.nn.Linear(2, 2, dtype=torch.bfloat16)))
        no: parameters bfloat16, compute bfloat16, gradients reduced in bfloat16, outputs as computed
        """
        counts: Counter[torch.dtype] = Counter()
        for parameter in model.parameters():
            if parameter.is_floating_point():
                counts[parameter.dtype] += parameter.numel()
        if not counts:
            return self
        param = counts.most_common(1)[0][0]
        # Autocast leaves float64 alone.
        casts = self.autocast and self.autocast_dtype is not None and param is not torch.float64
        reduce = param if self.reduce is self.param else self.reduce
        return dataclasses.replace(self, param=param, compute=self.compute if casts else param, reduce=reduce)

    def __str__(self) -> str:
        compute = _dtype_name(self.compute)
        if self.mixed_precision == "fp8":
            compute = f"float8 in converted linear layers and {compute} elsewhere"
        elif self.mixed_precision != "no" and not self.autocast:
            compute += " (autocast is turned off)"
        outputs = "as computed" if self.output is None else f"cast to {_dtype_name(self.output)}"
        return (
            f"{self.mixed_precision}: parameters {_dtype_name(self.param)}, compute {compute}, "
            f"gradients reduced in {_dtype_name(self.reduce)}, outputs {outputs}"
        )


def make_policy(
    mixed_precision: str,
    *,
    outputs_to_fp32: bool | None = None,
    param: torch.dtype = torch.float32,
    reduce: torch.dtype | None = None,
    autocast: bool = True,
) -> PrecisionPolicy:
    """Return the policy of a value of `mixed_precision`; give `reduce` where a communication hook sends gradients in another format.

    `outputs_to_fp32`: None casts outputs where the precision is a mixed one.

    >>> make_policy("fp16").output, make_policy("fp16", outputs_to_fp32=False).output, make_policy("no").output
    (torch.float32, None, None)
    """
    name = str(getattr(mixed_precision, "value", mixed_precision)).lower()
    if name not in PrecisionType:
        raise ConfigError(f"mixed_precision={mixed_precision!r} is not known; write one of {', '.join(PrecisionType.list())}")
    target = _AUTOCAST_DTYPES[name]
    return PrecisionPolicy(
        param=param,
        compute=target if target is not None and autocast else param,
        reduce=param if reduce is None else reduce,
        output=torch.float32 if (target is not None if outputs_to_fp32 is None else outputs_to_fp32) else None,
        mixed_precision=name,
        autocast=autocast,
    )


def check_device(mixed_precision: str, device_type: str) -> None:
    """Raise for a precision that this kind of device cannot compute in, or whose package is not installed.

    >>> check_device("bf16", "cpu")
    """
    if mixed_precision == "no":
        return
    why = _explain_unsupported(mixed_precision, device_type)
    if why is not None:
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} cannot be used on {device_type}: {why}. "
            "Write mixed_precision='no', or choose another device."
        )
    if mixed_precision == "fp8" and not installed("torchao", minimum="0.9"):
        raise ConfigError(
            "mixed_precision='fp8' runs through torchao (0.9 or later), which is not installed: "
            "pip install 'slipstream[fp8]', or write mixed_precision='bf16'"
        )


def _explain_unsupported(mixed_precision: str, device_type: str) -> str | None:
    if not torch.amp.is_autocast_available(device_type):
        return "torch has no autocast for it"
    family = family_of(device_type)
    if mixed_precision in ("bf16", "fp8") and not family.computes_bf16():
        return "it does not compute in bfloat16"
    if mixed_precision == "fp16" and family.type != CPU.type and not is_fp16_available():
        return "it does not compute in float16"
    # torch would warn and compute in float32.
    computed = family.ask("get_amp_supported_dtype")
    if computed is not None and _AUTOCAST_DTYPES[mixed_precision] not in computed:
        return f"its autocast computes in {', '.join(str(dtype).removeprefix('torch.') for dtype in computed)} only"
    return None


def check_parameters(policy: PrecisionPolicy, model: torch.nn.Module, *, scales: bool) -> None:
    """Raise for parameters that cannot be trained under the policy, and warn of those on which it has no effect.

    `scales` says whether the loss is scaled: gradients in float16 cannot be unscaled without overflow, so parameters that are trained
    have to be in a wider format. Parameters without gradients may be in any.
    """
    for name, parameter in model.named_parameters():
        if scales and parameter.dtype is torch.float16 and parameter.requires_grad:
            raise ConfigError(
                f"parameter {name} of {type(model).__name__} is float16, and mixed_precision='fp16' scales the loss: its gradient would "
                "overflow, and updates smaller than a thousandth of a weight would be lost. Load the model in float32 (model.float()); "
                "autocast computes in float16 all the same. To keep float16 weights, write mixed_precision='no'."
            )
    if policy.autocast_dtype is not None and policy.for_model(model).param is torch.float64:
        warnings.warn(
            f"mixed_precision={policy.mixed_precision!r} has no effect on {type(model).__name__}: its parameters are float64, which "
            "autocast leaves alone. Call model.float() before prepare, or write mixed_precision='no'.",
            stacklevel=2,
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
