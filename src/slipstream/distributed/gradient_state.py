"""`GradientState`: which batch of which loader the loop works on, and whether it ends an update.

Each Accelerator has one. A prepared loader enters a `LoaderPass` when an iteration begins, records a `MicroBatch` for every batch that it
hands out, and leaves when the iteration ends; loaders nest. `batch_after` returns the batch that new work belongs to: in a plain loop the
batch handed out last, and after reading ahead the oldest batch that is alive and was not trained on. `MetricsState` is the part that
`gather_for_metrics` needs. The module is in this package because data, training and observability use it.
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
    """How one global batch was shared between the ranks, if not as the same full batch for each.

    >>> BatchShares(given=(2, 1), real=(2, 0), weighed=True, full=4).counted
    (2, 0)
    """

    given: tuple[int, ...]
    """Samples that each rank was handed."""
    real: tuple[int, ...]
    """How many of them are samples of this batch; the others are repeated samples, also for a rank that has none left."""
    weighed: bool
    """Whether losses are weighted by `real`, so that repeated samples do not count; otherwise they count in full."""
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
    """One batch that a loader handed out. Batches are compared by identity."""

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
        """How many follow; None if unknown."""
        self.shares = shares
        """How it was shared; None if every rank has a full share and every sample counts."""
        self.steps = steps
        """Batches per update that its loader asks for (`effective_batch_size`); None for the usual number."""
        self.anchor: Callable[[], Any] = anchor
        """A weak reference to one of its tensors: dead once the script has dropped the batch."""


class LoaderPass:
    """One iteration over a loader: where it began, which batches it handed out, and which of them were trained on."""

    __slots__ = (
        "__weakref__", "batch", "begun_at", "enclosing_passes", "ended", "epoch", "gathered", "handed", "inside", "interrupted",
        "kept_at", "late", "loader", "order", "prune_at", "record", "recording", "resumed", "rows", "sampler_start", "seen", "sequence",
        "start", "trained", "trained_at", "unread", "worked",
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
        """Position in the epoch's order where it began, in samples (or in whole batches, for plans that share those)."""
        self.begun_at = begun_at
        """The same in batches: how many batches of this epoch each rank got before."""
        self.resumed = resumed
        """Whether it continues at a loaded position."""
        self.trained = trained
        """`GradientState.trained` when the iterator was made."""
        self.inside = inside
        """The pass over another loader in which this one was created, and the number of its batch then."""
        self.record: list[tuple[int, BatchShares | None]] = []
        """Where the shares changed: (batches handed out before, shares from there on); it begins with None."""
        self.recording = True
        self.enclosing_passes: tuple[tuple[LoaderPass, int], ...] = ()
        """The unfinished passes over the same loader when it began, and how many batches they had handed out."""
        self.kept_at: int | None = None
        """How many batches it had handed out when a later pass was trained on, or a position was loaded; see `EpochState.passes`."""
        self.ended = False
        """Whether its last batch was handed out."""
        self.interrupted = False
        """Whether it was left by `break` while it was trained on."""
        self.sampler_start: Any = None
        """The state of a custom sampler when it began; see `data/sampler_state.py`."""
        self.order: Any = None
        """The record of its drawn order."""
        self.gathered = False
        """Whether `gather_for_metrics` was called for one of its batches; then data gathered after its end is not its results."""
        self.rows: dict[tuple[str, int], tuple[int, ...]] = {}
        """How many rows each rank gathered for a full batch, by call site and number of the leaf."""
        self.batch: MicroBatch | None = None
        """The batch handed out last."""
        self.handed = 0
        """Batches handed out."""
        self.unread: deque[MicroBatch] = deque()
        """The batches that may still be alive, oldest first; the last one is `batch`."""
        self.prune_at = _MIN_KEPT_BATCHES
        """The length of `unread` at which dead batches are removed."""
        self.loader: Any = None
        """A weak reference to the loader."""
        self.sequence: Iterator[int] = count()
        """Numbers the batches of all loaders of a `GradientState`."""
        self.worked = 0
        """The number of the batch that was trained on last; 0 before the first."""
        self.late = False
        """Whether training began with a later batch than the first, because earlier ones were skipped or replaced."""
        self.seen = 0
        """The newest batch handed out when training on an earlier one began."""
        self.trained_at = 0
        """`GradientState.trained` when its first batch was asked for."""

    def hand_out(self, batch: Any, end: bool, left: int | None, shares: BatchShares | None, steps: int | None) -> MicroBatch:
        """Record the batch that is handed out next."""
        self.handed = number = self.handed + 1
        micro_batch = self.batch = MicroBatch(self, number, end, left, shares, steps, anchor_of(batch))
        unread = self.unread
        while unread and unread[0].anchor() is None:
            unread.popleft()
        if len(unread) >= self.prune_at:  # a batch that the script keeps must not keep the records of all that follow
            alive = [earlier for earlier in unread if earlier.anchor() is not None]
            unread.clear()
            unread.extend(alive)
            self.prune_at = 2 * len(alive) + _MIN_KEPT_BATCHES
        unread.append(micro_batch)
        return micro_batch

    def record_shares(self, shares: BatchShares | None) -> None:
        """Record that the next batch is shared differently from the one before."""
        if len(self.record) >= _MAX_RECORD:  # an endless stream of batches of all sizes
            self.recording = False
            self.record.clear()
        if self.recording:
            self.record.append((self.handed, shares))

    def position(self, stride: int, *, aligned: bool) -> int:
        """Return the position after the batches that were trained on; a full batch is `stride` long, the last one may be shorter."""
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
        """Return the batch to train on after `last`; `last` itself if there is none."""
        number = last.number if last is not None and last.loader_pass is self else 0
        current = self.batch
        loader = None if self.loader is None else self.loader()
        if current is None or (loader is not None and loader.reads_ahead_in_groups):
            return current
        for micro_batch in self.unread:
            if micro_batch.number > number and (micro_batch is current or micro_batch.anchor() is not None):
                break
        else:
            return current if number == 0 else last
        if loader is not None and number and micro_batch.number > number + 1 and self.seen > number:
            loader.reads_ahead_in_groups = True  # waiting batches are gone: several were used together
            return current
        self.seen = current.number
        return micro_batch

    @property
    def done(self) -> int:
        """How many batches were trained on, if the rest still waits; otherwise how many were handed out."""
        waiting = [batch for batch in self.unread if batch.number > self.worked and batch.anchor() is not None]
        loader = None if self.loader is None else self.loader()
        if not self.worked or (loader is not None and loader.reads_ahead_in_groups) or len(waiting) < self.handed - self.worked:
            return self.handed
        return self.worked

    @property
    def is_unfinished(self) -> bool:
        """Whether it was read further than the batch that is being trained on."""
        return self.done != self.handed and any(batch.number == self.worked and batch.anchor() is not None for batch in self.unread)

    def repeated(self, last: MicroBatch) -> MicroBatch | None:
        """Return the first batch of another round over kept batches (`list(loader)`), after a round that ended with `last`."""
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
    """Return a weak reference to the first object in a batch that supports one; for text and numbers, a dead one.

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
    if not hasattr(type(batch), "__torch_function__"):  # usually a batch begins with a tensor
        while isinstance(batch, list | tuple | Mapping):
            batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch), None)
    try:
        return weakref.ref(batch)
    except TypeError:  # text, numbers
        return type(None)


class ActiveLoader(Protocol):
    """What a loader says about the batch that it handed out last."""

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

    reads_ahead_in_groups: bool
    """Whether the script trains on several of its batches at once."""
    paired_loader: Any
    """A weak reference to the loader beside which this one is read, as in `zip`; or None."""

    @property
    def steps_per_update(self) -> int | None:
        """Batches per update that this loader asks for (`effective_batch_size`); None for the usual number."""


class MetricsState:
    """Which results `gather_for_metrics` may get: of the current batch, of a finished pass, or of inputs that were split."""

    def __init__(self) -> None:
        self.warned: set[str] = set()
        """Keys of the messages that were logged."""
        self.sample_lists: set[tuple[str, tuple[str, ...]]] = set()
        """Which lists have one entry per sample: by call site, and path in the gathered data."""
        self.count_updates: Callable[[], int] = int
        """Returns how many updates were made, by all optimizers together."""
        self.finished_pass: LoaderPass | None = None
        """The last finished pass, until another one begins."""
        self._finished_updates = 0
        """How many updates had been made when it ended; -1 after inputs were split."""
        self._finished_in: tuple[weakref.ref[LoaderPass], int] | None = None
        """The pass around the finished one, and how many batches it had handed out then."""
        self._split_in: tuple[weakref.ref[Any], int] | None = None
        """In which batch of which loader inputs were split between the processes last."""

    def end_pass(self, finished: LoaderPass, around: LoaderPass | None) -> None:
        """Record that a pass was read to its end, inside another one."""
        self.finished_pass, self._finished_updates = finished, self.count_updates()
        self._finished_in = None if around is None else (weakref.ref(around), around.handed)

    @property
    def finished(self) -> Any:
        """The loader of the last finished pass, for results that are gathered after the loop; or None.

        It is valid until another loader begins, inputs are split, an update is made, or the loader around it hands out another batch.
        """
        finished = self.finished_pass
        if finished is None or self.count_updates() != self._finished_updates:
            return None
        outer, handed = (None, 0) if self._finished_in is None else (self._finished_in[0](), self._finished_in[1])
        return finished.loader() if outer is None or outer.handed == handed else None

    def record_split(self, active: ActiveLoader | None) -> None:
        """Record that inputs are split between the processes inside the present batch of the active loader.

        Results that are gathered from now on are those of the inputs, and not of a loader that was read before.
        """
        self._finished_updates = -1
        self._split_in = None if active is None else (weakref.ref(active), active.handed)

    def has_split(self, active: ActiveLoader | None) -> bool:
        """Return whether inputs were split between the processes inside the present batch of the active loader."""
        if active is None or self._split_in is None:
            return False
        loader, handed = self._split_in
        return handed == active.handed and loader() is active

    def forget(self) -> None:
        """Drop all references to loaders."""
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
        self.reads_loaders = False
        """Whether a prepared loader was ever read: without, there is no batch to find."""
        self.meter: Meter | None = None
        """The meter that records the phases of steps; see `observability/timing/`."""
        self.trained = 0
        """How many `accumulate` blocks and backward passes have begun; equal values mean that nothing was trained in between."""
        self.metrics = MetricsState()
        self.batch: MicroBatch | None = None
        """The batch of the `accumulate` block that is being run."""
        self.passes = 0
        """How many passes were read to their end."""
        self.only_pass: LoaderPass | None = None
        """The unfinished pass, if there is exactly one."""
        self._stack: list[LoaderPass] = []
        self._sequence = count()
        self._kept: LoaderPass | None = None
        """The pass that ended last; the script may have kept its batches."""

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
        """Return the loader that determines where updates end, if one is being read; see `pacing_pass`."""
        loader_pass = self.pacing_pass()
        loader: ActiveLoader | None = None if loader_pass is None else loader_pass.loader()
        return loader

    def pacing_pass(self) -> LoaderPass | None:
        """Return the pass whose end closes an update: the innermost one that is read inside one batch of the passes around it.

        A pass that was asked for before its neighbour handed out a batch (`zip(loader, second)`), or that has outlived the batch in which
        it was asked for (a second source of data, begun anew as often as it ends), is read beside it and does not set the pace; nor do
        later passes over its loader.
        """
        stack = self._stack
        if not self.nested:
            return stack[-1] if stack else None
        leading = [loader_pass for loader_pass in stack if not self._is_paired(loader_pass)] or stack
        for place in range(len(leading) - 1, 0, -1):
            inner, outer = leading[place], leading[place - 1]
            if inner.inside is not None and inner.inside[0]() is outer:
                if inner.inside[1] == outer.handed:
                    return inner
                _pair_loaders(inner, outer)
        return leading[0]

    def _is_paired(self, loader_pass: LoaderPass) -> bool:
        """Return whether a pass is read beside another one that is under way, by what is known of their loaders."""
        loader = loader_pass.loader()
        neighbour = None if loader is None or loader.paired_loader is None else loader.paired_loader()
        return neighbour is not None and any(other.loader() is neighbour for other in self._stack)

    def batch_after(self, last: MicroBatch | None) -> MicroBatch | None:
        """Return the batch that the work which begins now belongs to; None without a loader.

        `last` is the batch of the work before. It is returned again if no other batch is possible: another micro-batch of it.
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
        """Return the only pass that handed out a batch since the last work; None if there are several, or none.

        This distinguishes loaders that alternate (tasks in turns) from loaders that are read together for one batch of work.
        """
        since = -1 if last is None else last.sequence
        new = [loader_pass for loader_pass in self._stack if loader_pass.batch is not None and loader_pass.batch.sequence > since]
        pacing = self.pacing_pass() if len(new) > 1 else None
        if pacing is not None and pacing.inside is None:
            for loader_pass in new:
                if loader_pass is not pacing and loader_pass.inside is None:
                    _pair_loaders(loader_pass, pacing)
        return new[0] if len(new) == 1 else None

    def is_inside(self, is_meant: Callable[[Any], bool]) -> bool:
        """Return whether a loader is read inside one batch of another, as in an evaluation: a run that is resumed begins it anew.

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
        self.active, self.nested, self.reads_loaders = loader, len(self._stack) > 1, True
        self.only_pass = None if self.nested else loader_pass
        self.metrics.finished_pass = None

    def leave(self, loader_pass: LoaderPass, *, exhausted: bool) -> None:
        """End a pass: at the end of its loader, by `break` or by an exception."""
        if loader_pass in self._stack:
            self._stack.remove(loader_pass)
        for inner, outer in [(other, loader_pass) for other in self._stack] + [(loader_pass, other) for other in self._stack]:
            if inner.inside is not None and inner.inside[0]() is outer and (outer is loader_pass or inner.inside[1] != outer.handed):
                _pair_loaders(inner, outer)
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
        """Drop all references to loaders."""
        self._stack, self.active, self.only_pass, self.batch, self._kept = [], None, None, None, None
        self.metrics.forget()
        self.sync_gradients, self.nested = True, False


def _pair_loaders(inner: LoaderPass, outer: LoaderPass) -> None:
    """Record that a loader is read beside another: it outlived the batch that it was asked for in, and may begin again in any other."""
    loader, neighbour = inner.loader(), outer.loader()
    if loader is None or neighbour is None or loader is neighbour:
        return
    if neighbour.paired_loader is None or neighbour.paired_loader() is not loader:  # otherwise the neighbour is the paired one
        loader.paired_loader = outer.loader
