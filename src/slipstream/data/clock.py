"""Which epoch comes next, and where the passes over a loader stand: shared by a prepared loader and its skipping copies."""

from __future__ import annotations

from slipstream.runtime.gradient_state import Shares

__all__ = ["Clock", "Pass"]

_LONGEST_RECORD = 200_000


class Pass:
    """One iteration over a loader: what it handed out so far."""

    __slots__ = ("begun_at", "epoch", "handed", "record", "recording", "start")

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

    def note(self, shares: Shares | None) -> None:
        """The next batch is shared in another way than the one before."""
        if len(self.record) >= _LONGEST_RECORD:  # an endless stream of batches of all sizes
            self.recording = False
            self.record.clear()
        if self.recording:
            self.record.append((self.handed, shares))


class Clock:
    """Counts epochs: every pass takes the next one, whether the one before was read to its end or not.

    >>> clock = Clock()
    >>> [clock.take()[0] for _ in range(3)]
    [0, 1, 2]
    >>> clock.set(1)
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

    def __getstate__(self) -> dict[str, int]:
        return {"next": self.next, "resume": self.resume}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__()  # type: ignore[misc]
        self.next, self.resume = state["next"], state["resume"]

    def set(self, epoch: int) -> None:
        """The next pass is that epoch; a position that was loaded for it is kept."""
        if epoch != self.next:
            self.next, self.resume = epoch, 0
        self.left = None

    def take(self) -> tuple[int, int]:
        """Epoch and position of the next pass."""
        epoch, start = self.next, self.resume
        self.next, self.resume, self.left = epoch + 1, 0, None
        return epoch, start

    def take_present(self, batches: int) -> int:
        """The epoch for a pass that begins after so many batches: the one that is being read, or was left there; else the next."""
        present = self.live[-1] if self.live else self.left
        if present is None or not 0 < batches <= present.begun_at + present.handed:
            return self.take()[0]
        self.next, self.resume, self.left = max(self.next, present.epoch + 1), 0, None
        return present.epoch
