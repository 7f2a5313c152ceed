"""Load weights into models that are larger than memory, by a device map, from memory-mapped files.

`load_checkpoint_in_model` loads, `load_checkpoint_and_dispatch` also plans the map and attaches the hooks that load offloaded weights.
Safetensors files are used in place: weights for "cpu" become mapped pages, weights for the disk stay in the user's file, and only
accelerators get a copy. Weights in other formats, or that need another dtype, are written to an offload folder. No pickle is executed.
All checks come before the first change, and what needs memory of a device comes first: after an error the model is unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from slipstream.big_models.device_map.plan import plan_device_map
from slipstream.big_models.device_map.validation import HOST, ResolvedDeviceMap, check_device_map, parse_class_names, warn_unknown_classes
from slipstream.big_models.dispatch import INDEX_ATTRIBUTE, dispatch_checked, has_offloaded_modules, keep_in_memory
from slipstream.big_models.hooks.weight_swap import ModuleSlot, ModuleTensor, wrap_like
from slipstream.big_models.weight_store.offload_folder import group_by_size, save_offload_index, write_offload_files
from slipstream.big_models.weight_store.weights import FileTensor, make_index_entry
from slipstream.checkpoint.garbage import paused_collection
from slipstream.checkpoint.model_io import load_weights, parse_dtype
from slipstream.checkpoint.sharded import is_sharded
from slipstream.checkpoint.tensor_bytes import dtype_name, memory_identity
from slipstream.checkpoint.weight_source import WeightFile, WeightSource, find_weights
from slipstream.checkpoint.weights import (
    METADATA,
    LoadReport,
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
    """How weights are loaded."""

    dtype: torch.dtype | None = None
    keep: tuple[str, ...] = ()
    """Names of modules whose weights stay float32."""
    offload_buffers: bool = False
    strict: bool = False
    folder: Path | None = None
    """The folder for weights on the disk, if the files of the checkpoint cannot be used in place."""
    as_stored: bool = False
    """Whether floating point weights keep the dtype of the file."""
    allow_meta: bool = False
    """Whether weights that the checkpoint does not have may stay on the meta device."""

    def dtype_of(self, names: Iterable[str], held: torch.Tensor, value: torch.Tensor) -> torch.dtype:
        """Return the dtype for a tensor: by default that of the model."""
        if not (value.is_floating_point() and held.is_floating_point()):
            return held.dtype
        if self.as_stored or self.dtype is None:
            return value.dtype if self.as_stored else held.dtype
        kept = any(f".{module}." in f".{name}." for name in names for module in self.keep)
        return torch.float32 if kept else self.dtype


@dataclass(frozen=True)
class LoadedWeights:
    """The report of a load, and the index of weights on the disk."""

    report: LoadReport
    index: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Index entries of the weights on the disk, with full paths of files."""
    written: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Those that were written to the folder, with file names within it."""
    in_place: dict[str, FileTensor] = field(default_factory=dict)
    """The others, in the files that this load has mapped, where no weight in memory shares their bytes."""


@dataclass(eq=False, kw_only=True)
class _LoadedTensor(ModuleTensor):
    """A tensor of the model with its value in a file, the wanted dtype, and that file."""

    value: torch.Tensor
    wanted: torch.dtype
    origin: tuple[WeightFile, str] | None
    """The file, and the name in it."""
    is_shared: bool
    """Whether another weight, to which this one is not tied, has the same value tensor."""
    is_converted: bool = field(init=False)
    is_copied: bool = field(init=False)
    is_written: bool = field(init=False)
    """Whether it goes to the disk and the checkpoint's file cannot be used in place."""

    def __post_init__(self) -> None:
        self.is_converted = self.wanted is not self.value.dtype
        self.is_copied = self.target is not None and (self.is_shared or self.is_converted or self.target != self.value.device)
        in_place = self.origin is not None and self.origin[0].layout is not None and self.value.shape == self.held.shape
        self.is_written = self.target is None and (self.is_converted or not in_place)

    @property
    def dtype(self) -> torch.dtype:
        return self.wanted

    @property
    def fits_in_place(self) -> bool:
        """Whether the tensor in the model is on the target, an accelerator, and can have the values: no more memory is needed."""
        held = self.held
        return held.device == self.target and held.device.type != HOST.type and held.dtype is self.wanted and not held.is_inference()

    @property
    def needs_memory(self) -> bool:
        """Whether it takes memory of an accelerator."""
        return self.target is not None and self.target.type != HOST.type and not self.fits_in_place

    def release(self) -> None:
        """Release the pages that were copied."""
        if (found := self.in_file()) is not None:
            found.file.give_back(found.span)

    def in_file(self) -> FileTensor | None:
        """Return its value in a safetensors file; None if it comes from elsewhere."""
        file, name = self.origin or (None, "")
        if file is None or file.mapped is None or file.layout is None:
            return None
        return FileTensor(file.mapped, file.layout.span(file.layout.entries[name]), self.value)


@torch.inference_mode(False)  # weights of that mode could not be used outside of it
def load_by_device_map(
    model: torch.nn.Module, source: WeightSource, where: str, targets: ResolvedDeviceMap, options: WeightLoadOptions
) -> LoadedWeights:
    """Load the weights of `source`; `where` names it in messages. If there is an error, the model has not changed."""
    files = _open_files(source, where)
    aliases = {**source.aliases, **{other: kept for file in files for other, kept in file.aliases.items()}}
    values = {name: tensor for file in files for name, tensor in file.tensors.items()}
    extra = source.read_extra()
    places = tensor_slots(model)
    if sharded := next((slots for held, slots in places if is_sharded(held)), None):
        raise ConfigError(f"device_map cannot place {sharded[0][0]}: it is sharded over processes already. Load it without device_map.")
    tied = tied_names(model, places)
    report = check_fit(model, values, aliases, extra, tied=tied)
    if not options.allow_meta:
        report.demand_values(model, where)
    report.demand(where, type(model).__name__, strict=options.strict)
    state: Mapping[str, Any] = arrange_state_dict(model, values, aliases, extra, report, strict=options.strict, tied=tied)
    identity: Callable[[torch.Tensor], Any] = id
    if _needs_own_loading(model, report, extra):
        state, identity = _load_through_model(model, state, places), memory_identity
    origins = {identity(values[name]): (file, name) for file in files for name in file.tensors}
    tensors = list(_plan_loads(places, state, targets, options, lambda value: origins.get(identity(value))))
    to_write = [tensor for tensor in tensors if tensor.is_written]
    if to_write and options.folder is None:
        raise ConfigError(_explain_needed_folder(to_write, where))
    _warn_conversions(tensors, where, options)
    total = sum(tensor.value.nbytes if tensor.is_copied else tensor.nbytes for tensor in tensors if tensor.is_copied or tensor.is_written)
    with bar(total, "loading", "B") as shown, torch.no_grad():
        written = _write_converted(to_write, options.folder, shown.update) if options.folder is not None else {}
        paths = {file.where: str(Path(file.where).absolute()) for file in files}
        offloaded = [tensor for tensor in tensors if tensor.target is None]
        index = {slot.name: _index_entry(tensor, written, options.folder, paths) for tensor in offloaded for slot in tensor.slots}
        in_place = {slot.name: found for tensor in offloaded if (found := _used_in_place(tensor)) for slot in tensor.slots}
        _place_tensors(tensors, shown.update)
    return LoadedWeights(report, index, written, in_place)


def _open_files(source: WeightSource, where: str) -> list[WeightFile]:
    """Map all files. Sizes and headers are checked; checksums are not, as that would read everything."""
    files = [source.open(name, verify=False) for name in source.files]
    homes: dict[str, str] = {}
    for name, file in zip(source.files, files, strict=True):
        for tensor in file.tensors:
            if homes.setdefault(tensor, name) != name:
                raise CheckpointError(
                    f"{where} has {tensor!r} in two files, {homes[tensor]} and {name}. Save it again, or remove one of them."
                )
    return files


def _needs_own_loading(model: torch.nn.Module, report: LoadReport, extra: Mapping[str, Any]) -> bool:
    """Return whether the model's own load_state_dict is needed: it renames keys, has extra state, or fills in missing values."""
    if may_rename_keys(model) or extra.keys() - {METADATA}:
        return True
    # torch internals: modules override `_load_from_state_dict` to load themselves, and no public name says whether one does. Tried on
    # torch 2.13; tests/big_models/test_load_and_dispatch.py notices a change. It can go when torch has a public hook for it.
    plain = torch.nn.Module._load_from_state_dict
    owners = {name.rpartition(".")[0] for name in report.missing}
    return any(type(model.get_submodule(owner))._load_from_state_dict is not plain for owner in owners)


def _load_through_model(model: torch.nn.Module, state: Mapping[str, Any], places: Sequence[TensorSlots]) -> dict[str, Any]:
    """Return the weights as the model's own load_state_dict assigns them, by name; the model itself is restored."""
    found: dict[str, Any] = {}
    try:
        model.load_state_dict(state, strict=False, assign=True)
        for held, where in places:
            for name, (module, key) in where:
                now = module._parameters.get(key, module._buffers.get(key))
                if now is not None and now is not held:
                    found[name] = now.detach()
    except (RuntimeError, TypeError) as error:  # an overridden load_state_dict may not support `assign`
        raise CheckpointError(
            f"{type(model).__name__} refused to load: {error}. Load it without device_map, then call dispatch_model."
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
    options: WeightLoadOptions,
    origin_of: Callable[[torch.Tensor], tuple[WeightFile, str] | None],
) -> Iterator[_LoadedTensor]:
    owners: dict[Any, Any] = {}
    for held, where in places:
        names = [name for name, _ in where]
        value = next((state[name] for name in names if name in state), None)
        if not isinstance(value, torch.Tensor):
            continue
        slots = []
        for name, (module, key) in where:
            is_parameter = key in module._parameters
            store: dict[str, Any] = module._parameters if is_parameter else module._buffers
            slots.append(ModuleSlot(name, store, key, held, module, is_parameter or key not in module._non_persistent_buffers_set))
        weight = memory_identity(held)
        yield _LoadedTensor(
            slots=slots,
            value=value,
            wanted=options.dtype_of(names, held, value),
            target=_target_device(slots, targets, options.offload_buffers),
            origin=origin_of(value),
            is_shared=owners.setdefault(memory_identity(value), weight) != weight,
        )


def _target_device(slots: Sequence[ModuleSlot], targets: ResolvedDeviceMap, offload_buffers: bool) -> torch.device | None:
    """Return the device of a tensor: in memory if one of its modules keeps it there; buffers in memory unless offloaded."""
    for slot in slots:
        if not targets.is_offloaded(slot.name):
            return targets[slot.name]
    found = next((device for slot in slots if (device := targets[slot.name]) is not None), None)
    if found is None and not slots[0].is_parameter:
        return None if offload_buffers and all(slot.persistent for slot in slots) else HOST
    return found


def _place_tensors(tensors: Sequence[_LoadedTensor], done: Callable[[int], object]) -> None:
    """Put the values into the model. Those that need memory on an accelerator come first: where it is full, the model is restored."""
    placed: list[_LoadedTensor] = []
    for tensor in sorted(tensors, key=lambda tensor: not tensor.needs_memory):
        try:
            _place_tensor(tensor)
        except torch.OutOfMemoryError as error:
            reason = _explain_full_device(tensor, tensors, sum(other.nbytes for other in placed if other.target == tensor.target), error)
        else:
            reason = ""
        if reason:
            for earlier in placed:
                earlier.put(earlier.held)
            raise torch.OutOfMemoryError(reason)
        placed.append(tensor)
        if tensor.is_copied:
            tensor.release()
            done(tensor.value.nbytes)


def _explain_full_device(tensor: _LoadedTensor, tensors: Iterable[_LoadedTensor], loaded: int, error: torch.OutOfMemoryError) -> str:
    total = sum(other.nbytes for other in tensors if other.target == tensor.target)
    return (
        f"{tensor.target} has no room for {tensor.name} ({convert_bytes(tensor.nbytes)}): the device map puts {convert_bytes(total)} of "
        f"weights there, and {convert_bytes(loaded)} were loaded. The model is unchanged. Put some of its modules on another device, "
        f'"cpu" or "disk"; or give device_map="auto", with max_memory if other things need the device too. The device says: {error}'
    )


def _place_tensor(tensor: _LoadedTensor) -> None:
    held, value = tensor.held, tensor.value
    if tensor.target is None:
        if not held.is_meta or held.dtype is not tensor.wanted:
            _replace_tensor(tensor, torch.empty(held.shape, dtype=tensor.wanted, device="meta"))
        return
    if tensor.is_copied and tensor.fits_in_place:
        held.detach().copy_(value.view_as(held))
        return
    if tensor.is_copied:
        value = value.to(tensor.target, tensor.wanted, copy=True)
    if value.shape != held.shape:
        value = value.reshape(held.shape)
    if type(held) in (torch.Tensor, torch.nn.Parameter) and not held.is_inference() and held.device == value.device:
        held.data = value  # the same object, so other references to it have the weights too
    else:
        _replace_tensor(tensor, value)


def _replace_tensor(tensor: _LoadedTensor, value: torch.Tensor) -> None:
    held = tensor.held
    if type(held) is torch.nn.Parameter and not held.__dict__:  # a faster path for the usual case
        tensor.put(torch.nn.Parameter(value, held.requires_grad))
    else:
        tensor.put(wrap_like(held, value))


# --- the disk ----------------------------------------------------------------------------------------------------------------


def _write_converted(tensors: Sequence[_LoadedTensor], folder: Path, done: Callable[[int], object]) -> dict[str, dict[str, Any]]:
    if not tensors:
        return {}
    total = convert_bytes(sum(tensor.nbytes for tensor in tensors))
    get_logger(__name__).warning(f"{len(tensors)} tensors ({total}) are written to {folder}: {_why_written(tensors[0])}.")

    def finish(tensor: Any) -> None:
        tensor.release()
        done(tensor.nbytes)

    files = group_by_size([[tensor] for tensor in tensors], _LARGEST_FILE)
    return write_offload_files(folder, files, done=finish, argument="offload_folder")


def _index_entry(
    tensor: _LoadedTensor, written: Mapping[str, dict[str, Any]], folder: Path | None, paths: Mapping[str, str]
) -> dict[str, Any]:
    if tensor.is_written:
        assert folder is not None
        found = written[tensor.name]
        return {**found, "safetensors_file": str(folder.absolute() / found["safetensors_file"])}
    assert tensor.origin is not None
    file, name = tensor.origin
    return make_index_entry(paths[file.where], name, tensor.wanted, tensor.value.shape)


def _used_in_place(tensor: _LoadedTensor) -> FileTensor | None:
    """Return the tensor of a file if the weight store may use it: writes into a weight in memory with the same bytes would reach it."""
    return None if tensor.is_written or tensor.is_shared else tensor.in_file()


def _why_written(tensor: _LoadedTensor) -> str:
    if tensor.is_converted:
        return f"{tensor.name} is {dtype_name(tensor.value.dtype)} in the checkpoint, and {dtype_name(tensor.wanted)} is wanted"
    return f"{tensor.name} is not in a safetensors file in the shape of the model, and only such files are used in place"


def _explain_needed_folder(tensors: Sequence[_LoadedTensor], where: str) -> str:
    first = tensors[0]
    more = f" (and {len(tensors) - 1} others)" if len(tensors) > 1 else ""
    remedy = "Give offload_folder, a folder on a disk with room for them"
    if first.is_converted:
        remedy += f", or leave them as they are with dtype={dtype_name(first.value.dtype)!r}"
    return f"device_map puts {first.name}{more} of {where} on the disk, but {_why_written(first)}. {remedy}."


def _warn_conversions(tensors: Iterable[_LoadedTensor], where: str, options: WeightLoadOptions) -> None:
    changed = [tensor for tensor in tensors if tensor.target is not None and tensor.is_converted]
    if changed and options.dtype is None:
        old, new = dtype_name(changed[0].value.dtype), dtype_name(changed[0].wanted)
        get_logger(__name__).warning(
            f"{where}: {len(changed)} tensors are {old} in the file and {new} in the model; they are converted, which takes "
            f"{convert_bytes(sum(tensor.nbytes for tensor in changed))} of memory. Pass dtype={old!r} to use them in place."
        )


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of one file (safetensors or torch.save), memory-mapped; with a device map, each on its device.

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
    *,
    allow_meta: bool = False,
) -> LoadReport:
    """Load weights into a model, on any device; tensors on the meta device get memory.

    `checkpoint` is a file (safetensors or torch.save), an index, or a folder of `save_model`, `save_state` or another library. Missing and
    unexpected names are a warning, or an error with `strict=True` or if they would leave weights on the meta device; shapes that do not
    fit are an error. After an error nothing has changed. `allow_meta` leaves missing weights on the meta device, for a caller who sets them
    afterwards. `dtype` is the dtype for floating point weights, except those in modules of `keep_in_fp32_modules`; by default they keep the
    dtypes of the model.

    With a `device_map`, weights for "cpu" are the mapped pages of their file, read on first use, and weights for "disk" stay in the file:
    `dispatch_model` finds them. `offload_folder` is for those that have to be converted first, or that come from a torch.save file, and is
    required if something goes to the disk. `offload_state_dict` has no effect: no state dict is ever in memory. Checksums of a checkpoint
    of `save_state` are verified without a device map, and not with one, as that would read everything.

    >>> import tempfile
    >>> from slipstream.checkpoint.model_io import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(2, 2), folder)
    ...     load_checkpoint_in_model(torch.nn.Linear(2, 2), folder, device_map={"": "cpu"})
    LoadReport(missing=(), unexpected=(), mismatched={}, renamed={})
    """
    _refuse_options(offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    options = _load_options(model, "load_checkpoint_in_model", dtype, keep_in_fp32_modules, offload_buffers, strict, offload_folder)
    if device_map is None:
        _warn_unused({"offload_folder": offload_folder, "offload_buffers": offload_buffers})
        return load_weights(model, checkpoint, dtype, keep_in_fp32_modules, strict=strict, allow_meta=allow_meta)
    options = replace(options, allow_meta=allow_meta)
    path, device_map = check_local_path(checkpoint, "checkpoint"), _checked_mapping(device_map)
    return _load(unwrap_module(model), path, device_map, ResolvedDeviceMap(device_map), options, folder_is_needed=True).report


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
    """Load weights by a device map, attach hooks that load the offloaded ones, and return the same model.

    `device_map` is a dict or a strategy: "auto" and "balanced" fill accelerators evenly, "balanced_low_0" leaves the first one free for
    other uses, "sequential" fills one after the other; `max_memory` limits each device. Without a map the weights go to the devices of the
    model's tensors. Other arguments are those of `load_checkpoint_in_model` and `dispatch_model`, but `offload_folder` is required only if
    weights for the disk have to be written.

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
    options = _load_options(model, "load_checkpoint_and_dispatch", dtype, None, offload_buffers, strict, offload_folder)
    if device_map is None:
        given = {"max_memory": max_memory, "no_split_module_classes": no_split_module_classes, "offload_folder": offload_folder}
        others = {"skip_keys": skip_keys, "preload_module_classes": preload_module_classes, "force_hooks": force_hooks, "limit": limit}
        _warn_unused({**given, "offload_buffers": offload_buffers, **others})
        load_weights(model, checkpoint, dtype, strict=strict)
        return model
    inner = unwrap_module(model)
    warn_unknown_classes(inner, preload_module_classes, "preload_module_classes")
    if isinstance(device_map, str):
        dtype = options.dtype
        device_map = plan_device_map(inner, device_map, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers)
    else:
        warn_unknown_classes(inner, no_split_module_classes, "no_split_module_classes")
        _warn_unused({"max_memory": max_memory}, "with a device map that is a dict")
    path, device_map = check_local_path(checkpoint, "checkpoint"), _checked_mapping(device_map)
    targets = ResolvedDeviceMap(device_map)
    with paused_collection():
        found = _load(inner, path, device_map, targets, options)
        whole = [*(preload_module_classes or ()), *parse_class_names(no_split_module_classes)]
        sources = {"index": found.index, "in_place": found.in_place, "folder": options.folder, "offload_buffers": offload_buffers}
        dispatch_checked(inner, device_map, targets, whole, force_hooks, limit, skip_keys=skip_keys, **sources)
    return model


def _load(
    model: torch.nn.Module,
    path: Path,
    device_map: Mapping[str, Any],
    targets: ResolvedDeviceMap,
    options: WeightLoadOptions,
    *,
    folder_is_needed: bool = False,
) -> LoadedWeights:
    check_device_map(model, device_map)
    if folder_is_needed and options.folder is None and None in targets.entries.values():
        name = next(name for name, target in targets.entries.items() if target is None)
        raise ConfigError(
            f"device_map puts {name or 'the whole model'} on the disk: give offload_folder, or call load_checkpoint_and_dispatch, "
            "which needs none where the files can be used as they are."
        )
    with paused_collection():
        found = load_by_device_map(model, find_weights(path), str(path), targets, options)
    if found.written and options.folder is not None:
        save_offload_index(found.written, options.folder)
    if found.index or hasattr(model, INDEX_ATTRIBUTE):
        setattr(model, INDEX_ATTRIBUTE, found.index)
    if has_offloaded_modules(model):  # its hooks would still load the previous weights
        keep_in_memory(model, but=found.index)
        if folder_is_needed:
            get_logger(__name__).warning("The model is no longer dispatched: call dispatch_model to place it again.")
    return found


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
    wanted = None if dtype is None else parse_dtype(dtype)
    if keep is not None and (wanted is None or isinstance(keep, str)):
        raise ConfigError(f"keep_in_fp32_modules={keep!r}: write a list of module names, together with dtype.")
    return WeightLoadOptions(
        wanted, tuple(keep or ()), offload_buffers, strict, None if folder is None else check_local_path(folder, "offload_folder")
    )


def _checked_mapping(device_map: Any) -> Mapping[str, Any]:
    if not isinstance(device_map, Mapping):
        raise ConfigError(
            f'device_map={device_map!r} is not a dict. Write a device for each module, as in {{"embed": "cpu", "blocks": "disk"}}; '
            "load_checkpoint_and_dispatch takes 'auto' too, and infer_auto_device_map makes such a dict."
        )
    return device_map


def _refuse_options(offload_8bit_bnb: bool, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    if offload_8bit_bnb:
        raise ConfigError("offload_8bit_bnb=True is not supported: 8-bit weights of bitsandbytes cannot be offloaded. Leave it out.")
    if not full_state_dict or broadcast_from_rank0:
        raise ConfigError(
            "full_state_dict=False and broadcast_from_rank0=True are for models that are sharded over processes, which are loaded "
            "with load_state, load_fsdp_model or fsdp2_load_full_state_dict. Leave them out: every process maps the file itself, and "
            "those of one machine share its pages."
        )


def _warn_unused(given: Mapping[str, Any], why: str = "without a device_map") -> None:
    if unused := [name for name, value in given.items() if value is not None and value is not False]:
        get_logger(__name__).warning(f"{', '.join(unused)} has no effect {why}.")
