"""`PreparedLoader`: what `prepare` returns for a `DataLoader`, whatever kind of data it reads.

This is the part that all kinds share: one generator that enters and leaves the gradient state, records the batch that it hands out, moves
it to the device, and counts. `map_loader.py`, `stream_loader.py` and `dispatch_loader.py` say which batches there are. Every iteration is
the next epoch, also after a `break`, until `set_epoch` is called; however an iteration ends, the gradient state is told. A loader can be
iterated inside itself, pickled and copied, and attributes of the user's loader can be read on it. It never reads ahead and never touches
the user's random state. With timing on, it also records how long the loop waited for data and how many samples and tokens it got.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterDataPipe

from slipstream.data.epoch_state import (
    EpochPass,
    EpochState,
    LoadedPosition,
    PassStart,
    check_position,
    read_position,
    report_pass_start,
    warn_of_load_inside_loop,
    warn_of_set_epoch,
)
from slipstream.data.fingerprint import describe_loader
from slipstream.data.options import DataLoaderConfiguration, DataRank
from slipstream.data.order import list_samplers
from slipstream.devices.table import CPU
from slipstream.distributed.current import current
from slipstream.distributed.gradient_state import BatchShares, GradientState, MicroBatch
from slipstream.distributed.pytree import ignorant_find_batch_size, send_to_device
from slipstream.errors import ConfigError
from slipstream.observability.timing.meter import DATA, LEAVE, PASS_BEGIN, PASS_END, SAMPLES_HANDED, STEP_END, TOKENS_COUNTED, Meter

__all__ = ["HandedBatch", "PreparedLoader", "changes_by_epoch", "get_sampler", "keeps_workers", "time_batches"]


class _TimedLoader(Protocol):
    current: MicroBatch | None


def time_batches(batches: Iterator[Any], meter: Meter, loader: _TimedLoader, rank: int, size: int | None) -> Iterator[Any]:
    """The same batches. `size` is how many samples a full one has on this rank; None if only a batch can tell."""
    meter.begin()
    add, clock, number, inside = meter.add, meter.clock, 0, True
    measure: Callable[[Any], int] = _count_by_batch_size
    count: Callable[[Any], int] | None = None
    try:
        while True:
            add(DATA)
            now = clock()
            add(now)
            inside = True
            if meter.updated:  # as `Meter.end_step`
                add(STEP_END)
                add(0)
                meter.updated = False
                meter.step += 1
            if now >= meter.due:
                meter.attend(now)
            if not number:
                meter.passes = number = meter.passes + 1
                add(PASS_BEGIN)
                add(number)
                batch = next(batches)
                count, measure = meter.token_counter(batch), _choose_counter(batch)
            else:
                batch = next(batches)  # its StopIteration, and any other exception, ends the pass below
            add(LEAVE)
            add(clock())
            inside = False
            add(SAMPLES_HANDED)
            if size is None:
                add(measure(batch))
            else:
                current = loader.current
                shares = None if current is None else current.shares
                add(size if shares is None else shares.real[rank])
            if count is not None:
                add(TOKENS_COUNTED)
                add(count(batch))
            yield batch
    except StopIteration:
        return
    finally:
        meter.leave() if inside else meter.tick()
        batches.close()  # type: ignore[attr-defined]  # a generator
        add(PASS_END)
        add(number)


def _choose_counter(batch: Any) -> Callable[[Any], int]:
    """How the samples of batches like this one are counted: by the first tensor in it, wherever that is."""
    if isinstance(batch, torch.Tensor) and batch.ndim:
        return len
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    key, first = next(iter(entries), (None, None))
    return (lambda batch: len(batch[key])) if isinstance(first, torch.Tensor) and first.ndim else _count_by_batch_size


def _count_by_batch_size(batch: Any) -> int:
    return ignorant_find_batch_size(batch) or 1


HandedBatch = tuple[Any, "BatchShares | None", bool, "int | None"]
"""A batch, how it was dealt out (None for evenly and in full), whether it is the last one, and how many follow (None for unknown)."""

_ALIGNED_KINDS = ("samples", "stream")
"""Kinds of data whose batches begin at multiples of their size, wherever a pass begins."""

_HOST = CPU.type


class PreparedLoader(DataLoader[Any]):
    """A loader of one rank's part of the batches. A kind of loader implements `_batches`, `_count` and `_given`."""

    current: MicroBatch | None = None
    """The batch handed out last, while a pass is under way."""
    remainder: int = -1
    merges: bool = False
    """Whether several batches are worked on in one go, as far as that was seen."""
    beside: Any = None
    """A weak reference to the loader that this one is known to be read beside."""

    def __init__(  # that of DataLoader is not called: its attributes are those of the original
        self,
        original: DataLoader[Any],
        *,
        place: DataRank,
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
        self.device = device
        self.put_on_device = put_on_device
        self.non_blocking = config.non_blocking
        self.gradient_state = gradient_state
        self.steps_per_update = steps_per_update
        """Batches per update, where `effective_batch_size` decides them."""
        self.last_pass: EpochPass | None = None
        """The pass that was read to its end last."""
        self.at_start: Callable[[], None] | None = None
        """Called when an iteration begins."""
        self.compared: tuple[bytes, bytes] | None = None
        """Digests of the data that the ranks compare before a pass; see `data/fingerprint.py`."""
        self._uneven = False
        self._clock = EpochState(seed)
        self._skipping: int | None = None
        """How many batches `skip_first_batches` leaves out of the first pass; None after that, and in other loaders."""
        self._begun: tuple[int, int] | None = None
        """Epoch and position where a pass that skips began, while it is under way."""
        self._move = _make_mover(device, put_on_device, config.non_blocking)

    # -- what a kind of loader says -------------------------------------------------------------------------------

    def _batches(self, epoch: int, start: int) -> Iterator[HandedBatch]:
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
    def _dataset_name(self) -> str:
        return type(self.original.dataset).__name__

    @property
    def _kind(self) -> str:
        """What a position counts: one of `position.KINDS`."""
        raise NotImplementedError

    def _length(self) -> int | None:
        """How far a whole pass moves the position; None where that is not certain."""
        return None

    _extras: tuple[str, ...] = ()
    """Names of what a position holds besides numbers."""

    def _place_state(self, turn: EpochPass | None, samples: int) -> dict[str, Any]:
        """What a position needs besides numbers."""
        return {}

    def _check_place(self, state: Mapping[str, Any]) -> None:
        """Raises if what a position holds besides numbers does not fit; changes nothing."""

    def _load_place(self, position: LoadedPosition) -> LoadedPosition:
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
        turn = self._open()
        meter, batches = self.gradient_state.meter, self._run(turn)
        if meter is None:
            return batches
        rank = self.place.rank
        return time_batches(batches, meter, self, rank, None if self.original.batch_size is None else self._given[rank])

    def _open(self) -> EpochPass:
        """The pass that begins now, at the place where it is due."""
        clock = self._clock
        if clock.live:
            self._keep_position(clock.live[-1])
        start, position = self._start()
        if clock.waits and clock.loaded is not None:
            report_pass_start(start, clock, skips=self._skipping is not None, is_over=self._is_over, name=self._dataset_name)
        clock.take(start)
        if self._skipping is not None:
            self._begun = start.epoch, position
        state = self.gradient_state
        turn = EpochPass(start.epoch, position, start.batches, resumed=start.loaded, trained=state.trained, inside=state.position())
        turn.around = tuple((outer, outer.handed) for outer in clock.live)
        if start.earlier is not None:
            turn.begin = start.earlier.begin
        return turn

    def _start(self) -> tuple[PassStart, int]:
        """Where the next pass begins, and that position in samples; changes nothing."""
        clock, trained = self._clock, self.gradient_state.trained
        start = clock.following(trained) if self._skipping is None else clock.after(self._skipping, self._is_over)
        if start.samples is not None:
            return start, start.samples
        earlier = start.earlier
        if earlier is None or start.batches < earlier.begun_at:
            return start, start.batches * self._stride
        part = EpochPass(earlier.epoch, earlier.start, earlier.begun_at)
        part.handed = start.batches - earlier.begun_at
        return start, self._moved(part)

    def _run(self, turn: EpochPass) -> Iterator[Any]:
        state, clock, move = self.gradient_state, self._clock, self._move
        outer = (self.current, self.remainder)
        exhausted, previous, steps = False, None, self.steps_per_update
        clock.live.append(turn)
        state.enter(turn, self)
        self.current = None
        try:
            if self.at_start is not None:
                self.at_start()
            self.remainder = self._known_remainder(turn.start)
            batches = iter(()) if clock.is_at_end(turn.epoch, turn.start) else self._batches(turn.epoch, turn.start)
            for batch, shares, end, left in batches:
                if shares is not previous:
                    turn.note(shares)
                    previous = shares
                if end:
                    turn.ended = True
                    self.remainder = 0 if shares is None or shares.total == shares.full else shares.total
                if move is not None:
                    batch = move(batch)
                self.current = turn.hand_out(batch, end, left, shares, steps)
                yield batch
            exhausted = True
        finally:
            self._finish(turn, exhausted)
            state.leave(turn, exhausted=exhausted)
            if clock.live:  # it is being read inside of itself
                self.current, self.remainder = outer

    def _finish(self, turn: EpochPass, exhausted: bool) -> None:
        clock = self._clock
        clock.live.remove(turn)
        trained = turn.trained != self.gradient_state.trained
        if trained:
            clock.note_trained(turn)
        turn.around = ()
        if clock.waits and turn.kept_at is not None and turn.handed > turn.kept_at:
            warn_of_load_inside_loop(turn, clock, self._dataset_name)
        if not exhausted and self._keep_position(turn):
            return
        self._skipping = self._begun = None
        if exhausted:
            self.last_pass = turn
        elif clock.next == turn.epoch + 1 and not clock.waits and (turn.begun_at or trained or turn.handed > 1):
            turn.interrupted = trained and not turn.ended
            clock.left = turn

    # -- the batch handed out last --------------------------------------------------------------------------------

    @property
    def handed(self) -> int:
        """How many batches were handed out in this iteration."""
        return 0 if self.current is None else self.current.number

    @property
    def end_of_dataloader(self) -> bool:
        """Whether it was the last one of this iteration, on every rank."""
        return self.current is not None and self.current.end

    @property
    def batches_left(self) -> int | None:
        """How many batches follow; None where that is not known yet."""
        return None if self.current is None else self.current.left

    @property
    def shares(self) -> BatchShares | None:
        """How it was dealt out; None if every rank has a full share and every sample counts."""
        return None if self.current is None else self.current.shares

    def _keep_position(self, turn: EpochPass) -> bool:
        """Whether a pass was only a look at a loaded position, which is then still to be read: one batch, and nothing was trained."""
        clock, loaded = self._clock, self._clock.loaded
        looked = turn.resumed and turn.handed <= 1 and turn.trained == self.gradient_state.trained
        if not looked or clock.waits or clock.next != turn.epoch + 1 or loaded is None:
            return False
        clock.load(self._load_place(loaded), resume=True, trained=clock.trained)
        self._begun = None
        return True

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; those after it count on from there."""
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise ConfigError(f"set_epoch({epoch!r}): epochs are whole numbers; write e.g. set_epoch(3)")
        lost, loaded = self._clock.set(epoch), self._clock.loaded
        if lost and loaded is not None and not self._is_over(loaded):
            warn_of_set_epoch(epoch, loaded)

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
    def seed(self) -> int:
        """The seed of the order; after a position was loaded, that of the saved run."""
        return self._clock.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._clock.seed = seed

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or else the one that comes next."""
        passes = self._clock.passes(self.gradient_state.trained)
        return passes[-1].epoch if passes else self._clock.next

    def __len__(self) -> int:
        """Batches of a whole pass, the same on every rank, also while a loaded position is waiting or a resumed pass is under way.

        Only what `skip_first_batches` gives back is shorter, until its first pass is over.
        """
        if self._skipping is None:
            return self._count(0)
        if self._begun is None:
            start, position = self._start()
            epoch = start.epoch
        else:
            epoch, position = self._begun
        return 0 if position and self._clock.is_at_end(epoch, position) else self._count(position)

    # -- position (position.py) -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in plain data: `samples` of the epoch's order were handed out, to all ranks together.

        Where a batch sampler of the user's own decides about batches, `samples` counts those. `left` is 1 for a pass that is over for
        whoever goes on: left by `break`, or read inside of a batch of another loader; the next one is another epoch. `interrupted` is
        1 where it was left by `break` while it was trained on, `untrained` where nothing was trained since it began. `ended` is 1 after
        the last batch, inside of the loop.
        """
        clock, loaded = self._clock, self._clock.loaded
        rest = {"seed": self.seed, "kind": self._kind, "length": self._length(), "batch": self._stride}
        passes = clock.passes(self.gradient_state.trained)
        if clock.waits and loaded is not None and not passes:  # nothing was read since it was loaded
            numbers = {"epoch": loaded.epoch, "batches": loaded.batches, "samples": loaded.samples, "left": int(loaded.left)}
            flags = {flag: 1 for flag in ("interrupted", "untrained") if getattr(loaded, flag)}
            return {**numbers, "ended": int(loaded.ended), **flags, **rest, **loaded.extra}
        turn = passes[0] if passes else clock.left or self._read_ahead()
        if turn is None:
            return {"epoch": clock.next, "batches": 0, "samples": 0, "left": 0, "ended": 0, **rest, **self._place_state(None, 0)}
        left = turn is clock.left or self.gradient_state.is_inside(lambda entry: entry._clock is clock)
        ended = turn.ended and turn.done == turn.handed
        batches = turn.begun_at + turn.done
        samples = self._moved(turn)
        numbers = {"epoch": turn.epoch, "batches": batches, "samples": samples, "left": int(left), "ended": int(ended)}
        untrained = not left and turn.trained == self.gradient_state.trained
        flags = {flag: 1 for flag, given in (("interrupted", turn.interrupted), ("untrained", untrained)) if given}
        return {**numbers, **flags, **rest, **self._place_state(turn, samples)}

    def _read_ahead(self) -> EpochPass | None:
        """The pass that was read to its end, if its batches are still being worked on."""
        turn = self.last_pass
        if turn is None or self._clock.next != turn.epoch + 1 or turn.done == turn.handed:
            return None
        return turn if any(batch.number == turn.worked and batch.anchor() is not None for batch in turn.unread) else None

    def _moved(self, turn: EpochPass) -> int:
        """The position after what was worked on of a pass; its last batch may have been a short one."""
        stride, aligned, done = self._stride, self._kind in _ALIGNED_KINDS, turn.done
        if not done:
            return turn.start
        before = turn.start - (turn.start % stride if aligned else 0) + (done - 1) * stride
        shares = turn.record[-1][1] if turn.ended and turn.record and done == turn.handed else None
        if shares is None or stride == 1:
            return before + stride
        if not aligned:
            return before + stride - sum(not count for count in shares.real)
        return max(before, turn.start) + min(stride, shares.total)

    def check_state_dict(self, state: Any) -> None:
        """Raises a `ConfigError` unless this is a position of this loader; changes nothing."""
        check_position(state, kind=self._kind, length=self._length(), stride=self._stride, extras=self._extras, name=self._dataset_name)
        self._check_place(state)

    def load_state_dict(self, state: Mapping[str, Any], *, resume: bool | None = None) -> None:
        """Takes the seed and the epoch of a saved position; with `resume`, the next iteration continues at that position.

        `resume` is what the configuration says (`DataLoaderConfiguration.resume`) unless given. Without it the epoch begins anew, and
        `skip_first_batches` continues it.
        """
        self.check_state_dict(state)
        resume = self.config.resumes if resume is None else resume
        position = read_position(state, length=self._length(), name=self._dataset_name)
        if not resume and self._is_over(position):
            position = replace(position, left=True)
        self.seed = state["seed"]
        self._clock.load(self._load_place(position), resume=resume, trained=self.gradient_state.trained)
        if self._clock.left is not None:
            self._clock.left.begin = (position.extra.get("order") or {}).get("begin")

    def _is_over(self, position: LoadedPosition) -> bool:
        """Whether nothing of its epoch is left at a loaded position."""
        try:
            return position.ended or (position.samples > 0 and self._count(position.samples) == 0)
        except TypeError:  # how many batches there are is not known
            return False

    def skipping(self, num_batches: int) -> PreparedLoader:
        """A loader whose first pass begins after so many batches of the present epoch; both count the same epochs."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._skipping, twin._begun = (self._skipping or 0) + num_batches, None
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
        return describe_loader(self)

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
        place = replace(self.place, channel=_current_channel)
        own: dict[str, Any] = dict.fromkeys(("gradient_state", "last_pass", "at_start", "_move", "current", "beside"))
        state = {**self.__dict__, "place": place, **own}
        state["plugin"] = self.gradient_state.plugin
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        plugin = state.pop("plugin")
        self.__dict__.update(state)
        self.gradient_state = GradientState(copy.copy(plugin))
        self._move = _make_mover(self.device, self.put_on_device, self.non_blocking)


def get_sampler(dataloader: Any) -> Any:
    """The innermost sampler of a loader or of its batch sampler.

    >>> type(get_sampler(DataLoader(range(4), batch_size=2))).__name__
    'SequentialSampler'
    """
    samplers = list_samplers(dataloader)[1:]
    return samplers[-1] if samplers else None


def _current_channel() -> Any:
    return current().channel()


def _make_mover(device: torch.device | None, put_on_device: bool, non_blocking: bool) -> Callable[[Any], Any] | None:
    if not put_on_device or device is None or torch.device(device).type == _HOST:
        return None
    return partial(send_to_device, device=device, non_blocking=non_blocking)


def keeps_workers(original: DataLoader[Any]) -> bool:
    """Whether workers are kept from pass to pass: where the script wants it and the dataset is the same in every pass.

    Workers hold the dataset as it was when they began, so one that is told the epoch needs new ones.
    """
    return original.persistent_workers and not changes_by_epoch(original.dataset)


def changes_by_epoch(dataset: Any) -> bool:
    """Whether a dataset is told something before each pass: the epoch, or the seed of a pipeline.

    >>> changes_by_epoch([1, 2])
    False
    """
    return callable(getattr(dataset, "set_epoch", None)) or isinstance(dataset, IterDataPipe)
