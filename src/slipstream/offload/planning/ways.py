"""Device maps by the name of the way to find them: "auto", "balanced", "balanced_low_0", "sequential"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from slipstream.errors import ConfigError
from slipstream.offload.planning.budget import get_balanced_memory
from slipstream.offload.planning.plan import DeviceMap, infer_auto_device_map
from slipstream.offload.planning.sizes import class_names

__all__ = ["WAYS", "plan_for"]

WAYS: Final = ("auto", "balanced", "balanced_low_0", "sequential")


def plan_for(
    model: torch.nn.Module,
    how: Any,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    dtype: Any = None,
    *,
    offload_buffers: bool = False,
) -> DeviceMap:
    """The device map of a model, found in one of the `WAYS`. Classes that the model itself says stay whole do so, unless others are named.

    >>> plan_for(torch.nn.Linear(2, 2), "auto", {"cpu": "1GB"})
    {'': 'cpu'}
    >>> plan_for(torch.nn.Linear(2, 2), "somehow")
    Traceback (most recent call last):
    slipstream.errors.ConfigError: device_map='somehow' is no way to find one. Write one of 'auto', 'balanced', ...
    """
    if how not in WAYS:
        raise ConfigError(f"device_map={how!r} is no way to find one. Write one of {', '.join(map(repr, WAYS))}, or a dict.")
    no_split = None if no_split_module_classes is None else class_names(no_split_module_classes)
    if how != "sequential":
        whole = class_names(getattr(model, "_no_split_modules", None)) if no_split is None else no_split
        max_memory = get_balanced_memory(model, max_memory, sorted(whole), dtype, low_zero=how == "balanced_low_0")
    return infer_auto_device_map(model, max_memory, no_split, dtype, offload_buffers=offload_buffers)
