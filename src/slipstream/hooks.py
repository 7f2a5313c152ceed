"""Hooks around the forward of a module, by the names that users import: `from slipstream.hooks import add_hook_to_module`.

What they do is in `offload/hooking/hooks.py`, `offload/hooking/attach.py` and `offload/hooking/casting.py`.
"""

from __future__ import annotations

from slipstream.offload.hooking.attach import attach_align_device_hook, attach_align_device_hook_on_blocks, attach_execution_device_hook
from slipstream.offload.hooking.casting import LayerwiseCastingHook, attach_layerwise_casting_hooks
from slipstream.offload.hooking.hooks import (
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
