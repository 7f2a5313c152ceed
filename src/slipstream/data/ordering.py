"""The order of a loader's passes, and how a saved place in one is found again.

For samplers of torch the order is a function of (seed, epoch): there is nothing to keep. For one of the user's own, this keeps

* what the sampler held when the pass began (`samplers.py`): put back, it draws the same order again, and what comes before the place is
  drawn and dropped (positions alone: no data is read);
* where the sampler has a `state_dict`, what that gave at the place itself: put back, nothing has to be drawn again;
* a digest of the order up to the place, and the next positions after it. Whichever way the place was found, it is compared with these:
  an order that is another one than in the saved run is told, never handed out in silence.
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

_NEXT = 8
"""How many positions after a place are kept to recognise it."""


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
        if turn.begin is None:
            turn.begin = keeper.snapshot()
        else:
            self._put_back(turn.begin)
        if saved is not None and start and "mark" in saved:
            found = self._at_mark(turn, saved, seed, epoch, block, start)
            if found is not None:
                return found, saved["head"]
            self._put_back(turn.begin)
        turn.order = record = Record(keeper, self._ahead)
        order = order_of(self.units, seed=seed, epoch=epoch, block=block, record=record)
        if saved is None or not start or "digest" not in saved:
            return order, None
        if isinstance(order, Iterator):
            return self._verified(order, start, saved["digest"]), None
        if record.digest_at(start) != saved["digest"]:
            self._tell()
        return order, None

    def _at_mark(self, turn: Pass, saved: Any, seed: int, epoch: int, block: int, start: int) -> Iterator[Any] | None:
        """The order from a place on, where the sampler says itself that it stands there; None if it does not go on as it did."""
        assert self.keeper is not None
        self.keeper.units.load_state_dict(saved["mark"])
        record = Record(self.keeper, self._ahead, position=start, digest=saved["digest"], head=saved["head"], mark=saved["mark"])
        order = order_of(self.units, seed=seed, epoch=epoch, block=block, record=record, begun=start % block)
        if not isinstance(order, Iterator):
            return None
        first = list(islice(order, len(saved["next"])))
        if list(map(_plain, first)) != saved["next"] or not first:
            return None
        turn.order = record
        return chain(first, order)

    def _verified(self, order: Iterator[Any], start: int, digest: str) -> Iterator[Any]:
        seen = _Digest()
        for _ in range(start):
            for item in islice(order, 1):
                seen.add([item])
                yield item
        if seen.text() != digest:
            self._tell()
        yield from order

    def _tell(self) -> None:
        name = type(self.units).__name__
        get_logger(__name__).warning(
            f"the order of {name} is not that of the saved run: what it gives before the position that was loaded is something else, so in "
            f"this pass some samples may come twice and others never. It keeps something that could not be saved: give {name} "
            "state_dict() and load_state_dict(), keep its random generator in an attribute, or draw from (seed, epoch) with set_epoch()."
        )

    # -- what is saved --------------------------------------------------------------------------------------------

    def state(self, turn: Pass | None, position: int, *, over: bool) -> dict[str, Any] | None:
        """What a place needs besides its numbers; `over`: the next pass is another one, so what the sampler holds now counts too."""
        if self.keeper is None:
            return None
        found: dict[str, Any] = {}
        if turn is not None and turn.begin is not None:
            found["begin"] = turn.begin
            if turn.order is not None and position:
                found.update(turn.order.at(position))
        if over or "begin" not in found:
            found["now"] = self.keeper.snapshot()
        return found

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
        if "mark" in saved and not self.keeper.stateful:
            raise ConfigError(f"the state of a sampler was saved, and the {type(self.units).__name__} here has no load_state_dict")

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
    if set(saved) - {"begin", "now", "digest", "mark", "head", "next"}:
        return False
    if "digest" in saved and not isinstance(saved["digest"], str):
        return False
    return "mark" not in saved or all(isinstance(saved.get(name), list) for name in ("head", "next"))


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


class Record:
    """What was drawn of an order: as much as is needed to find a place in it again."""

    def __init__(
        self, keeper: SamplerKeeper, ahead: int, *, position: int = 0, digest: str = "0", head: Sequence[Any] = (), mark: Any = None
    ) -> None:
        self._keeper = keeper
        self._keep = ahead
        self._position = position
        self._digest = _Digest(digest)
        self._head: list[Any] = list(head)
        self._has_head = bool(position)
        self._blocks: dict[int, list[Any]] = {}
        """The blocks that were drawn last, by where they begin."""
        self._marks: dict[int, tuple[str, Any]] = {position: (digest, mark)} if position else {}
        """Digest of what comes before, and state of the sampler, by where a block ends."""
        self._whole: Sequence[Any] | None = None

    def lay_out(self, values: Sequence[Any]) -> None:
        """The whole order is there."""
        self._whole = values

    def note(self, items: list[Any]) -> None:
        """A block was drawn."""
        if not items:
            return
        if not self._has_head:
            self._head, self._has_head = [_plain(item) for item in items], True
        self._blocks[self._position] = items
        self._position += len(items)
        self._digest.add(items)
        state = self._keeper.snapshot()[0]["state"] if self._keeper.stateful else None
        self._marks[self._position] = self._digest.text(), state
        for kept in (self._blocks, self._marks):
            if len(kept) > self._keep:
                del kept[next(iter(kept))]

    def digest_at(self, position: int) -> str | None:
        """Of an order that is laid out, or where a block ended."""
        if self._whole is not None:
            digest = _Digest()
            digest.add(self._whole[:position])
            return digest.text()
        return self._marks[position][0] if position in self._marks else None

    def at(self, position: int) -> dict[str, Any]:
        """What finds this place again."""
        digest = self.digest_at(min(position, self._position) if self._whole is None else position)
        if digest is None:
            return {}
        state = self._marks.get(position, (None, None))[1]
        following = self._blocks.get(position)
        if state is None or self._whole is not None or not following:
            return {"digest": digest}
        return {"digest": digest, "mark": state, "head": self._head, "next": [_plain(item) for item in following[:_NEXT]]}


def _plain(item: Any) -> Any:
    """A position, or a batch of positions, as plain data."""
    if isinstance(item, (torch.Tensor, numpy.ndarray, numpy.generic)):
        return item.tolist()
    return [_plain(one) for one in item] if isinstance(item, (list, tuple)) else item
