"""The items of a stream, a block at a time, from any position on: by seeking where the dataset can, and exactly in any case.

A block is a global batch. Items are drawn inside random states of the reader's own (`randomness.py`), carried on from block to block.
After each block it can be noted what leads back there: the state of a dataset that keeps one, and the random states if any number was
drawn. Ways to a position, in this order:

* the dataset's own `state_dict`, if one was saved there;
* its `skip(n)`, where it has one and no state was saved, unless the epoch is a later one and the dataset orders itself by epoch: what
  skips keeps the order of the first (`skips`). Skipping may or may not draw the random numbers of what it skips; so where the
  stream draws any, the first block is compared with what was saved: it has to leave the random states as it did then;
* reading, and dropping what comes before: always exact, and said, as it takes time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from slipstream.data.randomness import Captured, OwnRandom, digest_of, spelled, unspelled
from slipstream.data.shards import settle_pipeline
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["Mark", "Marks", "Reader", "check_mark", "in_blocks", "keeps_state", "plain_mark", "say_reading", "skips"]


class _Absent:
    """In place of a state that was not saved, which may be None; a class, as it travels between processes."""


_ABSENT: Any = _Absent


@dataclass(frozen=True)
class Mark:
    """What leads back to the end of a block."""

    dataset: Any = _ABSENT
    """The state of a dataset that keeps one."""
    random: Captured | None = None
    """The random states of the reader, if any number was drawn."""
    after: str | None = None
    """A digest of those that the block after it left; of a mark that was saved."""
    block: int = 0
    """How large that block was."""

    @property
    def seeks(self) -> bool:
        """Whether nothing has to be read to get there."""
        return self.dataset is not _ABSENT


class Marks:
    """The marks of the last few blocks of a pass: a reader is ahead of the script."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._marks: dict[tuple[int, int], Mark] = {}

    def note(self, epoch: int, position: int, mark: Mark) -> None:
        """The block that ends here was read."""
        self._marks[epoch, position] = mark
        if len(self._marks) > self._keep:
            del self._marks[next(iter(self._marks))]

    def at(self, epoch: int, position: int, block: int) -> Mark | None:
        """The mark of a position, with what is known of the block after it."""
        mark = self._marks.get((epoch, position))
        later = [place for place in self._marks if place[0] == epoch and place[1] > position]
        following = self._marks[min(later)].random if later else None
        if mark is None or following is None or mark.random is None:
            return mark
        return Mark(mark.dataset, mark.random, digest_of(following), block)


def plain_mark(mark: Mark | None) -> dict[str, Any]:
    """A mark as plain data."""
    found: dict[str, Any] = {}
    if mark is not None and mark.dataset is not _ABSENT:
        found["dataset"] = mark.dataset
    if mark is not None and mark.random is not None:
        found["random"] = {**spelled(mark.random), "after": mark.after, "block": mark.block}
    return found


def check_mark(state: Mapping[str, Any]) -> Mark | None:
    """The mark in a saved state; None where there is none, a `ConfigError` where it cannot be one."""
    random = state.get("random")
    if random is None:
        return Mark(state["dataset"]) if "dataset" in state else None
    after, block = (random.get("after"), random.get("block")) if isinstance(random, Mapping) else (0, 0)
    if not (after is None or isinstance(after, str)) or isinstance(block, bool) or not isinstance(block, int):
        raise ConfigError(f"the random state of a stream that was saved cannot be read: {str(random)[:80]}")
    return Mark(state.get("dataset", _ABSENT), unspelled(random), after, block)


def keeps_state(dataset: Any) -> bool:
    """Whether a dataset keeps a position of its own, and cannot skip: that is exact, while a state may leave out what a shuffle holds."""
    if callable(getattr(dataset, "skip", None)):
        return False
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def skips(dataset: Any, epoch: int) -> bool:
    """Whether `skip(n)` of a dataset leads to a position of an epoch.

    One that is told the epoch may order a later one anew, while what its `skip` gives keeps the order of the first: so those of datasets do
    with their shards.
    """
    return callable(getattr(dataset, "skip", None)) and not (epoch and callable(getattr(dataset, "set_epoch", None)))


def in_blocks(
    dataset: Any,
    block: int,
    scope: OwnRandom,
    *,
    careful: bool = False,
    first: int | None = None,
    after: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """The items of a stream, drawn a block at a time inside random states of the reader's own.

    Unless `careful`, a stream that drew no random number for its first block is trusted not to draw any. `first` is the size of the first
    block; `after` is called after each one with the number of items read so far.
    """
    with scope:
        stream = iter(dataset)
    wanted, read, trusted = block if first is None else first, 0, False
    while not trusted:
        with scope:
            items = list(islice(stream, wanted))
        read += len(items)
        if after is not None and items:
            after(read)
        yield from items
        if len(items) < wanted:
            return
        wanted = block
        trusted = not (careful or scope.used)
    yield from stream


def say_reading(dataset: Any, count: int, what: str) -> None:
    """One line about a seek that has to read."""
    name = type(dataset).__name__
    why = {
        "items": "it has no skip(n) to seek with",
        "epoch": "it orders itself by epoch, and its skip(n) keeps the order of the first one",
        "batches": "the order of several workers can only be found by reading",
        "drawn": "it draws random numbers for every item, which seeking would leave out",
    }[what]
    counted = "batches" if what == "batches" else "items"
    get_logger(__name__).warning(f"{count} {counted} of {name} are read and dropped to get to the position: {why}")


@dataclass(frozen=True)
class Reader:
    """Reads a stream in one process."""

    dataset: Any
    block: int
    seed: int
    """Of the random states that items are drawn in."""
    pipeline: int
    """The seed of pipelines of torch."""
    place: tuple[int, int] = (0, 1)
    """Rank and world size, for pipelines that share themselves out."""
    careful: bool = False
    aligned: bool = True
    """Whether blocks begin at multiples of their size, wherever reading begins."""
    may_skip: bool = True
    """Whether `skip` means what it says in this epoch (`skips`); where several workers share a dataset, that is the dataset's affair."""
    quiet: bool = False
    """Whether it says nothing when it reads to seek."""

    def read(
        self, dataset: Any, position: int = 0, scope: OwnRandom | None = None, note: Callable[[int, Mark], None] | None = None
    ) -> Iterator[Any]:
        """The items of a dataset that stands at a position."""
        settle_pipeline(dataset, self.pipeline, *self.place)
        scope = OwnRandom(self.seed) if scope is None else scope
        stateful = dataset is self.dataset and keeps_state(dataset)
        seekable = stateful or self._skip is not None

        def after(read: int) -> None:
            if note is not None and (stateful or (seekable and scope.used)):
                state = copy.deepcopy(dataset.state_dict()) if stateful else _ABSENT
                note(position + read, Mark(state, scope.capture() if scope.used else None))

        careful, first = self.careful or (stateful and note is not None), self.block - self._phase(position)
        return in_blocks(dataset, self.block, scope, careful=careful, first=first, after=None if note is None else after)

    def open(
        self,
        start: int,
        saved: Mark | None,
        *,
        needs_head: bool,
        head: list[Any] | None = None,
        note: Callable[[int, Mark], None] | None = None,
    ) -> tuple[Iterator[Any], list[Any] | None]:
        """The items from a position on; with a head (the first block, if it is needed) where they stand there, else from the first on.

        A `head` that was read already is not read again: a dataset that keeps a position of its own stands behind it.
        """
        if not start:
            return self.read(self.dataset, note=note), None
        if head is None:
            head = list(islice(self.read(self.dataset), self.block)) if needs_head else []
        if saved is not None and note is not None:
            note(start, saved)
        if saved is not None and saved.dataset is not _ABSENT:
            self.dataset.load_state_dict(copy.deepcopy(saved.dataset))
            scope = OwnRandom(self.seed)
            if saved.random is not None:
                scope.resume(saved.random)
            return self.read(self.dataset, start, scope, note), head
        found = self._skipped(start, saved, note)
        if found is not None:
            return found, head
        if not self.quiet:
            say_reading(self.dataset, start, self._why_not)
        return islice(self.read(self.dataset, note=note), start, None), head

    def _skipped(self, start: int, saved: Mark | None, note: Callable[[int, Mark], None] | None) -> Iterator[Any] | None:
        """The items after what the dataset skips by itself; None where it cannot, or where it would draw other random numbers."""
        skip = self._skip
        if skip is None:
            return None
        if saved is None or saved.random is None:
            return self._after_skipping(skip, start, OwnRandom(self.seed), note)
        if saved.after is None or saved.block != self.block or self._phase(start):  # there is nothing to compare with
            return None
        for captured in (None, saved.random):
            scope = OwnRandom(self.seed)
            if captured is not None:
                scope.resume(captured)
            items = self._after_skipping(skip, start, scope, note)
            first = list(islice(items, self.block))
            if digest_of(scope.capture()) == saved.after:
                return chain(first, items)
        return None

    @property
    def _skip(self) -> Callable[[int], Any] | None:
        skip = getattr(self.dataset, "skip", None)
        return skip if self.may_skip and callable(skip) else None

    @property
    def _why_not(self) -> str:
        """Why this position is not found by `skip`."""
        if self._skip is not None:
            return "drawn"
        return "epoch" if callable(getattr(self.dataset, "skip", None)) else "items"

    def _phase(self, position: int) -> int:
        return position % self.block if self.aligned else 0

    def _after_skipping(
        self, skip: Callable[[int], Any], start: int, scope: OwnRandom, note: Callable[[int, Mark], None] | None
    ) -> Iterator[Any]:
        with scope:
            rest = skip(start)
        return self.read(rest, start, scope, note)
