"""`PreparedLoader`: what `prepare` makes of a `DataLoader`, whatever its data is like.

This file holds what all kinds share: one generator that enters and leaves the gradient state, tells of the batch that it hands out,
moves it to the device, and counts. The kinds say which batches there are: `mapped.py` (data with positions), `stream.py`
(iterable data), `dispatch.py` (rank 0 reads).

What it promises: every iteration is the next epoch, also after a `break`, until `set_epoch` says otherwise; whatever ends an
iteration, the gradient state hears of it; a loader can be iterated inside itself, pickled and copied. Attributes of the script's
own loader can be read here.
What it never does: read ahead, or touch the user's random state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from slipstream.comm.nested import send_to_device
from slipstream.data.clock import Clock, Loaded, Pass
from slipstream.data.describe import describe
from slipstream.data.metered import metered
from slipstream.data.options import DataLoaderConfiguration
from slipstream.data.order import inner_samplers
from slipstream.data.place import Place
from slipstream.data.position import check_position, read_position
from slipstream.errors import ConfigError
from slipstream.logging import get_logger
from slipstream.runtime.current import current
from slipstream.runtime.gradient_state import GradientState, Shares

__all__ = ["Handed", "PreparedLoader", "get_sampler"]

Handed = tuple[Any, "Shares | None", bool, "int | None"]
"""A batch, how it was dealt out (None for evenly and in full), whether it is the last one, and how many follow (None for unknown)."""

_ALIGNED = ("samples", "stream")
"""Kinds of data whose batches begin at multiples of their size, wherever a pass begins."""

_HOST = torch.empty(0).device.type


class PreparedLoader(DataLoader[Any]):
    """A loader of one rank's part of the batches. A kind of loader implements `_batches`, `_count` and `_given`."""

    handed: int = 0
    end_of_dataloader: bool = False
    remainder: int = -1
    batches_left: int | None = None
    shares: Shares | None = None

    def __init__(  # that of DataLoader is not called: its attributes are those of the original
        self,
        original: DataLoader[Any],
        *,
        place: Place,
        config: DataLoaderConfiguration,
        seed: int,
        device: torch.device | None,
        put_on_device: bool,
        gradient_state: GradientState,
        steps_per_update: int | None = None,
    ) -> None:
        self.original = original
        """The loader that the script made."""
        self.place = place
        self.config = replace(config)
        self.seed = seed
        self.device = device
        self.put_on_device = put_on_device
        self.non_blocking = config.non_blocking
        self.gradient_state = gradient_state
        self.steps_per_update = steps_per_update
        """Batches per update, where `effective_batch_size` decides them."""
        self.last_pass: Pass | None = None
        """The pass that was read to its end last."""
        self.at_start: Callable[[], None] | None = None
        """Called when an iteration begins."""
        self.compared: tuple[bytes, bytes] | None = None
        """Digests of the data that the ranks compare before a pass; see `data/agree.py`."""
        self.lines_told = False
        self._uneven = False
        self._clock = Clock()
        self._skipping = 0
        self._move = _mover(device, put_on_device, config.non_blocking)

    # -- what a kind of loader says -------------------------------------------------------------------------------

    def _batches(self, epoch: int, start: int) -> Iterator[Handed]:
        """This rank's batches of an epoch from a position on; `start` counts samples of all ranks (see `_stride`)."""
        raise NotImplementedError

    def _count(self, start: int) -> int:
        """How many batches each rank gets from a position on; TypeError where that is not known."""
        raise NotImplementedError

    @property
    def _given(self) -> tuple[int, ...]:
        """Samples that each rank is handed in a full batch (ones, where the size of a batch is not known)."""
        raise NotImplementedError

    @property
    def _stride(self) -> int:
        """How far one full batch of all ranks moves the position."""
        return sum(self._given)

    @property
    def _kind(self) -> str:
        """What a position counts: one of `position.KINDS`."""
        raise NotImplementedError

    def _length(self) -> int | None:
        """How far a whole pass moves the position; None where that is not certain."""
        return None

    _extras: tuple[str, ...] = ()
    """Names of what a position holds besides numbers."""

    def _place_state(self, turn: Pass | None, samples: int) -> dict[str, Any]:
        """What a position needs besides numbers."""
        return {}

    def _check_place(self, state: Mapping[str, Any]) -> None:
        """Raises if what a position holds besides numbers does not fit; changes nothing."""

    def _load_place(self, position: Loaded) -> Loaded:
        """Takes what a position holds besides numbers; the position that the loader goes on with."""
        return position

    def _replan(self) -> None:
        """`uneven` was changed."""

    def _known_remainder(self, start: int) -> int:
        """`remainder` as far as it is known before the first batch."""
        return -1

    # -- iterating ------------------------------------------------------------------------------------------------

    __setattr__ = object.__setattr__  # type: ignore[assignment]  # torch's guards its own loaders, at the price of a call each time

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator of ours, not torch's iterator
        clock, earlier = self._clock, None
        if self._skipping:
            epoch, earlier = clock.take_present(self._skipping)
            start = self._skipped_to(epoch)
        else:
            epoch, start = clock.take()
        turn = Pass(epoch, start, start // self._stride if start else 0)
        turn.resumed = start > 0 and not self._skipping
        if earlier is not None:
            turn.begin = earlier.begin
        meter, batches = self.gradient_state.meter, self._run(turn)
        if meter is None:
            return batches
        rank = self.place.rank
        return metered(batches, meter, self, rank, None if self.original.batch_size is None else self._given[rank])

    def _skipped_to(self, epoch: int) -> int:
        """Where a pass begins that skips: so many batches as they are now, or the position that was loaded, if it is meant."""
        place = self._clock.place_of(epoch, self._skipping)
        return self._skipping * self._stride if place is None else place

    def _run(self, turn: Pass) -> Iterator[Any]:
        state, clock, move = self.gradient_state, self._clock, self._move
        outer = (self.handed, self.end_of_dataloader, self.remainder, self.batches_left, self.shares) if clock.live else None
        exhausted, previous = False, None
        clock.live.append(turn)
        state.enter(self)
        self.handed, self.end_of_dataloader, self.shares, self.batches_left = 0, False, None, None
        try:
            if self.at_start is not None:
                self.at_start()
            self.remainder = self._known_remainder(turn.start)
            batches = iter(()) if clock.is_at_end(turn.epoch, turn.start) else self._batches(turn.epoch, turn.start)
            for batch, shares, end, left in batches:
                if shares is not previous:
                    turn.note(shares)
                    self.shares = previous = shares
                if end:
                    self.end_of_dataloader = turn.ended = True
                    self.remainder = 0 if shares is None or shares.total == shares.full else shares.total
                self.batches_left = left
                self.handed = turn.handed = turn.handed + 1
                yield batch if move is None else move(batch)
            exhausted = True
        finally:
            self._finish(turn, exhausted)
            state.leave(self, exhausted=exhausted)
            if outer is not None:
                self.handed, self.end_of_dataloader, self.remainder, self.batches_left, self.shares = outer
                if clock.live and self not in state.dataloader_references:
                    state.enter(self)

    def _finish(self, turn: Pass, exhausted: bool) -> None:
        clock = self._clock
        clock.live.remove(turn)
        self._skipping = 0
        if exhausted:
            self.last_pass = turn
        elif clock.next == turn.epoch + 1:
            clock.left = turn

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; those after it count on from there."""
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise ConfigError(f"set_epoch({epoch!r}): epochs are whole numbers; write e.g. set_epoch(3)")
        lost, loaded = self._clock.set(epoch), self._clock.loaded
        if lost and loaded is not None:
            get_logger(__name__).warning(
                f"set_epoch({epoch}) gives up the position that was loaded for this loader ({lost} into epoch {loaded.epoch}): the next "
                f"pass is a whole one. Begin the loop with epoch {loaded.epoch} to go on there."
            )

    @property
    def uneven(self) -> bool:
        """Whether ranks may have different numbers of batches, because the script deals with that (`join_uneven_inputs`)."""
        return self._uneven

    @uneven.setter
    def uneven(self, uneven: bool) -> None:
        if uneven != self._uneven:
            self._uneven = uneven
            self._replan()

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or else the one that comes next."""
        return self._clock.live[-1].epoch if self._clock.live else self._clock.next

    def __len__(self) -> int:
        """Batches of one iteration, the same on every rank; of a pass that begins later, those of this pass until it is over."""
        clock = self._clock
        if self._skipping:
            epoch = clock.live[-1].epoch if clock.live else clock.left.epoch if clock.left is not None else clock.next
            start = self._skipped_to(epoch)
        elif clock.live and clock.live[-1].resumed:
            epoch, start = clock.live[-1].epoch, clock.live[-1].start
        else:
            epoch, start = clock.next, clock.resume
        return 0 if start and clock.is_at_end(epoch, start) else self._count(start)

    # -- position (position.py) -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in plain data: `samples` of the epoch's order were handed out, to all ranks together.

        Where a batch sampler of the user's own decides about batches, `samples` counts those. `left` is 1 for a pass that is over for
        whoever goes on: left by `break`, or read inside of a batch of another loader; the next one is another epoch. `ended` is 1
        after the last batch, inside of the loop.
        """
        clock, loaded = self._clock, self._clock.loaded
        rest = {"seed": self.seed, "kind": self._kind, "length": self._length(), "batch": self._stride}
        if clock.waits and loaded is not None:  # nothing was read since it was loaded
            numbers = {"epoch": loaded.epoch, "batches": loaded.batches, "samples": loaded.samples, "left": int(loaded.left)}
            return {**numbers, "ended": int(loaded.ended), **rest, **loaded.extra}
        turn = clock.live[0] if clock.live else clock.left
        if turn is None:
            return {"epoch": clock.next, "batches": 0, "samples": 0, "left": 0, "ended": 0, **rest, **self._place_state(None, 0)}
        left = not clock.live or self.gradient_state.is_inside(lambda one: one._clock is clock)
        batches = turn.start // self._stride + turn.handed
        samples = self._moved(turn)
        numbers = {"epoch": turn.epoch, "batches": batches, "samples": samples, "left": int(left), "ended": int(turn.ended)}
        return {**numbers, **rest, **self._place_state(turn, samples)}

    def _moved(self, turn: Pass) -> int:
        """The position after what a pass handed out; its last batch may have been a short one."""
        stride, aligned = self._stride, self._kind in _ALIGNED
        if not turn.handed:
            return turn.start
        before = turn.start - (turn.start % stride if aligned else 0) + (turn.handed - 1) * stride
        shares = turn.record[-1][1] if turn.ended and turn.record else None
        if shares is None or stride == 1:
            return before + stride
        if not aligned:
            return before + stride - sum(not count for count in shares.real)
        return max(before, turn.start) + min(stride, shares.total)

    def check_state_dict(self, state: Any) -> None:
        """Raises a `ConfigError` unless this is a position of this loader; changes nothing."""
        name = type(self.original.dataset).__name__
        check_position(state, kind=self._kind, length=self._length(), stride=self._stride, extras=self._extras, name=name)
        self._check_place(state)

    def load_state_dict(self, state: Mapping[str, Any], *, resume: bool | None = None) -> None:
        """Takes the seed and the epoch of a saved position; with `resume`, the next iteration goes on at that position.

        `resume` is what the configuration says (`resume="auto"`, `use_stateful_dataloader`) unless given. Without it
        `skip_first_batches` goes on, in the order of that epoch.
        """
        self.check_state_dict(state)
        resume = self.config.resumes if resume is None else resume
        position = read_position(state, length=self._length(), name=type(self.original.dataset).__name__)
        if not resume and (position.ended or self._is_over(position.samples)):
            position = replace(position, left=True)
        self.seed = state["seed"]
        self._clock.load(self._load_place(position), resume=resume)
        if self._clock.left is not None:
            self._clock.left.begin = (position.extra.get("order") or {}).get("begin")

    def _is_over(self, samples: int) -> bool:
        """Whether nothing of an epoch is left at this position."""
        try:
            return samples > 0 and self._count(samples) == 0
        except TypeError:
            return False

    def skipping(self, num_batches: int) -> PreparedLoader:
        """A loader whose first pass begins after so many batches of the present epoch; both count the same epochs."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._skipping = self._skipping + num_batches
        return twin

    def describe(self) -> dict[str, Any]:
        """What is read and in which order, for the receipt of a run: plain data, and no sample is read for it.

        Two loaders with the same `order` read the same samples in the same order, on any number of processes. After a position was
        loaded, the seed is that of the saved run.

        >>> from slipstream.data.prepare import prepare_data_loader
        >>> told = prepare_data_loader(DataLoader(range(10), batch_size=2, shuffle=True), data_seed=7).describe()
        >>> told["length"], told["sampler"], told["batch"], told["seed"]
        (10, 'RandomSampler', 2, 7)
        """
        return describe(self)

    @property
    def _dropped(self) -> int:
        """How many samples make a batch (or an update) that is dropped if it is not full, where short ones are."""
        return self._stride * (self.steps_per_update or 1)

    @property
    def _parts_of_their_own(self) -> int:
        """How many processes read parts of their own; 1 where all read the same."""
        return 1

    # -- the script's own loader ----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or "original" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.original, name)

    @property
    def total_batch_size(self) -> int:
        """Samples in a full batch of all ranks together."""
        return sum(self._given)

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset."""
        return len(self.original.dataset)  # type: ignore[arg-type]  # a dataset without a length says so itself

    def get_sampler(self) -> Any:
        """The innermost sampler of the script's loader."""
        return get_sampler(self.original)

    # -- copies ---------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process: the gradient state, the way to the other processes, passes under way."""
        place = replace(self.place, channel=_channel)
        state = {**self.__dict__, "place": place, "gradient_state": None, "last_pass": None, "at_start": None, "_move": None}
        state["plugin"] = self.gradient_state.plugin
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        plugin = state.pop("plugin")
        self.__dict__.update(state)
        self.gradient_state = GradientState(copy.copy(plugin))
        self._move = _mover(self.device, self.put_on_device, self.non_blocking)


def get_sampler(dataloader: Any) -> Any:
    """The innermost sampler of a loader or of its batch sampler.

    >>> type(get_sampler(DataLoader(range(4), batch_size=2))).__name__
    'SequentialSampler'
    """
    samplers = inner_samplers(dataloader)[1:]
    return samplers[-1] if samplers else None


def _channel() -> Any:
    return current().channel()


def _mover(device: torch.device | None, put_on_device: bool, non_blocking: bool) -> Callable[[Any], Any] | None:
    if not put_on_device or device is None or torch.device(device).type == _HOST:
        return None
    return partial(send_to_device, device=device, non_blocking=non_blocking)
