"""The saved position of a loader: plain numbers, and what is checked of them before anything changes.

`samples` counts what all ranks together were handed of the epoch's order: samples, or batches where a batch sampler of the user's own (or
the data itself) decides about those; `kind` says which. So a position means the same on any number of processes. `batches` counts the
batches that each rank was handed, for scripts that skip by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slipstream.data.clock import Clock, Loaded, Pass, Start
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = ["KINDS", "check_position", "read_position", "tell_load_inside", "tell_set_epoch", "tell_start"]

KINDS: Mapping[str, str] = {
    "samples": "map-style data in batches of a fixed size",
    "batches": "batches of a batch sampler of the script's own",
    "positions": "map-style data without batching (batch_size=None)",
    "stream": "iterable data in batches of a fixed size",
    "ready": "iterable data that comes in batches (batch_size=None)",
}
"""What is counted, by the kind of loader."""

_NUMBERS = ("epoch", "batches", "samples", "seed")
_FLAGS = ("left", "ended", "interrupted", "untrained")
_PLAIN = {*_NUMBERS, *_FLAGS, "kind", "length", "batch"}
_LARGEST = 2**53


def check_position(state: Any, *, kind: str, length: int | None, stride: int, extras: tuple[str, ...], name: str) -> None:
    """Raises a `ConfigError` unless this is a position of such a loader; `name` is that of its dataset, `length` that of a whole pass."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"a {type(state).__name__} is no state of a prepared loader: pass what its state_dict() gave")
    missing = [one for one in _NUMBERS if one not in state]
    if missing:
        raise ConfigError(f"this is no state of a prepared loader: it has no {', '.join(missing)}; pass what its state_dict() gave")
    for one in (*_NUMBERS, *_FLAGS, "batch"):
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
    left, ended, interrupted, untrained = (bool(state.get(flag, 0)) for flag in _FLAGS)
    return Loaded(state["epoch"], state["batches"], state["samples"], left, ended, extra, interrupted, untrained)


def tell_start(start: Start, clock: Clock, *, skips: bool, is_over: Callable[[Loaded], bool], name: str) -> None:
    """Says what a pass makes of the position that was loaded, where that may surprise.

    `skips`: the pass is that of `skip_first_batches`.
    """
    loaded = clock.loaded
    assert loaded is not None
    if start.loaded and is_over(loaded):
        _tell_empty(start.epoch, name)
    elif skips:
        _tell_skip(start, name)
    elif start.given_up is not None:
        _tell_evaluation(loaded, name)
    elif loaded.interrupted and clock.left is not None:
        _tell_interrupted(loaded, name)


def tell_load_inside(turn: Pass, clock: Clock, name: str) -> None:
    """Says that a loop was read on after a position had been loaded inside of it."""
    get_logger(__name__).warning(
        f"a position was loaded inside of a loop over {name} (epoch {turn.epoch}), and the loop went on with batches of its own. The next "
        f"loop begins at the loaded position, in epoch {clock.next}. Leave the loop (break) after load_state to continue there at once."
    )


def _tell_empty(epoch: int, name: str) -> None:
    """Says why a pass over a loaded position is empty."""
    get_logger(__name__).warning(
        f"the pass over {name} that begins now is empty: its position was saved after the last batch of epoch {epoch}. This pass completes "
        f"epoch {epoch}, and the next one is epoch {epoch + 1}. If the counter of your loop already stands at epoch {epoch + 1}, call "
        "loader.set_epoch(epoch) before each pass."
    )


def _tell_interrupted(loaded: Loaded, name: str) -> None:
    """Says that a pass which was left while it was trained on counts as over."""
    epoch, batches = loaded.epoch, loaded.batches
    get_logger(__name__).warning(
        f"the position of a loader of {name} was saved after its loop had been left by break, {_counted(batches)} into epoch {epoch}: the "
        f"pass that begins now is epoch {epoch + 1}, as it would have been in the saved run. To read the rest of epoch {epoch}, write "
        f"skip_first_batches(loader, {batches}). A checkpoint that is saved before the break continues there by itself."
    )


def _tell_evaluation(loaded: Loaded, name: str) -> None:
    """Says that an evaluation begins anew."""
    get_logger(__name__).info(
        f"the position of a loader of {name} was saved in the middle of an evaluation ({_counted(loaded.batches)} into it), whose results "
        "are gone: the evaluation begins anew."
    )


def tell_set_epoch(epoch: int, loaded: Loaded) -> None:
    """Says that `set_epoch` gives a loaded position up."""
    get_logger(__name__).warning(
        f"set_epoch({epoch}) gives up the position that was loaded for this loader ({loaded.samples} into epoch {loaded.epoch}): the next "
        f"pass is a whole one. Begin the loop with epoch {loaded.epoch} to continue there."
    )


def _tell_skip(start: Start, name: str) -> None:
    """Says what `skip_first_batches` means on a loader whose loaded position was not read yet."""
    logger, loaded, epoch, batches = get_logger(__name__), start.given_up, start.epoch, start.batches
    if start.loaded:
        logger.info(
            f"skip_first_batches(loader, {batches}) is not needed: the loaded position of this loader of {name} is {_counted(batches)} "
            f"into epoch {epoch} already, and the pass continues there. Nothing is skipped twice."
        )
    elif loaded is not None and not batches:
        logger.warning(
            f"skip_first_batches(loader, 0) gives up the loaded position of this loader of {name} ({_counted(loaded.batches)} into epoch "
            f"{loaded.epoch}): epoch {epoch} begins anew, so these batches come again. Iterate over the loader itself to continue there."
        )
    elif loaded is not None:
        logger.warning(
            f"skip_first_batches(loader, {batches}) begins {_counted(batches)} into epoch {epoch}, and gives up the loaded position of "
            f"this loader of {name}, which is {_counted(loaded.batches)} into epoch {loaded.epoch}. The number counts from the start of "
            "the epoch, not from the loaded position. Iterate over the loader itself to continue at the loaded position."
        )


def _counted(batches: int) -> str:
    return f"{batches} batch{'' if batches == 1 else 'es'}"
