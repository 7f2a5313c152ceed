"""Models built without weights: `init_empty_weights` puts parameters on the meta device, `init_on_device` on any device.

Parameters keep their class, attributes and `requires_grad`; tied weights stay tied; contexts nest; torch is unchanged afterwards. Only
the thread that entered the context is affected. With `include_buffers=False` (the default) buffers keep the values that the constructor
computes, and large factory tensors are allocated only when something needs more than their shape, so that weights for the meta device
take no memory.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves

from slipstream.errors import ConfigError

__all__ = ["init_empty_weights", "init_on_device"]

_FACTORIES: Final = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
# torch internals: the stack of open modes, to find outer contexts of this kind. Tried on torch 2.13; test_empty_weights.py
# (nested contexts) notices a change. It can go when torch exports the stack.
_open_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
# torch internals: inside of it, questions about tensors do not pass through the mode. Tried on torch 2.13; test_empty_weights.py
# notices a change. It can go when torch exports a context that disables modes too.
_disable_torch_function: Any = torch._C.DisableTorchFunction
_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
_LARGE: Final = 2**18
"""Tensors of so many elements and more are allocated only when their values are needed."""
_TENSOR: Any = torch.Tensor
_INIT_FUNCTIONS: Final = frozenset(
    {nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, nn.init.constant_}
    | {_TENSOR.uniform_, _TENSOR.normal_, _TENSOR.fill_, _TENSOR.zero_}
)
"""Functions that fill a tensor and return it. On meta there is nothing to fill, and torch takes long to find that out."""
_SHAPE_QUERIES: Final = frozenset(
    {getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "ndim", "requires_grad", "layout", "is_leaf", "nbytes", "itemsize")}
    | {getattr(_TENSOR, name) for name in ("size", "dim", "numel", "nelement", "element_size", "stride", "is_floating_point", "__len__")}
)
"""Questions that need no memory."""


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build a model whose parameters (and, with `include_buffers`, everything else too) have shapes and types but take no memory.

    >>> with init_empty_weights():
    ...     model = nn.Linear(100_000, 100_000)
    >>> model.weight.is_meta, model.weight.shape
    (True, torch.Size([100000, 100000]))
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Build a model whose parameters (and, with `include_buffers`, everything else too) are on a device.

    >>> with init_on_device("cpu"):
    ...     model = nn.Linear(2, 2)
    >>> model.weight.device
    device(type='cpu')
    """
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f'init_on_device({device!r}): {reason}. Write a device of torch, such as "cpu", "meta" or 0.') from None
    mover = _TensorMover(where, bool(include_buffers))
    with ExitStack() as stack:
        stack.enter_context(mover.alone())
        stack.callback(register_module_parameter_registration_hook(mover.parameter).remove)
        stack.callback(register_module_buffer_registration_hook(mover.buffer).remove)
        stack.enter_context(mover)
        yield
        mover.make_deferred()


class _TensorMover(TorchFunctionMode):
    """Moves the tensors that this thread makes, and those that its modules register."""

    def __init__(self, device: torch.device, everything: bool) -> None:
        super().__init__()
        self.device = device
        self.everything = everything
        self.thread = threading.get_ident()
        self.shadowed = False
        """Whether a context inside this one is open, which decides then."""
        # torch internals: what `with torch.device(...)` enters. Tried on torch 2.13; test_empty_weights.py notices a change.
        self.factories: Any = DeviceContext(device).__torch_function__
        self.moved: dict[int, tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = {}
        """The moved tensor of each living one, by identity: one that is registered twice stays one."""
        self.deferred: dict[int, tuple[weakref.ref[torch.Tensor], Callable[[], torch.Tensor]]] = {}
        """Deferred tensors on meta, by identity, and how to make the real ones."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Disable outer contexts of the same thread inside of the block."""
        around = [mode for mode in _open_modes() if isinstance(mode, _TensorMover) and not mode.shadowed]
        for mode in around:
            mode.shadowed = True
        try:
            yield
        finally:
            for mode in around:
                mode.shadowed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.shadowed:
            return func(*args, **kwargs)
        if func in _INIT_FUNCTIONS and _is_empty(filled := args[0] if args else kwargs.get("tensor")):
            return filled
        if self.everything:
            return self.factories(func, types, args, kwargs)
        if func in _FACTORIES and self.device.type == "meta":
            return self._defer(func, args, kwargs)
        if self.deferred and func not in _SHAPE_QUERIES:
            for leaf in tree_leaves((args, kwargs)):
                self._keep(leaf)
        return func(*args, **kwargs)

    def _defer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Return a tensor of the requested shape, deferred on meta if it is large."""
        if _elements(args, kwargs) >= _LARGE and _is_plain(kwargs):
            tensor: torch.Tensor = func(*args, **{**kwargs, "device": self.device})
            if type(tensor) is torch.Tensor:
                number = id(tensor)
                gone = weakref.ref(tensor, lambda _: self.deferred.pop(number, None) and None)
                self.deferred[number] = gone, partial(func, *args, **kwargs)
                return tensor
        result: torch.Tensor = func(*args, **kwargs)
        return result

    def _keep(self, tensor: Any) -> None:
        """Make a deferred tensor real."""
        if id(tensor) in self.deferred:
            make = self.deferred.pop(id(tensor))[1]
            with self.alone():  # nothing is promised again
                real = make()
            _swap(tensor, real)

    def make_deferred(self) -> None:
        """Make all that is left real: it is kept outside of any parameter or buffer."""
        for tensor in [reference() for reference, _ in self.deferred.values()]:
            self._keep(tensor)

    def parameter(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """Return the parameter to register instead; None for the one given."""
        return self._instead(parameter, _moved_parameter)

    def buffer(self, module: nn.Module, name: str, buffer: Any) -> Any:
        """Return the buffer to register instead; None for the one given."""
        if self.everything:
            return self._instead(buffer, torch.Tensor.to)
        if not self.shadowed and threading.get_ident() == self.thread:
            self._keep(buffer)
        return None

    def _instead(self, tensor: Any, move: Any) -> Any:
        if tensor is None or self.shadowed or threading.get_ident() != self.thread:
            return None
        with _disable_torch_function():
            if tensor.device == self.device or tensor.is_meta:  # there is nothing to take from meta
                return None
        number = id(tensor)
        if number not in self.moved:
            with _disable_torch_function() if type(tensor) in (torch.Tensor, nn.Parameter) else nullcontext():
                instead = move(tensor, self.device)
            self.moved[number] = instead, weakref.ref(tensor, lambda _: self.moved.pop(number, None) and None)
        return self.moved[number][0]


def _elements(args: Any, kwargs: dict[str, Any]) -> int:
    """Return the number of elements of a factory call; 0 where it is not evident."""
    size = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
    return math.prod(size) if all(isinstance(length, int) for length in size) else 0


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Return whether a factory call makes an ordinary tensor in main memory."""
    if kwargs.get("out") is not None or kwargs.get("generator") is not None or kwargs.get("pin_memory"):
        return False
    return torch.device(kwargs.get("device") or "cpu").type == "cpu"


def _is_empty(tensor: Any) -> bool:
    """Return whether a parameter is on meta already."""
    if type(tensor) is not nn.Parameter:
        return False
    with _disable_torch_function():
        return tensor.is_meta


def _moved_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return the parameter on another device, with its class, attributes and `requires_grad`."""
    kind: Any = type(parameter)
    if issubclass(kind, UninitializedParameter):
        moved: Any = kind(requires_grad=parameter.requires_grad, device=device, dtype=parameter.dtype)
    elif kind is nn.Parameter:
        moved = nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
    else:
        data = parameter.detach().to(device)
        same = type(data) is kind  # a class that keeps itself through operations moves by its own rules
        moved = data if same else data.as_subclass(kind)
        moved.requires_grad_(parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(moved, name, value)
    result: nn.Parameter = moved
    return result
