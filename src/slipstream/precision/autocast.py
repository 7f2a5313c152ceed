"""Autocast that is installed once on a model, and the context for code outside of one.

`install` puts a callable in the place of the model's `forward`; `remove` takes it away. What this promises: the model keeps its class, its
state-dict keys and the signature of its forward; a copy (`copy.deepcopy`) has a forward of its own that uses the copy's weights; what is
read from a pickle of the model is the model without autocast, and needs nothing of this library; the model is freed when its last user
forgets it; `torch.compile` traces through.

Outputs come in the format that the policy says: float32 by default, so that a loss that is computed from them is a float32 number. Tensors
in half precision are cast, wherever they are in nested outputs; others stay.

A shallow copy (`copy.copy`) and the replicas of `torch.nn.DataParallel` share the forward of the model that they were made from, and so its
weights: copy deeply instead.
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

from slipstream.comm.nested import convert_to_fp32
from slipstream.errors import StateError
from slipstream.precision.options import AutocastKwargs
from slipstream.precision.policy import Policy

__all__ = ["autocast_context", "install", "installed_policy", "is_installed", "remove"]


def install(model: torch.nn.Module, policy: Policy, device_type: str, handler: AutocastKwargs | None = None) -> None:
    """Makes every pass of the model compute as the policy says. Installing again replaces what was installed.

    >>> from slipstream.precision.policy import policy_for
    >>> model = torch.nn.Linear(2, 2)
    >>> install(model, policy_for("bf16", outputs_to_fp32=False), "cpu")
    >>> model(torch.ones(1, 2)).dtype, type(model).__name__, sorted(model.state_dict())
    (torch.bfloat16, 'Linear', ['bias', 'weight'])
    >>> remove(model)
    >>> model(torch.ones(1, 2)).dtype
    torch.float32
    """
    remove(model)
    upcasts = policy.output is torch.float32
    if policy.autocast_dtype is None and not upcasts:
        return
    before = vars(model).get("forward")
    model.forward = _AutocastForward(model, before, policy, device_type, handler or AutocastKwargs(), upcasts)


def remove(model: torch.nn.Module) -> None:
    """Takes installed autocast off a model; one without stays as it is."""
    forward = _installed(model)
    if forward is None:
        return
    if forward.before is None:
        del model.forward
    else:
        model.forward = forward.before


def is_installed(model: torch.nn.Module) -> bool:
    """Whether the model's forward is one that `install` put there."""
    return _installed(model) is not None


def installed_policy(model: torch.nn.Module) -> Policy | None:
    """The policy that was installed on the model, if one was."""
    forward = _installed(model)
    return None if forward is None else forward.policy


def autocast_context(policy: Policy, device_type: str, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
    """A block that computes as the policy says, for code outside of a prepared model, such as a loss.

    >>> from slipstream.precision.policy import policy_for
    >>> weight = torch.ones(2, 2)
    >>> with autocast_context(policy_for("bf16"), "cpu"):
    ...     inside = weight @ weight
    >>> inside.dtype
    torch.bfloat16
    """
    handler = handler or AutocastKwargs()
    if policy.autocast_dtype is None and handler.enabled:
        return nullcontext()
    return torch.autocast(device_type, dtype=policy.autocast_dtype, enabled=handler.enabled, cache_enabled=handler.cache_enabled)


def _installed(model: torch.nn.Module) -> _AutocastForward | None:
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
        policy: Policy,
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
        module, before = self.module(), self.before
        if module is None:
            raise _gone()
        with torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled):
            outputs = type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)
        return _to_fp32(outputs) if self.upcasts else outputs

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        if self.before is not None:
            return self.before
        module = self.module()
        if module is None:
            raise _gone()
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__wrapped__)

    @property
    def __name__(self) -> str:
        return "forward"

    def __repr__(self) -> str:
        return f"<forward of {type(self.module()).__name__} in {self.policy.mixed_precision}>"

    def __reduce__(self) -> Any:
        """What was pickled is read back as the forward that stood here before autocast."""
        if self.before is not None:
            return operator.getitem, ((self.before,), 0)
        module = self.module()
        if module is None:
            raise _gone()
        return getattr, (module, "forward")  # while the module is being read its class has one, and the instance none yet

    def __deepcopy__(self, memo: dict[int, Any]) -> _AutocastForward:
        module = self.module()
        copied = memo.get(id(module), module)  # the model is being copied, or the forward alone
        forward = type(self).__new__(type(self))
        vars(forward).update(
            vars(self), module=_nothing if copied is None else weakref.ref(copied), before=copy.deepcopy(self.before, memo)
        )
        return forward


def _to_fp32(outputs: Any) -> Any:
    """As `convert_to_fp32`; the usual kinds of outputs are handled here in a way that the compiler can follow."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in _HALF else outputs
    if type(outputs) is dict:
        return {key: _to_fp32(value) for key, value in outputs.items()}
    if type(outputs) in (tuple, list):
        return type(outputs)([_to_fp32(value) for value in outputs])
    return convert_to_fp32(outputs)


_HALF = (torch.float16, torch.bfloat16)


def _gone() -> StateError:
    return StateError(
        "the model that this forward belongs to is gone: it was called through a shallow copy, or kept apart from the model. "
        "Keep the model, or copy it with copy.deepcopy."
    )


def _nothing() -> None:
    return None
