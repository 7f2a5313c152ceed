"""A model spread over devices, memory and disk: every module runs where the device map says, and offloaded weights come when it runs.

Tensors of an entry on a device are moved there. Those of an entry on the disk, or in main memory while an accelerator computes, are away
between forwards: one hook for each block (see `blocks.py`) brings them. With the processor as the main device what is in memory simply
stays there, without a hook. Weights for the disk that are in memory are written once; those that lie in files already stay in them.
A model that is spread already may be spread again, in another way. Everything is checked before the model changes. What is never done:
keeping a second copy, on a disk or in memory.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from slipstream.checkpoint.placing import local_path
from slipstream.errors import ConfigError
from slipstream.files.sizes import parse_size
from slipstream.logging import get_logger
from slipstream.offload.blocks import LARGEST, Part, blocks_of, user_of
from slipstream.offload.earlier import has_offloaded_modules
from slipstream.offload.hooking.hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module
from slipstream.offload.hooking.parts import places_of
from slipstream.offload.hooking.wrapping import hooks_of
from slipstream.offload.planning.plan import check_device_map
from slipstream.offload.planning.spelling import tell_unknown_classes
from slipstream.offload.spreading import Given, Spreading
from slipstream.offload.store.residency import AHEAD
from slipstream.offload.targets import DISK, HOST, Targets, device_here

__all__ = ["OWN_INDEX", "check_device_map", "cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model", "spread"]

OWN_INDEX: Final = "_slipstream_offload_index"
"""The attribute of a model under which loading leaves where its weights on the disk are."""
_BLOCKS_AT_A_TIME: Final = 1 + AHEAD
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
    targets = Targets(device_map, main_device)
    check_device_map(model, device_map)
    tell_unknown_classes(model, preload_module_classes, "preload_module_classes")
    given = Given(state_dict or {}, _index(offload_index), getattr(model, OWN_INDEX, {}), _folder(offload_dir))
    return spread(model, device_map, targets, given, offload_buffers, skip_keys, preload_module_classes, force_hooks, limit)


def spread(
    model: nn.Module,
    device_map: Mapping[str, Any],
    targets: Targets,
    given: Given,
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
        parts = _parts(model, targets, most, stay_whole)
        Spreading(model, targets, parts, given, offload_buffers, skip_keys).run(most, must_hold=limit is not None)
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
    tell_unknown_classes(model, preload_module_classes, "preload_module_classes")
    device = _execution_device(model, execution_device)
    parts = blocks_of(model, "", whole=preload_module_classes or ())
    given = Given(state_dict or {}, {}, {}, None)
    Spreading(model, Targets({"": HOST}, device), parts, given, offload_buffers, None, always=True).run()
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
    tell_unknown_classes(model, preload_module_classes, "preload_module_classes")
    device = _execution_device(model, execution_device)
    most = _limit(limit, {})
    parts = blocks_of(model, "", largest=_largest(most), whole=preload_module_classes or ())
    given = Given({}, {}, {}, local_path(offload_dir, "offload_dir"))
    Spreading(model, Targets({"": DISK}, device), parts, given, offload_buffers, None).run(most, must_hold=limit is not None)
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


def _index(offload_index: Mapping[str, Mapping[str, Any]] | None) -> Mapping[str, Mapping[str, Any]]:
    if offload_index is None:
        return {}
    if not isinstance(offload_index, Mapping) or not all(isinstance(one, Mapping) for one in offload_index.values()):
        raise ConfigError(
            f"offload_index is a {type(offload_index).__name__}. Write a dict: name of a weight to where it is, "
            'as {"safetensors_file": "model.safetensors", "weight_name": "head.weight"}.'
        )
    return offload_index


def _folder(offload_dir: str | os.PathLike[str] | None) -> Path | None:
    return None if offload_dir is None else local_path(offload_dir, "offload_dir")


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
        return device_here(given, "execution_device")
    first = next((one for one in model.parameters() if not one.is_meta), None)
    if first is None:  # of a model that is spread: where it runs
        known = (getattr(hook, "execution_device", None) for module in model.modules() for hook in hooks_of(module))
        return device_here(next((one for one in known if one is not None), HOST), "execution_device")
    return first.device


def _largest(limit: int | None) -> int:
    """Above this size a module is divided."""
    return LARGEST if limit is None else max(1, min(LARGEST, limit // _BLOCKS_AT_A_TIME))


def _parts(model: nn.Module, targets: Targets, limit: int | None, whole: Iterable[str]) -> list[Part]:
    """The blocks of all entries that need a hook, in the order of the model; a module that stands in two places counts once."""
    largest = _largest(limit)
    modules = dict(model.named_modules(remove_duplicate=False))
    order: dict[int, int] = {}
    for module in modules.values():
        order.setdefault(id(module), len(order))
    found: dict[int, Part] = {}
    kept, apart = frozenset(whole), frozenset(targets.entries)
    for name in targets.entries:
        away = targets.is_away(name)
        if not away and targets.main == HOST:
            continue
        if name in modules:
            parts = blocks_of(model, name, largest=largest if away else _ANY_SIZE, whole=kept, apart=apart)
        else:  # a tensor that has an entry of its own
            parts = [Part(name.rpartition(".")[0], False)]
        for part in parts:
            around = user_of(modules, part.name) if away else None
            number = order[id(modules[part.name if around is None else around])]
            found[number] = found.get(number, part) if around is None else Part(around, True)
    _tell_encoders(modules, found.values())
    return [part for _, part in sorted(found.items())]


def _tell_encoders(modules: Mapping[str, nn.Module], parts: Collection[Part]) -> None:
    """Whose results are others for padding, as weights of their layers come one after the other."""
    inner = [name for name, one in modules.items() if isinstance(one, nn.TransformerEncoder) and one.use_nested_tensor]
    if divided := [name for name in inner if any(part.name.startswith(f"{name}.") for part in parts)]:
        get_logger(__name__).warning(
            f"The layers of {divided[0]} get their weights one after the other: outputs at padded positions are not set to zero, as the "
            "encoder does without gradients otherwise. Give it one device in device_map, and a limit that it fits into, if you need that."
        )


def _move_all(model: nn.Module, targets: Targets, given: Given) -> None:
    """Everything goes to one device, if it is not there."""
    places = list(places_of(model, recurse=True))
    if has_offloaded_modules(model) or any(place.tensor.is_meta for place in places):
        Spreading(model, targets, (), given, False, None).bring()
    elif any(place.tensor.device != targets.single for place in places):
        model.to(targets.single)
