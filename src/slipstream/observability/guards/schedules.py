"""Detect learning-rate schedules that are too short or too long for the training, or counted in the wrong unit.

Too short: the rate has reached its end (0, or `eta_min`) and training continues for a twentieth more updates. The learning rates
themselves are observed, so a scheduler that was never prepared is covered; warm-ups from 0 and frozen groups are not reported. Too long:
a schedule of known length that is far from its end when training ends (`find_unfinished`).

Wrong unit: at its first step, a schedule whose length is a multiple of the loader's length before it was sharded over the processes, or
counts batches where an update takes several (`find_miscounted`). One length can often be read in two ways, so this is reported only where
the second reading is unlikely, with both numbers; the rest is left to the check at the end of training.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.observability.guards.findings import GuardFinding

__all__ = ["ScheduleLength", "SchedulePace", "ScheduleGuard", "find_miscounted", "find_unfinished"]

_MIN_UPDATES_AFTER_END = 20
"""Updates after the end of a schedule before it is reported."""
_ZERO_SHARE = 1e-7
"""Which share of the highest rate counts as none: the last value of a cosine is not exactly 0."""
_MIN_DONE_SHARE = 2 / 3
"""The share of a schedule that has to be done at the end of training: one in wrong units has done a half at most."""
_TRIAL_SHARE = 1 / 20
"""The share of a schedule above which a run counts as a training, and not as a short trial."""
_MIN_BATCHES = 4
"""The fewest batches of a pass of which a length is taken to be a multiple, and not by chance."""
_MAX_PASSES = 1000
_FEW_PASSES, _MANY_PASSES = 3, 10
"""So few passes, counted in batches, are likelier than so many, counted in updates."""
_LENGTH_NAMES = ("num_training_steps", "total_steps", "max_train_steps", "max_steps", "t_total", "total_iters", "num_steps")
"""What functions of a step call the length of their schedule."""
_BUILD_REMEDY = (
    "build the schedule after prepare, for math.ceil(len(loader) / accelerator.gradient_accumulation_steps) updates per pass of the "
    "prepared loader"
)


@dataclass
class ScheduleGuard:
    """Checks the learning rate of one optimizer.

    >>> schedule = ScheduleGuard()
    >>> for update in range(1, 200, 10):
    ...     found = schedule.look(update, [max(0.0, 0.1 - update / 1000)], moves=update)
    ...     if found:
    ...         break
    >>> print(found)
    step 121: the learning rate reached 0 between update 91 and 101, and training continues (the scheduler has moved 121 times in 121 \
updates). What to do: make the schedule as long as training: its number of steps is the number of updates, (len(loader) of the prepared \
loader // gradient_accumulation_steps) * epochs, and not that of samples or batches.
    """

    processes: int = 1
    highest: float = 0.0
    ended: int | None = None
    """The number of updates when the end was first seen."""
    before: int | None = None
    """The number of updates when it was last examined and had not ended."""
    moved: int | None = None

    def look(
        self, updates: int, rates: list[float], *, moves: int | None = None, length: ScheduleLength | None = None, per_process: bool = False
    ) -> GuardFinding | None:
        """Check the rates after so many updates; `moves` is how often the scheduler moved, if that is known."""
        known = length or ScheduleLength()
        rate = max(rates, default=0.0)
        self.highest = max(self.highest, rate)
        bottom = known.lowest + _ZERO_SHARE * (self.highest - known.lowest)
        over = known.length is not None and moves is not None and moves > known.length
        if not over and (not self.highest > known.lowest or rate > bottom):
            self.ended, self.before = None, updates
            return None
        if self.ended is None:
            self.ended, self.moved = updates, moves
            return None
        if updates - self.ended < max(_MIN_UPDATES_AFTER_END, self.ended // 20):
            return None
        return self._finding(updates, rate, moves, per_process, known.length if over and rate > bottom else None)

    def _finding(self, updates: int, rate: float, moves: int | None, per_process: bool, length: int | None) -> GuardFinding:
        pace = "" if moves is None else f" (the scheduler has moved {moves} times in {updates} updates)"
        text = f"the learning rate reached {rate:.3g} {self._when()}, and training continues{pace}"
        if length is not None:
            text = f"the learning rate rises again, to {rate:.3g} by now: its schedule of {length} steps was over {self._when()}{pace}"
        times = 1 if not moves or not self.ended else round((self.moved or moves) / self.ended)
        return GuardFinding("schedule", updates, None, text, self._remedy(times, per_process), {"moves": moves})

    def _when(self) -> str:
        """Return when the end was reached, as exactly as is known: rates are examined once in a while."""
        if self.before is None:
            return f"by update {self.ended} at the latest"
        return f"at update {self.ended}" if self.ended == self.before + 1 else f"between update {self.before} and {self.ended}"

    def _remedy(self, times: int, per_process: bool) -> str:
        if times <= 1:
            return (
                "make the schedule as long as training: its number of steps is the number of updates, (len(loader) of the prepared loader "
                "// gradient_accumulation_steps) * epochs, and not that of samples or batches"
            )
        if per_process and times == self.processes:
            return (
                f"it moves {times} times per update, once for each process: leave out scheduler_steps_per_process, or make the schedule "
                f"{times} times as long"
            )
        return (
            f"it moves {times} times per update: call scheduler.step() once after optimizer.step(), on a scheduler that was prepared, or "
            f"make the schedule {times} times as long"
        )


@dataclass(frozen=True)
class ScheduleLength:
    """The length of a schedule, as far as its scheduler tells.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> ScheduleLength.of(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01))
    ScheduleLength(lowest=0.01, length=10, total=10)
    >>> total_steps = 80
    >>> ScheduleLength.of(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)).total
    80
    """

    lowest: float = 0.0
    """The rate that it ends with."""
    length: int | None = None
    """After how many moves its rate rises again."""
    total: int | None = None
    """How many moves it is made for."""

    @classmethod
    def of(cls, scheduler: Any) -> ScheduleLength:
        """Return the length by the scheduler's attributes; one with warm restarts has no end."""
        if hasattr(scheduler, "T_mult") or (hasattr(scheduler, "cycle_momentum") and not hasattr(scheduler, "total_steps")):
            return cls(lowest=-1.0)
        if hasattr(scheduler, "cycle_momentum"):
            return cls(lowest=-1.0, total=_positive_int(scheduler.total_steps))
        lowest, length = getattr(scheduler, "eta_min", 0.0), getattr(scheduler, "T_max", None)
        return cls(float(lowest) if isinstance(lowest, (int, float)) else 0.0, _positive_int(length), _find_total(scheduler))


def _find_total(scheduler: Any) -> int | None:
    """Return how many moves a scheduler is made for; None where it does not say."""
    for name in ("T_max", "total_steps", "total_iters"):
        if (total := _positive_int(getattr(scheduler, name, None))) is not None:
            return total
    # torch internals: SequentialLR and ChainedScheduler have no public attribute for their parts. torch 2.13; test_guard_schedules.py;
    # without them such a schedule has no known length.
    parts = getattr(scheduler, "_schedulers", None)
    milestones = getattr(scheduler, "_milestones", None)
    if parts and milestones:  # one after the other
        last = _find_total(parts[-1])
        return None if last is None else int(milestones[-1]) + last
    if parts:  # all at once
        return max(filter(None, map(_find_total, parts)), default=None)
    functions = getattr(scheduler, "lr_lambdas", None) or ()
    return max((number for function in functions for number in _lengths_of_function(function)), default=None)


def _lengths_of_function(function: Any) -> Iterator[int]:
    """Return the lengths that a function of the step knows: as an argument that was filled in, from around it, or as an attribute."""
    known: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        known = {**function.keywords, **known}
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        known = {**getattr(function, "__dict__", {}), **known}
    else:
        around = zip(code.co_freevars, function.__closure__ or (), strict=False)
        known = {
            **{name: function.__globals__.get(name) for name in code.co_names},
            **{name: cell.cell_contents for name, cell in around if name in _LENGTH_NAMES},
            **known,
        }
    for name in _LENGTH_NAMES:
        if (length := _positive_int(known.get(name))) is not None:
            yield length


def _positive_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


# -- units ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SchedulePace:
    """How fast a schedule moves while a loader is read."""

    name: str
    """What the scheduler is called."""
    total: int
    """How many moves it is made for."""
    original: int
    """Batches of a pass before the loader was prepared."""
    batches: int
    """Batches of a pass on each process."""
    steps: int = 1
    """Batches per update."""
    processes: int = 1
    moves: int = 1
    """Moves per update."""
    made_before: bool = False
    """Whether the schedule was made before the loader was prepared, so that its length cannot come from the prepared one."""

    @property
    def updates(self) -> int:
        """Updates in a pass: the end of a pass ends an update too."""
        return -(-self.batches // self.steps)

    @property
    def per_pass(self) -> int:
        """Moves in a pass."""
        return self.updates * self.moves


def find_miscounted(pace: SchedulePace) -> GuardFinding | None:
    """Return a finding for a schedule that counts other units than it moves by, as far as that is known before the end.

    >>> print(find_miscounted(SchedulePace("LambdaLR", 320, 320, 160, steps=4, processes=2, made_before=True)))
    LambdaLR has 320 steps, as many as 1 pass over the 320 batches that the loader had before prepare; but a pass of the prepared loader \
is 160 batches on each of 2 processes and 40 updates of 4 batches each, so the schedule takes 8 passes. What to do: for 1 pass, build the \
schedule after prepare, for math.ceil(len(loader) / accelerator.gradient_accumulation_steps) updates per pass of the prepared loader: 40 \
steps; if 8 passes are meant, it fits.
    >>> find_miscounted(SchedulePace("LambdaLR", 320, 160, 160))
    """
    shared = pace.processes > 1 and pace.made_before and pace.batches < pace.original
    if shared and (passes := _multiple(pace.total, pace.original)) and pace.per_pass != pace.original:
        counted = f"over the {pace.original} batches that the loader had before prepare"
        return _describe_mismatch(pace, passes, counted, by_process=pace.steps == 1)
    per_update = -(-pace.original // pace.steps)
    if shared and pace.moves == 1 and (passes := _multiple(pace.total, per_update) or _divided(pace)):
        counted = f"in updates of {pace.steps} of the {pace.original} batches that the loader had before prepare"
        return _describe_mismatch(pace, passes, counted, by_process=True)
    passes = _multiple(pace.total, pace.batches) if pace.steps > 1 else None
    if passes is None or pace.per_pass == pace.batches:
        return None
    likely = passes <= _FEW_PASSES and pace.total >= _MANY_PASSES * pace.per_pass
    if likely or pace.total % pace.per_pass:
        return _describe_mismatch(pace, passes, f"over the {pace.batches} batches of the loader", by_process=False)
    return None


def _multiple(total: int, unit: int) -> int | None:
    """Return how many times a unit a length is; None where it is not, or by chance."""
    return total // unit if unit >= _MIN_BATCHES and total % unit == 0 and total // unit <= _MAX_PASSES else None


def _divided(pace: SchedulePace) -> int | None:
    """Return how many passes a length is, if all batches of all passes were divided by those of an update."""
    passes = -(-pace.total * pace.steps // pace.original)
    return (
        passes if pace.original >= _MIN_BATCHES and pace.original * passes // pace.steps == pace.total and passes <= _MAX_PASSES else None
    )


def _describe_mismatch(pace: SchedulePace, passes: int, counted: str, *, by_process: bool) -> GuardFinding:
    several = f"{passes} pass{'' if passes == 1 else 'es'}"
    each = f" of {pace.steps} batches each" if pace.steps > 1 else ""
    where = f" on each of {pace.processes} processes" if pace.processes > 1 else ""
    takes = f"{pace.total / pace.per_pass:.3g} passes"
    text = (
        f"{pace.name} has {pace.total} steps, as many as {several} {counted}; but a pass of the prepared loader is {pace.batches} "
        f"batches{where} and {pace.updates} updates{each}, so the schedule takes {takes}"
    )
    rule = ", or pass Accelerator(scheduler_steps_per_process=True) for Accelerate's rule" if by_process and pace.moves == 1 else ""
    remedy = f"for {several}, {_BUILD_REMEDY}: {passes * pace.per_pass} steps{rule}; if {takes} are meant, it fits"
    return GuardFinding("schedule", None, None, text, remedy, {"steps": pace.total, "expected": passes * pace.per_pass})


def find_unfinished(name: str, total: int, moves: int, updates: int, *, processes: int = 1, steps: int = 1) -> GuardFinding | None:
    """Return a finding for a schedule that is far from its end when training ends.

    >>> print(find_unfinished("OneCycleLR", 320, 80, 80, steps=4))
    step 80: training has ended and OneCycleLR has made 80 of its 320 steps, in 80 updates, so the learning rate has not reached its end. \
What to do: the schedule seems to count batches, and an update takes 4 of them: build the schedule after prepare, for \
math.ceil(len(loader) / accelerator.gradient_accumulation_steps) updates per pass of the prepared loader.
    >>> find_unfinished("OneCycleLR", 320, 300, 300)
    """
    if not 0 < moves < _MIN_DONE_SHARE * total:
        return None
    if updates >= 2 * moves:
        remedy = "call scheduler.step() once after each optimizer.step(); a schedule that moves once per epoch has as many steps as epochs"
    else:
        remedy = _explain_unit(total / moves, processes, steps)
    if not remedy and moves < _TRIAL_SHARE * total:
        return None  # some steps, to try something
    done = f"{moves} of its {total} steps, in {updates} updates"
    text = f"training has ended and {name} has made {done}, so the learning rate has not reached its end"
    remedy = remedy or f"if training was not cut short, make the schedule as long as it: {_BUILD_REMEDY}"
    return GuardFinding("schedule", updates, None, text, remedy, {"moves": moves, "steps": total})


def _explain_unit(times: float, processes: int, steps: int) -> str:
    """Return what a schedule that is so many times too long was counted in, and what to do; nothing where that is not known."""

    def is_near(factor: int) -> bool:
        return factor > 1 and abs(times - factor) <= 0.1 * factor

    if is_near(steps):
        return f"the schedule seems to count batches, and an update takes {steps} of them: {_BUILD_REMEDY}"
    if is_near(processes):
        rule = "or pass Accelerator(scheduler_steps_per_process=True) for Accelerate's rule"
        return f"the schedule seems to count the batches of all {processes} processes: {_BUILD_REMEDY}, {rule}"
    if is_near(processes * steps):
        return f"the schedule seems to count the batches of all {processes} processes, and an update takes {steps} batches: {_BUILD_REMEDY}"
    return ""
