"""Weights loaded into models that are larger than memory, by a device map, from memory-mapped files.

`load_checkpoint_in_model` loads, `load_checkpoint_and_dispatch` also finds the map and attaches the hooks that bring offloaded weights.
Safetensors files are used in place: weights for "cpu" become mapped pages, weights for the disk stay in the user's file, and only
accelerators get a copy. What a file does not have in the right dtype, or not in safetensors, is written to an offload folder. No pickle
is run. Everything is decided before the model changes; if something does not fit, the model is unchanged.
"""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from slipstream.big_models.device_map.budget import HOST, ResolvedDeviceMap
from slipstream.big_models.device_map.plan import check_device_map, plan_device_map, warn_unknown_classes
from slipstream.big_models.device_map.sizes import parse_class_names
from slipstream.big_models.dispatch import INDEX_ATTRIBUTE, WeightSources, dispatch_checked
from slipstream.big_models.hooks.weight_swap import wrap_like
from slipstream.big_models.previous_dispatch import has_offloaded_modules, keep_in_memory
from slipstream.big_models.weight_store.offload_folder import (
    IndexEntry,
    OffloadValue,
    make_index_entry,
    save_offload_index,
    write_offload_files,
)
from slipstream.checkpoint.model_io import load_weights, parse_dtype
from slipstream.checkpoint.sharded import is_sharded
from slipstream.checkpoint.tensor_bytes import dtype_name, memory_identity
from slipstream.checkpoint.weight_source import WeightFile, WeightSource, find_weights
from slipstream.checkpoint.weights import (
    METADATA,
    LoadReport,
    TensorSlot,
    TensorSlots,
    arrange_state_dict,
    check_fit,
    may_rename_keys,
    set_tensor,
    tensor_slots,
    tied_names,
    unwrap_module,
)
from slipstream.devices.memory import convert_bytes
from slipstream.distributed.progress_bar import bar
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.atomic_files import check_local_path
from slipstream.logging import get_logger

__all__ = [
    "LoadedWeights", "WeightLoadOptions", "load_by_device_map", "load_checkpoint_and_dispatch", "load_checkpoint_in_model",
    "load_state_dict",
]


_LARGEST_FILE: Final = 1 << 30


@dataclass(frozen=True)
class WeightLoadOptions:
    """What the caller wants of the weights."""

    dtype: torch.dtype | None = None
    keep: tuple[str, ...] = ()
    """Names of modules whose weights stay float32."""
    offload_buffers: bool = False
    strict: bool = False
    folder: Path | None = None
    """Where weights for the disk are written, if the files of the checkpoint cannot be used as they are."""

    def dtype_of(self, names: Iterable[str], held: torch.Tensor, value: torch.Tensor) -> torch.dtype:
        """The type that a tensor is to have: that of the model, if nothing else was said."""
        if self.dtype is None or not (value.is_floating_point() and held.is_floating_point()):
            return held.dtype
        kept = any(f".{entry}." in f".{name}." for name in names for entry in self.keep)
        return torch.float32 if kept else self.dtype


@dataclass(frozen=True)
class LoadedWeights:
    """What came of it."""

    report: LoadReport
    index: dict[str, IndexEntry] = field(default_factory=dict)
    """Where the weights are that are on the disk; files are named by their whole paths."""
    written: dict[str, IndexEntry] = field(default_factory=dict)
    """Those of them that were written to the folder, with names of files within it."""


class _Origin(NamedTuple):
    file: WeightFile
    name: str


class _TensorLoad(NamedTuple):
    held: torch.Tensor
    names: list[str]
    places: list[TensorSlot]
    value: torch.Tensor
    dtype: torch.dtype
    target: torch.device | None
    origin: _Origin | None
    again: bool
    """The value is that of another weight too, to which this one is not tied."""

    @property
    def is_copied(self) -> bool:
        return self.target is not None and (self.again or self.dtype is not self.value.dtype or self.target != self.value.device)

    @property
    def is_written(self) -> bool:
        """For the disk, and not there as it is wanted."""
        if self.target is not None:
            return False
        return self.origin is None or self.origin.file.layout is None or self.dtype is not self.value.dtype or self._is_reshaped

    @property
    def _is_reshaped(self) -> bool:
        return self.value.shape != self.held.shape


@torch.inference_mode(False)  # weights of that mode could not be used outside of it
def load_by_device_map(
    model: torch.nn.Module, source: WeightSource, where: str, targets: ResolvedDeviceMap, wishes: WeightLoadOptions
) -> LoadedWeights:
    """Loads the weights of `source`; `where` names it in messages. If there is an error, the model has not changed."""
    files = _open_files(source, where)
    aliases = {**source.aliases, **{other: kept for file in files for other, kept in file.aliases.items()}}
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    extra = source.read_extra()
    places = tensor_slots(model)
    _check_unsharded(places)
    tied = tied_names(model, places)
    report = check_fit(model, tensors, aliases, extra, tied=tied)
    report.demand_values(model, where)
    report.demand(where, type(model).__name__, strict=wishes.strict)
    state: Mapping[str, Any] = arrange_state_dict(model, tensors, aliases, extra, report, strict=wishes.strict, tied=tied)
    known: Callable[[torch.Tensor], Any] = id
    if _needs_own_loading(model, report, extra):
        state, known = _load_through_model(model, state, places), memory_identity
    origins = {known(tensors[name]): _Origin(file, name) for file in files for name in file.tensors}
    steps = [*_plan_loads(places, state, targets, wishes, lambda value: origins.get(known(value)))]
    to_write = [step for step in steps if step.is_written]
    if to_write and wishes.folder is None:
        raise ConfigError(_folder_error(to_write[0], len(to_write), where))
    _warn_conversions(steps, where, wishes)
    with _progress(steps) as done, torch.no_grad():
        written = _write_converted(to_write, wishes.folder, done) if to_write and wishes.folder else {}
        index = {name: _index_entry(step, written, wishes) for step in steps if step.target is None for name in step.names}
        for step in steps:
            _place_tensor(step)
            if step.is_copied:
                _release_pages(step)
                done(step.value.nbytes)
    return LoadedWeights(report, index, written)


def _open_files(source: WeightSource, where: str) -> list[WeightFile]:
    """All files, mapped. Sizes and headers are checked; checksums are not, as that would read everything."""
    files = [source.open(name, verify=False) for name in source.files]
    homes: dict[str, str] = {}
    for name, file in zip(source.files, files, strict=True):
        for tensor in file.tensors:
            if homes.setdefault(tensor, name) != name:
                raise CheckpointError(
                    f"{where} has {tensor!r} in two files, {homes[tensor]} and {name}. Save it again, or remove one of them."
                )
    return files


def _check_unsharded(places: Iterable[TensorSlots]) -> None:
    if divided := next((where for held, where in places if is_sharded(held)), None):
        raise ConfigError(f"device_map cannot place {divided[0][0]}: it is divided over processes already. Load it without device_map.")


def _needs_own_loading(model: torch.nn.Module, report: LoadReport, extra: Mapping[str, Any]) -> bool:
    """Whether only the model itself knows what becomes of the weights: it renames them, keeps other state, or makes up what is missing."""
    if may_rename_keys(model) or extra.keys() - {METADATA}:
        return True
    plain = torch.nn.Module._load_from_state_dict
    owners = {name.rpartition(".")[0] for name in report.missing}
    return any(type(model.get_submodule(owner))._load_from_state_dict is not plain for owner in owners)


def _load_through_model(model: torch.nn.Module, state: Mapping[str, Any], places: Sequence[TensorSlots]) -> dict[str, Any]:
    """The weights as the model itself places them, under the names that they have in it; the model keeps what it has for now."""
    found: dict[str, Any] = {}
    try:
        model.load_state_dict(state, strict=False, assign=True)
        for held, where in places:
            for name, (module, key) in where:
                now = module._parameters.get(key, module._buffers.get(key))
                if now is not None and now is not held:
                    found[name] = now.detach()
    except (RuntimeError, TypeError) as error:  # a load_state_dict of its own may not know `assign`
        raise CheckpointError(
            f"{type(model).__name__} refused to load: {error}. Load it without device_map, and give it to dispatch_model then."
        ) from error
    finally:
        for held, where in places:
            for _, place in where:
                set_tensor(place, held)
    return found


def _plan_loads(
    places: Iterable[TensorSlots],
    state: Mapping[str, Any],
    targets: ResolvedDeviceMap,
    wishes: WeightLoadOptions,
    origin_of: Callable[[torch.Tensor], _Origin | None],
) -> Iterator[_TensorLoad]:
    taken: dict[Any, Any] = {}
    for held, where in places:
        names = [name for name, _ in where]
        value = next((state[name] for name in names if name in state), None)
        if not isinstance(value, torch.Tensor):
            continue
        target = _target_device(held, where, targets, wishes.offload_buffers)
        dtype = wishes.dtype_of(names, held, value)
        weight = memory_identity(held)
        again = taken.setdefault(memory_identity(value), weight) != weight
        yield _TensorLoad(held, names, [place for _, place in where], value, dtype, target, origin_of(value), again)


def _target_device(
    held: torch.Tensor, where: Sequence[tuple[str, TensorSlot]], targets: ResolvedDeviceMap, offload_buffers: bool
) -> torch.device | None:
    """A tied weight that one of its modules keeps in memory is there for all of them; buffers are in memory unless they are offloaded."""
    found = None
    for name, _ in where:
        if not targets.is_away(name):
            return targets[name]
        found = found or targets[name]
    if found is None and not isinstance(held, torch.nn.Parameter):
        saved = all(key not in module._non_persistent_buffers_set for _, (module, key) in where)
        return None if offload_buffers and saved else HOST
    return found


def _place_tensor(step: _TensorLoad) -> None:
    if step.target is None:
        if not step.held.is_meta or step.held.dtype is not step.dtype:
            _replace_tensor(step, torch.empty(step.held.shape, dtype=step.dtype, device="meta"))
        return
    value = step.value
    if step.is_copied:
        value = value.to(step.target, step.dtype, copy=True)
    if value.shape != step.held.shape:
        value = value.reshape(step.held.shape)
    plain = type(step.held) in (torch.Tensor, torch.nn.Parameter) and not step.held.is_inference()
    if plain and step.held.device == value.device:
        step.held.data = value  # the same object, so whoever holds it has the weights too
    else:
        _replace_tensor(step, value)


def _replace_tensor(step: _TensorLoad, value: torch.Tensor) -> None:
    held = step.held
    if type(held) is torch.nn.Parameter and not held.__dict__:  # the usual case of what follows
        made: torch.Tensor = torch.nn.Parameter(value, held.requires_grad)
    else:
        made = wrap_like(held, value)
    for place in step.places:
        set_tensor(place, made)


def _release_pages(step: _TensorLoad) -> None:
    """The pages that a copy was made from need not stay in memory."""
    layout = step.origin.file.layout if step.origin else None
    if step.origin is None or layout is None or not isinstance(step.origin.file.buffer, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    entry = layout.entries[step.origin.name]
    start = -(-(layout.data_start + entry.start) // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (layout.data_start + entry.end) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        step.origin.file.buffer.madvise(mmap.MADV_DONTNEED, start, end - start)


# --- what the disk gets -----------------------------------------------------------------------------------------------------


def _write_converted(steps: Sequence[_TensorLoad], folder: Path, done: Callable[[int], object]) -> dict[str, IndexEntry]:
    total = sum(step.value.numel() * step.dtype.itemsize for step in steps)
    get_logger(__name__).warning(f"{len(steps)} tensors ({convert_bytes(total)}) are written to {folder}: {_why_written(steps[0])}.")
    files: list[dict[str, OffloadValue]] = []
    room = 0
    for step in steps:
        size = step.value.numel() * step.dtype.itemsize
        if size > room:
            files.append({})
            room = max(_LARGEST_FILE, size)
        files[-1][step.names[0]] = OffloadValue(step.value.reshape(step.held.shape), step.dtype)
        room -= size
    by_name = {step.names[0]: step for step in steps}

    def finished(name: str, size: int) -> None:
        _release_pages(by_name[name])
        done(size)

    return write_offload_files(folder, files, done=finished, argument="offload_folder")


def _index_entry(step: _TensorLoad, written: Mapping[str, IndexEntry], wishes: WeightLoadOptions) -> IndexEntry:
    if step.is_written:
        assert wishes.folder is not None
        found = written[step.names[0]]
        return {**found, "safetensors_file": str(wishes.folder.absolute() / found["safetensors_file"])}
    assert step.origin is not None
    return make_index_entry(str(Path(step.origin.file.where).absolute()), step.origin.name, step.dtype, step.value.shape)


def _why_written(step: _TensorLoad) -> str:
    if step.dtype is not step.value.dtype:
        return f"{step.names[0]} is {dtype_name(step.value.dtype)} in the checkpoint and is to be {dtype_name(step.dtype)}"
    return f"{step.names[0]} does not lie in a safetensors file as the model has it, and only such files are used in place"


def _folder_error(step: _TensorLoad, count: int, where: str) -> str:
    more = f" (and {count - 1} others)" if count > 1 else ""
    remedy = "Give offload_folder, a folder on a disk with room for them"
    if step.dtype is not step.value.dtype:
        remedy += f", or leave them as they are with dtype={dtype_name(step.value.dtype)!r}"
    return f"device_map puts {step.names[0]}{more} of {where} on the disk, but {_why_written(step)}. {remedy}."


def _warn_conversions(steps: Iterable[_TensorLoad], where: str, wishes: WeightLoadOptions) -> None:
    changed = [step for step in steps if step.target is not None and step.dtype is not step.value.dtype]
    if changed and wishes.dtype is None:
        total = sum(step.value.numel() * step.dtype.itemsize for step in changed)
        old, new = dtype_name(changed[0].value.dtype), dtype_name(changed[0].dtype)
        get_logger(__name__).warning(
            f"{where}: {len(changed)} tensors are {old} in the file and {new} in the model; they are converted, which takes "
            f"{convert_bytes(total)} of memory. Pass dtype={old!r} to use them in place."
        )


@contextmanager
def _progress(steps: Collection[_TensorLoad]) -> Iterator[Callable[[int], object]]:
    """Says how many bytes have been copied."""
    total = sum(
        step.value.nbytes if step.is_copied else step.value.numel() * step.dtype.itemsize
        for step in steps
        if step.is_copied or step.is_written
    )
    with bar(total, "loading", "B") as shown:
        yield shown.update


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of one file (safetensors, or of torch.save), mapped; with a device map each on its device, those for the disk mapped.

    >>> import tempfile
    >>> from slipstream.checkpoint.model_io import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(2, 1), folder)
    ...     sorted(load_state_dict(f"{folder}/model.safetensors", device_map={"": "cpu"}))
    ['bias', 'weight']
    """
    path = check_local_path(checkpoint_file, "checkpoint_file")
    if path.is_dir():
        raise ConfigError(f"checkpoint_file={str(path)!r} is a folder. Write the path of one file; load_checkpoint_in_model takes folders.")
    source = find_weights(path)
    tensors = {name: tensor for file in source.files for name, tensor in source.open(file, verify=False).tensors.items()}
    if device_map is None:
        return tensors
    targets = ResolvedDeviceMap(_checked_mapping(device_map))
    return {name: tensor.to(targets[name] or HOST) for name, tensor in tensors.items()}


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> LoadReport:
    """Loads weights into a model, wherever its tensors are; those on the meta device get memory.

    `checkpoint` is a file (safetensors, or of torch.save), an index, or a folder: one of `save_model`, of `save_state`, or of another
    library. Names that are missing or unexpected are a warning, or an error with `strict=True`, or if they would leave weights on the meta
    device; shapes that do not fit are an error. If there is an error, nothing has changed. `dtype` is what the model's floating point
    weights become, but for those in modules of `keep_in_fp32_modules`; without it they keep the types that the model has.

    With a `device_map` weights for "cpu" are the pages of their file, which are read when they are used, and weights for "disk" stay in
    it: `dispatch_model` finds them. `offload_folder` takes those that have to be converted first, or that come from a file of torch.save,
    and is needed if something goes to the disk. `offload_state_dict` needs nothing: no state dict is ever in memory. Checksums
    of a checkpoint of `save_state` are compared without a device map, and not with one, as that would read everything.

    >>> import tempfile
    >>> from slipstream.checkpoint.model_io import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(2, 2), folder)
    ...     load_checkpoint_in_model(torch.nn.Linear(2, 2), folder, device_map={"": "cpu"})
    LoadReport(missing=(), unexpected=(), mismatched={}, renamed={})
    """
    _refuse_options(offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    wishes = _load_options(model, "load_checkpoint_in_model", dtype, keep_in_fp32_modules, offload_buffers, strict, offload_folder)
    if device_map is None:
        _warn_unused(offload_folder=offload_folder is not None, offload_buffers=offload_buffers)
        return load_weights(model, checkpoint, dtype, keep_in_fp32_modules, strict=strict)
    path = check_local_path(checkpoint, "checkpoint")
    found = _load(unwrap_module(model), path, _checked_mapping(device_map), wishes, folder_is_needed=True)
    return found.report


def load_checkpoint_and_dispatch(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    limit: int | str | None = None,
) -> torch.nn.Module:
    """Loads weights by a device map, and attaches what brings those that are offloaded to their modules; the same model comes back.

    `device_map` is a dict, or how it is to be found: "auto" and "balanced" fill accelerators evenly, "balanced_low_0" leaves the first
    one free for other things, "sequential" fills one after the other; `max_memory` says what each device may hold. Without one the
    weights go to where the model's tensors are. The rest is as in `load_checkpoint_in_model`, but `offload_folder` is needed only if
    weights for the disk have to be written, and as in `dispatch_model`.

    >>> import tempfile
    >>> from slipstream.checkpoint.model_io import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), folder)
    ...     with torch.device("meta"):
    ...         skeleton = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    ...     model = load_checkpoint_and_dispatch(skeleton, folder, device_map={"0": "cpu", "1": "disk"})
    >>> model(torch.ones(1, 2)).shape, model[1].weight.is_meta
    (torch.Size([1, 1]), True)
    """
    _refuse_options(False, full_state_dict, broadcast_from_rank0)
    wishes = _load_options(model, "load_checkpoint_and_dispatch", dtype, None, offload_buffers, strict, offload_folder)
    if device_map is None:
        _warn_unused(
            max_memory=max_memory is not None,
            no_split_module_classes=no_split_module_classes is not None,
            offload_folder=offload_folder is not None,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys is not None,
            preload_module_classes=preload_module_classes is not None,
            force_hooks=force_hooks,
            limit=limit is not None,
        )
        load_weights(model, checkpoint, dtype, strict=strict)
        return model
    inner = unwrap_module(model)
    warn_unknown_classes(inner, preload_module_classes, "preload_module_classes")
    device_map = _find_device_map(inner, device_map, max_memory, no_split_module_classes, wishes)
    found = _load(inner, check_local_path(checkpoint, "checkpoint"), device_map, wishes)
    whole = [*(preload_module_classes or ()), *parse_class_names(no_split_module_classes)]
    given = WeightSources({}, found.index, {}, wishes.folder)
    dispatch_checked(inner, device_map, ResolvedDeviceMap(device_map), given, offload_buffers, skip_keys, whole, force_hooks, limit)
    return model


def _find_device_map(
    model: torch.nn.Module,
    device_map: str | Mapping[str, Any],
    max_memory: Mapping[Any, Any] | None,
    no_split_module_classes: Collection[str] | None,
    wishes: WeightLoadOptions,
) -> Mapping[str, Any]:
    if isinstance(device_map, str):
        return plan_device_map(model, device_map, max_memory, no_split_module_classes, wishes.dtype, offload_buffers=wishes.offload_buffers)
    warn_unknown_classes(model, no_split_module_classes, "no_split_module_classes")
    _warn_unused(max_memory=max_memory is not None, why="with a device map that is a dict")
    return _checked_mapping(device_map)


def _load(
    model: torch.nn.Module, path: Path, device_map: Mapping[str, Any], wishes: WeightLoadOptions, *, folder_is_needed: bool = False
) -> LoadedWeights:
    targets = ResolvedDeviceMap(device_map)
    check_device_map(model, device_map)
    if folder_is_needed and wishes.folder is None and None in targets.entries.values():
        name = next(name for name, target in targets.entries.items() if target is None)
        raise ConfigError(
            f"device_map puts {name or 'the whole model'} on the disk: give offload_folder, or call load_checkpoint_and_dispatch, "
            "which needs none where the files can be used as they are."
        )
    with _gc_paused():
        found = load_by_device_map(model, find_weights(path), str(path), targets, wishes)
    if found.written and wishes.folder is not None:
        save_offload_index(found.written, wishes.folder)
    if found.index or hasattr(model, INDEX_ATTRIBUTE):
        setattr(model, INDEX_ATTRIBUTE, found.index)
    if has_offloaded_modules(model):  # its hooks would go on bringing the weights from before
        keep_in_memory(model, but=found.index)
        if folder_is_needed:
            get_logger(__name__).warning("The model was dispatched before, and is not any more: call dispatch_model to place it anew.")
    return found


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Hundreds of thousands of objects are made here, and all are kept: to look for garbage among them takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load_options(
    model: Any,
    caller: str,
    dtype: Any,
    keep: Sequence[str] | None,
    offload_buffers: bool,
    strict: bool,
    folder: str | os.PathLike[str] | None,
) -> WeightLoadOptions:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{caller} was given a {type(model).__qualname__}. Pass a torch.nn.Module.")
    wanted = parse_dtype(dtype)
    if keep is not None and (wanted is None or isinstance(keep, str)):
        raise ConfigError(f"keep_in_fp32_modules={keep!r} is a list of names of modules, and needs dtype beside it.")
    return WeightLoadOptions(
        wanted, tuple(keep or ()), offload_buffers, strict, None if folder is None else check_local_path(folder, "offload_folder")
    )


def _checked_mapping(device_map: Any) -> Mapping[str, Any]:
    if not isinstance(device_map, Mapping):
        raise ConfigError(
            f'device_map={device_map!r} is no dict. Write a device for each module, as in {{"embed": "cpu", "blocks": "disk"}}; '
            "load_checkpoint_and_dispatch takes 'auto' too, and infer_auto_device_map makes such a dict."
        )
    return device_map


def _refuse_options(offload_8bit_bnb: bool, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    if offload_8bit_bnb:
        raise ConfigError("offload_8bit_bnb=True cannot be: weights of 8 bits of bitsandbytes are not offloaded. Leave it out.")
    if not full_state_dict or broadcast_from_rank0:
        raise ConfigError(
            "full_state_dict=False and broadcast_from_rank0=True belong to models that are divided over processes, which are loaded "
            "with load_state. Leave them out: every process maps the file itself, and those of one machine share its pages."
        )


def _warn_unused(why: str = "without a device_map", **given: bool) -> None:
    if unused := [name for name, is_given in given.items() if is_given]:
        get_logger(__name__).warning(f"{', '.join(unused)} changes nothing {why}.")
