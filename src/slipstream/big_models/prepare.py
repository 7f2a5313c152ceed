"""Dispatched models in `Accelerator.prepare`: `prepare(model, device_map=...)`, and models that come with a device map.

Such a model is not moved and has no replicas, since offloaded weights take no gradients. One process may train adapters that are in
memory; several processes may run inference, each with its own copy. This module is cheap to import: a prepare without a device map asks
only whether a model is dispatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.errors import ConfigError

__all__ = ["check_not_trained_together", "is_dispatched", "dispatch_for_prepare"]


def is_dispatched(model: torch.nn.Module) -> bool:
    """Return whether a device map puts parts of a model on different devices, in memory or on a disk.

    >>> is_dispatched(torch.nn.Linear(2, 2))
    False
    """
    maps = (getattr(module, "hf_device_map", None) for module in model.modules())
    devices = [set(map(str, device_map.values())) for device_map in maps if isinstance(device_map, Mapping)]
    return any(len(names) > 1 or "disk" in names for names in devices)


def dispatch_for_prepare(models: Sequence[torch.nn.Module], device_map: Any, offload_folder: Any) -> None:
    """Dispatch the one model among the objects of a `prepare` by the device map."""
    from slipstream.big_models.device_map.plan import plan_device_map
    from slipstream.big_models.dispatch import dispatch_model

    if len(models) != 1:
        raise ConfigError(
            f"prepare(device_map=...) was given {len(models)} models, and the map is for one. Prepare that one alone with it: "
            "model = accelerator.prepare(model, device_map=device_map)"
        )
    (model,) = models
    if is_dispatched(model):
        raise ConfigError(
            f"this {type(model).__name__} was dispatched by a device map before (see its hf_device_map): leave device_map out of prepare, "
            "or remove the hooks first (slipstream.utils.remove_hook_from_submodules)"
        )
    planned = device_map if isinstance(device_map, Mapping) else plan_device_map(model, device_map)
    dispatch_model(model, planned, offload_dir=offload_folder)


def check_not_trained_together(model: torch.nn.Module, world_size: int) -> None:
    """Raise where several processes would train a dispatched model."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and not parameter.is_meta]
    if world_size > 1 and trained and model.training:
        raise ConfigError(
            f"{type(model).__name__} is dispatched by a device map, and {world_size} processes cannot train such "
            f"a model together (it would train {trained[0]}, for one). For inference call model.eval() before prepare; to train, use one "
            "process, or give every process the whole model on one device."
        )
