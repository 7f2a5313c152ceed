"""The window of one model: the batches whose gradients make one update. A pure state machine that knows no tensor.

A window opens with the first batch after an update and closes with its last one: after the number of batches that was asked for,
or with the loader. Gradients that are being added up carry a divisor. While the window is open that is an estimate; when it
closes, the divisor is what the window really held: its batches, its samples, or the weights that were given. Whoever runs the
backward pass is told by which factor to correct the gradients that are there already (`Change.existing`), mostly 1.

A window that is open can be saved (`state`, plain numbers) and goes on exactly where it stood (`restore`). Which batch of the loader it
was is not part of that: a loader that goes on counts anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import ConfigError, StateError

__all__ = ["Change", "Window"]

_MEANS, _SUMS = "losses that are means", "losses that are sums with a weight"
_SPELLED = {None: None, _MEANS: "mean", _SUMS: "sum"}
_SAVED = ("index", "closing", "touched", "single", "counted", "pieces", "usual_pieces", "expected", "estimate", "total", "carried", "kind")


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
        self._expected: float = 1
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
        self.touched = self._counted = False
        if self.closing:
            self.index, self._total, self._carried, self.kind = 1, 0.0, None, None
            self._expected = steps if left is None or left >= steps else left + 1
            self.closing = self.single = closing = end or steps <= 1
        else:
            self.index += 1
            self.closing = closing = end or self.index >= steps
            self.single = False
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
    def expected(self) -> float:
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

    # -- saved and restored ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Where the window stands, in plain numbers.

        >>> window, other = Window(), Window()
        >>> window.begin(3, end=False, left=None), window.add_mean().divisor
        (False, 3)
        >>> other.restore(window.state())
        >>> [other.begin(3, end=False, left=None) for _ in range(2)], other.add_mean().divisor
        ([False, True], 2.0)
        """
        return {name: _SPELLED[self.kind] if name == "kind" else getattr(self, _slot(name)) for name in _SAVED}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where a saved window stood; a state that cannot be one is refused before anything changes."""
        self.check(state)
        for name in _SAVED:
            setattr(self, _slot(name), state[name])
        self.kind = next(kind for kind, spelled in _SPELLED.items() if spelled == state["kind"])
        self._batch = -1

    @staticmethod
    def check(state: Any) -> None:
        """Raises unless this is the state of a window."""
        if not isinstance(state, Mapping) or set(state) != set(_SAVED):
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ConfigError(f"this is no state of a window of accumulation: it has {found} instead of {sorted(_SAVED)}")
        for name, fits in _FITS.items():
            if not fits(state[name]):
                raise ConfigError(f"the state of a window of accumulation has {name}={state[name]!r}, which no window can have")

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


def _slot(name: str) -> str:
    return name if name in Window.__slots__ else f"_{name}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_number(value: Any) -> bool:
    return _is_count(value) or (type(value) is float and math.isfinite(value) and value >= 0.0)


def _is_divisor(value: Any) -> bool:
    return _is_number(value) and value > 0.0


_FITS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("index", "pieces", "usual_pieces"), _is_count),
    **dict.fromkeys(("closing", "touched", "single", "counted"), lambda value: isinstance(value, bool)),
    **dict.fromkeys(("expected", "estimate"), _is_divisor),
    "total": _is_number,
    "carried": lambda value: value is None or _is_divisor(value),
    "kind": lambda value: value in _SPELLED.values(),
}
"""What the entries of a state can be."""
