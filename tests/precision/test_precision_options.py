"""Options of precision are checked when they are made, and names are those that scripts use."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.precision.policy import (
    AORecipeKwargs,
    AutocastKwargs,
    FP8BackendType,
    FP8RecipeKwargs,
    GradScalerKwargs,
    MSAMPRecipeKwargs,
    PrecisionType,
    TERecipeKwargs,
)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (AutocastKwargs, {"enabled": "yes"}),
        (AutocastKwargs, {"cache_enabled": 1}),
        (GradScalerKwargs, {"init_scale": 0.0}),
        (GradScalerKwargs, {"init_scale": float("inf")}),
        (GradScalerKwargs, {"growth_factor": 1.0}),
        (GradScalerKwargs, {"backoff_factor": 1.0}),
        (GradScalerKwargs, {"backoff_factor": 0}),
        (GradScalerKwargs, {"growth_interval": 0}),
        (GradScalerKwargs, {"growth_interval": 1.5}),
        (GradScalerKwargs, {"growth_interval": True}),
        (GradScalerKwargs, {"init_scale": "large"}),
        (AORecipeKwargs, {"module_filter_func": "layers"}),
        (AORecipeKwargs, {"pad_inner_dim": "no"}),
        (AORecipeKwargs, {"enable_fsdp_float8_all_gather": True}),
    ],
)
def test_invalid_option_refused(kind, values) -> None:
    """A value that makes no sense is refused by name."""
    with pytest.raises(ConfigError) as caught:
        kind(**values)
    assert kind.__name__ in str(caught.value)
    assert next(iter(values)) in str(caught.value)


def test_what_was_changed_is_told() -> None:
    assert GradScalerKwargs().to_kwargs() == {}
    assert GradScalerKwargs(growth_interval=5, enabled=False).to_kwargs() == {"growth_interval": 5, "enabled": False}
    assert AORecipeKwargs(enable_fsdp_float8_all_gather=False).to_kwargs() == {"enable_fsdp_float8_all_gather": False}


@pytest.mark.parametrize("kind", [TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs])
def test_recipes_of_other_engines(kind) -> None:
    """Recipes of other engines say what runs here."""
    with pytest.raises(ConfigError, match=r"torchao.*AORecipeKwargs"):
        kind(margin=1)


def test_contradicting_recipe_refused() -> None:
    """A recipe cannot contradict its config."""
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig(pad_inner_dim=True)
    assert AORecipeKwargs(config=config, pad_inner_dim=True).config is config
    with pytest.raises(ConfigError, match="contradicts"):
        AORecipeKwargs(config=config, pad_inner_dim=False)
    with pytest.raises(ConfigError, match="not supported"):
        AORecipeKwargs(config=float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True))


def test_names_are_texts() -> None:
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    assert PrecisionType("bf16") == "bf16" == str(PrecisionType.BF16)
    assert FP8BackendType.list() == ["NO", "TE", "MSAMP", "AO"]
    assert torch.float16 not in PrecisionType
