"""Building models without their weights: `init_empty_weights` puts parameters on the meta device, `init_on_device` on any device.

What this promises: parameters keep their class, their attributes and `requires_grad`; weights that are tied stay tied; whatever happens
inside, afterwards torch is as it was; contexts can be nested, where the inner one wins. Only the thread that entered the context is
affected: the hooks that torch runs when a module gets a parameter ask for the thread, and the mode for factory functions is a thread's
own. What it costs: a parameter goes to the device before it is initialised, so initialising costs nothing on meta.

With `include_buffers=False` (the default) buffers that a constructor computes keep their values, on the device where they were made.
With `include_buffers=True` everything that factory functions make is on the device from the start.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["init_empty_weights", "init_on_device"]


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Build a model whose parameters (and, with `include_buffers`, everything else too) have shapes and types but take no memory.

    >>> with init_empty_weights():
    ...     model = nn.Linear(1000, 1000)
    >>> model.weight.is_meta, model.weight.shape
    (True, torch.Size([1000, 1000]))
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
    mover = _Mover(torch.device(device))
    with ExitStack() as stack:
        if include_buffers:
            stack.enter_context(mover.device)
            stack.callback(register_module_buffer_registration_hook(mover.buffer).remove)
        stack.callback(register_module_parameter_registration_hook(mover.parameter).remove)
        yield


class _Mover:
    """What happens when a module of this thread gets a tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.thread = threading.get_ident()
        self.moved = WeakTensorKeyDictionary()
        """What became of a tensor, so that one that is registered twice stays one."""

    def parameter(self, module: nn.Module, name: str, parameter: Any) -> Any:
        """The parameter to register instead; None for the one given."""
        return self._instead(parameter, _moved_parameter)

    def buffer(self, module: nn.Module, name: str, buffer: Any) -> Any:
        """The buffer to register instead; None for the one given."""
        return self._instead(buffer, torch.Tensor.to)

    def _instead(self, tensor: Any, move: Any) -> Any:
        if tensor is None or tensor.device == self.device or threading.get_ident() != self.thread:
            return None
        if tensor not in self.moved:
            self.moved[tensor] = move(tensor, self.device)
        return self.moved[tensor]


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
