"""Totals of a run: what intervals add up to, on rank 0 for all ranks, on another rank for itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy

from slipstream.comm.meter import COLUMNS, EXPOSED, PHASES, SAMPLES, TOKENS
from slipstream.step.ledger.joining import counted, interval, phases
from slipstream.step.ledger.report import LedgerReport
from slipstream.step.ledger.rows import NAMES, Rows

__all__ = ["Totals"]


class Totals:
    """Sums since the run began."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.began = 0.0
        """When the first step of this rank began, in seconds since 1970; each interval moves it on."""
        self.flops_per_sample: float | None = None
        self.flops_per_step: float | None = None
        """Of one rank, where samples are not counted."""
        self.peak: float | None = None
        """Floating-point operations that one process could do in a second."""
        self.seconds = 0.0
        self.steps = 0
        self.samples = self.tokens = 0
        self.flops = 0.0
        self.phases: dict[str, list[float | None]] = {name: [None] * world_size for name in NAMES}
        self.slowest = [0] * world_size
        self.memory: list[tuple[int | None, int | None]] = [(None, None)] * world_size

    def copy(self) -> Totals:
        """One that can be added to apart."""
        return copy.deepcopy(self)

    def remember(self, rank: int, memory: tuple[int | None, int | None]) -> None:
        """The high-water marks of a rank, of host and device."""
        self.memory[rank] = memory

    def add(self, taken: Rows, first: int) -> dict[str, Any]:
        """Adds steps of all ranks (ranks x steps x columns); gives their interval."""
        entry = interval(taken, first, self.began)
        entry["flops"] = self._flops(entry["samples"], entry["steps"])
        entry["memory"] = self._told_memory()
        entry["mfu"] = self._mfu(entry["flops"], entry["seconds"])
        by_phase, slowest = phases(taken)
        self._add_phases(by_phase)
        self.slowest = [before + more for before, more in zip(self.slowest, slowest, strict=True)]
        wall = float(numpy.nansum(taken[0, :, :PHASES]))
        self.began += wall
        self.seconds += wall
        self.steps += taken.shape[1]
        self.samples += entry["samples"] or 0
        self.tokens += entry["tokens"] or 0
        self.flops += entry["flops"] or 0.0
        return entry

    def add_alone(self, rank: int, rows: Rows) -> None:
        """Adds steps of a rank that knows no other: its communication may be waiting."""
        if not len(rows):
            return
        totals = rows.sum(axis=0)
        self._add_row(rank, totals)
        self.steps += len(rows)

    def add_tails(self, tails: Mapping[int, list[float]], first: int) -> dict[str, Any]:
        """Adds what came after the last step, by rank; gives its interval, which has no steps. The first rank's is the wall time."""
        taken = numpy.full((self.world_size, 1, COLUMNS), numpy.nan)
        for rank, tail in tails.items():
            taken[rank, 0] = tail
        if len(tails) == 1 and self.world_size > 1:  # of a rank that knows no other
            ((rank, tail),) = tails.items()
            self._add_row(rank, numpy.array(tail))
        else:
            self._add_phases(phases(taken)[0])
            self.seconds += float(numpy.nansum(taken[0, :, :PHASES]))
            self.samples += counted(taken, SAMPLES) or 0
            self.tokens += counted(taken, TOKENS) or 0
        without = {"last": first - 1, "steps": 0, "slowest": [0] * self.world_size, "flops": None, "mfu": None}
        return {**interval(taken, first, self.began), **without, "memory": self._told_memory()}

    def _add_row(self, rank: int, row: Any) -> None:
        own = {name: float(row[EXPOSED] if column is None else row[column]) for name, column in NAMES.items() if name != "waiting"}
        self._add_phases({name: [own.get(name, 0.0) if one == rank else None for one in range(self.world_size)] for name in NAMES})
        self.seconds += float(row[:PHASES].sum())
        self.samples += int(row[SAMPLES])
        self.tokens += int(row[TOKENS])

    def _add_phases(self, more: dict[str, list[float | None]]) -> None:
        for name, values in more.items():
            before = self.phases[name]
            self.phases[name] = [one if two is None else (one or 0.0) + two for one, two in zip(before, values, strict=True)]

    def _flops(self, samples: int | None, steps: int) -> float | None:
        if self.flops_per_sample is not None and samples is not None:
            return self.flops_per_sample * samples
        return None if self.flops_per_step is None else self.flops_per_step * steps * self.world_size

    def _mfu(self, flops: float | None, seconds: float) -> float | None:
        if flops is None or not self.peak or seconds <= 0.0:
            return None
        return round(flops / seconds / (self.peak * self.world_size), 6)

    def _told_memory(self) -> dict[str, list[int | None] | None]:
        device = [device for _, device in self.memory]
        return {"host": [host for host, _ in self.memory], "device": None if not any(device) else device}

    def report(self, rank: int, late: int, intervals: list[dict[str, Any]]) -> LedgerReport:
        """The record that scripts get."""
        flops = self.flops or None
        return LedgerReport(
            phases=self.phases,
            seconds=self.seconds,
            steps=self.steps,
            samples=self.samples or None,
            tokens=self.tokens or None,
            flops=flops,
            mfu=self._mfu(flops, self.seconds),
            memory=self._told_memory(),
            slowest=self.slowest,
            rank=rank,
            world_size=self.world_size,
            late=late,
            intervals=intervals,
        )
