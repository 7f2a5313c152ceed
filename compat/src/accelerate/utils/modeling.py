"""Sizes, device maps, single tensors and weights of models: `accelerate.utils.modeling`.

Most functions are Slipstream's. Written here is what Accelerate does in another way on purpose: maps are filled greedily
(`_greedy_placement.py`), a map may name modules that the model does not have, and sharded models are loaded by the state dict functions of
torch.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from accelerate._forwarding import forward_names
from slipstream.big_models.device_map import sizes as core_sizes
from slipstream.big_models.device_map.plan import get_max_memory as core_max_memory
from slipstream.big_models.device_map.validation import find_entry
from slipstream.errors import CheckpointError

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState",
        "accelerate.utils._greedy_placement": """clean_device_map fallback_allocate get_balanced_memory get_max_layer_size
            get_module_size_with_ties infer_auto_device_map""",
        "accelerate.utils.dataclasses": "AutocastKwargs CustomDtype DistributedType",
        "accelerate.utils.imports": """is_hpu_available is_mlu_available is_mps_available is_musa_available is_npu_available
            is_peft_available is_sdaa_available is_torch_xla_available is_tqdm_available
            is_xpu_available""",
        "accelerate.utils.memory": "clear_device_cache",
        "accelerate.utils.offload": "load_offloaded_weight offload_weight save_offload_index",
        "accelerate.utils.tqdm": "tqdm",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream.big_models.device_map.sizes": """compute_module_total_buffer_size get_module_leaves
            get_non_persistent_buffers""",
        "slipstream.big_models.hooks.module_tensors": "check_device_same get_state_dict_from_offload get_state_dict_offloaded_model",
        "slipstream.utils": """SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME align_module_device
            calculate_maximum_sizes check_tied_parameters_in_config
            check_tied_parameters_on_same_device compute_module_sizes
            get_grad_scaler has_offloaded_params id_tensor_storage
            is_peft_model load_offloaded_weights load_state_dict named_module_tensors retie_parameters
            set_module_tensor_to_device""",
    },
)

__all__ = [
    *_forwarded, "check_device_map", "convert_file_size_to_int", "dtype_byte_size", "find_tied_parameters", "get_max_memory",
    "get_mixed_precision_context_manager", "load_checkpoint_in_model",
]

logger = logging.getLogger(__name__)

_UNITS = {
    "GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK]i?b)", re.IGNORECASE)


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes from a number or a text such as "5GB", "2GiB" or "100Mb" (bits, if the b is small).

    >>> convert_file_size_to_int("1.5GB"), convert_file_size_to_int("8Mb")
    (1500000000, 1000000)
    """
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if found is None:
        raise ValueError(f"{size!r} is not a size. Write bytes as a number, or a text such as '5GB' or '512MiB'.")
    count = int(float(found[1]) * _UNITS[found[2].upper()])
    return count // 8 if found[2].endswith("b") and "i" not in found[2].lower() else count


def dtype_byte_size(dtype: torch.dtype | str) -> float:
    """Return the bytes of one element. A bool counts as the bit that it is; in memory it takes a byte, and sizes of modules say so."""
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."))
    return 1 / 8 if dtype is torch.bool else core_sizes.dtype_byte_size(dtype)


def get_max_memory(max_memory: dict[int | str, int | str] | None = None) -> dict[int | str, int]:
    """Return the budget of every device in bytes; without one, what is free.

    Sizes in words are replaced in the dict that was given, too: transformers compares them with the result.
    """
    found = core_max_memory(max_memory)
    for device, size in list((max_memory or {}).items()):
        if isinstance(size, str) and max_memory is not None:
            max_memory[device] = found[device]
    return found


def get_mixed_precision_context_manager(native_amp: bool = False, autocast_kwargs: Any = None) -> AbstractContextManager[Any]:
    """Return autocast in the precision of the state (torch's own dtype if that is "no"); without `native_amp` a block without effect."""
    from accelerate.state import AcceleratorState

    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    options = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(state.mixed_precision)
    return torch.autocast(state.device.type, **({} if dtype is None else {"dtype": dtype}), **options)


def find_tied_parameters(model: torch.nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names that share a parameter. Keywords are refused: they had a use inside Accelerate only."""
    if kwargs:
        raise TypeError(f"find_tied_parameters takes a model, and was given {', '.join(kwargs)} too.")
    return core_sizes.find_tied_parameters(model)


def check_device_map(model: nn.Module, device_map: dict[str, int | str | torch.device]) -> None:
    """Raise a ValueError if a tensor has no device; warn of names that the model does not have."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = [name for named in (model.named_parameters, model.named_buffers) for name, _ in named(remove_duplicate=False)]
    if unknown := [name for name in device_map if name not in modules and name not in tensors]:
        kind = type(model).__name__
        warnings.warn(f"These device_map keys do not match any submodules of the {kind}, and are left out: {unknown}.", stacklevel=2)
    unsaved = core_sizes.get_non_persistent_buffers(model, recurse=True, fqns=True)
    if missing := [name for name in tensors if find_entry(device_map, name) is None and name not in unsaved]:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ValueError(f'device_map has no device for {listed}. Add them or the modules around them, or "" for all that is not named.')


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: dict[str, int | str | torch.device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a file, an index or a folder of weights into a model, by a device map if there is one.

    `offload_state_dict` has no effect: weights are mapped, and no state dict is ever in memory. `full_state_dict=False` and
    `broadcast_from_rank0` are for models that are spread over processes.
    """
    from slipstream.big_models.load import load_checkpoint_in_model as load

    if (not full_state_dict or broadcast_from_rank0) and device_map is None:
        _load_distributed(model, checkpoint, strict, full_state_dict, broadcast_from_rank0)
        return
    options: dict[str, Any] = {"dtype": dtype, "strict": strict, "offload_state_dict": offload_state_dict}
    if keep_in_fp32_modules and dtype is not None:
        options["keep_in_fp32_modules"] = keep_in_fp32_modules
    if device_map is not None:
        known = {*dict(model.named_modules(remove_duplicate=False)), *model.state_dict(keep_vars=True)}
        device_map = {name: device for name, device in device_map.items() if name in known}
        options |= {"offload_folder": offload_folder, "offload_buffers": offload_buffers}
    options |= {"offload_8bit_bnb": offload_8bit_bnb, "full_state_dict": full_state_dict, "broadcast_from_rank0": broadcast_from_rank0}
    _check_checkpoint(checkpoint)
    try:
        # Missing weights may stay on the meta device: programs set them afterwards, by tying weights or by hand.
        report = load(model, checkpoint, device_map, allow_meta=not strict, **options)
    except CheckpointError as error:
        if device_map is None:
            raise
        raise UnfitCheckpointError(str(error)) from error
    if report.unexpected:
        kind, left = type(model).__name__, list(report.unexpected)
        logger.info("%s of %s were not used when %s was loaded: it has no such names.", left, checkpoint, kind)


class UnfitCheckpointError(CheckpointError, ValueError):
    """A checkpoint that is not there or does not fit; a ValueError too, because that is what callers of Accelerate catch."""


def _check_checkpoint(checkpoint: str | os.PathLike[str]) -> None:
    from slipstream.checkpoint.weight_source import find_weights
    from slipstream.files.atomic_files import check_local_path

    try:
        find_weights(check_local_path(checkpoint, "checkpoint"))
    except CheckpointError as error:
        raise UnfitCheckpointError(str(error)) from error


def _load_distributed(model: nn.Module, checkpoint: Any, strict: bool, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    """Load into a model that is spread over processes, with the functions of torch for that."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    reads = not broadcast_from_rank0 or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    state: Mapping[str, Any] = {}
    if reads:
        from slipstream.checkpoint.weight_source import find_weights
        from slipstream.files.atomic_files import check_local_path

        path = check_local_path(checkpoint, "checkpoint")
        source = find_weights(path)
        state = {name: tensor for file in source.files for name, tensor in source.open(file, verify=False).tensors.items()}
    options = StateDictOptions(full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict)
    try:
        set_model_state_dict(model, dict(state), options=options)
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint} does not fit this {type(model).__name__}: {error}") from error
