"""`GradientState`: which batch of which loader the loop works on, and whether it ends an update.

Each Accelerator has one. A prepared loader enters a `LoaderPass` when an iteration begins, records a `MicroBatch` for every batch that it
hands out, and leaves when the iteration ends, however it ends; loaders nest. `batch_after` says which batch the work that begins now
belongs to: in a plain loop the batch handed out last, and where batches were read ahead the oldest one that is alive and was not worked
on. It stands in this room because data, training and observability all use it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.config.handlers import GradientAccumulationPlugin

if TYPE_CHECKING:
    from slipstream.observability.timing.meter import Meter

__all__ = ["ActiveLoader", "GradientState", "MicroBatch", "LoaderPass", "BatchShares", "anchor_of"]


@dataclass(frozen=True)
class BatchShares:
    """How one global batch was dealt out to the ranks, where that is not the same full batch for each.

    >>> BatchShares(given=(2, 1), real=(2, 0), weighed=True, full=4).counted
    (2, 0)
    """

    given: tuple[int, ...]
    """Samples that each rank was handed."""
    real: tuple[int, ...]
    """How many of them are samples of this batch: the others repeat samples, or give a rank something to do that had none left."""
    weighed: bool
    """Whether losses are weighed by `real`, so that the gradient is that of the samples; repeated ones count in full otherwise."""
    full: int
    """Samples in a full global batch."""

    @property
    def total(self) -> int:
        """Samples of this global batch."""
        return sum(self.real)

    @property
    def counted(self) -> tuple[int, ...]:
        """Samples of each rank that count in a loss."""
        return self.real if self.weighed else self.given


_MIN_KEPT_BATCHES = 8


class MicroBatch:
    """One batch that a loader handed out. Identity is what tells batches apart."""

    __slots__ = ("anchor", "end", "left", "number", "reading", "sequence", "shares", "steps")

    def __init__(
        self, reading: LoaderPass, number: int, end: bool, left: int | None, shares: BatchShares | None, steps: int | None, anchor: Any
    ) -> None:
        self.reading = reading
        self.number = number
        """Its place in its pass, from 1."""
        self.sequence = next(reading.sequence)
        """Its place among all batches that were handed out, of any loader."""
        self.end = end
        """Whether it is the last one of its pass, on every rank."""
        self.left = left
        """How many follow; None where that is not known yet."""
        self.shares = shares
        """How it was dealt out; None if every rank has a full share and every sample counts."""
        self.steps = steps
        """Batches per update that its loader asks for (`effective_batch_size`); None for the usual number."""
        self.anchor: Callable[[], Any] = anchor
        """A weak reference to one of its tensors: dead once the script has dropped the batch."""


class LoaderPass:
    """One pass over a loader, as far as updates care: `data/epoch_state.py` adds what loaders need."""

    __slots__ = ("__weakref__", "batch", "handed", "inside", "late", "loader", "room", "seen", "sequence", "trained_at", "unread", "worked")

    def __init__(self, inside: tuple[weakref.ref[LoaderPass], int] | None = None) -> None:
        self.inside = inside
        """The pass over another loader that this one was asked for in, and the number of its batch then: what it is nested in."""
        self.batch: MicroBatch | None = None
        """The batch handed out last."""
        self.handed = 0
        """Batches handed out."""
        self.unread: deque[MicroBatch] = deque()
        """The batches that may still be alive, oldest first; the last one is `batch`."""
        self.room = _MIN_KEPT_BATCHES
        """With how many of these the dead ones are looked for."""
        self.loader: Any = None
        """A weak reference to the loader."""
        self.sequence: Iterator[int] = count()
        """Numbers the batches of all loaders of a `GradientState`."""
        self.worked = 0
        """The number of the batch that was worked on last; 0 as long as nothing was trained."""
        self.late = False
        """Whether work began with a later batch than the first, when the earlier ones were gone: left out, or replaced by others."""
        self.seen = 0
        """The newest batch that was there when work on an earlier one began."""
        self.trained_at = 0
        """`GradientState.trained` when its first batch was asked for."""

    def hand_out(self, batch: Any, end: bool, left: int | None, shares: BatchShares | None, steps: int | None) -> MicroBatch:
        """Notes the batch that is handed out next."""
        self.handed = number = self.handed + 1
        micro_batch = self.batch = MicroBatch(self, number, end, left, shares, steps, anchor_of(batch))
        unread = self.unread
        while unread and unread[0].anchor() is None:
            unread.popleft()
        if len(unread) >= self.room:  # one that is kept must not keep the record of all that follow
            alive = [earlier for earlier in unread if earlier.anchor() is not None]
            unread.clear()
            unread.extend(alive)
            self.room = 2 * len(alive) + _MIN_KEPT_BATCHES
        unread.append(micro_batch)
        return micro_batch

    def after(self, last: MicroBatch | None) -> MicroBatch | None:
        """The batch that is worked on next by somebody who worked on `last`; `last` itself if there is none."""
        number = last.number if last is not None and last.reading is self else 0
        current = self.batch
        loader = None if self.loader is None else self.loader()
        if current is None or (loader is not None and loader.merges):
            return current
        for micro_batch in self.unread:
            if micro_batch.number > number and (micro_batch is current or micro_batch.anchor() is not None):
                break
        else:
            return current if number == 0 else last
        if loader is not None and number and micro_batch.number > number + 1 and self.seen > number:
            loader.merges = True  # batches that waited are gone: several of them were worked on in one go
            return current
        self.seen = current.number
        return micro_batch

    @property
    def done(self) -> int:
        """How many batches were worked on, where the others are still waiting for it; else how many were handed out."""
        waiting = [batch for batch in self.unread if batch.number > self.worked and batch.anchor() is not None]
        loader = None if self.loader is None else self.loader()
        if not self.worked or (loader is not None and loader.merges) or len(waiting) < self.handed - self.worked:
            return self.handed
        return self.worked

    def repeated(self, last: MicroBatch) -> MicroBatch | None:
        """The first batch of another round over batches that were all kept (`list(loader)`), after a round that ended with `last`."""
        kept = list(self.unread)
        if last is not kept[-1] or len(kept) != self.handed or len(kept) < 2 or any(batch.anchor() is None for batch in kept):
            return None
        again = LoaderPass(self.inside)
        again.loader, again.handed, again.sequence = self.loader, self.handed, self.sequence
        again.unread.extend(
            MicroBatch(again, batch.number, batch.end, batch.left, batch.shares, batch.steps, batch.anchor) for batch in kept
        )
        again.batch = again.unread[-1]
        return again.unread[0]


def anchor_of(batch: Any) -> Callable[[], Any]:
    """A weak reference to the first thing in a batch that can have one; one to nothing for text and numbers.

    >>> import torch
    >>> tensor = torch.ones(1)
    >>> anchor = anchor_of({"x": [tensor]})
    >>> anchor() is tensor, anchor_of(["text"])()
    (True, None)
    """
    kind = type(batch)
    if kind is list or kind is tuple:
        batch = batch[0] if batch else None
    elif kind is dict:
        batch = next(iter(batch.values()), None)
    if not hasattr(type(batch), "__torch_function__"):  # no tensor, which is what batches mostly begin with
        while isinstance(batch, list | tuple | Mapping):
            batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch), None)
    try:
        return weakref.ref(batch)
    except TypeError:  # text, numbers
        return _dead_reference


def _dead_reference() -> None:
    return None


class ActiveLoader(Protocol):
    """What a loader tells of the batch that it handed out last."""

    remainder: int
    """Samples in the last global batch if it is not full, else 0; -1 as long as that is not known."""

    @property
    def handed(self) -> int:
        """How many batches it has handed out in this iteration."""

    @property
    def end_of_dataloader(self) -> bool:
        """Whether it was the last one of this iteration, on every rank."""

    @property
    def shares(self) -> BatchShares | None:
        """How the batch was dealt out; None if every rank has a full share and every sample counts."""

    merges: bool
    """Whether several of its batches are worked on in one go."""
    beside: Any
    """A weak reference to the loader that this one is known to be read beside; None where there is none."""

    @property
    def steps_per_update(self) -> int | None:
        """Batches per update that this loader asks for (`effective_batch_size`); None for the usual number."""


class GradientState:
    """The loaders that are being read, and whether the present batch ends an update.

    >>> state = GradientState(GradientAccumulationPlugin(num_steps=4))
    >>> state.num_steps, state.sync_gradients, state.in_dataloader
    (4, True, False)
    """

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        self.sync_gradients = True
        """Whether gradients of the present batch are reduced and the optimizers step."""
        self.active: ActiveLoader | None = None
        """The innermost loader that is being read."""
        self.nested = False
        """Whether one loader is being read while another is."""
        self.meter: Meter | None = None
        """Where loops on this state mark what they are doing; see `step/ledger/`."""
        self.trained = 0
        """How many `accumulate` blocks and backward passes have begun: two equal readings mean that nothing was trained in between."""
        self.told: set[str] = set()
        """What was warned of, each thing once."""
        self.listed: set[tuple[str, tuple[str, ...]]] = set()
        """Which lists hold one entry per sample: the line that gathers them, and their place in what it gathers."""
        self.batch: MicroBatch | None = None
        """The batch of the `accumulate` block that is being run."""
        self.passes = 0
        """How many passes were read to their end."""
        self.reading: LoaderPass | None = None
        """The pass under way, where it is the only one."""
        self.count_updates: Callable[[], int] = int
        """How many updates were made, by all optimizers together."""
        self.finished_pass: LoaderPass | None = None
        """The pass that was read to its end last, until another one begins."""
        self._finished_updates = 0
        """How many updates were made when it ended; -1 once inputs were split after it."""
        self._finished_in: tuple[weakref.ref[LoaderPass], int] | None = None
        """The pass around the finished one, and what it had handed out then."""
        self._split_in: tuple[weakref.ref[Any], int] | None = None
        """In which batch of which loader inputs were split between the processes last."""
        self._stack: list[LoaderPass] = []
        self._sequence = count()
        self._kept: LoaderPass | None = None
        """The pass that ended or was left last, whose batches may have been kept."""

    @staticmethod
    def _reset_state() -> None:
        """Nothing to do: objects of this class share nothing. Tests of scripts call it."""

    def __repr__(self) -> str:
        return f"GradientState(sync={self.sync_gradients}, end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"

    # -- settings -------------------------------------------------------------------------------------------------

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings that were changed."""
        return self.plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        """Batches per update."""
        return self.plugin.num_steps or 1

    @property
    def adjust_scheduler(self) -> bool:
        """See `GradientAccumulationPlugin.adjust_scheduler`."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """See `GradientAccumulationPlugin.sync_with_dataloader`."""
        return self.plugin.sync_with_dataloader

    @property
    def initialized(self) -> bool:
        """True: the object exists."""
        return True

    # -- loaders --------------------------------------------------------------------------------------------------

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is being read, or None."""
        return self.active

    @property
    def dataloader_references(self) -> list[Any]:
        """The prepared loaders that are being read, outermost first."""
        return [loader for loader in (reading.loader() for reading in self._stack) if loader is not None]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the present batch is the last one of its loader; in an `accumulate` block, the batch of the block."""
        if self.batch is not None:
            return self.batch.end
        return self.active is not None and self.active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples in the last global batch of the active loader if it is not full; -1 for not known."""
        return -1 if self.active is None else self.active.remainder

    @property
    def finished(self) -> Any:
        """The loader that was read to its end last, for results that are gathered after the loop; None where there is none.

        It counts until another loader begins, inputs are split, an update is made, or the loader around it hands out another batch.
        """
        reading = self.finished_pass
        if reading is None or self.count_updates() != self._finished_updates:
            return None
        outer, handed = (None, 0) if self._finished_in is None else (self._finished_in[0](), self._finished_in[1])
        return reading.loader() if outer is None or outer.handed == handed else None

    def position(self) -> tuple[weakref.ref[LoaderPass], int] | None:
        """The innermost pass under way and the number of its present batch, for a pass that is being asked for; None outside of passes."""
        if not self._stack or not self._stack[-1].handed:
            return None
        return weakref.ref(self._stack[-1]), self._stack[-1].handed

    def pacing(self) -> ActiveLoader | None:
        """The loader that sets the pace of updates, as far as one is being read; see `pacing_pass`."""
        reading = self.pacing_pass()
        loader: ActiveLoader | None = None if reading is None else reading.loader()
        return loader

    def pacing_pass(self) -> LoaderPass | None:
        """The pass whose end closes an update: the innermost one that is read inside of one batch of the passes around it.

        A pass that was asked for before its neighbour handed out a batch (`zip(loader, second)`), or that has outlived the batch in which
        it was asked for (a second source of data, begun anew as often as it ends), is read beside it and does not set the pace; nor do
        later passes over its loader.
        """
        stack = self._stack
        if not self.nested:
            return stack[-1] if stack else None
        leading = [reading for reading in stack if not self._is_beside(reading)] or stack
        for place in range(len(leading) - 1, 0, -1):
            inner, outer = leading[place], leading[place - 1]
            if inner.inside is not None and inner.inside[0]() is outer:
                if inner.inside[1] == outer.handed:
                    return inner
                _mark_beside(inner, outer)
        return leading[0]

    def _is_beside(self, reading: LoaderPass) -> bool:
        """Whether a pass is read beside another one that is under way, by what is known of their loaders."""
        loader = reading.loader()
        neighbour = None if loader is None or loader.beside is None else loader.beside()
        return neighbour is not None and any(other.loader() is neighbour for other in self._stack)

    def batch_after(self, last: MicroBatch | None) -> MicroBatch | None:
        """The batch that the work which begins now belongs to; None without a loader.

        `last` is the batch that was worked on before. It is given back while no other one can be meant: another piece of it.
        """
        reading = self.pacing_pass() if not self.nested else self._newest(last) or self.pacing_pass()
        if reading is not None:
            current = reading.batch
            return current if current is None or len(reading.unread) < 2 else reading.after(last)
        kept = self._kept
        if last is not None:
            following = last.reading.after(last)
            if following is not last:
                return following if following is not None and following.anchor() is not None else None
            if kept is None or kept is last.reading:
                return last.reading.repeated(last) if kept is self.finished_pass else last if last.anchor() is not None else None
        first = kept.unread[0] if kept is not None and kept.unread else None
        return first if first is not None and first.number == 1 and first.anchor() is not None else None

    def _newest(self, last: MicroBatch | None) -> LoaderPass | None:
        """Of several passes under way, the only one that handed out a batch since the last work; None where there are more, or none.

        Loaders that are taken in turns (tasks that alternate) are told from those that are read together for one batch of work.
        """
        since = -1 if last is None else last.sequence
        new = [reading for reading in self._stack if reading.batch is not None and reading.batch.sequence > since]
        pacing = self.pacing_pass() if len(new) > 1 else None
        if pacing is not None and pacing.inside is None:
            for reading in new:
                if reading is not pacing and reading.inside is None:
                    _mark_beside(reading, pacing)
        return new[0] if len(new) == 1 else None

    def is_inside(self, is_meant: Callable[[Any], bool]) -> bool:
        """Whether a loader is read inside of one batch of another, as in an evaluation: a run that is resumed begins it anew.

        One that is read beside another is not. After a single batch the two look alike: then it is inside if the loader around it was
        trained on before it began, and it was not.
        """
        meant = (place for place, reading in enumerate(self._stack) if (loader := reading.loader()) is not None and is_meant(loader))
        place = next(meant, 0)  # the outermost pass over the loader
        if not place:
            return False
        outer, inner = self._stack[place - 1], self._stack[place]
        if inner.inside is None or inner.inside[0]() is not outer or inner.inside[1] != outer.handed:
            return False
        return inner.handed > 1 or outer.trained_at < inner.trained_at == self.trained

    def enter(self, reading: LoaderPass, loader: Any) -> None:
        """A pass over a loader begins."""
        reading.loader, reading.trained_at, reading.sequence = weakref.ref(loader), self.trained, self._sequence
        self._stack.append(reading)
        self.active, self.nested = loader, len(self._stack) > 1
        self.reading = None if self.nested else reading
        self.finished_pass = None

    def leave(self, reading: LoaderPass, *, exhausted: bool) -> None:
        """A pass ends: at the end of its loader, by `break` or by an exception."""
        if reading in self._stack:
            self._stack.remove(reading)
        for inner, outer in [(other, reading) for other in self._stack] + [(reading, other) for other in self._stack]:
            if inner.inside is not None and inner.inside[0]() is outer and (outer is reading or inner.inside[1] != outer.handed):
                _mark_beside(inner, outer)
        self._stack = [other for other in self._stack if other.loader() is not None]
        innermost = self._stack[-1] if self._stack else None
        self.active, self.nested = None if innermost is None else innermost.loader(), len(self._stack) > 1
        self.reading = None if self.nested else innermost
        self._kept = reading
        if exhausted:
            self.passes += 1
            self.finished_pass, self._finished_updates = reading, self.count_updates()
            self._finished_in = None if innermost is None else (weakref.ref(innermost), innermost.handed)
        elif self.finished_pass is reading:
            self.finished_pass = None

    def note_split(self) -> None:
        """Inputs are split between the processes now: what follows is of these, and not of a loader that was read before."""
        self._finished_updates = -1
        self._split_in = None if self.active is None else (weakref.ref(self.active), self.active.handed)

    @property
    def has_split(self) -> bool:
        """Whether inputs were split between the processes inside of the present batch."""
        return self._split_in is not None and self._split_in[0]() is self.active and self._split_in[1] == getattr(self.active, "handed", 0)

    def forget(self) -> None:
        """Drops every loader: nothing here keeps one alive afterwards."""
        self._stack, self.active, self.reading, self.finished_pass, self._finished_in, self.batch = [], None, None, None, None, None
        self._kept = None
        self.sync_gradients, self.nested = True, False


def _mark_beside(inner: LoaderPass, outer: LoaderPass) -> None:
    """Remembers that a loader is read beside another: it outlived the batch that it was asked for in, and may begin anew in any other."""
    loader, neighbour = inner.loader(), outer.loader()
    if loader is None or neighbour is None or loader is neighbour:
        return
    if neighbour.beside is None or neighbour.beside() is not loader:  # else it is the neighbour that does not set the pace
        loader.beside = outer.loader
