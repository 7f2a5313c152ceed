"""Joining the rows of all ranks to intervals, on rank 0: the dicts of `ledger.jsonl`.

Rows are joined by the number of the step, so clocks of machines are never compared. What a rank was exposed to in a step (waiting in
collectives with nothing left to compute) is communication as far as every rank was; what goes beyond the least exposed one was waiting
for that one: it came last, and is named.
"""

from __future__ import annotations

import time
from typing import Any

import numpy

from slipstream.comm.meter import COLUMNS, EXPOSED, PHASES, SAMPLES, TOKENS
from slipstream.step.ledger.rows import NAMES, Rows

__all__ = ["Joiner", "counted", "interval", "phases"]

_NOTICED = 0.01
"""The part of a step that another has to wait for a rank before that one is called the last."""


class Joiner:
    """Rows of all ranks that do not make an interval yet."""

    def __init__(self, world_size: int, patience: float) -> None:
        self.world_size = world_size
        self.next = 0
        """The step that comes next."""
        self.late = 0
        """Rows that came after their step had been told without them."""
        self._patience = patience
        self._pending: list[Rows] = [numpy.zeros((0, COLUMNS)) for _ in range(world_size)]
        self._silent: set[int] = set()
        """Ranks that are not waited for any more, until they tell something."""
        self._since = time.monotonic()

    def add(self, rank: int, first: int, rows: Rows) -> None:
        """Rows of a rank from a step on; what it left out before counts as not known."""
        pending = self._pending[rank]
        end = self.next + len(pending)
        if first > end:
            pending = numpy.concatenate([pending, numpy.full((first - end, COLUMNS), numpy.nan)])
        elif first < end:
            known = min(end - first, len(rows))
            self.late += known
            rows = rows[known:]
        self._pending[rank] = numpy.concatenate([pending, rows])
        self._silent.discard(rank)

    def take(self, *, patient: bool = True) -> Rows | None:
        """Ranks x steps x columns of the steps that are complete; those of ranks that are overdue (or, not patient, missing) are nan."""
        lengths = [len(rows) for rank, rows in enumerate(self._pending) if rank not in self._silent]
        count = min(lengths)
        now = time.monotonic()
        if count:
            self._since = now
        elif patient and now - self._since < self._patience:
            return None
        if not patient:
            count = max(len(rows) for rows in self._pending)
        elif not count:
            count, self._since = len(self._pending[0]), now
            self._silent = {rank for rank, rows in enumerate(self._pending) if rank and len(rows) < count}
        if not count:
            return None
        taken = numpy.full((self.world_size, count, COLUMNS), numpy.nan)
        for rank, rows in enumerate(self._pending):
            taken[rank, : min(count, len(rows))] = rows[:count]
            self._pending[rank] = rows[count:]
        self.next += count
        return taken


def phases(taken: Rows) -> tuple[dict[str, list[float | None]], list[int]]:
    """Seconds by phase and rank, and how many steps each rank was the last of. Ranks of which nothing is known have None."""
    world_size = len(taken)
    exposed = taken[:, :, EXPOSED]
    known = ~numpy.isnan(exposed)
    smallest = numpy.where(known, exposed, numpy.inf).min(axis=0, initial=numpy.inf)
    waiting = exposed - smallest
    of_step = numpy.nanmax(numpy.where(known, taken[:, :, :PHASES].sum(axis=2), 0.0), axis=0, initial=0.0)
    longest = numpy.where(known, waiting, 0.0).max(axis=0, initial=0.0)
    last = numpy.where(known, exposed, numpy.inf).argmin(axis=0)[longest > _NOTICED * of_step]
    slowest = numpy.bincount(last, minlength=world_size) if len(last) else numpy.zeros(world_size, dtype=int)
    found: dict[str, list[float | None]] = {}
    for name, column in NAMES.items():
        values = waiting if name == "waiting" else exposed - waiting if column is None else taken[:, :, column]
        found[name] = _sums(values, known)
    return found, [int(count) for count in slowest]


def _sums(values: Rows, known: Rows) -> list[float | None]:
    totals = numpy.where(known, values, 0.0).sum(axis=1)
    return [float(total) if any_ else None for total, any_ in zip(totals, known.any(axis=1), strict=True)]


def counted(taken: Rows, column: int) -> int | None:
    """Samples or tokens of all ranks; None where none were counted."""
    return int(numpy.nansum(taken[:, :, column])) or None


def interval(taken: Rows, first: int, began: float) -> dict[str, Any]:
    """The entry of `ledger.jsonl` for these steps, without memory and FLOPs."""
    by_phase, slowest = phases(taken)
    wall = float(numpy.nansum(taken[0, :, :PHASES]))
    rounded = {name: [None if value is None else round(value, 6) for value in values] for name, values in by_phase.items()}
    return {
        "time": round(began + wall, 3),
        "seconds": round(wall, 6),
        "first": first,
        "last": first + taken.shape[1] - 1,
        "steps": taken.shape[1],
        "samples": counted(taken, SAMPLES),
        "tokens": counted(taken, TOKENS),
        "phases": rounded,
        "slowest": slowest,
    }
