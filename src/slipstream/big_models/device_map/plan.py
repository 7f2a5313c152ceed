"""Device maps: how one is inferred (`infer_auto_device_map`, "auto" and the like), checked against a model, and looked up.

An inferred map is the best packing of the model's layers into the memory budgets, as `packing.py` defines it: layers in the order of
definition, devices in the order of the budget. Every tensor gets a device, tied weights stay together and count once, classes that must
not be split stay whole, and no device holds or reserves more than its budget allows. Room for the largest offloaded layer is reserved on
the device that runs it.

No tensor is read or moved here.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import nn

from slipstream.big_models.device_map.budget import Device, get_balanced_memory, get_max_memory, parse_bytes, parse_device_key
from slipstream.big_models.device_map.packing import NoPacking, Packing, PackingItem, Room, loads, pack
from slipstream.big_models.device_map.partition import Piece, PieceGroup, divide_model
from slipstream.big_models.device_map.sizes import (
    get_module_size_with_ties,
    get_non_persistent_buffers,
    list_module_parts,
    make_sizer,
    parse_class_names,
)
from slipstream.big_models.weight_store.store import PREFETCHED_BLOCKS
from slipstream.devices.memory import convert_bytes
from slipstream.errors import ConfigError
from slipstream.files.sizes import parse_size
from slipstream.logging import get_logger

__all__ = [
    "DeviceLookup", "DeviceMap", "STRATEGIES", "check_device_map", "clean_device_map", "fallback_allocate",
    "infer_auto_device_map", "lookup_device", "merge_entries", "plan_device_map", "warn_unknown_classes", "warn_unknown_tensors",
]


Devices = TypeVar("Devices", bound=MutableMapping[str, Any])


class DeviceLookup:
    """Looks names up in a device map; the time is that of the name's depth.

    >>> places = DeviceLookup({"": "cpu", "blocks.1": 0})
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


def lookup_device(device_map: Mapping[str, Any], name: str) -> Any:
    """The device of a module or tensor: that of the longest name in the map that covers it.

    >>> lookup_device({"embed": 0, "blocks": "disk"}, "blocks.3.weight")
    'disk'
    """
    return DeviceLookup(device_map)[name]


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
        raise ConfigError(f"device_map names {_shorten(unknown)}, which the model does not have.{_close_names(unknown, known)}")
    for name, device in device_map.items():
        if str(device) != "meta":
            parse_device_key(device, f"device_map[{name!r}]")
    places, unsaved = DeviceLookup(device_map), get_non_persistent_buffers(model, recurse=True, fqns=True)
    if missing := [name for name in tensors if name not in places and name not in unsaved]:
        raise ConfigError(
            f'device_map has no device for {_shorten(missing)}. Add them or the modules around them, or "" for all that is not named.'
        )


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(str(name) for name in names[:5]) + more


def _close_names(unknown: list[str], known: Iterable[str]) -> str:
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
            result |= merge_entries(inside, module_name)
    device_map.clear()
    device_map.update(result)
    return device_map


def merge_entries(entries: Mapping[str, Any], module_name: str = "") -> dict[str, Any]:
    """Entries below a module with children merged, in their order; a device None is merged with any.

    >>> merge_entries({"a.up": 0, "a.act": None, "a.down": 0, "b.act": None, "c": 1})
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
    devices = list(_distinct(device for _, device in found if device is not None))
    if len(found) > 1 and len(devices) <= 1:
        return [(name, devices[0] if devices else None)]
    return found


def _distinct(devices: Iterable[Any]) -> Iterator[Any]:
    """Each device once; devices of torch and the like need not be hashable to be compared."""
    seen: list[Any] = []
    for device in devices:
        if device not in seen:
            seen.append(device)
            yield device


_SHOWN: Final = 5


def warn_unknown_classes(model: nn.Module, given: Iterable[str] | None, argument: str) -> None:
    """Warns of names of classes that no module of a model is of, with those that may have been meant."""
    if not given:
        return
    if isinstance(given, str) and argument != "no_split_module_classes":
        raise ConfigError(f"{argument}={given!r} is one text; write a list of names of classes: [{given!r}].")
    known = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    _warn_unknown([given] if isinstance(given, str) else given, known, f"{argument} names the class", type(model).__name__)


def warn_unknown_tensors(model: nn.Module, given: Mapping[str, Any] | None, argument: str) -> None:
    """Warns of names that no parameter and no buffer of a model has."""
    if given:
        known = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        known += [name for name, _ in model.named_buffers(remove_duplicate=False)]
        _warn_unknown(given, known, f"{argument} names the tensor", type(model).__name__)


def _warn_unknown(given: Iterable[str], known: Iterable[str], what: str, kind: str) -> None:
    names = {*known}
    unknown = [str(name) for name in given if name not in names]
    if not unknown:
        return
    near = {name: difflib.get_close_matches(name, sorted(names)[:5000], n=1) for name in unknown[:_SHOWN]}
    shown = ", ".join(f"{name} (did you mean {found[0]}?)" if found else name for name, found in near.items())
    more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    get_logger(__name__).warning(f"{what} {shown}{more}, which this {kind} has not: it changes nothing.")


_Modules = list[tuple[str, Any]]


def fallback_allocate(
    modules: Sequence[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Collection[str] | None = None,
    tied_parameters: Iterable[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | None, _Modules]:
    """The first module that fits below a limit, larger ones before their parts; and the list of modules without it.

    Modules that had to be divided to find it are in that list as their parts. A module that shares weights with others counts with them.
    Where nothing fits: (None, None, the modules as they were).

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


_ROOM_KINDS = {"cpu": "memory", "disk": "disk"}


class DeviceMap(dict[str, Any]):
    """A device map that knows how it came about. It is a dict and equals one: module name to device number, "cpu" or "disk".

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
        """The same plan in another dict."""
        return DeviceMap(
            self,
            budget=self.budget,
            held=self.held,
            reserved=self.reserved,
            reasons=self.reasons,
            sizes=self.sizes,
            main_device=self.main_device,
            activations=self.activations,
            whole=self.whole,
        )

    def table(self) -> str:
        """The plan to be read: what each device holds, then each entry with its size and the reason for its place.

        >>> print(infer_auto_device_map(nn.Linear(2, 2), max_memory={0: "1KB", "cpu": "1KB"}).table())
        device  held      kept free  budget
        0       24 bytes  0 bytes    1000 bytes
        cpu     0 bytes   0 bytes    1000 bytes
        <BLANKLINE>
        module  device  size      why
        (all)   0       24 bytes  the first to be placed
        """
        devices: list[Device] = [*self.budget, *(device for device in self.held if device not in self.budget)]
        above = [("device", "held", "kept free", "budget")]
        for device in devices:
            limit = convert_bytes(self.budget[device]) if device in self.budget else "no limit"
            above.append((str(device), convert_bytes(self.held.get(device, 0)), convert_bytes(self.reserved.get(device, 0)), limit))
        below = [("module", "device", "size", "why")]
        for name, device in self.items():
            below.append((name or "(all)", str(device), convert_bytes(self.sizes.get(name, 0)), self.reasons.get(name, "")))
        return f"{_columns(above)}\n\n{_columns(below)}"


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


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
    """A device for every part of a model, so that the first devices are used most and no budget is exceeded.

    `max_memory`: bytes per device (`{0: "10GiB", "cpu": "30GiB"}`), default what is free now; disk takes the rest, without limit unless
    one is given (`"disk": 0` forbids it). `no_split_module_classes`: names of classes whose modules stay whole; None takes the
    model's own `_no_split_modules`, if it has any. `dtype`, `special_dtypes`: what weights will be converted to, all of them and some by
    name. `activations`: bytes kept free, on every
    device that is no disk or per device. `offload_buffers`: buffers of offloaded layers go with them and do not stay on the main
    device. `fallback_allocation`: where the next layer does not fit, later ones may fill the room. `verbose` prints the plan.
    `clean_result=False` gives the layers as they were placed, without merging them into modules. `read_ahead`: where the processor runs
    layers from the disk, it keeps room for so many further ones beside the largest (in a third of its budget at most), read meanwhile.

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
    whole = parse_class_names(no_split_module_classes)
    units = divide_model(model, whole, make_sizer(dtype, special_dtypes))
    kept = _activations(activations, budget)
    problems = [_Problem(groups, units.hollow, budget, kept, offload_buffers) for groups in units.orders()]
    problem, packing = _with_prefetch_room(*_best(problems, fallback_allocation), fallback_allocation, _count(read_ahead))
    plan = _plan(problem, packing, clean_result)
    plan.whole = tuple(sorted(whole))
    _warn_unused_devices(problem, packing)
    if verbose:
        print(plan.table())
    return plan


def _best(problems: Sequence[_Problem], fallback: bool) -> tuple[_Problem, Packing]:
    """The problem with the best packing, the first of equals."""
    found: list[tuple[_Problem, Packing]] = []
    trouble = None
    for problem in problems:
        try:
            found.append((problem, pack(problem.items, problem.rooms, fallback)))
        except NoPacking as error:
            trouble = trouble or _explain_no_room(error, problem)
    if not found:
        raise ConfigError(trouble)
    return max(found, key=lambda entry: loads(entry[1], entry[0].items, entry[0].rooms))


def _with_prefetch_room(problem: _Problem, packing: Packing, fallback: bool, ahead: int) -> tuple[_Problem, Packing]:
    """The packing that leaves the processor room for further layers from the disk, in a third of what it has at most."""
    room = problem.rooms[packing.main]
    if room.kind != "memory" or not packing.reserve:
        return problem, packing
    for count in range(min(ahead, room.cap // 3 // packing.reserve), 0, -1):
        rooms = list(problem.rooms)
        rooms[packing.main] = Room("memory", room.cap - count * packing.reserve)
        try:
            found = pack(problem.items, rooms, fallback)
        except NoPacking:
            continue
        if found.main == packing.main:
            return problem, replace(found, reserve=found.reserve + count * packing.reserve)
    return problem, packing


def _count(read_ahead: Any) -> int:
    if not isinstance(read_ahead, int) or isinstance(read_ahead, bool) or read_ahead < 0:
        raise ConfigError(f"read_ahead={read_ahead!r} is no number of layers. Write a whole number; 0 keeps no room for it.")
    return read_ahead


def _activations(given: int | str | Mapping[Any, int | str], budget: Mapping[Device, int]) -> dict[Device, int]:
    if not isinstance(given, Mapping):
        size = parse_bytes(given, "activations")
        return {device: size for device in budget if device != "disk"} if size else {}
    found = {parse_device_key(key, "activations"): parse_bytes(size, f"activations[{key!r}]") for key, size in given.items()}
    if unknown := [device for device in found if device not in budget]:
        raise ConfigError(f"activations names device {unknown[0]!r}, which max_memory does not have: {list(budget)}. Name one of those.")
    return found


class _Problem:
    """A model and budgets as items and rooms; devices without any budget are no rooms."""

    def __init__(
        self,
        groups: tuple[PieceGroup, ...],
        hollow: dict[str, int],
        budget: dict[Device, int],
        activations: dict[Device, int],
        offload_buffers: bool,
    ) -> None:
        self.groups = groups
        self.hollow = hollow
        self.budget = budget
        self.activations = activations
        self.stay = not offload_buffers
        self.items = [self._item(group) for group in groups]
        limits: dict[Device, int | None] = {"disk": None, **budget}
        devices = [device for device in [*budget, "disk"] if limits[device] != 0]
        self.devices = list(dict.fromkeys(devices))
        self.rooms = [Room(_ROOM_KINDS.get(str(device), "computes"), self._capacity(device, limits[device])) for device in self.devices]
        if not any(room.kind != "disk" for room in self.rooms):
            raise ConfigError(
                f"max_memory={budget} leaves no device that could run the model. "
                'Give one that is no disk some bytes, as in {"cpu": "10GiB"}.'
            )

    def _item(self, group: PieceGroup) -> PackingItem:
        return PackingItem(group.size, group.buffers if self.stay else 0, max(map(self.layer, group.pieces)))

    def layer(self, piece: Piece) -> int:
        """Bytes of a piece that have to be brought in when it runs."""
        return piece.size - piece.buffers if self.stay else piece.size

    def _capacity(self, device: Device, limit: int | None) -> int | None:
        return None if limit is None else max(0, limit - self.activations.get(device, 0))

    def is_offloaded(self, place: int, main: int) -> bool:
        """Whether what is there runs somewhere else."""
        return place != main and self.rooms[place].kind != "computes"


# --- from a packing to a plan ------------------------------------------------------------------------------------------------


def _plan(problem: _Problem, packing: Packing, clean: bool) -> DeviceMap:
    devices, groups = problem.devices, problem.groups
    order: dict[int, tuple[str, Device | None, int]] = {number: (name, None, -1) for name, number in problem.hollow.items()}
    for number, group in enumerate(groups):
        for piece in group.pieces:
            order[piece.order] = (piece.name, devices[packing.places[number]], number)
    placed = [order[number] for number in sorted(order)]
    entries: dict[str, Device | None] = {name: device for name, device, _ in placed}
    entries = _without_gaps(merge_entries(entries) if clean else entries, devices[packing.main])
    held = _held(problem, packing)
    reserved = {device: size for device, size in problem.activations.items() if size}
    if packing.reserve:
        main = devices[packing.main]
        reserved[main] = reserved.get(main, 0) + packing.reserve
    kept = problem.activations
    plan = DeviceMap(entries, budget=problem.budget, held=held, reserved=reserved, main_device=devices[packing.main], activations=kept)
    _explain(plan, problem, packing, placed)
    return plan


def _without_gaps(entries: Mapping[str, Device | None], main: Device) -> dict[str, Device | None]:
    """Modules without tensors go with what is before them, or the first that has a device."""
    device = next((entry for entry in entries.values() if entry is not None), main)
    result: dict[str, Device | None] = {}
    for name, found in entries.items():
        device = result[name] = device if found is None else found
    return result


def _held(problem: _Problem, packing: Packing) -> dict[Device, int]:
    held: dict[Device, int] = {}
    for item, place in zip(problem.items, packing.places, strict=True):
        device = problem.devices[place]
        held[device] = held.get(device, 0) + (item.moved if problem.is_offloaded(place, packing.main) else item.size)
    if packing.stays:
        main = problem.devices[packing.main]
        held[main] = held.get(main, 0) + packing.stays
    return {device: held[device] for device in problem.devices if device in held}


@dataclass(frozen=True)
class _Reasons:
    """Says why a group is where it is."""

    problem: _Problem
    packing: Packing
    free: dict[int, int]
    """Bytes that are left in each room with a limit, what is kept free not counted as left."""

    def of(self, number: int, name: str) -> str:
        problem, places = self.problem, self.packing.places
        group, place = problem.groups[number], places[number]
        if name != group.name:
            return f"shares weights with {group.name}"
        missed = [index for index in range(place) if self._skipped(index, number)]
        if not missed:
            return "the first to be placed" if number == 0 else f"fits, after {problem.groups[number - 1].name}"
        return "; ".join(self._why_not(entry, group) for entry in missed)

    def _skipped(self, room: int, number: int) -> bool:
        """Whether this group is the one that a room had no place for: rooms before it were closed by an earlier group."""
        before = self.packing.places[number - 1] if number else -1
        return room >= before if number else True

    def _why_not(self, room: int, group: PieceGroup) -> str:
        device = self.problem.devices[room]
        needs = convert_bytes(group.size)
        kept = ""
        if room == self.packing.main and self.packing.reserve:
            kept = f", {convert_bytes(self.packing.reserve)} kept free for offloaded layers"
        return f"needs {needs}, {device} has {convert_bytes(self.free[room])} left{kept}"


def _explain(plan: DeviceMap, problem: _Problem, packing: Packing, placed: Iterable[tuple[str, Device | None, int]]) -> None:
    """Fill in sizes and reasons: those of an entry are the sum of, and the first of, those of the layers in it."""
    free = {}
    for number, room in enumerate(problem.rooms):
        if room.capacity is not None:
            kept = packing.reserve if number == packing.main else 0
            free[number] = max(0, room.capacity - plan.held.get(problem.devices[number], 0) - kept)
    reasons = _Reasons(problem, packing, free)
    sizes = {piece.name: size for group in problem.groups for piece, size in zip(group.pieces, group.adds, strict=True)}
    places = DeviceLookup(plan)
    for name, _, number in placed:
        entry = places.entry(name)
        if entry is None:
            continue
        plan.sizes[entry] = plan.sizes.get(entry, 0) + sizes.get(name, 0)
        if number >= 0 and entry not in plan.reasons:
            plan.reasons[entry] = reasons.of(number, name)
        elif number < 0 and entry == name:
            plan.reasons[entry] = "has no tensors"


# --- what is said ------------------------------------------------------------------------------------------------------------


def _explain_no_room(trouble: NoPacking, problem: _Problem) -> str:
    limits = ", ".join(f"{device}: {size} bytes" for device, size in problem.budget.items())
    if trouble.main is None:
        return (
            f"The model does not fit into max_memory ({limits}): {trouble.missing} bytes have no place. "
            f"Raise one of the limits by that much, or allow more on disk."
        )
    pieces = [piece for group in problem.groups for piece in group.pieces]
    largest = max(pieces, key=problem.layer)
    device = problem.devices[trouble.main]
    staying = sum(item.stays for item in problem.items)
    needs = [f"{problem.layer(largest)} bytes to run"]
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
    """A device that computes and gets nothing, while later ones do, is worth a line."""
    used = set(packing.places)
    last = max(used, default=-1)
    unused = [number for number, room in enumerate(problem.rooms) if room.kind == "computes" and number < last and number not in used]
    unused = [number for number in unused if number != packing.main]
    for number in unused:
        device, first = problem.devices[number], problem.groups[0]
        beside = " beside what running offloaded layers needs" if first.size <= problem.rooms[number].cap else ""
        get_logger(__name__).warning(
            f"Device {device} is not used: its {problem.rooms[number].capacity} bytes are too few for {first.name or 'the model'} "
            f"({first.size} bytes){beside}. Give it more in max_memory, or leave it out."
        )


STRATEGIES: Final = ("auto", "balanced", "balanced_low_0", "sequential")


def plan_device_map(
    model: torch.nn.Module,
    how: Any,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    dtype: Any = None,
    *,
    offload_buffers: bool = False,
) -> DeviceMap:
    """The device map of a model, found in one of the `STRATEGIES`. Classes that the model itself says stay whole do so, unless others are
    named.

    >>> plan_device_map(torch.nn.Linear(2, 2), "auto", {"cpu": "1GB"})
    {'': 'cpu'}
    >>> plan_device_map(torch.nn.Linear(2, 2), "somehow")
    Traceback (most recent call last):
    slipstream.errors.ConfigError: device_map='somehow' is no way to find one. Write one of 'auto', 'balanced', ...
    """
    if how not in STRATEGIES:
        raise ConfigError(f"device_map={how!r} is no way to find one. Write one of {', '.join(map(repr, STRATEGIES))}, or a dict.")
    no_split = None if no_split_module_classes is None else parse_class_names(no_split_module_classes)
    if how != "sequential":
        whole = parse_class_names(getattr(model, "_no_split_modules", None)) if no_split is None else no_split
        max_memory = get_balanced_memory(model, max_memory, sorted(whole), dtype, low_zero=how == "balanced_low_0")
    return infer_auto_device_map(model, max_memory, no_split, dtype, offload_buffers=offload_buffers)
