"""Device maps as users write them: looking a name up, checking a map against a model, and merging what goes to one device.

A map gives devices to names of modules or tensors; "" is the whole model. A name that is not in the map goes where the nearest module
around it goes. Nothing here moves a tensor or asks whether a device exists on this machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from torch import nn

from slipstream.errors import ConfigError
from slipstream.offload.planning.budget import device_key
from slipstream.offload.planning.sizes import get_non_persistent_buffers

__all__ = ["Places", "check_device_map", "clean_device_map", "lookup", "merged"]

Devices = TypeVar("Devices", bound=MutableMapping[str, Any])


class Places:
    """Looks names up in a device map; the time is that of the name's depth.

    >>> places = Places({"": "cpu", "blocks.1": 0})
    >>> places["blocks.1.up.weight"], places["blocks.10.up.weight"], places.entry("blocks.1.up")
    (0, 'cpu', 'blocks.1')
    """

    def __init__(self, device_map: Mapping[str, Any]) -> None:
        self._map = device_map

    def entry(self, name: str) -> str | None:
        """The name in the map that covers this one; None if there is none."""
        while name not in self._map:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return name

    def __getitem__(self, name: str) -> Any:
        found = self.entry(name)
        if found is None:
            raise ConfigError(f'device_map has no device for {name!r}. Add it, a module around it, or "" for all that is not named.')
        return self._map[found]

    def __contains__(self, name: str) -> bool:
        return self.entry(name) is not None


def lookup(device_map: Mapping[str, Any], name: str) -> Any:
    """The device of a module or tensor: that of the longest name in the map that covers it.

    >>> lookup({"embed": 0, "blocks": "disk"}, "blocks.3.weight")
    'disk'
    """
    return Places(device_map)[name]


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise a ConfigError (a ValueError) if a tensor has no device, a name is not in the model, or a device is none.

    Buffers that are not saved may be left out, as they are in maps that were made from a state dict.

    >>> check_device_map(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"0": 0})
    Traceback (most recent call last):
    slipstream.errors.ConfigError: device_map has no device for 1.weight, 1.bias. Add them or the modules around them, or "" for all ...
    """
    if not isinstance(device_map, Mapping):
        raise ConfigError(f'device_map={device_map!r} is no dict. Write a device for each module, as in {{"embed": 0, "head": "cpu"}}.')
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    known = {*tensors, *modules}
    if unknown := [name for name in device_map if name not in known]:
        raise ConfigError(f"device_map names {_few(unknown)}, which the model does not have.{_near(unknown, known)}")
    for name, device in device_map.items():
        if str(device) != "meta":
            device_key(device, f"device_map[{name!r}]")
    places, unsaved = Places(device_map), get_non_persistent_buffers(model, recurse=True, fqns=True)
    if missing := [name for name in tensors if name not in places and name not in unsaved]:
        raise ConfigError(
            f'device_map has no device for {_few(missing)}. Add them or the modules around them, or "" for all that is not named.'
        )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(str(name) for name in names[:5]) + more


def _near(unknown: list[str], known: Iterable[str]) -> str:
    found = difflib.get_close_matches(str(unknown[0]), [*known][:5000], n=1)
    return f" Did you mean {found[0]}?" if found else " Take them out, or write names of model.named_modules()."


def clean_device_map(device_map: Devices, module_name: str = "") -> Devices:
    """Replace the children of a module by the module, wherever all of them go to one device; in place, and returned.

    `module_name` limits it to what is below a module.

    >>> clean_device_map({"a.up": 0, "a.down": 0, "b": "cpu"})
    {'a': 0, 'b': 'cpu'}
    """
    start = f"{module_name}." if module_name else ""
    inside = {name: device for name, device in device_map.items() if name == module_name or name.startswith(start)}
    result: dict[str, Any] = {}
    for name, device in [*device_map.items()]:
        if name not in inside:
            result[name] = device
        elif inside and name == next(iter(inside)):  # they come where the first of them was
            result |= merged(inside, module_name)
    device_map.clear()
    device_map.update(result)
    return device_map


def merged(entries: Mapping[str, Any], module_name: str = "") -> dict[str, Any]:
    """Entries below a module with children merged, in their order; a device None is merged with any.

    >>> merged({"a.up": 0, "a.act": None, "a.down": 0, "b.act": None, "c": 1})
    {'a': 0, 'b.act': None, 'c': 1}
    """
    tree: dict[str, Any] = {}
    start = f"{module_name}." if module_name else ""
    for name, device in entries.items():
        node = tree
        for part in name[len(start) :].split(".") if name != module_name else ():
            node = node.setdefault(part, {})
        node[""] = (device,)  # no part of a name is empty
    return dict(_collapsed(tree, module_name))


def _collapsed(node: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    start = f"{name}." if name else ""
    found: list[tuple[str, Any]] = []
    for part, inner in node.items():
        found += _collapsed(inner, start + part) if part else [(name, inner[0])]
    devices = list(_different(device for _, device in found if device is not None))
    if len(found) > 1 and len(devices) <= 1:
        return [(name, devices[0] if devices else None)]
    return found


def _different(devices: Iterable[Any]) -> Iterator[Any]:
    """Each device once; devices of torch and the like need not be hashable to be compared."""
    seen: list[Any] = []
    for device in devices:
        if device not in seen:
            seen.append(device)
            yield device
