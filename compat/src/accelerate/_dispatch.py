"""Dispatch with a hook on every module that holds weights, over Slipstream's weight store.

`slipstream` puts one hook on each block of a model. Clients of Accelerate look for `_hf_hook` on single layers: peft merges adapters into
them, transformers saves offloaded models by them, diffusers asks them for devices. So hooks are on the layers here, and the weights behind
them still come in blocks: `BlockedWeightsLoader` maps, prefetches and releases the pages of a whole block, and a layer takes its part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.big_models.device_map.partition import find_offload_blocks, is_called
from slipstream.big_models.device_map.validation import HOST, ResolvedDeviceMap
from slipstream.big_models.dispatch import Dispatcher, choose_execution_device, find_dispatch_blocks, has_offloaded_modules
from slipstream.big_models.hooks.forward_hooks import AlignDevicesHook, add_hook_to_module
from slipstream.big_models.hooks.weight_swap import find_slots
from slipstream.big_models.weight_store.store import PageBundle
from slipstream.big_models.weight_store.weights import ConvertedBundle, OffloadedWeightsLoader

__all__ = ["BlockedWeightsLoader", "LayerDispatcher", "dispatch_layers", "offload_layers"]

_SMALLEST = 1
"""Bytes above which a module is divided: every module that can be."""


class PartBundle:
    """Some tensors of a block, for one of its layers. The block is entered and left with each of them, and its pages stay between."""

    __slots__ = ("arrive", "bundle", "give_back", "numbers", "recall", "restore", "store")

    def __init__(self, bundle: PageBundle, numbers: Sequence[int]) -> None:
        self.bundle, self.numbers = bundle, numbers
        self.store = bundle.store
        self.arrive, self.give_back, self.restore, self.recall = bundle.arrive, bundle.give_back, bundle.restore, bundle.recall

    def __deepcopy__(self, memo: dict[int, Any]) -> PartBundle:
        return self

    def take(self) -> list[torch.Tensor]:
        """Return the tensors, whose pages were requested with the block."""
        tensors = self.bundle.take()
        return [tensors[number] for number in self.numbers]


class BlockedWeightsLoader(OffloadedWeightsLoader):
    """Weights by name, whose pages are handled in the blocks that `set_blocks` names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._block_of: dict[str, str] = {}
        self._names_in: dict[str, list[str]] = {}
        self._bundles: dict[str, PageBundle | None] = {}

    def set_blocks(self, blocks: Collection[str]) -> None:
        """Say which modules are blocks; a weight belongs to the innermost around it."""
        for name in self.index:
            if name in self.state_dict:
                continue
            module = name
            while module and module not in blocks:
                module = module.rpartition(".")[0]
            self._block_of[name] = module
            self._names_in.setdefault(module, []).append(name)

    def bundle(self, names: Sequence[str], device: Any) -> Any:
        """Return the tensors of a layer; on the CPU, as a part of its block."""
        block = self._block_of.get(names[0]) if torch.device(HOST if device is None else device).type == HOST.type else None
        if block is None or any(self._block_of.get(name) != block for name in names):
            return super().bundle(names, device)
        if block not in self._bundles:
            whole = super().bundle(self._names_in[block], device)
            # One that converts would do so for the whole block at each layer.
            self._bundles[block] = None if isinstance(whole, ConvertedBundle) else whole
        found = self._bundles[block]
        if found is None:
            return super().bundle(names, device)
        return PartBundle(found, [self._names_in[block].index(name) for name in names])


class LayerDispatcher(Dispatcher):
    """Dispatches with one hook per layer; `page_blocks` are the modules whose pages are handled together."""

    loader_class = BlockedWeightsLoader

    def __init__(self, *args: Any, page_blocks: Collection[str] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self._page_blocks = page_blocks

    def _attach(self, blocks: Any, loader: Any, tied: Any) -> None:
        loader.set_blocks(self._page_blocks)
        super()._attach(blocks, loader, tied)
        self._attach_to_rest(tied)

    def _attach_to_rest(self, tied: Any) -> None:
        """Put a hook on every other module that is called and has tensors: peft and diffusers ask it where the module runs."""
        whole = {name for name, is_whole in self._blocks.items() if is_whole}
        for name, module in self._modules.items():
            if not name or hasattr(module, "_hf_hook") or not is_called(module) or _is_within(name, whole):
                continue
            if next(find_slots(module, recurse=True), None) is not None:
                hook = AlignDevicesHook(self._device_of(name), skip_keys=self._skip_keys, tied_params_map=tied)
                add_hook_to_module(module, hook)


def _is_within(name: str, blocks: Collection[str]) -> bool:
    """Return whether a module is below one of some others."""
    while name:
        name = name.rpartition(".")[0]
        if name in blocks:
            return True
    return False


def dispatch_layers(
    model: nn.Module, device_map: Mapping[str, Any], main_device: Any, whole: Iterable[str], force_hooks: bool, **options: Any
) -> nn.Module:
    """Dispatch by a map that has been checked; `whole` names classes that get one hook for everything below them."""
    known = {*dict(model.named_modules(remove_duplicate=False)), *(slot.name for slot in find_slots(model, recurse=True))}
    targets = ResolvedDeviceMap({name: device for name, device in device_map.items() if name in known}, main_device)
    if targets.single is not None and not force_hooks and not any(map(targets.is_offloaded, targets.entries)):
        if has_offloaded_modules(model) or any(slot.tensor.is_meta for slot in find_slots(model, recurse=True)):
            LayerDispatcher(model, targets, {}, **{**options, "offload_buffers": False, "skip_keys": None}).move()
        else:
            model.to(targets.single)
        return model
    layers = find_dispatch_blocks(model, targets, _SMALLEST, whole)
    stay_whole = {*whole, *(getattr(model, "_no_split_modules", None) or ())}
    page_blocks = find_dispatch_blocks(model, targets, None, stay_whole)
    LayerDispatcher(model, targets, layers, page_blocks=page_blocks, **options).run()
    return model


def offload_layers(model: nn.Module, device: Any, entry: Any, whole: Collection[str], **options: Any) -> nn.Module:
    """Offload every layer of a model to `entry` ("cpu" or "disk")."""
    targets = ResolvedDeviceMap({"": entry}, choose_execution_device(model, device))
    layers = find_offload_blocks(model, "", largest=_SMALLEST, whole=whole)
    page_blocks = find_offload_blocks(model, "", whole={*whole, *(getattr(model, "_no_split_modules", None) or ())})
    LayerDispatcher(model, targets, layers, page_blocks=page_blocks, **options).run()
    return model
