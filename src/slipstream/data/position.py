"""The saved position of a loader: plain numbers, and what is checked of them before anything changes.

`samples` counts what all ranks together were handed of the epoch's order: samples, or batches where a batch sampler of the user's own (or
the data itself) decides about those; `kind` says which. So a position means the same on any number of processes. `batches` counts the
batches that each rank was handed, for scripts that skip by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.data.clock import Loaded
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["KINDS", "check_position", "read_position"]

KINDS: Mapping[str, str] = {
    "samples": "map-style data in batches of a fixed size",
    "batches": "batches of a batch sampler of the script's own",
    "positions": "map-style data without batching (batch_size=None)",
    "stream": "iterable data in batches of a fixed size",
    "ready": "iterable data that comes in batches (batch_size=None)",
}
"""What is counted, by the kind of loader."""

_NUMBERS = ("epoch", "batches", "samples", "seed")
_PLAIN = {*_NUMBERS, "left", "ended", "kind", "length", "batch"}
_LARGEST = 2**53


def check_position(state: Any, *, kind: str, length: int | None, stride: int, extras: tuple[str, ...], name: str) -> None:
    """Raises a `ConfigError` unless this is a position of such a loader; `name` is that of its dataset, `length` that of a whole pass."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"a {type(state).__name__} is no state of a prepared loader: pass what its state_dict() gave")
    missing = [one for one in _NUMBERS if one not in state]
    if missing:
        raise ConfigError(f"this is no state of a prepared loader: it has no {', '.join(missing)}; pass what its state_dict() gave")
    for one in (*_NUMBERS, "left", "ended", "batch"):
        value = state.get(one, 0)
        largest = 2**64 if one == "seed" else _LARGEST
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < largest:
            raise ConfigError(
                f"the state of a loader of {name} has {one}={value!r}: it is a whole number from 0 (and below {largest}), so this state "
                "was changed or damaged; pass what its state_dict() gave"
            )
    saved = state.get("kind", kind)
    if saved != kind:
        there = KINDS.get(saved, repr(saved)) if isinstance(saved, str) else repr(saved)
        raise ConfigError(
            f"the state of a loader of {there} was given to one of {KINDS[kind]} ({name}), where a position means something else: load it "
            "into the loader that it was saved of (prepare the same loaders in the same order)"
        )
    unknown = sorted(str(one) for one in set(state) - _PLAIN - set(extras))
    if unknown:
        raise ConfigError(f"the state of a loader of {name} has {', '.join(unknown)[:200]}, which such a loader does not know")
    _check_length(state, length, stride, name)


def _check_length(state: Mapping[str, Any], length: int | None, stride: int, name: str) -> None:
    before = state.get("length")
    if before is not None and (isinstance(before, bool) or not isinstance(before, int) or not 0 <= before < _LARGEST):
        raise ConfigError(f"the state of a loader of {name} has length={before!r}: it is a whole number from 0, or None")
    most = length if length is None or "length" in state else length + stride - 1  # one that says no length counts a last batch as full
    if most is not None and state["samples"] > most:
        raise ConfigError(
            f"the position is {state['samples']} into a loader of {name} that has only {length} now"
            + (f" (it had {before})" if before is not None else "")
            + ": the data became shorter. Give it the data of the saved run, or begin a new epoch (without loading the position)."
        )


def read_position(state: Mapping[str, Any], *, length: int | None, name: str) -> Loaded:
    """The position that a checked state tells; data that has another length now is told."""
    before = state.get("length")
    if before is not None and length is not None and before != length and state["samples"]:
        get_logger(__name__).warning(
            f"a loader of {name} had {before} samples (or batches) when its position was saved, and has {length} now: a shuffled order is "
            "another one, so in this epoch some samples may come twice and others never."
        )
    extra = {one: value for one, value in state.items() if one not in _PLAIN}
    left, ended = bool(state.get("left", 0)), bool(state.get("ended", 0))
    return Loaded(state["epoch"], state["batches"], state["samples"], left, ended, extra)
