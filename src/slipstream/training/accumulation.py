"""Gradient accumulation of one model: which batch of which update it is at, and what its gradients are divided by.

A pure state machine without tensors. Every prepared model has one and nothing else keeps such state: loaders, `accumulate`, `backward`,
optimizers, clipping and checkpoints ask it. A window is the batches of one update; it closes after the requested number of batches, or
with the loader. While it is open, gradients carry an estimated divisor; when it closes, the divisor is what the window held (batches,
samples or given weights), and `settle` returns the factor that corrects the gradients, usually 1. `tests/training/accumulation_twin.py`
is the slow, readable form of these rules and the oracle of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.distributed.gradient_state import MicroBatch
from slipstream.errors import ConfigError, StateError

__all__ = ["Accumulation"]

_MEANS, _SUMS = "losses that are means", "losses that are sums with a weight"
_KIND_NAMES = {None: None, _MEANS: "mean", _SUMS: "sum"}
_SAVED_FIELDS = (
    "index",
    "closing",
    "touched",
    "single",
    "counted",
    "pieces",
    "usual_pieces",
    "expected",
    "estimate",
    "total",
    "carried",
    "kind",
)


class Accumulation:
    """The state of one model between two updates.

    >>> accumulation = Accumulation()
    >>> [accumulation.begin(3, None) for _ in range(4)]
    [False, False, True, False]
    """

    __slots__ = (
        "_batch_weight", "_counted", "_ended", "_estimate", "expected", "_pieces", "_total", "_usual_pieces", "_weight", "batch",
        "carried", "closed_early", "closing", "index", "kind", "named", "passes", "single", "touched", "worked_on",
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
        self.named = False
        """Whether the model was ever named in `accumulate`; one that never was follows every block."""
        self.batch: MicroBatch | None = None
        """The batch of the loader that was worked on last."""
        self.worked_on = 0
        """How many batches of its pass were worked on."""
        self.passes = 0
        """How many passes over loaders had ended when the window opened (`GradientState.passes`)."""
        self.closed_early = False
        """Whether the end of the loader closed the window with a piece of its batch that was not the last one."""
        self.kind: str | None = None
        """Whether the losses of the window are means or sums."""
        self.carried: float | None = None
        """What the gradients that are there were divided by; None where there are none of this window."""
        self._counted = False
        self._ended = False
        """Whether the end of the loader closed the window, before it had as many batches as asked for."""
        self._pieces = self._usual_pieces = 0
        self.expected: float = 1
        """How many batches this window is expected to have."""
        self._estimate = 0.0
        self._total = 0.0
        """What the batches of the window count as, in full ones, for losses that are means."""
        self._weight = self._batch_weight = 0.0
        """The weights of the window and of the present batch on this rank, for losses that are sums."""

    # -- batches --------------------------------------------------------------------------------------------------

    def begin(self, steps: int, batch: MicroBatch | None, follows_loader: bool = True) -> bool:
        """Begin the next batch, and return whether it closes the window.

        Where one batch of the loader is cut into several, the last batch of a pass closes the window when as many pieces of it have come
        as of the batch before.
        """
        if steps <= 1 and self.closing:  # every batch is an update
            self.index, self._total, self._weight, self._batch_weight, self.expected = 1, 0.0, 0.0, 0.0, 1
            self.batch, self._pieces, self._usual_pieces, self.carried, self.kind = batch, 1, 0, None, None
            self.touched = self._counted = self._ended = self.closed_early = False
            self.single = True
            return True
        end, left = False, None
        if batch is not None:
            self._take_batch(batch)
            if follows_loader:
                end, left = batch.end and self._pieces >= self._usual_pieces, batch.left
        self.touched, self._counted, self._batch_weight = False, False, 0.0
        if self.closing:
            self.index, self._total, self._weight, self.carried, self.kind = 1, 0.0, 0.0, None, None
            self.expected = steps if left is None else min(steps, self._blocks_left(left))
            self.closing = self.single = end or steps <= 1
        else:
            self.index += 1
            self.closing = end or self.index >= steps
            self.single = False
        self._ended = end and self.index < steps
        return self.closing

    def _take_batch(self, batch: MicroBatch) -> None:
        before = self.batch
        if batch is before:
            self._pieces += 1
            self.closed_early |= self._ended
            return
        self.worked_on = 1 if before is None or before.loader_pass is not batch.loader_pass else self.worked_on + 1
        self.batch, self._usual_pieces, self._pieces, self.closed_early = batch, self._pieces, 1, False

    def _blocks_left(self, batches_left: int) -> int:
        """Return how many pieces follow, with the present one, if every batch is cut into as many."""
        usual = max(1, self._usual_pieces)
        return batches_left * usual + max(1, usual - self._pieces + 1)

    def mirror(self, other: Accumulation) -> None:
        """Begin the batch that another model is at: this one was never named in `accumulate`."""
        if other.index == 1:
            self._total, self._weight, self.carried, self.kind = 0.0, 0.0, None, None
        self.index, self.closing, self.single, self.expected = other.index, other.closing, other.single, other.expected
        self.touched, self._counted, self._batch_weight = False, False, 0.0

    def reset(self) -> None:
        """Return to the state before the first batch."""
        self.closing, self.single, self.index, self.touched = True, False, 0, False
        self.cleared()

    def cleared(self) -> None:
        """Record that gradients were cleared: weights of the present batch no longer count. Its place in the window stays."""
        self.carried = None
        self._weight -= self._batch_weight
        self._batch_weight = 0.0
        if self.index <= 1:
            self._total, self._weight, self.kind, self._counted = 0.0, 0.0, None, False

    @property
    def holds_gradients(self) -> bool:
        """Whether clearing gradients now would lose what belongs to the coming update."""
        return (self.index > 1 or self.touched) and not (self.closing and self.touched)

    @property
    def pending(self) -> bool:
        """Whether gradients of an update that is still to come are there."""
        return self.index > 1 or self.touched

    # -- losses ---------------------------------------------------------------------------------------------------

    def add_mean(self, count: float = 1.0, reached: bool = True) -> float:
        """Count a backward pass on a mean over a batch that counts as `count` full ones, and return what it is divided by.

        Several passes on one batch count once. The batch counts for a model that the loss did not reach, too: an update is the mean over
        its batches.
        """
        if reached:
            self._take(_MEANS)
        if not self._counted:
            self._counted = True
            self._total += count
        return (self._total or 1.0) if self.closing else self.expected

    def add_sum(self, weight: float) -> float:
        """Count a backward pass on a sum with its weight, and return the weight of the window so far on this rank."""
        self._take(_SUMS)
        self._weight += weight
        self._batch_weight += weight
        return self._weight

    @property
    def total(self) -> float:
        """What the losses of the window count as so far, on this rank."""
        return self._weight if self.weighs else self._total

    @property
    def weighs(self) -> bool:
        """Whether the losses of the window are sums with weights."""
        return self.kind == _SUMS

    @property
    def estimate(self) -> float | None:
        """What sums of an open window are divided by; None as long as there is nothing to tell it from."""
        return self._estimate * self.expected if self._estimate else None

    def guess(self, weight: float) -> None:
        """Set the weight of one batch on one rank, the same number on every rank, for later estimates."""
        self._estimate = weight or 1.0

    def sum_divisor(self, total: float) -> float:
        """Return what sums of a window that closes are divided by, given the weight over all ranks (divided by their number)."""
        self._estimate = (total or 1.0) / max(1, self.index)
        return total or 1.0

    def settle(self, divisor: float) -> float:
        """Set the divisor of the gradients, and return the factor by which those that are there have to be multiplied."""
        carried, self.carried = self.carried, divisor
        return 1.0 if carried is None or carried == divisor else carried / divisor

    def _take(self, kind: str) -> None:
        if self.kind not in (None, kind):
            raise StateError(
                f"backward got {kind} after {self.kind} in one window of accumulation: these cannot be added up. "
                "Pass weight= to every backward of a window, or to none."
            )
        self.kind = kind
        self.touched = True

    # -- saved and restored ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return where the window stands, in plain numbers; the batch of the loader is not part of that: a resumed loader counts anew.

        >>> accumulation, other = Accumulation(), Accumulation()
        >>> accumulation.begin(3, None), accumulation.add_mean()
        (False, 3)
        >>> other.restore(accumulation.state())
        >>> [other.begin(3, None) for _ in range(2)], other.add_mean()
        ([False, True], 2.0)
        """
        state = {name: getattr(self, _slot_name(name)) for name in _SAVED_FIELDS}
        return {**state, "kind": _KIND_NAMES[self.kind], "total": self.total, "named": self.named}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved window; raise for a state that cannot be one before anything changes."""
        self.check(state)
        for name in _SAVED_FIELDS:
            setattr(self, _slot_name(name), state[name])
        self.kind = next(kind for kind, spelled in _KIND_NAMES.items() if spelled == state["kind"])
        self._total, self._weight = (0.0, state["total"]) if self.weighs else (state["total"], 0.0)
        self.named = state.get("named", self.index > 0)
        self.batch, self.worked_on, self.closed_early, self._batch_weight = None, 0, False, 0.0

    @staticmethod
    def check(state: Any) -> None:
        """Raise unless this is the state of a window."""
        if not isinstance(state, Mapping) or set(state) - {"named"} != set(_SAVED_FIELDS):
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ConfigError(
                f"this is no state of a window of accumulation: it has {found} instead of {sorted((*_SAVED_FIELDS, 'named'))}"
            )
        for name, fits in _FIELD_CHECKS.items():
            if not fits(state.get(name, False)):
                raise ConfigError(f"the state of a window of accumulation has {name}={state[name]!r}, which no window can have")


def _slot_name(name: str) -> str:
    return name if name in Accumulation.__slots__ else f"_{name}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_number(value: Any) -> bool:
    return _is_count(value) or (type(value) is float and math.isfinite(value) and value >= 0.0)


def _is_divisor(value: Any) -> bool:
    return _is_number(value) and value > 0.0


_FIELD_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("index", "pieces", "usual_pieces"), _is_count),
    **dict.fromkeys(("closing", "touched", "single", "counted", "named"), lambda value: isinstance(value, bool)),
    **dict.fromkeys(("estimate", "total"), _is_number),
    "expected": _is_divisor,
    "carried": lambda value: value is None or _is_divisor(value),
    "kind": lambda value: value in _KIND_NAMES.values(),
}
"""What the entries of a state can be."""
