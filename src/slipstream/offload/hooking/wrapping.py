"""Hooks around the forward of a module: what they are, and how they are attached and removed.

`add_hook_to_module` puts a `ModelHook` around `module.forward`: `pre_forward` may change the arguments, `post_forward` the output, and
`abandon` is called in place of the latter if the forward raised. The module has `_hf_hook` and `_old_forward` then, names that other
libraries look for; `inspect.signature` shows the original, and the module can be copied and compiled (its own forward is, the hook is not).
Nothing here knows a device or a weight.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

__all__ = [
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "hooks_of",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

_BREAK: Final = "weights come and go around this module (Slipstream offload): the graph ends here, the module itself is compiled on its own"


class ModelHook:
    """Something that happens around the forward of a module; subclass it and override what you need.

    >>> class Doubling(ModelHook):
    ...     def post_forward(self, module, output):
    ...         return output * 2
    >>> module = add_hook_to_module(torch.nn.Identity(), Doubling())
    >>> module(torch.ones(2))
    tensor([2., 2.])
    """

    no_grad: bool = False
    """Whether the forward runs without a graph of autograd."""

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Called when the hook is attached; gives the module back."""
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward; gives the arguments for it."""
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Called after the forward; gives the output of the module."""
        return output

    def abandon(self, module: torch.nn.Module) -> None:
        """Called in place of `post_forward` when the forward raised: undo what `pre_forward` did to the module."""

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Called when the hook is removed; gives the module back."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, each called in the order given; they are in `hooks`."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override]
        """Whether one of them wants the forward without a graph."""
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """That of every hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """That of every hook, on the arguments that the one before gave."""
        for number, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                _abandon(self.hooks[:number], module)
                raise
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """That of every hook, on the output that the one before gave."""
        for number, hook in enumerate(self.hooks):
            try:
                output = hook.post_forward(module, output)
            except BaseException:
                _abandon(self.hooks[number + 1 :], module)
                raise
        return output

    def abandon(self, module: torch.nn.Module) -> None:
        """That of every hook, the last one first."""
        _abandon(self.hooks, module)

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """That of every hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _abandon(hooks: Sequence[ModelHook], module: torch.nn.Module) -> None:
    for hook in reversed(hooks):
        getattr(hook, "abandon", _nothing)(module)


def _nothing(_: Any) -> None:
    """What a hook that is no ModelHook does when a forward raises."""


# --- attaching -------------------------------------------------------------------------------------------------------------


def add_hook_to_module(module: torch.nn.Module, hook: ModelHook, append: bool = False) -> torch.nn.Module:
    """Put a hook around the forward of a module; the same module comes back.

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
        hook = SequentialHook(*hooks_of(module), hook)
    module._hf_hook = hook  # type: ignore[assignment]
    if before is None or "_old_forward" not in module.__dict__:
        original = module.forward
        module._old_forward = original  # type: ignore[assignment]
        module.forward = functools.update_wrapper(functools.partial(_forward, module), original)
    return module


def hooks_of(module: torch.nn.Module) -> tuple[ModelHook, ...]:
    """The hooks of a module, in their order; none is ().

    >>> hooks_of(torch.nn.Identity())
    ()
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        return ()
    return tuple(hook.hooks) if isinstance(hook, SequentialHook) else (hook,)


def remove_hook_from_module(module: torch.nn.Module, recurse: bool = False) -> torch.nn.Module:
    """Take the hook off a module, with `recurse` off those below too: weights are back in place, and `forward` is what it was."""
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
    """Take the hooks off a module and everything below it."""
    for inner in list(module.modules()):
        remove_hook_from_module(inner)


def _forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module with a hook."""
    if torch.compiler.is_compiling():
        torch._dynamo.skip_frame(_BREAK)
    hook = module._hf_hook
    call = _plainly if _compiler()() is None else _beside_graphs()
    args, kwargs = call(hook.pre_forward, module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        call(getattr(hook, "abandon", _nothing), module)
        raise
    return call(hook.post_forward, module, output)


_forward._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable says the same, and imports the compiler
_forward._torchdynamo_disable_msg = _BREAK  # type: ignore[attr-defined]


def _plainly(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@functools.lru_cache(maxsize=1)
def _compiler() -> Callable[[], Any]:
    """Asks whether torch.compile looks at what runs now; None if not. Asking imports nothing, and being passed by it costs a lot."""
    found: Callable[[], Any] | None = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return found if found is not None else lambda: sys.modules.get("torch._dynamo")


@functools.lru_cache(maxsize=1)
def _beside_graphs() -> Callable[..., Any]:
    """Calls a function so that torch.compile does not look into it."""
    made: Callable[..., Any] = torch.compiler.disable(_plainly)  # type: ignore[no-untyped-call]
    return made
