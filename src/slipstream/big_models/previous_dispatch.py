"""What a previous dispatch left in a model: where its offloaded weights are, and its hooks, which the next dispatch replaces.

Weights in files are found in the files that the previous dispatch has open, so it does not matter what was written to those paths since.
Hooks of other kinds stay. No weight is read here.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from slipstream.big_models.hooks.forward_hooks import AlignDevicesHook, SequentialHook, get_hooks, remove_hook_from_module
from slipstream.big_models.hooks.weight_swap import find_slots, wrap_like
from slipstream.big_models.weight_store.weights import OffloadedWeightsLoader, PrefixedDataset

__all__ = [
    "OffloadedWeight",
    "DispatchRecord",
    "TemporaryFolder",
    "find_offloaded_weights",
    "has_offloaded_modules",
    "record_dispatch",
    "keep_in_memory",
    "remove_dispatch_hooks",
]

_RECORD_ATTRIBUTE: Final = "_slipstream_left"


class TemporaryFolder:
    """A folder that goes when nothing needs it any more; with the process that made it, not with one that was forked from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, _remove_folder, path, os.getpid())


@dataclass(frozen=True)
class DispatchRecord:
    """What a map of weights knows beside them."""

    first: Mapping[str, str]
    """The first of the names of each weight, by its other names."""
    folders: tuple[TemporaryFolder, ...]


class OffloadedWeight(NamedTuple):
    """A weight that is not in the model."""

    key: Hashable
    """Equal for all names of one weight; None if that is not known."""
    entry: Mapping[str, Any] | None
    """Where it lies in a safetensors file."""
    value: Callable[[], torch.Tensor]
    loader: OffloadedWeightsLoader | None
    folders: tuple[TemporaryFolder, ...]


def has_offloaded_modules(model: nn.Module) -> bool:
    """Whether weights of a model come and go, by hooks of it or of modules below.

    >>> has_offloaded_modules(nn.Linear(1, 1))
    False
    """
    return any(True for module in model.modules() for _ in _offload_hooks(module))


def find_offloaded_weights(model: nn.Module) -> dict[str, OffloadedWeight]:
    """The weights that hooks of a model bring, by their names in it."""
    found: dict[str, OffloadedWeight] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for hook in _offload_hooks(module):
            found.update({prefix + name: _offloaded_weight(hook, name) for name in hook._names})
    return found


def record_dispatch(loader: OffloadedWeightsLoader, groups: Iterable[list[str]], folders: Iterable[TemporaryFolder]) -> None:
    """Leaves with a map of weights what a later dispatch will ask: which names are one weight, and what has to stay."""
    first = {name: names[0] for names in groups for name in names}
    setattr(loader, _RECORD_ATTRIBUTE, DispatchRecord(first, tuple(dict.fromkeys(folders))))


def remove_dispatch_hooks(model: nn.Module) -> None:
    """Removes the hooks of an earlier dispatch, and no others. Weights that were in memory before it are back there."""
    for module in model.modules():
        hooks = get_hooks(module)
        others = [hook for hook in hooks if not isinstance(hook, AlignDevicesHook)]
        if len(others) == len(hooks):
            continue
        if not others:
            remove_hook_from_module(module)
            continue
        for hook in hooks:
            if hook not in others:
                hook.detach_hook(module)
        module._hf_hook = others[0] if len(others) == 1 else SequentialHook(*others)  # type: ignore[assignment]


def keep_in_memory(model: nn.Module, but: Collection[str]) -> None:
    """Ends an earlier dispatch: weights that are away, `but` for these, become views of their files, and the hooks go."""
    away = find_offloaded_weights(model)
    remove_dispatch_hooks(model)
    made: dict[Hashable, torch.Tensor] = {}
    for place in find_slots(model, recurse=True):
        known = away.get(place.name)
        if known is None or place.name in but or not place.tensor.is_meta:
            continue
        key = known.key or id(place.tensor)
        if key not in made:
            made[key] = wrap_like(place.tensor, known.value().to(place.tensor.dtype))
        place.store[place.key] = made[key]


def _offload_hooks(module: nn.Module) -> Iterator[AlignDevicesHook]:
    yield from (hook for hook in get_hooks(module) if isinstance(hook, AlignDevicesHook) and hook.offload)


def _offloaded_weight(hook: AlignDevicesHook, name: str) -> OffloadedWeight:
    weights = hook.weights_map
    loader = weights.dataset if isinstance(weights, PrefixedDataset) else weights
    if not isinstance(loader, OffloadedWeightsLoader):
        return OffloadedWeight(None, None, lambda: hook.weight(name), None, ())
    key = getattr(weights, "prefix", "") + hook._names[name]
    left: DispatchRecord = getattr(loader, _RECORD_ATTRIBUTE, None) or DispatchRecord({}, ())
    group = (id(loader), left.first[key]) if key in left.first else None
    return OffloadedWeight(group, loader.entry_of(key), lambda: loader[key].detach(), loader, left.folders)


def _remove_folder(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
