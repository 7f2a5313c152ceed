"""Dispatch a model by a device map: every module runs on its device, and offloaded weights are loaded when it runs.

Tensors of an entry on a device move there. Those on the disk, or in host memory while an accelerator computes, are offloaded: one hook
per block loads them. Weights for the disk that are in memory are written once; those in files stay there. `Dispatcher` first finds the
source of every tensor, and raises if one has no values; only then does the model change. A dispatched model can be dispatched again:
weights in files are read from the files that the previous dispatch has open. No second copy is kept.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.big_models.device_map.partition import LARGEST_BLOCK, find_composite, find_offload_blocks, is_called, parameter_identity
from slipstream.big_models.device_map.plan import PREFETCHED_BLOCKS
from slipstream.big_models.device_map.sizes import find_tied_parameters, retie_parameters
from slipstream.big_models.device_map.validation import (
    DISK,
    HOST,
    ResolvedDeviceMap,
    check_device_map,
    format_names,
    parse_device_key,
    resolve_device,
    warn_unknown_classes,
)
from slipstream.big_models.hooks.forward_hooks import (
    AlignDevicesHook,
    CpuOffload,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    get_hooks,
    remove_hook_from_module,
)
from slipstream.big_models.hooks.weight_swap import ModuleSlot, ModuleTensor, find_slots, wrap_like
from slipstream.big_models.weight_store.offload_folder import group_by_size, save_offload_index, write_offload_files
from slipstream.big_models.weight_store.store import decide_residency
from slipstream.big_models.weight_store.weights import INDEX_NAME, FileTensor, OffloadedWeightsLoader, PrefixedDataset, read_index
from slipstream.checkpoint.weights import all_modules
from slipstream.devices.memory import convert_bytes
from slipstream.errors import ConfigError, StateError
from slipstream.files.atomic_files import check_local_path
from slipstream.files.paths import check_name
from slipstream.files.sizes import parse_size
from slipstream.logging import get_logger

__all__ = [
    "Dispatcher", "INDEX_ATTRIBUTE", "choose_execution_device", "cpu_offload", "cpu_offload_with_hook", "disk_offload",
    "dispatch_checked", "dispatch_model", "find_dispatch_blocks", "has_offloaded_modules", "keep_in_memory",
]

INDEX_ATTRIBUTE: Final = "_slipstream_offload_index"
"""The attribute of a model with the index of its weights on the disk, set by loading."""
_SMALL_FILE: Final = 64 << 20
"""Blocks share a file up to this size: every file is held open, and the number of open files is limited."""
_ANY_SIZE: Final = 1 << 62
_Entries = Mapping[str, Mapping[str, Any]]


# --- the previous dispatch ---------------------------------------------------------------------------------------------------


class _TemporaryFolder:
    """A folder that is removed with the last reference to it, by the process that created it (not by a forked one)."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="slipstream-offload-"))
        weakref.finalize(self, _remove_folder, self.path, os.getpid())


def _remove_folder(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class _OffloadedWeight(NamedTuple):
    """A weight that a hook of a previous dispatch loads."""

    hook: AlignDevicesHook
    name: str
    loader: OffloadedWeightsLoader | None
    key: str
    """Its name in the loader."""

    @property
    def identity(self) -> Hashable:
        """Equal for all names of one weight; None if unknown."""
        first = None if self.loader is None else self.loader.first_names.get(self.key)
        return None if first is None else (id(self.loader), first)


def has_offloaded_modules(model: nn.Module) -> bool:
    """Return whether weights of a model are offloaded, by its own hooks or those of submodules.

    >>> has_offloaded_modules(nn.Linear(1, 1))
    False
    """
    return any(True for module in model.modules() for _ in _offload_hooks(module))


def _offload_hooks(module: nn.Module) -> Iterator[AlignDevicesHook]:
    if "_hf_hook" in vars(module):  # asking a module for an attribute that it does not have is slow
        yield from (hook for hook in get_hooks(module) if isinstance(hook, AlignDevicesHook) and hook.offload)


def _find_offloaded_weights(modules: Mapping[str, nn.Module]) -> dict[str, _OffloadedWeight]:
    """Return the weights that hooks of a model load, by their names in it."""
    found: dict[str, _OffloadedWeight] = {}
    for path, module in modules.items():
        for hook in _offload_hooks(module):
            weights = hook.weights_map
            loader = getattr(weights, "dataset", weights)
            known = loader if isinstance(loader, OffloadedWeightsLoader) else None
            prefix = getattr(weights, "prefix", "")
            for name, key in hook._names.items():
                found[f"{path}.{name}" if path else name] = _OffloadedWeight(hook, name, known, prefix + key)
    return found


def _remove_dispatch_hooks(model: nn.Module) -> None:
    """Remove the hooks of a previous dispatch, and no others. Weights that were in memory before are restored."""
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
    """Undo a previous dispatch: offloaded weights, except those in `but`, become views of their files, and the hooks are removed."""
    offloaded = _find_offloaded_weights(all_modules(model))
    _remove_dispatch_hooks(model)
    made: dict[Hashable, torch.Tensor] = {}
    for slot in find_slots(model, recurse=True):
        weight = offloaded.get(slot.name)
        if weight is None or slot.name in but or not slot.tensor.is_meta:
            continue
        identity = weight.identity or id(slot.tensor)
        if identity not in made:
            value = weight.hook.weight(weight.name) if weight.loader is None else weight.loader[weight.key].detach()
            made[identity] = wrap_like(slot.tensor, value.to(slot.tensor.dtype))
        slot.store[slot.key] = made[identity]


# --- the dispatch ------------------------------------------------------------------------------------------------------------


class Dispatcher:
    """A model, the devices of its modules, and the `blocks` that get hooks (name -> whether submodules are included).

    Values that are not in the model come from `index` (weights in files; it overrides values in the model), `state`, the previous
    dispatch, `loaded_index` (set by loading) and the index of `folder`. `always`: offload weights even if they are in memory. `room`: the
    bytes on the accelerator for offloaded weights; None if unknown. `in_place`: tensors of `index` in files that are mapped already.
    """

    loader_class: type[OffloadedWeightsLoader] = OffloadedWeightsLoader
    """The mapping that hooks take weights from; the `accelerate` drop-in, with a hook on every layer, has its own."""

    def __init__(
        self,
        model: nn.Module,
        targets: ResolvedDeviceMap,
        blocks: Mapping[str, bool],
        *,
        state: Mapping[str, torch.Tensor] | None = None,
        index: _Entries | None = None,
        loaded_index: _Entries | None = None,
        in_place: Mapping[str, FileTensor] | None = None,
        folder: Path | None = None,
        offload_buffers: bool = False,
        skip_keys: str | list[str] | None = None,
        always: bool = False,
        room: int | None = None,
    ) -> None:
        self._model, self._targets, self._always, self._room = model, targets, always, room
        self._state, self._index, self._loaded_index = state or {}, index or {}, loaded_index or {}
        self._in_place, self._offload_buffers, self._skip_keys = in_place or {}, offload_buffers, skip_keys
        self._modules = all_modules(model)
        self._blocks = {name: whole for name, whole in blocks.items() if is_called(self._modules[name])}
        self._slots = {name: list(find_slots(self._modules[name], whole)) for name, whole in self._blocks.items()}
        self._folder, self._given_folder, self._temporary = folder, folder, list[_TemporaryFolder]()
        self._earlier = _find_offloaded_weights(self._modules)

    @torch.inference_mode(False)  # weights of that mode could not be used outside of it
    def run(self, limit: int | None = None, *, must_hold: bool = False) -> None:
        """Dispatch. `limit`: bytes of offloaded weights in memory at a time; it is raised if it is too small, unless `must_hold`."""
        tensors = self._find_tensors()
        self._check_plain(tensors)
        blocks = self._offloaded_by_block(tensors)
        names = [name or "the model" for name in blocks]
        if limit is not None and must_hold:  # before anything is written; the exact sizes in the files are known only later
            sizes = [sum(tensor.nbytes for tensor in block if tensor.target is None) for block in blocks.values()]
            _check_limit(limit, must_hold, names, sizes)
        self._write(blocks, tensors)
        offloaded = [tensor for tensor in tensors if tensor.offloaded]
        loader = self._loader(offloaded, limit)
        if limit is not None:
            sizes = [loader.size_of(tensor.name for tensor in block) for block in blocks.values()]
            loader.store.limit = _check_limit(limit, must_hold, names, sizes)
        loader.copies_ahead = self._room is None or all(2 * sum(part.nbytes for part in block) <= self._room for block in blocks.values())
        self._place_all(tensors)
        shared = (tensor.value for tensor in tensors if len(tensor.slots) > 1 and tensor.value is not None)
        self._attach(blocks, loader, {value.data_ptr(): {} for value in shared})
        loader.first_names = {slot.name: tensor.name for tensor in offloaded for slot in tensor.slots}
        loader.keeps_alive = tuple(dict.fromkeys(self._temporary))
        if offloaded or len(self._targets.devices) > 1:
            # torch internals: `_apply` is what every `.to()` and `.half()` of a module calls, and there is no hook before it. Tried on
            # torch 2.13; tests/big_models/test_dispatch_model.py notices a change. It can go when torch has such a hook.
            self._model._apply = functools.partial(_refuse_move, self._model)  # type: ignore[method-assign]

    @torch.inference_mode(False)
    def move(self) -> None:
        """Move everything to its device, without hooks."""
        self._place_all(self._find_tensors())

    def _place_all(self, tensors: Sequence[ModuleTensor]) -> None:
        loader = self._loader([tensor for tensor in tensors if not tensor.offloaded], None)
        if self._earlier:
            _remove_dispatch_hooks(self._model)
        for tensor in tensors:
            if not tensor.offloaded:
                self._place(tensor, loader)
            elif len(tensor.slots) > 1:  # hooks leave one placeholder in each of their blocks
                first = tensor.slots[0]
                tensor.put(first.store[first.key])

    # -- finding values -------------------------------------------------------------------------------------------------------

    def _find_tensors(self) -> list[ModuleTensor]:
        groups: dict[Hashable, list[ModuleSlot]] = {}
        for slot in find_slots(self._model, recurse=True):
            weight = self._earlier.get(slot.name)
            groups.setdefault((weight and weight.identity) or parameter_identity(slot.tensor), []).append(slot)
        tensors = [ModuleTensor(slots, offloaded=all(map(self._is_offloaded, slots))) for slots in groups.values()]
        self._keep_unreached(tensors)
        # Buffers of a model on the meta device have their initial values, not the saved ones.
        slots = [] if self._index or self._loaded_index else [slot for tensor in tensors for slot in tensor.slots]
        is_empty = any(slot.tensor.is_meta for slot in slots if slot.is_parameter and slot.name not in self._earlier)
        folder_index = {} if self._given_folder is None else read_index(self._given_folder)
        for entry in folder_index.values():
            check_name(entry.get("safetensors_file", INDEX_NAME), str(self._given_folder))
        for tensor in tensors:
            self._set_target(tensor)
            self._find_values(tensor, folder_index, is_empty)
        if missing := [tensor.name for tensor in tensors if tensor.is_missing]:
            raise ConfigError(
                f"{format_names(missing)}: on the meta device, without values, and no source has them. Call load_checkpoint_and_dispatch "
                "with a checkpoint that has these names, or pass state_dict or offload_index; buffers that are in no file are created "
                "with the model, under init_empty_weights(include_buffers=False)."
            )
        return tensors

    def _is_offloaded(self, slot: ModuleSlot) -> bool:
        if not slot.is_parameter and not (self._offload_buffers and slot.persistent):
            return False
        return self._always or self._targets.is_offloaded(slot.name)

    def _keep_unreached(self, tensors: Iterable[ModuleTensor]) -> None:
        """Keep weights of modules that are never called, such as a ParameterList, in memory: no hook could load them."""
        reached = {id(slot.tensor) for slots in self._slots.values() for slot in slots}
        if left := [tensor for tensor in tensors if tensor.offloaded and not any(id(slot.tensor) in reached for slot in tensor.slots)]:
            for tensor in left:
                tensor.offloaded = False
            get_logger(__name__).warning(
                f"{format_names(tensor.name for tensor in left)} stay in memory ({convert_bytes(sum(tensor.nbytes for tensor in left))}): "
                "they belong to modules that are never called. Give the module that uses them one device in device_map."
            )

    def _set_target(self, tensor: ModuleTensor) -> None:
        slots = [slot for slot in tensor.slots if tensor.offloaded or not self._is_offloaded(slot)]
        default = None if tensor.offloaded else self._targets.main
        devices = [device for slot in slots if (device := self._targets[slot.name]) is not None]
        tensor.target = devices[0] if devices else default
        if not tensor.offloaded and len(set(devices)) > 1:
            names = " and ".join(f"{slot.name} on {self._targets[slot.name]}" for slot in slots)
            get_logger(__name__).warning(
                f"device_map puts one weight on several devices: {names}. Each has a copy of its own, and they are no longer tied: "
                "training would change them differently. Give their modules one device."
            )

    def _find_values(self, tensor: ModuleTensor, folder_index: _Entries, is_empty: bool) -> None:
        def first(table: Mapping[str, Any]) -> Any:
            return next((table[slot.name] for slot in tensor.slots if slot.name in table), None)

        unknown = tensor.held.is_meta or (is_empty and not tensor.slots[0].is_parameter)
        tensor.entry = first(self._index) if tensor.offloaded or tensor.held.is_meta else None
        if tensor.entry is None:
            tensor.value = first(self._state) if unknown else tensor.held.detach()
        if tensor.is_missing and (weight := first(self._earlier)) is not None:
            tensor.entry = None if weight.loader is None else weight.loader.entry_of(weight.key)
            if tensor.entry is None:
                tensor.value = weight.hook.weight(weight.name)
            self._temporary += () if weight.loader is None else weight.loader.keeps_alive
        if tensor.is_missing:
            tensor.entry = first(self._loaded_index) or first(folder_index)
        if tensor.is_missing and not tensor.held.is_meta:
            tensor.value = tensor.held.detach()

    def _check_plain(self, tensors: Iterable[ModuleTensor]) -> None:
        """Raise if a tensor subclass made of several tensors would go to the disk."""
        for tensor in tensors:
            value: Any = tensor.value if tensor.offloaded and tensor.target is None else None
            # torch internals: the test for tensors made of others. Tried on torch 2.13; tests/big_models/test_quantize.py notices a change.
            if value is not None and is_traceable_wrapper_subclass(value):
                raise ConfigError(
                    f"{tensor.name} is a {type(value).__name__}: quantised weights, and others that are made of several tensors, cannot go "
                    "to the disk. Give its module a different device in device_map, or offload the unquantised model."
                )

    def _offloaded_by_block(self, tensors: Iterable[ModuleTensor]) -> dict[str, list[ModuleTensor]]:
        """Return the offloaded tensors of each block. A tensor that is tied across blocks belongs to all of them."""
        by_id = {id(slot.tensor): tensor for tensor in tensors if tensor.offloaded for slot in tensor.slots}
        found: dict[str, list[ModuleTensor]] = {}
        for name, slots in self._slots.items():
            inside = (by_id.get(id(slot.tensor)) for slot in slots)
            found[name] = list({id(tensor): tensor for tensor in inside if tensor is not None}.values())
        return found

    # -- changing the model ---------------------------------------------------------------------------------------------------

    def _write(self, blocks: Mapping[str, Sequence[ModuleTensor]], tensors: Iterable[ModuleTensor]) -> None:
        """Write weights for the disk that are in memory, one file for each block, or for several small ones."""
        seen: set[int] = set()
        groups: list[list[ModuleTensor]] = []
        for block in blocks.values():
            new = [tensor for tensor in block if tensor.target is None and tensor.value is not None and id(tensor) not in seen]
            seen.update(map(id, new))
            groups.append(new)
        if not seen:
            return
        files = group_by_size(groups, _SMALL_FILE)
        if self._folder is None:
            self._temporary.append(_TemporaryFolder())
            self._folder = self._temporary[-1].path
            get_logger(__name__).warning(
                f"{convert_bytes(sum(tensor.nbytes for file in files for tensor in file))} of weights are written to {self._folder}, "
                "which is deleted with the model. Give offload_dir to choose a different disk."
            )
        else:  # so that a later model can load its buffers from the same folder
            files[-1] += [tensor for tensor in tensors if self._is_saved_buffer(tensor)]
        index = write_offload_files(self._folder, files, argument="offload_dir")
        if self._given_folder is not None:
            save_offload_index(index, self._folder)
        for tensor in (tensor for file in files for tensor in file if tensor.offloaded):
            file = self._folder.absolute() / index[tensor.name]["safetensors_file"]
            tensor.entry, tensor.value = {**index[tensor.name], "safetensors_file": str(file)}, None

    def _is_saved_buffer(self, tensor: ModuleTensor) -> bool:
        """Return whether it is a persistent buffer that stays in memory while its module is on the disk."""
        if tensor.offloaded or tensor.value is None:
            return False
        return all(not slot.is_parameter and slot.persistent and self._targets[slot.name] is None for slot in tensor.slots)

    def _loader(self, tensors: Iterable[ModuleTensor], limit: int | None) -> OffloadedWeightsLoader:
        state: dict[str, torch.Tensor] = {}
        index: dict[str, Mapping[str, Any]] = {}
        for tensor in tensors:
            for slot in tensor.slots:
                if tensor.entry is not None:
                    index[slot.name] = tensor.entry
                elif tensor.offloaded and tensor.value is not None:
                    state[slot.name] = tensor.value = tensor.value.to(HOST)
        loader = self.loader_class(state, self._folder, index, limit=limit)
        loader.use_tensors({name: self._in_place[name] for name in index if name in self._in_place})
        for earlier in {id(weight.loader): weight.loader for weight in self._earlier.values()}.values():
            if earlier is not None:
                loader.use_files_of(earlier)
        loader.find(index)
        return loader

    def _place(self, tensor: ModuleTensor, loader: OffloadedWeightsLoader) -> None:
        """Move a tensor that stays in memory to its device; values from a file or the caller replace a placeholder."""
        held, value = tensor.held, tensor.value if tensor.entry is None else loader[tensor.name]
        assert value is not None
        if held.is_meta or value.device != tensor.target or value.data_ptr() != held.data_ptr():
            tensor.put(wrap_like(held, value.to(tensor.target, held.dtype)))

    def _attach(
        self,
        blocks: Mapping[str, Sequence[ModuleTensor]],
        loader: OffloadedWeightsLoader,
        tied: dict[int, dict[torch.device, torch.Tensor]],
    ) -> None:
        main = self._targets.main

        def attach(name: str, device: torch.device, **options: Any) -> None:
            hook = AlignDevicesHook(execution_device=device, skip_keys=self._skip_keys, tied_params_map=tied, **options)
            add_hook_to_module(self._modules[name], hook, append=True)

        for name, block in blocks.items():
            device = main if block else self._device_of(name)
            if block or not device == HOST == main:
                attach(
                    name,
                    device,
                    offload=bool(block),
                    io_same_device=not name,
                    weights_map=PrefixedDataset(loader, f"{name}." if name else "") if block else None,
                    offload_buffers=self._offload_buffers,
                    place_submodules=self._blocks[name],
                )
        for name in self._divided(blocks):
            attach(name, self._device_of(name))
        if not blocks.get(""):
            attach("", main, io_same_device=True)

    def _device_of(self, name: str) -> torch.device:
        """Return the device on which a module runs."""
        target = self._targets[name]
        return self._targets.main if target is None or self._targets.is_offloaded(name) else target

    def _divided(self, blocks: Collection[str]) -> list[str]:
        """Return modules without hooks that contain blocks with hooks: their own computation needs its inputs on one device, too."""
        found: set[str] = set()
        for name in blocks if self._targets.main != HOST else ():
            while name and name not in self._targets.entries:
                name = name.rpartition(".")[0]
                if name and name not in blocks and is_called(self._modules[name]):
                    found.add(name)
        return sorted(found)


def _check_limit(limit: int | None, must_hold: bool, names: Sequence[str], sizes: Sequence[int]) -> int | None:
    """Return a limit with which every block can run; raise now if there is none, and not during a forward."""
    largest = max(sizes, default=0)
    if limit is not None and limit < largest and not must_hold:
        get_logger(__name__).warning(
            f"{names[sizes.index(largest)]} needs {convert_bytes(largest)} of memory to run, and the device map leaves "
            f"{convert_bytes(limit)}: it is exceeded. Give more max_memory, or smaller modules."
        )
        limit = largest
    if limit is not None and sizes:
        decide_residency(sizes, limit, names)
    return limit


def _refuse_move(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Raise for `.to()` and similar calls: they cannot move or convert offloaded tensors, nor move a model away from its hooks."""
    if has_offloaded_modules(model):
        raise StateError(
            f"This {type(model).__name__} has offloaded modules (see its hf_device_map), whose weights cannot be moved or converted. Leave "
            "out .to(), .half() and the like: give a device_map and dtype when you load it, or remove_hook_from_submodules(model) first."
        )
    if any(isinstance(hook, AlignDevicesHook) for module in model.modules() for hook in get_hooks(module)):
        devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        elsewhere = {device: fn(torch.empty(0, device=device)).device for device in devices}
        if moves := [(device, moved) for device, moved in elsewhere.items() if moved != device]:
            raise StateError(
                f"This {type(model).__name__} is dispatched over {format_names(sorted(map(str, devices)))} (see its hf_device_map), and "
                f"its hooks move activations to these devices: weights cannot be moved from {moves[0][0]} to {moves[0][1]}. Leave out "
                ".to() and the like, dispatch it again with another device_map, or call remove_hook_from_submodules(model) first."
            )
        return type(model)._apply(model, fn, recurse)  # type: ignore[no-untyped-call, no-any-return]
    del model._apply  # the hooks are gone
    moved: nn.Module = model._apply(fn, recurse)  # type: ignore[no-untyped-call]
    return moved


# --- public functions --------------------------------------------------------------------------------------------------------


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Any],
    main_device: Any = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    *,
    limit: int | str | None = None,
) -> nn.Module:
    """Move every module of a model to its device of `device_map`, attach hooks that load offloaded weights, and return the same model.

    `main_device`: the device of offloaded modules, by default the first accelerator of the map, or the CPU. `state_dict`: values of
    weights on the meta device. `offload_dir`: the folder for weights that are in memory and go to the disk, by default a temporary one.
    `offload_index`: weights that are on the disk already, by name (`{"safetensors_file": ..., "weight_name": ...}`); they are not written.
    Buffers stay in memory unless `offload_buffers`. `skip_keys`: arguments of forward that are not moved. `preload_module_classes`:
    classes whose modules get all their weights at once, because they use the weights of their children directly. `limit`: the most bytes
    of offloaded weights in memory at a time; with a map of `infer_auto_device_map` and a budget for "cpu", by default the rest of that
    budget. A map with a single device needs no hooks, unless `force_hooks`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> expected = model(torch.ones(1, 2))
    >>> model = dispatch_model(model, {"0": "cpu", "1": "disk"})
    >>> torch.equal(model(torch.ones(1, 2)), expected), model[1].weight.is_meta, model.hf_device_map
    (True, True, {'0': 'cpu', '1': 'disk'})
    """
    if not isinstance(device_map, Mapping):
        raise ConfigError(
            f"dispatch_model was given device_map={device_map!r}. It accepts a dict: make one with infer_auto_device_map, "
            "or call load_checkpoint_and_dispatch."
        )
    targets = ResolvedDeviceMap(device_map, main_device)
    check_device_map(model, device_map)
    warn_unknown_classes(model, preload_module_classes, "preload_module_classes")
    if offload_index is not None and not (
        isinstance(offload_index, Mapping) and all(isinstance(entry, Mapping) for entry in offload_index.values())
    ):
        raise ConfigError(
            f"offload_index is a {type(offload_index).__name__}. Write a dict: name of a weight to where it is, "
            'as {"safetensors_file": "model.safetensors", "weight_name": "head.weight"}.'
        )
    sources = {"state": state_dict, "index": offload_index, "loaded_index": getattr(model, INDEX_ATTRIBUTE, None)}
    folder = None if offload_dir is None else check_local_path(offload_dir, "offload_dir")
    options = {**sources, "folder": folder, "offload_buffers": offload_buffers, "skip_keys": skip_keys}
    return dispatch_checked(model, device_map, targets, preload_module_classes or (), force_hooks, limit, **options)


def dispatch_checked(
    model: nn.Module,
    device_map: Mapping[str, Any],
    targets: ResolvedDeviceMap,
    whole: Iterable[str],
    force_hooks: bool,
    limit: int | str | None,
    **options: Any,
) -> nn.Module:
    """Dispatch by a map that has been checked; `options` are those of `Dispatcher`."""
    if targets.single is not None and not force_hooks and not targets.is_offloaded(next(iter(device_map))):
        slots = list(find_slots(model, recurse=True))
        if has_offloaded_modules(model) or any(slot.tensor.is_meta for slot in slots):
            Dispatcher(model, targets, {}, **{**options, "offload_buffers": False, "skip_keys": None}).move()
        elif any(slot.tensor.device != targets.single for slot in slots):
            tied = find_tied_parameters(model)
            model.to(targets.single)
            retie_parameters(model, tied)  # where torch cannot change a parameter in place, each name has a copy of its own now
    else:
        most = _limit(limit, device_map)
        stay_whole = {*whole, *getattr(device_map, "whole", ()), *(getattr(model, "_no_split_modules", None) or ())}
        room = _room_on_device(device_map, targets)
        blocks = find_dispatch_blocks(model, targets, most, stay_whole, room)
        Dispatcher(model, targets, blocks, room=room, **options).run(most, must_hold=limit is not None)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: Any = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep the weights in main memory, and copy those of each block to `execution_device` when it runs.

    >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 1)), execution_device="cpu")
    >>> model(torch.ones(1, 2)).shape, model[0].weight.is_meta
    (torch.Size([1, 1]), True)
    """
    warn_unknown_classes(model, preload_module_classes, "preload_module_classes")
    device = choose_execution_device(model, execution_device)
    blocks = find_offload_blocks(model, "", whole=preload_module_classes or ())
    targets = ResolvedDeviceMap({"": HOST}, device)
    Dispatcher(model, targets, blocks, state=state_dict, offload_buffers=offload_buffers, always=True).run()
    return model


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Any = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
    *,
    limit: int | str | None = None,
) -> nn.Module:
    """Write the weights to `offload_dir`, and load those of each block to `execution_device` when it runs.

    If the model is on the meta device, they are read from that folder, which an earlier `disk_offload` or `offload_state_dict` has written.
    `limit`: the most bytes of weights in memory at a time.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = disk_offload(nn.Sequential(nn.Linear(2, 1)), folder)
    ...     model(torch.ones(1, 2)).shape, model[0].weight.is_meta
    (torch.Size([1, 1]), True)
    """
    warn_unknown_classes(model, preload_module_classes, "preload_module_classes")
    device = choose_execution_device(model, execution_device)
    most = _limit(limit, {})
    blocks = find_offload_blocks(model, "", largest=_largest_block(most), whole=preload_module_classes or ())
    targets, folder = ResolvedDeviceMap({"": DISK}, device), check_local_path(offload_dir, "offload_dir")
    Dispatcher(model, targets, blocks, folder=folder, offload_buffers=offload_buffers).run(most, must_hold=limit is not None)
    return model


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a whole model in main memory until it is called, then on its device until the handle, or the next model, moves it back.

    >>> model, handle = cpu_offload_with_hook(nn.Linear(2, 1), execution_device="cpu")
    >>> model(torch.ones(1, 2)).shape, handle.offload()
    (torch.Size([1, 1]), None)
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _limit(given: int | str | None, device_map: Mapping[str, Any]) -> int | None:
    if given is not None:
        return parse_size(given, "limit")
    budget: Mapping[Any, int] = getattr(device_map, "budget", {})
    if HOST.type not in budget:
        return None
    held: Mapping[Any, int] = getattr(device_map, "held", {})
    activations: Mapping[Any, int] = getattr(device_map, "activations", {})
    return max(1, budget[HOST.type] - held.get(HOST.type, 0) - activations.get(HOST.type, 0))


def _room_on_device(device_map: Mapping[str, Any], targets: ResolvedDeviceMap) -> int | None:
    """Return the bytes that a plan leaves for offloaded weights on the accelerator that runs them; None if the map is no plan."""
    budget: Mapping[Any, int] = getattr(device_map, "budget", {})
    main = parse_device_key(targets.main, "main_device")
    if targets.main == HOST or main not in budget:
        return None
    taken: Iterator[int] = (getattr(device_map, name, {}).get(main, 0) for name in ("held", "activations"))
    return max(1, budget[main] - sum(taken))


def choose_execution_device(model: nn.Module, given: Any) -> torch.device:
    """Return the device that offloaded modules run on: the one given, or that of the first weight."""
    if given is not None:
        return resolve_device(given, "execution_device")
    first = next((parameter for parameter in model.parameters() if not parameter.is_meta), None)
    if first is None:  # of a dispatched model: where it runs
        known = (getattr(hook, "execution_device", None) for module in model.modules() for hook in get_hooks(module))
        return resolve_device(next((device for device in known if device is not None), HOST), "execution_device")
    return first.device


def _largest_block(limit: int | None, room: int | None = None) -> int:
    """Return the size above which a module is divided: the limit holds prefetched blocks too, and the room on a device one of them."""
    sizes = [LARGEST_BLOCK, *([limit // (1 + PREFETCHED_BLOCKS)] if limit is not None else []), *([room // 2] if room is not None else [])]
    return max(1, min(sizes))


def find_dispatch_blocks(
    model: nn.Module, targets: ResolvedDeviceMap, limit: int | None, whole: Iterable[str], room: int | None = None
) -> dict[str, bool]:
    """Return the blocks of all entries that need a hook, in the order of the model; a module that occurs twice counts once.

    `limit`: bytes of offloaded weights in host memory at a time; `room`: the same on the accelerator that runs them.
    """
    largest = _largest_block(limit, room)
    modules = all_modules(model)
    order: dict[int, int] = {}
    for module in modules.values():
        order.setdefault(id(module), len(order))
    found: dict[int, tuple[str, bool]] = {}
    kept, apart = frozenset(whole), frozenset(targets.entries)
    for entry in targets.entries:
        offloaded = targets.is_offloaded(entry)
        if not offloaded and targets.main == HOST:
            continue
        if entry in modules:
            blocks = find_offload_blocks(model, entry, largest=largest if offloaded else _ANY_SIZE, whole=kept, apart=apart)
        else:  # a tensor that has an entry of its own
            blocks = {entry.rpartition(".")[0]: False}
        for name, is_whole in blocks.items():
            around = find_composite(modules, name) if offloaded else None
            if around is None:
                found.setdefault(order[id(modules[name])], (name, is_whole))
            else:
                found[order[id(modules[around])]] = (around, True)
    _warn_encoders(modules, [name for name, _ in found.values()])
    return dict(block for _, block in sorted(found.items()))


def _warn_encoders(modules: Mapping[str, nn.Module], blocks: Collection[str]) -> None:
    """Warn of encoders whose layers are loaded one by one, which changes their outputs at padded positions."""
    encoders = [name for name, module in modules.items() if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor]
    if divided := [name for name in encoders if any(block.startswith(f"{name}.") for block in blocks)]:
        get_logger(__name__).warning(
            f"The layers of {divided[0]} are loaded one by one: outputs at padded positions are not set to zero, as the encoder does "
            "without gradients otherwise. If you need that, give it one device in device_map, and a limit that it fits into."
        )
