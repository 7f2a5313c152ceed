"""`PreparedLoader`: what `prepare` returns for a `DataLoader`, whatever kind of data it reads.

This is the part that all kinds share: one generator that enters and leaves the gradient state, records each batch, moves it to the
device, and counts. `map_loader.py`, `stream_loader.py` and `dispatch_loader.py` say which batches there are. Every iteration is the next
epoch, also after a `break`, until `set_epoch` is called; it begins where the loader stands when its first batch is asked for. A loader can
be iterated inside itself, pickled and copied, and attributes of the user's loader can be read on it. It never reads ahead and never
touches the user's random state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterDataPipe

from slipstream.data.epoch_state import (
    EpochState,
    LoadedPosition,
    PassStart,
    check_position,
    read_position,
    report_pass_start,
    warn_of_load_inside_loop,
    warn_of_set_epoch,
)
from slipstream.data.options import LoaderSettings
from slipstream.data.order import list_samplers
from slipstream.data.plan import LastBatchPolicy
from slipstream.devices.table import CPU
from slipstream.distributed.current import current
from slipstream.distributed.gradient_state import BatchShares, GradientState, LoaderPass, MicroBatch
from slipstream.distributed.pytree import ignorant_find_batch_size, send_to_device
from slipstream.errors import ConfigError
from slipstream.observability.timing.meter import DATA, LEAVE, PASS_BEGIN, PASS_END, SAMPLES_HANDED, STEP_END, TOKENS_COUNTED, Meter

__all__ = ["HandedBatch", "PreparedLoader", "attempt", "changes_by_epoch", "clone", "get_sampler", "keeps_workers", "time_batches"]


def time_batches(batches: Iterator[Any], meter: Meter, loader: PreparedLoader, rank: int, size: int | None) -> Iterator[Any]:
    """Yield the same batches, and record how long the loop waited for them and how many samples they have.

    `size` is the number of samples of a full batch on this rank; None to count each batch.
    """
    meter.begin()
    add, clock, number, inside = meter.add, meter.clock, 0, True  # inline, so that a step does not enter the module of the meter
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
            if size is None:
                samples = measure(batch)
            else:
                current = loader.current
                shares = None if current is None else current.shares
                samples = size if shares is None else shares.real[rank]
            add(SAMPLES_HANDED)
            add(samples)
            if count is not None:
                tokens = count(batch)  # the user's own function may raise: not between a mark and its value
                add(TOKENS_COUNTED)
                add(tokens)
            yield batch
    except StopIteration:
        return
    finally:
        meter.leave() if inside else meter.tick()
        batches.close()  # type: ignore[attr-defined]  # a generator
        add(PASS_END)
        add(number)


def _choose_counter(batch: Any) -> Callable[[Any], int]:
    """Return a function that counts the samples of batches like this one by its first tensor; others are searched for one."""
    kind, is_tensor = type(batch), isinstance(batch, torch.Tensor)
    entries = batch if isinstance(batch, Mapping) else range(len(batch)) if isinstance(batch, list | tuple) else ()
    key = next(iter(entries), None)

    def count(batch: Any) -> int:
        try:
            first = None if type(batch) is not kind else batch if is_tensor else batch[key]
        except (LookupError, TypeError):
            first = None
        return len(first) if isinstance(first, torch.Tensor) and first.ndim else _count_by_batch_size(batch)

    return count


def _count_by_batch_size(batch: Any) -> int:
    return ignorant_find_batch_size(batch) or 1


HandedBatch = tuple[Any, "BatchShares | None", bool, "int | None"]
"""A batch, how it was shared (None: evenly and in full), whether it is the last one, and how many follow (None: unknown)."""

_Cloned = TypeVar("_Cloned")

_ALIGNED_KINDS = ("samples", "stream")
"""Kinds of data whose batches begin at multiples of their size, wherever a pass begins."""


class PreparedLoader(DataLoader[Any]):
    """A loader of one rank's part of the batches. Subclasses implement `_batches`, `_count` and `_given`."""

    current: MicroBatch | None = None
    """The batch handed out last, during a pass."""
    remainder: int = -1
    reads_ahead_in_groups: bool = False
    """Whether the script was seen to train on several batches at once."""
    paired_loader: Any = None
    """A weak reference to the loader beside which this one is read, as in `zip`."""

    data_parts: int = 1
    """How many processes read different parts of the data; 1 if all read the same."""

    def __init__(self, original: DataLoader[Any], settings: LoaderSettings) -> None:
        # DataLoader.__init__ is not called: the attributes are those of the original.
        self.original = original
        """The user's loader."""
        self.data_rank = settings.data_rank
        self.config = replace(settings.config)
        self.device = settings.device
        self.put_on_device = settings.put_on_device
        self.non_blocking = settings.config.non_blocking
        self.gradient_state = settings.gradient_state
        self.steps_per_update = settings.steps_per_update
        """Batches per update, if derived from `effective_batch_size`."""
        self.uneven = False
        """Whether ranks may have different numbers of batches (`join_uneven_inputs`)."""
        self.last_pass: LoaderPass | None = None
        """The last finished pass."""
        self.at_start: Callable[[], None] | None = None
        """Called when an iteration begins."""
        self.compared: tuple[bytes, bytes] | None = None
        """Digests of the data that the ranks compare before a pass; see `data/fingerprint.py`."""
        self._per_rank = settings.samples_per_rank
        """The batch size of one rank, if derived from `effective_batch_size`."""
        self._name = type(original.dataset).__name__
        self._epochs = EpochState(settings.seed)
        self._skip: int | None = None
        """How many batches `skip_first_batches` skips in the first pass; None afterwards, and in other loaders."""
        self._skip_start: tuple[int, int] | None = None
        """Epoch and position where the current skipping pass began."""
        self._move = _make_mover(self.device, self.put_on_device, self.non_blocking)

    # -- implemented by subclasses ---------------------------------------------------------------------------------

    def _batches(self, epoch: int, start: int) -> Iterator[HandedBatch]:
        """Yield this rank's batches of an epoch from a position on; `start` counts samples of all ranks (see `_stride`)."""
        raise NotImplementedError

    def _count(self, start: int) -> int:
        """Return how many batches each rank gets from a position on; raise TypeError if that is unknown."""
        raise NotImplementedError

    @property
    def _given(self) -> tuple[int, ...]:
        """Samples that each rank gets in a full batch (ones, if the batch size is unknown)."""
        raise NotImplementedError

    def _global_batch_size(self, batch_size: int) -> int:
        """Return the size of a full batch of all ranks, given the batch size of the script's loader."""
        if self._per_rank is not None:
            return self._per_rank * self.data_rank.world_size
        return batch_size if self.config.split_batches else batch_size * self.data_rank.world_size

    @property
    def _stride(self) -> int:
        """How far one full batch of all ranks moves the position."""
        return sum(self._given)

    @property
    def _kind(self) -> str:
        """What a position counts: a key of `epoch_state.POSITION_KINDS`."""
        raise NotImplementedError

    def _length(self) -> int | None:
        """Return how far a whole pass moves the position; None if uncertain."""
        return None

    _extra_keys: tuple[str, ...] = ()
    """Keys of a saved position besides numbers."""

    def _extra_state(self, loader_pass: LoaderPass | None, samples: int) -> dict[str, Any]:
        """Return the state of a position besides numbers."""
        return {}

    def _check_extra_state(self, state: Mapping[str, Any]) -> None:
        """Raise if this state of a position does not fit; change nothing."""

    def _load_extra_state(self, position: LoadedPosition) -> LoadedPosition:
        """Load the state of a position besides numbers, and return the position at which the loader continues."""
        return position

    def _replan(self) -> None:
        """Update the plan after a change of `uneven`."""

    def _known_remainder(self, start: int) -> int:
        """Return `remainder` as known before the first batch."""
        return -1

    # -- iterating ------------------------------------------------------------------------------------------------

    __setattr__ = object.__setattr__  # type: ignore[assignment]  # torch's `__setattr__` protects its own loaders, and costs a call each time

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # our own generator, not torch's iterator
        state = self.gradient_state
        meter, batches = state.meter, self._run(LoaderPass(trained=state.trained, inside=state.position()))
        if meter is None:
            return batches
        rank = self.data_rank.rank
        return time_batches(batches, meter, self, rank, None if self.original.batch_size is None else self._given[rank])

    def _open(self, loader_pass: LoaderPass) -> None:
        """Begin a pass where the loader stands now. It is called with the first batch: an unread iterator takes no epoch or position."""
        epochs, state = self._epochs, self.gradient_state
        if epochs.live:
            epochs.keep_loaded(epochs.live[-1], state.trained, self._load_extra_state)
        start, position = self._start()
        if epochs.waits and epochs.loaded is not None:
            report_pass_start(start, epochs, skips=self._skip is not None, is_over=self._is_over, name=self._name)
        epochs.take(start)
        if self._skip is not None:
            self._skip_start = start.epoch, position
        loader_pass.epoch, loader_pass.start, loader_pass.begun_at = start.epoch, position, start.batches
        loader_pass.resumed = start.loaded
        loader_pass.enclosing_passes = tuple((outer, outer.handed) for outer in epochs.live)
        if start.earlier is not None:
            loader_pass.sampler_start = start.earlier.sampler_start

    def _start(self) -> tuple[PassStart, int]:
        """Return where the next pass begins, and that position in samples; change nothing."""
        epochs, trained = self._epochs, self.gradient_state.trained
        start = epochs.following(trained) if self._skip is None else epochs.after(self._skip, self._is_over)
        if start.samples is not None:
            return start, start.samples
        earlier = start.earlier
        if earlier is None or start.batches < earlier.begun_at:
            return start, start.batches * self._stride
        part = LoaderPass(earlier.epoch, earlier.start, earlier.begun_at)
        part.handed = start.batches - earlier.begun_at
        return start, self._position(part)

    def _run(self, loader_pass: LoaderPass) -> Iterator[Any]:
        self._open(loader_pass)
        state, epochs, move = self.gradient_state, self._epochs, self._move
        outer = (self.current, self.remainder)
        exhausted, previous, steps = False, None, self.steps_per_update
        epochs.live.append(loader_pass)
        state.enter(loader_pass, self)
        self.current = None
        try:
            if self.at_start is not None:
                self.at_start()
            self.remainder = self._known_remainder(loader_pass.start)
            at_end = epochs.is_at_end(loader_pass.epoch, loader_pass.start)
            for batch, shares, end, left in () if at_end else self._batches(loader_pass.epoch, loader_pass.start):
                if shares is not previous:
                    loader_pass.record_shares(shares)
                    previous = shares
                if end:
                    loader_pass.ended = True
                    self.remainder = 0 if shares is None or shares.total == shares.full else shares.total
                if move is not None:
                    batch = move(batch)
                self.current = loader_pass.hand_out(batch, end, left, shares, steps)
                yield batch
            exhausted = True
        finally:
            self._finish(loader_pass, exhausted)
            state.leave(loader_pass, exhausted=exhausted)
            if epochs.live:  # a nested iteration over the same loader
                self.current, self.remainder = outer

    def _finish(self, loader_pass: LoaderPass, exhausted: bool) -> None:
        epochs, now = self._epochs, self.gradient_state.trained
        epochs.live.remove(loader_pass)
        trained = loader_pass.trained != now
        if trained:
            epochs.record_trained(loader_pass)
        loader_pass.enclosing_passes = ()
        if epochs.waits and loader_pass.kept_at is not None and loader_pass.handed > loader_pass.kept_at:
            warn_of_load_inside_loop(loader_pass, epochs, self._name)
        self._skip_start = None
        if not exhausted and epochs.keep_loaded(loader_pass, now, self._load_extra_state):
            return
        self._skip = None
        if exhausted:
            self.last_pass = loader_pass
        elif epochs.next == loader_pass.epoch + 1 and not epochs.waits and (loader_pass.begun_at or trained or loader_pass.handed > 1):
            loader_pass.interrupted = trained and not loader_pass.ended
            epochs.left = loader_pass

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
    def shares(self) -> BatchShares | None:
        """How it was shared; None if every rank has a full share and every sample counts."""
        return None if self.current is None else self.current.shares

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; later passes count from there."""
        if isinstance(epoch, bool) or not isinstance(epoch, int):
            raise ConfigError(f"set_epoch({epoch!r}): epochs are whole numbers; write e.g. set_epoch(3)")
        lost, loaded = self._epochs.set(epoch), self._epochs.loaded
        if lost and loaded is not None and not self._is_over(loaded):
            warn_of_set_epoch(epoch, loaded)

    @property
    def policy(self) -> LastBatchPolicy:
        """What happens to a short last batch: `even`, `exact` or `ragged` (see `plan.py`)."""
        return "ragged" if self.uneven else "even" if self.config.even_batches else "exact"

    def set_uneven(self, uneven: bool) -> None:
        """Set `uneven`, from the next iteration on."""
        if uneven != self.uneven:
            self.uneven = uneven
            self._replan()

    @property
    def seed(self) -> int:
        """The seed of the order; after a position was loaded, that of the saved run."""
        return self._epochs.seed

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or otherwise the next one."""
        passes = self._epochs.passes(self.gradient_state.trained)
        return passes[-1].epoch if passes else self._epochs.next

    def __len__(self) -> int:
        """Return how many batches a whole pass has, the same on every rank.

        That is so also while a loaded position is waiting or a resumed pass is under way. Only what
        `skip_first_batches` returns is shorter, until its first pass is over.
        """
        if self._skip is None:
            return self._count(0)
        if self._skip_start is None:
            start, position = self._start()
            epoch = start.epoch
        else:
            epoch, position = self._skip_start
        return 0 if position and self._epochs.is_at_end(epoch, position) else self._count(position)

    # -- position (epoch_state.py) --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data: `samples` of the epoch's order were handed out, to all ranks together.

        With a custom batch sampler, `samples` counts batches. `left` is 1 for a pass that a resumed run does not continue, because it
        was left by `break` or read inside a batch of another loader; the next pass is another epoch. `interrupted` is 1 if it was left by
        `break` during training, `untrained` if nothing was trained since it began, and `ended` after the last batch inside the loop.
        """
        epochs, loaded = self._epochs, self._epochs.loaded
        rest: dict[str, Any] = {"seed": self.seed, "order_version": epochs.order_version}
        rest |= {"kind": self._kind, "length": self._length(), "batch": self._stride}
        passes = epochs.passes(self.gradient_state.trained)
        if epochs.waits and loaded is not None and not passes:  # nothing was read since it was loaded
            numbers = {"epoch": loaded.epoch, "batches": loaded.batches, "samples": loaded.samples, "left": int(loaded.left)}
            flags = {flag: 1 for flag in ("interrupted", "untrained") if getattr(loaded, flag)}
            return {**numbers, "ended": int(loaded.ended), **flags, **rest, **loaded.extra}
        last = self.last_pass
        if last is not None and (epochs.next != last.epoch + 1 or not last.is_unfinished):
            last = None
        loader_pass = passes[0] if passes else epochs.left or last
        if loader_pass is None:
            return {"epoch": epochs.next, "batches": 0, "samples": 0, "left": 0, "ended": 0, **rest, **self._extra_state(None, 0)}
        left = loader_pass is epochs.left or self.gradient_state.is_inside(lambda loader: loader._epochs is epochs)
        ended = loader_pass.ended and loader_pass.done == loader_pass.handed
        batches = loader_pass.begun_at + loader_pass.done
        samples = self._position(loader_pass)
        numbers = {"epoch": loader_pass.epoch, "batches": batches, "samples": samples, "left": int(left), "ended": int(ended)}
        untrained = not left and loader_pass.trained == self.gradient_state.trained
        flags = {flag: 1 for flag, given in (("interrupted", loader_pass.interrupted), ("untrained", untrained)) if given}
        return {**numbers, **flags, **rest, **self._extra_state(loader_pass, samples)}

    def _position(self, loader_pass: LoaderPass) -> int:
        """Return the position after the batches of a pass that were trained on."""
        return loader_pass.position(self._stride, aligned=self._kind in _ALIGNED_KINDS)

    def check_state_dict(self, state: Any) -> None:
        """Raise a `ConfigError` unless this is a position of this loader; change nothing."""
        check_position(state, kind=self._kind, length=self._length(), stride=self._stride, extras=self._extra_keys, name=self._name)
        self._check_extra_state(state)

    def load_state_dict(self, state: Mapping[str, Any], *, resume: bool | None = None) -> None:
        """Load the seed and the epoch of a saved position; with `resume`, the next iteration continues at that position.

        `resume` is what the configuration says (`DataLoaderConfiguration.resume`) unless given. Without it the epoch begins anew, and
        `skip_first_batches` continues it.
        """
        self.check_state_dict(state)
        resume = self.config.resumes if resume is None else resume
        position = read_position(state, length=self._length(), name=self._name)
        if not resume and self._is_over(position):
            position = replace(position, left=True)
        self._epochs.seed, self._epochs.order_version = state["seed"], state.get("order_version", 1)
        self._epochs.load(self._load_extra_state(position), resume=resume, trained=self.gradient_state.trained)
        if self._epochs.left is not None:
            self._epochs.left.sampler_start = (position.extra.get("order") or {}).get("begin")

    def capture_position(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this loader; a subclass whose `state_dict` is of another kind overrides these three."""
        return self.state_dict()

    def check_position(self, state: Any) -> None:
        """Raise unless a checkpoint's position fits this loader; change nothing."""
        self.check_state_dict(state)

    def restore_position(self, state: Mapping[str, Any], *, resume: bool | None = None) -> None:
        """Load the position of a checkpoint; see `load_state_dict`."""
        self.load_state_dict(state, resume=resume)

    def _is_over(self, position: LoadedPosition) -> bool:
        """Return whether a loaded position is at the end of its epoch."""
        try:
            return position.ended or (position.samples > 0 and self._count(position.samples) == 0)
        except TypeError:  # the number of batches is unknown
            return False

    def skipping(self, num_batches: int) -> PreparedLoader:
        """Return a loader whose first pass begins after that many batches of the current epoch; both share their epochs."""
        twin = clone(self)
        twin._skip, twin._skip_start = (self._skip or 0) + num_batches, None
        return twin

    # -- the user's loader ----------------------------------------------------------------------------------------

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
        """Return the innermost sampler of the user's loader."""
        return get_sampler(self.original)

    # -- copies ---------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: the gradient state, the channel to the other processes, and unfinished passes."""
        data_rank = replace(self.data_rank, channel=_current_channel)
        own: dict[str, Any] = dict.fromkeys(("gradient_state", "last_pass", "at_start", "_move", "current", "paired_loader"))
        state = {**self.__dict__, "data_rank": data_rank, **own}
        state["plugin"] = self.gradient_state.plugin
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        plugin = state.pop("plugin")
        self.__dict__.update(state)
        self.gradient_state = GradientState(copy.copy(plugin))
        self._move = _make_mover(self.device, self.put_on_device, self.non_blocking)


def clone(original: _Cloned, **changes: Any) -> _Cloned:
    """Return a shallow copy of a loader or sampler with some attributes changed, past its `__init__` and `__setattr__`."""
    twin = object.__new__(type(original))
    twin.__dict__.update({**original.__dict__, **changes})
    return twin


def attempt(read: Callable[[], Any]) -> Any:
    """Return the result, or the exception, which the other ranks must get before all raise."""
    try:
        return read()
    except Exception as error:
        return error


def get_sampler(dataloader: Any) -> Any:
    """Return the innermost sampler of a loader or of its batch sampler.

    >>> type(get_sampler(DataLoader(range(4), batch_size=2))).__name__
    'SequentialSampler'
    """
    samplers = list_samplers(dataloader)[1:]
    return samplers[-1] if samplers else None


def _current_channel() -> Any:
    return current().channel()


def _make_mover(device: torch.device | None, put_on_device: bool, non_blocking: bool) -> Callable[[Any], Any] | None:
    if not put_on_device or device is None or torch.device(device).type == CPU.type:
        return None
    return partial(send_to_device, device=device, non_blocking=non_blocking)


def keeps_workers(original: DataLoader[Any]) -> bool:
    """Return whether workers are kept from pass to pass: the script asks for it and the dataset is the same in every pass.

    Workers have a copy of the dataset from their start, so a dataset that is told the epoch needs new ones.
    """
    return original.persistent_workers and not changes_by_epoch(original.dataset)


def changes_by_epoch(dataset: Any) -> bool:
    """Return whether a dataset changes with each pass: it gets the epoch, or the seed of a pipeline.

    >>> changes_by_epoch([1, 2])
    False
    """
    return callable(getattr(dataset, "set_epoch", None)) or isinstance(dataset, IterDataPipe)
