"""`GradientState`: which batch of which loader the loop works on, and whether it ends an update.

Each Accelerator has one. A prepared loader enters a `LoaderPass` when an iteration begins, records a `MicroBatch` for every batch that it
hands out, and leaves when the iteration ends; loaders nest. `batch_after` returns the batch that new work belongs to: in a plain loop the
batch handed out last, and where batches were read ahead the oldest one that is alive and was not worked on. `MetricsState` is the part
that `gather_for_metrics` needs. The module is in this room because data, training and observability use it.
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

__all__ = ["ActiveLoader", "BatchShares", "GradientState", "LoaderPass", "MetricsState", "MicroBatch", "anchor_of"]


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
_MAX_RECORD = 200_000


class MicroBatch:
    """One batch that a loader handed out. Identity is what tells batches apart."""

    __slots__ = ("anchor", "end", "left", "number", "loader_pass", "sequence", "shares", "steps")

    def __init__(
        self, loader_pass: LoaderPass, number: int, end: bool, left: int | None, shares: BatchShares | None, steps: int | None, anchor: Any
    ) -> None:
        self.loader_pass = loader_pass
        self.number = number
        """Its place in its pass, from 1."""
        self.sequence = next(loader_pass.sequence)
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
    """One iteration over a loader: where it began, what it handed out, and what of that was worked on."""

    __slots__ = (
        "__weakref__", "around", "batch", "begun_at", "ended", "epoch", "gathered", "handed", "inside", "interrupted", "kept_at", "late",
        "loader", "order", "record", "recording", "resumed", "room", "rows", "sampler_start", "seen", "sequence", "start", "trained",
        "trained_at", "unread", "worked",
    )  # fmt: skip

    def __init__(
        self,
        epoch: int = 0,
        start: int = 0,
        begun_at: int = 0,
        *,
        resumed: bool = False,
        trained: int = 0,
        inside: tuple[weakref.ref[LoaderPass], int] | None = None,
    ) -> None:
        self.epoch = epoch
        self.start = start
        """Position in the epoch's order where it began, in samples (or whole batches, where those are dealt out)."""
        self.begun_at = begun_at
        """The same, in batches: how many each rank was handed of this epoch before."""
        self.resumed = resumed
        """Whether it continues inside of an epoch, at a position that was loaded."""
        self.trained = trained
        """`GradientState.trained` when the iterator was made."""
        self.inside = inside
        """The pass over another loader that this one was asked for in, and the number of its batch then: what it is nested in."""
        self.record: list[tuple[int, BatchShares | None]] = []
        """Where the way of sharing changed: (batches handed out before, shares from there on); it begins with None."""
        self.recording = True
        self.around: tuple[tuple[LoaderPass, int], ...] = ()
        """The passes over the same loader that were under way when it began, and what they had handed out."""
        self.kept_at: int | None = None
        """What it had handed out when a later pass was trained on, or a position was loaded: see `EpochState.passes`."""
        self.ended = False
        """Whether its last batch was handed out."""
        self.interrupted = False
        """Whether it was left by `break` while it was trained on."""
        self.sampler_start: Any = None
        """The state of a user's own sampler when it began; see `data/sampler_state.py`."""
        self.order: Any = None
        """What was drawn of its order."""
        self.gathered = False
        """Whether `gather_for_metrics` was called for one of its batches: then what is gathered after its end is not its results."""
        self.rows: dict[tuple[str, int], tuple[int, ...]] = {}
        """By line of the script and number of the leaf: how many rows each rank gathered of a full batch."""
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
        """Record the batch that is handed out next."""
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

    def note_shares(self, shares: BatchShares | None) -> None:
        """Record that the next batch is shared in another way than the one before."""
        if len(self.record) >= _MAX_RECORD:  # an endless stream of batches of all sizes
            self.recording = False
            self.record.clear()
        if self.recording:
            self.record.append((self.handed, shares))

    def position(self, stride: int, *, aligned: bool) -> int:
        """Return the position after what was worked on, where a full batch is `stride` long; the last batch may have been a short one."""
        done = self.done
        if not done:
            return self.start
        before = self.start - (self.start % stride if aligned else 0) + (done - 1) * stride
        shares = self.record[-1][1] if self.ended and self.record and done == self.handed else None
        if shares is None or stride == 1:
            return before + stride
        if not aligned:
            return before + stride - sum(not count for count in shares.real)
        return max(before, self.start) + min(stride, shares.total)

    def after(self, last: MicroBatch | None) -> MicroBatch | None:
        """Return the batch that is worked on next after `last`; `last` itself if there is none."""
        number = last.number if last is not None and last.loader_pass is self else 0
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

    @property
    def is_unfinished(self) -> bool:
        """Whether a batch of it is still being worked on, though it was read further."""
        return self.done != self.handed and any(batch.number == self.worked and batch.anchor() is not None for batch in self.unread)

    def repeated(self, last: MicroBatch) -> MicroBatch | None:
        """Return the first batch of another round over batches that were all kept (`list(loader)`), after one that ended with `last`."""
        kept = list(self.unread)
        if last is not kept[-1] or len(kept) != self.handed or len(kept) < 2 or any(batch.anchor() is None for batch in kept):
            return None
        again = LoaderPass(self.epoch, self.start, self.begun_at, inside=self.inside)
        again.loader, again.handed, again.sequence = self.loader, self.handed, self.sequence
        again.unread.extend(
            MicroBatch(again, batch.number, batch.end, batch.left, batch.shares, batch.steps, batch.anchor) for batch in kept
        )
        again.batch = again.unread[-1]
        return again.unread[0]


def anchor_of(batch: Any) -> Callable[[], Any]:
    """Return a weak reference to the first thing in a batch that can have one; one to nothing for text and numbers.

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
        return type(None)


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


class MetricsState:
    """Which results `gather_for_metrics` may be given: of the present batch, of a pass that has ended, or of inputs that were split."""

    def __init__(self) -> None:
        self.warned: set[str] = set()
        """Keys of the messages that were given."""
        self.sample_lists: set[tuple[str, tuple[str, ...]]] = set()
        """Which lists hold one entry per sample: the line that gathers them, and their place in what it gathers."""
        self.count_updates: Callable[[], int] = int
        """Returns how many updates were made, by all optimizers together."""
        self.finished_pass: LoaderPass | None = None
        """The pass that was read to its end last, until another one begins."""
        self._finished_updates = 0
        """How many updates were made when it ended; -1 once inputs were split after it."""
        self._finished_in: tuple[weakref.ref[LoaderPass], int] | None = None
        """The pass around the finished one, and what it had handed out then."""
        self._split_in: tuple[weakref.ref[Any], int] | None = None
        """In which batch of which loader inputs were split between the processes last."""

    def end_pass(self, finished: LoaderPass, around: LoaderPass | None) -> None:
        """Record that a pass was read to its end, inside of another one."""
        self.finished_pass, self._finished_updates = finished, self.count_updates()
        self._finished_in = None if around is None else (weakref.ref(around), around.handed)

    @property
    def finished(self) -> Any:
        """The loader that was read to its end last, for results that are gathered after the loop; None where there is none.

        It counts until another loader begins, inputs are split, an update is made, or the loader around it hands out another batch.
        """
        finished = self.finished_pass
        if finished is None or self.count_updates() != self._finished_updates:
            return None
        outer, handed = (None, 0) if self._finished_in is None else (self._finished_in[0](), self._finished_in[1])
        return finished.loader() if outer is None or outer.handed == handed else None

    def note_split(self, active: ActiveLoader | None) -> None:
        """Record that inputs are split between the processes inside of the present batch of the active loader.

        Results that are gathered from now on are those of the inputs, and not of a loader that was read before.
        """
        self._finished_updates = -1
        self._split_in = None if active is None else (weakref.ref(active), active.handed)

    def has_split(self, active: ActiveLoader | None) -> bool:
        """Return whether inputs were split between the processes inside of the present batch of the active loader."""
        if active is None or self._split_in is None:
            return False
        loader, handed = self._split_in
        return handed == active.handed and loader() is active

    def forget(self) -> None:
        """Drop what would keep a loader alive."""
        self.finished_pass = self._finished_in = None


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
        """Where loops on this state mark what they are doing; see `observability/timing/`."""
        self.trained = 0
        """How many `accumulate` blocks and backward passes have begun: two equal readings mean that nothing was trained in between."""
        self.metrics = MetricsState()
        self.batch: MicroBatch | None = None
        """The batch of the `accumulate` block that is being run."""
        self.passes = 0
        """How many passes were read to their end."""
        self.only_pass: LoaderPass | None = None
        """The pass under way, where it is the only one."""
        self._stack: list[LoaderPass] = []
        self._sequence = count()
        self._kept: LoaderPass | None = None
        """The pass that ended or was left last, whose batches may have been kept."""

    @staticmethod
    def _reset_state() -> None:
        """Do nothing: objects of this class share nothing. Tests of scripts call it."""

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
        return [loader for loader in (loader_pass.loader() for loader_pass in self._stack) if loader is not None]

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

    def position(self) -> tuple[weakref.ref[LoaderPass], int] | None:
        """Return the innermost pass under way and the number of its present batch; None outside of passes."""
        if not self._stack or not self._stack[-1].handed:
            return None
        return weakref.ref(self._stack[-1]), self._stack[-1].handed

    def pacing(self) -> ActiveLoader | None:
        """Return the loader that sets the pace of updates, as far as one is being read; see `pacing_pass`."""
        loader_pass = self.pacing_pass()
        loader: ActiveLoader | None = None if loader_pass is None else loader_pass.loader()
        return loader

    def pacing_pass(self) -> LoaderPass | None:
        """Return the pass whose end closes an update: the innermost one that is read inside of one batch of the passes around it.

        A pass that was asked for before its neighbour handed out a batch (`zip(loader, second)`), or that has outlived the batch in which
        it was asked for (a second source of data, begun anew as often as it ends), is read beside it and does not set the pace; nor do
        later passes over its loader.
        """
        stack = self._stack
        if not self.nested:
            return stack[-1] if stack else None
        leading = [loader_pass for loader_pass in stack if not self._is_beside(loader_pass)] or stack
        for place in range(len(leading) - 1, 0, -1):
            inner, outer = leading[place], leading[place - 1]
            if inner.inside is not None and inner.inside[0]() is outer:
                if inner.inside[1] == outer.handed:
                    return inner
                _mark_beside(inner, outer)
        return leading[0]

    def _is_beside(self, loader_pass: LoaderPass) -> bool:
        """Return whether a pass is read beside another one that is under way, by what is known of their loaders."""
        loader = loader_pass.loader()
        neighbour = None if loader is None or loader.beside is None else loader.beside()
        return neighbour is not None and any(other.loader() is neighbour for other in self._stack)

    def batch_after(self, last: MicroBatch | None) -> MicroBatch | None:
        """Return the batch that the work which begins now belongs to; None without a loader.

        `last` is the batch that was worked on before. It is given back while no other one can be meant: another piece of it.
        """
        loader_pass = self.pacing_pass() if not self.nested else self._newest(last) or self.pacing_pass()
        if loader_pass is not None:
            current = loader_pass.batch
            return current if current is None or len(loader_pass.unread) < 2 else loader_pass.after(last)
        kept = self._kept
        if last is not None:
            following = last.loader_pass.after(last)
            if following is not last:
                return following if following is not None and following.anchor() is not None else None
            if kept is None or kept is last.loader_pass:
                if kept is self.metrics.finished_pass:
                    return last.loader_pass.repeated(last)
                return last if last.anchor() is not None else None
        first = kept.unread[0] if kept is not None and kept.unread else None
        return first if first is not None and first.number == 1 and first.anchor() is not None else None

    def _newest(self, last: MicroBatch | None) -> LoaderPass | None:
        """Return the only pass that handed out a batch since the last work; None where there are several, or none.

        Loaders that are taken in turns (tasks that alternate) are told from those that are read together for one batch of work.
        """
        since = -1 if last is None else last.sequence
        new = [loader_pass for loader_pass in self._stack if loader_pass.batch is not None and loader_pass.batch.sequence > since]
        pacing = self.pacing_pass() if len(new) > 1 else None
        if pacing is not None and pacing.inside is None:
            for loader_pass in new:
                if loader_pass is not pacing and loader_pass.inside is None:
                    _mark_beside(loader_pass, pacing)
        return new[0] if len(new) == 1 else None

    def is_inside(self, is_meant: Callable[[Any], bool]) -> bool:
        """Return whether a loader is read inside of one batch of another, as in an evaluation: a run that is resumed begins it anew.

        One that is read beside another is not. After a single batch the two look alike: then it is inside if the loader around it was
        trained on before it began, and it was not.
        """
        loaders = [loader_pass.loader() for loader_pass in self._stack]
        place = next((place for place, loader in enumerate(loaders) if loader is not None and is_meant(loader)), 0)  # the outermost
        if not place:
            return False
        outer, inner = self._stack[place - 1], self._stack[place]
        if inner.inside is None or inner.inside[0]() is not outer or inner.inside[1] != outer.handed:
            return False
        return inner.handed > 1 or outer.trained_at < inner.trained_at == self.trained

    def enter(self, loader_pass: LoaderPass, loader: Any) -> None:
        """Begin a pass over a loader."""
        loader_pass.loader, loader_pass.trained_at, loader_pass.sequence = weakref.ref(loader), self.trained, self._sequence
        self._stack.append(loader_pass)
        self.active, self.nested = loader, len(self._stack) > 1
        self.only_pass = None if self.nested else loader_pass
        self.metrics.finished_pass = None

    def leave(self, loader_pass: LoaderPass, *, exhausted: bool) -> None:
        """End a pass: at the end of its loader, by `break` or by an exception."""
        if loader_pass in self._stack:
            self._stack.remove(loader_pass)
        for inner, outer in [(other, loader_pass) for other in self._stack] + [(loader_pass, other) for other in self._stack]:
            if inner.inside is not None and inner.inside[0]() is outer and (outer is loader_pass or inner.inside[1] != outer.handed):
                _mark_beside(inner, outer)
        self._stack = [other for other in self._stack if other.loader() is not None]
        innermost = self._stack[-1] if self._stack else None
        self.active, self.nested = None if innermost is None else innermost.loader(), len(self._stack) > 1
        self.only_pass = None if self.nested else innermost
        self._kept = loader_pass
        if exhausted:
            self.passes += 1
            self.metrics.end_pass(loader_pass, innermost)
        elif self.metrics.finished_pass is loader_pass:
            self.metrics.finished_pass = None

    def forget(self) -> None:
        """Drop every loader: nothing here keeps one alive afterwards."""
        self._stack, self.active, self.only_pass, self.batch, self._kept = [], None, None, None, None
        self.metrics.forget()
        self.sync_gradients, self.nested = True, False


def _mark_beside(inner: LoaderPass, outer: LoaderPass) -> None:
    """Record that a loader is read beside another: it outlived the batch that it was asked for in, and may begin again in any other."""
    loader, neighbour = inner.loader(), outer.loader()
    if loader is None or neighbour is None or loader is neighbour:
        return
    if neighbour.beside is None or neighbour.beside() is not loader:  # else it is the neighbour that does not set the pace
        loader.beside = outer.loader
