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
_open_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
_disable_torch_function: Any = torch._C.DisableTorchFunction
"""While it is open, what is asked of tensors does not pass through the mode."""
_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
_LARGE: Final = 2**18
"""Elements from which on a tensor is worth a promise."""
_TENSOR: Any = torch.Tensor
_INIT_FUNCTIONS: Final = frozenset(
    {nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, nn.init.constant_}
    | {_TENSOR.uniform_, _TENSOR.normal_, _TENSOR.fill_, _TENSOR.zero_}
)
"""What fills a tensor and gives it back: on meta there is nothing to fill, and finding that out takes torch longer than all the rest."""
_SHAPE_QUERIES: Final = frozenset(
    {getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "ndim", "requires_grad", "layout", "is_leaf", "nbytes", "itemsize")}
    | {getattr(_TENSOR, name) for name in ("size", "dim", "numel", "nelement", "element_size", "stride", "is_floating_point", "__len__")}
)
"""What can be asked of a tensor without making it."""


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
        mover.keep_promises()


class _TensorMover(TorchFunctionMode):
    """What happens to the tensors that this thread makes, and when a module of it gets one."""

    def __init__(self, device: torch.device, everything: bool) -> None:
        super().__init__()
        self.device = device
        self.everything = everything
        self.thread = threading.get_ident()
        self.shadowed = False
        """Whether a context inside this one is open, which has the say then."""
        self.factories: Any = DeviceContext(device).__torch_function__
        self.moved: dict[int, tuple[torch.Tensor, weakref.ref[torch.Tensor]]] = {}
        """What became of a tensor that is still there, by identity: one that is registered twice stays one."""
        self.promises: dict[int, tuple[weakref.ref[torch.Tensor], Callable[[], torch.Tensor]]] = {}
        """Tensors on meta that stand for real ones, by identity, and how to make those."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this one is open, those around it in the same thread do nothing."""
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
            return self._promised(func, args, kwargs)
        if self.promises and func not in _SHAPE_QUERIES:
            for leaf in tree_leaves((args, kwargs)):
                self._keep(leaf)
        return func(*args, **kwargs)

    def _promised(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """A tensor of the shape that is asked for, on meta if it is large."""
        if _elements(args, kwargs) >= _LARGE and _is_plain(kwargs):
            tensor: torch.Tensor = func(*args, **{**kwargs, "device": self.device})
            if type(tensor) is torch.Tensor:
                number = id(tensor)
                gone = weakref.ref(tensor, lambda _: self.promises.pop(number, None) and None)
                self.promises[number] = gone, partial(func, *args, **kwargs)
                return tensor
        result: torch.Tensor = func(*args, **kwargs)
        return result

    def _keep(self, tensor: Any) -> None:
        """If this is a promise, make it what it stands for."""
        if id(tensor) in self.promises:
            make = self.promises.pop(id(tensor))[1]
            with self.alone():  # nothing is promised again
                real = make()
            _swap(tensor, real)

    def keep_promises(self) -> None:
        """Make all that is left: someone has kept it, outside of any parameter or buffer."""
        for tensor in [promise() for promise, _ in self.promises.values()]:
            self._keep(tensor)

    def parameter(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """The parameter to register instead; None for the one given."""
        return self._instead(parameter, _moved_parameter)

    def buffer(self, module: nn.Module, name: str, buffer: Any) -> Any:
        """The buffer to register instead; None for the one given."""
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
    """How many elements a factory function is asked for; 0 where that is not plain to see."""
    size = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
    return math.prod(size) if all(isinstance(entry, int) for entry in size) else 0


def _is_plain(kwargs: dict[str, Any]) -> bool:
    """Whether a factory function is asked for a tensor in main memory, as torch makes it."""
    if kwargs.get("out") is not None or kwargs.get("generator") is not None or kwargs.get("pin_memory"):
        return False
    return torch.device(kwargs.get("device") or "cpu").type == "cpu"


def _is_empty(tensor: Any) -> bool:
    """Whether this is a parameter that is on meta already."""
    if type(tensor) is not nn.Parameter:
        return False
    with _disable_torch_function():
        return tensor.is_meta


def _moved_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The same parameter on another device: class, attributes and `requires_grad` as they were."""
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
