"""Autocast: installed once on a model, or as a context for code outside of a model.

`install_autocast` replaces the model's `forward`, and `remove_autocast` restores it. The model keeps its class, state-dict keys and
signature; a deep copy uses its own weights; a pickle of the model contains nothing of this library; `torch.compile` traces through. A
shallow copy, and a replica of `torch.nn.DataParallel`, shares the forward and so the weights of the model that it was made from.
`transfer_hooks` moves the hooks of a module to the one that takes its place.
"""

from __future__ import annotations

import copy
import inspect
import operator
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slipstream.distributed.pytree import convert_to_fp32
from slipstream.distributed.state import AcceleratorState
from slipstream.errors import ConfigError, StateError
from slipstream.precision.policy import AutocastKwargs, PrecisionPolicy, make_policy

__all__ = [
    "autocast_context", "get_mixed_precision_context_manager", "install_autocast", "remove_autocast", "transfer_hooks",
]


def install_autocast(model: torch.nn.Module, policy: PrecisionPolicy, device_type: str, handler: AutocastKwargs | None = None) -> None:
    """Make every pass of the model compute as the policy says. Installing again replaces what was installed.

    >>> from slipstream.precision.policy import make_policy
    >>> model = torch.nn.Linear(2, 2)
    >>> install_autocast(model, make_policy("bf16", outputs_to_fp32=False), "cpu")
    >>> model(torch.ones(1, 2)).dtype, type(model).__name__, sorted(model.state_dict())
    (torch.bfloat16, 'Linear', ['bias', 'weight'])
    >>> remove_autocast(model)
    >>> model(torch.ones(1, 2)).dtype
    torch.float32
    """
    remove_autocast(model)
    upcasts = policy.output is torch.float32
    if policy.autocast_dtype is None and not upcasts:
        return
    before = vars(model).get("forward")
    model.forward = _AutocastForward(model, before, policy, device_type, handler or AutocastKwargs(), upcasts)


def remove_autocast(model: torch.nn.Module) -> None:
    """Remove installed autocast from a model; one without stays as it is."""
    forward = _find_autocast_forward(model)
    if forward is None:
        return
    if forward.before is None:
        del model.forward
    else:
        model.forward = forward.before


def autocast_context(policy: PrecisionPolicy, device_type: str, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
    """Return a block that computes as the policy says, for code outside of a prepared model, such as a loss.

    >>> from slipstream.precision.policy import make_policy
    >>> weight = torch.ones(2, 2)
    >>> with autocast_context(make_policy("bf16"), "cpu"):
    ...     inside = weight @ weight
    >>> inside.dtype
    torch.bfloat16
    """
    handler = handler or AutocastKwargs()
    if policy.autocast_dtype is None and handler.enabled:
        return nullcontext()
    return torch.autocast(device_type, dtype=policy.autocast_dtype, enabled=handler.enabled, cache_enabled=handler.cache_enabled)


def _find_autocast_forward(model: torch.nn.Module) -> _AutocastForward | None:
    forward = vars(model).get("forward")
    return forward if isinstance(forward, _AutocastForward) else None


class _AutocastForward:
    """The forward of one module, run in autocast.

    It holds the module weakly: the module holds it, and a cycle would keep the weights until the next collection of garbage.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        before: Callable[..., Any] | None,
        policy: PrecisionPolicy,
        device_type: str,
        handler: AutocastKwargs,
        upcasts: bool,
    ) -> None:
        self.module = weakref.ref(module)
        self.before = before  # a forward that stood in the instance already
        self.policy = policy
        self.upcasts = upcasts
        self.device_type = device_type
        self.dtype = policy.autocast_dtype
        self.casts = self.dtype is not None
        self.enabled = handler.enabled
        self.cache_enabled = handler.cache_enabled
        self.__doc__ = (before or type(module).forward).__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.casts:
            return _to_fp32(self.__wrapped__(*args, **kwargs))
        module, before = self._live_module(), self.before
        with torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled):
            outputs = type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)
        return _to_fp32(outputs) if self.upcasts else outputs

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        if self.before is not None:
            return self.before
        module = self._live_module()
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]

    def _live_module(self) -> torch.nn.Module:
        module = self.module()
        if module is None:
            raise StateError(
                "the model that this forward belongs to is gone: it was called through a shallow copy, or kept apart from the model. "
                "Keep the model, or copy it with copy.deepcopy."
            )
        return module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    @property
    def __name__(self) -> str:
        return "forward"

    def __repr__(self) -> str:
        return f"<forward of {type(self.module()).__name__} in {self.policy.mixed_precision}>"

    def __reduce__(self) -> Any:
        """Unpickle as the forward that stood here before autocast."""
        if self.before is not None:
            return operator.getitem, ((self.before,), 0)
        return getattr, (self._live_module(), "forward")  # while the module is being read its class has one, and the instance none yet

    def __deepcopy__(self, memo: dict[int, Any]) -> _AutocastForward:
        module = self.module()
        copied = memo.get(id(module), module)  # the model is being copied, or the forward alone
        forward = type(self).__new__(type(self))
        vars(forward).update(
            vars(self), module=(lambda: None) if copied is None else weakref.ref(copied), before=copy.deepcopy(self.before, memo)
        )
        return forward


def _to_fp32(outputs: Any) -> Any:
    """Convert as `convert_to_fp32`; the usual kinds of outputs are handled here in a way that the compiler can follow."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in _HALF else outputs
    if type(outputs) is dict:
        return {key: _to_fp32(value) for key, value in outputs.items()}
    if type(outputs) in (tuple, list):
        return type(outputs)([_to_fp32(value) for value in outputs])
    return convert_to_fp32(outputs)


_HALF = (torch.float16, torch.bfloat16)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return autocast in the precision that the launcher or the environment gave, if `native_amp`; else a block in which nothing changes.

    >>> with get_mixed_precision_context_manager():
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    return autocast_context(make_policy(state.mixed_precision), state.device.type, autocast_kwargs)


def transfer_hooks(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Move the hooks of the old module to the new one, in the same dictionaries, so that their handles still remove them.

    >>> old, new = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> handle = old.register_forward_hook(lambda module, inputs, output: print("called"))
    >>> transfer_hooks(old, new)
    >>> _ = new(torch.ones(1))
    called
    >>> handle.remove()
    >>> _ = new(torch.ones(1))
    """
    # torch internals: hooks are dictionaries in attributes with "_hooks" in their names (torch 2.13), and torch has no way to move them.
    # tests/parallel/test_compile.py and tests/precision/test_fp8.py notice a change.
    for name, hooks in list(vars(old).items()):
        if "_hooks" not in name or not isinstance(hooks, dict) or not hooks:
            continue
        if vars(new).get(name):
            raise ConfigError(
                f"hooks ({name.strip('_')}) were registered both on {type(new).__name__} and on the {type(old).__name__} around it: "
                "register them on the module itself, before torch.compile"
            )
        setattr(new, name, hooks)
