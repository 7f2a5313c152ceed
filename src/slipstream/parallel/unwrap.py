"""Return the user's model from inside its wrappers.

Wrappers are `DistributedDataParallel`, `DataParallel` and what `torch.compile(model)` returns, nested in any order. A model that was
compiled in place (`model.compile()`, as `prepare` does) has no wrapper: it is the user's object already, and stays compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from slipstream.parallel.compile import is_compile_wrapper, replace_submodules
from slipstream.precision.autocast import remove_autocast

__all__ = ["extract_model_from_parallel", "is_peft_model", "plain_name"]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain_name(name: str) -> str:
    """Return the name of a parameter without the parts that wrappers of torch inside of a model add.

    >>> plain_name("layer._orig_mod.weight")
    'layer.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def is_peft_model(model: Any) -> bool:
    """Return whether a model, inside of its wrappers, is one of peft; nothing is imported to find out.

    >>> is_peft_model(torch.nn.Linear(2, 2))
    False
    """
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return kind is not None and isinstance(_unwrap(model)[0], kind)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the model inside of its wrappers.

    With `keep_torch_compile` a model that was wrapped by `torch.compile` comes back compiled with the same settings. Without
    `keep_fp32_wrapper` autocast is taken off its forward, so that it computes in the format of its parameters. `recursive` peels
    its submodules too, in place. Else the model is not changed.

    >>> model = torch.nn.Linear(2, 2)
    >>> extract_model_from_parallel(DataParallel(model)) is model
    True
    """
    bare, compiled = _unwrap(model)
    if not isinstance(bare, torch.nn.Module):
        return bare
    if recursive:
        replace_submodules(bare, lambda child: extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile), set())
    if not keep_fp32_wrapper:
        remove_autocast(bare)
    if not keep_torch_compile or compiled is None:
        return bare
    return compiled if compiled._orig_mod is bare else compiled.dynamo_ctx(bare)  # the wrapper itself, or one like it


def _unwrap(model: Any) -> tuple[Any, Any]:
    """Return what is inside of all wrappers, and the innermost of those that `torch.compile` made."""
    compiled = None
    while True:
        if is_compile_wrapper(model):
            compiled = model
            model = model._orig_mod
        elif isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        else:
            return model, compiled
