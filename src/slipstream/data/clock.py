"""Which epoch comes next, and where the passes over a loader stand: shared by a prepared loader and its skipping copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slipstream.runtime.gradient_state import Reading, Shares

__all__ = ["Clock", "Loaded", "Pass", "Start"]

_LONGEST_RECORD = 200_000


class Pass(Reading):
    """One iteration over a loader: what it handed out so far."""

    __slots__ = (
        "around", "begin", "begun_at", "ended", "epoch", "gathered", "interrupted", "kept_at", "order", "record", "recording", "resumed",
        "rows", "start", "trained",
    )  # fmt: skip

    def __init__(
        self, epoch: int, start: int, begun_at: int, *, resumed: bool = False, trained: int = 0, inside: Any = None
    ) -> None:
        super().__init__(inside)
        self.epoch = epoch
        self.start = start
        """Position in the epoch's order where it began, in samples (or whole batches, where those are dealt out)."""
        self.begun_at = begun_at
        """The same, in batches: how many each rank was handed of this epoch before."""
        self.record: list[tuple[int, Shares | None]] = []
        """Where the way of sharing changed: (batches handed out before, shares from there on); it begins with None."""
        self.recording = True
        self.resumed = resumed
        """Whether it continues inside of an epoch, at a position that was loaded."""
        self.trained = trained
        """`GradientState.trained` when it began."""
        self.around: tuple[tuple[Pass, int], ...] = ()
        """The passes under way when it began, and what they had handed out."""
        self.kept_at: int | None = None
        """What it had handed out when a later pass was trained on, or a position was loaded: see `Clock.passes`."""
        self.ended = False
        """Whether its last batch was handed out."""
        self.interrupted = False
        """Whether it was left by `break` while it was trained on."""
        self.begin: Any = None
        """What a sampler of the user's own held when it began; see `ordering.py`."""
        self.order: Any = None
        """What was drawn of its order."""
        self.gathered = False
        """Whether `gather_for_metrics` was called for one of its batches: then what is gathered after its end is not its results."""
        self.rows: dict[tuple[str, int], tuple[int, ...]] = {}
        """By line of the script and number of the leaf: how many rows each rank gathered of a full batch."""

    def note(self, shares: Shares | None) -> None:
        """The next batch is shared in another way than the one before."""
        if len(self.record) >= _LONGEST_RECORD:  # an endless stream of batches of all sizes
            self.recording = False
            self.record.clear()
        if self.recording:
            self.record.append((self.handed, shares))


@dataclass(frozen=True)
class Loaded:
    """A position that was loaded."""

    epoch: int
    batches: int
    samples: int
    left: bool
    """Whether that pass was left, so that the next one is another epoch."""
    ended: bool
    """Whether all of it was handed out: nothing has to be read to find that."""
    extra: dict[str, Any]
    """What the position needs besides numbers: the state of a sampler, of a dataset."""
    interrupted: bool = False
    """Whether it was left by `break` while it was trained on."""
    untrained: bool = False
    """Whether nothing was trained from the beginning of that pass to the save."""


@dataclass(frozen=True)
class Start:
    """Where a pass begins."""

    epoch: int
    batches: int
    """How many batches of the epoch come before, as the script counts them."""
    samples: int | None = None
    """The position in the epoch's order; None where only `batches` tells it."""
    earlier: Pass | None = None
    """The pass of this process that it continues."""
    loaded: bool = False
    """Whether it begins at the position that was loaded."""
    given_up: Loaded | None = None
    """The loaded position that this one replaces."""


class Clock:
    """Counts epochs: every pass takes the next one, whether the one before was read to its end or not.

    >>> clock = Clock()
    >>> epochs = []
    >>> for _ in range(3):
    ...     epochs.append(clock.following().epoch)
    ...     clock.take(clock.following())
    >>> epochs
    [0, 1, 2]
    >>> _ = clock.set(1)
    >>> clock.following().epoch
    1
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        """The seed of the order; that of the saved run after a position was loaded."""
        self.next = 0
        """The epoch of the next pass."""
        self.resume = 0
        """The position where the next pass begins, after a position was loaded."""
        self.live: list[Pass] = []
        """The passes under way, outermost first."""
        self.left: Pass | None = None
        """The pass that began last, if it was left before its end."""
        self.loaded: Loaded | None = None
        """The position that was loaded last."""
        self.waits = False
        """Whether no pass began since."""
        self.continues = False
        """Whether the next pass begins at the loaded position; else `skip_first_batches` has to lead there."""
        self.trained = 0
        """`GradientState.trained` when the position was loaded."""

    def __getstate__(self) -> dict[str, Any]:
        """Without passes and without `trained`: a copy has begun nothing and trained nothing."""
        return {name: getattr(self, name) for name in ("seed", "next", "resume", "loaded", "waits", "continues")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def load(self, position: Loaded, *, resume: bool, trained: int = 0) -> None:
        """The next pass is that of a saved position (or the one after it, if that was over); with `resume` it begins there."""
        self.next, self.resume = position.epoch + position.left, 0 if position.left or not resume else position.samples
        self.left = Pass(position.epoch, position.samples, position.batches) if position.left else None
        self.loaded, self.waits, self.continues, self.trained = position, True, resume and not position.left, trained
        for turn in self.live:  # it does not say where the loader stands, unless it is read on
            turn.kept_at = turn.handed

    def set(self, epoch: int) -> int:
        """The next pass is that epoch; a position that was loaded for it is kept. How many samples of another one were given up."""
        lost = self.resume if epoch != self.next else 0
        if epoch != self.next:
            self.next, self.resume, self.waits = epoch, 0, False
        self.left = None
        return lost

    def following(self, trained: int = 0) -> Start:
        """Where the next pass begins if nothing is skipped; `trained` is what `GradientState.trained` is now.

        A pass that was saved without anything being trained in it, and that another loader is trained on before, was an evaluation:
        what was computed of it went with the process that saved, so it begins anew.
        """
        loaded = self.loaded
        if not self.resume or loaded is None:
            return Start(self.next, 0, 0)
        if loaded.untrained and trained != self.trained:
            return Start(self.next + 1, 0, 0, given_up=loaded)
        return Start(self.next, loaded.batches, self.resume, loaded=True)

    def after(self, batches: int, is_over: Callable[[Loaded], bool]) -> Start:
        """Where a pass begins that skips so many batches.

        A position that was loaded and not read yet says which epoch is meant; the number is counted from the start of that epoch, not
        from the position. Without one, it is the epoch that is being read, or was left after at least so many batches; else the next.
        `is_over` tells whether nothing of its epoch is left at a position: then the epoch after it is meant, unless the number is that
        of the position itself.
        """
        loaded = self.loaded
        if loaded is not None and self.waits and self.continues:
            if batches == loaded.batches:
                return Start(loaded.epoch, batches, loaded.samples, loaded=loaded.samples > 0)
            over = is_over(loaded)
            return Start(loaded.epoch + over, batches, given_up=None if over and not batches else loaded)
        live = self.passes()
        present = live[-1] if live else self.left
        if present is None or not 0 < batches <= present.begun_at + present.handed:
            return Start(self.next, batches, self._place_of(self.next, batches))
        return Start(present.epoch, batches, self._place_of(present.epoch, batches), present)

    def take(self, start: Start) -> None:
        """A pass begins there."""
        self.next, self.resume, self.left, self.waits = max(self.next, start.epoch + 1), 0, None, False

    def passes(self, trained: int | None = None) -> list[Pass]:
        """The passes that the script is reading, outermost first; `trained` is what `GradientState.trained` is now.

        One that has stood still since a position was loaded, or while a later one was trained on, is not among them: the script is about
        to leave it, or looked at a batch and kept the iterator.
        """
        for turn in self.live:
            if trained is not None and turn.trained != trained:
                self.note_trained(turn)
        return [turn for turn in self.live if turn.kept_at != turn.handed]

    def note_trained(self, turn: Pass) -> None:
        """A pass was trained on: those around it that have not moved since are not being read."""
        for outer, handed in turn.around:
            if outer.handed == handed:
                outer.kept_at = handed

    def is_at_end(self, epoch: int, start: int) -> bool:
        """Whether a saved pass had handed out everything at this position."""
        loaded = self.loaded
        return loaded is not None and loaded.ended and (loaded.epoch, loaded.samples) == (epoch, start)

    def _place_of(self, epoch: int, batches: int) -> int | None:
        """The position in samples of a place that was loaded: on another number of processes, batches are of another size."""
        loaded = self.loaded
        return loaded.samples if loaded is not None and (loaded.epoch, loaded.batches) == (epoch, batches) else None
