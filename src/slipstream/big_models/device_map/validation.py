"""A device map as the user gives it: names checked against a model, devices resolved on this machine.

`check_device_map` compares a map with a model, `ResolvedDeviceMap` turns its devices into those of torch; a device that is not here is an
error that names the entry and the devices that are. No tensor is touched here.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from slipstream.checkpoint.weights import all_modules
from slipstream.config.names import nearest
from slipstream.devices.table import CPU, FAMILIES, default_family
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = [
    "DISK", "Device", "HOST", "ResolvedDeviceMap", "check_device_map", "find_entry", "format_names", "parse_class_names",
    "parse_device_key", "resolve_device", "warn_unknown_classes", "warn_unknown_tensors",
]

Device = int | str
"""A device of a budget or a map: the number of an accelerator, the name of one that has no number, "cpu" or "disk"."""

DISK: Final = "disk"
HOST: Final = torch.device(CPU.type)
_COMPARED_NAMES: Final = 5000
_SHOWN: Final = 5


def parse_device_key(given: Any, where: str) -> Device:
    """Return a device as budgets and maps have it; `where` names the argument in the error.

    >>> parse_device_key(0, "max_memory"), parse_device_key("cpu", "max_memory"), parse_device_key(torch.device("cpu"), "max_memory")
    (0, 'cpu', 'cpu')
    """
    number: Any = given if isinstance(given, numbers.Integral) else -1
    if number >= 0 and given is not True and given is not False:
        return int(number)
    text = str(given) if isinstance(given, torch.device | str) else ""
    if text.isdecimal():
        return int(text)
    kind, colon, digits = text.partition(":")
    family = next((family for family in FAMILIES if family.type == kind), None)
    if text == DISK or (family is CPU and (not colon or digits == "0")):
        return kind
    if family is not None and family is not CPU:
        if digits.isdecimal() and family.indexed:
            return int(digits)
        if not colon:
            return 0 if family.indexed else kind
    raise ConfigError(f'{where} has {given!r}, which is not a device. Write the number of an accelerator (0, 1, ...), "cpu" or "disk".')


def resolve_device(given: Any, where: str) -> torch.device:
    """Return a device of this machine; `where` names the argument in the error. A family without a number is its current device.

    >>> resolve_device("cpu", "execution_device")
    device(type='cpu')
    """
    kind = None if isinstance(given, int) or str(given).isdecimal() else str(given).partition(":")[0]
    family = default_family() if kind is None else next((family for family in FAMILIES if family.type == kind), None)
    try:
        key = parse_device_key(given, where)
    except ConfigError:  # the message below also fits what is not a device anywhere
        family = None
    if family is CPU and kind is not None:
        return HOST
    if kind == DISK:
        raise ConfigError(f"{where} is {given!r}, which does not compute. Write one of {', '.join(_known_devices()[:-1])}.")
    if family is None or family is CPU or not family.is_available() or (isinstance(key, int) and key >= max(1, family.count())):
        raise ConfigError(
            f"{where} is {given!r}, and this machine has no such device. Write one of those that it has: {', '.join(_known_devices())}."
        )
    if not isinstance(key, int) or not family.indexed:
        return torch.device(family.type)
    numbered = kind is None or ":" in str(given)
    return torch.device(family.type, key if numbered else family.ask("current_device", default=0))


def _known_devices() -> list[str]:
    family = default_family()
    accelerators = [] if family is CPU else list(map(str, range(family.count()))) if family.indexed else [repr(family.type)]
    return [*accelerators, repr(CPU.type), repr(DISK)]


class ResolvedDeviceMap:
    """A device map with the devices of this machine. The device of an entry is None where its tensors are on the disk.

    >>> targets = ResolvedDeviceMap({"embed": "cpu", "blocks": "disk"})
    >>> targets["blocks.0.weight"], targets["embed.weight"], targets.main, targets.is_offloaded("blocks.0.weight")
    (None, device(type='cpu'), device(type='cpu'), True)
    """

    def __init__(self, device_map: Mapping[str, Any], main_device: Any = None) -> None:
        self.entries: dict[str, torch.device | None] = {
            name: None if str(device) == DISK else resolve_device(device, f"device_map[{name!r}]") for name, device in device_map.items()
        }
        self._found = dict(self.entries)
        if main_device is None:  # a plan knows which device runs what is offloaded
            main_device = getattr(device_map, "main_device", None)
        accelerators = (device for device in self.entries.values() if device is not None and device.type != CPU.type)
        self.main: torch.device = next(accelerators, HOST) if main_device is None else resolve_device(main_device, "main_device")
        """Where offloaded modules run: the first accelerator of the map, or the CPU."""
        self._found.setdefault("", self.main)

    def __getitem__(self, name: str) -> torch.device | None:
        """Return the device of a module or tensor; the main device for buffers that are not saved, which a map may leave out."""
        found = self._found
        if name in found:
            return found[name]
        parent = name.rpartition(".")[0]
        if parent not in found:
            found[parent] = self[parent]
        return found[parent]

    def is_offloaded(self, name: str) -> bool:
        """Return whether a tensor of this name is in its module only while that runs."""
        target = self[name]
        return target is None or (target.type == CPU.type and self.main.type != CPU.type)

    @property
    def devices(self) -> set[torch.device]:
        """All devices of the map."""
        return {device for device in self.entries.values() if device is not None}

    @property
    def single(self) -> torch.device | None:
        """The device, if there is one for everything."""
        found = set(self.entries.values())
        return next(iter(found)) if len(found) == 1 else None


def find_entry(device_map: Mapping[str, Any], name: str) -> str | None:
    """Return the longest name in a device map that covers this one; None if there is none.

    >>> find_entry({"": "cpu", "blocks.1": 0}, "blocks.1.up.weight"), find_entry({"": "cpu", "blocks.1": 0}, "blocks.10.up.weight")
    ('blocks.1', '')
    """
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise a ConfigError (a ValueError) if a tensor has no device, a name is not in the model, or a device is none.

    Buffers that are not saved may be left out, as they are in maps that were made from a state dict.

    >>> check_device_map(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"0": 0})
    Traceback (most recent call last):
    slipstream.errors.ConfigError: device_map has no device for 1.weight, 1.bias. Add them or the modules around them, or "" for all ...
    """
    if not isinstance(device_map, Mapping):
        raise ConfigError(f'device_map={device_map!r} is not a dict. Write a device for each module, as in {{"embed": 0, "head": "cpu"}}.')
    modules = all_modules(model)
    tensors = _tensor_names(modules)
    known = {*tensors, *modules}
    if unknown := [name for name in device_map if name not in known]:
        close = nearest(str(unknown[0]), [*known][:_COMPARED_NAMES])
        hint = f"Did you mean {close[0]}?" if close else "Take them out, or write names of model.named_modules()."
        raise ConfigError(f"device_map names {format_names(unknown)}, which the model does not have. {hint}")
    for name, device in device_map.items():
        if str(device) != "meta":
            parse_device_key(device, f"device_map[{name!r}]")
    unsaved = {f"{path}.{name}" if path else name for path, module in modules.items() for name in module._non_persistent_buffers_set}
    if missing := [name for name in tensors if find_entry(device_map, name) is None and name not in unsaved]:
        raise ConfigError(
            f'device_map has no device for {format_names(missing)}. Add them or the modules around them, or "" for all that is not named.'
        )


def _tensor_names(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of all parameters, then of all buffers."""
    tables: list[tuple[str, Mapping[str, Any]]] = [(path, module._parameters) for path, module in modules.items()]
    tables += [(path, module._buffers) for path, module in modules.items()]
    return [f"{path}.{name}" if path else name for path, table in tables for name, tensor in table.items() if tensor is not None]


def format_names(names: Iterable[Any]) -> str:
    """Return the first few names for a message, and how many more there are.

    >>> format_names("abcdefg")
    'a, b, c, d, e and 2 more'
    """
    shown = list(map(str, names))
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def parse_class_names(given: str | Iterable[str] | None) -> frozenset[str]:
    """Return `no_split_module_classes` as a set of names.

    >>> sorted(parse_class_names(["Block", "Layer"])), parse_class_names("Block"), parse_class_names(None)
    (['Block', 'Layer'], frozenset({'Block'}), frozenset())
    """
    names = frozenset([given] if isinstance(given, str) else given or ())
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(f'no_split_module_classes has {wrong[0]!r}, which is not the name of a class. Write names, as in ["Block"].')
    return names


def warn_unknown_classes(model: nn.Module, given: Iterable[str] | None, argument: str) -> None:
    """Warn of class names that no module of the model has, with the nearest ones."""
    if isinstance(given, str) and argument != "no_split_module_classes":
        raise ConfigError(f"{argument}={given!r} is one text; write a list of names of classes: [{given!r}].")
    if given:
        known = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
        _warn_unknown([given] if isinstance(given, str) else given, known, f"{argument} names the class", type(model).__name__)


def warn_unknown_tensors(model: nn.Module, given: Mapping[str, Any] | None, argument: str) -> None:
    """Warn of names that no parameter and no buffer of the model has."""
    if given:
        known = {*_tensor_names(all_modules(model))}
        _warn_unknown(given, known, f"{argument} names the tensor", type(model).__name__)


def _warn_unknown(given: Iterable[str], known: set[str], what: str, kind: str) -> None:
    unknown = [str(name) for name in given if name not in known]
    if not unknown:
        return
    close = {name: nearest(name, sorted(known)[:_COMPARED_NAMES]) for name in unknown[:_SHOWN]}
    shown = format_names(f"{name} (did you mean {close[name][0]}?)" if close.get(name) else name for name in unknown)
    get_logger(__name__).warning(f"{what} {shown}, which this {kind} has not: it changes nothing.")
