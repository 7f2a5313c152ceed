"""What a sampler of the user's own keeps from pass to pass, as plain data: so that a run that goes on draws what it would have drawn.

Samplers of torch draw from generators that are given to them, so their order is a function of (seed, epoch). One of the user's own may keep
a generator, a list that it shuffles again and again, a counter. Its state is what its `state_dict()` gives; without one, it is the
states of the generators among its attributes, and those numbers and lists of numbers that changed since the loader was prepared.

What it never does: write to a sampler before all of a saved state was found to fit.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy
import torch
from torch.utils.data import Sampler

from slipstream.data.generators import check_generator_state, generator_state, is_generator, set_generator_state
from slipstream.data.order import inner_samplers, standard_kind
from slipstream.errors import ConfigError

__all__ = ["SamplerKeeper", "is_certain"]

_CERTAIN = ("RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler")
_NUMBERS = (int, float, bool, str, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)
_MOST_NUMBERS = 20_000_000
_MOST_ITEMS = 200_000
"""Of lists that hold more than numbers, the longest that is looked through."""


def is_certain(sampler: Any) -> bool:
    """Whether the order of a sampler is a function of (seed, epoch) and of how it was made: those of torch are.

    >>> is_certain(torch.utils.data.RandomSampler(range(3))), is_certain([2, 0, 1])
    (True, False)
    """
    return standard_kind(sampler) in _CERTAIN


class SamplerKeeper:
    """Keeps the state of a sampler of the user's own and of those inside it."""

    def __init__(self, units: Any, dataset: Any) -> None:
        self.units = units
        self._dataset = dataset
        self.samplers = _all_samplers(units)
        self._initial = [None if _is_stateful(one) else self.prints(one) for one in self.samplers]

    @property
    def stateful(self) -> bool:
        """Whether the outermost one says itself what its state is."""
        return _is_stateful(self.units)

    def snapshot(self) -> list[dict[str, Any]]:
        """The state of each sampler, outermost first: all of it, as it may change in any way from here on."""
        return [self._snapshot(one) for one in self.samplers]

    def _snapshot(self, sampler: Any) -> dict[str, Any]:
        name = type(sampler).__qualname__
        if _is_stateful(sampler):
            return {"type": name, "state": copy.deepcopy(sampler.state_dict())}
        prints = self.prints(sampler)
        return {"type": name, "attributes": {key: _kept(vars(sampler)[key]) for key in prints}, "prints": prints}

    def told(self, snapshot: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """What is saved of a snapshot: attributes that are not as they were made, or not as they are in another snapshot."""
        found = []
        for place, one in enumerate(snapshot):
            saved = {key: value for key, value in one.items() if key != "prints"}
            if "attributes" in one:
                apart = [self._initial[place] or {}, *([other[place].get("prints", {})] if other is not None else [])]
                kept = {name for name, value in one["prints"].items() if value is None or any(value != each.get(name) for each in apart)}
                saved["attributes"] = {name: value for name, value in one["attributes"].items() if name in kept}
            found.append(saved)
        return found

    def prints(self, sampler: Any) -> dict[str, Any]:
        """What tells whether an attribute changed; None for generators, which always count as changed."""
        found: dict[str, Any] = {}
        for name, value in getattr(sampler, "__dict__", {}).items():
            if value is self._dataset or name == "generator" and (value is None or is_generator(value)):  # replaced while it is read
                continue
            if is_generator(value):
                found[name] = None
            elif (print_ := _print(value)) is not None:
                found[name] = print_
        return found

    def check(self, snapshot: Any) -> None:
        """Raises unless this is a state of samplers like these; changes nothing."""
        fits = isinstance(snapshot, list) and len(snapshot) == len(self.samplers)
        for one, saved in zip(self.samplers, snapshot if fits else [], strict=False):
            fits = fits and isinstance(saved, Mapping) and saved.get("type") == type(one).__qualname__
            fits = fits and ("state" in saved) == _is_stateful(one) and isinstance(saved.get("attributes", {}), Mapping)
        if not fits:
            here = ", ".join(type(one).__qualname__ for one in self.samplers)
            there = (
                [str(one.get("type")) if isinstance(one, Mapping) else str(one) for one in snapshot] if isinstance(snapshot, list) else []
            )
            raise ConfigError(
                f"the state of a loader was saved with other samplers ({', '.join(there)[:200] or type(snapshot).__name__}) than it has "
                f"now ({here}): prepare the loader with the same sampler"
            )
        for one, saved in zip(self.samplers, snapshot, strict=True):
            for name, value in saved.get("attributes", {}).items():
                _check_attribute(one, name, value)

    def restore(self, snapshot: Sequence[Mapping[str, Any]]) -> None:
        """Puts the state of each sampler back."""
        for one, saved in zip(self.samplers, snapshot, strict=True):
            if "state" in saved:
                one.load_state_dict(copy.deepcopy(saved["state"]))
            for name, value in saved.get("attributes", {}).items():
                _put_back(one, name, value)


_ABSENT = object()


def _all_samplers(units: Any) -> list[Any]:
    """A sampler of the user's own and those inside it, whatever the name of the attribute, as far as they are of the user's own."""
    found: list[Any] = []
    waiting = list(inner_samplers(units))
    while waiting:
        one = waiting.pop(0)
        if any(one is other for other in found) or len(found) > 20:
            continue
        if standard_kind(one) is None and (hasattr(one, "__dict__") or _is_stateful(one)):
            found.append(one)
        if not _is_stateful(one):  # which speaks for what is inside
            waiting += [value for value in getattr(one, "__dict__", {}).values() if isinstance(value, Sampler)]
    return found


def _is_stateful(sampler: Any) -> bool:
    return all(callable(getattr(sampler, name, None)) for name in ("state_dict", "load_state_dict"))


# -- attributes -------------------------------------------------------------------------------------------------------


def _print(value: Any) -> Any:
    """Something small that differs if the value does; None for what is not looked at."""
    if type(value) in _NUMBERS or isinstance(value, numpy.generic):
        return type(value).__name__, value.item() if isinstance(value, numpy.generic) else value
    if isinstance(value, (torch.Tensor, numpy.ndarray)) or type(value) in _CONTAINERS:
        numbers = _numbers(value)
        if numbers is not None:
            return type(value).__name__, numbers.shape, blake2b(numpy.ascontiguousarray(numbers).tobytes(), digest_size=16).digest()
        if type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS and _is_plain(value, 0):
            return type(value).__name__, blake2b(repr(value).encode(), digest_size=16).digest()
    return None


def _numbers(value: Any) -> numpy.ndarray[Any, Any] | None:
    """An array, or a flat list of numbers, as an array; None for anything else."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.numel() > _MOST_NUMBERS or value.is_meta or value.dtype == torch.bfloat16:
            return None
        return value.detach().cpu().numpy()
    if isinstance(value, (list, tuple, deque)):
        if not value or len(value) > _MOST_NUMBERS or type(value[0]) not in (int, float, bool) or {*map(type, value)} != {type(value[0])}:
            return None
        try:
            value = numpy.asarray(value)
        except OverflowError:
            return None
    if not isinstance(value, numpy.ndarray):
        return None
    return value if value.dtype.kind in "biuf" and value.size <= _MOST_NUMBERS else None


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) in _NUMBERS:
        return True
    if depth > 4 or type(value) not in _CONTAINERS or len(value) > _MOST_ITEMS:
        return False
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(one, depth + 1) for one in inside)


def _kept(value: Any) -> dict[str, Any]:
    """An attribute as plain data."""
    if is_generator(value):
        return {"generator": generator_state(value)}
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return {"kind": kind, "value": value.detach().clone()}
    numbers = _numbers(value)
    if numbers is not None and numbers.dtype.kind in "biuf" and numbers.dtype != numpy.uint64:
        return {"kind": kind, "dtype": str(numbers.dtype), "value": torch.from_numpy(numbers.copy())}
    return {"kind": kind, "value": copy.deepcopy(value.item() if isinstance(value, numpy.generic) else value)}


def _check_attribute(sampler: Any, name: Any, saved: Any) -> None:
    where = f"{type(sampler).__qualname__}.{name}"
    if not isinstance(name, str) or not isinstance(saved, Mapping) or not ("generator" in saved or {"kind", "value"} <= set(saved)):
        raise ConfigError(f"the saved state of the sampler attribute {where} cannot be read: {str(saved)[:80]}")
    present = getattr(sampler, "__dict__", {}).get(name, _ABSENT)
    if "generator" in saved:
        if not is_generator(present):
            raise ConfigError(f"a random generator {where} was saved, and the sampler has none of that name now")
        check_generator_state(present, saved["generator"])
    elif not isinstance(saved["kind"], str) or (present is not _ABSENT and is_generator(present)):
        raise ConfigError(f"the saved state of the sampler attribute {where} is a {saved['kind']}, and the attribute is another thing now")


def _put_back(sampler: Any, name: str, saved: Mapping[str, Any]) -> None:
    """In place where that can be: others may hold the same list."""
    present = vars(sampler).get(name, _ABSENT)
    if "generator" in saved:
        set_generator_state(present, saved["generator"])
        return
    value, kind = saved["value"], saved["kind"]
    if isinstance(value, torch.Tensor) and kind != "Tensor":
        value = value.numpy().copy() if kind == "ndarray" else value.tolist()
    if isinstance(present, list) and isinstance(value, list):
        present[:] = value
    elif isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and present.shape == value.shape:
        present.data.copy_(value)
    else:
        restored: Any = {"tuple": tuple, "deque": deque, "set": set}.get(kind, lambda one: one)(value)
        vars(sampler)[name] = copy.deepcopy(restored)
