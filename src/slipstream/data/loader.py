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
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from slipstream.comm.nested import send_to_device
from slipstream.data.clock import Clock, Pass
from slipstream.data.options import DataLoaderConfiguration
from slipstream.data.order import inner_samplers
from slipstream.data.place import Place
from slipstream.errors import ConfigError
from slipstream.runtime.current import current
from slipstream.runtime.gradient_state import GradientState, Shares

__all__ = ["Handed", "PreparedLoader", "get_sampler"]

Handed = tuple[Any, "Shares | None", bool, "int | None"]
"""A batch, how it was dealt out (None for evenly and in full), whether it is the last one, and how many follow (None for unknown)."""

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

    def _replan(self) -> None:
        """`uneven` was changed."""

    def _known_remainder(self, start: int) -> int:
        """`remainder` as far as it is known before the first batch."""
        return -1

    # -- iterating ------------------------------------------------------------------------------------------------

    __setattr__ = object.__setattr__  # type: ignore[assignment]  # torch's guards its own loaders, at the price of a call each time

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator of ours, not torch's iterator
        if self._skipping:
            begun_at, start = self._skipping, self._skipping * self._stride
            epoch = self._clock.take_present(begun_at)
        else:
            epoch, start = self._clock.take()
            begun_at = start // self._stride if start else 0
        return self._run(Pass(epoch, start, begun_at))

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
            for batch, shares, end, left in self._batches(turn.epoch, turn.start):
                if shares is not previous:
                    turn.note(shares)
                    self.shares = previous = shares
                if end:
                    self.end_of_dataloader = True
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
        self._clock.set(epoch)

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
        """Batches of one iteration, the same on every rank; of a loader that skips, those of its first pass until that is over."""
        return self._count(self._skipping * self._stride if self._skipping else self._clock.resume)

    # -- position -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands, in plain numbers: `samples` of the epoch's order were handed out, to all ranks together.

        Where a batch sampler of the user's own decides about batches, `samples` counts those. `left` is 1 for a pass that was left by
        `break`: it is over, and the next one is another epoch.
        """
        clock = self._clock
        turn = clock.live[0] if clock.live else clock.left
        if turn is None:
            batches = clock.resume // self._stride if clock.resume else 0
            return {"epoch": clock.next, "batches": batches, "samples": clock.resume, "seed": self.seed, "left": 0}
        samples = turn.start + turn.handed * self._stride
        batches = turn.begun_at + turn.handed
        return {"epoch": turn.epoch, "batches": batches, "samples": samples, "seed": self.seed, "left": int(not clock.live)}

    def load_state_dict(self, state: dict[str, int], *, resume: bool | None = None) -> None:
        """Takes the seed and the epoch of a saved position; with `resume`, the next iteration goes on at that position.

        `resume` is `use_stateful_dataloader` unless given. Without it `skip_first_batches` goes on, in the order of that epoch.
        """
        missing = [name for name in ("epoch", "batches", "samples", "seed") if name not in state]
        if missing:
            raise ConfigError(f"this is no state of a prepared loader: it has no {', '.join(missing)}; pass what its state_dict() gave")
        resume = self.config.use_stateful_dataloader if resume is None else resume
        clock = self._clock
        epoch, batches, samples = int(state["epoch"]), int(state["batches"]), int(state["samples"])
        self.seed = int(state["seed"])
        over = bool(state.get("left", 0)) or (not resume and self._is_over(samples))
        clock.next, clock.resume, clock.left = epoch + over, samples if resume and not over else 0, None
        if over:
            clock.left = Pass(epoch, samples, batches)

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
