"""Hooks around the forward of a module, under the public import path: `from slipstream.hooks import add_hook_to_module`.

They are defined in `big_models/hooks/`.
"""

from __future__ import annotations

from slipstream.big_models.hooks.attachment import (
    LayerwiseCastingHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    attach_layerwise_casting_hooks,
)
from slipstream.big_models.hooks.forward_hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
