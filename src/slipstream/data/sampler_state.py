"""Save and restore the order of a sampler of the user's own, so that a resumed run draws the rest of the same order.

The order of torch's samplers is a function of (seed, epoch) and needs no state. For any other sampler this saves its state at the start
of the pass (`state_dict()`, or its generators and the plain attributes that changed since the loader was prepared), a digest of the order
up to the position, and the positions that were drawn ahead. A resumed pass draws the order again and compares the digest; no data is read
for it. An order that differs from the saved run is a warning. A saved state is checked completely before anything is set.

Attributes are saved because samplers shuffle lists in place: of ten public files that contain `shuffle(self.batches)`, two are samplers
that do so in `__iter__`, without a `state_dict`. Without their lists a resumed run could not read the rest of the same order. Saving a
list of a million numbers takes 45 ms at the start of a pass.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import numpy
import torch
from torch.utils.data import Sampler

from slipstream.data.order import draw_order, list_samplers, torch_sampler_kind
from slipstream.data.plan import SampleOrder
from slipstream.data.random_state import RandomStateScope, check_generator_state, generator_state, is_generator, set_generator_state
from slipstream.distributed.gradient_state import LoaderPass
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["OrderRecord", "SamplerOrder", "SamplerState", "has_seeded_order"]


_SEEDED_SAMPLERS = ("RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler")
_SCALAR_TYPES = (int, float, bool, str, type(None))
_CONTAINER_TYPES = (list, tuple, dict, set, deque)
_MAX_NUMBERS = 20_000_000
_MAX_ITEMS = 200_000
"""Of lists that hold more than numbers, the longest that is looked through."""


def has_seeded_order(sampler: Any) -> bool:
    """Return whether the order of a sampler is a function of (seed, epoch) and of how it was made: those of torch are.

    >>> has_seeded_order(torch.utils.data.RandomSampler(range(3))), has_seeded_order([2, 0, 1])
    (True, False)
    """
    return torch_sampler_kind(sampler) in _SEEDED_SAMPLERS


class SamplerState:
    """The state of a user's own sampler and of the samplers inside it."""

    def __init__(self, units: Any, dataset: Any) -> None:
        self.units = units
        self._dataset = dataset
        self.samplers = _all_samplers(units)
        self._initial = self.snapshot()

    @property
    def stateful(self) -> bool:
        """Whether the outermost one says itself what its state is."""
        return _is_stateful(self.units)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the state of each sampler, outermost first: all of it, as it may change in any way from here on."""
        return [self._snapshot(sampler) for sampler in self.samplers]

    def _snapshot(self, sampler: Any) -> dict[str, Any]:
        name = type(sampler).__qualname__
        if _is_stateful(sampler):
            return {"type": name, "state": copy.deepcopy(sampler.state_dict())}
        generators = {name: {"generator": generator_state(value)} for name, value in self._attributes(sampler) if is_generator(value)}
        return {"type": name, "attributes": {**self.plain_attributes(sampler), **generators}}

    def plain_attributes(self, sampler: Any) -> dict[str, Any]:
        """Return the attributes that are numbers, text, arrays and containers of these, as plain data."""
        encoded = ((name, _encode_attribute(value)) for name, value in self._attributes(sampler))
        return {name: value for name, value in encoded if value is not None}

    def _attributes(self, sampler: Any) -> list[tuple[str, Any]]:
        """Return the attributes of a sampler, without the dataset and the generator that is replaced while it is read."""
        return [
            (name, value)
            for name, value in getattr(sampler, "__dict__", {}).items()
            if value is not self._dataset and not (name == "generator" and (value is None or is_generator(value)))
        ]

    def changes(self, snapshot: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Return what is saved of a snapshot: generators, and attributes that differ from the first snapshot or from another one."""
        found = []
        for index, entry in enumerate(snapshot):
            saved = dict(entry)
            if "attributes" in entry:
                others = [before[index].get("attributes", {}) for before in (self._initial, other) if before is not None]
                saved["attributes"] = {
                    name: value
                    for name, value in entry["attributes"].items()
                    if "generator" in value or not all(_states_equal(value, before.get(name)) for before in others)
                }
            found.append(saved)
        return found

    def check(self, snapshot: Any) -> None:
        """Raise unless this is a state of samplers like these; change nothing."""
        fits = isinstance(snapshot, list) and len(snapshot) == len(self.samplers)
        for sampler, saved in zip(self.samplers, snapshot if fits else [], strict=False):
            fits = fits and isinstance(saved, Mapping) and saved.get("type") == type(sampler).__qualname__
            fits = fits and ("state" in saved) == _is_stateful(sampler) and isinstance(saved.get("attributes", {}), Mapping)
        if not fits:
            here = ", ".join(type(sampler).__qualname__ for sampler in self.samplers)
            saved_types = snapshot if isinstance(snapshot, list) else []
            there = [str(saved.get("type")) if isinstance(saved, Mapping) else str(saved) for saved in saved_types]
            raise ConfigError(
                f"the state of a loader was saved with other samplers ({', '.join(there)[:200] or type(snapshot).__name__}) than it has "
                f"now ({here}): prepare the loader with the same sampler"
            )
        for sampler, saved in zip(self.samplers, snapshot, strict=True):
            for name, value in saved.get("attributes", {}).items():
                _check_attribute(sampler, name, value)

    def restore(self, snapshot: Sequence[Mapping[str, Any]]) -> None:
        """Restore the state of each sampler."""
        for sampler, saved in zip(self.samplers, snapshot, strict=True):
            if "state" in saved:
                sampler.load_state_dict(copy.deepcopy(saved["state"]))
            for name, value in saved.get("attributes", {}).items():
                _restore_attribute(sampler, name, value)


_ABSENT = object()


def _all_samplers(units: Any) -> list[Any]:
    """Return a sampler of the user's own and those inside it, whatever the name of the attribute, as far as they are of the user's own."""
    found: list[Any] = []
    waiting = list(list_samplers(units))
    while waiting:
        sampler = waiting.pop(0)
        if any(sampler is other for other in found) or len(found) > 20:
            continue
        if torch_sampler_kind(sampler) is None and (hasattr(sampler, "__dict__") or _is_stateful(sampler)):
            found.append(sampler)
        if not _is_stateful(sampler):  # whose state covers what is inside
            waiting += [value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Sampler)]
    return found


def _is_stateful(sampler: Any) -> bool:
    return all(callable(getattr(sampler, name, None)) for name in ("state_dict", "load_state_dict"))


# -- attributes -------------------------------------------------------------------------------------------------------


def _as_number_array(value: Any) -> numpy.ndarray[Any, Any] | None:
    """Return an array, or a flat list of numbers, as an array; None for anything else."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.numel() > _MAX_NUMBERS or value.is_meta or value.dtype == torch.bfloat16:
            return None
        return value.detach().cpu().numpy()
    if isinstance(value, (list, tuple, deque)):
        if not value or len(value) > _MAX_NUMBERS or type(value[0]) not in (int, float, bool) or {*map(type, value)} != {type(value[0])}:
            return None
        try:
            value = numpy.asarray(value)
        except OverflowError:
            return None
    if not isinstance(value, numpy.ndarray):
        return None
    return value if value.dtype.kind in "biuf" and value.dtype != numpy.uint64 and value.size <= _MAX_NUMBERS else None


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) in _SCALAR_TYPES:
        return True
    if depth > 4 or type(value) not in _CONTAINER_TYPES or len(value) > _MAX_ITEMS:
        return False
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(element, depth + 1) for element in inside)


def _encode_attribute(value: Any) -> dict[str, Any] | None:
    """Return an attribute as plain data; None for what is not saved."""
    kind, numbers = type(value).__name__, _as_number_array(value)
    if isinstance(value, torch.Tensor):
        return None if numbers is None else {"kind": kind, "value": value.detach().clone()}
    if numbers is not None:
        return {"kind": kind, "dtype": str(numbers.dtype), "value": torch.from_numpy(numbers.copy())}
    if isinstance(value, numpy.generic):
        value = value.item()
    return {"kind": kind, "value": copy.deepcopy(value)} if _is_plain(value, 0) else None


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


def _restore_attribute(sampler: Any, name: str, saved: Mapping[str, Any]) -> None:
    """Restore an attribute, in place where that can be: others may hold the same list."""
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
        restored: Any = {"tuple": tuple, "deque": deque, "set": set}.get(kind, lambda plain: plain)(value)
        vars(sampler)[name] = copy.deepcopy(restored)


class SamplerOrder:
    """The orders of one loader."""

    def __init__(self, units: Any, dataset: Any, ahead: int) -> None:
        """`units` is the sampler, or the batch sampler of the user's own; `ahead` how many blocks it may be drawn ahead of the script."""
        self.units = units
        self.sampler_state = None if has_seeded_order(units) else SamplerState(units, dataset)
        self._ahead = ahead

    def open(
        self, loader_pass: LoaderPass | None, *, seed: int, epoch: int, block: int, version: int, start: int = 0, saved: Any = None
    ) -> tuple[SampleOrder | Iterator[Any], Sequence[Any] | None]:
        """Return the order of a pass; with a head (its first positions), it stands at `start` already. `saved` is what `state` returned."""
        sampler_state = self.sampler_state
        if sampler_state is None or loader_pass is None:
            return draw_order(self.units, seed=seed, epoch=epoch, block=block, version=version), None
        if loader_pass.sampler_start is not None:
            self._put_back(loader_pass.sampler_start)
        loader_pass.sampler_start = sampler_state.snapshot()
        found = saved if saved is not None and start and "digest" in saved else None
        ahead = [] if found is None else found.get("next", [])
        order, record = self._begun(loader_pass, seed, epoch, block, start + len(ahead))
        if found is None:
            return order, None
        if not isinstance(order, Iterator):
            if record.digest_at(start) != found["digest"]:
                self._warn_of_other_order()
            elif not self._holds(found["now"]):
                sampler_state.restore(found["now"])
            return order, None
        head = _skip_items(order, start, block)
        following = list(islice(order, len(ahead) + found.get("ended", False)))
        same = record.digest_at(start) == found["digest"] and list(map(_plain_item, following)) == ahead
        if same and not sampler_state.stateful:
            sampler_state.restore(found["now"])  # what changed it from outside, as the training
        elif sampler_state.stateful and not (same and self._holds(found["now"])):
            return self._from_its_state(loader_pass, found, seed, epoch, block, start), found["head"]
        if same:
            return chain(following, order), head
        self._warn_of_other_order()
        self._put_back(loader_pass.sampler_start)
        return self._begun(loader_pass, seed, epoch, block)[0], None

    def _begun(
        self, loader_pass: LoaderPass, seed: int, epoch: int, block: int, stop: int = 0
    ) -> tuple[SampleOrder | Iterator[Any], OrderRecord]:
        assert self.sampler_state is not None
        loader_pass.order = record = OrderRecord(self._ahead)
        return draw_order(self.units, seed=seed, epoch=epoch, block=block, record=record, stop=stop), record

    def _holds(self, now: Any) -> bool:
        """Return whether a sampler with a `state_dict` holds what it held in the saved run."""
        assert self.sampler_state is not None
        return self.sampler_state.stateful and _states_equal(self.sampler_state.snapshot()[0]["state"], now[0]["state"])

    def _from_its_state(self, loader_pass: LoaderPass, saved: Any, seed: int, epoch: int, block: int, start: int) -> Iterator[Any]:
        """Yield what was drawn ahead of a position, and then what the sampler gives from its own state on."""
        assert self.sampler_state is not None
        units, ahead = self.units, list(saved["next"])
        get_logger(__name__).warning(
            f"the order of {type(units).__name__} cannot be drawn again as it was before the position that was loaded; it goes on from "
            "what its state_dict() gave there, and is right if that says how far it is"
        )
        self.sampler_state.restore(saved["now"])
        loader_pass.order = record = OrderRecord(self._ahead, position=start, digest=saved["digest"], head=saved["head"])
        record.note(ahead, saved["ended"])
        if saved["ended"]:
            return iter(ahead)
        position = start + len(ahead)
        order = draw_order(units, seed=seed, epoch=epoch, block=block, record=record, begun=position % block)
        rest = iter(order)
        return chain(ahead, islice(rest, max(0, len(units) - position)) if hasattr(units, "__len__") else rest)

    def _warn_of_other_order(self) -> None:
        name = type(self.units).__name__
        get_logger(__name__).warning(
            f"the order of {name} is not that of the saved run: what it gives before the position that was loaded is something else, so in "
            f"this pass some samples may come twice and others never. It keeps something that could not be saved: give {name} "
            "state_dict() and load_state_dict(), keep its random generator in an attribute, or draw from (seed, epoch) with set_epoch()."
        )

    # -- what is saved --------------------------------------------------------------------------------------------

    def state(self, loader_pass: LoaderPass | None, position: int) -> dict[str, Any] | None:
        """Return what a position needs besides numbers: what the sampler holds now, and of a pass, what it held when that began."""
        if self.sampler_state is None:
            return None
        now = self.sampler_state.snapshot()
        if loader_pass is None or loader_pass.sampler_start is None:
            return {"now": self.sampler_state.changes(now)}
        begun = loader_pass.sampler_start
        found = {"begin": self.sampler_state.changes(begun, now), "now": self.sampler_state.changes(now, begun)}
        return {**found, **loader_pass.order.at(position)} if loader_pass.order is not None and position else found

    def check(self, saved: Any) -> None:
        """Raise unless this is what `state` returns for such a sampler; change nothing."""
        if saved is None:
            return
        if self.sampler_state is None or not isinstance(saved, dict) or not _is_saved_order(saved):
            kind = type(self.units).__name__
            raise ConfigError(
                f"the order of another sampler was saved than the {kind} that the loader has now: prepare it with the same one"
                if self.sampler_state is None
                else f"the saved order of {kind} cannot be read: {str(saved)[:120]}"
            )
        for name in ("begin", "now"):
            if name in saved:
                self.sampler_state.check(saved[name])

    def restore(self, saved: Any, *, over: bool) -> None:
        """Restore the sampler: to the beginning of the pass, or, if that is over, to where it was left."""
        if saved is None or self.sampler_state is None:
            return
        if "begin" in saved and not over:
            self._put_back(saved["begin"])
        elif "now" in saved:
            self._put_back(saved["now"])

    def _put_back(self, snapshot: Any) -> None:
        """Restore the sampler as it was between two passes.

        Where its own state is a place at the end of the pass before, it gives nothing once, and begins anew after that. If it gives
        something, it stood at a beginning already, and is put back again.
        """
        sampler_state = self.sampler_state
        assert sampler_state is not None
        sampler_state.restore(snapshot)
        if sampler_state.stateful:
            with RandomStateScope(0):
                first = next(iter(self.units), _EXHAUSTED)
            if first is not _EXHAUSTED:
                sampler_state.restore(snapshot)


_EXHAUSTED = object()


def _is_saved_order(saved: dict[str, Any]) -> bool:
    if "now" not in saved or set(saved) - {"begin", "now", "digest", "head", "next", "ended"}:
        return False
    digest = saved.get("digest", "0")
    if not isinstance(digest, str) or not 1 <= len(digest) <= 16 or set(digest) - set("0123456789abcdef"):
        return False
    drawn = {"head", "next", "ended"} & set(saved)
    lists = all(isinstance(saved.get(name), list) for name in ("head", "next"))
    return not drawn or ("digest" in saved and lists and isinstance(saved.get("ended"), bool))


# -- while an order is drawn ------------------------------------------------------------------------------------------


class _OrderDigest:
    """Of a sequence of positions, however it is cut into blocks; it continues from its text. (A polynomial in 64 bits.)"""

    def __init__(self, so_far: str = "0") -> None:
        self._value = int(so_far, 16)

    def add(self, items: Sequence[Any]) -> None:
        for begin in range(0, len(items), _CHUNK_LENGTH):
            chunk = items[begin : begin + _CHUNK_LENGTH]
            numbers = numpy.array([item + 1 & _UINT64_MASK if type(item) is int else _hash_item(item) for item in chunk], numpy.uint64)
            powers = numpy.cumprod(numpy.full(len(numbers), _DIGEST_BASE, numpy.uint64))
            own = int((numbers[::-1] * numpy.concatenate([_UINT64_ONE, powers[:-1]])).sum(dtype=numpy.uint64))
            self._value = (int(powers[-1]) * self._value + own) & _UINT64_MASK

    def text(self) -> str:
        return f"{self._value:016x}"


_DIGEST_BASE, _UINT64_MASK = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF
_UINT64_ONE = numpy.ones(1, numpy.uint64)
_CHUNK_LENGTH = 1_000_000


def _hash_item(item: Any) -> int:
    return int.from_bytes(blake2b(repr(_plain_item(item)).encode(), digest_size=8).digest(), "little")


def _skip_items(order: Iterator[Any], start: int, block: int) -> list[Any]:
    """Draw what comes before a position, and return the first block of it."""
    head = list(islice(order, min(start, block)))
    for _ in islice(order, start - len(head)):
        pass
    return head


class OrderRecord:
    """What was drawn of an order: as much as is needed to find a position in it again."""

    def __init__(self, ahead: int, *, position: int = 0, digest: str = "0", head: Sequence[Any] = ()) -> None:
        self._keep = ahead
        self._position = position
        self._digest = _OrderDigest(digest)
        self._head: list[Any] | None = list(head) if position else None
        self._blocks: dict[int, list[Any]] = {}
        """The blocks that were drawn last, by where they begin."""
        self._digests: dict[int, str] = {position: digest}
        """Of what comes before, by where a block begins or ends."""
        self._whole: Sequence[Any] | None = None
        self._ended = False

    def lay_out(self, values: Sequence[Any]) -> None:
        """Record an order that is there as a whole."""
        self._whole = values

    def note(self, items: list[Any], ended: bool) -> None:
        """Record a block that was drawn; `ended`: there is nothing after it."""
        self._ended = ended
        if not items:
            return
        if self._head is None:
            self._head = [_plain_item(item) for item in items]
        self._blocks[self._position] = items
        self._position += len(items)
        self._digest.add(items)
        self._digests[self._position] = self._digest.text()
        for kept in (self._blocks, self._digests):
            if len(kept) > self._keep:
                del kept[next(iter(kept))]

    def digest_at(self, position: int) -> str | None:
        """Return the digest of what comes before a position; None where that is too long ago."""
        digest = _OrderDigest()
        if self._whole is not None:
            digest.add(self._whole[:position])
            return digest.text()
        begin = max((digest for digest in self._digests if digest <= position), default=None)
        if begin is None:
            return None
        digest = _OrderDigest(self._digests[begin])
        digest.add(self._blocks.get(begin, [])[: position - begin])
        return digest.text()

    def at(self, position: int) -> dict[str, Any]:
        """Return what finds this position again."""
        digest = self.digest_at(position)
        if digest is None:
            return {}
        if self._whole is not None:
            return {"digest": digest}
        following = [
            _plain_item(item) for begin, items in self._blocks.items() for place, item in enumerate(items, begin) if place >= position
        ]
        return {"digest": digest, "head": self._head or [], "next": following, "ended": self._ended}


def _states_equal(state: Any, other: Any) -> bool:
    """Return whether two states hold the same."""
    if isinstance(state, dict) and isinstance(other, dict):
        return state.keys() == other.keys() and all(_states_equal(value, other[key]) for key, value in state.items())
    if isinstance(state, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(state) == len(other) and all(map(_states_equal, state, other))
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, numpy.ndarray) or isinstance(other, numpy.ndarray):
        return bool(numpy.array_equal(state, other))
    return bool(state == other)


def _plain_item(item: Any) -> Any:
    """Return a position, or a batch of positions, as plain data."""
    if isinstance(item, (torch.Tensor, numpy.ndarray, numpy.generic)):
        return item.tolist()
    return [_plain_item(position) for position in item] if isinstance(item, (list, tuple)) else item
