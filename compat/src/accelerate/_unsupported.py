"""Placeholders for what is not supported: they exist by name, and using them raises an error that says why and what to do instead.

Clients import such names at the top of a module (`from accelerate.utils import DeepSpeedPlugin`), so importing them must work. A class
raises when an object of it is made, a function when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from slipstream.errors import ConfigError

__all__ = ["UnsupportedError", "explain", "placeholder_class", "placeholder_function", "placeholders", "raise_unsupported"]


class UnsupportedError(ConfigError, NotImplementedError):
    """A feature of Accelerate that the drop-in of Slipstream does not have."""


ENGINES: Mapping[str, str] = MappingProxyType(
    {
        "deepspeed": "DeepSpeed is not an engine of this version of Slipstream. Shard the model with "
        "FullyShardedDataParallelPlugin(fsdp_version=2) instead: reshard_after_forward=True is ZeRO stage 3, False is stage 2, and "
        "cpu_offload=True keeps the weights in host memory.",
        "megatron": "Megatron-LM is not an engine of this version of Slipstream. Shard the model with "
        "FullyShardedDataParallelPlugin(fsdp_version=2) instead, or train it with Megatron-LM's own scripts.",
        "sagemaker": "Slipstream does not start jobs on Amazon SageMaker. Start the script there as an entry point of your own, with "
        "`slipstream launch` (or torchrun) inside the container.",
        "transformer_engine": "Slipstream computes in float8 with torchao and not with TransformerEngine. Pass AORecipeKwargs() with "
        'mixed_precision="fp8".',
        "msamp": "Slipstream computes in float8 with torchao and not with MS-AMP, which is no longer developed. Pass AORecipeKwargs() "
        'with mixed_precision="fp8".',
        "torch_xla": "This version of Slipstream does not run on torch_xla. Use a GPU or the CPU, or Accelerate itself on a TPU.",
        "context_parallel": "Context and sequence parallelism are not in this version of Slipstream. Leave cp_size and sp_size at 1, and "
        "shard the model with dp_shard_size.",
        "tensor_parallel": "Tensor parallelism is not in this version of Slipstream. Leave tp_size at 1, and shard the model with "
        "dp_shard_size.",
        "lomo": "Slipstream has no fused backward for LOMO optimizers. Use an optimizer of torch, with FSDP where memory is short.",
    }
)
"""Why each of them is not supported, and what to do instead."""


def explain(what: str, engine: str) -> str:
    """Return the text of an error.

    >>> explain("DeepSpeedPlugin(...)", "deepspeed")[:60]
    'DeepSpeedPlugin(...): DeepSpeed is not an engine of this ver'
    """
    return f"{what}: {ENGINES[engine]}"


def raise_unsupported(what: str, engine: str) -> NoReturn:
    """Raise the error for using something that belongs to an engine which is not supported."""
    raise UnsupportedError(explain(what, engine))


def placeholder_class(name: str, engine: str, module: str, bases: tuple[type, ...] = ()) -> type:
    """Return a class that can be imported, subclassed and used in `isinstance`, but not instantiated."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        raise_unsupported(f"{type(self).__name__}(...)", engine)

    return type(name, bases, {"__init__": __init__, "__module__": module, "__doc__": f"Not supported. {ENGINES[engine]}"})


def placeholder_function(name: str, engine: str, module: str) -> Callable[..., NoReturn]:
    """Return a function that can be imported and raises when it is called."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise_unsupported(f"{name}(...)", engine)

    call.__name__ = call.__qualname__ = name
    call.__module__, call.__doc__ = module, f"Not supported. {ENGINES[engine]}"
    return call


def placeholders(module: str, engine: str, *, classes: str = "", functions: str = "") -> dict[str, Any]:
    """Return placeholders by name, for a module of an engine that is not supported.

    >>> sorted(placeholders("accelerate.utils.torch_xla", "torch_xla", functions="install_xla"))
    ['install_xla']
    """
    made: dict[str, Any] = {name: placeholder_class(name, engine, module) for name in classes.split()}
    return made | {name: placeholder_function(name, engine, module) for name in functions.split()}
