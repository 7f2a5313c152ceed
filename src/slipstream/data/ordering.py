"""The order of a loader's passes, and how a saved place in one is found again.

For samplers of torch the order is a function of (seed, epoch): there is nothing to keep. For one of the user's own, this keeps

* what the sampler held when the pass began (`samplers.py`): put back, it draws the same order again, and what comes before the place is
  drawn and dropped (positions alone: no data is read);
* a digest of the order up to the place: an order that is another one than in the saved run is noticed;
* where the sampler has a `state_dict`, what that gives, and the positions that were drawn ahead: for a sampler that watches the
  training, whose order cannot be drawn again. It hands these out and goes on from its own state, which is said.

An order that is another one in spite of all this is told, never handed out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import numpy
import torch

from slipstream.data.clock import Pass
from slipstream.data.order import order_of
from slipstream.data.plan import Order
from slipstream.data.randomness import OwnRandom
from slipstream.data.samplers import SamplerKeeper, is_certain
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["Ordering", "Record"]


class Ordering:
    """The orders of one loader."""

    def __init__(self, units: Any, dataset: Any, ahead: int) -> None:
        """`units` is the sampler, or the batch sampler of the user's own; `ahead` how many blocks it may be drawn ahead of the script."""
        self.units = units
        self.keeper = None if is_certain(units) else SamplerKeeper(units, dataset)
        self._ahead = ahead

    def open(
        self, turn: Pass | None, *, seed: int, epoch: int, block: int, start: int = 0, saved: Any = None
    ) -> tuple[Order | Iterator[Any], Sequence[Any] | None]:
        """The order of a pass; with a head (its first positions), it stands at `start` already. `saved` is a place that `state` told."""
        keeper = self.keeper
        if keeper is None or turn is None:
            return order_of(self.units, seed=seed, epoch=epoch, block=block), None
        if turn.begin is not None:
            self._put_back(turn.begin)
        turn.begin = keeper.snapshot()
        found = saved if saved is not None and start and "digest" in saved else None
        ahead = [] if found is None else found.get("next", [])
        order, record = self._begun(turn, seed, epoch, block, start + len(ahead))
        if found is None:
            return order, None
        if not isinstance(order, Iterator):
            if record.digest_at(start) != found["digest"]:
                self._tell()
            elif not self._holds(found["now"]):
                keeper.restore(found["now"])
            return order, None
        head = _drop(order, start, block)
        following = list(islice(order, len(ahead) + found.get("ended", False)))
        same = record.digest_at(start) == found["digest"] and list(map(_plain, following)) == ahead
        if same and not keeper.stateful:
            keeper.restore(found["now"])  # what changed it from outside, as the training
        elif keeper.stateful and not (same and self._holds(found["now"])):
            return self._from_its_state(turn, found, seed, epoch, block, start), found["head"]
        if same:
            return chain(following, order), head
        self._tell()
        self._put_back(turn.begin)
        return self._begun(turn, seed, epoch, block)[0], None

    def _begun(self, turn: Pass, seed: int, epoch: int, block: int, stop: int = 0) -> tuple[Order | Iterator[Any], Record]:
        assert self.keeper is not None
        turn.order = record = Record(self._ahead)
        return order_of(self.units, seed=seed, epoch=epoch, block=block, record=record, stop=stop), record

    def _holds(self, now: Any) -> bool:
        """Whether a sampler that says itself what its state is holds what it held in the saved run."""
        assert self.keeper is not None
        return self.keeper.stateful and _same(self.keeper.snapshot()[0]["state"], now[0]["state"])

    def _from_its_state(self, turn: Pass, saved: Any, seed: int, epoch: int, block: int, start: int) -> Iterator[Any]:
        """What was drawn ahead of a place, and then what the sampler gives from its own state on."""
        assert self.keeper is not None
        units, ahead = self.units, list(saved["next"])
        get_logger(__name__).warning(
            f"the order of {type(units).__name__} cannot be drawn again as it was before the position that was loaded; it goes on from "
            "what its state_dict() gave there, and is right if that says how far it is"
        )
        self.keeper.restore(saved["now"])
        turn.order = record = Record(self._ahead, position=start, digest=saved["digest"], head=saved["head"])
        record.note(ahead, saved["ended"])
        if saved["ended"]:
            return iter(ahead)
        position = start + len(ahead)
        order = order_of(units, seed=seed, epoch=epoch, block=block, record=record, begun=position % block)
        rest: Iterator[Any] = order if isinstance(order, Iterator) else iter(order.take(0, len(order)))
        return chain(ahead, islice(rest, max(0, len(units) - position)) if hasattr(units, "__len__") else rest)

    def _tell(self) -> None:
        name = type(self.units).__name__
        get_logger(__name__).warning(
            f"the order of {name} is not that of the saved run: what it gives before the position that was loaded is something else, so in "
            f"this pass some samples may come twice and others never. It keeps something that could not be saved: give {name} "
            "state_dict() and load_state_dict(), keep its random generator in an attribute, or draw from (seed, epoch) with set_epoch()."
        )

    # -- what is saved --------------------------------------------------------------------------------------------

    def state(self, turn: Pass | None, position: int) -> dict[str, Any] | None:
        """What a place needs besides its numbers: what the sampler holds now, and of a pass, what it held when that began."""
        if self.keeper is None:
            return None
        now = self.keeper.snapshot()
        if turn is None or turn.begin is None:
            return {"now": self.keeper.told(now)}
        found = {"begin": self.keeper.told(turn.begin, now), "now": self.keeper.told(now, turn.begin)}
        return {**found, **turn.order.at(position)} if turn.order is not None and position else found

    def check(self, saved: Any) -> None:
        """Raises unless this is what `state` gives for such a sampler; changes nothing."""
        if saved is None:
            return
        if self.keeper is None or not isinstance(saved, dict) or not _fits(saved):
            kind = type(self.units).__name__
            raise ConfigError(
                f"the order of another sampler was saved than the {kind} that the loader has now: prepare it with the same one"
                if self.keeper is None
                else f"the saved order of {kind} cannot be read: {str(saved)[:120]}"
            )
        for name in ("begin", "now"):
            if name in saved:
                self.keeper.check(saved[name])

    def restore(self, saved: Any, *, over: bool) -> None:
        """Puts the sampler where it stood: at the beginning of the pass, or, if that is over, where it was left."""
        if saved is None or self.keeper is None:
            return
        if "begin" in saved and not over:
            self._put_back(saved["begin"])
        elif "now" in saved:
            self._put_back(saved["now"])

    def _put_back(self, snapshot: Any) -> None:
        """The sampler as it was between two passes.

        Where its own state is a place at the end of the pass before, it gives nothing once, and begins anew after that. If it gives
        something, it stood at a beginning already, and is put back again.
        """
        keeper = self.keeper
        assert keeper is not None
        keeper.restore(snapshot)
        if keeper.stateful:
            with OwnRandom(0):
                first = next(iter(self.units), _NOTHING)
            if first is not _NOTHING:
                keeper.restore(snapshot)


_NOTHING = object()


def _fits(saved: dict[str, Any]) -> bool:
    if "now" not in saved or set(saved) - {"begin", "now", "digest", "head", "next", "ended"}:
        return False
    digest = saved.get("digest", "0")
    if not isinstance(digest, str) or not 1 <= len(digest) <= 16 or set(digest) - set("0123456789abcdef"):
        return False
    drawn = {"head", "next", "ended"} & set(saved)
    lists = all(isinstance(saved.get(name), list) for name in ("head", "next"))
    return not drawn or ("digest" in saved and lists and isinstance(saved.get("ended"), bool))


# -- while an order is drawn ------------------------------------------------------------------------------------------


class _Digest:
    """Of a sequence of positions, however it is cut into blocks; it goes on from its text. (A polynomial in 64 bits.)"""

    def __init__(self, so_far: str = "0") -> None:
        self._value = int(so_far, 16)

    def add(self, items: Sequence[Any]) -> None:
        if len(items) > _FEW:
            for begin in range(0, len(items), _LONGEST):
                self._add_many(items[begin : begin + _LONGEST])
            return
        value = self._value
        for item in items:
            value = (value * _BASE + (item + 1 if type(item) is int else _number(item))) & _ALL
        self._value = value

    def _add_many(self, items: Sequence[Any]) -> None:
        """The same for many at once."""
        numbers = numpy.array([item + 1 & _ALL if type(item) is int else _number(item) for item in items], numpy.uint64)
        powers = numpy.cumprod(numpy.full(len(numbers), _BASE, numpy.uint64))
        own = int((numbers[::-1] * numpy.concatenate([_ONE, powers[:-1]])).sum(dtype=numpy.uint64))
        self._value = (int(powers[-1]) * self._value + own) & _ALL

    def text(self) -> str:
        return f"{self._value:016x}"


_BASE, _ALL = 0x9E3779B97F4A7C15, 0xFFFFFFFFFFFFFFFF
_ONE = numpy.ones(1, numpy.uint64)
_FEW, _LONGEST = 500, 1_000_000


def _number(item: Any) -> int:
    return int.from_bytes(blake2b(repr(_plain(item)).encode(), digest_size=8).digest(), "little")


def _drop(order: Iterator[Any], start: int, block: int) -> list[Any]:
    """Draws what comes before a place; the first block of it."""
    head = list(islice(order, min(start, block)))
    for _ in islice(order, start - len(head)):
        pass
    return head


class Record:
    """What was drawn of an order: as much as is needed to find a place in it again."""

    def __init__(self, ahead: int, *, position: int = 0, digest: str = "0", head: Sequence[Any] = ()) -> None:
        self._keep = ahead
        self._position = position
        self._digest = _Digest(digest)
        self._head: list[Any] | None = list(head) if position else None
        self._blocks: dict[int, list[Any]] = {}
        """The blocks that were drawn last, by where they begin."""
        self._digests: dict[int, str] = {position: digest}
        """Of what comes before, by where a block begins or ends."""
        self._whole: Sequence[Any] | None = None
        self._ended = False

    def lay_out(self, values: Sequence[Any]) -> None:
        """The whole order is there."""
        self._whole = values

    def note(self, items: list[Any], ended: bool) -> None:
        """A block was drawn; `ended`: and there is nothing after it."""
        self._ended = ended
        if not items:
            return
        if self._head is None:
            self._head = [_plain(item) for item in items]
        self._blocks[self._position] = items
        self._position += len(items)
        self._digest.add(items)
        self._digests[self._position] = self._digest.text()
        for kept in (self._blocks, self._digests):
            if len(kept) > self._keep:
                del kept[next(iter(kept))]

    def digest_at(self, position: int) -> str | None:
        """Of what comes before a place; None where that is too long ago."""
        digest = _Digest()
        if self._whole is not None:
            digest.add(self._whole[:position])
            return digest.text()
        begin = max((one for one in self._digests if one <= position), default=None)
        if begin is None:
            return None
        digest = _Digest(self._digests[begin])
        digest.add(self._blocks.get(begin, [])[: position - begin])
        return digest.text()

    def at(self, position: int) -> dict[str, Any]:
        """What finds this place again."""
        digest = self.digest_at(position)
        if digest is None:
            return {}
        if self._whole is not None:
            return {"digest": digest}
        following = [_plain(item) for begin, items in self._blocks.items() for place, item in enumerate(items, begin) if place >= position]
        return {"digest": digest, "head": self._head or [], "next": following, "ended": self._ended}


def _same(one: Any, other: Any) -> bool:
    """Whether two states hold the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray) or isinstance(other, numpy.ndarray):
        return bool(numpy.array_equal(one, other))
    return bool(one == other)


def _plain(item: Any) -> Any:
    """A position, or a batch of positions, as plain data."""
    if isinstance(item, (torch.Tensor, numpy.ndarray, numpy.generic)):
        return item.tolist()
    return [_plain(one) for one in item] if isinstance(item, (list, tuple)) else item
