"""Weights loaded into models that are larger than memory: by a device map, from files that are mapped and not read.

`load_checkpoint_in_model` loads, `load_checkpoint_and_dispatch` also finds the map and attaches what brings offloaded weights to their
modules. Safetensors files are used in place: main memory and the disk cost no copy and no reading, and processes of one machine share
the pages. No pickle is run. If something does not fit, the model is what it was.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slipstream.checkpoint.fit import LoadReport, bare
from slipstream.checkpoint.models import dtype_of, load_weights
from slipstream.checkpoint.placing import local_path
from slipstream.checkpoint.sources import find
from slipstream.errors import ConfigError
from slipstream.logging import get_logger
from slipstream.offload.dispatch import OWN_INDEX, spread
from slipstream.offload.earlier import has_offloaded_modules, stay_in_memory
from slipstream.offload.filling import Filling, Wishes, fill
from slipstream.offload.planning.plan import check_device_map
from slipstream.offload.planning.sizes import class_names
from slipstream.offload.planning.spelling import tell_unknown_classes
from slipstream.offload.planning.ways import plan_for
from slipstream.offload.spreading import Given
from slipstream.offload.store.parked import save_offload_index
from slipstream.offload.targets import HOST, Targets

__all__ = ["load_checkpoint_and_dispatch", "load_checkpoint_in_model", "load_state_dict"]


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of one file (safetensors, or of torch.save), mapped; with a device map each on its device, those for the disk mapped.

    >>> import tempfile
    >>> from slipstream.checkpoint.models import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(2, 1), folder)
    ...     sorted(load_state_dict(f"{folder}/model.safetensors", device_map={"": "cpu"}))
    ['bias', 'weight']
    """
    path = local_path(checkpoint_file, "checkpoint_file")
    if path.is_dir():
        raise ConfigError(f"checkpoint_file={str(path)!r} is a folder. Write the path of one file; load_checkpoint_in_model takes folders.")
    source = find(path)
    tensors = {name: tensor for one in source.files for name, tensor in source.open(one, verify=False).tensors.items()}
    if device_map is None:
        return tensors
    targets = Targets(_mapping(device_map))
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
    >>> from slipstream.checkpoint.models import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Linear(2, 2), folder)
    ...     load_checkpoint_in_model(torch.nn.Linear(2, 2), folder, device_map={"": "cpu"})
    LoadReport(missing=(), unexpected=(), mismatched={}, renamed={})
    """
    _refuse(offload_8bit_bnb, full_state_dict, broadcast_from_rank0)
    wishes = _wishes(model, "load_checkpoint_in_model", dtype, keep_in_fp32_modules, offload_buffers, strict, offload_folder)
    if device_map is None:
        _tell_unused(offload_folder=offload_folder is not None, offload_buffers=offload_buffers)
        return load_weights(model, checkpoint, dtype, keep_in_fp32_modules, strict=strict)
    found = _load(bare(model), local_path(checkpoint, "checkpoint"), _mapping(device_map), wishes, folder_is_needed=True)
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
    >>> from slipstream.checkpoint.models import save_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), folder)
    ...     with torch.device("meta"):
    ...         skeleton = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    ...     model = load_checkpoint_and_dispatch(skeleton, folder, device_map={"0": "cpu", "1": "disk"})
    >>> model(torch.ones(1, 2)).shape, model[1].weight.is_meta
    (torch.Size([1, 1]), True)
    """
    _refuse(False, full_state_dict, broadcast_from_rank0)
    wishes = _wishes(model, "load_checkpoint_and_dispatch", dtype, None, offload_buffers, strict, offload_folder)
    if device_map is None:
        _tell_unused(
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
    tell_unknown_classes(bare(model), preload_module_classes, "preload_module_classes")
    device_map = _map_for(bare(model), device_map, max_memory, no_split_module_classes, wishes)
    found = _load(bare(model), local_path(checkpoint, "checkpoint"), device_map, wishes)
    whole = [*(preload_module_classes or ()), *class_names(no_split_module_classes)]
    given = Given({}, found.index, {}, wishes.folder)
    spread(bare(model), device_map, Targets(device_map), given, offload_buffers, skip_keys, whole, force_hooks, limit)
    return model


def _map_for(
    model: torch.nn.Module,
    device_map: str | Mapping[str, Any],
    max_memory: Mapping[Any, Any] | None,
    no_split_module_classes: Collection[str] | None,
    wishes: Wishes,
) -> Mapping[str, Any]:
    if isinstance(device_map, str):
        return plan_for(model, device_map, max_memory, no_split_module_classes, wishes.dtype, offload_buffers=wishes.offload_buffers)
    tell_unknown_classes(model, no_split_module_classes, "no_split_module_classes")
    _tell_unused(max_memory=max_memory is not None, why="with a device map that is a dict")
    return _mapping(device_map)


def _load(model: torch.nn.Module, path: Path, device_map: Mapping[str, Any], wishes: Wishes, *, folder_is_needed: bool = False) -> Filling:
    targets = Targets(device_map)
    check_device_map(model, device_map)
    if folder_is_needed and wishes.folder is None and None in targets.entries.values():
        name = next(name for name, target in targets.entries.items() if target is None)
        raise ConfigError(
            f"device_map puts {name or 'the whole model'} on the disk: give offload_folder, or call load_checkpoint_and_dispatch, "
            "which needs none where the files can be used as they are."
        )
    with _without_collections():
        found = fill(model, find(path), str(path), targets, wishes)
    if found.written and wishes.folder is not None:
        save_offload_index(found.written, wishes.folder)
    if found.index or hasattr(model, OWN_INDEX):
        setattr(model, OWN_INDEX, found.index)
    if has_offloaded_modules(model):  # its hooks would go on bringing the weights from before
        stay_in_memory(model, but=found.index)
        if folder_is_needed:
            get_logger(__name__).warning("The model was dispatched before, and is not any more: call dispatch_model to place it anew.")
    return found


@contextmanager
def _without_collections() -> Iterator[None]:
    """Hundreds of thousands of objects are made here, and all are kept: to look for garbage among them takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _wishes(
    model: Any,
    caller: str,
    dtype: Any,
    keep: Sequence[str] | None,
    offload_buffers: bool,
    strict: bool,
    folder: str | os.PathLike[str] | None,
) -> Wishes:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{caller} was given a {type(model).__qualname__}. Pass a torch.nn.Module.")
    wanted = dtype_of(dtype)
    if keep is not None and (wanted is None or isinstance(keep, str)):
        raise ConfigError(f"keep_in_fp32_modules={keep!r} is a list of names of modules, and needs dtype beside it.")
    return Wishes(wanted, tuple(keep or ()), offload_buffers, strict, None if folder is None else local_path(folder, "offload_folder"))


def _mapping(device_map: Any) -> Mapping[str, Any]:
    if not isinstance(device_map, Mapping):
        raise ConfigError(
            f'device_map={device_map!r} is no dict. Write a device for each module, as in {{"embed": "cpu", "blocks": "disk"}}; '
            "load_checkpoint_and_dispatch takes 'auto' too, and infer_auto_device_map makes such a dict."
        )
    return device_map


def _refuse(offload_8bit_bnb: bool, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
    if offload_8bit_bnb:
        raise ConfigError("offload_8bit_bnb=True cannot be: weights of 8 bits of bitsandbytes are not offloaded. Leave it out.")
    if not full_state_dict or broadcast_from_rank0:
        raise ConfigError(
            "full_state_dict=False and broadcast_from_rank0=True belong to models that are divided over processes, which are loaded "
            "with load_state. Leave them out: every process maps the file itself, and those of one machine share its pages."
        )


def _tell_unused(why: str = "without a device_map", **given: bool) -> None:
    if unused := [name for name, is_given in given.items() if is_given]:
        get_logger(__name__).warning(f"{', '.join(unused)} changes nothing {why}.")
