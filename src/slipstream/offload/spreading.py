"""One dispatch: where every tensor of a model is to come from is found out first, then the model changes.

A tensor is *away* if all its modules are: its values come from a file, or from main memory, when they run. A tied weight that one module
keeps in memory is there for all. Values are taken from what the caller named, else from the model, else from what was given or found
beside it; a tensor that has none anywhere is an error with its name. A model that is spread already can be spread again: weights that are
away are where its hooks bring them from, and the hooks are replaced.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from slipstream.devices.memory import convert_bytes
from slipstream.errors import ConfigError, StateError
from slipstream.files.names import check_name
from slipstream.logging import get_logger
from slipstream.offload.blocks import Part, is_called
from slipstream.offload.earlier import TemporaryFolder, away_in, has_offloaded_modules, leave, take_hooks_off
from slipstream.offload.hooking.hooks import AlignDevicesHook, add_hook_to_module
from slipstream.offload.hooking.parts import Place, dressed_like, places_of
from slipstream.offload.planning.tied import identity_of
from slipstream.offload.store.parked import save_offload_index
from slipstream.offload.store.residency import decide
from slipstream.offload.store.weights import INDEX, OffloadedWeightsLoader, PrefixedDataset
from slipstream.offload.store.written import Value, write
from slipstream.offload.targets import HOST, Targets

__all__ = ["Given", "Spreading", "no_values"]

_SHOWN: Final = 5
_SMALL_FILE: Final = 64 << 20
"""Blocks share a file up to this size: every file is held open, and a process may not have many."""
_Entries = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Given:
    """Where values may come from that are not in the model."""

    state: Mapping[str, torch.Tensor]
    index: _Entries
    """What the caller says of weights in files: it goes before values in the model."""
    own: _Entries
    """What loading has left: it goes behind them."""
    folder: Path | None


@dataclass
class _Tensor:
    """One tensor with all its places."""

    places: list[Place]
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


def no_values(names: Sequence[str]) -> str:
    """The message about tensors on the meta device that nothing has values for."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(names[:_SHOWN])}{more}: on the meta device, without values, and nothing that was given or loaded has them. "
        "Call load_checkpoint_and_dispatch with a checkpoint that has these names, or say where they are with state_dict or offload_index; "
        "buffers that no file has are made with the model, under init_empty_weights(include_buffers=False)."
    )


class Spreading:
    """A model, the devices of its parts, and the blocks that get hooks; `always`: weights come and go even where they are in memory."""

    def __init__(
        self,
        model: nn.Module,
        targets: Targets,
        parts: Sequence[Part],
        given: Given,
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
        self._earlier = away_in(model)

    @torch.inference_mode(False)  # weights of that mode could not be used outside of it
    def run(self, limit: int | None = None, *, must_hold: bool = False) -> None:
        """Does it. `limit`: bytes of offloaded weights in memory at a time; it is raised to what is needed, unless it must hold."""
        tensors = self._tensors()
        self._check_plain(tensors)
        blocks = self._blocks(tensors)
        names = [part.name or "the model" for part in blocks]
        least = [sum(one.nbytes for one in block if one.target is None) for block in blocks.values()]
        if must_hold:  # what is read around them is known only later
            _checked(limit, must_hold, names, least)
        self._write(blocks, tensors)
        loader = self._loader([one for one in tensors if one.away], limit)
        taken = [loader.size_of(one.name for one in block) for block in blocks.values()]
        loader.store.limit = _checked(limit, must_hold, names, taken)
        self._settle_all(tensors)
        self._attach(blocks, loader, _tied(tensors))
        leave(loader, [[place.name for place in one.places] for one in tensors if one.away], self._temporary)
        if any(one.away for one in tensors):
            self._model._apply = functools.partial(_refuse_moving, self._model)  # type: ignore[method-assign]

    @torch.inference_mode(False)
    def bring(self) -> None:
        """Everything to its device, without any hook."""
        self._settle_all(self._tensors())

    def _settle_all(self, tensors: Sequence[_Tensor]) -> None:
        staying = self._loader([one for one in tensors if not one.away], None)
        if self._earlier:
            take_hooks_off(self._model)
        for one in tensors:
            if not one.away:
                self._settle(one, staying)
            elif len(one.places) > 1:  # hooks leave one stand-in in each of their blocks
                first = one.places[0]
                for place in one.places[1:]:
                    place.store[place.key] = first.store[first.key]

    # -- finding out ----------------------------------------------------------------------------------------------------------

    def _tensors(self) -> list[_Tensor]:
        groups: dict[Hashable, list[Place]] = {}
        for place in places_of(self._model, recurse=True):
            known = self._earlier.get(place.name)
            groups.setdefault((known and known.key) or identity_of(place.tensor), []).append(place)
        found = [_Tensor(places, all(map(self._leaves, places))) for places in groups.values()]
        self._hold_what_never_runs(found)
        # Buffers of a skeleton have values too, those with which modules begin: not what was saved.
        nothing_loaded = not self._given.index and not self._given.own
        named = self._model.named_parameters(remove_duplicate=False)
        self._is_skeleton = nothing_loaded and any(one.is_meta for name, one in named if name not in self._earlier)
        if self._given.folder is not None and (self._given.folder / INDEX).is_file():
            self._beside = _read_index(self._given.folder)
        for one in found:
            self._find_values(one)
        if nowhere := [one.name for one in found if one.has_no_values]:
            raise ConfigError(no_values(nowhere))
        return found

    def _leaves(self, place: Place) -> bool:
        if place.store is not place.owner._parameters and not (self._offload_buffers and place.persistent):
            return False
        return self._always or self._targets.is_away(place.name)

    def _hold_what_never_runs(self, tensors: Iterable[_Tensor]) -> None:
        """Weights of modules that nobody calls, a ParameterList for one, cannot come when they run."""
        reached = {id(place.tensor) for part in self._parts for place in places_of(self._modules[part.name], part.whole)}
        if left := [one for one in tensors if one.away and not any(id(place.tensor) in reached for place in one.places)]:
            for one in left:
                one.away = False
            get_logger(__name__).warning(
                f"{', '.join(one.name for one in left[:_SHOWN])} stay in memory ({convert_bytes(sum(one.nbytes for one in left))}): they "
                "belong to modules that are never called by themselves. Give the module that uses them one device in device_map."
            )

    def _find_values(self, one: _Tensor) -> None:
        names = [place.name for place in one.places]
        targets = [self._targets[name] for name in names]
        one.target = next((target for target in targets if target is not None), None)
        if not one.away:
            staying = [target for place, target in zip(one.places, targets, strict=True) if not self._leaves(place)]
            one.target = next((target for target in staying if target is not None), self._targets.main)
        held = one.places[0].tensor
        unknown = held.is_meta or (self._is_skeleton and not isinstance(held, nn.Parameter))
        one.entry = _first(self._given.index, names) if one.away or held.is_meta else None
        if one.entry is None:
            one.value = _first(self._given.state, names) if unknown else held.detach()
        if one.has_no_values and (known := _first(self._earlier, names)) is not None:
            one.entry, one.value = known.entry, known.value() if known.entry is None else None
            self._temporary += known.folders
        if one.has_no_values:
            one.entry = _first(self._given.own, names) or _first(self._beside, names)
        if one.has_no_values and not held.is_meta:
            one.value = held.detach()

    def _blocks(self, tensors: Iterable[_Tensor]) -> dict[Part, list[_Tensor]]:
        """The offloaded tensors of each part. One that is tied across parts belongs to all of them."""
        by_tensor = {id(place.tensor): one for one in tensors if one.away for place in one.places}
        found: dict[Part, list[_Tensor]] = {}
        for part in self._parts:
            ids = dict.fromkeys(id(place.tensor) for place in places_of(self._modules[part.name], part.whole))
            found[part] = list({id(one): one for key in ids if (one := by_tensor.get(key)) is not None}.values())
        return found

    # -- doing ----------------------------------------------------------------------------------------------------------------

    def _write(self, blocks: Mapping[Part, Sequence[_Tensor]], tensors: Iterable[_Tensor]) -> None:
        """Weights for the disk that are in memory, one file for each block, or for several small ones."""
        seen: set[int] = set()
        files: list[dict[str, _Tensor]] = []
        room = 0
        for block in blocks.values():
            new = [one for one in block if one.target is None and one.value is not None and id(one) not in seen]
            seen.update(map(id, new))
            size = sum(one.nbytes for one in new)
            if not files or size > room:
                files.append({})
                room = _SMALL_FILE
            files[-1].update({one.name: one for one in new})
            room -= size
        if not seen:
            return
        total = sum(one.nbytes for file in files for one in file.values())
        if self._folder is None:
            self._temporary.append(TemporaryFolder(Path(tempfile.mkdtemp(prefix="slipstream-offload-"))))
            self._folder = self._temporary[-1].path
            get_logger(__name__).warning(
                f"{convert_bytes(total)} of weights are written to {self._folder}, which goes when the model does. "
                "Give offload_dir to choose another disk."
            )
        else:  # a model that takes its weights from here later has their buffers too
            files[-1].update({one.name: one for one in tensors if self._goes_along(one)})
        values = [{name: Value(one.value, one.value.dtype) for name, one in file.items() if one.value is not None} for file in files]
        index = write(self._folder, values, argument="offload_dir")
        if self._given.folder is not None:
            save_offload_index(index, self._folder)
        for name, one in ((name, one) for file in files for name, one in file.items() if one.away):
            one.entry = {**index[name], "safetensors_file": str(self._folder.absolute() / index[name]["safetensors_file"])}
            one.value = None

    def _check_plain(self, tensors: Iterable[_Tensor]) -> None:
        """An error if something is to go to the disk that is more than its elements."""
        for one in tensors:
            value: Any = one.value if one.away and one.target is None else None
            if value is not None and is_traceable_wrapper_subclass(value):
                raise ConfigError(
                    f"{one.name} is a {type(value).__name__}: quantised weights, and others that are made of several tensors, cannot go "
                    "to the disk. Give its module another device in device_map, or offload the plain model."
                )

    def _goes_along(self, one: _Tensor) -> bool:
        """Whether it is a buffer of a module on the disk that stays in memory, and would be saved."""
        if one.away or one.value is None or any(place.store is place.owner._parameters for place in one.places):
            return False
        return all(place.persistent and self._targets[place.name] is None for place in one.places)

    def _loader(self, tensors: Iterable[_Tensor], limit: int | None) -> OffloadedWeightsLoader:
        state: dict[str, torch.Tensor] = {}
        index: dict[str, Mapping[str, Any]] = {}
        for one in tensors:
            for place in one.places:
                if one.entry is not None:
                    index[place.name] = one.entry
                elif one.away and one.value is not None:
                    state[place.name] = one.value = one.value.to(HOST)
        loader = OffloadedWeightsLoader(state, self._folder, index, limit=limit)
        for other in {id(one.loader): one.loader for one in self._earlier.values() if one.loader is not None}.values():
            loader.use_files_of(other)
        return loader

    def _settle(self, one: _Tensor, loader: OffloadedWeightsLoader) -> None:
        """A tensor that stays in memory goes to its device; what came from a file or from the caller takes the place of its stand-in."""
        held = one.places[0].tensor
        value = one.value if one.entry is None else loader[one.name]
        assert value is not None
        assert one.target is not None
        if not held.is_meta and value.device == one.target and value.data_ptr() == held.data_ptr():
            return
        made = dressed_like(held, value.to(one.target, held.dtype))
        for place in one.places:
            place.store[place.key] = made

    def _attach(
        self, blocks: Mapping[Part, Sequence[_Tensor]], loader: OffloadedWeightsLoader, tied: dict[int, dict[torch.device, torch.Tensor]]
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

    def _divided(self, parts: Iterable[Part]) -> list[str]:
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


def _first(table: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((table[name] for name in names if name in table), None)


def _read_index(folder: Path) -> _Entries:
    """The index of an offload folder; files are named within it."""
    found = OffloadedWeightsLoader(save_folder=folder).index
    for said in found.values():
        if "safetensors_file" in said:
            check_name(said["safetensors_file"], str(folder / INDEX))
    return found


def _checked(limit: int | None, must_hold: bool, names: Sequence[str], sizes: Sequence[int]) -> int | None:
    """A limit with which every block can run: else an error now, and not in the middle of a forward."""
    largest = max(sizes, default=0)
    if limit is not None and limit < largest and not must_hold:
        get_logger(__name__).warning(
            f"{names[sizes.index(largest)]} needs {convert_bytes(largest)} of memory to run, and the device map leaves "
            f"{convert_bytes(limit)}: it is exceeded. Give more max_memory, or smaller modules."
        )
        limit = largest
    if limit is not None and sizes:
        decide(sizes, limit, names)
    return limit


def _tied(tensors: Iterable[_Tensor]) -> dict[int, dict[torch.device, torch.Tensor]]:
    shared = (one for one in tensors if len(one.places) > 1)
    return {one.value.data_ptr(): {} for one in shared if one.value is not None}


def _refuse_moving(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """In the place of what `.to()`, `.half()` and the like do to every tensor: offloaded ones are not there to be moved or converted."""
    if has_offloaded_modules(model):
        raise StateError(
            f"This {type(model).__name__} has offloaded modules (see its hf_device_map), whose weights cannot be moved or converted. Leave "
            "out .to(), .half() and the like: give a device_map and dtype when you load it, or remove_hook_from_submodules(model) first."
        )
    del model._apply  # the hooks are gone
    moved: nn.Module = model._apply(fn, recurse)  # type: ignore[no-untyped-call]
    return moved
