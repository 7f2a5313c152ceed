"""Which epoch comes next, and where the passes over a loader stand: shared by a prepared loader and its skipping copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.runtime.gradient_state import Shares

__all__ = ["Clock", "Loaded", "Pass"]

_LONGEST_RECORD = 200_000


class Pass:
    """One iteration over a loader: what it handed out so far."""

    __slots__ = ("begin", "begun_at", "ended", "epoch", "handed", "order", "record", "recording", "resumed", "start")

    def __init__(self, epoch: int, start: int, begun_at: int) -> None:
        self.epoch = epoch
        self.start = start
        """Position in the epoch's order where it began, in samples (or whole batches, where those are dealt out)."""
        self.begun_at = begun_at
        """The same, in batches."""
        self.handed = 0
        """Batches handed out."""
        self.record: list[tuple[int, Shares | None]] = []
        """Where the way of sharing changed: (batches handed out before, shares from there on); it begins with None."""
        self.recording = True
        self.resumed = False
        """Whether it goes on at a position that was loaded."""
        self.ended = False
        """Whether its last batch was handed out."""
        self.begin: Any = None
        """What a sampler of the user's own held when it began; see `ordering.py`."""
        self.order: Any = None
        """What was drawn of its order."""

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


class Clock:
    """Counts epochs: every pass takes the next one, whether the one before was read to its end or not.

    >>> clock = Clock()
    >>> [clock.take()[0] for _ in range(3)]
    [0, 1, 2]
    >>> _ = clock.set(1)
    >>> clock.take()
    (1, 0)
    """

    def __init__(self) -> None:
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

    def __getstate__(self) -> dict[str, Any]:
        return {"next": self.next, "resume": self.resume, "loaded": self.loaded, "waits": self.waits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def load(self, position: Loaded, *, resume: bool) -> None:
        """The next pass is that of a saved position (or the one after it, if that was over); with `resume` it begins there."""
        self.next, self.resume = position.epoch + position.left, 0 if position.left or not resume else position.samples
        self.left = Pass(position.epoch, position.samples, position.batches) if position.left else None
        self.loaded, self.waits = position, True

    def set(self, epoch: int) -> int:
        """The next pass is that epoch; a position that was loaded for it is kept. How many samples of another one were given up."""
        lost = self.resume if epoch != self.next else 0
        if epoch != self.next:
            self.next, self.resume, self.waits = epoch, 0, False
        self.left = None
        return lost

    def take(self) -> tuple[int, int]:
        """Epoch and position of the next pass."""
        epoch, start = self.next, self.resume
        self.next, self.resume, self.left, self.waits = epoch + 1, 0, None, False
        return epoch, start

    def take_present(self, batches: int) -> tuple[int, Pass | None]:
        """The epoch for a pass that begins after so many batches: the one that is being read, or was left there; else the next.

        With it, the pass that it goes on with.
        """
        present = self.live[-1] if self.live else self.left
        if present is None or not 0 < batches <= present.begun_at + present.handed:
            return self.take()[0], None
        self.next, self.resume, self.left, self.waits = max(self.next, present.epoch + 1), 0, None, False
        return present.epoch, present

    def is_at_end(self, epoch: int, start: int) -> bool:
        """Whether a saved pass had handed out everything at this position."""
        loaded = self.loaded
        return loaded is not None and loaded.ended and (loaded.epoch, loaded.samples) == (epoch, start)

    def place_of(self, epoch: int, batches: int) -> int | None:
        """The position in samples of a place that was loaded: on another number of processes, batches are of another size."""
        loaded = self.loaded
        return loaded.samples if loaded is not None and (loaded.epoch, loaded.batches) == (epoch, batches) else None
