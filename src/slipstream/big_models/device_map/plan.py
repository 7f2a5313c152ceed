"""Device maps inferred from memory budgets: `infer_auto_device_map`, and "auto", "balanced" and the like.

A budget is a dict from devices to bytes, in the order in which devices are filled: accelerators by number, accelerators by name, "cpu",
"disk". An inferred map is the best placement of the model's layers into the budgets, as `placement.py` defines it. Every tensor gets a
device, tied weights stay together and count once, classes that must not be split stay whole, and no device holds or reserves more than
its budget. The device that runs offloaded layers keeps room for the largest one. No tensor is read or moved here.
"""

from __future__ import annotations

import math
import numbers
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final, TypeVar

import torch
from torch import nn

from slipstream.big_models.device_map.partition import ModelPieces, Piece, PieceGroup, divide_model, list_module_parts
from slipstream.big_models.device_map.placement import NoPacking, Packing, PackingItem, Room, loads, pack
from slipstream.big_models.device_map.sizes import get_module_size_with_ties, make_sizer
from slipstream.big_models.device_map.validation import (
    DISK,
    HOST,
    Device,
    find_entry,
    parse_class_names,
    parse_device_key,
    warn_unknown_classes,
    warn_unknown_tensors,
)
from slipstream.devices.memory import available_memory, convert_bytes
from slipstream.devices.table import CPU, Family, default_family
from slipstream.errors import ConfigError
from slipstream.files.sizes import parse_size
from slipstream.logging import get_logger

__all__ = [
    "DeviceMap", "PREFETCHED_BLOCKS", "STRATEGIES", "clean_device_map", "fallback_allocate", "get_balanced_memory", "get_max_memory",
    "infer_auto_device_map", "merge_entries", "parse_bytes", "plan_device_map",
]

STRATEGIES: Final = ("auto", "balanced", "balanced_low_0", "sequential")
PREFETCHED_BLOCKS: Final = 2
"""Blocks that are prefetched: one that is being read, and one behind it that keeps the disk busy."""
_ZERO_SIZE: Final = re.compile(r"\s*0+(\.0+)?\s*([KMGTP]?i?B)?\s*", re.ASCII | re.IGNORECASE)
_ROOM_KINDS: Final = {HOST.type: "memory", DISK: "disk"}

_Modules = list[tuple[str, Any]]
_AnyMap = TypeVar("_AnyMap", bound=MutableMapping[str, Any])


# --- budgets -----------------------------------------------------------------------------------------------------------------


def parse_bytes(given: Any, where: str) -> int:
    """Return a number of bytes, zero included, from a number or a text.

    >>> parse_bytes("2KiB", "max_memory[0]"), parse_bytes("0GB", "max_memory[0]"), parse_bytes(1.5e3, "max_memory[0]")
    (2048, 0, 1500)
    """
    if isinstance(given, str):
        return 0 if _ZERO_SIZE.fullmatch(given) else parse_size(given, where)
    number: Any = given if isinstance(given, numbers.Real) and given is not True and given is not False else math.nan
    if math.isfinite(number) and number >= 0:
        return int(number)
    raise ConfigError(f'{where}={given!r} is not a size. Write a number of bytes, or a text such as "10GB" or "200MiB".')


def get_max_memory(max_memory: Mapping[Any, Any] | None = None) -> dict[Device, int]:
    """Return the budget as bytes in the order of devices; without one, what is free now on every accelerator and in main memory.

    Where an accelerator shares its memory with the CPU, "cpu" is left out: the same bytes would be counted twice.

    >>> get_max_memory({"cpu": "2GiB", 1: 100, 0: "1KB"})
    {0: 1000, 1: 100, 'cpu': 2147483648}
    """
    if max_memory is None:
        return _measure_memory(default_family())
    if not isinstance(max_memory, Mapping):
        raise ConfigError(f'max_memory={max_memory!r} is not a dict. Write what each device may hold: {{0: "10GiB", "cpu": "30GiB"}}.')
    found: dict[Device, int] = {}
    for key, size in max_memory.items():
        device = parse_device_key(key, "max_memory")
        if device in found:
            raise ConfigError(f"max_memory names device {device!r} twice (the second time as {key!r}). Keep one of them.")
        found[device] = parse_bytes(size, f"max_memory[{key!r}]")
    return {device: found[device] for device in sorted(found, key=_device_order)}


def _device_order(device: Device) -> tuple[int, int, str]:
    """Return the sort key of a device: numbers, names, memory, disk."""
    if isinstance(device, int):
        return 0, device, ""
    return {HOST.type: 2, DISK: 3}.get(device, 1), 0, device


def _measure_memory(family: Family, free: Callable[[torch.device | str], int | None] = available_memory) -> dict[Device, int]:
    """Return what is free now on each device."""
    found: dict[Device, int] = {}
    shared = False
    for number in range(0 if family is CPU else family.count() if family.indexed else 1):
        device = f"{family.type}:{number}" if family.indexed else family.type
        room = free(device)
        if room is None:
            get_logger(__name__).warning(f"{device} does not tell how much memory it has free; name it in max_memory to use it.")
            continue
        found[number if family.indexed else family.type] = room
        shared |= _shares_memory(family, number)
    return found if shared else {**found, HOST.type: free(HOST.type) or 0}


_INTEGRATED: Final = ("is_integrated", "is_integrated_gpu")
"""How device properties say that the memory is the host's: families name it differently."""


def _shares_memory(family: Family, number: int) -> bool:
    """Return whether the device takes its memory from that of the host."""
    if not family.has("mem_get_info") and family.has("recommended_max_memory"):
        return True
    properties = family.ask("get_device_properties", device=number)
    return any(getattr(properties, name, False) for name in _INTEGRATED)


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Return budgets with which `infer_auto_device_map` spreads a model evenly over the accelerators.

    The largest share is as small as it can be, then that of the accelerators after the first, and so on; the last one keeps its whole
    budget. `low_zero` leaves on device 0 only what the others cannot hold, so that there is room for `generate` and the like. Where the
    model does not fit on the accelerators, or there is none, the budget is returned as it is. If no `max_memory` is given, a tenth of
    what is free on each accelerator is left for activations.

    >>> model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)))
    >>> get_balanced_memory(model, {0: 10_000, 1: 10_000, 2: 10_000, "cpu": 50_000})
    {0: 800, 1: 800, 2: 10000, 'cpu': 50000}
    >>> get_balanced_memory(model, {0: 10_000, 1: 10_000, 2: 10_000}, low_zero=True)
    {0: 0, 1: 1200, 2: 10000}
    """
    budget = get_max_memory(max_memory)
    accelerators = [device for device, room in budget.items() if device not in (HOST.type, DISK) and room > 0]
    if max_memory is None:
        budget |= {device: budget[device] * 9 // 10 for device in accelerators}
    if not accelerators:
        return budget
    pieces = divide_model(model, parse_class_names(no_split_module_classes), make_sizer(dtype, special_dtypes))
    sums = [0, *accumulate(group.size for group in pieces.groups)]
    if low_zero and len(accelerators) > 1 and accelerators[0] == 0:
        shares = _balanced_shares(sums, {device: budget[device] for device in accelerators[1:]})
        if shares is not None:
            return budget | {0: 0} | shares
        rooms = [budget[device] for device in accelerators[1:]]  # they are needed whole, and device 0 for what is left
        if not _fits(sums, 0, [budget[0], *rooms]):
            return budget
        return budget | {0: _bisect(lambda first: _fits(sums, 0, [first, *rooms]), budget[0])}
    return budget | (_balanced_shares(sums, {device: budget[device] for device in accelerators}) or {})


def _balanced_shares(sums: list[int], budget: dict[Device, int]) -> dict[Device, int] | None:
    """Return budgets that even out what the devices hold, the last as it was; None if what `sums` adds up does not fit in order."""
    if not _fits(sums, 0, list(budget.values())):
        return None
    shares: dict[Device, int] = {}
    devices = list(budget)
    start = 0
    for position, device in enumerate(devices[:-1]):
        rooms = [budget[device] for device in devices[position:]]
        begun = start
        cap = _bisect(lambda cap: _fits(sums, begun, [min(cap, room) for room in rooms]), max(rooms))  # noqa: B023
        start = _run_end(sums, begun, min(cap, budget[device]))
        shares[device] = sums[start] - sums[begun]
    return shares


def _bisect(fits: Callable[[int], bool], largest: int) -> int:
    """Return the smallest number that fits, where the largest does."""
    low, high = 0, largest
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _fits(sums: list[int], start: int, rooms: list[int]) -> bool:
    for room in rooms:
        start = _run_end(sums, start, room)
    return start == len(sums) - 1


def _run_end(sums: list[int], start: int, room: int) -> int:
    """Return where the longest run from `start` ends that fits into a room."""
    return bisect_right(sums, sums[start] + room) - 1


# --- device maps -------------------------------------------------------------------------------------------------------------


class DeviceMap(dict[str, Any]):
    """A device map with the reasons for it. It is a dict and equals one: module name to device number, "cpu" or "disk".

    >>> plan = DeviceMap({"": 0}, budget={0: 100}, held={0: 80})
    >>> plan == {"": 0}, plan.budget, plan.held
    (True, {0: 100}, {0: 80})
    """

    def __init__(
        self,
        entries: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        *,
        budget: Mapping[Device, int] | None = None,
        held: Mapping[Device, int] | None = None,
        reserved: Mapping[Device, int] | None = None,
        reasons: Mapping[str, str] | None = None,
        sizes: Mapping[str, int] | None = None,
        main_device: Device | None = None,
        activations: Mapping[Device, int] | None = None,
        whole: Collection[str] = (),
    ) -> None:
        super().__init__(entries)
        self.budget: dict[Device, int] = dict(budget or {})
        """Bytes that each device may hold, as they were given; a device without a limit is not here."""
        self.held: dict[Device, int] = dict(held or {})
        """Bytes placed on each device, with the buffers of offloaded layers on the main device."""
        self.reserved: dict[Device, int] = dict(reserved or {})
        """Bytes kept free: for the largest offloaded layer, on the main device, and for activations."""
        self.reasons: dict[str, str] = dict(reasons or {})
        """Why each entry went where it went."""
        self.sizes: dict[str, int] = dict(sizes or {})
        """Bytes of each entry; weights that entries share are counted in the first of them."""
        self.main_device = main_device
        """The device that runs what is offloaded."""
        self.activations: dict[Device, int] = dict(activations or {})
        """Of the bytes kept free, those for activations."""
        self.whole = tuple(whole)
        """The classes whose modules stay whole, also when they are offloaded."""

    def copy(self) -> DeviceMap:
        """Return the same plan in another dict."""
        return DeviceMap(self, **vars(self))

    def table(self) -> str:
        """Return the plan as text: what each device holds, then each entry with its size and the reason for its place.

        >>> print(infer_auto_device_map(nn.Linear(2, 2), max_memory={0: "1KB", "cpu": "1KB"}).table())
        device  held      kept free  budget
        0       24 bytes  0 bytes    1000 bytes
        cpu     0 bytes   0 bytes    1000 bytes
        <BLANKLINE>
        module  device  size      why
        (all)   0       24 bytes  the first to be placed
        """
        from slipstream.observability.report.text_charts import align_columns

        devices = [("device", "held", "kept free", "budget")]
        for device in dict.fromkeys([*self.budget, *self.held]):
            limit = convert_bytes(self.budget[device]) if device in self.budget else "no limit"
            devices.append((str(device), convert_bytes(self.held.get(device, 0)), convert_bytes(self.reserved.get(device, 0)), limit))
        modules = [("module", "device", "size", "why")]
        for name, device in self.items():
            modules.append((name or "(all)", str(device), convert_bytes(self.sizes.get(name, 0)), self.reasons.get(name, "")))
        return "\n".join([*align_columns(devices, left=range(4)), "", *align_columns(modules, left=range(4))])


def clean_device_map(device_map: _AnyMap, module_name: str = "") -> _AnyMap:
    """Replace the children of a module by the module, wherever all of them go to one device; in place, and returned.

    `module_name` limits it to what is below a module.

    >>> clean_device_map({"a.up": 0, "a.down": 0, "b": "cpu"})
    {'a': 0, 'b': 'cpu'}
    """
    prefix = f"{module_name}." if module_name else ""
    inside = {name: device for name, device in device_map.items() if name == module_name or name.startswith(prefix)}
    result: dict[str, Any] = {}
    for name, device in device_map.items():
        if name not in inside:
            result[name] = device
        elif name == next(iter(inside)):  # the merged ones stand where the first of them was
            result |= merge_entries(inside, module_name)
    device_map.clear()
    device_map.update(result)
    return device_map


def merge_entries(entries: Mapping[str, Any], module_name: str = "") -> dict[str, Any]:
    """Return the entries below a module with children merged, in their order; a device None is merged with any.

    >>> merge_entries({"a.up": 0, "a.act": None, "a.down": 0, "b.act": None, "c": 1})
    {'a': 0, 'b.act': None, 'c': 1}
    """
    tree: dict[str, Any] = {}
    prefix = f"{module_name}." if module_name else ""
    for name, device in entries.items():
        node = tree
        for part in name[len(prefix) :].split(".") if name != module_name else ():
            node = node.setdefault(part, {})
        node[""] = (device,)  # no part of a name is empty
    return dict(_collapse(tree, module_name))


def _collapse(node: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    found: list[tuple[str, Any]] = []
    for part, inner in node.items():
        found += _collapse(inner, prefix + part) if part else [(name, inner[0])]
    devices = [device for _, device in found if device is not None]
    if len(found) > 1 and all(device == devices[0] for device in devices):
        return [(name, devices[0] if devices else None)]
    return found


def fallback_allocate(
    modules: Sequence[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Collection[str] | None = None,
    tied_parameters: Iterable[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | None, _Modules]:
    """Return the first module that fits below a limit, larger ones before their parts; and the list of modules without it.

    Modules that had to be divided to find it are in that list as their parts. A module that shares weights with others counts with them.
    Where nothing fits: (None, None, the modules as they were). Nothing here calls it; Accelerate has a function of this name.

    >>> model = nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2))
    >>> name, _, rest = fallback_allocate([*model.named_children()], {"0": 440, "1": 24}, 100)
    >>> name, [other for other, _ in rest]
    ('1', ['0'])
    """
    limit = parse_size(size_limit, "size_limit") if isinstance(size_limit, str) else int(size_limit)
    if not modules:
        raise ConfigError("fallback_allocate got no modules. Give it those that have no place yet.")
    whole, ties = parse_class_names(no_split_module_classes), [list(group) for group in tied_parameters or ()]
    waiting = deque((name, module, (list(modules), position)) for position, (name, module) in enumerate(modules))
    while waiting:
        name, module, (siblings, position) = waiting.popleft()
        rest = siblings[:position] + siblings[position + 1 :]
        if _size_with_ties(name, module_sizes, ties, rest) <= limit:
            return name, module, rest
        if isinstance(module, nn.Module) and module._modules and type(module).__name__ not in whole:
            parts: _Modules = list_module_parts(name, module)
            inside = siblings[:position] + parts + siblings[position + 1 :]
            waiting += [(part, inner, (inside, position + number)) for number, (part, inner) in enumerate(parts)]
    return None, None, list(modules)


def _size_with_ties(name: str, sizes: Mapping[str, int], ties: list[list[str]], rest: _Modules) -> int:
    others = []
    for group in ties:
        inside = [tied for tied in group if f"{tied}.".startswith(f"{name}.")]
        if inside:
            others += [tied for tied in group if tied not in inside]
    held = [tied for tied in others if any(f"{tied}.".startswith(f"{other}.") for other, _ in rest)]
    return get_module_size_with_ties(held, sizes.get(name, 0), sizes, rest)[0]


# --- from a model and budgets to a map ---------------------------------------------------------------------------------------


def plan_device_map(
    model: torch.nn.Module,
    strategy: Any,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    dtype: Any = None,
    *,
    special_dtypes: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
) -> DeviceMap:
    """Return the device map of a model by one of the `STRATEGIES`.

    Classes that the model itself says stay whole do so, unless others are named.

    >>> plan_device_map(torch.nn.Linear(2, 2), "auto", {"cpu": "1GB"})
    {'': 'cpu'}
    >>> plan_device_map(torch.nn.Linear(2, 2), "somehow")
    Traceback (most recent call last):
    slipstream.errors.ConfigError: device_map='somehow' is not a strategy. Write one of 'auto', 'balanced', ...
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"device_map={strategy!r} is not a strategy. Write one of {', '.join(map(repr, STRATEGIES))}, or a dict.")
    no_split = None if no_split_module_classes is None else parse_class_names(no_split_module_classes)
    if strategy != "sequential":
        whole = sorted(parse_class_names(getattr(model, "_no_split_modules", None)) if no_split is None else no_split)
        max_memory = get_balanced_memory(model, max_memory, whole, dtype, special_dtypes, low_zero=strategy == "balanced_low_0")
    return infer_auto_device_map(model, max_memory, no_split, dtype, special_dtypes, offload_buffers=offload_buffers)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    *,
    activations: int | str | Mapping[Any, int | str] = 0,
    read_ahead: int = PREFETCHED_BLOCKS,
) -> DeviceMap:
    """Return a device for every part of a model, so that the first devices are used most and no budget is exceeded.

    `max_memory`: bytes per device (`{0: "10GiB", "cpu": "30GiB"}`), default what is free now; the disk takes the rest, without limit
    unless one is given (`"disk": 0` forbids it). `no_split_module_classes`: names of classes whose modules stay whole; None takes the
    model's own `_no_split_modules`. `dtype`, `special_dtypes`: what weights will be converted to, all of them and some by name.
    `activations`: bytes kept free, on every device that is not a disk or per device. `offload_buffers`: buffers of offloaded layers go with
    them and do not stay on the main device. `fallback_allocation`: where the next layer does not fit, later ones may fill the room.
    `verbose` prints the plan. `clean_result=False` keeps the layers as they were placed, without merging them into modules. `read_ahead`:
    the device that runs offloaded layers keeps room for so many prefetched ones beside the largest (an accelerator for one), in a third of
    its budget at most.

    A ConfigError names the layer if the device that would run it has no room for it, with the bytes that are missing.

    >>> model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
    >>> infer_auto_device_map(model, max_memory={0: 900, "cpu": 500})
    {'0': 0, '1': 'cpu', '2': 'disk', '3': 'disk'}
    """
    budget = get_max_memory(max_memory)
    warn_unknown_classes(model, no_split_module_classes, "no_split_module_classes")
    warn_unknown_tensors(model, special_dtypes, "special_dtypes")
    if no_split_module_classes is None:
        no_split_module_classes = getattr(model, "_no_split_modules", None)
    if not isinstance(read_ahead, int) or isinstance(read_ahead, bool) or read_ahead < 0:
        raise ConfigError(f"read_ahead={read_ahead!r} is not a number of layers. Write a whole number; 0 keeps no room for it.")
    whole = parse_class_names(no_split_module_classes)
    pieces = divide_model(model, whole, make_sizer(dtype, special_dtypes))
    kept = _activations(activations, budget)
    problem, packing = _best([_Problem(groups, pieces, budget, kept, offload_buffers) for groups in pieces.orders()], fallback_allocation)
    packing = _with_prefetch_room(problem, packing, fallback_allocation, read_ahead)
    plan = _plan(problem, packing, clean_result)
    plan.whole = tuple(sorted(whole))
    _warn_unused_devices(problem, packing)
    if verbose:
        print(plan.table())
    return plan


def _best(problems: Sequence[_Problem], fallback: bool) -> tuple[_Problem, Packing]:
    """Return the problem with the best packing, the first of equals."""
    found: list[tuple[_Problem, Packing]] = []
    trouble = None
    for problem in problems:
        try:
            found.append((problem, pack(problem.items, problem.rooms, fallback)))
        except NoPacking as error:
            trouble = trouble or _explain_no_room(error, problem)
    if not found:
        raise ConfigError(trouble)
    return max(found, key=lambda pair: loads(pair[1], pair[0].items, pair[0].rooms))


def _with_prefetch_room(problem: _Problem, packing: Packing, fallback: bool, ahead: int) -> Packing:
    """Return the packing that leaves the device that runs offloaded layers room for prefetched ones, in a third of what it has at most.

    On the CPU they come from the disk. An accelerator gets the next one while one runs.
    """
    room = problem.rooms[packing.main]
    most = min(ahead if room.kind == "memory" else min(ahead, 1), room.cap // 3 // packing.reserve) if packing.reserve else 0
    for count in range(most, 0, -1):
        rooms = list(problem.rooms)
        rooms[packing.main] = Room(room.kind, room.cap - count * packing.reserve)
        try:
            found = pack(problem.items, rooms, fallback)
        except NoPacking:
            continue
        if found.main == packing.main:
            return replace(found, reserve=found.reserve + count * packing.reserve)
    return packing


def _activations(given: int | str | Mapping[Any, int | str], budget: Mapping[Device, int]) -> dict[Device, int]:
    if not isinstance(given, Mapping):
        size = parse_bytes(given, "activations")
        return {device: size for device in budget if device != DISK} if size else {}
    found = {parse_device_key(key, "activations"): parse_bytes(size, f"activations[{key!r}]") for key, size in given.items()}
    if unknown := [device for device in found if device not in budget]:
        raise ConfigError(f"activations names device {unknown[0]!r}, which max_memory does not have: {list(budget)}. Name one of those.")
    return found


class _Problem:
    """A model and budgets as items and rooms; devices without any budget are no rooms."""

    def __init__(
        self,
        groups: tuple[PieceGroup, ...],
        pieces: ModelPieces,
        budget: dict[Device, int],
        activations: dict[Device, int],
        offload_buffers: bool,
    ) -> None:
        self.groups = groups
        self.empty_modules = pieces.empty_modules
        self.budget = budget
        self.activations = activations
        self.buffers_stay = not offload_buffers
        self.items = [
            PackingItem(group.size, group.buffers if self.buffers_stay else 0, max(map(self.layer_size, group.pieces))) for group in groups
        ]
        limits: dict[Device, int | None] = {DISK: None, **budget}
        self.devices = list(dict.fromkeys(device for device in [*budget, DISK] if limits[device] != 0))
        self.rooms = []
        for device in self.devices:
            limit = limits[device]
            capacity = None if limit is None else max(0, limit - activations.get(device, 0))
            self.rooms.append(Room(_ROOM_KINDS.get(str(device), "computes"), capacity))
        if not any(room.kind != "disk" for room in self.rooms):
            raise ConfigError(
                f"max_memory={budget} leaves no device that could run the model. "
                'Give one that is not a disk some bytes, as in {"cpu": "10GiB"}.'
            )

    def layer_size(self, piece: Piece) -> int:
        """Return the bytes of a piece that have to be brought in when it runs."""
        return piece.size - piece.buffers if self.buffers_stay else piece.size


def _plan(problem: _Problem, packing: Packing, clean: bool) -> DeviceMap:
    devices, main = problem.devices, problem.devices[packing.main]
    order: dict[int, tuple[str, Device | None, int]] = {number: (name, None, -1) for name, number in problem.empty_modules.items()}
    for number, group in enumerate(problem.groups):
        for piece in group.pieces:
            order[piece.order] = (piece.name, devices[packing.places[number]], number)
    placed = [order[number] for number in sorted(order)]
    entries: dict[str, Device | None] = {name: device for name, device, _ in placed}
    entries = merge_entries(entries) if clean else entries
    device = next((device for device in entries.values() if device is not None), main)
    for name, found in entries.items():  # modules without tensors go with what is before them, or the first that has a device
        device = entries[name] = device if found is None else found
    used = loads(packing, problem.items, problem.rooms)
    held = {device: used[number] for number, device in enumerate(devices) if number in packing.places}
    reserved = {device: size for device, size in problem.activations.items() if size}
    if packing.stays:
        held = {device: held.get(device, 0) for device in devices if device in held or device == main}
        held[main] += packing.stays
    if packing.reserve:
        reserved[main] = reserved.get(main, 0) + packing.reserve
    kept = problem.activations
    plan = DeviceMap(entries, budget=problem.budget, held=held, reserved=reserved, main_device=main, activations=kept)
    _explain(plan, problem, packing, placed)
    return plan


def _explain(plan: DeviceMap, problem: _Problem, packing: Packing, placed: Iterable[tuple[str, Device | None, int]]) -> None:
    """Fill in sizes and reasons: those of an entry are the sum of, and the first of, those of the layers in it."""
    sizes = {piece.name: size for group in problem.groups for piece, size in zip(group.pieces, group.adds, strict=True)}
    for name, _, number in placed:
        entry = find_entry(plan, name)
        if entry is None:
            continue
        plan.sizes[entry] = plan.sizes.get(entry, 0) + sizes.get(name, 0)
        if number >= 0 and entry not in plan.reasons:
            plan.reasons[entry] = _reason(plan, problem, packing, number, name)
        elif number < 0 and entry == name:
            plan.reasons[entry] = "has no tensors"


def _reason(plan: DeviceMap, problem: _Problem, packing: Packing, number: int, name: str) -> str:
    """Return why a group is where it is: rooms before that of the group before it were closed by an earlier one."""
    group = problem.groups[number]
    if name != group.name:
        return f"shares weights with {group.name}"
    reasons = []
    for index in range(packing.places[number - 1] if number else 0, packing.places[number]):
        room, device = problem.rooms[index], problem.devices[index]
        kept = packing.reserve if index == packing.main else 0
        left = max(0, (room.capacity or 0) - plan.held.get(device, 0) - kept)
        also = f", {convert_bytes(kept)} kept free for offloaded layers" if kept else ""
        reasons.append(f"needs {convert_bytes(group.size)}, {device} has {convert_bytes(left)} left{also}")
    return "; ".join(reasons) or ("the first to be placed" if number == 0 else f"fits, after {problem.groups[number - 1].name}")


def _explain_no_room(trouble: NoPacking, problem: _Problem) -> str:
    limits = ", ".join(f"{device}: {size} bytes" for device, size in problem.budget.items())
    if trouble.main is None:
        return (
            f"The model does not fit into max_memory ({limits}): {trouble.missing} bytes have no place. "
            f"Raise one of the limits by that much, or allow more on disk."
        )
    pieces = [piece for group in problem.groups for piece in group.pieces]
    largest = max(pieces, key=problem.layer_size)
    device = problem.devices[trouble.main]
    staying = sum(item.stays for item in problem.items)
    needs = [f"{problem.layer_size(largest)} bytes to run"]
    if staying:
        needs.append(f"{staying} bytes for buffers that stay (offload_buffers=True takes them along)")
    if problem.activations.get(device):
        needs.append(f"{problem.activations[device]} bytes for activations")
    return (
        f"The largest layer, {largest.name or 'the model itself'}, fits on no device of max_memory ({limits}): "
        f"it needs {' and '.join(needs)}, and {device}, which has the most room, is {trouble.missing} bytes too small. "
        f"Raise max_memory[{device!r}] to at least {problem.budget[device] + trouble.missing}, load in a smaller dtype, or, if its class "
        "is in no_split_module_classes, take it out there."
    )


def _warn_unused_devices(problem: _Problem, packing: Packing) -> None:
    """Warn of a device that computes and gets nothing while later ones do."""
    used = {*packing.places, packing.main}
    for number, room in enumerate(problem.rooms[: max(packing.places, default=0)]):
        if room.kind == "computes" and number not in used:
            device, first = problem.devices[number], problem.groups[0]
            beside = " beside what running offloaded layers needs" if first.size <= room.cap else ""
            get_logger(__name__).warning(
                f"Device {device} is not used: its {room.capacity} bytes are too few for {first.name or 'the model'} "
                f"({first.size} bytes){beside}. Give it more in max_memory, or leave it out."
            )
