"""`load_and_quantize_model`: weights go from memory-mapped files into 8 or 4 bits, layer by layer.

The peak of memory is the quantized model plus one layer in full precision. The output head, modules with tied weights, and modules that
the config names are not quantized. Errors (weights on the disk, layers that are quantized already, nothing to convert) are raised before
the model changes. Quantized models are for inference.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.big_models.device_map.plan import STRATEGIES, plan_device_map
from slipstream.big_models.device_map.sizes import find_tied_parameters
from slipstream.big_models.device_map.validation import ResolvedDeviceMap, check_device_map
from slipstream.big_models.dispatch import dispatch_model, has_offloaded_modules
from slipstream.big_models.hooks.weight_swap import find_slots
from slipstream.big_models.load import WeightLoadOptions, load_by_device_map
from slipstream.big_models.quantization_config import (
    BitsandbytesConverter,
    BnbQuantizationConfig,
    QuantizationConfig,
    TorchaoConverter,
    TorchaoQuantizationConfig,
    quantize_rows,
)
from slipstream.big_models.weight_store.offload_folder import offload_weight
from slipstream.checkpoint.weight_source import find_weights
from slipstream.devices.table import CPU, default_family, device_for
from slipstream.distributed.progress_bar import bar
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.atomic_files import check_local_path
from slipstream.logging import get_logger

__all__ = [
    "find_skipped_modules", "get_keys_to_not_convert", "get_parameter_device", "get_quantized_model_device_map", "is_within_any",
    "load_and_quantize_model", "quantize_and_offload_8bit", "replace_with_bnb_layers", "select_layers",
]


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules that lose most by quantization: the output head, and those with tied weights.

    >>> get_keys_to_not_convert(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2), nn.Linear(2, 4)))
    ['2']
    """
    groups = [[name.rpartition(".")[0] for name in group] for group in find_tied_parameters(model)]
    # One module under several names is converted once; only a weight shared between modules would be separated.
    tied = {name for names in groups if len({id(model.get_submodule(name)) for name in names}) > 1 for name in names}
    head = _output_head(model)
    return sorted({*tied, *([head] if head is not None else [])})


def _output_head(model: nn.Module) -> str | None:
    """Return the name of the output head: the one that the model declares, else its last linear layer; None without a head."""
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ask = getattr(model, "get_output_embeddings", None)
    if not callable(ask):
        return linear[-1][0] if linear else None
    found = ask()
    if found is not None:
        return next((name for name, module in model.named_modules() if module is found), None)
    inner = getattr(model, getattr(model, "base_model_prefix", "") or "", None)
    if not isinstance(inner, nn.Module):
        return None  # the base model alone, without a head
    inside = {id(module) for module in inner.modules()}
    return next((name for name, module in reversed(linear) if id(module) not in inside), None)


def is_within_any(name: str, parts: Collection[str]) -> bool:
    """Return whether a module is one of those named, or within one of them.

    >>> is_within_any("model.lm_head", ["lm_head"]), is_within_any("model.lm_head_2", ["lm_head"])
    (True, False)
    """
    return any(f".{part}." in f".{name}." for part in parts)


def find_skipped_modules(model: nn.Module, config: QuantizationConfig) -> list[str]:
    """Return the names of modules that are not quantized."""
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    kept = config.keep_in_fp32_modules or []
    known = [name for name, _ in model.named_modules()]
    for field, names in (("skip_modules", config.skip_modules or []), ("keep_in_fp32_modules", kept)):
        if unknown := [given for given in names if not any(is_within_any(name, [given]) for name in known)]:
            raise ConfigError(f"{field} names {unknown[0]!r}, and the model has no such module. It has: {', '.join(known[1:9])}, ...")
    return [*skipped, *kept]


def select_layers(model: nn.Module, skipped: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers to convert, without subclasses of Linear, which may compute something else."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not is_within_any(name, skipped):
            yield name, module


class _Converter(Protocol):
    def refuses(self, layer: nn.Linear) -> str: ...

    def convert(self, layer: nn.Linear, device: torch.device, dtype: torch.dtype) -> nn.Module: ...


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: QuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Mapping[str, Any] | str | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantize the linear layers of a model to 8 or 4 bits, in place, and return the model, ready for inference.

    The config is a `BnbQuantizationConfig` or a `TorchaoQuantizationConfig`. `weights_location` is a file, an index or a folder of weights,
    for a model that was made under `init_empty_weights` or otherwise; without it the weights that the model has are converted.
    `device_map` is a dict, a strategy such as "auto", or None for the first available device. The disk is not supported.
    `offload_state_dict` has no effect: no state dict is ever in memory.

    >>> from slipstream.big_models.quantization_config import TorchaoQuantizationConfig
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    >>> model = load_and_quantize_model(model, TorchaoQuantizationConfig(weight_bits=8))
    >>> type(model[0].weight).__name__, type(model[2].weight).__name__
    ('Int8Tensor', 'Parameter')
    """
    config = _checked_config(model, bnb_quantization_config)
    names = find_skipped_modules(model, config)
    layers = dict(select_layers(model, names))
    places = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    targets = _resolve_devices(model, places)
    if offload_folder is not None:
        get_logger(__name__).warning("offload_folder has no effect: quantised weights stay in memory.")
    converter: _Converter = BitsandbytesConverter(config) if isinstance(config, BnbQuantizationConfig) else TorchaoConverter(config)
    if refused := {name: why for name, layer in layers.items() if (why := converter.refuses(layer))}:
        name, why = next(iter(refused.items()))
        get_logger(__name__).warning(f"{len(refused)} of {len(layers)} linear layers stay as they are, such as {name}: {why}.")
    if len(refused) == len(layers):
        raise ConfigError(f"There is no layer to quantise in {type(model).__name__}: {_why_none(layers, refused, names)}.")
    types = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    if weights_location is not None:
        path = check_local_path(weights_location, "weights_location")
        load_by_device_map(model, find_weights(path), str(path), ResolvedDeviceMap({"": CPU.type}), WeightLoadOptions(as_stored=True))
    _demand_weights(model, weights_location)
    kept = config.keep_in_fp32_modules or []
    taken = [name for name in layers if name not in refused]
    parents = _parents_of_modules(model)
    with bar(len(taken), "quantising", "layer") as shown:
        for name in taken:
            device, layer = targets[name], layers.pop(name)
            assert device is not None  # the disk was refused
            made = converter.convert(layer, device, config.torch_dtype or types[f"{name}.weight"])
            for parent, key in parents[id(layer)]:
                parent._modules[key] = made
            del layer
            shown.update()
    _place_unconverted(model, targets, types, config.torch_dtype, kept, converted=set(taken))
    _warn_dtype_change(config, types)
    if targets.single is None:
        return dispatch_model(model, places)
    model.hf_device_map = places  # type: ignore[assignment]
    return model


def _checked_config(model: Any, config: Any) -> QuantizationConfig:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"load_and_quantize_model was given a {type(model).__qualname__}. Pass a torch.nn.Module.")
    if not isinstance(config, (BnbQuantizationConfig, TorchaoQuantizationConfig)):
        raise ConfigError(
            f"bnb_quantization_config is a {type(config).__qualname__}. Pass a BnbQuantizationConfig or a TorchaoQuantizationConfig."
        )
    if isinstance(model, nn.Linear):
        raise ConfigError(
            "The model is a single linear layer, which cannot be converted in place. Put it into a module: nn.Sequential(layer)."
        )
    if has_offloaded_modules(model):
        raise ConfigError(
            f"This {type(model).__name__} is dispatched, and offloaded weights are not quantised. Quantise the plain model, or load "
            'its weights into memory first: dispatch_model(model, {"": "cpu"}).'
        )
    odd = next((name for name, parameter in model.named_parameters() if type(parameter) not in (nn.Parameter, torch.Tensor)), None)
    if odd is not None:
        raise ConfigError(
            f"{odd} is a {type(model.get_parameter(odd)).__name__}: this model is quantised already. Start from plain weights."
        )
    return config


def _why_none(layers: Mapping[str, nn.Linear], refused: Mapping[str, str], names: Collection[str]) -> str:
    if layers:
        return next(iter(refused.values()))
    return f"it has no plain nn.Linear but those that stay as they are ({', '.join(names) or 'none'}); name others in skip_modules"


def _demand_weights(model: nn.Module, location: Any) -> None:
    absent = [name for name, parameter in (*model.named_parameters(), *model.named_buffers()) if parameter.is_meta]
    if not absent:
        return
    if location is None:
        raise ConfigError(
            f"{absent[0]} and {len(absent) - 1} others have no values. Give weights_location, the path of the model's weights."
        )
    raise CheckpointError(f"{location} has no value for {', '.join(absent[:5])}. Give the weights of the whole model.")


def _parents_of_modules(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the parents of each module, by id: several if it is shared."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            found.setdefault(id(child), []).append((parent, name))
    return found


def _place_unconverted(
    model: nn.Module,
    targets: ResolvedDeviceMap,
    types: Mapping[str, torch.dtype],
    dtype: torch.dtype | None,
    kept: Collection[str],
    *,
    converted: Collection[str],
) -> None:
    """Convert and move the tensors that are not quantized; tied weights stay tied."""
    made: dict[int, torch.Tensor] = {}
    for slot in find_slots(model, recurse=True):
        path, tensor = slot.name.rpartition(".")[0], slot.tensor
        if path in converted:
            continue
        wanted = tensor.dtype
        if tensor.is_floating_point():
            wanted = torch.float32 if is_within_any(path, kept) else dtype or types.get(slot.name, tensor.dtype)
        if id(tensor) not in made:
            made[id(tensor)] = _convert_tensor(tensor, targets[slot.name], wanted)
        slot.store[slot.key] = made[id(tensor)]


def _warn_dtype_change(config: QuantizationConfig, types: Mapping[str, torch.dtype]) -> None:
    """Warn if the default of torch_dtype has changed the dtype of the model's inputs."""
    made = config.unasked_dtype if isinstance(config, BnbQuantizationConfig) else None
    before = next((dtype for dtype in types.values() if dtype.is_floating_point and dtype is not made), None)
    if made is not None and before is not None:
        bits = 8 if config.target_dtype is torch.int8 else 4
        short, own = (str(dtype).partition(".")[2] for dtype in (made, before))
        get_logger(__name__).warning(
            f"Modules that are not quantised were {own} and are {short} now, the default of torch_dtype with {bits} bits: "
            f"pass inputs in {short}, or write torch_dtype={own!r} to keep {own} inputs."
        )


def _convert_tensor(tensor: torch.Tensor, device: torch.device | None, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype is dtype and tensor.device == device:
        return tensor
    moved = tensor.detach().to(device, dtype)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


# --- the device map -------------------------------------------------------------------------------------------------------------------


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: QuantizationConfig,
    device_map: Mapping[str, Any] | str | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return a device map that counts weights with their quantized sizes.

    >>> from slipstream.big_models.quantization_config import TorchaoQuantizationConfig
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> get_quantized_model_device_map(model, TorchaoQuantizationConfig(), {"": "cpu"})
    {'': 'cpu'}
    """
    config = bnb_quantization_config
    if isinstance(device_map, str):
        dtypes = _planned_dtypes(model, config) if device_map in STRATEGIES else None
        return plan_device_map(model, device_map, max_memory, no_split_module_classes, special_dtypes=dtypes)
    given = {"max_memory": max_memory, "no_split_module_classes": no_split_module_classes}
    if unused := [name for name, value in given.items() if value is not None]:
        get_logger(__name__).warning(f"{' and '.join(unused)} has no effect without a strategy as device_map, such as 'auto'.")
    if device_map is None:
        family = default_family()
        return {"": CPU.type if family is CPU else device_for(family)}
    if not isinstance(device_map, Mapping):
        raise ConfigError(f"device_map={device_map!r} is neither a dict nor one of {', '.join(map(repr, STRATEGIES))}.")
    return dict(device_map)


def _planned_dtypes(model: nn.Module, config: QuantizationConfig) -> dict[str, Any]:
    """Return the dtype of every parameter after quantization."""
    small = {f"{name}.weight" for name, _ in select_layers(model, find_skipped_modules(model, config))}
    wide = config.keep_in_fp32_modules or []
    types: dict[str, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        rest = torch.float32 if is_within_any(name.rpartition(".")[0], wide) else config.torch_dtype or parameter.dtype
        types[name] = config.target_dtype if name in small else rest
    return types


def _resolve_devices(model: nn.Module, device_map: Mapping[str, Any]) -> ResolvedDeviceMap:
    check_device_map(model, device_map)
    targets = ResolvedDeviceMap(device_map)
    for name, device in targets.entries.items():
        if targets.is_offloaded(name):
            where = "the disk" if device is None else "main memory beside an accelerator"
            raise ConfigError(
                f"device_map puts {name or 'the whole model'} on {where}, and quantised weights are not offloaded. "
                "Give max_memory or a device_map with room for it, fewer bits, or offload the plain model: load_checkpoint_and_dispatch."
            )
    return targets


# --- single steps ------------------------------------------------------------------------------------------------------------------------


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replace linear layers with those of bitsandbytes, with their weights if they have any, and return the model.

    `current_key_name` is the path of `model` within a larger model, to which names in `modules_to_not_convert` may refer.
    """
    converter = BitsandbytesConverter(bnb_quantization_config)
    prefix = ".".join(current_key_name or ())
    names = find_skipped_modules(model, bnb_quantization_config) if modules_to_not_convert is None else modules_to_not_convert
    layers = [
        (name, layer)
        for name, layer in select_layers(model, ())
        if name and not is_within_any(f"{prefix}.{name}" if prefix else name, names) and not is_within_any(name, names)
    ]
    if not layers:
        get_logger(__name__).warning(f"No layer of {type(model).__name__} was converted: it has no linear layers but those to leave alone.")
    parents = _parents_of_modules(model)
    for _, layer in layers:
        made = converter.convert(layer, layer.weight.device, bnb_quantization_config.torch_dtype)
        for parent, name in parents[id(layer)]:
            parent._modules[name] = made
    return model


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module: that of its first parameter.

    >>> get_parameter_device(nn.Linear(2, 2))
    device(type='cpu')
    """
    found = next(parameter.parameters(), None)
    if found is None:
        raise ConfigError(f"{type(parameter).__name__} has no parameters, and so no device.")
    return found.device


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: str | os.PathLike[str],
    offload_index: dict[str, Any],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Offload one weight to a folder in 8 bits, with the scales of its rows as `SCB`, and leave a meta tensor in the model.

    `fp16_statistics` are the scales of a weight that is in 8 bits already. Other tensors than weights are written as `new_dtype`.
    """
    path, _, last = param_name.rpartition(".")
    module = model.get_submodule(path)
    if fp16_statistics is not None:
        data, scale = param, fp16_statistics
    elif param.is_floating_point() and last == "weight" and param.dim() == 2:
        data, scale = quantize_rows(param)
    else:
        data, scale = param.to(new_dtype), None
    offload_weight(data, param_name, offload_folder, index=offload_index)
    if scale is not None:
        offload_weight(scale, f"{path}.SCB" if path else "SCB", offload_folder, index=offload_index)
    empty = torch.empty(param.shape, dtype=data.dtype, device="meta")
    module._parameters[last] = nn.Parameter(empty, requires_grad=False)
