"""The devices of a device map on this machine: each entry's, and the one where offloaded modules run.

A device that is not there is an error that names the entry and the devices that are. Nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from slipstream.devices.table import CPU, FAMILIES, best_family
from slipstream.errors import ConfigError
from slipstream.offload.planning.budget import device_key

__all__ = ["DISK", "HOST", "Targets", "device_here"]

DISK: Final = "disk"
HOST: Final = torch.device(CPU.type)

_Target = torch.device | None
"""Where the tensors of an entry are; None is the disk."""


class Targets:
    """A device map with the devices of this machine.

    >>> targets = Targets({"embed": "cpu", "blocks": "disk"})
    >>> targets["blocks.0.weight"], targets["embed.weight"], targets.main, targets.is_away("blocks.0.weight")
    (None, device(type='cpu'), device(type='cpu'), True)
    """

    def __init__(self, device_map: Mapping[str, Any], main_device: Any = None) -> None:
        self.entries: dict[str, _Target] = {name: _target(device, name) for name, device in device_map.items()}
        self._found: dict[str, _Target] = dict(self.entries)
        if main_device is None:  # a plan knows which device runs what is offloaded
            main_device = getattr(device_map, "main_device", None)
        given = device_here(main_device, "main_device") if main_device is not None else None
        self.main: torch.device = given or _first_accelerator(self.entries.values())
        """Where offloaded modules run: the first accelerator of the map, or the processor."""
        self._found.setdefault("", self.main)

    def __getitem__(self, name: str) -> _Target:
        """That of a module or tensor; of one that the map does not name (it may leave out buffers that are not saved), the main device."""
        found = self._found
        if name in found:
            return found[name]
        around = name.rpartition(".")[0]
        if around not in found:
            found[around] = self[around]
        return found[around]

    def is_away(self, name: str) -> bool:
        """Whether a tensor of this name comes to its module only when that runs."""
        target = self[name]
        return target is None or (target.type == CPU.type and self.main.type != CPU.type)

    @property
    def single(self) -> torch.device | None:
        """The device, if there is one for everything."""
        found = set(self.entries.values())
        return next(iter(found)) if len(found) == 1 else None


def device_here(given: Any, where: str) -> torch.device:
    """A device of this machine; `where` says in the error what it was given for.

    >>> device_here("cpu", "execution_device")
    device(type='cpu')
    """
    kind = None if isinstance(given, int) or str(given).isdecimal() else str(given).partition(":")[0]
    family = best_family() if kind is None else next((one for one in FAMILIES if one.type == kind), None)
    try:
        key = device_key(given, where)
    except ConfigError:  # what is no device anywhere is told like one that is not here
        family = None
    if family is CPU and kind is not None:
        return HOST
    if kind == DISK:
        raise ConfigError(f"{where} is {given!r}, which does not compute. Write one of {', '.join(_known(DISK))}.")
    if family is None or family is CPU or not family.is_available() or (isinstance(key, int) and key >= max(1, family.count())):
        raise ConfigError(
            f"{where} is {given!r}, and this machine has no such device. Write one of those that it has: {', '.join(_known())}."
        )
    return torch.device(family.type, key) if isinstance(key, int) and family.indexed else torch.device(family.type)


def _target(given: Any, name: str) -> _Target:
    if str(given) == DISK:
        return None
    return device_here(given, f"device_map[{name!r}]")


def _known(but: str = "") -> list[str]:
    family = best_family()
    numbers = [] if family is CPU else [str(number) for number in range(family.count())] if family.indexed else [repr(family.type)]
    return [*numbers, *(repr(name) for name in (CPU.type, DISK) if name != but)]


def _first_accelerator(targets: Iterable[_Target]) -> torch.device:
    return next((one for one in targets if one is not None and one.type != CPU.type), HOST)
