"""The hooks that bring inputs and weights to the device where a module runs; and all names about hooks in one place.

`AlignDevicesHook` is what `dispatch_model` uses, one for each block. With `offload=True` the weights are elsewhere, in `weights_map`, and
are in the module while it runs and at no other time (see `exchange.py`). State dicts of such a module have the weights all the same;
loading one into it is refused. `CpuOffload` moves a whole model to its device when it is called, and the one before it away.
What never happens here: a look-up by name, or a walk through inputs that cannot be elsewhere, per forward.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slipstream.comm.nested import find_device, send_to_device
from slipstream.devices.memory import clear_device_cache
from slipstream.devices.table import best_family, device_for
from slipstream.errors import ConfigError
from slipstream.offload.hooking.exchange import Bundle, Exchange, MappedBundle
from slipstream.offload.hooking.parts import Place, as_device, dressed_like, places_of
from slipstream.offload.hooking.wrapping import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    hooks_of,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

__all__ = [
    "AlignDevicesHook",
    "Bundle",
    "CpuOffload",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

_TiedTensors = dict[int, dict[torch.device, torch.Tensor]]


class _Prepared:
    """An attribute that the preparation of a hook depends on, kept in the instance under its own name; assigning it prepares anew."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, hook: Any, owner: type | None = None) -> Any:
        return self if hook is None else hook.__dict__[self._name]

    def __set__(self, hook: AlignDevicesHook, value: Any) -> None:
        hook.__dict__[self._name] = hook._prepare_anew(value)


class AlignDevicesHook(ModelHook):
    """Brings the inputs of a module, and with `offload=True` its weights, to `execution_device` for each forward.

    weights_map: where the weights are, by the names they have below the module; with None they are those of the module, kept in memory.
    If it has a method `bundle(names, device)` that gives a `Bundle`, the weights come from there. It may be assigned anew at any time.
    io_same_device: outputs go to the device of the first input. offload_buffers: persistent buffers are offloaded as well.
    place_submodules: the weights of everything below the module are meant, not its own alone. skip_keys: arguments that are not moved.
    tied_params_map: address -> device -> copy, by which modules that share a weight share its copy on a device too.

    >>> linear = add_hook_to_module(torch.nn.Linear(2, 2), AlignDevicesHook(execution_device="cpu", offload=True))
    >>> linear.weight.is_meta, linear(torch.ones(1, 2)).shape, linear.state_dict()["weight"].is_meta
    (True, torch.Size([1, 2]), False)
    """

    execution_device = _Prepared()
    weights_map = _Prepared()
    _home: weakref.ref[torch.nn.Module] | None

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: _TiedTensors | None = None,
    ) -> None:
        self._forget()
        self._names: dict[str, str] = {}  # of every tensor that is away -> the name that it is looked up by
        self._handles: list[Any] = []
        self._own_map = False
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.original_devices: dict[str, torch.device] = {}

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, io_same_device={self.io_same_device}, "
            f"offload_buffers={self.offload_buffers}, place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    # -- attaching ------------------------------------------------------------------------------------------------------------

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Put the tensors of the module where they belong: on the execution device, or, with `offload`, into `weights_map`."""
        moved_in = self._home is not None and self._home() is not module
        self._let_go()
        others = _away_by_others(module, self.place_submodules)
        places = [place for place in places_of(module, self.place_submodules) if id(place.tensor) not in others]
        self.original_devices = {place.name: place.tensor.device for place in places}
        if self.offload:
            self._home = weakref.ref(module)
            self._choose(places, keep=moved_in)
        if self.execution_device is not None:
            self._bring([place for place in places if place.name not in self._names])
        if self._names:
            away = [place for place in places if place.name in self._names]
            self._prepare(away)
            self._follow_state_dicts(away)
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Put the weights back to where they were when the hook came; those that were on no device (on disk) stay parked."""
        names = self._let_go()
        made: dict[int, torch.Tensor] = {}
        for place in places_of(module, self.place_submodules):
            device = self.original_devices.get(place.name)
            if place.name not in names or not place.tensor.is_meta or device is None or device.type == "meta":
                continue
            known = made.get(id(place.tensor))
            if known is None:
                weight = _converted(self.weights_map[names[place.name]], place.tensor.dtype)
                known = made[id(place.tensor)] = dressed_like(place.tensor, weight.to(device))
            place.store[place.key] = known
        if self._own_map:
            self.weights_map, self._own_map = None, False
        return module

    # -- around a forward -----------------------------------------------------------------------------------------------------

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Weights in place, inputs on the device. Without arguments, outside of a forward: until the next `post_forward`."""
        given = bool(args or kwargs)
        exchange = self._exchange
        if exchange is None and self._names:
            away = [place for place in places_of(module, self.place_submodules) if place.name in self._names and place.tensor.is_meta]
            exchange = self._prepare(away)
        if exchange is not None:
            exchange.enter(given)
        if given and (self._elsewhere if self._elsewhere is not None else self._decide()):
            try:
                args, kwargs = self._aligned(args, kwargs)
            except BaseException:
                self.abandon(module)
                raise
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Weights away again, the output where the inputs were, if that is wanted."""
        if self._exchange is not None and torch.is_grad_enabled():
            self._exchange.watch(output)
        self._leave()
        device = self._input_device() if self._input_devices else None
        if device is None or not self.io_same_device:
            return output
        return send_to_device(output, device, skip_keys=self.skip_keys)

    def abandon(self, module: torch.nn.Module) -> None:
        """Weights away again: the forward raised."""
        self._leave()
        self._input_device()

    def weight(self, name: str) -> torch.Tensor:
        """An offloaded tensor by its name below the module, from where it is kept."""
        found: torch.Tensor = self.weights_map[self._names[name]]
        return found.detach()

    # -- copies ---------------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_exchange", "_input_devices", "_home", "_elsewhere")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        self.__dict__.update(state)

    def _forget(self) -> None:
        self._exchange: Exchange | None = None
        self._stale = False
        self._elsewhere: bool | None = None
        self._home = None
        self._input_devices: dict[int, list[torch.device | None]] = {}

    # -- preparing ------------------------------------------------------------------------------------------------------------

    def _prepare_anew(self, value: Any) -> Any:
        """Called when `weights_map` or `execution_device` is assigned; gives what is to be kept."""
        exchange = self._exchange
        self._elsewhere = None
        if exchange is None or not exchange.in_use:
            self._exchange = None
            return value
        self._stale = True
        if isinstance(value, dict):  # what the weights in place are part of may be gone once they are given back
            return {name: one.detach().clone() if exchange.uses_memory_of(one) else one for name, one in value.items()}
        return value

    def _let_go(self) -> dict[str, str]:
        """Nothing of an earlier module is held any more; gives what was away."""
        if self._exchange is not None:
            self._exchange.close()
        for handle in self._handles:
            handle.remove()
        names = self._names
        self._names, self._handles, self._exchange, self._stale = {}, [], None, False
        return names

    def _choose(self, places: Sequence[Place], keep: bool) -> None:
        """Which tensors are away, and what each is looked up by: a tied one by the first of its names that the map has.

        Without a map the tensors themselves become one, and with `keep` (the hook comes from another module) they go before the map.
        """
        weights = self.weights_map
        own: dict[str, torch.Tensor] = {}
        groups: dict[int, list[Place]] = {}
        for place in places:
            if place.store is place.owner._parameters or (self.offload_buffers and place.persistent):
                groups.setdefault(id(place.tensor), []).append(place)
        for group in groups.values():
            tensor, name = group[0].tensor, None
            if not tensor.is_meta and (keep or weights is None):
                name = group[0].name
                own.update(dict.fromkeys([place.name for place in group], tensor.detach().to("cpu")))
            elif weights is not None:
                name = next((place.name for place in group if place.name in weights), None)
            if name is not None:
                self._names.update({place.name: name for place in group})
            elif tensor.is_meta:
                prefix = getattr(weights, "prefix", "")
                raise ConfigError(
                    f"{prefix}{group[0].name} has no values: it is on the meta device, and "
                    f"{'there is no weights_map' if weights is None else 'the weights_map does not have it'}. Load the weights first, or "
                    "give a weights_map (a state dict, or an offload_index to dispatch_model) that has it."
                )
        if weights is None:
            self.weights_map, self._own_map = own, True
        elif own:
            self.weights_map = {name: own[name] if name in own else weights[name] for name in self._names}

    def _bring(self, places: Sequence[Place]) -> None:
        """Put tensors on the execution device, for good; tied ones stay tied."""
        device, made = as_device(self.execution_device), dict[int, torch.Tensor]()
        for place in places:
            tensor = place.tensor
            if tensor.device == device:
                continue
            if tensor.is_meta:
                raise ConfigError(
                    f"{place.name} of a {type(place.owner).__name__} cannot go to {device}: it is on the meta device and has no values. "
                    "Load the weights first, or initialise them (to_empty and a reset)."
                )
            if id(tensor) not in made:
                copies = (self.tied_params_map or {}).get(tensor.data_ptr(), {})
                moved = copies[device] if device in copies else tensor.detach().to(device)
                if self.tied_params_map is not None and tensor.data_ptr() in self.tied_params_map:
                    copies[device] = moved
                made[id(tensor)] = dressed_like(tensor, moved)
            place.store[place.key] = made[id(tensor)]

    def _prepare(self, places: Sequence[Place]) -> Exchange:
        groups: dict[str, list[Place]] = {}
        for place in places:
            groups.setdefault(self._names[place.name], []).append(place)
        weights, names = self.weights_map, list(groups)
        device = torch.device("cpu") if self.execution_device is None else as_device(self.execution_device)
        make = getattr(weights, "bundle", None)
        bundle: Bundle = MappedBundle(weights, names, device, self.tied_params_map) if make is None else make(names, device)
        self._exchange = Exchange(groups.values(), bundle, str(getattr(weights, "prefix", "")))
        return self._exchange

    def _follow_state_dicts(self, places: Sequence[Place]) -> None:
        owners = {id(place.owner): (place.name[: len(place.name) - len(place.key)], place.owner) for place in places}
        for path, owner in owners.values():
            untyped: Any = owner
            self._handles.append(untyped.register_state_dict_post_hook(functools.partial(_fill, self, path)))
            self._handles.append(untyped.register_load_state_dict_pre_hook(functools.partial(_refuse, self, path)))

    # -- at work --------------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            exchange.leave()
            if self._stale and not exchange.in_use:
                self._exchange, self._stale = None, False

    def _decide(self) -> bool:
        """Whether inputs can be anywhere but where the module runs: not on a machine that has nothing but a processor."""
        device = None if self.execution_device is None else as_device(self.execution_device)
        self._elsewhere = (device is not None and device.type != "cpu") or torch.accelerator.is_available()
        return self._elsewhere

    def _aligned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self._input_devices.setdefault(threading.get_ident(), []).append(find_device([args, kwargs]))
        if self.execution_device is None:
            return args, kwargs
        device = as_device(self.execution_device)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _input_device(self) -> torch.device | None:
        """Where the inputs of the call that ends now were."""
        thread = threading.get_ident()
        came_from = self._input_devices.get(thread)
        device = came_from.pop() if came_from else None
        if not came_from:
            self._input_devices.pop(thread, None)
        return device


def _away_by_others(module: torch.nn.Module, recurse: bool) -> set[int]:
    """The stand-ins that other hooks of this module, or of those below, have put there."""
    found: set[int] = set()
    for inner in module.modules() if recurse else (module,):
        for hook in hooks_of(inner):
            names = hook._names if isinstance(hook, AlignDevicesHook) else {}
            if names:
                found.update(id(place.tensor) for place in places_of(inner, hook.place_submodules) if place.name in names)  # type: ignore[attr-defined]
    return found


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and dtype.is_floating_point else tensor


def _fill(hook: AlignDevicesHook, path: str, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """After `state_dict()` of a module: the weights in the places of their stand-ins."""
    for key in (*module._parameters, *module._buffers):
        held = state_dict.get(prefix + key)
        if path + key in hook._names and isinstance(held, torch.Tensor) and held.is_meta:
            state_dict[prefix + key] = _converted(hook.weight(path + key), held.dtype)


def _refuse(hook: AlignDevicesHook, path: str, module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    """Before `load_state_dict()`: values for a stand-in would be lost. With `assign=True` they take its place, and stay in memory."""
    if metadata.get("assign_to_params_buffers"):
        return
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if prefix + key in state_dict and path + key in hook._names and tensor is not None and tensor.is_meta:
            raise ConfigError(
                f"load_state_dict was given values for {prefix}{key}, which is offloaded: there is nothing to load them into. Load them "
                "before the model is dispatched, use load_checkpoint_and_dispatch, or pass assign=True to keep these weights in memory."
            )


# --- whole models ------------------------------------------------------------------------------------------------------------


class CpuOffload(ModelHook):
    """Keeps a model in host memory and moves all of it to `execution_device` when it is called; there it stays until it is sent back.

    With `prev_module_hook` the model of that hook goes back to host memory first: models that are called in turn take turns on the device.
    """

    def __init__(
        self, execution_device: str | int | torch.device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = device_for(best_family()) if execution_device is None else execution_device

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """The model goes to host memory."""
        return module.to("cpu")

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model before goes back, this one and its inputs come; what is there already is not moved."""
        device = as_device(self.execution_device)
        if self.prev_module_hook is not None and _is_elsewhere(self.prev_module_hook.model, torch.device("cpu")):
            self.prev_module_hook.offload()
            clear_device_cache()
        if _is_elsewhere(module, device):
            module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """A model and the hook that moves it, for the user's own hands.

    >>> model = torch.nn.Linear(2, 2)
    >>> handle = UserCpuOffloadHook(model, CpuOffload(execution_device="cpu"))
    >>> _ = add_hook_to_module(model, handle.hook)
    >>> handle.offload(), handle.remove(), hasattr(model, "_hf_hook")
    (None, None, False)
    """

    def __init__(self, model: torch.nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model back to host memory."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model."""
        remove_hook_from_module(self.model)


def _is_elsewhere(model: torch.nn.Module, device: torch.device) -> bool:
    return any(place.tensor.device != device for place in places_of(model, recurse=True))
