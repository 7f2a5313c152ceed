"""Epochs and positions of a loader: which epoch comes next, the passes under way, and the saved position.

A position counts `samples` of the epoch's order over all ranks (or whole batches, where a batch sampler or the data decides about those;
`kind` says which), so it means the same on any number of processes. `batches` counts the batches of each rank, for scripts that skip by
hand. A saved position is checked completely before anything changes. A loader and the copies that `skip_first_batches` makes share one
`EpochState`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.distributed.gradient_state import LoaderPass
from slipstream.errors import ConfigError
from slipstream.logging import get_logger

__all__ = [
    "EpochState", "LoadedPosition", "ORDER_VERSION", "ORDER_VERSIONS", "POSITION_KINDS", "PassStart", "check_position", "read_position",
    "report_pass_start", "warn_of_load_inside_loop", "warn_of_set_epoch",
]


ORDER_VERSIONS = (1, 2)
"""How the order of torch's random samplers is made: 1 drawn by them from a generator of ours, 2 computed (`permutation.py`)."""
ORDER_VERSION = ORDER_VERSIONS[-1]
"""That of a new run. A run that resumes keeps that of its checkpoint, and positions without a version are of the first."""


@dataclass(frozen=True)
class LoadedPosition:
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
    interrupted: bool = False
    """Whether it was left by `break` while it was trained on."""
    untrained: bool = False
    """Whether nothing was trained from the beginning of that pass to the save."""


@dataclass(frozen=True)
class PassStart:
    """Where a pass begins."""

    epoch: int
    batches: int
    """How many batches of the epoch come before, as the script counts them."""
    samples: int | None = None
    """The position in the epoch's order; None where only `batches` tells it."""
    earlier: LoaderPass | None = None
    """The pass of this process that it continues."""
    loaded: bool = False
    """Whether it begins at the position that was loaded."""
    replaced: LoadedPosition | None = None
    """The loaded position that this one replaces."""


class EpochState:
    """Counts epochs: every pass takes the next one, whether the one before was read to its end or not.

    >>> state = EpochState()
    >>> epochs = []
    >>> for _ in range(3):
    ...     epochs.append(state.following().epoch)
    ...     state.take(state.following())
    >>> epochs
    [0, 1, 2]
    >>> _ = state.set(1)
    >>> state.following().epoch
    1
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        """The seed of the order; that of the saved run after a position was loaded."""
        self.order_version = ORDER_VERSION
        """One of `ORDER_VERSIONS`; that of the saved run after a position was loaded."""
        self.next = 0
        """The epoch of the next pass."""
        self.resume = 0
        """The position where the next pass begins, after a position was loaded."""
        self.live: list[LoaderPass] = []
        """The passes under way, outermost first."""
        self.left: LoaderPass | None = None
        """The pass that began last, if it was left before its end."""
        self.loaded: LoadedPosition | None = None
        """The position that was loaded last."""
        self.waits = False
        """Whether no pass began since."""
        self.continues = False
        """Whether the next pass begins at the loaded position; else `skip_first_batches` has to lead there."""
        self.trained = 0
        """`GradientState.trained` when the position was loaded."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out passes and `trained`: a copy has begun nothing and trained nothing."""
        return {name: getattr(self, name) for name in ("seed", "order_version", "next", "resume", "loaded", "waits", "continues")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    def keep_loaded(self, loader_pass: LoaderPass, trained: int, restore: Callable[[LoadedPosition], LoadedPosition]) -> bool:
        """Return whether a pass only looked at the loaded position (one batch, and nothing was trained), which is then still to be read.

        `restore` puts the loader's other state back to that position.
        """
        looked = loader_pass.resumed and loader_pass.handed <= 1 and loader_pass.trained == trained
        if not looked or self.waits or self.next != loader_pass.epoch + 1 or self.loaded is None:
            return False
        self.load(restore(self.loaded), resume=True, trained=self.trained)
        return True

    def load(self, position: LoadedPosition, *, resume: bool, trained: int = 0) -> None:
        """Make the next pass that of a saved position (or the one after it, if that was over); with `resume` it begins there."""
        self.next, self.resume = position.epoch + position.left, 0 if position.left or not resume else position.samples
        self.left = LoaderPass(position.epoch, position.samples, position.batches) if position.left else None
        self.loaded, self.waits, self.continues, self.trained = position, True, resume and not position.left, trained
        for loader_pass in self.live:  # it does not say where the loader stands, unless it is read on
            loader_pass.kept_at = loader_pass.handed

    def set(self, epoch: int) -> int:
        """Make that epoch the next one, and return how many samples of a position that was loaded for another epoch are given up."""
        lost = self.resume if epoch != self.next else 0
        if epoch != self.next:
            self.next, self.resume, self.waits = epoch, 0, False
        self.left = None
        return lost

    def following(self, trained: int = 0) -> PassStart:
        """Return where the next pass begins if nothing is skipped; `trained` is what `GradientState.trained` is now.

        A pass that was saved without anything being trained in it, and that another loader is trained on before, was an evaluation:
        what was computed of it went with the process that saved, so it begins anew.
        """
        loaded = self.loaded
        if not self.resume or loaded is None:
            return PassStart(self.next, 0, 0)
        if loaded.untrained and trained != self.trained:
            return PassStart(self.next + 1, 0, 0, replaced=loaded)
        return PassStart(self.next, loaded.batches, self.resume, loaded=True)

    def after(self, batches: int, is_over: Callable[[LoadedPosition], bool]) -> PassStart:
        """Return where a pass begins that skips so many batches.

        A position that was loaded and not read yet says which epoch is meant; the number is counted from the start of that epoch, not
        from the position. Without one, it is the epoch that is being read, or was left after at least so many batches; else the next.
        `is_over` tells whether nothing of its epoch is left at a position: then the epoch after it is meant, unless the number is that
        of the position itself.
        """
        loaded = self.loaded
        if loaded is not None and self.waits and self.continues:
            if batches == loaded.batches:
                return PassStart(loaded.epoch, batches, loaded.samples, loaded=loaded.samples > 0)
            over = is_over(loaded)
            return PassStart(loaded.epoch + over, batches, replaced=None if over and not batches else loaded)
        live = self.passes()
        present = live[-1] if live else self.left
        if present is None or not 0 < batches <= present.begun_at + present.handed:
            return PassStart(self.next, batches, self._place_of(self.next, batches))
        return PassStart(present.epoch, batches, self._place_of(present.epoch, batches), present)

    def take(self, start: PassStart) -> None:
        """Record that a pass begins there."""
        self.next, self.resume, self.left, self.waits = max(self.next, start.epoch + 1), 0, None, False

    def passes(self, trained: int | None = None) -> list[LoaderPass]:
        """Return the passes that the script is reading, outermost first; `trained` is what `GradientState.trained` is now.

        One that has stood still since a position was loaded, or while a later one was trained on, is not among them: the script is about
        to leave it, or looked at a batch and kept the iterator.
        """
        for loader_pass in self.live:
            if trained is not None and loader_pass.trained != trained:
                self.record_trained(loader_pass)
        return [loader_pass for loader_pass in self.live if loader_pass.kept_at != loader_pass.handed]

    def record_trained(self, loader_pass: LoaderPass) -> None:
        """Record that a pass was trained on: those around it that have not moved since are not being read."""
        for outer, handed in loader_pass.enclosing_passes:
            if outer.handed == handed:
                outer.kept_at = handed

    def is_at_end(self, epoch: int, start: int) -> bool:
        """Return whether a saved pass had handed out everything at this position."""
        loaded = self.loaded
        return loaded is not None and loaded.ended and (loaded.epoch, loaded.samples) == (epoch, start)

    def _place_of(self, epoch: int, batches: int) -> int | None:
        """Return the position in samples of a loaded position: on another number of processes, batches are of another size."""
        loaded = self.loaded
        return loaded.samples if loaded is not None and (loaded.epoch, loaded.batches) == (epoch, batches) else None


POSITION_KINDS: Mapping[str, str] = {
    "samples": "map-style data in batches of a fixed size",
    "batches": "batches of a batch sampler of the script's own",
    "positions": "map-style data without batching (batch_size=None)",
    "stream": "iterable data in batches of a fixed size",
    "ready": "iterable data that comes in batches (batch_size=None)",
}
"""What is counted, by the kind of loader."""

_NUMBER_KEYS = ("epoch", "batches", "samples", "seed")
_FLAG_KEYS = ("left", "ended", "interrupted", "untrained")
_KNOWN_KEYS = {*_NUMBER_KEYS, *_FLAG_KEYS, "kind", "length", "batch", "order_version"}
_MAX_NUMBER = 2**53


def check_position(state: Any, *, kind: str, length: int | None, stride: int, extras: tuple[str, ...], name: str) -> None:
    """Raise a `ConfigError` unless this is a position of such a loader; `name` is that of its dataset, `length` that of a whole pass."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"a {type(state).__name__} is not a state of a prepared loader: pass a result of its state_dict()")
    missing = [key for key in _NUMBER_KEYS if key not in state]
    if missing:
        raise ConfigError(f"not a state of a prepared loader: it has no {', '.join(missing)}; pass a result of its state_dict()")
    for key in (*_NUMBER_KEYS, *_FLAG_KEYS, "batch"):
        value = state.get(key, 0)
        largest = 2**64 if key == "seed" else _MAX_NUMBER
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < largest:
            raise ConfigError(
                f"the state of a loader of {name} has {key}={value!r}: it is a whole number from 0 (and below {largest}), so this state "
                "was changed or damaged; pass what its state_dict() gave"
            )
    saved = state.get("kind", kind)
    if saved != kind:
        there = POSITION_KINDS.get(saved, repr(saved)) if isinstance(saved, str) else repr(saved)
        raise ConfigError(
            f"the state of a loader of {there} was given to one of {POSITION_KINDS[kind]} ({name}), where a position means something "
            "else: load it into the loader that it was saved of (prepare the same loaders in the same order)"
        )
    version = state.get("order_version", 1)
    if type(version) is not int or version not in ORDER_VERSIONS:
        raise ConfigError(
            f"the state of a loader of {name} has order_version={version!r}, and this version of slipstream knows "
            f"{', '.join(map(str, ORDER_VERSIONS))}: the rest of its epoch would be in another order. Resume with the version of "
            "slipstream that saved it, or begin a new epoch (without loading the position)."
        )
    unknown = sorted(str(extra) for extra in set(state) - _KNOWN_KEYS - set(extras))
    if unknown:
        raise ConfigError(f"the state of a loader of {name} has {', '.join(unknown)[:200]}, which such a loader does not know")
    _check_length(state, length, stride, name)


def _check_length(state: Mapping[str, Any], length: int | None, stride: int, name: str) -> None:
    before = state.get("length")
    if before is not None and (isinstance(before, bool) or not isinstance(before, int) or not 0 <= before < _MAX_NUMBER):
        raise ConfigError(f"the state of a loader of {name} has length={before!r}: it is a whole number from 0, or None")
    most = length if length is None or "length" in state else length + stride - 1  # one that says no length counts a last batch as full
    if most is not None and state["samples"] > most:
        raise ConfigError(
            f"the position is {state['samples']} into a loader of {name} that has only {length} now"
            + (f" (it had {before})" if before is not None else "")
            + ": the data became shorter. Give it the data of the saved run, or begin a new epoch (without loading the position)."
        )


def read_position(state: Mapping[str, Any], *, length: int | None, name: str) -> LoadedPosition:
    """Return the position in a checked state, and warn if the data has another length now."""
    before = state.get("length")
    if before is not None and length is not None and before != length and state["samples"]:
        get_logger(__name__).warning(
            f"a loader of {name} had {before} samples (or batches) when its position was saved, and has {length} now: a shuffled order is "
            "another one, so in this epoch some samples may come twice and others never."
        )
    extra = {key: value for key, value in state.items() if key not in _KNOWN_KEYS}
    left, ended, interrupted, untrained = (bool(state.get(flag, 0)) for flag in _FLAG_KEYS)
    return LoadedPosition(state["epoch"], state["batches"], state["samples"], left, ended, extra, interrupted, untrained)


def report_pass_start(start: PassStart, epochs: EpochState, *, skips: bool, is_over: Callable[[LoadedPosition], bool], name: str) -> None:
    """Log what a pass makes of the loaded position, where that may surprise; `skips`: it is a pass of `skip_first_batches`."""
    loaded, epoch, logger = epochs.loaded, start.epoch, get_logger(__name__)
    assert loaded is not None
    there = f"{_format_batches(loaded.batches)} into epoch {loaded.epoch}"
    if start.loaded and is_over(loaded):
        logger.warning(
            f"the pass over {name} that begins now is empty: its position was saved after the last batch of epoch {epoch}. This pass "
            f"completes epoch {epoch}, and the next one is epoch {epoch + 1}. If the counter of your loop already stands at epoch "
            f"{epoch + 1}, call loader.set_epoch(epoch) before each pass."
        )
    elif skips and start.loaded:
        logger.info(
            f"skip_first_batches(loader, {start.batches}) is not needed: the loaded position of this loader of {name} is {there} already, "
            "and the pass continues there. Nothing is skipped twice."
        )
    elif skips and start.replaced is not None:
        _warn_of_replaced_position(start, there, name)
    elif start.replaced is not None:
        logger.info(
            f"the position of a loader of {name} was saved in the middle of an evaluation ({_format_batches(loaded.batches)} into it), "
            "whose results are gone: the evaluation begins anew."
        )
    elif not skips and loaded.interrupted and epochs.left is not None:
        logger.warning(
            f"the position of a loader of {name} was saved after its loop had been left by break, {there}: the pass that begins now is "
            f"epoch {loaded.epoch + 1}, as it would have been in the saved run. To read the rest of epoch {loaded.epoch}, write "
            f"skip_first_batches(loader, {loaded.batches}). A checkpoint that is saved before the break continues there by itself."
        )


def _warn_of_replaced_position(start: PassStart, there: str, name: str) -> None:
    """Warn that `skip_first_batches` gives up a loaded position, which is `there`."""
    begin = f"skip_first_batches(loader, {start.batches})"
    if not start.batches:
        text = (
            f"{begin} gives up the loaded position of this loader of {name} ({there}): epoch {start.epoch} begins anew, so these batches "
            "come again. Iterate over the loader itself to continue there."
        )
    else:
        text = (
            f"{begin} begins {_format_batches(start.batches)} into epoch {start.epoch}, and gives up the loaded position of this loader "
            f"of {name}, which is {there}. The number counts from the start of the epoch, not from the loaded position. Iterate over the "
            "loader itself to continue at the loaded position."
        )
    get_logger(__name__).warning(text)


def warn_of_load_inside_loop(loader_pass: LoaderPass, epochs: EpochState, name: str) -> None:
    """Warn that a loop was read on after a position had been loaded inside of it."""
    get_logger(__name__).warning(
        f"a position was loaded inside of a loop over {name} (epoch {loader_pass.epoch}), and the loop went on with batches of its own. "
        f"The next loop begins at the loaded position, in epoch {epochs.next}. Leave the loop (break) after load_state to continue there "
        "at once."
    )


def warn_of_set_epoch(epoch: int, loaded: LoadedPosition) -> None:
    """Warn that `set_epoch` gives up a loaded position."""
    get_logger(__name__).warning(
        f"set_epoch({epoch}) gives up the position that was loaded for this loader ({loaded.samples} into epoch {loaded.epoch}): the next "
        f"pass is a whole one. Begin the loop with epoch {loaded.epoch} to continue there."
    )


def _format_batches(batches: int) -> str:
    return f"{batches} batch{'' if batches == 1 else 'es'}"
