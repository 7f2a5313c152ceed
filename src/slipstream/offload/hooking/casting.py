"""Weights stored in one type of elements and computed with in another: half the memory, or a quarter, for a cast per forward.

A `LayerwiseCastingHook` keeps the weights of a module in `storage_dtype` and converts them for each forward. Whole numbers stay what they
are. What is lost by storing is lost once, when the hook is attached: the way back and forth afterwards changes nothing.
"""

from __future__ import annotations

import re
import threading
from typing import Any, Final

import torch

from slipstream.errors import ConfigError
from slipstream.offload.hooking.hooks import ModelHook, add_hook_to_module

__all__ = ["LayerwiseCastingHook", "attach_layerwise_casting_hooks"]

_LAYERS: Final = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)


class LayerwiseCastingHook(ModelHook):
    """The weights of a module are in `storage_dtype`, and in `compute_dtype` while it runs.

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
        """The weights take the type that they are stored in."""
        self._cast(module, self.storage_dtype)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The weights take the type that is computed with."""
        with self._lock:
            self._running += 1
            self._cast(module, self.compute_dtype)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """The weights take the type that they are stored in, unless another forward still runs."""
        self.abandon(module)
        return output

    def abandon(self, module: torch.nn.Module) -> None:
        """As after a forward."""
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
    """Store the weights of linear and convolution layers below a module in one type, and compute with another.

    skip_modules_pattern: regular expressions; a module whose name one of them is found in is left alone, with all that is below it.
    skip_modules_classes: the same by class. With neither, the module gets one hook for everything that is in it.

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
        raise ConfigError(f"skip_modules_pattern={skip_modules_pattern!r} is no regular expression ({error}).") from error
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
        waiting.extend((f"{name}.{child_name}" if name else child_name, child) for child_name, child in inner.named_children())


def _checked(name: str, dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ConfigError(f"{name}={dtype!r} is no type of fractions. Write a torch.dtype such as torch.bfloat16 or torch.float8_e4m3fn.")
