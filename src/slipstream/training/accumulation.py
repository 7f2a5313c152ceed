"""Gradient accumulation of one model: which batch of which update it is at, and what its gradients are divided by.

A pure state machine without tensors. Every prepared model has one, and no other object holds this state: loaders, `accumulate`,
`backward`, optimizers, clipping and checkpoints read it here. A window is the batches of one update; it closes after the requested
number of batches, or with the loader. While it is open, gradients have an estimated divisor. When it closes, the divisor is the size of
the window (batches, samples or given weights), and `change_divisor` returns the factor that corrects the gradients, usually 1.
`tests/training/accumulation_twin.py` is the slow, readable form of these rules and the oracle of the tests.
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
_SAVED_FIELDS = {
    "index": "index",
    "closing": "closing",
    "touched": "backward_done",
    "single": "is_whole_window",
    "counted": "_batch_counted",
    "pieces": "_micro_batches",
    "usual_pieces": "_micro_batches_per_batch",
    "expected": "expected",
    "estimate": "_estimate",
    "total": "total",
    "carried": "gradient_divisor",
    "kind": "loss_kind",
}
"""The keys of a saved window and the attributes they hold."""


class Accumulation:
    """The state of one model between two updates.

    >>> accumulation = Accumulation()
    >>> [accumulation.begin(3, None) for _ in range(4)]
    [False, False, True, False]
    """

    __slots__ = (
        "_batch_counted", "_ended_by_loader", "_estimate", "_micro_batches", "_micro_batches_per_batch", "_total", "_weights_before",
        "backward_done", "batch", "batches_trained", "closed_early", "closing", "expected", "gradient_divisor", "index",
        "is_whole_window", "loss_kind", "named", "passes", "weights",
    )  # fmt: skip

    def __init__(self) -> None:
        self.closing = True
        """Whether the current batch ends an update; True outside of windows."""
        self.index = 0
        """The number of the current batch in its window, from 1; 0 outside of windows."""
        self.backward_done = False
        """Whether the current batch has had its backward pass, or its update."""
        self.is_whole_window = False
        """Whether the current batch is the only one of its window."""
        self.named = False
        """Whether the model was ever named in `accumulate`; a model that never was follows every block."""
        self.batch: MicroBatch | None = None
        """The loader's batch that the last block belonged to."""
        self.batches_trained = 0
        """How many batches of the current pass had a block."""
        self.passes = 0
        """How many passes over loaders had ended when the window opened (`GradientState.passes`)."""
        self.closed_early = False
        """Whether the end of the loader closed the window before the last micro-batch of its batch."""
        self.loss_kind: str | None = None
        """Whether the losses of the window are means or sums."""
        self.gradient_divisor: float | None = None
        """The divisor of the accumulated gradients; None if the window has none yet."""
        self._batch_counted = False
        self._ended_by_loader = False
        """Whether the end of the loader closed the window before it had the requested number of batches."""
        self._micro_batches = self._micro_batches_per_batch = 0
        """How many blocks the current batch of the loader, and the batch before it, was cut into."""
        self.expected: float = 1
        """The number of batches that this window is expected to have."""
        self._estimate = 0.0
        self._total = 0.0
        """The size of the window in full batches, for losses that are means."""
        self.weights: list[Any] = []
        """The weights of the window on this rank, for losses that are sums: numbers, or values on a device that nobody has read yet."""
        self._weights_before = 0
        """How many of them are of batches before the current one."""

    # -- batches --------------------------------------------------------------------------------------------------

    def begin(self, steps: int, batch: MicroBatch | None, follows_loader: bool = True) -> bool:
        """Begin the next batch, and return whether it closes the window.

        If the script cuts each batch of the loader into micro-batches, the last batch of a pass closes the window after as many
        micro-batches as the batch before it had.
        """
        if steps <= 1 and self.closing:  # every batch is an update
            self.index, self._total, self.expected = 1, 0.0, 1
            if self.weights:
                self._clear_weights()
            self.batch, self._micro_batches, self._micro_batches_per_batch, self.gradient_divisor, self.loss_kind = batch, 1, 0, None, None
            self.backward_done = self._batch_counted = self._ended_by_loader = self.closed_early = False
            self.is_whole_window = True
            return True
        end, left = False, None
        if batch is not None:
            self._enter_batch(batch)
            if follows_loader:
                end, left = batch.end and self._micro_batches >= self._micro_batches_per_batch, batch.left
        self.backward_done, self._batch_counted, self._weights_before = False, False, len(self.weights)
        if self.closing:
            self.index, self._total, self.gradient_divisor, self.loss_kind = 1, 0.0, None, None
            self._clear_weights()
            self.expected = steps if left is None else min(steps, self._blocks_left(left))
            self.closing = self.is_whole_window = end or steps <= 1
        else:
            self.index += 1
            self.closing = end or self.index >= steps
            self.is_whole_window = False
        self._ended_by_loader = end and self.index < steps
        return self.closing

    def _enter_batch(self, batch: MicroBatch) -> None:
        before = self.batch
        if batch is before:
            self._micro_batches += 1
            self.closed_early |= self._ended_by_loader
            return
        self.batches_trained = 1 if before is None or before.loader_pass is not batch.loader_pass else self.batches_trained + 1
        self.batch, self._micro_batches_per_batch, self._micro_batches, self.closed_early = batch, self._micro_batches, 1, False

    def _blocks_left(self, batches_left: int) -> int:
        """Return how many micro-batches are left, including this one, if every batch is cut into the same number."""
        usual = max(1, self._micro_batches_per_batch)
        return batches_left * usual + max(1, usual - self._micro_batches + 1)

    def copy_position_from(self, other: Accumulation) -> None:
        """Begin the same batch of the window as another model, for a model that was never named in `accumulate`."""
        if other.index == 1:
            self._total, self.gradient_divisor, self.loss_kind = 0.0, None, None
            self._clear_weights()
        self.index, self.closing, self.is_whole_window, self.expected = other.index, other.closing, other.is_whole_window, other.expected
        self.backward_done, self._batch_counted, self._weights_before = False, False, len(self.weights)

    def _clear_weights(self) -> None:
        self.weights, self._weights_before = [], 0

    def reset(self) -> None:
        """Return to the state before the first batch."""
        self.closing, self.is_whole_window, self.index, self.backward_done = True, False, 0, False
        self.on_zero_grad()

    def on_zero_grad(self) -> None:
        """Record that gradients were cleared: the weights of the current batch no longer count. The position in the window stays."""
        self.gradient_divisor = None
        del self.weights[self._weights_before :]
        if self.index <= 1:
            self._total, self.loss_kind, self._batch_counted = 0.0, None, False
            self._clear_weights()

    @property
    def holds_gradients(self) -> bool:
        """Whether the next update needs the present gradients, so that `zero_grad` must keep them."""
        return (self.index > 1 or self.backward_done) and not (self.closing and self.backward_done)

    @property
    def pending(self) -> bool:
        """Whether there are gradients of an update that has not been made yet."""
        return self.index > 1 or self.backward_done

    # -- losses ---------------------------------------------------------------------------------------------------

    def add_mean(self, count: float = 1.0, reached: bool = True) -> float:
        """Count a backward pass on the mean over a batch, which is `count` full batches in size, and return the divisor of its loss.

        Several passes on one batch count once. A batch also counts for models that its loss did not reach, because an update is the mean
        over all batches of its window.
        """
        if reached:
            if self.loss_kind != _MEANS:
                self._set_loss_kind(_MEANS)
            self.backward_done = True
        if not self._batch_counted:
            self._batch_counted = True
            self._total += count
        return (self._total or 1.0) if self.closing else self.expected

    def add_sum(self, weight: Any) -> None:
        """Count a backward pass on a sum with its weight: a number, or a value that is read when `total` is asked for."""
        self._set_loss_kind(_SUMS)
        self.backward_done = True
        self.weights.append(weight)

    @property
    def total(self) -> float:
        """The size of the window so far on this rank: full batches, or the sum of weights."""
        return sum(map(float, self.weights)) if self.is_weighted else self._total

    @property
    def is_weighted(self) -> bool:
        """Whether the losses of the window are sums with weights."""
        return self.loss_kind == _SUMS

    @property
    def estimate(self) -> float | None:
        """The estimated divisor for sums in an open window; None before the first weight is known."""
        return self._estimate * self.expected if self._estimate else None

    def set_estimate(self, weight: float) -> None:
        """Set the expected weight of a batch on one rank; pass the same number on every rank."""
        self._estimate = weight or 1.0

    def sum_divisor(self, total: float) -> float:
        """Return the divisor for sums in a closing window, given the mean over ranks of the window's weight."""
        self._estimate = (total or 1.0) / max(1, self.index)
        return total or 1.0

    def change_divisor(self, divisor: float) -> float:
        """Set the divisor of the gradients, and return the factor that brings the accumulated ones to it."""
        previous, self.gradient_divisor = self.gradient_divisor, divisor
        return 1.0 if previous is None or previous == divisor else previous / divisor

    def _set_loss_kind(self, kind: str) -> None:
        if self.loss_kind not in (None, kind):
            raise StateError(
                f"backward got {kind} after {self.loss_kind} in one accumulation window: these cannot be added. "
                "Pass weight= to every backward of a window, or to none."
            )
        self.loss_kind = kind

    # -- saved and restored ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of the window as plain numbers, without the loader's batch: a resumed loader counts its batches anew.

        >>> accumulation, other = Accumulation(), Accumulation()
        >>> accumulation.begin(3, None), accumulation.add_mean()
        (False, 3)
        >>> other.restore(accumulation.state())
        >>> [other.begin(3, None) for _ in range(2)], other.add_mean()
        ([False, True], 2.0)
        """
        state = {key: getattr(self, attribute) for key, attribute in _SAVED_FIELDS.items()}
        return {**state, "kind": _KIND_NAMES[self.loss_kind], "named": self.named}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved window; raise for an invalid state before anything changes."""
        self.check(state)
        self.loss_kind = next(kind for kind, name in _KIND_NAMES.items() if name == state["kind"])
        self._total, self.weights = (0.0, [state["total"]]) if self.is_weighted else (state["total"], [])
        for key, attribute in _SAVED_FIELDS.items():
            if key not in ("kind", "total"):
                setattr(self, attribute, state[key])
        self.named = state.get("named", self.index > 0)
        self.batch, self.batches_trained, self.closed_early, self._weights_before = None, 0, False, len(self.weights)

    @staticmethod
    def check(state: Any) -> None:
        """Raise unless this is the state of a window."""
        if not isinstance(state, Mapping) or set(state) - {"named"} != set(_SAVED_FIELDS):
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ConfigError(f"not the state of an accumulation window: it has {found} instead of {sorted((*_SAVED_FIELDS, 'named'))}")
        for name, fits in _FIELD_CHECKS.items():
            if not fits(state.get(name, False)):
                raise ConfigError(f"the state of an accumulation window has {name}={state[name]!r}, which is not possible")


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
"""Which values each entry of a state can have."""
