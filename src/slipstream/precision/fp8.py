"""FP8 training through torchao: linear layers are converted in place, and autocast computes the rest in bfloat16.

Parameters stay the same objects, so optimizers made before still hold them. The first and the last linear layer are not converted, as the
loss suffers most there, nor are layers whose sizes are no multiples of 16, which FP8 hardware cannot multiply. On the CPU FP8 is
emulated: the numbers are those of float8, the speed is not. torchao is imported when something is converted.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from slipstream.devices.packages import import_quietly
from slipstream.devices.table import CPU
from slipstream.errors import ConfigError
from slipstream.precision.autocast import transfer_hooks
from slipstream.precision.policy import AORecipeKwargs

__all__ = [
    "convert_to_fp8",
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
]

_MULTIPLE = 16


def convert_to_fp8(model: torch.nn.Module, recipe: AORecipeKwargs | None = None) -> torch.nn.Module:
    """Convert the linear layers that the recipe chooses, in place, and return the model.

    A model in which there was none to convert, and one whose float8 is emulated, is a warning.
    """
    recipe = recipe or AORecipeKwargs()
    chosen = recipe.module_filter_func
    if chosen is None or chosen is filter_first_and_last_linear_layers:
        spared = [name for name in find_first_last_linear_layers(model) if name is not None]
        chosen = _default_filter(spared)
    before = dict(_linear_layers(model))
    if "" in before and chosen(model, ""):
        raise ConfigError(
            f"mixed_precision='fp8': the model is a single {type(model).__name__}, which cannot be converted in place. "
            "Put it into a module of its own, such as torch.nn.Sequential(layer)."
        )
    torchao = _import_torchao_float8()
    config = recipe.config or torchao.Float8LinearConfig(emulate=_is_on_cpu(model), pad_inner_dim=bool(recipe.pad_inner_dim))
    torchao.convert_to_float8_training(model, module_filter_fn=chosen, config=config)
    converted = [name for name, layer in before.items() if model.get_submodule(name) is not layer]
    for name in converted:
        new = model.get_submodule(name)
        new.train(before[name].training)
        transfer_hooks(before[name], new)
    if not converted:
        why = _explain_no_conversion(before, by_user=recipe.module_filter_func is not None)
        warnings.warn(
            f"mixed_precision='fp8' converted no layer of {type(model).__name__}: {why}. It computes in bfloat16; write "
            "mixed_precision='bf16', or choose layers with AORecipeKwargs(module_filter_func=...)",
            stacklevel=2,
        )
    elif config.emulate and recipe.config is None:
        warnings.warn(
            "mixed_precision='fp8' is emulated on the CPU: numbers are rounded as float8 rounds them, but nothing gets faster", stacklevel=2
        )
    return model


def convert_model_to_fp8_ao(
    model: torch.nn.Module, config: Any = None, module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
) -> torch.nn.Module:
    """Convert as `convert_to_fp8`, with the parts of a recipe as arguments."""
    return convert_to_fp8(model, AORecipeKwargs(config=config, module_filter_func=module_filter_func))


def find_first_last_linear_layers(model: torch.nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of a model, in the order in which they were registered.

    >>> find_first_last_linear_layers(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2)))
    ('0', '2')
    """
    names = [name for name, _ in _linear_layers(model)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: torch.nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether to convert a layer: a plain `nn.Linear` with sizes that are multiples of 16, and not one of those to leave out.

    >>> filter_linear_layers(torch.nn.Linear(32, 16), "block.up", ["head"]), filter_linear_layers(torch.nn.Linear(32, 10), "block.up", [])
    (True, False)
    """
    # A class derived from Linear may compute something else, which the converted layer would not.
    return type(module) is torch.nn.Linear and _has_fp8_sizes(module) and fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: torch.nn.Module, fqn: str) -> bool:
    """Return whether a layer is converted by default: all that `filter_linear_layers` takes, but the first and the last of the model.

    Given as `module_filter_func` it means the default. Called with a layer alone, whose place is not known, it looks at the layer's size.

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    >>> [filter_first_and_last_linear_layers(model, name) for name in ("0", "1", "2")]
    [False, True, False]
    """
    if isinstance(module, torch.nn.Linear):
        return filter_linear_layers(module, fqn, [])
    spared = [name for name in find_first_last_linear_layers(module) if name is not None]
    return filter_linear_layers(module.get_submodule(fqn), fqn, spared)


def has_ao_layers(model: torch.nn.Module) -> bool:
    """Return whether any layer of a model was converted to float8 by torchao."""
    module = sys.modules.get("torchao.float8.float8_linear")
    return module is not None and any(isinstance(layer, module.Float8Linear) for layer in model.modules())


def _linear_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear))


def _default_filter(spared: list[str]) -> Callable[[torch.nn.Module, str], bool]:
    return lambda module, name: filter_linear_layers(module, name, spared)


def _has_fp8_sizes(layer: torch.nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _is_on_cpu(model: torch.nn.Module) -> bool:
    return all(parameter.device.type == CPU.type for parameter in model.parameters())


def _explain_no_conversion(layers: dict[str, torch.nn.Linear], *, by_user: bool) -> str:
    if not layers:
        return "it has no linear layers"
    if by_user:
        return f"module_filter_func took none of its {len(layers)} linear layers"
    inner = list(layers.items())[1:-1]
    if not inner:
        return f"of its {len(layers)} linear layers the first and the last stay as they are"
    kinds = ", ".join(f"{name} ({type(layer).__name__} {layer.in_features} to {layer.out_features})" for name, layer in inner[:3])
    return f"between its first and last linear layer there is no plain nn.Linear with sizes that are multiples of {_MULTIPLE}, but {kinds}"


def _import_torchao_float8() -> Any:
    return import_quietly("torchao.float8", "mixed_precision='fp8' runs through torchao", "pip install 'slipstream[fp8]'")
