"""The plan: an order of samples -> global batches -> what each rank reads of them. Pure: no torch, no randomness, no processes.

A global batch is `size` consecutive samples of the order, and rank r reads the r-th contiguous piece of it: the pieces, put one
after the other, are the global batch, and the global batches are the same for any number of ranks. Where whole batches are dealt out
(a batch sampler of the user's own, `batch_size=None`), rank r takes the r-th of each round of `world_size` batches.

The last global batch (or round) may be short. What happens then is the policy:

* `exact` (the default): it is dealt out as it is, each rank's piece as in a full batch, so that every rank reads the batches that a plain
  loader of its batch size would read. A rank that gets none is handed repeated samples that count nothing.
* `even`: it is completed from the start of the order, so that every rank has a full batch. One process reads it as it is.
* `ragged`: what is left is shared out as evenly as possible, without repeated samples, so a rank may have one batch less. Only where
  the script deals with that.

`drop_last` drops a short global batch whole. How a batch was shared is a `Shares`, or None if all ranks have the same full share.

A pass may begin at any position, also inside of a global batch (one that was saved with another number of ranks): what is left of that
batch is shared out first, so that later batches, updates and the end are those of a pass that began at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, cycle, islice
from typing import Any, Literal, Protocol

from slipstream.errors import ConfigError
from slipstream.runtime.gradient_state import Shares
from slipstream.runtime.split import real_counts

__all__ = ["Cutting", "Dealing", "Order", "Piece", "Plan", "Policy"]

Policy = Literal["even", "exact", "ragged"]
"""What happens to a short last batch."""

Piece = tuple[Any, "Shares | None", bool]
"""What a rank reads of one global batch (samples, or a whole batch), how the batch was shared, and whether it is the last one."""


class Order(Protocol):
    """An order of samples of known length."""

    def __len__(self) -> int: ...

    def take(self, start: int, stop: int) -> list[Any]:
        """The samples at these positions, as far as there are any."""


@dataclass(frozen=True)
class Plan:
    """Global batches of `size` consecutive samples, each cut into one contiguous piece per rank.

    >>> plan = Plan(world_size=2, size=4, policy="even")
    >>> plan.short(1)
    Shares(given=(2, 2), real=(1, 0), weighed=False, full=4)
    >>> [list(piece for piece, _, _ in plan.pieces(iter(range(5)), rank)) for rank in range(2)]
    [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    >>> Plan(world_size=2, size=4).short(1)
    Shares(given=(1, 2), real=(1, 0), weighed=True, full=4)
    """

    world_size: int
    size: int
    """Samples in a full global batch."""
    policy: Policy = "exact"
    drop_last: bool = False
    aligned: bool = True
    """Whether batches begin at multiples of `size`, wherever a pass begins."""

    def __post_init__(self) -> None:
        if self.policy == "even" and self.size % self.world_size:
            below = self.size - self.size % self.world_size
            near = f"{below} or {below + self.world_size}" if below else f"{self.world_size}"
            raise ConfigError(
                f"split_batches=True cuts batches of batch_size={self.size} into {self.world_size} equal pieces, one for each process, "
                f"and {self.size} is no multiple of {self.world_size}. Write batch_size={near}, or even_batches=False for unequal pieces."
            )

    @cached_property
    def given(self) -> tuple[int, ...]:
        """Samples that each rank reads of a full batch."""
        return tuple(real_counts(self.size, self.world_size))

    @cached_property
    def full(self) -> Shares | None:
        """How a full batch is shared."""
        return None if self.size % self.world_size == 0 else self._share_out(self.size)

    def short(self, left: int) -> Shares:
        """How a last batch of `left` samples is shared, fewer than a full one."""
        if self.policy == "ragged":
            return self._share_out(left)
        real, before = [], 0
        for count in self.given:
            real.append(min(count, max(0, left - before)))
            before += count
        if self.policy == "exact":
            given = tuple(own or max(1, count) for own, count in zip(real, self.given, strict=True))
        else:
            given = self.given if self.world_size > 1 else tuple(real)
        return Shares(given, tuple(real), self.policy == "exact", self.size)

    def phase(self, start: int) -> int:
        """How many samples of the global batch around a position come before it."""
        return start % self.size if self.aligned else 0

    def begun(self, phase: int) -> Shares | None:
        """How a batch is shared of which so many samples were read before; None for a full one that is shared evenly."""
        return self._share_out(self.size - phase) if phase else self.full

    def _share_out(self, samples: int) -> Shares:
        real = tuple(real_counts(samples, self.world_size))
        given = real if self.policy == "ragged" else tuple(max(1, count) for count in real)
        return Shares(given, real, True, self.size)

    def count(self, samples: int, rank: int = 0, phase: int = 0) -> int:
        """How many batches a rank reads of so many samples after `phase` ones of the first batch; the same on every rank, unless ragged."""
        if phase and samples >= self.size - phase:
            first = self._share_out(self.size - phase)
            return (first.given[rank] > 0) + self.count(samples - self.size + phase, rank)
        whole, left = divmod(samples, self.size)
        if not left or self.drop_last:
            has_short = False
        elif self.policy == "ragged":
            has_short = self.short(left).given[rank] > 0
        else:
            has_short = True
        if self.policy == "ragged" and self.given[rank] == 0:  # more ranks than samples in a batch
            return 0
        return whole + has_short

    def remainder(self, samples: int, phase: int = 0) -> int:
        """Samples in the last batch if it is read though it is not full, else 0."""
        if phase and samples >= self.size - phase:
            samples -= self.size - phase
        return 0 if self.drop_last else samples % self.size

    # -- an order of known length: positions alone -----------------------------------------------------------------

    def known(self, order: Order, rank: int, start: int = 0) -> Iterator[list[Any]]:
        """The pieces of a rank, from a position of the order on; nothing before it is looked at."""
        size = self.size
        first = sum(self.given[:rank])
        last = first + self.given[rank]
        length = len(order)
        if (phase := self.phase(start)) and length - start >= size - phase:
            samples = order.take(start, start + size - phase)
            piece = self._piece(samples, self.begun(phase), rank, lambda: order.take(0, 1))
            start += size - phase
            if piece:
                yield piece
        whole = (length - start) // size if start < length else 0
        if last > first or self.policy == "exact":
            for position in range(start, start + whole * size, size):
                yield order.take(position + first, position + last) or order.take(0, 1)
        left = (length - start) % size if start < length else 0
        if left and not self.drop_last:
            samples = order.take(length - left, length)
            piece = self._piece(samples, self.short(left), rank, lambda: order.take(0, min(length, size)))
            if piece:
                yield piece

    # -- an order that is drawn while it is read --------------------------------------------------------------------

    def pieces(self, order: Iterator[Any], rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[Piece]:
        """The pieces of a rank; one global batch of the order (not of data) is drawn ahead to know which one is the last.

        With a `head` (the beginning of the order; empty where it does not matter), the order stands at `start` already.
        """
        size = self.size
        phase = self.phase(start)
        if head is None:
            head = list(islice(order, size))
            order = _from(head, order, start)
        whole = size - phase
        batch = list(islice(order, whole))
        first = head or batch
        while batch:
            following = list(islice(order, size)) if len(batch) == whole else []
            if self.drop_last and len(following) < size:
                following = []
            if len(batch) == whole:
                shares = self.begun(size - whole)
            elif self.drop_last:
                return
            else:
                shares = self.short(len(batch))
            piece = self._piece(batch, shares, rank, lambda: first)
            if piece:
                yield piece, shares, self._is_last(following, rank)
            batch, whole = following, size

    def _is_last(self, following: Sequence[Any], rank: int) -> bool:
        if self.policy != "ragged" or len(following) in (0, self.size):
            return not following
        return self.short(len(following)).given[rank] == 0

    def _piece(self, samples: Sequence[Any], shares: Shares | None, rank: int, head: Callable[[], Sequence[Any]]) -> list[Any]:
        """What one rank reads of a global batch: its share; what completes the batch, or keeps a rank busy, is taken from the head."""
        given = self.given if shares is None else shares.given
        if shares is not None and shares.weighed:
            first = sum(shares.real[:rank])
            own = list(samples[first : first + shares.real[rank]])
            return own or ([] if self.policy == "ragged" else list(islice(cycle(head()), given[rank])))
        first = sum(given[:rank])
        own = list(samples[first : first + given[rank]])
        missing = given[rank] - len(own)
        if missing:
            skipped = max(0, first - len(samples))
            own += islice(cycle(head()), skipped, skipped + missing)
        return own


@dataclass(frozen=True)
class Dealing:
    """Whole batches, dealt out in rounds: rank r takes the r-th batch of each round of `world_size`.

    >>> dealing = Dealing(world_size=2, nominal=2, policy="even")
    >>> [[(batch, shares and shares.real) for batch, shares, _ in dealing.pieces(iter(["ab", "cd", "ef"]), rank)] for rank in range(2)]
    [[('ab', None), ('ef', (2, 0))], [('cd', None), ('ab', (2, 0))]]
    """

    world_size: int
    nominal: int | None = None
    """Samples in a full batch; None takes the size of the first one."""
    policy: Policy = "exact"
    measure: Callable[[Any], int] = len
    """The size of a batch; 1 where a batch is one position of the dataset."""

    def count(self, batches: int, rank: int = 0) -> int:
        """How many batches a rank reads of so many."""
        whole, left = divmod(batches, self.world_size)
        return whole + (left > rank if self.policy == "ragged" else left > 0)

    def pieces(self, batches: Iterator[Any], rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[Piece]:
        """The batches of a rank; one round (of batches of positions, not of data) is drawn ahead. `head` as of a `Plan`."""
        ranks = self.world_size
        if head is None:
            head = list(islice(batches, ranks))
            batches = _from(head, batches, start)
        nominal = self.nominal or (self.measure(head[0]) if head else 1)
        dealt = list(islice(batches, ranks))
        while dealt:
            following = list(islice(batches, ranks)) if len(dealt) == ranks else []
            shares = self._shares(dealt, head, nominal)
            end = not following if self.policy != "ragged" else len(following) <= rank
            if rank < len(dealt):
                yield dealt[rank], shares, end
            elif self.policy != "ragged":
                yield self._filler(head, rank - len(dealt)), shares, end
            dealt = following

    def _filler(self, head: Sequence[Any], position: int) -> Any:
        return head[position % len(head)] if self.policy == "even" else head[0]

    def _shares(self, dealt: Sequence[Any], start: Sequence[Any], nominal: int) -> Shares | None:
        sizes = tuple(map(self.measure, dealt))
        absent = self.world_size - len(sizes)
        if not absent and all(size == nominal for size in sizes):
            return None
        fillers = [] if self.policy == "ragged" else [self.measure(self._filler(start, position)) for position in range(absent)]
        given = sizes + (tuple(fillers) or (0,) * absent)
        return Shares(given, sizes + (0,) * absent, self.policy != "even", nominal * self.world_size)


@dataclass(frozen=True)
class Cutting:
    """Batches of all sizes (of a batch sampler of the user's own), each cut into one piece per rank.

    >>> cutting = Cutting(world_size=2, policy="even")
    >>> [[batch for batch, _, _ in cutting.pieces(iter(["abcd", "efg"]), rank)] for rank in range(2)]
    [[['a', 'b'], ['e', 'f']], [['c', 'd'], ['g', 'a']]]
    """

    world_size: int
    nominal: int | None = None
    """Samples in a full batch; None takes the size of the first one."""
    policy: Policy = "exact"

    def count(self, batches: int, rank: int = 0) -> int:
        """How many pieces a rank reads of so many batches."""
        return batches

    def pieces(self, batches: Iterator[Any], rank: int, start: int = 0, *, head: Sequence[Any] | None = None) -> Iterator[Piece]:
        """The pieces of a rank; one batch (of positions, not of data) is drawn ahead. `head` as of a `Plan`."""
        following = batches
        if head is None:
            head = list(islice(batches, 1))
            following = _from(head, batches, start)
        first: Sequence[Any] = head[0] if head else ()
        nominal = self.nominal or len(first) or 1
        batch = next(following, None)
        while batch is not None:
            after = next(following, None)
            size = len(batch)
            room = -(-size // self.world_size) * self.world_size if self.policy == "even" else size
            plan = Plan(self.world_size, max(1, room), self.policy)
            shares = plan.full if size == room else plan.short(size)
            piece = plan._piece(batch, shares, rank, lambda: first)
            if shares is not None or size != nominal:
                real = plan.given if shares is None else shares.real
                shares = Shares(plan.given if shares is None else shares.given, real, self.policy != "even", nominal)
            if piece:
                yield piece, shares, after is None
            batch = after


def _from(head: Sequence[Any], rest: Iterator[Any], start: int) -> Iterator[Any]:
    """What follows a position of an order whose head was drawn already."""
    return islice(chain(head, rest), start, None)
