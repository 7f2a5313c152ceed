"""Memory budgets of devices, and the devices of a device map on this machine.

A budget is a dict from devices to bytes, in the order in which devices are filled: accelerators by number, accelerators by name, "cpu",
"disk". `get_max_memory` measures it, `get_balanced_memory` evens it out over the accelerators. A budget may name devices of another
machine; `ResolvedDeviceMap` may not: a device that is not here is an error that names the entry and the devices that are.

No tensor is touched here.
"""

from __future__ import annotations

import math
import numbers
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn

from slipstream.big_models.device_map.partition import divide_model
from slipstream.big_models.device_map.sizes import make_sizer, parse_class_names
from slipstream.devices.memory import available_memory
from slipstream.devices.table import CPU, FAMILIES, Family, best_family
from slipstream.errors import ConfigError
from slipstream.files.sizes import parse_size
from slipstream.logging import get_logger

__all__ = [
    "DISK", "Device", "HOST", "ResolvedDeviceMap", "get_balanced_memory", "get_max_memory", "parse_bytes", "parse_device_key",
    "resolve_device",
]


Device = int | str
"""A device of a budget or a map: the number of an accelerator, the name of one that has no number, "cpu" or "disk"."""

_ZERO_SIZE: Final = re.compile(r"\s*0+(\.0+)?\s*([KMGTP]?i?B)?\s*", re.ASCII | re.IGNORECASE)


def parse_device_key(given: Any, where: str) -> Device:
    """A device as budgets and maps have it; `where` says in the error what it was given for.

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
    family = next((entry for entry in FAMILIES if entry.type == kind), None)
    if text == "disk" or (family is CPU and (not colon or digits == "0")):
        return kind
    if family is not None and family is not CPU:
        if digits.isdecimal() and family.indexed:
            return int(digits)
        if not colon:
            return 0 if family.indexed else kind
    raise ConfigError(f'{where} has {given!r}, which is no device. Write the number of an accelerator (0, 1, ...), "cpu" or "disk".')


def parse_bytes(given: Any, where: str) -> int:
    """A number of bytes, zero included, from a number or a text.

    >>> parse_bytes("2KiB", "max_memory[0]"), parse_bytes("0GB", "max_memory[0]"), parse_bytes(1.5e3, "max_memory[0]")
    (2048, 0, 1500)
    """
    if isinstance(given, str):
        return 0 if _ZERO_SIZE.fullmatch(given) else parse_size(given, where)
    number: Any = given if isinstance(given, numbers.Real) and given is not True and given is not False else math.nan
    if math.isfinite(number) and number >= 0:
        return int(number)
    raise ConfigError(f'{where}={given!r} is no size. Write a number of bytes, or a text such as "10GB" or "200MiB".')


def get_max_memory(max_memory: Mapping[Any, Any] | None = None) -> dict[Device, int]:
    """The budget as bytes in the order of devices; without one, what is free now on every accelerator and in main memory.

    Where an accelerator shares its memory with the processor, "cpu" is left out: the same bytes would be counted twice.

    >>> get_max_memory({"cpu": "2GiB", 1: 100, 0: "1KB"})
    {0: 1000, 1: 100, 'cpu': 2147483648}
    """
    if max_memory is None:
        return _measure_memory(best_family())
    if not isinstance(max_memory, Mapping):
        raise ConfigError(f'max_memory={max_memory!r} is no dict. Write what each device may hold: {{0: "10GiB", "cpu": "30GiB"}}.')
    found: dict[Device, int] = {}
    for key, size in max_memory.items():
        device = parse_device_key(key, "max_memory")
        if device in found:
            raise ConfigError(f"max_memory names device {device!r} twice (the second time as {key!r}). Keep one of them.")
        found[device] = parse_bytes(size, f"max_memory[{key!r}]")
    return {device: found[device] for device in sorted(found, key=_device_order)}


def _device_order(device: Device) -> tuple[int, int, str]:
    """Where a device stands in the order: numbers, names, memory, disk."""
    if isinstance(device, int):
        return 0, device, ""
    return {"cpu": 2, "disk": 3}.get(device, 1), 0, device


def _measure_memory(family: Family, free: Callable[[torch.device | str], int | None] = available_memory) -> dict[Device, int]:
    """What is free now."""
    found: dict[Device, int] = {}
    shared = False
    if family is not CPU:
        for number in range(family.count() if family.indexed else 1):
            device = f"{family.type}:{number}" if family.indexed else family.type
            room = free(device)
            if room is None:
                get_logger(__name__).warning(f"{device} does not tell how much memory it has free; name it in max_memory to use it.")
                continue
            found[number if family.indexed else family.type] = room
            shared |= _shares_memory(family, number)
    if not shared:
        found["cpu"] = free("cpu") or 0
    return found


def _shares_memory(family: Family, number: int) -> bool:
    """Whether the device takes its memory from that of the host."""
    namespace = family.module()
    if not hasattr(namespace, "mem_get_info") and hasattr(namespace, "recommended_max_memory"):
        return True
    properties = getattr(namespace, "get_device_properties", None)
    return bool(properties is not None and getattr(properties(number), "is_integrated", False))


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Budgets with which `infer_auto_device_map` spreads a model evenly over the accelerators.

    The largest share is as small as it can be, then that of the accelerators after the first, and so on; the last one keeps its whole
    budget. `low_zero` leaves on device 0 only what the others cannot hold, so that there is room for `generate` and the like. Where the
    model does not fit on the accelerators, every one of them is needed whole and the budget comes back as it is, as it does where there
    is no accelerator. If no `max_memory` is given, a tenth of what is free on each accelerator is left for activations.

    >>> model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)))
    >>> get_balanced_memory(model, {0: 10_000, 1: 10_000, 2: 10_000, "cpu": 50_000})
    {0: 800, 1: 800, 2: 10000, 'cpu': 50000}
    >>> get_balanced_memory(model, {0: 10_000, 1: 10_000, 2: 10_000}, low_zero=True)
    {0: 0, 1: 1200, 2: 10000}
    """
    budget = get_max_memory(max_memory)
    accelerators = [device for device, room in budget.items() if device not in ("cpu", "disk") and room > 0]
    if max_memory is None:
        budget |= {device: budget[device] * 9 // 10 for device in accelerators}
    if not accelerators:
        return budget
    units = divide_model(model, parse_class_names(no_split_module_classes), make_sizer(dtype, special_dtypes))
    sums = [0, *accumulate(group.size for group in units.groups)]
    if low_zero and len(accelerators) > 1 and accelerators[0] == 0:
        rest = _balanced_shares(sums, {device: budget[device] for device in accelerators[1:]})
        if rest is None:  # they are needed whole, and device 0 for what is left
            first = _smallest_first_room(sums, [budget[device] for device in accelerators])
            return budget if first is None else budget | {0: first}
        return budget | {0: 0} | rest
    return budget | (_balanced_shares(sums, {device: budget[device] for device in accelerators}) or {})


def _balanced_shares(sums: list[int], budget: dict[Device, int]) -> dict[Device, int] | None:
    """The budgets that even out what the devices hold, the last as it was; None if what `sums` adds up does not fit in order."""
    shares: dict[Device, int] = {}
    devices = list(budget)
    start = 0
    if not _fits(sums, 0, list(budget.values())):
        return None
    for position, device in enumerate(devices[:-1]):
        rooms = [budget[device] for device in devices[position:]]
        cap = _bisect(partial(_fits_below, sums, start, rooms), max(rooms))
        end = _run_end(sums, start, min(cap, budget[device]))
        shares[device] = sums[end] - sums[start]
        start = end
    return shares


def _smallest_first_room(sums: list[int], rooms: list[int]) -> int | None:
    """The smallest first room with which everything still fits; None if it does not."""

    def fits(cap: int) -> bool:
        return _fits(sums, 0, [cap, *rooms[1:]])

    return _bisect(fits, rooms[0]) if fits(rooms[0]) else None


def _bisect(fits: Callable[[int], bool], largest: int) -> int:
    """The smallest number that fits, where the largest does."""
    low, high = 0, largest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _fits_below(sums: list[int], start: int, rooms: list[int], cap: int) -> bool:
    return _fits(sums, start, [min(cap, room) for room in rooms])


def _fits(sums: list[int], start: int, rooms: list[int]) -> bool:
    for room in rooms:
        start = _run_end(sums, start, room)
    return start == len(sums) - 1


def _run_end(sums: list[int], start: int, room: int) -> int:
    """Where the longest run from `start` ends that fits into a room."""
    return bisect_right(sums, sums[start] + room) - 1


DISK: Final = "disk"
HOST: Final = torch.device(CPU.type)

_Target = torch.device | None
"""Where the tensors of an entry are; None is the disk."""


class ResolvedDeviceMap:
    """A device map with the devices of this machine.

    >>> targets = ResolvedDeviceMap({"embed": "cpu", "blocks": "disk"})
    >>> targets["blocks.0.weight"], targets["embed.weight"], targets.main, targets.is_away("blocks.0.weight")
    (None, device(type='cpu'), device(type='cpu'), True)
    """

    def __init__(self, device_map: Mapping[str, Any], main_device: Any = None) -> None:
        self.entries: dict[str, _Target] = {name: _resolve_entry(device, name) for name, device in device_map.items()}
        self._found: dict[str, _Target] = dict(self.entries)
        if main_device is None:  # a plan knows which device runs what is offloaded
            main_device = getattr(device_map, "main_device", None)
        given = resolve_device(main_device, "main_device") if main_device is not None else None
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


def resolve_device(given: Any, where: str) -> torch.device:
    """A device of this machine; `where` says in the error what it was given for.

    >>> resolve_device("cpu", "execution_device")
    device(type='cpu')
    """
    kind = None if isinstance(given, int) or str(given).isdecimal() else str(given).partition(":")[0]
    family = best_family() if kind is None else next((entry for entry in FAMILIES if entry.type == kind), None)
    try:
        key = parse_device_key(given, where)
    except ConfigError:  # what is no device anywhere is told like one that is not here
        family = None
    if family is CPU and kind is not None:
        return HOST
    if kind == DISK:
        raise ConfigError(f"{where} is {given!r}, which does not compute. Write one of {', '.join(_known_devices(DISK))}.")
    if family is None or family is CPU or not family.is_available() or (isinstance(key, int) and key >= max(1, family.count())):
        raise ConfigError(
            f"{where} is {given!r}, and this machine has no such device. Write one of those that it has: {', '.join(_known_devices())}."
        )
    return torch.device(family.type, key) if isinstance(key, int) and family.indexed else torch.device(family.type)


def _resolve_entry(given: Any, name: str) -> _Target:
    if str(given) == DISK:
        return None
    return resolve_device(given, f"device_map[{name!r}]")


def _known_devices(but: str = "") -> list[str]:
    family = best_family()
    numbers = [] if family is CPU else [str(number) for number in range(family.count())] if family.indexed else [repr(family.type)]
    return [*numbers, *(repr(name) for name in (CPU.type, DISK) if name != but)]


def _first_accelerator(targets: Iterable[_Target]) -> torch.device:
    return next((target for target in targets if target is not None and target.type != CPU.type), HOST)
