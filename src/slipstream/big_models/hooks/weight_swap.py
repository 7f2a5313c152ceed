"""Placeholders for offloaded weights, and `WeightSwapper`, which swaps them for the weights while a module runs.

An offloaded module holds meta tensors of the same shape, dtype, class and `requires_grad`. `enter` takes the weights from a `Bundle` and
puts them in place, `leave` restores the placeholders. Entries are counted under a lock, so nested calls and calls from several threads
swap once. An operation that mixes a placeholder with real tensors gets its values for that operation, with a warning, or raises; it never
computes with uninitialised memory. Changes to weights are not written back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch

from slipstream.errors import ConfigError, StateError
from slipstream.logging import get_logger

__all__ = [
    "Bundle", "MappedBundle", "ModuleSlot", "ModuleTensor", "NAME_ATTRIBUTE", "OWNER_ATTRIBUTE", "PLAIN_TYPES", "PlaceholderBuffer",
    "PlaceholderOwner", "PlaceholderParameter", "VALUE_ATTRIBUTE", "WeightSwapper", "copy_to_device", "find_slots", "find_swappers",
    "is_placeholder", "make_meta_like", "make_placeholder", "normalize_device", "share_memory", "wrap_like",
]


OWNER_ATTRIBUTE: Final = "_slipstream_keeper"
"""The attribute of a placeholder that returns the `PlaceholderOwner` of its values, or None."""
NAME_ATTRIBUTE: Final = "_slipstream_name"
"""The attribute of a placeholder that names its weight."""


class PlaceholderOwner(Protocol):
    """Loads the values of an offloaded weight."""

    def values_of(self, placeholder: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Return the values, inside of the block."""


def _apply_operation(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    # torch internals: the public DisableTorchFunctionSubclass context. Without it `is_meta` below would come back to this function.
    # Tried on torch 2.13; tests/big_models/test_weight_store.py notices a change. It can go when torch exports the name.
    with torch._C.DisableTorchFunctionSubclass():
        everything = list(_tensors([*args, *kwargs.values()]))
        offloaded = [tensor for tensor in everything if isinstance(tensor, (PlaceholderParameter, PlaceholderBuffer)) and tensor.is_meta]
        if offloaded and any(not tensor.is_meta and tensor.dim() for tensor in everything):
            return _with_values(function, args, kwargs, offloaded)
        if len(offloaded) > 1 and _writes(getattr(function, "__name__", "")):  # torch would compute shapes, and nothing be written
            raise StateError(_placeholder_error(offloaded[0], "written to"))
        result = function(*args, **kwargs)
        if function in torch.overrides.get_default_nowrap_functions() or not isinstance(result, torch.Tensor) or not result.is_meta:
            return result
        return result if isinstance(result, (PlaceholderParameter, PlaceholderBuffer)) else result.as_subclass(PlaceholderBuffer)


_IN_PLACE: Final = frozenset(f"__i{operator}__" for operator in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow"))


def _writes(name: str) -> bool:
    """Return whether a method of tensors computes in place, by its name."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _with_values(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], offloaded: Sequence[torch.Tensor]) -> Any:
    """Run the operation with the weights in place of their placeholders."""
    name = getattr(function, "__name__", "")
    if name in ("__set__", "__setitem__") or _writes(name):
        raise StateError(_placeholder_error(offloaded[0], "written to"))
    with ExitStack() as stack:
        values: dict[int, torch.Tensor] = {}
        for tensor in offloaded:
            keeper: PlaceholderOwner | None = getattr(tensor, OWNER_ATTRIBUTE, lambda: None)()
            if keeper is None:
                raise StateError(_placeholder_error(tensor, "used"))
            if id(tensor) not in values:
                values[id(tensor)] = stack.enter_context(keeper.values_of(tensor))
        return function(*_replaced(args, values), **{key: _replaced([value], values)[0] for key, value in kwargs.items()})


def _replaced(given: Iterable[Any], values: Mapping[int, torch.Tensor]) -> list[Any]:
    return [type(value)(_replaced(value, values)) if type(value) in (list, tuple) else values.get(id(value), value) for value in given]


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _placeholder_error(tensor: torch.Tensor, done: str) -> str:
    name = getattr(tensor, NAME_ATTRIBUTE, "a tensor made of an offloaded weight")
    return (
        f"{name} is offloaded, and was {done}: its values are loaded only while its block runs. Call that block as a whole; or load the "
        "weights with `with slipstream.utils.align_module_device(module):`; or, if a module uses the weights of its children directly, "
        "name its class in preload_module_classes when you dispatch the model."
    )


class PlaceholderBuffer(torch.Tensor):
    """The placeholder of a buffer, and of what is computed from placeholders alone."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _apply_operation(func, args, kwargs or {})


class PlaceholderParameter(torch.nn.Parameter):
    """The placeholder of a Parameter."""

    __torch_function__ = PlaceholderBuffer.__torch_function__


def make_placeholder(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Turn a meta tensor into a placeholder for the weight `name`, in place; other tensor subclasses are not changed.

    >>> torch.ones(2, 3) @ make_placeholder(torch.empty(3, 3, device="meta"), "head.weight")
    Traceback (most recent call last):
    slipstream.errors.StateError: head.weight is offloaded, and was used: its values are loaded only while ...
    """
    if type(tensor) is torch.nn.Parameter:  # changed in place: others may hold it, and ties are known by identity
        tensor.__class__ = PlaceholderParameter
    elif type(tensor) is torch.Tensor:
        tensor.__class__ = PlaceholderBuffer
    if is_placeholder(tensor):
        setattr(tensor, NAME_ATTRIBUTE, name)
    return tensor


def is_placeholder(tensor: Any) -> bool:
    """Return whether a tensor is the placeholder of an offloaded one."""
    return isinstance(tensor, (PlaceholderParameter, PlaceholderBuffer))


PLAIN_TYPES: Final = (torch.Tensor, torch.nn.Parameter)
_PLACEHOLDER_ATTRIBUTE: Final = "_slipstream_parked"
VALUE_ATTRIBUTE: Final = "_slipstream_made"
"""The attribute of a tensor that keeps the Parameter made of it, with the address of its memory."""


class ModuleSlot(NamedTuple):
    """One place of a tensor in a tree of modules."""

    name: str
    store: dict[str, Any]
    """`_parameters` or `_buffers` of the module that holds it."""
    key: str
    tensor: torch.Tensor
    owner: torch.nn.Module
    persistent: bool

    @property
    def is_parameter(self) -> bool:
        return self.store is self.owner._parameters


@dataclass(eq=False)
class ModuleTensor:
    """A tensor of a model with all its slots, the source of its values, and its target device."""

    slots: list[ModuleSlot]
    offloaded: bool = False
    target: torch.device | None = None
    """Its device; None means the disk."""
    value: torch.Tensor | None = None
    entry: Mapping[str, Any] | None = None
    """The index entry of its values in a file, if they are not in `value`."""

    @property
    def name(self) -> str:
        return self.slots[0].name

    @property
    def held(self) -> torch.Tensor:
        """The tensor in the model now."""
        return self.slots[0].tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the value is written to a file."""
        return self.held.dtype if self.value is None else self.value.dtype

    @property
    def nbytes(self) -> int:
        return self.held.numel() * self.dtype.itemsize

    @property
    def is_missing(self) -> bool:
        return self.entry is None and self.value is None

    def put(self, tensor: torch.Tensor) -> None:
        """Set a tensor in every slot."""
        for slot in self.slots:
            slot.store[slot.key] = tensor


def find_slots(module: torch.nn.Module, recurse: bool) -> Iterator[ModuleSlot]:
    """Yield every slot of a parameter or buffer: tied ones more than once, modules once.

    >>> [slot.name for slot in find_slots(torch.nn.Sequential(torch.nn.Linear(2, 2)), recurse=True)]
    ['0.weight', '0.bias']
    """
    waiting, seen = [("", module)], {id(module)}
    while waiting:
        prefix, owner = waiting.pop()
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                yield ModuleSlot(prefix + key, owner._parameters, key, parameter, owner, True)
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                yield ModuleSlot(prefix + key, owner._buffers, key, buffer, owner, key not in owner._non_persistent_buffers_set)
        if recurse and owner._modules:
            inner = [(f"{prefix}{name}.", child) for name, child in owner._modules.items() if child is not None]
            inner = [(name, child) for name, child in inner if id(child) not in seen]
            seen.update(id(child) for _, child in inner)
            waiting.extend(reversed(inner))


def normalize_device(device: Any) -> torch.device:
    """Return a torch device as tensors name theirs: "cpu:0" is "cpu", and an accelerator without a number is the current one.

    >>> normalize_device("cpu:0")
    device(type='cpu')
    """
    made = torch.device(device)
    if made.type == "cpu":
        return torch.device("cpu")
    if ":" not in str(made) and torch.accelerator.is_available():
        present = torch.accelerator.current_accelerator()
        if present is not None and present.type == made.type:
            return torch.device(made.type, torch.accelerator.current_device_index())
    return made


def wrap_like(like: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return values in the form of `like`: a Parameter of its class, with its attributes and `requires_grad`, or a plain buffer.

    >>> wrap_like(torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False), torch.ones(2))
    Parameter containing:
    tensor([1., 1.])
    """
    if not isinstance(like, torch.nn.Parameter):
        return data.detach()
    needs = like.requires_grad and (data.is_floating_point() or data.is_complex())
    with torch.inference_mode(False):
        if type(like) is torch.nn.Parameter or is_placeholder(like) or type(data) not in PLAIN_TYPES:
            made = torch.nn.Parameter(data.detach(), requires_grad=needs)
        else:
            # torch internals: the only way to a Parameter subclass whose constructor takes other arguments. Tried on torch 2.13;
            # tests/big_models/test_forward_hooks.py notices a change.
            made = torch.Tensor._make_subclass(type(like), data.detach(), needs)
    vars(made).update(
        {
            name: value
            for name, value in vars(like).items()
            if name not in (VALUE_ATTRIBUTE, _PLACEHOLDER_ATTRIBUTE, OWNER_ATTRIBUTE, NAME_ATTRIBUTE)
        }
    )
    return made


def make_meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor without values, on the meta device.

    >>> make_meta_like(torch.ones(2, dtype=torch.float16))
    tensor(..., device='meta', size=(2,), dtype=torch.float16)
    """
    if tensor.is_meta:
        return tensor
    known: torch.Tensor | None = getattr(tensor, _PLACEHOLDER_ATTRIBUTE, None)  # of another block with the same, tied weight
    if known is None or known.dtype is not tensor.dtype or known.requires_grad is not tensor.requires_grad:
        with torch.inference_mode(False), torch.no_grad():
            known = wrap_like(tensor, tensor.detach().to("meta"))
        setattr(tensor, _PLACEHOLDER_ATTRIBUTE, known)
    return known


def share_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share memory."""
    if tensor.is_meta or other.is_meta or type(tensor) not in PLAIN_TYPES or type(other) not in PLAIN_TYPES:
        return tensor is other
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


_TiedTensors = MutableMapping[int, dict[torch.device, torch.Tensor]]


def copy_to_device(tensor: torch.Tensor, device: torch.device, tied: _TiedTensors | None, **options: Any) -> torch.Tensor:
    """Return a tensor on a device; one that `tied` (address -> device -> copy) knows has one copy per device."""
    copies = tied.get(tensor.data_ptr()) if tied and not tensor.is_meta else None
    if copies is not None and device in copies:
        return copies[device]
    with torch.inference_mode(False), torch.no_grad():
        moved = tensor.detach().to(device=device, **options)
    if copies is not None:
        copies[device] = moved
    return moved


class Bundle(Protocol):
    """The tensors of one module, from any source.

    Three methods are optional. `arrive` is called before each use, also in threads that find the tensors in place, and may wait.
    `restore` is called when something wrote into the tensors, so that they have their values again next time. `recall` is called when a
    backward pass reaches the module's outputs, and will use the tensors again.
    """

    def take(self) -> Sequence[torch.Tensor]:
        """Return the tensors on the execution device, in the order of the names; valid until `give_back`."""

    def give_back(self) -> None:
        """Release the tensors. What an autograd graph still holds stays valid."""


class MappedBundle:
    """Tensors looked up by name in any mapping, and moved to the device if they are elsewhere.

    >>> bundle = MappedBundle({"weight": torch.ones(2)}, ["weight"], torch.device("cpu"))
    >>> bundle.take()
    [tensor([1., 1.])]
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], names: Sequence[str], device: torch.device, tied: _TiedTensors | None = None
    ) -> None:
        self._weights = weights
        self._names = list(names)
        self._device = device
        self._tied = tied if tied is not None else {}
        self._shared: list[int] = []
        self.keeps_changes = True
        """Whether writes into the tensors last, as they are those of the mapping itself; False once one was copied."""

    def take(self) -> list[torch.Tensor]:
        """Return the tensors of the mapping, copied where they are on another device."""
        weights, device = self._weights, self._device
        found = [weights[name] for name in self._names]
        return [tensor if tensor.device == device else self._moved(tensor) for tensor in found]

    def give_back(self) -> None:
        """Drop copies on the device, also those that other modules share."""
        while self._shared:
            self._tied[self._shared.pop()].pop(self._device, None)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        self.keeps_changes = False
        if self._tied and not tensor.is_meta and self._device not in self._tied.get(tensor.data_ptr(), {self._device: tensor}):
            self._shared.append(tensor.data_ptr())
        return copy_to_device(tensor, self._device, self._tied)


_InstalledValue = tuple[torch.Tensor, int, torch.dtype, bool]
"""The value in place, its address (0: not watched), the dtype of the placeholder that it was made for, and whether it is trained."""


class _SwapperReference:
    """The swapper of a placeholder. Copies of a model get their own when they run."""

    __slots__ = ("_swapper",)

    def __init__(self, swapper: WeightSwapper | None = None) -> None:
        self._swapper = None if swapper is None else weakref.ref(swapper)

    def __reduce__(self) -> tuple[type[_SwapperReference], tuple[()]]:
        return (_SwapperReference, ())

    def __call__(self) -> WeightSwapper | None:
        return None if self._swapper is None else self._swapper()


def find_swappers(module: torch.nn.Module) -> list[WeightSwapper]:
    """Return the swappers of a module's own tensors, whichever module their hooks are on; each once."""
    keepers = [getattr(slot.tensor, OWNER_ATTRIBUTE, None) for slot in find_slots(module, recurse=False)]
    found = [keeper() for keeper in keepers if isinstance(keeper, _SwapperReference)]
    return list({id(swapper): swapper for swapper in found if swapper is not None}.values())


class _SwappedTensor:
    """An offloaded tensor: its first slot with its placeholder, and its other slots."""

    __slots__ = ("also", "first", "name")

    def __init__(self, slots: Sequence[ModuleSlot]) -> None:
        self.name = slots[0].name
        self.first = (slots[0].store, slots[0].key, make_meta_like(slots[0].tensor))
        self.also = tuple((slot.store, slot.key) for slot in slots[1:])
        self.put(self.first[2])

    def put(self, tensor: torch.Tensor) -> None:
        """Set a tensor in every slot."""
        self.first[0][self.first[1]] = tensor
        for store, key in self.also:
            store[key] = tensor

    def accept_placeholder(self) -> torch.Tensor:
        """Accept another placeholder in the slot; real values that someone put there are left alone."""
        store, key, placeholder = self.first
        now = store.get(key)
        if now is not None and now.is_meta:
            self.first = (store, key, now)
        return self.first[2]


class WeightSwapper:
    """Swaps the weights of one module in and out.

    `groups`: the slots of each tensor (several where it is tied); the bundle gives one tensor for each group, in this order.

    >>> linear = torch.nn.Linear(2, 2, bias=False)
    >>> weights = {"weight": linear.weight.detach()}
    >>> swapper = WeightSwapper([list(find_slots(linear, recurse=False))], MappedBundle(weights, ["weight"], torch.device("cpu")))
    >>> linear.weight.is_meta, swapper.enter(), linear.weight.is_meta, swapper.leave(), linear.weight.is_meta
    (True, None, False, None, True)
    """

    def __init__(self, groups: Iterable[Sequence[ModuleSlot]], bundle: Bundle, prefix: str = "") -> None:
        self._slots = [_SwappedTensor(slots) for slots in groups]
        reference = _SwapperReference(self)
        for slot in self._slots:
            setattr(make_placeholder(slot.first[2], f"{prefix}{slot.name}"), OWNER_ATTRIBUTE, reference)
        self._bundle = bundle
        self._recall = getattr(bundle, "recall", None)
        self._arrive = getattr(bundle, "arrive", None)
        self._lock = threading.RLock()
        self._count = 0
        self._held = False
        self._seen = False
        self._now: list[_InstalledValue] = []
        self._versions: list[int] = []
        self._tensors: Sequence[torch.Tensor] = ()
        self._prefix = prefix
        self._warned: set[str] = getattr(getattr(bundle, "store", None), "warned", set())
        """What was warned of, once for all blocks that have their weights from one store."""

    @property
    def in_use(self) -> bool:
        """Whether the weights are in place."""
        return self._held

    def enter(self, counted: bool = True) -> None:
        """Put the weights in place, unless they are. An uncounted entry lasts until the next `leave`, if nothing else is running."""
        if self._arrive is not None:  # outside of the lock: it may wait for other threads that come to this module too
            self._arrive()
        with self._lock:
            if not self._held:
                # torch internals: placeholders are looked at here, not computed with. torch 2.13; test_weight_store.py notices a change.
                with torch._C.DisableTorchFunctionSubclass():
                    self._put_in_place(self._bundle.take())
                self._held = True
            if counted or self._count:
                self._count += 1

    def leave(self) -> None:
        """Restore the placeholders after the last entry; extra calls have no effect."""
        with self._lock:
            if self._count:
                self._count -= 1
            if self._held and not self._count:
                self._held = False
                self._restore_placeholders()

    def watch(self, output: Any) -> None:
        """Register a hook on the output that brings the weights back for a backward pass."""
        if self._recall is None:
            return
        if isinstance(output, torch.Tensor):
            if output.requires_grad:
                output.register_hook(self._recalled)  # type: ignore[no-untyped-call]
        elif isinstance(output, (list, tuple)):
            for part in output:
                self.watch(part)
        elif isinstance(output, Mapping):
            for part in output.values():
                self.watch(part)

    def _recalled(self, _: torch.Tensor) -> None:
        if self._recall is not None:
            self._recall()

    @contextmanager
    def values_of(self, placeholder: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return the values of one of its placeholders, for an operation outside of the module."""
        slot = next(slot for slot in self._slots if slot.first[2] is placeholder)
        self._warn_once(
            f"outside {self._prefix}{slot.name}",
            f"{self._prefix}{slot.name} was used outside of its offloaded block, and is loaded for single operations, which is slow. "
            "Call that block as a whole; or, if a module uses the weights of its children directly, name its class in "
            "preload_module_classes when you dispatch the model.",
        )
        with self._lock:
            tensors = self._bundle.take()
            try:
                yield self._make(slot, tensors[self._slots.index(slot)], slot.first[2].requires_grad)[0]
            finally:
                self._bundle.give_back()

    def close(self) -> None:
        """Restore the placeholders at once, even if the module is running."""
        with self._lock:
            self._count = 0
            if self._held:
                self._held = False
                self._restore_placeholders()

    def uses_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares memory with one in place now."""
        return any(share_memory(made[0], tensor) for made in self._now)

    def _put_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        now: list[_InstalledValue] = []
        versions: list[int] = []
        graph = torch.is_grad_enabled()
        try:
            if not self._seen:
                self._check(tensors)
            for slot, tensor in zip(self._slots, tensors, strict=True):
                store, key, placeholder = slot.first
                alone = False
                if (held := store.get(key)) is not placeholder:
                    placeholder = slot.accept_placeholder()
                    alone = held is None or not held.is_meta  # real values of the caller, such as those of torch.func.functional_call
                made: _InstalledValue | None = getattr(tensor, VALUE_ATTRIBUTE, None)
                # Without a graph no weight is trained: autocast would keep a converted copy of each one that is, until its block ends.
                trained = graph and placeholder.requires_grad
                if made is None or made[2] is not placeholder.dtype or made[3] is not trained:
                    made = self._make(slot, tensor, trained)
                now.append(made)
                versions.append(made[0]._version if made[1] else 0)
                if alone:
                    continue
                store[key] = made[0]
                if slot.also:
                    slot.put(made[0])
        except BaseException:
            for slot, made in zip(self._slots, now, strict=False):
                if slot.first[0].get(slot.first[1]) is made[0]:
                    slot.put(slot.first[2])
            self._bundle.give_back()
            raise
        self._now, self._versions, self._tensors = now, versions, tensors

    def _restore_placeholders(self) -> None:
        for slot, (value, address, _, _), version in zip(self._slots, self._now, self._versions, strict=True):
            if address and (value._version != version or value.data_ptr() != address):
                self._changed(slot, value, address)
            store, key, placeholder = slot.first
            if store.get(key) is not value:
                slot.accept_placeholder()
            elif slot.also:
                slot.put(placeholder)
            else:
                store[key] = placeholder
        self._now, self._tensors = [], ()
        self._bundle.give_back()

    def _make(self, slot: _SwappedTensor, tensor: torch.Tensor, trained: bool) -> _InstalledValue:
        """Return the value for a slot made of this tensor; it is kept with the tensor. `trained`: whether it requires gradients."""
        placeholder = slot.first[2]
        wanted, converted = placeholder.dtype, tensor
        if tensor.dtype is not wanted and tensor.is_floating_point() and wanted.is_floating_point:
            with torch.inference_mode(False), torch.no_grad():
                converted = tensor.detach().to(wanted)
        value = wrap_like(placeholder, converted)
        if not trained:
            value.requires_grad_(False)
        if value.requires_grad and value.is_leaf:
            value.register_post_accumulate_grad_hook(partial(self._drop_gradient, slot.name))  # type: ignore[no-untyped-call]
        watched = type(value) in PLAIN_TYPES and not value.is_inference() and not value.is_meta
        made = (value, value.data_ptr() if watched else 0, wanted, trained)
        if converted is tensor:
            setattr(tensor, VALUE_ATTRIBUTE, made)
        return made

    def _changed(self, slot: _SwappedTensor, value: torch.Tensor, address: int) -> None:
        same = value.data_ptr() == address
        if same and getattr(self._bundle, "keeps_changes", False):
            return
        for tensor in self._tensors:
            made = getattr(tensor, VALUE_ATTRIBUTE, None)
            if made is not None and made[0] is value:  # it may stand for other values now
                delattr(tensor, VALUE_ATTRIBUTE)
        if same and (restore := getattr(self._bundle, "restore", None)) is not None:
            restore()
        if not same and value.dtype is not slot.first[2].dtype:  # converted for this forward, by a hook that casts: nothing is lost
            return
        self._warn_once(
            "changed",
            f"{self._prefix}{slot.name} was written to while its module ran, and the change is lost: offloaded weights are read again "
            "for every forward. Keep this module in memory (in device_map), or assign the new values to the hook's weights_map.",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            get_logger(__name__).warning(message)

    def _drop_gradient(self, name: str, parameter: torch.Tensor) -> None:
        parameter.grad = None
        self._warn_once(
            "gradient",
            f"A gradient reached the offloaded weight {self._prefix}{name} and was dropped: offloaded weights are not trained. Freeze "
            "them (requires_grad_(False)) and train adapters beside them, or keep this module in memory (in device_map).",
        )

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != len(self._slots):
            raise StateError(f"A bundle of {len(self._slots)} weights returned {len(tensors)} tensors.")
        for slot, tensor in zip(self._slots, tensors, strict=True):
            if tensor.shape != slot.first[2].shape:
                raise ConfigError(
                    f"The offloaded weights have {self._prefix}{slot.name} with shape {list(tensor.shape)}, but the module "
                    f"expects {list(slot.first[2].shape)}. Give the weights of this model (state_dict, weights_map or offload_index)."
                )
        self._seen = True
