"""A learning rate that came to its end while training goes on: most often, its schedule was moved more than once per update.

What is watched are the learning rates themselves, so a scheduler that was never prepared is seen too. A rate has ended when, after
having been larger, all groups of an optimizer are at 0 (or at the `eta_min` of their scheduler; a cosine that goes beyond
its length has too), and a twentieth more updates have been made since.
Rates that begin with 0 (a warm-up) have not ended; nor has a group that is frozen while others learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.step.guards.finding import Finding

__all__ = ["Course", "Schedule"]

_PATIENCE = 20
"""Updates at the least that are made at the end of a schedule before it is told."""
_NOTHING = 1e-7
"""Which share of the highest rate counts as none: the last value of a cosine is not exactly 0."""


@dataclass
class Schedule:
    """Watches the learning rate of one optimizer.

    >>> schedule = Schedule()
    >>> for update in range(1, 200, 10):
    ...     found = schedule.look(update, [max(0.0, 0.1 - update / 1000)], moves=update)
    ...     if found:
    ...         break
    >>> print(found)
    step 121: the learning rate came to 0 between update 91 and 101, and training goes on (the scheduler has moved 121 times in 121 \
updates). What to do: make the schedule as long as training: its number of steps is the number of updates, (len(loader) of the prepared \
loader // gradient_accumulation_steps) * epochs, and not that of samples or batches.
    """

    processes: int = 1
    highest: float = 0.0
    ended: int | None = None
    """The number of updates when the end was first seen."""
    before: int | None = None
    """The number of updates when it was last looked at and had not ended."""
    moved: int | None = None

    def look(
        self, updates: int, rates: list[float], *, moves: int | None = None, course: Course | None = None, per_process: bool = False
    ) -> Finding | None:
        """Takes in how it stands after so many updates; `moves` is how often the scheduler moved, if it is known."""
        course = course or Course()
        rate = max(rates, default=0.0)
        self.highest = max(self.highest, rate)
        bottom = course.lowest + _NOTHING * (self.highest - course.lowest)
        over = course.length is not None and moves is not None and moves > course.length
        if not over and (not self.highest > course.lowest or rate > bottom):
            self.ended, self.before = None, updates
            return None
        if self.ended is None:
            self.ended, self.moved = updates, moves
            return None
        if updates - self.ended < max(_PATIENCE, self.ended // 20):
            return None
        length = course.length if over and rate > bottom else None
        return self._finding(updates, rate, moves, per_process, length)

    def _finding(self, updates: int, rate: float, moves: int | None, per_process: bool, length: int | None) -> Finding:
        told = "" if moves is None else f" (the scheduler has moved {moves} times in {updates} updates)"
        text = f"the learning rate came to {rate:.3g} {self._when()}, and training goes on{told}"
        if length is not None:
            text = f"the learning rate rises again, to {rate:.3g} by now: its schedule of {length} steps was over {self._when()}{told}"
        times = 1 if not moves or not self.ended else round((self.moved or moves) / self.ended)
        return Finding("schedule", updates, None, text, self._remedy(times, per_process), {"moves": moves})

    def _when(self) -> str:
        """As exact as it is known: rates are looked at once in a while."""
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
class Course:
    """What a scheduler says of its own end.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> Course.of(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01))
    Course(lowest=0.01, length=10)
    """

    lowest: float = 0.0
    """The rate that it ends with."""
    length: int | None = None
    """After how many moves its rate rises again."""

    @classmethod
    def of(cls, scheduler: Any) -> Course:
        """By the scheduler's own attributes; one that begins again and again has no end."""
        if hasattr(scheduler, "T_mult") or hasattr(scheduler, "cycle_momentum"):
            return cls(lowest=-1.0)
        lowest, length = getattr(scheduler, "eta_min", 0.0), getattr(scheduler, "T_max", None)
        return cls(float(lowest) if isinstance(lowest, (int, float)) else 0.0, length if isinstance(length, int) else None)
