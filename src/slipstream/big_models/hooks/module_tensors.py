"""Single tensors and state dicts of modules, offloaded or not.

`set_module_tensor_to_device` changes device, dtype or value of one tensor and keeps its class, attributes and `requires_grad`; errors name
the path of the tensor. `align_module_device` moves the tensors of a module to a device inside a `with` block. State dicts of an offloaded
model are complete: weights in files are views of mapped pages, which take no memory until they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from slipstream.big_models.device_map.sizes import parse_torch_dtype
from slipstream.big_models.device_map.validation import HOST, resolve_device
from slipstream.big_models.hooks.forward_hooks import AlignDevicesHook, get_hooks
from slipstream.big_models.hooks.weight_swap import copy_to_device, find_slots, find_swappers, normalize_device, wrap_like
from slipstream.devices.memory import clear_device_cache
from slipstream.devices.table import family_of
from slipstream.errors import ConfigError, StateError

__all__ = [
    "align_module_device", "check_device_same", "get_state_dict_from_offload", "get_state_dict_offloaded_model", "has_offloaded_params",
    "set_module_tensor_to_device",
]


_PACKED = "Params4bit"
"""A parameter class of bitsandbytes whose packed values have another shape than the parameter."""


def check_device_same(first_device: torch.device | str | int, second_device: torch.device | str | int) -> bool:
    """Return whether two devices are one; a missing number means the current device of its family.

    >>> check_device_same("cpu", torch.device("cpu:0")), check_device_same("cpu", "meta")
    (True, False)
    """
    first, second = normalize_device(first_device), normalize_device(second_device)
    if first.type != second.type or first.type in ("cpu", "meta") or first.index == second.index:
        return first.type == second.type
    family = family_of(first)
    current = int(family.ask("current_device", default=0)) if family.is_available() else 0
    return (current if first.index is None else first.index) == (current if second.index is None else second.index)


def set_module_tensor_to_device(
    module: torch.nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer, by its path below the module, on a device; with `value`, give it these values.

    dtype: what floating point values are converted to; None takes the dtype of the tensor. tied_params_map (address -> device -> copy): a
    known copy is used instead of another, and a new one is entered if the address is known. fp16_statistics: kept as the attribute `SCB` of
    the weight. clear_cache: cached memory of a device is released after something was moved from or to it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False, device="meta"))
    >>> set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(1, 2))
    >>> model[0].weight
    Parameter containing:
    tensor([[1., 1.]], requires_grad=True)
    """
    store, key, old = _find_tensor(module, tensor_name)
    target = _device(device, tensor_name)
    if value is not None and value.shape != old.shape and type(old).__name__ != _PACKED:
        raise ConfigError(
            f"{tensor_name} of {type(module).__name__} has shape {list(old.shape)}, and the value given for it {list(value.shape)}. Give a "
            "tensor of the same shape, or build the model with the configuration that the weights were saved with."
        )
    source = old if value is None else value
    if source.is_meta and target.type != "meta":
        raise ConfigError(
            f"{tensor_name} of {type(module).__name__} cannot go to {target}: {'it' if value is None else 'the value given for it'} is on "
            "the meta device, without values. Give `value=` with its weights."
        )
    wanted = old.dtype if dtype is None else parse_torch_dtype(dtype, f"dtype of {tensor_name}")
    if not (source.is_floating_point() and wanted.is_floating_point):
        wanted = source.dtype
    if value is None and source.device == target and source.dtype is wanted:
        return
    made = wrap_like(old, copy_to_device(source, target, tied_params_map, dtype=wanted, non_blocking=non_blocking))
    if fp16_statistics is not None:
        made.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
    store[key] = made
    if clear_cache and {target.type, old.device.type} - {"cpu", "meta"}:
        clear_device_cache()


def _find_tensor(module: torch.nn.Module, path: str) -> tuple[dict[str, Any], str, torch.Tensor]:
    above, _, key = path.rpartition(".")
    try:
        owner = module.get_submodule(above)
    except AttributeError:
        raise ConfigError(f"{type(module).__name__} has no module {above!r}, so that {path!r} names no tensor of it.") from None
    for store in (owner._parameters, owner._buffers):
        if key in store:
            tensor = store[key]
            if tensor is None:
                raise ConfigError(f"{path!r} of {type(module).__name__} is None: there is no tensor to put anywhere.")
            return store, key, tensor
    known = ", ".join([*owner._parameters, *owner._buffers]) or "none"
    raise ConfigError(
        f"{path!r} names no parameter or buffer of {type(module).__name__}: {above or 'the module itself'} "
        f"({type(owner).__name__}) has {known}."
    )


def _device(given: Any, path: str) -> torch.device:
    try:
        return normalize_device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot go to {given!r}, which is not a device of torch. Write 'cpu', 'meta' or an accelerator."
        ) from error


def has_offloaded_params(module: torch.nn.Module) -> bool:
    """Return whether the weights of a module are offloaded, by a hook of its own or of the block that it is part of.

    >>> has_offloaded_params(torch.nn.Linear(2, 2))
    False
    """
    return any(isinstance(hook, AlignDevicesHook) and hook.offload for hook in get_hooks(module)) or bool(find_swappers(module))


@contextmanager
def align_module_device(module: torch.nn.Module, execution_device: torch.device | str | int | None = None) -> Iterator[None]:
    """Move a module's own tensors (not those of its submodules) to a device inside the block, and load offloaded ones.

    With None, offloaded weights are loaded to the execution device of their hook, and others stay. Afterwards everything is moved back;
    writes into offloaded weights are lost.

    >>> linear = torch.nn.Linear(2, 2)
    >>> with align_module_device(linear, "cpu"):
    ...     linear.weight.device
    device(type='cpu')
    """
    offloading = [hook for hook in get_hooks(module) if isinstance(hook, AlignDevicesHook) and hook.offload]
    if offloading:
        with _weights_in_place(module, offloading, execution_device):
            yield
        return
    with ExitStack() as stack:
        for swapper in find_swappers(module):  # of the block that the module is part of
            swapper.enter()
            stack.callback(swapper.leave)
        stack.enter_context(_moved_tensors(module, execution_device))
        yield


@contextmanager
def _moved_tensors(module: torch.nn.Module, execution_device: torch.device | str | int | None) -> Iterator[None]:
    slots = list(find_slots(module, recurse=False)) if execution_device is not None else []
    moved: dict[str, tuple[Any, int | None]] = {}
    try:
        for slot in slots:
            set_module_tensor_to_device(module, slot.name, execution_device, clear_cache=False)  # type: ignore[arg-type]
            moved[slot.name] = (slot.store[slot.key], _version(slot.store[slot.key]))
        yield
    finally:
        for slot in slots:
            now = slot.store.get(slot.key)
            if isinstance(now, torch.Tensor) and now is not slot.tensor and now.device != slot.tensor.device:
                copy, version = moved.get(slot.name, (None, None))
                if not now.is_meta and (now is not copy or version is None or now._version != version):  # written to: keep that
                    slot.tensor.data = now.detach().to(slot.tensor.device)
                slot.store[slot.key] = slot.tensor


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to; None if it does not count that."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def _weights_in_place(module: torch.nn.Module, hooks: list[AlignDevicesHook], device: torch.device | str | int | None) -> Iterator[None]:
    before = [hook.execution_device for hook in hooks]
    begun: list[AlignDevicesHook] = []
    try:
        for hook in hooks:
            if device is not None and not check_device_same(device, hook.execution_device or "cpu"):
                hook.execution_device = device
            hook.pre_forward(module)
            begun.append(hook)
        yield
    finally:
        for hook in reversed(begun):
            hook.abandon(module)
        for hook, earlier in zip(hooks, before, strict=True):
            if hook.execution_device is not earlier:
                hook.execution_device = earlier


def get_state_dict_offloaded_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return the whole state dict of a model, on the CPU, wherever its weights are.

    >>> from slipstream.big_models.dispatch import dispatch_model
    >>> model = dispatch_model(torch.nn.Sequential(torch.nn.Linear(2, 1)), {"": "disk"})
    >>> [(name, tensor.device.type) for name, tensor in get_state_dict_offloaded_model(model).items()]
    [('0.weight', 'cpu'), ('0.bias', 'cpu')]
    """
    found = {name: _to_device(value, HOST) for name, value in model.state_dict().items()}
    if nowhere := [name for name, value in found.items() if isinstance(value, torch.Tensor) and value.is_meta]:
        raise StateError(
            f"{', '.join(nowhere[:5])} of this {type(model).__name__} have no values: they are on the meta device, and no hook has "
            "their weights. Load the weights first."
        )
    return found


def get_state_dict_from_offload(
    module: torch.nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Put the values of one module into a state dict, under the names that are in it already, and return it.

    `module_name` is the full name of one of the module's tensors ("blocks.0.up.weight"). Offloaded ones go to `device_to_put_offload`.

    >>> from slipstream.big_models.dispatch import dispatch_model
    >>> model = dispatch_model(torch.nn.Sequential(torch.nn.Linear(2, 1)), {"": "disk"})
    >>> found = get_state_dict_from_offload(model[0], "0.weight", {"0.weight": "?", "1.weight": "?"})
    >>> found["0.weight"].shape, found["1.weight"]
    (torch.Size([1, 2]), '?')
    """
    offloaded = has_offloaded_params(module) or any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    device = resolve_device(device_to_put_offload, "device_to_put_offload") if offloaded else None
    prefix = "".join(module_name.rpartition(".")[:2])
    for name, value in module.state_dict().items():
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}{name}"] = value if device is None else _to_device(value, device)
    return state_dict


def _to_device(value: Any, device: torch.device) -> Any:
    return value.detach().to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
