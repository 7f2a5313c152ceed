"""Hooks for a whole tree of modules: `attach_align_device_hook` and its variants, and layerwise casting.

These functions put one hook on every module that holds tensors, or on those that a mapping names; `dispatch_model` puts one on each block
instead. Existing hooks stay and run first. A `LayerwiseCastingHook` keeps the weights of a module in `storage_dtype` and converts them to
`compute_dtype` for each forward; precision is lost once, when the hook is attached.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import torch

from slipstream.big_models.hooks.forward_hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from slipstream.big_models.hooks.weight_swap import find_slots
from slipstream.big_models.weight_store.weights import PrefixedDataset
from slipstream.errors import ConfigError

__all__ = [
    "LayerwiseCastingHook", "attach_align_device_hook", "attach_align_device_hook_on_blocks", "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
]


_Device = int | str | torch.device
_Tied = dict[int, dict[torch.device, torch.Tensor]]


def attach_execution_device_hook(
    module: torch.nn.Module,
    execution_device: _Device | None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: _Tied | None = None,
) -> None:
    """Attach a hook that moves inputs to the device to every module with tensors in or below it that has no hook yet.

    Nothing is attached below classes of `preload_module_classes`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> attach_execution_device_hook(model, "cpu")
    >>> [hasattr(inner, "_hf_hook") for inner in model.modules()]
    [True, True, False]
    """
    for _, inner in _walk(module, "", _classes(preload_module_classes)):
        if not hasattr(inner, "_hf_hook") and next(find_slots(inner, recurse=True), None) is not None:
            add_hook_to_module(inner, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map))


def _walk(module: torch.nn.Module, name: str, whole: frozenset[str]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module and those below it, but not below modules of the named classes; `name` is that of the module."""
    yield name, module
    if type(module).__name__ not in whole:
        for child_name, child in module.named_children():
            yield from _walk(child, _child_name(name, child_name), whole)


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
    """Attach a hook that moves inputs, and with `offload` the weights, to the device to every module with its own tensors.

    `weights_map` has the names of the whole model, in which this module is called `module_name`. With `offload`, a module of a class in
    `preload_module_classes` gets one hook for everything below it: for modules that use the weights of their children without calling
    them.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> attach_align_device_hook(model, execution_device="cpu", offload=True)
    >>> [hasattr(inner, "_hf_hook") for inner in model.modules()], model[0].weight.device
    ([False, True, False], device(type='meta'))
    """
    whole = _classes(preload_module_classes) if offload else frozenset()
    for name, inner in list(_walk(module, module_name, whole)):
        is_whole = type(inner).__name__ in whole
        if is_whole or next(find_slots(inner, recurse=False), None) is not None:
            hook = AlignDevicesHook(
                execution_device=execution_device,
                offload=offload,
                weights_map=None if weights_map is None else PrefixedDataset(weights_map, f"{name}." if name else ""),
                offload_buffers=offload_buffers,
                place_submodules=is_whole,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(inner, hook, append=True)


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
    """Attach hooks to blocks: `execution_device` and `offload` say by block name where it runs and whether it is offloaded.

    A block that is not offloaded moves to its device as a whole; in an offloaded one every module with tensors gets its own hook. Outputs
    of the whole model go to the device of its inputs. Without mappings, the whole model is one block.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> attach_align_device_hook_on_blocks(model, {"0": "cpu", "1": "cpu"}, {"0": True, "1": False}, weights_map=model.state_dict())
    >>> model[0].weight.device, model[1].weight.device, model._hf_hook.io_same_device
    (device(type='meta'), device(type='cpu'), True)
    """
    devices, offloaded = _broadcast_to_blocks(execution_device, offload, module_name)
    _check_names(module, module_name, {*devices, *offloaded})

    def align(inner: torch.nn.Module, device: _Device | None, *, io_same_device: bool, place_submodules: bool = False) -> None:
        hook = AlignDevicesHook(
            device, False, io_same_device, None, offload_buffers, place_submodules, skip_keys=skip_keys, tied_params_map=tied_params_map
        )
        add_hook_to_module(inner, hook, append=True)

    for name, inner in list(_walk(module, module_name, frozenset())):
        if name not in devices or name not in offloaded:
            if name == "":
                align(inner, devices.get(""), io_same_device=True)
            continue
        device = devices[name]
        if offloaded[name]:
            options = (offload_buffers, name, skip_keys, preload_module_classes, tied_params_map)
            attach_align_device_hook(inner, device, True, weights_map, *options)
            if name == "" or not hasattr(inner, "_hf_hook"):
                align(inner, device, io_same_device=name == "")
        else:
            align(inner, device, io_same_device=name == module_name, place_submodules=True)
        classes = preload_module_classes if offloaded[name] else None
        attach_execution_device_hook(inner, device, skip_keys, classes, tied_params_map)


def _check_names(module: torch.nn.Module, module_name: str, names: set[str]) -> None:
    unknown = sorted(names - {_child_name(module_name, name) if name else module_name for name, _ in module.named_modules()})
    if unknown:
        raise ConfigError(
            f"execution_device and offload name the block {unknown[0]!r}, which this {type(module).__name__} does not have. "
            "Write names of named_modules(), '' for the whole model."
        )


def _broadcast_to_blocks(
    execution_device: _Device | Mapping[str, _Device] | None, offload: bool | Mapping[str, bool], whole: str
) -> tuple[Mapping[str, _Device | None], Mapping[str, bool]]:
    """Return both as mappings; a single value applies to every block of the other, or to the whole model."""
    names = [name for given in (execution_device, offload) if isinstance(given, Mapping) for name in given] or [whole]
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(names, offload)
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(names, execution_device)
    return devices, offloaded


def _classes(names: Collection[str] | None) -> frozenset[str]:
    if isinstance(names, str):
        raise ConfigError(f"preload_module_classes={names!r} is a string; write a list of class names: [{names!r}].")
    return frozenset(names or ())


def _child_name(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


_CONVOLUTIONS: Final = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_LAYERS: Final = tuple(getattr(torch.nn, name) for name in ("Linear", *_CONVOLUTIONS))


class LayerwiseCastingHook(ModelHook):
    """Keeps the weights of a module in `storage_dtype`, and in `compute_dtype` while it runs.

    >>> linear = add_hook_to_module(torch.nn.Linear(2, 2), LayerwiseCastingHook(torch.bfloat16, torch.float32, non_blocking=False))
    >>> linear.weight.dtype, linear(torch.ones(1, 2)).dtype, linear.weight.dtype
    (torch.bfloat16, torch.float32, torch.bfloat16)
    """

    _running: int

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = _checked("storage_dtype", storage_dtype)
        self.compute_dtype = _checked("compute_dtype", compute_dtype)
        self.non_blocking = non_blocking
        self._begin()

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert the weights to the storage dtype."""
        self._cast(module, self.storage_dtype)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the weights to the compute dtype."""
        with self._lock:
            self._running += 1
            self._cast(module, self.compute_dtype)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Convert the weights back, unless another forward still runs."""
        self.abandon(module)
        return output

    def abandon(self, module: torch.nn.Module) -> None:
        """Convert the weights back after a forward that raised."""
        with self._lock:
            self._running = max(0, self._running - 1)
            if not self._running:
                self._cast(module, self.storage_dtype)

    def _cast(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):
            module.to(dtype=dtype, non_blocking=self.non_blocking)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._running = 0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_running")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def attach_layerwise_casting_hooks(
    module: torch.nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[torch.nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers below a module in one dtype, and compute in another.

    skip_modules_pattern: regular expressions; a module whose name matches one is skipped, with everything below it. skip_modules_classes:
    the same by class. With neither, the module gets one hook for everything in it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2))
    >>> attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern="2")
    >>> [parameter.dtype for parameter in model.parameters()][::2]
    [torch.float8_e4m3fn, torch.float32, torch.float32]
    """
    for option, dtype in (("storage_dtype", storage_dtype), ("compute_dtype", compute_dtype)):
        _checked(option, dtype)
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else tuple(skip_modules_pattern or ())
    try:
        searches = [re.compile(pattern) for pattern in patterns]
    except (re.error, TypeError) as error:
        raise ConfigError(f"skip_modules_pattern={skip_modules_pattern!r} is not a regular expression ({error}).") from error
    if skip_modules_pattern is None and skip_modules_classes is None:
        add_hook_to_module(module, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        return
    waiting = [("", module)]
    while waiting:
        name, inner = waiting.pop()
        if isinstance(inner, tuple(skip_modules_classes or ())) or any(search.search(name) for search in searches):
            continue
        if isinstance(inner, _LAYERS):
            add_hook_to_module(inner, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            continue
        waiting.extend((_child_name(name, child_name), child) for child_name, child in inner.named_children())


def _checked(name: str, dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ConfigError(f"{name}={dtype!r} is not a floating point type. Write a torch.dtype such as torch.bfloat16 or torch.float8_e4m3fn.")
