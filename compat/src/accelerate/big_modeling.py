"""Models larger than the memory of a device: `accelerate.big_modeling`.

`dispatch_model` asks this module for `check_device_map` when it is called, because transformers replaces it there for models with
parameters that have no place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate._dispatch import dispatch_layers, offload_layers
from accelerate._forwarding import forward_names
from accelerate.utils.modeling import check_device_map, get_balanced_memory, infer_auto_device_map, load_checkpoint_in_model
from slipstream.big_models.dispatch import INDEX_ATTRIBUTE, has_offloaded_modules
from slipstream.big_models.hooks.forward_hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module
from slipstream.files.atomic_files import check_local_path

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.hooks": """AlignDevicesHook LayerwiseCastingHook attach_align_device_hook attach_align_device_hook_on_blocks""",
        "accelerate.utils.environment": "check_cuda_p2p_ib_support parse_flag_from_env",
        "accelerate.utils.imports": """is_bnb_available is_mlu_available is_musa_available is_neuron_available is_npu_available
            is_sdaa_available is_xpu_available""",
        "accelerate.utils.modeling": "find_tied_parameters retie_parameters",
        "accelerate.utils.offload": "OffloadedWeightsLoader extract_submodules_state_dict offload_state_dict",
        "accelerate.utils.other": "recursive_getattr",
        "slipstream": "init_empty_weights init_on_device",
    },
)

__all__ = [
    *_forwarded, "CpuOffload", "UserCpuOffloadHook", "add_hook_to_module", "attach_layerwise_casting_hooks", "check_device_map",
    "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model", "get_balanced_memory", "infer_auto_device_map",
    "load_checkpoint_and_dispatch", "load_checkpoint_in_model",
]

logger = logging.getLogger(__name__)

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def cpu_offload(
    model: nn.Module,
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights in host memory, and copy those of each layer to `execution_device` when it runs."""
    options = {"state": state_dict, "offload_buffers": offload_buffers, "always": True}
    return offload_layers(model, execution_device, "cpu", preload_module_classes or (), **options)


def cpu_offload_with_hook(
    model: torch.nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Move a whole model to its device when it is called; return it with a handle that moves it back."""
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Write the weights to `offload_dir`, and load those of each layer to `execution_device` when it runs."""
    folder = check_local_path(offload_dir, "offload_dir")
    options = {"folder": folder, "offload_buffers": offload_buffers}
    return offload_layers(model, execution_device, "disk", preload_module_classes or (), **options)


def dispatch_model(
    model: nn.Module,
    device_map: dict[str, str | int | torch.device],
    main_device: torch.device | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: dict[str, str] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Put every module on its device of `device_map`, with hooks on the layers that load what is offloaded, and return the model.

    A map with one device that is not "disk" moves the model and adds no hooks, unless `force_hooks`.
    """
    check_device_map(model, device_map)
    folder: Path | None = None if offload_dir is None else check_local_path(offload_dir, "offload_dir")
    loaded_index = getattr(model, INDEX_ATTRIBUTE, None)
    if "disk" in device_map.values() and folder is None and offload_index is None and loaded_index is None:
        on_disk = [name for name, device in device_map.items() if device == "disk"]
        raise ValueError(f"device_map puts {', '.join(on_disk)} on the disk: give offload_dir, the folder that the weights are written to.")
    sources: dict[str, Any] = {"state": state_dict, "index": offload_index, "loaded_index": loaded_index}
    options = {**sources, "folder": folder, "offload_buffers": offload_buffers, "skip_keys": skip_keys}
    dispatch_layers(model, device_map, main_device, preload_module_classes or (), force_hooks, **options)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    if len({str(device) for device in device_map.values()}) > 1 and not has_offloaded_modules(model):
        _warn_of_moves(model)
    return model


def _warn_of_moves(model: nn.Module) -> None:
    """Let `to` and `cuda` of a model that is spread over devices say that the hooks expect it where it is."""

    def warned(move: Any) -> Any:
        def moved(*args: Any, **kwargs: Any) -> nn.Module:
            if hasattr(model, "_hf_hook"):
                logger.warning("This model is dispatched to several devices (hf_device_map), and its hooks expect its modules there.")
            return move(*args, **kwargs)

        return moved

    for name in ("to", "cuda"):
        setattr(model, name, warned(getattr(model, name)))


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | dict[str, int | str | torch.device] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Plan a device map if `device_map` is the name of a strategy, load the weights by it, and dispatch the model.

    `offload_state_dict` has no effect: weights are mapped, and no state dict is ever in memory.
    """
    if isinstance(device_map, str):
        if device_map not in _STRATEGIES:
            raise ValueError(f"device_map={device_map!r} is not a strategy. Write one of {', '.join(map(repr, _STRATEGIES))}, or a dict.")
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, low_zero=low_zero)
        plan = infer_auto_device_map(model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers)
    else:
        plan = device_map
    if offload_state_dict is None and isinstance(plan, Mapping):
        offload_state_dict = "disk" in plan.values()
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=plan,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if plan is None:
        return model
    return dispatch_model(
        model,
        device_map=plan,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def attach_layerwise_casting_hooks(
    module: torch.nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[torch.nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in one dtype, and compute in another; other layers are left as they are."""
    from slipstream.hooks import attach_layerwise_casting_hooks as attach

    # Slipstream casts the whole module if nothing is named to be skipped.
    attach(module, storage_dtype, compute_dtype, skip_modules_pattern, skip_modules_classes or (), non_blocking)


def _refuse_recurrent_layers_under_sequence_parallelism(model: nn.Module) -> None:
    """Raise for layers that carry a state along the sequence: with the sequence divided, each rank would begin with an empty one."""
    config = getattr(model, "config", None)
    read = getattr(config, "get_text_config", None)
    text = config if read is None else read()
    if "linear_attention" in (getattr(text, "layer_types", None) or ()):
        raise ValueError(
            f"{type(model).__name__} has layers of the type linear_attention, whose state runs along the sequence; sequence parallelism "
            "divides the sequence, and every rank would start with an empty state. Train it without sequence parallelism."
        )
