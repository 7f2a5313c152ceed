"""Hooks around the forward of a module: how they are added and removed, and those that move inputs and weights to a device.

`add_hook_to_module` wraps `module.forward`: `pre_forward` may change the arguments, `post_forward` the output, and `abandon` runs instead
of the latter if the forward raised. The module then has `_hf_hook` and `_old_forward`, names that other libraries look for.
`dispatch_model` attaches one `AlignDevicesHook` per block: with `offload=True` the weights are in the module only while it runs. State
dicts of such a module still have the weights; loading one into it raises. A forward looks nothing up by name.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from slipstream.big_models.hooks.weight_swap import (
    Bundle,
    MappedBundle,
    ModuleSlot,
    WeightSwapper,
    copy_to_device,
    find_slots,
    normalize_device,
    wrap_like,
)
from slipstream.checkpoint.weights import all_modules
from slipstream.devices.memory import clear_device_cache
from slipstream.devices.table import default_family, device_for
from slipstream.distributed.pytree import find_device, send_to_device
from slipstream.errors import ConfigError

__all__ = [
    "AlignDevicesHook", "Bundle", "CpuOffload", "ModelHook", "SequentialHook", "UserCpuOffloadHook", "add_hook_to_module", "get_hooks",
    "remove_hook_from_module", "remove_hook_from_submodules",
]


_GRAPH_BREAK_REASON: Final = (
    "weights are swapped around this module (Slipstream offload): the graph ends here, the module itself is compiled separately"
)


class ModelHook:
    """Code around the forward of a module; subclass it and override what you need.

    >>> class Doubling(ModelHook):
    ...     def post_forward(self, module, output):
    ...         return output * 2
    >>> module = add_hook_to_module(torch.nn.Identity(), Doubling())
    >>> module(torch.ones(2))
    tensor([2., 2.])
    """

    no_grad: bool = False
    """Whether the forward runs without an autograd graph."""

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Attach to a module and return it."""
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the forward."""
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Return the output of the module."""
        return output

    def abandon(self, module: torch.nn.Module) -> None:
        """Undo what `pre_forward` did to the module, when the forward raised."""

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Detach from a module and return it."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, each called in the order given; they are in `hooks`."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override]
        """Whether one of them runs the forward without an autograd graph."""
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Call every hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call every hook, on the arguments that the one before returned."""
        for number, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                _abandon(self.hooks[:number], module)
                raise
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Call every hook, on the output that the one before returned."""
        for number, hook in enumerate(self.hooks):
            try:
                output = hook.post_forward(module, output)
            except BaseException:
                _abandon(self.hooks[number + 1 :], module)
                raise
        return output

    def abandon(self, module: torch.nn.Module) -> None:
        """Call every hook, the last one first."""
        _abandon(self.hooks, module)

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Call every hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _abandon(hooks: Sequence[Any], module: torch.nn.Module) -> None:
    for hook in reversed(hooks):
        if hasattr(hook, "abandon"):  # a hook of another library need not have it
            hook.abandon(module)


# --- attaching -------------------------------------------------------------------------------------------------------------


def add_hook_to_module(module: torch.nn.Module, hook: ModelHook, append: bool = False) -> torch.nn.Module:
    """Put a hook around the forward of a module and return the module.

    A hook that it has already is replaced, or with `append=True` runs first, the two as a `SequentialHook`.

    >>> class Frozen(ModelHook):
    ...     no_grad = True
    >>> linear = add_hook_to_module(torch.nn.Linear(2, 2), Frozen())
    >>> linear(torch.ones(1, 2)).requires_grad, remove_hook_from_module(linear)(torch.ones(1, 2)).requires_grad
    (False, True)
    """
    before = getattr(module, "_hf_hook", None)
    if before is not None and not append:
        before.detach_hook(module)
    module = hook.init_hook(module)
    if before is not None and append:
        hook = SequentialHook(*get_hooks(module), hook)
    module._hf_hook = hook  # type: ignore[assignment]
    if before is None or "_old_forward" not in module.__dict__:
        original = module.forward
        module._old_forward = original  # type: ignore[assignment]
        module.forward = functools.update_wrapper(functools.partial(_forward, module), original)
    return module


def get_hooks(module: torch.nn.Module) -> tuple[ModelHook, ...]:
    """Return the hooks of a module, in their order.

    >>> get_hooks(torch.nn.Identity())
    ()
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return ()
    return tuple(hook.hooks) if isinstance(hook, SequentialHook) else (hook,)


def remove_hook_from_module(module: torch.nn.Module, recurse: bool = False) -> torch.nn.Module:
    """Remove the hook of a module, with `recurse` of submodules too; weights and `forward` are restored."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
        del module._hf_hook
    original = module.__dict__.pop("_old_forward", None)
    if original is not None:
        module.__dict__.pop("forward", None)
        if getattr(original, "__func__", None) is not type(module).forward:
            module.forward = original
    if recurse:
        remove_hook_from_submodules(module)
    return module


def remove_hook_from_submodules(module: torch.nn.Module) -> None:
    """Remove the hooks of a module and everything below it."""
    for inner in list(module.modules()):
        remove_hook_from_module(inner)


def _forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module with a hook."""
    if torch.compiler.is_compiling():
        # torch internals: a graph break with a reason, from a function that is not traced. Tried on torch 2.13;
        # tests/big_models/test_forward_hooks.py (compiled models) notices a change.
        torch._dynamo.skip_frame(_GRAPH_BREAK_REASON)
    hook = module._hf_hook
    before, after, abandon = hook.pre_forward, hook.post_forward, _abandon
    if _compiler()() is not None:
        before, after, abandon = (functools.partial(_call_outside_graph(), function) for function in (before, after, abandon))
    args, kwargs = before(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        abandon((hook,), module)
        raise
    return after(module, output)


# torch internals: the attributes that torch.compiler.disable sets; calling it would import the compiler with every offloaded model.
# Tried on torch 2.13; tests/big_models/test_forward_hooks.py notices a change. They can go when disable() is cheap to import.
_forward._torchdynamo_disable = True  # type: ignore[attr-defined]
_forward._torchdynamo_disable_msg = _GRAPH_BREAK_REASON  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1)
def _compiler() -> Callable[[], Any]:
    """Return a function that tells whether torch.compile is tracing (None: no). Calling it imports nothing."""
    # torch internals: torch.compiler has no cheap question for an active frame callback. Tried on torch 2.13, with a fallback;
    # tests/big_models/test_forward_hooks.py notices a change.
    found: Callable[[], Any] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return found if found is not None else lambda: sys.modules.get("torch._dynamo")


@functools.lru_cache(maxsize=1)
def _call_outside_graph() -> Callable[..., Any]:
    """Return a caller of functions that torch.compile does not trace."""
    made: Callable[..., Any] = torch.compiler.disable(lambda function, /, *args, **kwargs: function(*args, **kwargs))  # type: ignore[no-untyped-call]
    return made


_TiedTensors = dict[int, dict[torch.device, torch.Tensor]]


class _PreparedAttribute:
    """An attribute that the preparation of a hook depends on; assigning it prepares the hook again."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, hook: Any, owner: type | None = None) -> Any:
        return self if hook is None else hook.__dict__[self._name]

    def __set__(self, hook: AlignDevicesHook, value: Any) -> None:
        hook.__dict__[self._name] = hook._prepare_again(value)


class AlignDevicesHook(ModelHook):
    """Moves the inputs of a module, and with `offload=True` its weights, to `execution_device` for each forward.

    weights_map: the weights, by their names below the module; with None the module's own weights, kept in memory. If it has a method
    `bundle(names, device)` that returns a `Bundle`, the weights come from there. It may be assigned at any time. io_same_device: outputs
    go to the device of the first input. offload_buffers: persistent buffers are offloaded as well. place_submodules: submodules are
    included. skip_keys: arguments that are not moved. tied_params_map: address -> device -> copy, so that modules that share a weight
    share its copy on a device too.

    >>> linear = add_hook_to_module(torch.nn.Linear(2, 2), AlignDevicesHook(execution_device="cpu", offload=True))
    >>> linear.weight.is_meta, linear(torch.ones(1, 2)).shape, linear.state_dict()["weight"].is_meta
    (True, torch.Size([1, 2]), False)
    """

    execution_device = _PreparedAttribute()
    weights_map = _PreparedAttribute()
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
        self._names: dict[str, str] = {}  # name of every offloaded tensor -> its name in weights_map
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
        """Move the tensors of the module to the execution device, or, with `offload`, into `weights_map`."""
        moved_in = self._home is not None and self._home() is not module
        self._release()
        others = _placeholders_of_others(module, self.place_submodules)
        slots = [slot for slot in find_slots(module, self.place_submodules) if id(slot.tensor) not in others]
        self.original_devices = {slot.name: slot.tensor.device for slot in slots}
        if self.offload:
            self._home = weakref.ref(module)
            self._choose_offloaded(slots, keep=moved_in)
        stays = [slot for slot in slots if slot.name not in self._names]
        if stays and self.execution_device is not None:
            self._bring(stays)
        if self._names:
            offloaded = [slot for slot in slots if slot.name in self._names]
            self._prepare(offloaded)
            self._follow_state_dicts(offloaded)
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Restore the weights to their devices before the hook was attached; those on the disk stay offloaded."""
        names = self._release()
        made: dict[int, torch.Tensor] = {}
        for slot in find_slots(module, self.place_submodules):
            device = self.original_devices.get(slot.name)
            if slot.name not in names or not slot.tensor.is_meta or device is None or device.type == "meta":
                continue
            known = made.get(id(slot.tensor))
            if known is None:
                weight = _converted(self.weights_map[names[slot.name]], slot.tensor.dtype)
                known = made[id(slot.tensor)] = wrap_like(slot.tensor, weight.to(device))
            slot.store[slot.key] = known
        if self._own_map:
            self.weights_map, self._own_map = None, False
        return module

    # -- around a forward -----------------------------------------------------------------------------------------------------

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load weights and move inputs to the device; without arguments (outside a forward) weights stay until the next `post_forward`."""
        given = bool(args or kwargs)
        swapper = self._swapper
        if swapper is None and self._names:
            offloaded = [slot for slot in find_slots(module, self.place_submodules) if slot.name in self._names and slot.tensor.is_meta]
            swapper = self._prepare(offloaded)
        if swapper is not None:
            swapper.enter(given)
        if given and (self._moves_inputs if self._moves_inputs is not None else self._decide_moves()):
            try:
                args, kwargs = self._aligned(args, kwargs)
            except BaseException:
                self.abandon(module)
                raise
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Offload the weights again, and move the output to the device of the inputs with `io_same_device`."""
        if self._swapper is not None and torch.is_grad_enabled():
            self._swapper.watch(output)
        self._leave()
        device = self._input_device() if self._input_devices else None
        if device is None or not self.io_same_device:
            return output
        return send_to_device(output, device, skip_keys=self.skip_keys)

    def abandon(self, module: torch.nn.Module) -> None:
        """Offload the weights again: the forward raised."""
        self._leave()
        self._input_device()

    def weight(self, name: str) -> torch.Tensor:
        """Return an offloaded tensor by its name below the module."""
        found: torch.Tensor = self.weights_map[self._names[name]]
        return found.detach()

    # -- copies ---------------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        own = ("_swapper", "_input_devices", "_home", "_moves_inputs")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        self.__dict__.update(state)

    def _forget(self) -> None:
        self._swapper: WeightSwapper | None = None
        self._stale = False
        self._moves_inputs: bool | None = None
        self._home = None
        self._input_devices: dict[int, list[torch.device | None]] = {}

    # -- preparing ------------------------------------------------------------------------------------------------------------

    def _prepare_again(self, value: Any) -> Any:
        """Prepare again when `weights_map` or `execution_device` is assigned; return the value to store."""
        swapper = self._swapper
        self._moves_inputs = None
        if swapper is None or not swapper.in_use:
            self._swapper = None
            return value
        self._stale = True
        if isinstance(value, dict):  # the memory behind the loaded weights may be gone once they are released
            return {name: entry.detach().clone() if swapper.uses_memory_of(entry) else entry for name, entry in value.items()}
        return value

    def _release(self) -> dict[str, str]:
        """Release everything of an earlier module; return the names that were offloaded."""
        if self._swapper is not None:
            self._swapper.close()
        for handle in self._handles:
            handle.remove()
        names = self._names
        self._names, self._handles, self._swapper, self._stale = {}, [], None, False
        return names

    def _choose_offloaded(self, slots: Sequence[ModuleSlot], keep: bool) -> None:
        """Choose which tensors are offloaded, and the name of each in the map: a tied one has the first of its names there.

        Without a map the tensors themselves become one, and with `keep` (the hook was on another module) they go before the map.
        """
        weights = self.weights_map
        own: dict[str, torch.Tensor] = {}
        groups: dict[int, list[ModuleSlot]] = {}
        for slot in slots:
            if slot.store is slot.owner._parameters or (self.offload_buffers and slot.persistent):
                groups.setdefault(id(slot.tensor), []).append(slot)
        for group in groups.values():
            tensor, name = group[0].tensor, None
            if not tensor.is_meta and (keep or weights is None):
                name = group[0].name
                own.update(dict.fromkeys([slot.name for slot in group], tensor.detach().to("cpu")))
            elif weights is not None:
                name = next((slot.name for slot in group if slot.name in weights), None)
            if name is not None:
                self._names.update({slot.name: name for slot in group})
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

    def _bring(self, slots: Sequence[ModuleSlot]) -> None:
        """Move tensors to the execution device permanently; tied ones stay tied."""
        device, made = normalize_device(self.execution_device), dict[int, torch.Tensor]()
        for slot in slots:
            tensor = slot.tensor
            if tensor.device == device:
                continue
            if tensor.is_meta:
                raise ConfigError(
                    f"{slot.name} of a {type(slot.owner).__name__} cannot go to {device}: it is on the meta device and has no values. "
                    "Load the weights first, or initialise them (to_empty and a reset)."
                )
            if id(tensor) not in made:
                made[id(tensor)] = wrap_like(tensor, copy_to_device(tensor, device, self.tied_params_map))
            slot.store[slot.key] = made[id(tensor)]

    def _prepare(self, slots: Sequence[ModuleSlot]) -> WeightSwapper:
        groups: dict[str, list[ModuleSlot]] = {}
        for slot in slots:
            groups.setdefault(self._names[slot.name], []).append(slot)
        weights, names = self.weights_map, list(groups)
        device = torch.device("cpu") if self.execution_device is None else normalize_device(self.execution_device)
        make = getattr(weights, "bundle", None)
        bundle: Bundle = MappedBundle(weights, names, device, self.tied_params_map) if make is None else make(names, device)
        self._swapper = WeightSwapper(groups.values(), bundle, str(getattr(weights, "prefix", "")))
        return self._swapper

    def _follow_state_dicts(self, slots: Sequence[ModuleSlot]) -> None:
        owners = {id(slot.owner): (slot.name[: len(slot.name) - len(slot.key)], slot.owner) for slot in slots}
        for path, owner in owners.values():
            untyped: Any = owner
            self._handles.append(untyped.register_state_dict_post_hook(functools.partial(_fill_state_dict, self, path)))
            self._handles.append(untyped.register_load_state_dict_pre_hook(functools.partial(_refuse_load, self, path)))

    # -- at work --------------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        swapper = self._swapper
        if swapper is not None:
            swapper.leave()
            if self._stale and not swapper.in_use:
                self._swapper, self._stale = None, False

    def _decide_moves(self) -> bool:
        """Return whether inputs can be on a different device than the module: not on a machine without accelerators."""
        device = None if self.execution_device is None else normalize_device(self.execution_device)
        self._moves_inputs = (device is not None and device.type != "cpu") or torch.accelerator.is_available()
        return self._moves_inputs

    def _aligned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self._input_devices.setdefault(threading.get_ident(), []).append(find_device([args, kwargs]))
        if self.execution_device is None:
            return args, kwargs
        device = normalize_device(self.execution_device)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _input_device(self) -> torch.device | None:
        """Return where the inputs of the call that ends now were."""
        thread = threading.get_ident()
        came_from = self._input_devices.get(thread)
        device = came_from.pop() if came_from else None
        if not came_from:
            self._input_devices.pop(thread, None)
        return device


def _placeholders_of_others(module: torch.nn.Module, recurse: bool) -> set[int]:
    """Return the placeholders that other hooks of this module, or of those below, have put there."""
    found: set[int] = set()
    for inner in all_modules(module).values() if recurse else (module,):
        for hook in get_hooks(inner) if "_hf_hook" in vars(inner) else ():  # asking a module for what it does not have is slow
            names = hook._names if isinstance(hook, AlignDevicesHook) else {}
            if names:
                found.update(id(slot.tensor) for slot in find_slots(inner, hook.place_submodules) if slot.name in names)  # type: ignore[attr-defined]
    return found


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and dtype.is_floating_point else tensor


def _fill_state_dict(hook: AlignDevicesHook, path: str, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace placeholders by the weights, after `state_dict()` of a module."""
    for key in (*module._parameters, *module._buffers):
        held = state_dict.get(prefix + key)
        if path + key in hook._names and isinstance(held, torch.Tensor) and held.is_meta:
            state_dict[prefix + key] = _converted(hook.weight(path + key), held.dtype)


def _refuse_load(hook: AlignDevicesHook, path: str, module: Any, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
    """Raise if `load_state_dict()` has values for a placeholder. With `assign=True` they replace it, and stay in memory."""
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
    """Keeps a model in host memory and moves all of it to `execution_device` when it is called; it stays there until it is moved back.

    With `prev_module_hook` the model of that hook moves back to host memory first, so that models that run in turn share the device.
    """

    def __init__(
        self, execution_device: str | int | torch.device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = device_for(default_family()) if execution_device is None else execution_device

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move the model to host memory."""
        return module.to("cpu")

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the previous model back, and bring this one and its inputs."""
        device = normalize_device(self.execution_device)
        if self.prev_module_hook is not None and _is_elsewhere(self.prev_module_hook.model, torch.device("cpu")):
            self.prev_module_hook.offload()
            clear_device_cache()
        if _is_elsewhere(module, device):
            module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """A model and the hook that moves it: the handle of `cpu_offload_with_hook`.

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
        """Remove the hook."""
        remove_hook_from_module(self.model)


def _is_elsewhere(model: torch.nn.Module, device: torch.device) -> bool:
    return any(slot.tensor.device != device for slot in find_slots(model, recurse=True))
