"""Activations, measured: a model runs forward and backward on tensors that have shapes and no memory, and what is alive is counted.

Every operator runs through torch's own rules for shapes (fake tensors), so this takes seconds for models of any size and gives what eager
PyTorch on a CPU allocates, to the byte, but for what operators take inside of themselves. Nothing is computed, no weight is read, and the
model is afterwards what it was before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from slipstream.devices.table import CPU
from slipstream.offload.estimate.parts import blocks_in

__all__ = ["Inputs", "Measured", "measure"]


@dataclass(frozen=True)
class Inputs:
    """What a model is called with: shapes count, values do not."""

    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] | None = None
    labels: Mapping[str, Any] | None = None
    """Given while training alone, so that the model computes a loss."""
    cached: Mapping[str, Any] | None = None
    """Given for inference alone, so that the model gives its cache of keys and values back."""


@dataclass(frozen=True)
class Measured:
    """Bytes beside weights and gradients."""

    kept: int
    """What is alive after the forward pass: what autograd keeps for the backward pass, and the outputs."""
    peak: int
    """The most that was alive at a time."""
    cache: int = 0
    """Keys and values of the tokens seen, which is not part of `peak`."""


def measure(
    model: torch.nn.Module,
    inputs: Inputs,
    *,
    dtype: torch.dtype,
    autocast: bool = False,
    training: bool = True,
    checkpointing: bool = False,
) -> Measured:
    """What a step takes with weights of `dtype`; with `autocast`, float32 weights that are computed with in `dtype`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32, device="meta"), torch.nn.ReLU(), torch.nn.Linear(32, 4, device="meta"))
    >>> measure(model, Inputs((torch.empty(16, 8, device="meta"),)), dtype=torch.float32).kept == 4 * 16 * (8 + 32 + 4) + 4
    True
    """
    fake, live = FakeTensorMode(allow_non_fake_inputs=True), _Live()
    kept_dtype = torch.float32 if autocast else dtype
    casting = torch.autocast(CPU.type, dtype=dtype) if autocast else contextlib.nullcontext()
    with _weightless(model, fake, kept_dtype, live, training=training), _recomputing(model, checkpointing and training), fake, live:
        chosen = {**(inputs.keywords or {}), **((inputs.labels if training else inputs.cached) or {})}
        arguments, keywords = tree_map(_like(kept_dtype), (inputs.arguments, chosen))
        with casting, torch.set_grad_enabled(training):
            outputs = model(*arguments, **keywords)
            target = _loss(outputs) if training else None
        kept = live.now
        cache = 0 if training else _cache_of(outputs)
        if target is not None and target.requires_grad:
            target.backward()  # type: ignore[no-untyped-call]
        peak = live.peak
        del outputs, target, arguments, keywords, chosen
    return Measured(kept - cache, peak - cache, cache)


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the memory behind tensors that operators made, from when they are made until nobody has them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def spare(self, tensor: torch.Tensor) -> None:
        """Memory that does not count: that of weights."""
        self._known[tensor.untyped_storage()._cdata] = 0

    def forget(self, tensor: torch.Tensor) -> None:
        """Memory that counts no longer: it has become a gradient."""
        key = tensor.untyped_storage()._cdata
        self.now -= self._known.get(key, 0)
        self._known[key] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        made = _ruled(func, args, kwargs or {})
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def _ruled(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes. The rule of shapes for grouped products refuses types that the operator itself takes."""
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    taken = tree_map(
        lambda one: one.to(torch.bfloat16) if isinstance(one, torch.Tensor) and one.is_floating_point() else one, (args, kwargs)
    )
    return func(*taken[0], **taken[1]).to(args[0].dtype)


@contextlib.contextmanager
def _weightless(model: torch.nn.Module, fake: FakeTensorMode, dtype: torch.dtype, live: _Live, *, training: bool) -> Iterator[None]:
    """The model with tensors that have no memory in the place of its own, and in the mode asked for; afterwards as it was."""
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = training
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for place in places:
                for name, tensor in list(place.items()):
                    if isinstance(tensor, torch.Tensor):
                        before.append((place, name, tensor))
                        if id(tensor) not in made:
                            cast = place is places[0] or (place is places[1] and name not in module._non_persistent_buffers_set)
                            made[id(tensor)] = _stand_in(tensor, fake, dtype if cast else tensor.dtype, live)
                        place[name] = made[id(tensor)]
        yield
    finally:
        for place, name, tensor in before:
            place[name] = tensor
        for module, mode in modes.items():
            module.training = mode


def _stand_in(tensor: torch.Tensor, fake: FakeTensorMode, dtype: torch.dtype, live: _Live) -> torch.Tensor:
    with fake:
        empty = torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device=CPU.type)
    if isinstance(tensor, torch.nn.Parameter):
        empty = torch.nn.Parameter(empty, tensor.requires_grad)
        if tensor.requires_grad:
            empty.register_post_accumulate_grad_hook(lambda one: live.forget(one.grad))  # type: ignore[no-untyped-call]
    live.spare(empty)
    return empty


def _like(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Inputs in the type of the weights, without memory."""

    def like(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device=CPU.type)

    return like


def _loss(outputs: Any) -> torch.Tensor | None:
    """What is differentiated: the model's own loss, or the mean of its first output that has a gradient."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    found = [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor) and one.requires_grad]
    return found[0].mean() if found else None


def _cache_of(outputs: Any) -> int:
    """The bytes of keys and values in what a model of transformers gives back."""
    names = ("past_key_values", "cache_params")
    tensors = [one for name in names for one in _tensors_in(getattr(outputs, name, None))]
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


def _tensors_in(held: Any, depth: int = 5) -> Iterator[torch.Tensor]:
    """The tensors in a cache, which may be one of two caches, of layers, of tensors."""
    if isinstance(held, torch.Tensor):
        yield held
    elif depth:
        inner = (
            held.values()
            if isinstance(held, Mapping)
            else held
            if isinstance(held, (list, tuple))
            else getattr(held, "__dict__", {}).values()
        )
        for one in inner:
            yield from _tensors_in(one, depth - 1)


@contextlib.contextmanager
def _recomputing(model: torch.nn.Module, wanted: bool) -> Iterator[None]:
    """The repeated blocks of the model run under activation checkpointing, as most trainers do it."""
    if not wanted:
        yield
        return
    blocks = [model.get_submodule(name) for name in blocks_in(name for name, _ in model.named_modules() if name)]
    try:
        for block in blocks:
            block.forward = _checkpointed(block.forward)
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords)

    return run
