"""One tensor of a module at a time: where it is, and giving it another device, type or value.

A replaced tensor stays what it was: a Parameter of the same class with the same attributes and `requires_grad`, or a buffer, persistent or
not. What does not fit (an unknown name, another shape, a tensor without values) is refused with the path of the tensor; nothing is
reshaped, and whole numbers are never made into fractions or the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from slipstream.devices.memory import clear_device_cache
from slipstream.devices.table import family_of
from slipstream.errors import ConfigError
from slipstream.offload.hooking.exchange import exchanges_of
from slipstream.offload.hooking.hooks import AlignDevicesHook
from slipstream.offload.hooking.parts import as_device, dressed_like, places_of
from slipstream.offload.hooking.wrapping import hooks_of

__all__ = ["align_module_device", "check_device_same", "has_offloaded_params", "set_module_tensor_to_device"]

_PACKED = "Params4bit"
"""A class of parameters whose values are packed, and have another shape than the parameter."""


def check_device_same(first_device: torch.device | str | int, second_device: torch.device | str | int) -> bool:
    """Whether two devices are one; a number that is missing means the current device of its family.

    >>> check_device_same("cpu", torch.device("cpu:0")), check_device_same("cpu", "meta")
    (True, False)
    """
    first, second = as_device(first_device), as_device(second_device)
    if first.type != second.type or first.type in ("cpu", "meta") or first.index == second.index:
        return first.type == second.type
    current = int(family_of(first).ask("current_device", default=0))
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

    dtype: what fractions are converted to; with None a value takes the type that the tensor has. tied_params_map (address -> device ->
    copy): a copy that is known is used instead of another, and a new one is entered if the address is known. fp16_statistics: kept beside
    the weight as its attribute `SCB`. clear_cache: cached memory of a device is given back after something left or came.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False, device="meta"))
    >>> set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(1, 2))
    >>> model[0].weight
    Parameter containing:
    tensor([[1., 1.]], requires_grad=True)
    """
    store, key, old = _found(module, tensor_name)
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
    wanted = _dtype(dtype, tensor_name) if dtype is not None else old.dtype
    if not (source.is_floating_point() and wanted.is_floating_point):
        wanted = source.dtype
    if value is None and source.device == target and source.dtype is wanted:
        return
    made = dressed_like(old, _placed(source, target, wanted, tied_params_map, non_blocking))
    if fp16_statistics is not None:
        made.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
    store[key] = made
    if clear_cache and {target.type, old.device.type} - {"cpu", "meta"}:
        clear_device_cache()


def _found(module: torch.nn.Module, path: str) -> tuple[dict[str, Any], str, torch.Tensor]:
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
        return as_device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot go to {given!r}, which torch knows no device by. Write 'cpu', 'meta' or an accelerator."
        ) from error


def _dtype(given: Any, path: str) -> torch.dtype:
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if isinstance(found, torch.dtype):
        return found
    raise ConfigError(f"dtype={given!r}, given for {path}, is none that torch has. Write a torch.dtype, or its name such as 'bfloat16'.")


@torch.no_grad()
def _placed(
    source: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    tied: dict[int, dict[torch.device, torch.Tensor]] | None,
    non_blocking: bool,
) -> torch.Tensor:
    copies = tied.get(source.data_ptr()) if tied and not source.is_meta else None
    if copies is not None and device in copies:
        return copies[device]
    moved = source.detach().to(device=device, dtype=dtype, non_blocking=non_blocking)
    if copies is not None:
        copies[device] = moved
    return moved


def has_offloaded_params(module: torch.nn.Module) -> bool:
    """Whether the weights of a module come and go, by a hook of its own or of the block that it is part of.

    >>> has_offloaded_params(torch.nn.Linear(2, 2))
    False
    """
    return any(isinstance(hook, AlignDevicesHook) and hook.offload for hook in hooks_of(module)) or bool(exchanges_of(module))


@contextmanager
def align_module_device(module: torch.nn.Module, execution_device: torch.device | str | int | None = None) -> Iterator[None]:
    """Inside, the tensors of a module itself (not of those below) are on a device; offloaded ones are there with their values.

    With None offloaded weights come to the execution device of their hook, and others stay. Afterwards everything is where it was; what is
    written into offloaded weights is lost.

    >>> linear = torch.nn.Linear(2, 2)
    >>> with align_module_device(linear, "cpu"):
    ...     linear.weight.device
    device(type='cpu')
    """
    offloading = [hook for hook in hooks_of(module) if isinstance(hook, AlignDevicesHook) and hook.offload]
    if offloading:
        with _taken(module, offloading, execution_device):
            yield
        return
    with ExitStack() as stack:
        for exchange in exchanges_of(module):  # of the block that the module is part of
            exchange.enter()
            stack.callback(exchange.leave)
        stack.enter_context(_moved(module, execution_device))
        yield


@contextmanager
def _moved(module: torch.nn.Module, execution_device: torch.device | str | int | None) -> Iterator[None]:
    places = list(places_of(module, recurse=False)) if execution_device is not None else []
    try:
        for place in places:
            set_module_tensor_to_device(module, place.name, execution_device, clear_cache=False)  # type: ignore[arg-type]
        yield
    finally:
        for place in places:
            now = place.store.get(place.key)
            if now is not None and now is not place.tensor and now.device != place.tensor.device:
                if not now.is_meta:
                    place.tensor.data = now.detach().to(place.tensor.device)
                place.store[place.key] = place.tensor


@contextmanager
def _taken(module: torch.nn.Module, hooks: list[AlignDevicesHook], device: torch.device | str | int | None) -> Iterator[None]:
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
