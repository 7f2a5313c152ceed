"""Sizes of tensors, modules and indivisible layers in bytes, from shapes and dtypes alone, and the weights that modules share.

A model on the meta device has the same sizes as a real one. The time is linear in the number of tensors. A shared weight counts once, at
its first name. Two names are tied if they are the same `Parameter`, or two with the same memory and shape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from slipstream.big_models.device_map.partition import Sizer, list_module_parts, parameter_identity
from slipstream.big_models.device_map.validation import find_entry, parse_class_names
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = [
    "CustomDtype", "calculate_maximum_sizes", "check_tied_parameters_in_config", "check_tied_parameters_on_same_device",
    "compute_module_sizes", "compute_module_total_buffer_size", "dtype_byte_size", "find_tied_parameters", "get_max_layer_size",
    "get_module_leaves", "get_module_size_with_ties", "get_non_persistent_buffers", "id_tensor_storage", "make_sizer",
    "named_module_tensors", "parse_torch_dtype", "retie_parameters", "to_dtype",
]


class CustomDtype(Enum):
    """Element types for sizes (`dtype=`) that torch does not have, or not everywhere."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 1 / 2, CustomDtype.INT2: 1 / 4}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return the bytes of one element in memory; a fraction where several elements share a byte.

    >>> dtype_byte_size(torch.float32), dtype_byte_size(torch.bool), dtype_byte_size(CustomDtype.INT4)
    (4, 1, 0.5)
    """
    return _BYTES[dtype] if isinstance(dtype, CustomDtype) else dtype.itemsize


def to_dtype(given: Any, name: str = "dtype") -> torch.dtype | CustomDtype:
    """Return a dtype of torch, or one of `CustomDtype`, from itself or its name.

    >>> to_dtype("float16"), to_dtype("torch.bfloat16"), to_dtype("int4")
    (torch.float16, torch.bfloat16, <CustomDtype.INT4: 'int4'>)
    """
    custom = str(getattr(given, "value", given)).removeprefix("torch.").lower()
    return next((member for member in CustomDtype if member.value == custom), None) or parse_torch_dtype(given, name)


def parse_torch_dtype(given: Any, name: str = "dtype") -> torch.dtype:
    """Return a dtype of torch from itself or its name; `name` is the argument, for the error.

    >>> parse_torch_dtype("torch.bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ConfigError(f'{name}={given!r} is not a torch dtype. Write one such as torch.float16, or its name: "float16".')
    return found


def make_sizer(dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None) -> Sizer:
    """Return a function from a tensor to its bytes when weights are converted to `dtype`, and some, by name, to another type.

    `dtype` applies to floating point tensors of two bytes and more: integers and bytes are indices and quantized weights, which are not
    converted.

    >>> view_bytes = make_sizer("float16", {"head.weight": "float32"})
    >>> view_bytes("body.weight", torch.zeros(10)), view_bytes("head.weight", torch.zeros(10)), view_bytes("ids", torch.arange(10))
    (20, 40, 80)
    """
    common = None if dtype is None else dtype_byte_size(to_dtype(dtype))
    special = {name: dtype_byte_size(to_dtype(dtype, f"special_dtypes[{name!r}]")) for name, dtype in (special_dtypes or {}).items()}

    def bytes_of(name: str, tensor: torch.Tensor) -> int:
        own = tensor.dtype
        size: float = own.itemsize
        if name in special:
            size = special[name]
        elif common is not None and size > 1 and (own.is_floating_point or own.is_complex):
            size = common
        return math.ceil(tensor.numel() * size)

    return bytes_of


# --- tensors of a module -----------------------------------------------------------------------------------------------------


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then buffers, with their names; without `recurse` only those that the module itself holds.

    `remove_non_persistent` leaves out buffers that are not part of the state dict.

    >>> [name for name, _ in named_module_tensors(nn.BatchNorm1d(2))]
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else frozenset()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that are not saved; with `fqns`, their full names below the module."""
    if not recurse:
        return set(module._non_persistent_buffers_set)
    modules = module.named_modules(remove_duplicate=False)
    return {f"{path}.{name}" if fqns and path else name for path, module in modules for name in module._non_persistent_buffers_set}


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return (device, address of its memory, bytes of that memory): equal for tensors that share memory, and only for them.

    Tensors without memory (on the meta device) are told apart by their storage object.

    >>> a, b = torch.zeros(4), torch.zeros(4, device="meta")
    >>> id_tensor_storage(a) == id_tensor_storage(a.view(2, 2)), id_tensor_storage(b) == id_tensor_storage(torch.zeros(4, device="meta"))
    (True, False)
    """
    storage = tensor.untyped_storage()
    where = 0 if tensor.device.type == "meta" else storage.data_ptr()
    return tensor.device, where or storage._cdata, storage.nbytes()


# --- modules -----------------------------------------------------------------------------------------------------------------


def compute_module_sizes(
    model: nn.Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None, buffers_only: bool = False
) -> defaultdict[str, int]:
    """Return the bytes of every tensor and of every module, by name; "" is the whole model. An unknown name gives 0.

    >>> sizes = compute_module_sizes(nn.Sequential(nn.Linear(3, 5), nn.ReLU()))
    >>> sizes[""], sizes["0"], sizes["0.weight"], sizes["1"]
    (80, 80, 60, 0)
    """
    bytes_of = make_sizer(dtype, special_dtypes)
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        size, path = bytes_of(name, tensor), name
        while path:
            sizes[path] += size
            path = path.rpartition(".")[0]
        sizes[""] += size
    return sizes


def compute_module_total_buffer_size(model: nn.Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None) -> int:
    """Return the bytes of all buffers of a model.

    >>> compute_module_total_buffer_size(nn.BatchNorm1d(2))
    24
    """
    return compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True)[""]


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names in a table of sizes below which there is no other name.

    >>> get_module_leaves({"": 5, "a": 5, "a.b": 5, "a.b.weight": 4, "a.b.bias": 1})
    ['a.b.weight', 'a.b.bias']
    """
    inner = {name.rpartition(".")[0] for name in module_sizes if name}
    return [name for name in module_sizes if name not in inner]


def get_max_layer_size(
    modules: Iterable[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: str | Collection[str] | None,
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer among some modules and below them, and the names of all layers of that size.

    A layer is what cannot be divided: a module without children, one of a class that must not be split, or a tensor that a divided
    module holds itself.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4))
    >>> get_max_layer_size(model.named_children(), compute_module_sizes(model), None)
    (80, ['1'])
    """
    layers = list(_layers(modules, module_sizes, parse_class_names(no_split_module_classes)))
    largest = max((size for _, size in layers), default=0)
    return largest, [name for name, size in layers if size == largest and size]


def _layers(
    modules: Iterable[tuple[str, nn.Module | torch.Tensor]], sizes: Mapping[str, int], whole: frozenset[str]
) -> Iterator[tuple[str, int]]:
    for name, module in modules:
        if isinstance(module, torch.Tensor) or not module._modules or type(module).__name__ in whole:
            yield name, sizes.get(name, 0)
        else:
            yield from _layers(list_module_parts(name, module), sizes, whole)


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of the whole model; and bytes and names of its largest layers, where the model's own `_no_split_modules` are whole.

    >>> calculate_maximum_sizes(nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4)))
    (104, (80, ['1']))
    """
    sizes = compute_module_sizes(model)
    return sizes[""], get_max_layer_size(list_module_parts("", model), sizes, getattr(model, "_no_split_modules", None))


def get_module_size_with_ties(
    tied_params: Iterable[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Return the bytes of a module with the modules that share its weights, shared ones counted once; their names; these modules.

    `tied_params` are the other names of weights of the module, `modules_to_treat` those modules that may hold them.
    """
    found: dict[str, nn.Module] = {}
    size = module_size
    for parameter in tied_params:
        held = next(((name, module) for name, module in modules_to_treat if f"{parameter}.".startswith(f"{name}.")), None)
        if held is None:
            raise ConfigError(f"tied parameter {parameter!r} is not in the given modules: {[name for name, _ in modules_to_treat]}.")
        if held[0] not in found:
            found[held[0]] = held[1]
            size += module_sizes.get(held[0], 0)
        size -= module_sizes.get(parameter, 0)
    return size, list(found), list(found.values())


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share a parameter, each sorted.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> find_tied_parameters(model)
    [['0.weight', '1.weight']]
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"find_tied_parameters got a {type(model).__name__}. Give it a torch.nn.Module.")
    groups: dict[Hashable, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter_identity(parameter), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make the names of each group stand for one parameter again: the first that has values, else the first there is.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> retie_parameters(model, [["0.weight", "1.weight"]])
    >>> model[1].weight is model[0].weight
    True
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for group in tied_params:
        slots = []
        for name in group:
            path, _, last = name.rpartition(".")
            if path not in modules or not isinstance(getattr(modules[path], last, None), torch.Tensor):
                raise ConfigError(f"tied_params names {name!r}, which the model does not have. Take the groups of find_tied_parameters.")
            slots.append((modules[path], last))
        tensors = [getattr(module, last) for module, last in slots]
        kept = next((tensor for tensor in tensors if tensor.device.type != "meta"), tensors[0] if tensors else None)
        for module, last in slots:
            if getattr(module, last) is not kept:
                setattr(module, last, kept)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the config of a transformers model asks for tied weights.

    >>> check_tied_parameters_in_config(nn.Linear(2, 2))
    False
    """
    config = getattr(model, "config", None)
    if config is None:
        return False
    read = getattr(config, "get_text_config", None)
    text = read(decoder=True) if callable(read) else config
    words = any(getattr(settings, "tie_word_embeddings", False) for settings in (config, text))
    output = getattr(model, "get_output_embeddings", None)
    has_output = callable(output) and output() is not None
    halves = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool((words and has_output) or halves)


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn of each group of tied weights that a device map puts on different devices: each would get a copy of its own.

    >>> check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"": "cpu"})
    """
    for group in tied_params:
        devices = {name: device_map.get(find_entry(device_map, name) or "") for name in group}
        if len(set(map(str, devices.values()))) > 1:
            get_logger(__name__).warning(
                f"These tied parameters are on different devices: {devices}. Each device gets a copy of its own; "
                "give them the same device in device_map to keep them one."
            )


