"""Dispatch of a model by a device map: every module runs where the map says, and offloaded weights arrive when it runs.

Tensors of an entry on a device move there. Those on the disk, or in host memory while an accelerator computes, are offloaded: one hook
for each block brings them. Weights for the disk that are in memory are written once; those that lie in files stay there. `Dispatcher`
first finds where every tensor comes from, and raises if one has no values anywhere; only then does the model change. A dispatched model
can be dispatched again. No second copy is kept, on disk or in memory.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.big_models.device_map.budget import DISK, HOST, ResolvedDeviceMap, resolve_device
from slipstream.big_models.device_map.partition import LARGEST_BLOCK, OffloadBlock, find_composite, find_offload_blocks, is_called
from slipstream.big_models.device_map.plan import check_device_map, warn_unknown_classes
from slipstream.big_models.device_map.sizes import parameter_identity
from slipstream.big_models.hooks.forward_hooks import AlignDevicesHook, CpuOffload, UserCpuOffloadHook, add_hook_to_module, get_hooks
from slipstream.big_models.hooks.weight_swap import ModuleSlot, find_slots, wrap_like
from slipstream.big_models.previous_dispatch import (
    TemporaryFolder,
    find_offloaded_weights,
    has_offloaded_modules,
    record_dispatch,
    remove_dispatch_hooks,
)
from slipstream.big_models.weight_store.offload_folder import OffloadValue, save_offload_index, write_offload_files
from slipstream.big_models.weight_store.store import PREFETCHED_BLOCKS, decide_residency
from slipstream.big_models.weight_store.weights import INDEX_NAME, OffloadedWeightsLoader, PrefixedDataset
from slipstream.devices.memory import convert_bytes
from slipstream.errors import ConfigError, StateError
from slipstream.files.atomic_files import check_local_path
from slipstream.files.paths import check_name
from slipstream.files.sizes import parse_size
from slipstream.logging import get_logger

__all__ = [
    "Dispatcher", "INDEX_ATTRIBUTE", "WeightSources", "check_device_map", "cpu_offload", "cpu_offload_with_hook", "disk_offload",
    "dispatch_checked", "dispatch_model", "missing_values_message",
]


_SHOWN: Final = 5
_SMALL_FILE: Final = 64 << 20
"""Blocks share a file up to this size: every file is held open, and a process may not have many."""
_Entries = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class WeightSources:
    """Where values may come from that are not in the model."""

    state: Mapping[str, torch.Tensor]
    index: _Entries
    """What the caller says of weights in files: it goes before values in the model."""
    own: _Entries
    """What loading has left: it goes behind them."""
    folder: Path | None


@dataclass
class _DispatchedTensor:
    """One tensor with all its places."""

    places: list[ModuleSlot]
    away: bool
    entry: Mapping[str, Any] | None = None
    """Where it lies in a file."""
    value: torch.Tensor | None = None
    target: torch.device | None = None
    """Where it is kept; None is the disk."""

    @property
    def name(self) -> str:
        return self.places[0].name

    @property
    def has_no_values(self) -> bool:
        return self.entry is None and self.value is None

    @property
    def nbytes(self) -> int:
        held = self.places[0].tensor
        return held.numel() * held.element_size()


def missing_values_message(names: Sequence[str]) -> str:
    """The message about tensors on the meta device that nothing has values for."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(names[:_SHOWN])}{more}: on the meta device, without values, and nothing that was given or loaded has them. "
        "Call load_checkpoint_and_dispatch with a checkpoint that has these names, or say where they are with state_dict or offload_index; "
        "buffers that no file has are made with the model, under init_empty_weights(include_buffers=False)."
    )


class Dispatcher:
    """A model, the devices of its parts, and the blocks that get hooks; `always`: weights come and go even where they are in memory."""

    def __init__(
        self,
        model: nn.Module,
        targets: ResolvedDeviceMap,
        parts: Sequence[OffloadBlock],
        given: WeightSources,
        offload_buffers: bool,
        skip_keys: str | list[str] | None,
        *,
        always: bool = False,
    ) -> None:
        self._model, self._targets, self._given = model, targets, given
        self._offload_buffers, self._skip_keys, self._always = offload_buffers, skip_keys, always
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._parts = [part for part in parts if is_called(self._modules[part.name])]
        self._beside: _Entries = {}
        self._is_skeleton = False
        self._folder = given.folder
        self._temporary: list[TemporaryFolder] = []
        self._earlier = find_offloaded_weights(model)

    @torch.inference_mode(False)  # weights of that mode could not be used outside of it
    def run(self, limit: int | None = None, *, must_hold: bool = False) -> None:
        """Does it. `limit`: bytes of offloaded weights in memory at a time; it is raised to what is needed, unless it must hold."""
        tensors = self._tensors()
        self._check_plain(tensors)
        blocks = self._blocks(tensors)
        names = [part.name or "the model" for part in blocks]
        least = [sum(entry.nbytes for entry in block if entry.target is None) for block in blocks.values()]
        if must_hold:  # what is read around them is known only later
            _checked_limit(limit, must_hold, names, least)
        self._write(blocks, tensors)
        loader = self._loader([tensor for tensor in tensors if tensor.away], limit)
        taken = [loader.size_of(entry.name for entry in block) for block in blocks.values()]
        loader.store.limit = _checked_limit(limit, must_hold, names, taken)
        self._settle_all(tensors)
        self._attach(blocks, loader, _tied_tensors(tensors))
        record_dispatch(loader, [[place.name for place in tensor.places] for tensor in tensors if tensor.away], self._temporary)
        if any(tensor.away for tensor in tensors):
            self._model._apply = functools.partial(_refuse_move, self._model)  # type: ignore[method-assign]

    @torch.inference_mode(False)
    def bring(self) -> None:
        """Everything to its device, without any hook."""
        self._settle_all(self._tensors())

    def _settle_all(self, tensors: Sequence[_DispatchedTensor]) -> None:
        staying = self._loader([tensor for tensor in tensors if not tensor.away], None)
        if self._earlier:
            remove_dispatch_hooks(self._model)
        for tensor in tensors:
            if not tensor.away:
                self._settle(tensor, staying)
            elif len(tensor.places) > 1:  # hooks leave one stand-in in each of their blocks
                first = tensor.places[0]
                for place in tensor.places[1:]:
                    place.store[place.key] = first.store[first.key]

    # -- finding out ----------------------------------------------------------------------------------------------------------

    def _tensors(self) -> list[_DispatchedTensor]:
        groups: dict[Hashable, list[ModuleSlot]] = {}
        for place in find_slots(self._model, recurse=True):
            known = self._earlier.get(place.name)
            groups.setdefault((known and known.key) or parameter_identity(place.tensor), []).append(place)
        found = [_DispatchedTensor(places, all(map(self._leaves, places))) for places in groups.values()]
        self._hold_what_never_runs(found)
        # Buffers of a skeleton have values too, those with which modules begin: not what was saved.
        nothing_loaded = not self._given.index and not self._given.own
        named = self._model.named_parameters(remove_duplicate=False)
        self._is_skeleton = nothing_loaded and any(entry.is_meta for name, entry in named if name not in self._earlier)
        if self._given.folder is not None and (self._given.folder / INDEX_NAME).is_file():
            self._beside = _read_index(self._given.folder)
        for entry in found:
            self._find_values(entry)
        if nowhere := [entry.name for entry in found if entry.has_no_values]:
            raise ConfigError(missing_values_message(nowhere))
        return found

    def _leaves(self, place: ModuleSlot) -> bool:
        if place.store is not place.owner._parameters and not (self._offload_buffers and place.persistent):
            return False
        return self._always or self._targets.is_away(place.name)

    def _hold_what_never_runs(self, tensors: Iterable[_DispatchedTensor]) -> None:
        """Weights of modules that nobody calls, a ParameterList for one, cannot come when they run."""
        reached = {id(place.tensor) for part in self._parts for place in find_slots(self._modules[part.name], part.whole)}
        if left := [tensor for tensor in tensors if tensor.away and not any(id(place.tensor) in reached for place in tensor.places)]:
            for entry in left:
                entry.away = False
            get_logger(__name__).warning(
                f"{', '.join(entry.name for entry in left[:_SHOWN])} stay in memory "
                f"({convert_bytes(sum(entry.nbytes for entry in left))}): they "
                "belong to modules that are never called by themselves. Give the module that uses them one device in device_map."
            )

    def _find_values(self, dispatched_tensor: _DispatchedTensor) -> None:
        names = [place.name for place in dispatched_tensor.places]
        targets = [self._targets[name] for name in names]
        dispatched_tensor.target = next((target for target in targets if target is not None), None)
        if not dispatched_tensor.away:
            staying = [target for place, target in zip(dispatched_tensor.places, targets, strict=True) if not self._leaves(place)]
            dispatched_tensor.target = next((target for target in staying if target is not None), self._targets.main)
        held = dispatched_tensor.places[0].tensor
        unknown = held.is_meta or (self._is_skeleton and not isinstance(held, nn.Parameter))
        dispatched_tensor.entry = _first_known(self._given.index, names) if dispatched_tensor.away or held.is_meta else None
        if dispatched_tensor.entry is None:
            dispatched_tensor.value = _first_known(self._given.state, names) if unknown else held.detach()
        if dispatched_tensor.has_no_values and (known := _first_known(self._earlier, names)) is not None:
            dispatched_tensor.entry, dispatched_tensor.value = known.entry, known.value() if known.entry is None else None
            self._temporary += known.folders
        if dispatched_tensor.has_no_values:
            dispatched_tensor.entry = _first_known(self._given.own, names) or _first_known(self._beside, names)
        if dispatched_tensor.has_no_values and not held.is_meta:
            dispatched_tensor.value = held.detach()

    def _blocks(self, tensors: Iterable[_DispatchedTensor]) -> dict[OffloadBlock, list[_DispatchedTensor]]:
        """The offloaded tensors of each part. One that is tied across parts belongs to all of them."""
        by_tensor = {id(place.tensor): tensor for tensor in tensors if tensor.away for place in tensor.places}
        found: dict[OffloadBlock, list[_DispatchedTensor]] = {}
        for part in self._parts:
            ids = dict.fromkeys(id(place.tensor) for place in find_slots(self._modules[part.name], part.whole))
            found[part] = list({id(entry): entry for key in ids if (entry := by_tensor.get(key)) is not None}.values())
        return found

    # -- doing ----------------------------------------------------------------------------------------------------------------

    def _write(self, blocks: Mapping[OffloadBlock, Sequence[_DispatchedTensor]], tensors: Iterable[_DispatchedTensor]) -> None:
        """Weights for the disk that are in memory, one file for each block, or for several small ones."""
        seen: set[int] = set()
        files: list[dict[str, _DispatchedTensor]] = []
        room = 0
        for block in blocks.values():
            new = [entry for entry in block if entry.target is None and entry.value is not None and id(entry) not in seen]
            seen.update(map(id, new))
            size = sum(entry.nbytes for entry in new)
            if not files or size > room:
                files.append({})
                room = _SMALL_FILE
            files[-1].update({entry.name: entry for entry in new})
            room -= size
        if not seen:
            return
        total = sum(entry.nbytes for file in files for entry in file.values())
        if self._folder is None:
            self._temporary.append(TemporaryFolder(Path(tempfile.mkdtemp(prefix="slipstream-offload-"))))
            self._folder = self._temporary[-1].path
            get_logger(__name__).warning(
                f"{convert_bytes(total)} of weights are written to {self._folder}, which goes when the model does. "
                "Give offload_dir to choose another disk."
            )
        else:  # a model that takes its weights from here later has their buffers too
            files[-1].update({tensor.name: tensor for tensor in tensors if self._goes_along(tensor)})
        values = [
            {name: OffloadValue(entry.value, entry.value.dtype) for name, entry in file.items() if entry.value is not None}
            for file in files
        ]
        index = write_offload_files(self._folder, values, argument="offload_dir")
        if self._given.folder is not None:
            save_offload_index(index, self._folder)
        for name, entry in ((name, entry) for file in files for name, entry in file.items() if entry.away):
            entry.entry = {**index[name], "safetensors_file": str(self._folder.absolute() / index[name]["safetensors_file"])}
            entry.value = None

    def _check_plain(self, tensors: Iterable[_DispatchedTensor]) -> None:
        """An error if something is to go to the disk that is more than its elements."""
        for tensor in tensors:
            value: Any = tensor.value if tensor.away and tensor.target is None else None
            if value is not None and is_traceable_wrapper_subclass(value):
                raise ConfigError(
                    f"{tensor.name} is a {type(value).__name__}: quantised weights, and others that are made of several tensors, cannot go "
                    "to the disk. Give its module another device in device_map, or offload the plain model."
                )

    def _goes_along(self, dispatched_tensor: _DispatchedTensor) -> bool:
        """Whether it is a buffer of a module on the disk that stays in memory, and would be saved."""
        if (
            dispatched_tensor.away
            or dispatched_tensor.value is None
            or any(place.store is place.owner._parameters for place in dispatched_tensor.places)
        ):
            return False
        return all(place.persistent and self._targets[place.name] is None for place in dispatched_tensor.places)

    def _loader(self, tensors: Iterable[_DispatchedTensor], limit: int | None) -> OffloadedWeightsLoader:
        state: dict[str, torch.Tensor] = {}
        index: dict[str, Mapping[str, Any]] = {}
        for tensor in tensors:
            for place in tensor.places:
                if tensor.entry is not None:
                    index[place.name] = tensor.entry
                elif tensor.away and tensor.value is not None:
                    state[place.name] = tensor.value = tensor.value.to(HOST)
        loader = OffloadedWeightsLoader(state, self._folder, index, limit=limit)
        for other in {id(entry.loader): entry.loader for entry in self._earlier.values() if entry.loader is not None}.values():
            loader.use_files_of(other)
        return loader

    def _settle(self, dispatched_tensor: _DispatchedTensor, loader: OffloadedWeightsLoader) -> None:
        """A tensor that stays in memory goes to its device; what came from a file or from the caller takes the place of its stand-in."""
        held = dispatched_tensor.places[0].tensor
        value = dispatched_tensor.value if dispatched_tensor.entry is None else loader[dispatched_tensor.name]
        assert value is not None
        assert dispatched_tensor.target is not None
        if not held.is_meta and value.device == dispatched_tensor.target and value.data_ptr() == held.data_ptr():
            return
        made = wrap_like(held, value.to(dispatched_tensor.target, held.dtype))
        for place in dispatched_tensor.places:
            place.store[place.key] = made

    def _attach(
        self,
        blocks: Mapping[OffloadBlock, Sequence[_DispatchedTensor]],
        loader: OffloadedWeightsLoader,
        tied: dict[int, dict[torch.device, torch.Tensor]],
    ) -> None:
        main = self._targets.main
        for part, block in blocks.items():
            device = main if block else self._device_of(part.name)
            if not block and device == HOST == main:
                continue
            hook = AlignDevicesHook(
                execution_device=device,
                offload=bool(block),
                io_same_device=not part.name,
                weights_map=PrefixedDataset(loader, f"{part.name}." if part.name else "") if block else None,
                offload_buffers=self._offload_buffers,
                place_submodules=part.whole,
                skip_keys=self._skip_keys,
                tied_params_map=tied,
            )
            add_hook_to_module(self._modules[part.name], hook, append=True)
        for name in self._divided(blocks):
            hook = AlignDevicesHook(execution_device=self._device_of(name), skip_keys=self._skip_keys, tied_params_map=tied)
            add_hook_to_module(self._modules[name], hook, append=True)
        if not any(not part.name and block for part, block in blocks.items()):
            root = AlignDevicesHook(execution_device=main, io_same_device=True, skip_keys=self._skip_keys, tied_params_map=tied)
            add_hook_to_module(self._model, root, append=True)

    def _device_of(self, name: str) -> torch.device:
        """Where a module runs."""
        target = self._targets[name]
        return self._targets.main if target is None or self._targets.is_away(name) else target

    def _divided(self, parts: Iterable[OffloadBlock]) -> list[str]:
        """Modules whose blocks have hooks and that have none: what they compute themselves needs its inputs on one device, too."""
        if self._targets.main == HOST:
            return []
        hooked = {part.name for part in parts}
        found: dict[str, None] = {}
        for name in hooked:
            while name and name not in self._targets.entries:
                name = name.rpartition(".")[0]
                if name and name not in hooked and is_called(self._modules[name]):
                    found[name] = None
        return sorted(found)


def _first_known(table: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((table[name] for name in names if name in table), None)


def _read_index(folder: Path) -> _Entries:
    """The index of an offload folder; files are named within it."""
    found = OffloadedWeightsLoader(save_folder=folder).index
    for said in found.values():
        if "safetensors_file" in said:
            check_name(said["safetensors_file"], str(folder / INDEX_NAME))
    return found


def _checked_limit(limit: int | None, must_hold: bool, names: Sequence[str], sizes: Sequence[int]) -> int | None:
    """A limit with which every block can run: else an error now, and not in the middle of a forward."""
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


def _tied_tensors(tensors: Iterable[_DispatchedTensor]) -> dict[int, dict[torch.device, torch.Tensor]]:
    shared = (tensor for tensor in tensors if len(tensor.places) > 1)
    return {entry.value.data_ptr(): {} for entry in shared if entry.value is not None}


def _refuse_move(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """In the place of what `.to()`, `.half()` and the like do to every tensor: offloaded ones are not there to be moved or converted."""
    if has_offloaded_modules(model):
        raise StateError(
            f"This {type(model).__name__} has offloaded modules (see its hf_device_map), whose weights cannot be moved or converted. Leave "
            "out .to(), .half() and the like: give a device_map and dtype when you load it, or remove_hook_from_submodules(model) first."
        )
    del model._apply  # the hooks are gone
    moved: nn.Module = model._apply(fn, recurse)  # type: ignore[no-untyped-call]
    return moved


INDEX_ATTRIBUTE: Final = "_slipstream_offload_index"
"""The attribute of a model under which loading leaves where its weights on the disk are."""
_BLOCKS_IN_MEMORY: Final = 1 + PREFETCHED_BLOCKS
_ANY_SIZE: Final = 1 << 62


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
    """Puts every part of a model where `device_map` says, and attaches what brings offloaded weights; the same model comes back.

    `main_device`: where offloaded modules run; the first accelerator of the map, or the processor. `state_dict`: values of weights that
    are on the meta device. `offload_dir`: where weights for the disk are written that are in memory; a temporary folder if it is not
    given. `offload_index`: where weights for the disk are, by name (`{"safetensors_file": ..., "weight_name": ...}`); those are not
    written. Buffers stay in memory unless `offload_buffers`. `skip_keys`: arguments of forward that are not moved.
    `preload_module_classes`: classes whose modules get all their weights at once, as they use those of their children themselves.
    `limit`: most bytes of offloaded weights that are in memory at a time; of a map of `infer_auto_device_map` with a budget for "cpu", what
    the budget leaves. A map with a single device needs no hooks, unless `force_hooks`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> expected = model(torch.ones(1, 2))
    >>> model = dispatch_model(model, {"0": "cpu", "1": "disk"})
    >>> torch.equal(model(torch.ones(1, 2)), expected), model[1].weight.is_meta, model.hf_device_map
    (True, True, {'0': 'cpu', '1': 'disk'})
    """
    if not isinstance(device_map, Mapping):
        raise ConfigError(
            f"dispatch_model was given device_map={device_map!r}. It takes a dict: make one with infer_auto_device_map, "
            "or call load_checkpoint_and_dispatch."
        )
    targets = ResolvedDeviceMap(device_map, main_device)
    check_device_map(model, device_map)
    warn_unknown_classes(model, preload_module_classes, "preload_module_classes")
    given = WeightSources(state_dict or {}, _checked_index(offload_index), getattr(model, INDEX_ATTRIBUTE, {}), _folder(offload_dir))
    return dispatch_checked(model, device_map, targets, given, offload_buffers, skip_keys, preload_module_classes, force_hooks, limit)


def dispatch_checked(
    model: nn.Module,
    device_map: Mapping[str, Any],
    targets: ResolvedDeviceMap,
    given: WeightSources,
    offload_buffers: bool,
    skip_keys: str | list[str] | None,
    whole: Iterable[str] | None,
    force_hooks: bool,
    limit: int | str | None,
) -> nn.Module:
    """`dispatch_model` with a map that has been checked."""
    if targets.single is not None and not force_hooks and not targets.is_away(next(iter(device_map))):
        _move_all(model, targets, given)
    else:
        most = _limit(limit, device_map)
        stay_whole = {*(whole or ()), *getattr(device_map, "whole", ()), *(getattr(model, "_no_split_modules", None) or ())}
        parts = _find_blocks(model, targets, most, stay_whole)
        Dispatcher(model, targets, parts, given, offload_buffers, skip_keys).run(most, must_hold=limit is not None)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def cpu_offload(
    model: nn.Module,
    execution_device: Any = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keeps the weights in main memory, and brings those of each block to `execution_device` when it runs.

    >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 1)), execution_device="cpu")
    >>> model(torch.ones(1, 2)).shape, model[0].weight.is_meta
    (torch.Size([1, 1]), True)
    """
    warn_unknown_classes(model, preload_module_classes, "preload_module_classes")
    device = _execution_device(model, execution_device)
    parts = find_offload_blocks(model, "", whole=preload_module_classes or ())
    given = WeightSources(state_dict or {}, {}, {}, None)
    Dispatcher(model, ResolvedDeviceMap({"": HOST}, device), parts, given, offload_buffers, None, always=True).run()
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
    """Writes the weights to `offload_dir`, and brings those of each block from there to `execution_device` when it runs.

    If the model is on the meta device, they are taken from there: the folder is that of an earlier `disk_offload`, or `offload_state_dict`.
    `limit`: most bytes of weights that are in memory at a time.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = disk_offload(nn.Sequential(nn.Linear(2, 1)), folder)
    ...     model(torch.ones(1, 2)).shape, model[0].weight.is_meta
    (torch.Size([1, 1]), True)
    """
    warn_unknown_classes(model, preload_module_classes, "preload_module_classes")
    device = _execution_device(model, execution_device)
    most = _limit(limit, {})
    parts = find_offload_blocks(model, "", largest=_largest_block(most), whole=preload_module_classes or ())
    given = WeightSources({}, {}, {}, check_local_path(offload_dir, "offload_dir"))
    Dispatcher(model, ResolvedDeviceMap({"": DISK}, device), parts, given, offload_buffers, None).run(most, must_hold=limit is not None)
    return model


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keeps a whole model in main memory until it is called, and then on its device until the handle, or the next model, sends it back.

    >>> model, handle = cpu_offload_with_hook(nn.Linear(2, 1), execution_device="cpu")
    >>> model(torch.ones(1, 2)).shape, handle.offload()
    (torch.Size([1, 1]), None)
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


# --- what was given -----------------------------------------------------------------------------------------------------------


def _checked_index(offload_index: Mapping[str, Mapping[str, Any]] | None) -> Mapping[str, Mapping[str, Any]]:
    if offload_index is None:
        return {}
    if not isinstance(offload_index, Mapping) or not all(isinstance(entry, Mapping) for entry in offload_index.values()):
        raise ConfigError(
            f"offload_index is a {type(offload_index).__name__}. Write a dict: name of a weight to where it is, "
            'as {"safetensors_file": "model.safetensors", "weight_name": "head.weight"}.'
        )
    return offload_index


def _folder(offload_dir: str | os.PathLike[str] | None) -> Path | None:
    return None if offload_dir is None else check_local_path(offload_dir, "offload_dir")


def _limit(given: int | str | None, device_map: Mapping[str, Any]) -> int | None:
    if given is not None:
        return parse_size(given, "limit")
    budget: Mapping[Any, int] = getattr(device_map, "budget", {})
    if HOST.type not in budget:
        return None
    held: Mapping[Any, int] = getattr(device_map, "held", {})
    activations: Mapping[Any, int] = getattr(device_map, "activations", {})
    return max(1, budget[HOST.type] - held.get(HOST.type, 0) - activations.get(HOST.type, 0))


def _execution_device(model: nn.Module, given: Any) -> torch.device:
    if given is not None:
        return resolve_device(given, "execution_device")
    first = next((parameter for parameter in model.parameters() if not parameter.is_meta), None)
    if first is None:  # of a model that is spread: where it runs
        known = (getattr(hook, "execution_device", None) for module in model.modules() for hook in get_hooks(module))
        return resolve_device(next((entry for entry in known if entry is not None), HOST), "execution_device")
    return first.device


def _largest_block(limit: int | None) -> int:
    """Above this size a module is divided."""
    return LARGEST_BLOCK if limit is None else max(1, min(LARGEST_BLOCK, limit // _BLOCKS_IN_MEMORY))


def _find_blocks(model: nn.Module, targets: ResolvedDeviceMap, limit: int | None, whole: Iterable[str]) -> list[OffloadBlock]:
    """The blocks of all entries that need a hook, in the order of the model; a module that stands in two places counts once."""
    largest = _largest_block(limit)
    modules = dict(model.named_modules(remove_duplicate=False))
    order: dict[int, int] = {}
    for module in modules.values():
        order.setdefault(id(module), len(order))
    found: dict[int, OffloadBlock] = {}
    kept, apart = frozenset(whole), frozenset(targets.entries)
    for name in targets.entries:
        away = targets.is_away(name)
        if not away and targets.main == HOST:
            continue
        if name in modules:
            parts = find_offload_blocks(model, name, largest=largest if away else _ANY_SIZE, whole=kept, apart=apart)
        else:  # a tensor that has an entry of its own
            parts = [OffloadBlock(name.rpartition(".")[0], False)]
        for part in parts:
            around = find_composite(modules, part.name) if away else None
            number = order[id(modules[part.name if around is None else around])]
            found[number] = found.get(number, part) if around is None else OffloadBlock(around, True)
    _warn_encoders(modules, found.values())
    return [part for _, part in sorted(found.items())]


def _warn_encoders(modules: Mapping[str, nn.Module], parts: Collection[OffloadBlock]) -> None:
    """Whose results are others for padding, as weights of their layers come one after the other."""
    inner = [name for name, module in modules.items() if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor]
    if divided := [name for name in inner if any(part.name.startswith(f"{name}.") for part in parts)]:
        get_logger(__name__).warning(
            f"The layers of {divided[0]} get their weights one after the other: outputs at padded positions are not set to zero, as the "
            "encoder does without gradients otherwise. Give it one device in device_map, and a limit that it fits into, if you need that."
        )


def _move_all(model: nn.Module, targets: ResolvedDeviceMap, given: WeightSources) -> None:
    """Everything goes to one device, if it is not there."""
    places = list(find_slots(model, recurse=True))
    if has_offloaded_modules(model) or any(place.tensor.is_meta for place in places):
        Dispatcher(model, targets, (), given, False, None).bring()
    elif any(place.tensor.device != targets.single for place in places):
        model.to(targets.single)
