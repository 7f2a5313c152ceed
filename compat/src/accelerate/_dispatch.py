"""Dispatch with a hook on every module that holds weights, over Slipstream's weight store.

`slipstream` puts one hook on each block of a model. Clients of Accelerate look for `_hf_hook` on single layers: peft merges adapters into
them, transformers saves offloaded models by them, diffusers asks them for devices. So hooks are on the layers here, and the weights behind
them still come in blocks: `BlockedWeightsLoader` maps, prefetches and releases the pages of a whole block, and a layer takes its part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from slipstream.big_models.device_map.partition import find_offload_blocks, is_called
from slipstream.big_models.device_map.sizes import find_tied_parameters, retie_parameters
from slipstream.big_models.device_map.validation import HOST, ResolvedDeviceMap, format_names
from slipstream.big_models.dispatch import Dispatcher, choose_execution_device, find_dispatch_blocks, has_offloaded_modules
from slipstream.big_models.hooks.forward_hooks import AlignDevicesHook, add_hook_to_module, get_hooks
from slipstream.big_models.hooks.weight_swap import OWNER_ATTRIBUTE, find_slots
from slipstream.big_models.weight_store.store import PageBundle
from slipstream.big_models.weight_store.weights import ConvertedBundle, OffloadedWeightsLoader
from slipstream.errors import StateError

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
        if not any(isinstance(check, LostWeightsCheck) for check in self._model._forward_pre_hooks.values()):
            self._model.register_forward_pre_hook(LostWeightsCheck())

    def _attach_to_rest(self, tied: Any) -> None:
        """Put a hook on every other module that is called and has tensors: peft and diffusers ask it where the module runs."""
        whole = {name for name, is_whole in self._blocks.items() if is_whole}
        for name, module in self._modules.items():
            if not name or hasattr(module, "_hf_hook") or not is_called(module) or _is_within(name, whole):
                continue
            if next(find_slots(module, recurse=True), None) is not None:
                hook = AlignDevicesHook(self._device_of(name), skip_keys=self._skip_keys, tied_params_map=tied)
                add_hook_to_module(module, hook)


class LostWeightsCheck:
    """Refuses to run a model that has weights on the meta device which no hook loads: torch computes with them, and the result is noise.

    peft moves a new adapter to the device of its layer, which for an offloaded layer is the meta device, and its values are gone. The
    model is searched at its first forward, and at each one that builds a graph.
    """

    def __init__(self) -> None:
        self._searched = False

    def __call__(self, model: nn.Module, _: Any) -> None:
        if (self._searched and not torch.is_grad_enabled()) or torch.compiler.is_compiling() or not hasattr(model, "_hf_hook"):
            return
        if lost := list(_lost_weights(model, "", False)):
            raise StateError(
                f"{format_names(lost)}: on the meta device, and no hook loads them, so that they have no values. An adapter that is made "
                "beside offloaded weights gets there. Make it while the model is in memory, then call dispatch_model with the adapter on a "
                "device; or load a saved one with PeftModel.from_pretrained, which dispatches the model again."
            )
        self._searched = True


def _lost_weights(module: nn.Module, name: str, is_loaded: bool) -> Iterator[str]:
    hooks = [hook for hook in get_hooks(module) if isinstance(hook, AlignDevicesHook) and hook.offload]
    if not is_loaded and not hooks:
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not hasattr(parameter, OWNER_ATTRIBUTE):
                yield f"{name}.{key}" if name else key
    is_loaded = is_loaded or any(hook.place_submodules for hook in hooks)
    for key, child in module.named_children():
        yield from _lost_weights(child, f"{name}.{key}" if name else key, is_loaded)


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
            tied = find_tied_parameters(model)
            model.to(targets.single)
            retie_parameters(model, tied)  # where torch cannot change a parameter in place (an NPU), each name has its own copy now
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
