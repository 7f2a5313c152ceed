"""Return the user's model from inside its wrappers.

Wrappers are `DistributedDataParallel`, `DataParallel` and what `torch.compile(model)` returns, nested in any order. A model that was
compiled in place (`model.compile()`, as `prepare` does) has no wrapper: it is the user's object already, and stays compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from slipstream.precision.autocast import remove_autocast

__all__ = ["extract_model_from_parallel", "is_peft_model"]


def is_peft_model(model: Any) -> bool:
    """Whether a model, inside of its wrappers, is one of peft. Imports nothing: such a model is there only if peft is.

    >>> is_peft_model(torch.nn.Linear(2, 2))
    False
    """
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return kind is not None and isinstance(_unwrap(model)[0], kind)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The model inside of its wrappers.

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
        _unwrap_children(bare, keep_fp32_wrapper, keep_torch_compile, set())
    if not keep_fp32_wrapper:
        remove_autocast(bare)
    return _rewrap_compiled(bare, compiled) if keep_torch_compile and compiled is not None else bare


def _unwrap(model: Any) -> tuple[Any, Any]:
    """What is inside of all wrappers, and the innermost of those that `torch.compile` made."""
    from torch._dynamo import OptimizedModule

    compiled = None
    while isinstance(model, (DistributedDataParallel, DataParallel, OptimizedModule)):
        if isinstance(model, OptimizedModule):
            compiled = model
            model = model._orig_mod
        else:
            model = model.module
    return model, compiled


def _rewrap_compiled(bare: torch.nn.Module, compiled: Any) -> Any:
    """The wrapper itself where it is directly around the model; else one like it."""
    return compiled if compiled._orig_mod is bare else compiled.dynamo_ctx(bare)


def _unwrap_children(parent: torch.nn.Module, keep_fp32_wrapper: bool, keep_torch_compile: bool, seen: set[int]) -> None:
    if id(parent) in seen:
        return
    seen.add(id(parent))
    for name, child in list(parent._modules.items()):  # named_children() leaves out a module that is there twice
        if child is None:
            continue
        bare, compiled = _unwrap(child)
        _unwrap_children(bare, keep_fp32_wrapper, keep_torch_compile, seen)
        if not keep_fp32_wrapper:
            remove_autocast(bare)
        wanted = _rewrap_compiled(bare, compiled) if keep_torch_compile and compiled is not None else bare
        if wanted is not child:
            parent.register_module(name, wanted)
