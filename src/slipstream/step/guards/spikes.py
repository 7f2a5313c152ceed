"""Losses that jump: above everything that is usual for this curve, however noisy it is.

The usual is the median of the last values and their median deviation from it, both of which a few wild values leave alone. Losses above
zero are compared as logarithms, in which batch losses lie about evenly around their median; others as they are. A loss has jumped when it
is above everything in the memory for some steps in a row: for five, if it is half of `limit` deviations above the median; for two, if
it is `limit` of them; and for one if it is three times as many.

A curve with hardly any noise is taken to have a deviation of two hundredths of its size, so that its ordinary wobble is no finding; nor is
a loss that is still below a hundredth of where the curve began. Nothing is said about the first 64 steps, and a jump that lasts is said
once: its values become the usual.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from slipstream.step.guards.finding import Finding

__all__ = ["Spikes"]

_MEMORY = 256
_FIRST = 64
_EVERY = 64
"""After how many values the usual is computed anew."""
_NORMAL = 1.4826
"""The standard deviation of a normal distribution, in median deviations."""
_LEAST = 0.02
_SMALL = 0.01
_NEVER = (math.inf, math.inf, math.inf)


class Spikes:
    """Watches one loss curve.

    >>> spikes = Spikes(limit=10.0)
    >>> found = [spikes.look(step, 2.0 + 0.1 * (step % 7)) for step in range(200)]
    >>> found += [spikes.look(200, 9.0), spikes.look(201, 9.5)]
    >>> print(next(one for one in found if one))
    step 201, rank 0: the loss jumped to 9.5 (usually 2.3, between 2 and 2.6 in the last 200 steps). What to do: if it stays up, go back \
to the last checkpoint with a lower learning rate, a longer warm-up or accelerator.clip_grad_norm_; look at the batches of steps 200 to 201.
    """

    def __init__(self, limit: float, rank: int = 0) -> None:
        self._limit = limit
        self._rank = rank
        self._values: deque[float] = deque(maxlen=_MEMORY)
        self._new = 0
        self._logs = True
        self._bounds = _NEVER
        self._score = 0
        self._began: float | None = None
        self._above: tuple[int, str] | None = None
        """The first step of a jump, and what was usual before."""

    def look(self, step: int, loss: float) -> Finding | None:
        """Takes the next loss in; what is wrong with it, if something is. Values that are not finite are another guard's."""
        if not math.isfinite(loss):
            return None
        if self._logs and loss <= 0.0:
            self._leave_logarithms()
        value = math.log(loss) if self._logs else loss
        if value <= self._bounds[0]:
            self._above, self._score = None, 0
            self._take(value)
            return None
        self._above = first, usual = self._above or (step, self._usual())
        self._score += next(points for bound, points in zip(reversed(self._bounds), (5, 3, 1), strict=True) if value > bound)
        far = self._bounds[-1]
        found = self._score >= 5
        if found:
            self._above, self._score, self._bounds, self._new = None, 0, _NEVER, 0  # until the usual is computed anew
        self._take(min(value, far))
        if not found:
            return None
        return self._finding(step, first, f"the loss jumped to {loss:.4g} ({usual})")

    def _take(self, value: float) -> None:
        self._values.append(value)
        self._new += 1
        if self._new >= _EVERY and len(self._values) >= _FIRST and not self._score:  # a jump that begins is not the usual
            self._new = 0
            self._compute()

    def _compute(self) -> None:
        middle = median(self._values)
        apart = [abs(value - middle) for value in self._values]
        deviation = max(_NORMAL * median(apart), sum(apart) / len(apart))  # the second, where most values are the same
        deviation = max(deviation, _LEAST if self._logs else _LEAST * abs(middle), 1e-12)
        highest = max(self._values) - middle
        rises = max(self._limit / 2 * deviation, highest), max(self._limit * deviation, 1.25 * highest)
        if self._began is None:
            self._began = math.exp(middle) if self._logs else abs(middle)
        least = math.log(_SMALL * self._began) if self._logs else -math.inf
        self._bounds = max(middle + rises[0], least), max(middle + rises[1], least), max(middle + 3.0 * rises[1], least)

    def _leave_logarithms(self) -> None:
        self._logs = False
        self._values = deque((math.exp(value) for value in self._values), maxlen=_MEMORY)
        self._bounds, self._new = _NEVER, 0
        if len(self._values) >= _FIRST:
            self._compute()

    def _usual(self) -> str:
        shown = [math.exp(value) if self._logs else value for value in self._values]
        low, high = min(shown), max(shown)
        return f"usually {median(shown):.4g}, between {low:.4g} and {high:.4g} in the last {len(shown)} steps"

    def _finding(self, step: int, first: int, text: str) -> Finding:
        batches = f"the batch of step {step}" if first == step else f"the batches of steps {first} to {step}"
        remedy = (
            "if it stays up, go back to the last checkpoint with a lower learning rate, a longer warm-up or accelerator.clip_grad_norm_; "
            f"look at {batches}"
        )
        return Finding("spike", step, self._rank, text, remedy)
