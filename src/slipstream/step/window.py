"""The window of one model: the batches whose gradients make one update. A pure state machine that knows no tensor.

A window opens with the first batch after an update and closes with its last one: after the number of batches that was asked for,
or with the loader. Gradients that are being added up carry a divisor. While the window is open that is an estimate; when it
closes, the divisor is what the window really held: its batches, its samples, or the weights that were given. Whoever runs the
backward pass is told by which factor to correct the gradients that are there already (`Change.existing`), mostly 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import StateError

__all__ = ["Change", "Window"]

_MEANS, _SUMS = "losses that are means", "losses that are sums with a weight"


@dataclass(frozen=True)
class Change:
    """What a backward pass does with the divisor."""

    divisor: float
    """What this loss is divided by."""
    existing: float
    """By what the gradients of this window that are there already are multiplied."""


_PLAIN = Change(1.0, 1.0)


class Window:
    """Which batch of an update this is.

    >>> window = Window()
    >>> [window.begin(3, end=False, left=None) for _ in range(4)]
    [False, False, True, False]
    """

    __slots__ = (
        "_batch", "_carried", "_counted", "_estimate", "_expected", "kind", "_pieces", "_total", "_usual_pieces", "closing", "index",
        "single", "touched",
    )  # fmt: skip

    def __init__(self) -> None:
        self.closing = True
        """Whether the present batch ends an update; so it does outside of windows."""
        self.index = 0
        """The number of the present batch in its window, from 1; 0 outside of windows."""
        self.touched = False
        """Whether the present batch has had its backward pass, or its update."""
        self.single = False
        """Whether the present batch is the only one of its window."""
        self._counted = False
        self._batch = self._pieces = self._usual_pieces = 0
        self._expected = 1
        self._estimate = 1.0
        self._total = 0.0
        self._carried: float | None = None
        self.kind: str | None = None

    def begin(self, steps: int, end: bool, left: int | None, batch: int = 0) -> bool:
        """The next batch begins; `end` says that it closes the window anyway, `left` how many follow. Whether it closes the window.

        `batch` is the number of the loader's batch: where one of them is cut into several, the last one closes the window when as many
        pieces of it have come as of the one before.
        """
        if batch and batch == self._batch:
            self._pieces += 1
        else:
            self._batch, self._usual_pieces, self._pieces = batch, self._pieces, 1
        if end and self._pieces < self._usual_pieces:
            end = False
        if self.closing:
            self.index, self._total, self._carried, self.kind = 1, 0.0, None, None
            self._expected = steps if left is None or left >= steps else left + 1
        else:
            self.index += 1
        self.touched = self._counted = False
        self.closing = closing = end or self.index >= steps
        self.single = closing and self.index == 1
        return closing

    def reset(self) -> None:
        """No batch has been taken in."""
        self.closing, self.single, self.index, self.touched, self._counted = True, False, 0, False, False
        self._total, self._carried, self.kind = 0.0, None, None

    def cleared(self) -> None:
        """Gradients were cleared: what was counted for them no longer counts."""
        self._total, self._carried, self.kind, self._counted = 0.0, None, None, False

    @property
    def holds_gradients(self) -> bool:
        """Whether clearing gradients now would lose what belongs to the coming update."""
        return (self.index > 1 or self.touched) and not (self.closing and self.touched)

    @property
    def pending(self) -> bool:
        """Whether gradients of an update that is still to come are there."""
        return self.index > 1 or self.touched

    @property
    def expected(self) -> int:
        """How many batches this window is expected to have."""
        return self._expected

    def add_mean(self, count: float = 1.0) -> Change:
        """A backward pass on a mean over a batch that counts as `count` full ones; several passes on one batch count once."""
        self._take(_MEANS)
        if not self._counted:
            self._counted = True
            self._total += count
        return self._change(self._total if self.closing else self._expected)

    def add_sum(self, weight: float, alike: bool = False) -> float:
        """A backward pass on a sum with its weight; the weight of the window so far on this rank, for `settle_sum`.

        `alike`: the estimate has to be the same on all ranks, since gradients are averaged before the window closes.
        """
        self._take(_SUMS)
        self._total += weight
        if self._carried is None:
            self._estimate = self._expected * (1.0 if alike else weight or 1.0)
        return self._total

    def settle_sum(self, total: float) -> Change:
        """The change for a sum, given the weight over all ranks (divided by their number); open windows use their estimate."""
        return self._change((total or 1.0) if self.closing else self._estimate)

    def follow(self, other: Window) -> None:
        """Takes over what another window counted: both are at the same batch, and the loss was for both."""
        self.touched, self._counted, self.kind = other.touched, other._counted, other.kind
        self._total, self._carried, self._estimate = other._total, other._carried, other._estimate

    def _take(self, kind: str) -> None:
        if self.kind not in (None, kind):
            raise StateError(
                f"backward got {kind} after {self.kind} in one window of accumulation: these cannot be added up. "
                "Pass weight= to every backward of a window, or to none."
            )
        self.kind = kind
        self.touched = True

    def _change(self, divisor: float) -> Change:
        carried, self._carried = self._carried, divisor
        if carried is None or carried == divisor:
            return _PLAIN if divisor == 1.0 else Change(divisor, 1.0)
        return Change(divisor, carried / divisor)
