"""Hooks for a whole tree of modules: which of them get an `AlignDevicesHook`, and which kind.

These are the functions with one hook for every module that holds tensors, or for those that a mapping names. `dispatch_model` cuts models
into blocks instead and puts one hook on each. Hooks that are there already stay, and run first. Nothing is moved here but by the hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from slipstream.errors import ConfigError
from slipstream.offload.hooking.hooks import AlignDevicesHook, add_hook_to_module
from slipstream.offload.hooking.parts import places_of
from slipstream.offload.store.weights import PrefixedDataset

__all__ = ["attach_align_device_hook", "attach_align_device_hook_on_blocks", "attach_execution_device_hook"]

_Device = int | str | torch.device
_Tied = dict[int, dict[torch.device, torch.Tensor]]


def attach_execution_device_hook(
    module: torch.nn.Module,
    execution_device: _Device | None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: _Tied | None = None,
) -> None:
    """Every module with tensors in it or below it, and without a hook, gets one that brings inputs to the device.

    Below classes of `preload_module_classes` nothing is attached.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> attach_execution_device_hook(model, "cpu")
    >>> [hasattr(one, "_hf_hook") for one in model.modules()]
    [True, True, False]
    """
    whole = _classes(preload_module_classes)
    if not hasattr(module, "_hf_hook") and next(places_of(module, recurse=True), None) is not None:
        add_hook_to_module(module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map))
    if type(module).__name__ in whole:
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: torch.nn.Module,
    execution_device: _Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: _Tied | None = None,
) -> None:
    """Every module that holds tensors itself gets a hook that brings inputs, and with `offload` the weights, to the device.

    `weights_map` has the names of the whole model, in which this module is called `module_name`. A module of a class in
    `preload_module_classes` gets, with `offload`, one hook for all that is below it: for modules that use the weights of their children
    without calling them.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> attach_align_device_hook(model, execution_device="cpu", offload=True)
    >>> [hasattr(one, "_hf_hook") for one in model.modules()], model[0].weight.device
    ([False, True, False], device(type='meta'))
    """
    whole = offload and type(module).__name__ in _classes(preload_module_classes)
    if whole or next(places_of(module, recurse=False), None) is not None:
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, f"{module_name}." if module_name else ""),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device=execution_device,
            offload=offload,
            weights_map=weights_map,
            offload_buffers=offload_buffers,
            module_name=_below(module_name, name),
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: torch.nn.Module,
    execution_device: _Device | Mapping[str, _Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: _Tied | None = None,
) -> None:
    """Hooks for blocks: `execution_device` and `offload` say by the name of a block where it runs and whether its weights are away.

    A block that is not offloaded is put on its device as a whole; in one that is, every module with tensors gets a hook of its own.
    Outputs of the whole model go to the device of its inputs. Without mappings, the whole model is one block.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> attach_align_device_hook_on_blocks(model, {"0": "cpu", "1": "cpu"}, {"0": True, "1": False}, weights_map=model.state_dict())
    >>> model[0].weight.device, model[1].weight.device, model._hf_hook.io_same_device
    (device(type='meta'), device(type='cpu'), True)
    """
    devices, away = _by_block(execution_device, offload, module_name)
    _check_names(module, module_name, {*devices, *away})

    def visit(inner: torch.nn.Module, name: str) -> None:
        if name in devices and name in away:
            (offload_block if away[name] else keep_block)(inner, name)
        elif name == "":
            align(inner, devices.get(""), io_same_device=True)
        for child_name, child in inner.named_children():
            visit(child, _below(name, child_name))

    def align(inner: torch.nn.Module, device: _Device | None, *, io_same_device: bool, place_submodules: bool = False) -> None:
        options = {"skip_keys": skip_keys, "tied_params_map": tied_params_map, "offload_buffers": offload_buffers}
        hook = AlignDevicesHook(device, io_same_device=io_same_device, place_submodules=place_submodules, **options)  # type: ignore[arg-type]
        add_hook_to_module(inner, hook, append=True)

    def keep_block(inner: torch.nn.Module, name: str) -> None:
        align(inner, devices[name], io_same_device=name == module_name, place_submodules=True)
        attach_execution_device_hook(inner, devices[name], skip_keys, None, tied_params_map)

    def offload_block(inner: torch.nn.Module, name: str) -> None:
        attach_align_device_hook(
            inner,
            execution_device=devices[name],
            offload=True,
            weights_map=weights_map,
            offload_buffers=offload_buffers,
            module_name=name,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=tied_params_map,
        )
        if name == "" or not hasattr(inner, "_hf_hook"):
            align(inner, devices[name], io_same_device=name == "")
        attach_execution_device_hook(inner, devices[name], skip_keys, preload_module_classes, tied_params_map)

    visit(module, module_name)


def _check_names(module: torch.nn.Module, module_name: str, names: set[str]) -> None:
    unknown = sorted(names - {_below(module_name, name) if name else module_name for name, _ in module.named_modules()})
    if unknown:
        raise ConfigError(
            f"execution_device and offload name the block {unknown[0]!r}, which this {type(module).__name__} does not have. "
            "Write names as named_modules() gives them, '' for the whole."
        )


def _by_block(
    execution_device: _Device | Mapping[str, _Device] | None, offload: bool | Mapping[str, bool], whole: str
) -> tuple[Mapping[str, _Device | None], Mapping[str, bool]]:
    """Both as mappings; what is no mapping holds for every block of the other, or for the whole."""
    names = [name for given in (execution_device, offload) if isinstance(given, Mapping) for name in given] or [whole]
    away = offload if isinstance(offload, Mapping) else dict.fromkeys(names, offload)
    devices: Mapping[str, _Device | None] = dict.fromkeys(names)
    if isinstance(execution_device, Mapping):
        devices = dict(execution_device)
    elif execution_device is not None:
        devices = dict.fromkeys(names, execution_device)
    return devices, away


def _classes(names: Collection[str] | None) -> frozenset[str]:
    if isinstance(names, str):
        raise ConfigError(f"preload_module_classes={names!r} is one text; write a list of names of classes: [{names!r}].")
    return frozenset(names or ())


def _below(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
