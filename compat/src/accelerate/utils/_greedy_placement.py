"""The order in which Accelerate fills devices: `infer_auto_device_map` and `get_balanced_memory`.

Modules are taken in the order of the model, and each goes to the current device or, if there is no room, is divided or goes to the next
one; a device is never returned to. The first accelerator and the host keep room for the largest layer that is still to come, because it
would pass through them. Programs compare such maps with maps that they have written down, so the drop-in places as Accelerate does, and not
with the planner of `slipstream`, which finds better maps.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from slipstream.big_models.device_map.plan import get_max_memory as core_max_memory, parse_bytes
from slipstream.big_models.device_map.sizes import compute_module_sizes, find_tied_parameters, get_module_leaves, named_module_tensors
from slipstream.big_models.device_map.validation import find_entry
from slipstream.devices.memory import convert_bytes

__all__ = [
    "clean_device_map", "fallback_allocate", "get_balanced_memory", "get_max_layer_size", "get_module_size_with_ties",
    "infer_auto_device_map",
]

_logger = logging.getLogger("accelerate.utils.modeling")

_Modules = list[tuple[str, Any]]
"""Modules, and tensors that a divided module holds itself, by name."""


def infer_auto_device_map(
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: Any = None,
    special_dtypes: dict[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Return a device for every module, filling the devices of `max_memory` one after the other; what is left goes to the disk.

    `fallback_allocation`: if nothing fits on a device in the order of the model, some later module that fits is put there. `verbose` prints
    each decision. With `clean_result` modules whose parts are all on one device become one entry.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"infer_auto_device_map got a {type(model).__name__}; give it a torch.nn.Module.")
    whole = _class_names(no_split_module_classes)
    placement = _GreedyPlacement(model, max_memory, whole, dtype, special_dtypes, fallback_allocation, verbose)
    placement.run()
    placement.warn_unused()
    if not offload_buffers:
        placement.warn_buffers()
    found = OrderedDict(placement.placed)
    if clean_result:
        clean_device_map(found)
    placement.add_buffers(found)
    return found


class _GreedyPlacement:
    """One run over the modules of a model."""

    def __init__(
        self,
        model: nn.Module,
        max_memory: Mapping[Any, Any] | None,
        whole: list[str],
        dtype: Any,
        special_dtypes: Mapping[str, Any] | None,
        fallback: bool,
        verbose: bool,
    ) -> None:
        self._budget: dict[Any, int] = core_max_memory(max_memory)  # type: ignore[assignment]
        self._devices: list[Any] = [*self._budget]
        if "disk" not in self._budget:
            self._devices.append("disk")
        accelerators = [device for device in self._devices if device not in ("cpu", "disk")]
        self._keeps_room = {"mps"} if "mps" in accelerators else {*accelerators[:1], "cpu"}
        self._whole, self._fallback = whole, fallback
        self._report = print if verbose else (lambda *_: None)
        self._sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
        self._buffer_sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True)
        self._ties = find_tied_parameters(model)
        self._waiting = _parts("", model)
        self._current = 0
        self._used = dict.fromkeys(self._devices, 0)
        self._reserved: dict[Any, int] = {}
        """What was kept free on a device when it was left."""
        self._divided: dict[str, nn.Module] = {}
        self.placed: dict[str, Any] = {}

    @property
    def _device(self) -> Any:
        return self._devices[self._current]

    def run(self) -> None:
        """Place everything."""
        while self._waiting:
            name, module = self._waiting.pop(0)
            self._place_next(name, module)

    def _place_next(self, name: str, module: Any) -> None:
        partners = _tied_elsewhere(name, self._ties, self._waiting)
        room = self._room()
        size = self._sizes[name]
        if room is not None and size > room:
            if not self._divide(name, module):
                self._waiting.insert(0, (name, module))
                self._next_device()
            return
        if partners:
            size, names, modules = get_module_size_with_ties(partners, size, self._sizes, self._waiting)
            if room is not None and size > room:
                if not self._divide_partner(name, module, names, modules):
                    self._waiting.insert(0, (name, module))
                    self._next_device()
                return
            self._put(names, 0)
            self._waiting = [part for part in self._waiting if part[0] not in names]
        self._put([name], size)

    def _put(self, names: Iterable[str], size: int) -> None:
        for name in names:
            self._report(f"{name} -> {self._device}")
            self.placed[name] = self._device
        self._used[self._device] += size

    def _room(self) -> int | None:
        """Return the free bytes of the current device, less the largest layer to come; None where there is no limit."""
        if self._device not in self._budget or self._device == "disk":
            return None
        free = self._budget[self._device] - self._used[self._device]
        if self._device in self._keeps_room:
            self._reserved[self._device] = get_max_layer_size(self._waiting, self._sizes, self._whole)[0]
            free -= self._reserved[self._device]
        return free

    def _divide(self, name: str, module: Any) -> bool:
        """Put the parts of a module in its place; return False if it has none, or must stay whole."""
        if not _is_divided(module, self._whole):
            return False
        self._report(f"{name} is too large for {self._device} and is divided")
        self._waiting = self._parts_of(name, module) + self._waiting
        return True

    def _parts_of(self, name: str, module: nn.Module) -> _Modules:
        """Return parameters and children of a module that is divided; its buffers are placed at the end, beside them."""
        self._divided[name] = module
        own = {f"{name}.{buffer}" for buffer in module._buffers}
        return [part for part in _parts(name, module) if part[0] not in own]

    def add_buffers(self, device_map: dict[str, Any]) -> None:
        """Give the saved buffers that a divided module holds itself the device of its last part.

        Accelerate leaves them out of the map, and then refuses the map for it. They take no room here, so that the rest of the map is the
        same.
        """
        for name, module in self._divided.items():
            device = next(device for part, device in reversed(self.placed.items()) if part.startswith(f"{name}."))
            for buffer in module._buffers.keys() - module._non_persistent_buffers_set:
                if find_entry(device_map, f"{name}.{buffer}") is None:
                    device_map[f"{name}.{buffer}"] = device

    def _divide_partner(self, name: str, module: Any, names: Sequence[str], modules: Sequence[Any]) -> bool:
        """Divide one of the modules with tied weights, so that less of it must go together."""
        for partner_name, partner in zip(names, modules, strict=True):
            if _is_divided(partner, self._whole):
                self._report(f"{partner_name}, which shares weights with {name}, is too large for {self._device} and is divided")
                index = [part for part, _ in self._waiting].index(partner_name)
                before, after = self._waiting[:index], self._waiting[index + 1 :]
                self._waiting = [(name, module), *before, *self._parts_of(partner_name, partner), *after]
                return True
        return False

    def _next_device(self) -> None:
        device = self._device
        if self._fallback and device in self._keeps_room and not self._used[device] and self._put_fallback():
            return
        self._report(f"{device} is full with {self._used[device]} bytes")
        self._current += 1

    def _put_fallback(self) -> bool:
        """Put some module that fits on the current device, which is empty."""
        room = self._room()
        name, module, rest = fallback_allocate(self._waiting, self._sizes, room or 0, self._whole, self._ties)
        if name is None:
            return False
        self._waiting = [(name, module), *rest]
        return True

    def warn_unused(self) -> None:
        """Log which devices hold nothing although something is offloaded."""
        if self._fallback or self._device != "disk":
            return
        empty = {device: self._budget[device] for device in self._keeps_room if device in self._budget and not self._used[device]}
        if empty and any(device == "disk" for device in self.placed.values()):
            listed = ", ".join(f"{device} ({convert_bytes(size)})" for device, size in empty.items())
            _logger.warning(
                f"Nothing is on {listed}: insufficient memory for the next module and the largest layer after it. Raise max_memory "
                "there, or pass fallback_allocation=True to put some later module on it."
            )

    def warn_buffers(self) -> None:
        """Warn if the buffers of offloaded modules, which stay in memory, fit on no accelerator."""
        offloaded = [name for name, device in self.placed.items() if device in ("cpu", "disk")]
        needed = sum(self._buffer_sizes.get(name, 0) for name in offloaded)
        room = {device: self._free_at_end(device) for device in self._budget if device not in ("cpu", "disk")}
        if needed and room and needed > max(room.values()):
            warnings.warn(
                f"The buffers of offloaded modules take {convert_bytes(needed)}, and no device has that much left "
                f"({', '.join(f'{device}: {convert_bytes(max(0, size))}' for device, size in room.items())}). Pass offload_buffers=True, "
                "so that they are loaded with their modules, or raise max_memory.",
                stacklevel=3,
            )

    def _free_at_end(self, device: Any) -> int:
        free = self._budget[device] - self._used[device]
        return free - self._reserved.get(device, 0) if device in self._keeps_room else free


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Merge the entries below a module into one where they have the same device; the map is changed and returned.

    >>> clean_device_map({"a.x": 0, "a.y": 0, "b": 1})
    {'b': 1, 'a': 0}
    """
    prefix = f"{module_name}." if module_name else ""
    below = [name for name in device_map if name.startswith(prefix)]
    if len(below) > 1 and len({str(device_map[name]) for name in below}) == 1:
        device = device_map[below[0]]
        for name in below:
            del device_map[name]
        device_map[module_name] = device
        below = []
    for child in dict.fromkeys(name.removeprefix(prefix).partition(".")[0] for name in below):
        if child and f"{prefix}{child}" not in below:
            clean_device_map(device_map, f"{prefix}{child}")
    return device_map


def _parts(name: str, module: nn.Module) -> _Modules:
    """Return what a module consists of: its own parameters, its children, and its own buffers."""
    prefix = f"{name}." if name else ""
    own = [*module.named_parameters(recurse=False), *module.named_children(), *module.named_buffers(recurse=False)]
    return [(f"{prefix}{part}", value) for part, value in own]


def _is_divided(module: Any, whole: Iterable[str]) -> bool:
    return isinstance(module, nn.Module) and bool(module._modules) and type(module).__name__ not in whole


def _tied_elsewhere(name: str, ties: Iterable[Sequence[str]], waiting: _Modules) -> list[str]:
    """Return the names, in modules that wait, of weights that the module `name` holds too."""
    found: list[str] = []
    for group in ties:
        outside = [one for one in group if not _is_in(one, name) and any(_is_in(one, part) for part, _ in waiting)]
        if outside and any(_is_in(one, name) for one in group):
            found += outside
    return found


def _is_in(tensor: str, module: str) -> bool:
    return f"{tensor}.".startswith(f"{module}.")


def _class_names(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def get_max_layer_size(
    modules: Iterable[tuple[str, Any]], module_sizes: Mapping[str, int], no_split_module_classes: Iterable[str] | None
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer among modules and below them, and the names of the layers of that size.

    A layer is a module without children or of a class that stays whole, or a tensor that a divided module holds. Buffers of a divided
    module do not count.
    """
    largest, names = 0, list[str]()
    waiting, whole = list(modules), _class_names(no_split_module_classes)
    while waiting:
        name, module = waiting.pop(0)
        if _is_divided(module, whole):
            waiting = [part for part in _parts(name, module) if part[0] not in {f"{name}.{own}" for own in module._buffers}] + waiting
            continue
        size = module_sizes[name]
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def get_module_size_with_ties(
    tied_params: Iterable[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: Sequence[tuple[str, Any]]
) -> tuple[int, list[str], list[Any]]:
    """Return the bytes of a module with those that hold its tied weights (counted once), and names and modules of these."""
    found: dict[str, Any] = {}
    size = module_size
    for parameter in tied_params:
        held = next(((name, module) for name, module in modules_to_treat if _is_in(parameter, name)), None)
        if held is None:
            raise ValueError(f"tied_params has {parameter!r}, which is in none of the modules {[name for name, _ in modules_to_treat]}.")
        if held[0] not in found:
            found[held[0]] = held[1]
            size += module_sizes[held[0]]
        size -= module_sizes.get(parameter, 0)
    return size, list(found), list(found.values())


def fallback_allocate(
    modules: _Modules,
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: list[str] | None = None,
    tied_parameters: list[list[str]] | None = None,
) -> tuple[str | None, Any, _Modules]:
    """Return the first module that fits into `size_limit` bytes, and the modules that remain; without one (None, None, the modules).

    A module that does not fit is divided, and its parts are tried before the next one. Modules that share weights with others count with
    those, and the others remain: they fit beside it.
    """
    limit = size_limit if isinstance(size_limit, int) else parse_bytes(size_limit, "size_limit")
    whole = _class_names(no_split_module_classes)

    def search(before: _Modules, waiting: _Modules, after: _Modules) -> tuple[str, Any, _Modules] | None:
        for number, (name, module) in enumerate(waiting):
            ahead, behind = before + waiting[:number], waiting[number + 1 :] + after
            partners = _tied_elsewhere(name, tied_parameters or [], ahead + behind)
            if get_module_size_with_ties(partners, module_sizes[name], module_sizes, ahead + behind)[0] <= limit:
                return name, module, ahead + behind
            if _is_divided(module, whole) and (found := search(ahead, _parts(name, module), behind)) is not None:
                return found
        return None

    return search([], list(modules), []) or (None, None, modules)


def get_balanced_memory(
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: Any = None,
    special_dtypes: dict[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return budgets with which a model is spread evenly over the accelerators; with `low_zero` the first gets only what is left over.

    Each accelerator but the last gets an equal share, and beside it room for the largest module that stays whole, or one of average size:
    shares do not end at the borders of modules.
    """
    budget: dict[Any, int] = core_max_memory(max_memory)  # type: ignore[assignment]
    devices = [device for device, size in budget.items() if device not in ("cpu", "disk", "mps") and size > 0]
    if len(devices) < 2:
        return budget
    if len(devices) == 2 and low_zero and devices[0] == 0:
        _logger.warning("balanced_low_0 with two devices puts everything on the second one, where it fits: the first gets the rest.")
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    share = sizes[""] // (len(devices) - 1 if low_zero else len(devices))
    share += int(1.25 * max(_largest_of_classes(model, sizes, _class_names(no_split_module_classes)), _mean_leaf(model, sizes)))
    for device in devices[:-1]:
        budget[device] = min(budget[device], 0 if low_zero and device == 0 else share)
    if low_zero:
        others = sum(size for device, size in budget.items() if device in devices and device != 0)
        budget[0] = min(core_max_memory(max_memory)[0], max(0, sizes[""] - others))
    return budget


def _largest_of_classes(model: nn.Module, sizes: Mapping[str, int], whole: list[str]) -> int:
    """Return the bytes of the largest among the first modules of each of some classes, in the order of their tensors; 0 without one."""
    modules, first = dict(model.named_modules()), dict[str, int]()
    for tensor, _ in named_module_tensors(model, recurse=True):
        parts = tensor.split(".")[:-1]
        for name in (".".join(parts[: number + 1]) for number in range(len(parts))):
            kind = type(modules.get(name)).__name__
            if kind in whole:
                first.setdefault(kind, sizes[name])
    return max(first.values(), default=0)


def _mean_leaf(model: nn.Module, sizes: Mapping[str, int]) -> int:
    """Return the average bytes of modules that hold tensors and have no modules with tensors below."""
    tensors = {name for name, _ in named_module_tensors(model, recurse=True)}
    leaves = get_module_leaves({name: size for name, size in sizes.items() if name not in tensors})
    return int(sum(sizes[name] for name in leaves) / max(1, len(leaves)))
