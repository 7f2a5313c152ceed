"""Detect loss spikes, sudden rises far above the recent median that last more than a moment.

The baseline is the median of the last values and their median deviation, which a few outliers do not move. Positive losses are compared
as logarithms, others as they are. A loss has spiked when it rose within a few steps and

  - two in a row are `limit` deviations above the median, 2.5 times the median, and above every earlier peak of the run;
  - or it stays up for 200 steps, half of `limit` deviations above the median and above the whole history that is kept;
  - or a single value is a thousand times the median and three times as far out as anything else.

Not reported: single hard batches, warm restarts, losses that are mostly zero, slow rises, and values below a hundredth of the initial
loss. The deviation is at least two hundredths of the median. In the first 64 steps only ten times everything before, for 16 steps, is a
spike. A lasting spike is reported once; its values become the new baseline.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from slipstream.observability.guards.findings import GuardFinding

__all__ = ["LossSpikeGuard"]

_HISTORY = 256
_WARM_UP = 64
_RECOMPUTE_EVERY = 64
"""Values between two computations of the baseline."""
_EARLY_STEPS = 16
"""During warm-up: values between two computations, and steps that a jump has to last."""
_LASTING_STEPS = 200
_RISE_STEPS = 16
"""Steps within which a jump has to rise."""
_MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution, in median deviations."""
_MIN_DEVIATION = 0.02
_NEGLIGIBLE = 0.01
_LOW, _HIGH, _FAR, _TENFOLD = 1.25, 2.5, 1000.0, 10.0
"""The least multiple of the median for a lasting jump, one of two steps, one of a single step, and one during warm-up."""


@dataclass
class _Bounds:
    """The values above which a loss counts as raised, as a jump, and as a single-step jump; and the steps that a rise has to last."""

    low: float = math.inf
    high: float = math.inf
    far: float = math.inf
    stays: int = _LASTING_STEPS


@dataclass
class _Rise:
    """A stretch of raised values."""

    first: int
    usual: str
    """The baseline before it, as text."""
    steps: int = 0
    above: int = 0
    high_in_a_row: int = 0
    total: float = 0.0
    begun: float = -math.inf
    """The highest of the first few."""
    highest: float = -math.inf

    def add(self, value: float, bounds: _Bounds) -> None:
        self.steps += 1
        self.above += value > bounds.low
        self.high_in_a_row = self.high_in_a_row + 1 if value > bounds.high else 0
        self.total += value
        self.highest = max(self.highest, value)
        if self.steps <= _RISE_STEPS // 2:
            self.begun = max(self.begun, value)

    @property
    def is_over(self) -> bool:
        return self.steps - self.above > self.steps // 10


class LossSpikeGuard:
    """Checks one loss curve.

    >>> spikes = LossSpikeGuard(limit=10.0)
    >>> found = [spikes.look(step, 2.0 + 0.1 * (step % 7)) for step in range(200)]
    >>> found += [spikes.look(200, 9.0), spikes.look(201, 9.5)]
    >>> print(next(finding for finding in found if finding))
    step 201, rank 0: the loss jumped to 9.5 (usually 2.3, between 2 and 2.6 in the last 200 steps). What to do: if it stays up, go back \
to the last checkpoint with a lower learning rate, a longer warm-up or accelerator.clip_grad_norm_; look at the batches of steps 200 to 201.
    """

    def __init__(self, limit: float, rank: int = 0) -> None:
        self._limit = limit
        self._rank = rank
        self._values: deque[float] = deque(maxlen=_HISTORY)
        self._new = 0
        self._logs = True
        self._bounds = _Bounds()
        self._middle = 0.0
        self._bump = 0.0
        """The largest distance of a value from the median at its time, in the whole run."""
        self._began: float | None = None
        self._rise: _Rise | None = None

    def look(self, step: int, loss: float) -> GuardFinding | None:
        """Add a loss; return a finding if it is a spike. Values that are not finite are ignored."""
        if not math.isfinite(loss):
            return None
        if self._logs and loss <= 0.0:
            self._leave_logarithms()
        value = math.log(loss) if self._logs else loss
        if self._rise is None and value <= self._bounds.low:
            self._take(value)
            return None
        rise = self._rise = self._rise or _Rise(step, self._usual())
        rise.add(value, self._bounds)
        verdict = self._judge(rise, value)
        ended = verdict is not None or rise.is_over or rise.steps >= self._bounds.stays
        far = self._bounds.far
        if ended:
            self._rise = None
            self._bump = max(self._bump, rise.highest - self._middle)
            self._bounds.high = max(self._bounds.high, self._middle + 1.25 * self._bump)
            if verdict is not None or not rise.is_over:
                self._bounds, self._new = _Bounds(), 0  # until the next baseline is computed
        self._take(min(value, far))
        return None if verdict is None else self._finding(step, rise, f"the loss jumped to {loss:.4g}{verdict} ({rise.usual})")

    def _judge(self, rise: _Rise, value: float) -> str | None:
        """Return the end of the message for a spike; None if this is not a spike, or not yet."""
        if value > self._bounds.far or (rise.high_in_a_row >= 2 and rise.steps <= _RISE_STEPS):
            return ""
        if rise.steps < self._bounds.stays or rise.is_over:
            return None
        slowly = rise.total / rise.steps - self._middle > 1.25 * (rise.begun - self._middle)
        return None if slowly else f" and has been up for {rise.steps} steps"

    def _take(self, value: float) -> None:
        self._values.append(value)
        self._new += 1
        every = _RECOMPUTE_EVERY if len(self._values) > _WARM_UP else _EARLY_STEPS
        if self._new >= every and self._rise is None:  # the start of a jump is not part of the baseline
            self._new = 0
            self._compute()

    def _compute(self) -> None:
        self._middle = middle = median(self._values)
        apart = [abs(value - middle) for value in self._values]
        usual = median(apart)
        highest = max(self._values) - middle
        if not self._logs and not usual:  # most values are equal, such as zeros, so there is no scale to compare with
            self._bounds = _Bounds()
            return
        deviation = max(
            _MAD_TO_SIGMA * usual, sum(apart) / len(apart), _MIN_DEVIATION if self._logs else _MIN_DEVIATION * abs(middle), 1e-12
        )
        if len(self._values) < _WARM_UP:
            self._bounds = _Bounds(low=middle + highest + max(self._times(_TENFOLD), self._limit * deviation), stays=_EARLY_STEPS)
            return
        if self._began is None:
            self._began = math.exp(middle) if self._logs else abs(middle)
        bump = max(highest, self._bump)
        low = max(self._limit / 2 * deviation, highest, self._times(_LOW))
        high = max(self._limit * deviation, 1.25 * bump, self._times(_HIGH))
        far = max(3.0 * self._limit * deviation, (3.0 if self._logs else 100.0) * bump, self._times(_FAR))
        least = math.log(_NEGLIGIBLE * self._began) if self._logs else -math.inf
        self._bounds = _Bounds(max(middle + low, least), max(middle + high, least), max(middle + far, least))

    def _times(self, factor: float) -> float:
        """Return the distance from the median to `factor` times it."""
        return math.log(factor) if self._logs else (factor - 1.0) * abs(self._middle)

    def _leave_logarithms(self) -> None:
        self._logs = False
        self._values = deque((math.exp(value) for value in self._values), maxlen=_HISTORY)
        self._bounds, self._rise, self._bump, self._new = _Bounds(), None, 0.0, 0
        if len(self._values) >= _EARLY_STEPS:
            self._compute()

    def _usual(self) -> str:
        shown = [math.exp(value) if self._logs else value for value in self._values]
        low, high = min(shown), max(shown)
        return f"usually {median(shown):.4g}, between {low:.4g} and {high:.4g} in the last {len(shown)} steps"

    def _finding(self, step: int, rise: _Rise, text: str) -> GuardFinding:
        first, last = rise.first, min(step, rise.first + _RISE_STEPS)
        batches = f"the batch of step {step}" if first == step else f"the batches of steps {first} to {last}"
        remedy = (
            "if it stays up, go back to the last checkpoint with a lower learning rate, a longer warm-up or accelerator.clip_grad_norm_; "
            f"look at {batches}"
        )
        return GuardFinding("spike", step, self._rank, text, remedy)
