"""Small helpers: saving, compiling by region, unwrapping models, dictionaries, ports."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch

from accelerate._forwarding import forward_names

_forwarded, __getattr__, __dir__ = forward_names(
    __name__,
    {
        "accelerate._object_files": "load save",
        "accelerate.commands.config.default": "write_basic_config",
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils.constants": "FSDP_PYTORCH_VERSION",
        "accelerate.utils.dataclasses": "DistributedType",
        "accelerate.utils.imports": """is_deepspeed_available is_numpy_available is_torch_distributed_available
            is_torch_xla_available is_weights_only_available""",
        "accelerate.utils.modeling": "id_tensor_storage",
        "accelerate.utils.transformer_engine": "convert_model",
        "accelerate.utils.versions": "is_torch_version",
        "slipstream.utils": """check_os_kernel clean_state_dict_for_safetensors compile_regions_fsdp2
            convert_bytes get_free_port get_model_tp_size
            get_module_children_bottom_up get_pretty_name has_compiled_regions has_repeated_blocks
            is_compiled_module is_port_in_use is_repeated_blocks merge_dicts model_has_dtensor
            recursive_getattr""",
    },
)
__all__ = sorted(
    ["TORCH_SAFE_GLOBALS", "compile_regions", "compile_regions_deepspeed", "extract_model_from_parallel", "wait_for_everyone", *_forwarded]
)

TORCH_SAFE_GLOBALS: list[Any] = []
"""Further classes that `load` may rebuild from a pickle; Slipstream's own list is fixed, and this one is empty."""

_TWIN_OF = "_orig_mod"
"""The attribute by which a model that is compiled by region, as one of `torch.compile`, knows the model that it was made from."""


def wait_for_everyone() -> None:
    """Return when every process has called it."""
    from accelerate.state import PartialState

    PartialState().wait_for_everyone()


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Return a twin of a module, on the same parameters, with its repeated blocks compiled one by one; the module stays as it is.

    What surrounds the blocks runs uncompiled, except for children without such blocks, which are compiled as a whole. A module
    without repeated blocks is compiled as a whole. (`prepare` compiles in place: see `slipstream.utils.compile_regions`.)

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    >>> twin = compile_regions(model, backend="eager")
    >>> twin is model, twin._orig_mod is model, type(twin[0]).__name__
    (False, True, 'OptimizedModule')
    """
    from slipstream.parallel.compile import has_repeated_blocks, is_repeated_blocks

    if is_repeated_blocks(module):
        children = {name: torch.compile(child, **compile_kwargs) for name, child in module._modules.items() if child is not None}
    elif has_repeated_blocks(module):
        children = {name: compile_regions(child, **compile_kwargs) for name, child in module._modules.items() if child is not None}
    else:
        compiled: torch.nn.Module = torch.compile(module, **compile_kwargs)  # type: ignore[assignment]
        return compiled
    twin = copy.copy(module)  # its parameters and buffers are those of the module
    twin._modules = {**module._modules, **children}
    for name, value in vars(module).items():
        if isinstance(value, MethodType) and value.__self__ is module:  # a method that a library replaced on this object
            twin.__dict__[name] = MethodType(value.__func__, twin)
    twin.__dict__[_TWIN_OF] = module
    return twin


def compile_regions_deepspeed(module: torch.nn.Module, **compile_kwargs: Any) -> None:
    """Compile the repeated blocks of a module in place."""
    from slipstream.utils import compile_regions as compile_in_place

    compile_in_place(module, **compile_kwargs)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the model inside of its wrappers; see `slipstream.utils.extract_model_from_parallel`.

    Besides, a twin of `compile_regions` counts as a wrapper of its model, and without `keep_fp32_wrapper` a forward that a script
    replaced as Accelerate does (the original in `_original_forward`) is put back.

    >>> model = torch.nn.Linear(2, 2)
    >>> extract_model_from_parallel(torch.nn.DataParallel(model)) is model
    True
    """
    from slipstream.parallel.unwrap import extract_model_from_parallel as extract

    bare = extract(_choose_twin(model, keep_torch_compile), keep_fp32_wrapper, keep_torch_compile, recursive)
    bare = _choose_twin(bare, keep_torch_compile)
    if not keep_fp32_wrapper and isinstance(bare, torch.nn.Module):
        _restore_forward(bare)
    return bare


def _choose_twin(model: Any, compiled: bool) -> Any:
    """Return the model of a twin that `compile_regions` made, unless compiled models are wanted."""
    original = vars(model).get(_TWIN_OF) if isinstance(model, torch.nn.Module) else None
    return model if original is None or compiled else original


def _restore_forward(model: torch.nn.Module) -> None:
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if getattr(original, "__func__", None) is type(model).forward:
        model.__dict__.pop("forward", None)  # what the class says
    else:
        model.forward = original
