"""The options of precision that are objects, and its names.

Values are checked when the object is made. Recipes of engines that are not run here cannot be made at all: their error names the
one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from slipstream.config.handlers import KwargsHandler
from slipstream.devices.table import _Names
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "GradScalerKwargs",
    "MSAMPRecipeKwargs",
    "PrecisionType",
    "TERecipeKwargs",
]


class PrecisionType(_Names):
    """The values of `mixed_precision`.

    >>> "bf16" in PrecisionType, str(PrecisionType.FP16)
    (True, 'fp16')
    """

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class FP8BackendType(_Names):
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
    """For sharded strategies, of which there is none here yet: True is refused."""

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
                "AORecipeKwargs(enable_fsdp_float8_all_gather=True) gathers sharded weights in float8, but no strategy shards weights "
                "here yet, so it would have no effect: leave it out"
            )


class _NotHere(KwargsHandler):
    """A recipe of an engine that does not run here: making one says so."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} is the recipe of an engine that does not run here: fp8 runs through torchao. "
            "Write AORecipeKwargs(), or leave the recipe out for its defaults."
        )


class TERecipeKwargs(_NotHere):
    """The recipe of TransformerEngine, which does not run here: making one is a `ConfigError` that says what to write instead."""


class MSAMPRecipeKwargs(_NotHere):
    """The recipe of MS-AMP, which does not run here: making one is a `ConfigError` that says what to write instead."""


class FP8RecipeKwargs(_NotHere):
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
