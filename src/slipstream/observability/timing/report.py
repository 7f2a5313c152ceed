"""Intervals and totals of all ranks, on rank 0, and `LedgerReport`, which `accelerator.ledger()` returns.

Rows are joined by step number, so clocks of different machines are never compared. The time that a rank was exposed (waiting in a
collective with nothing left to compute) counts as communication as far as the least exposed rank had it too; the rest is waiting for that
rank, which came last. A report is a plain record: creating and reading it asks no other process. Rank 0 knows every rank that has
reported; another rank knows itself only and cannot separate communication from waiting.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from slipstream.devices.memory import convert_bytes
from slipstream.observability.timing.meter import COLUMNS, EXPOSED, PHASES, SAMPLES, TOKENS
from slipstream.observability.timing.step_times import PHASE_COLUMNS, Rows

__all__ = ["LedgerReport", "RowJoiner", "RunTotals", "make_interval", "split_phases", "sum_counts"]


_NOTICEABLE_WAIT = 0.01
"""The part of a step that another has to wait for a rank before that one is called the last."""


class RowJoiner:
    """Joins the rows of all ranks by step."""

    def __init__(self, world_size: int, patience: float) -> None:
        self.world_size = world_size
        self.next = 0
        """The number of the next step."""
        self.late = 0
        """Rows that came after their step had been counted without them."""
        self._patience = patience
        self._pending: list[Rows] = [numpy.zeros((0, COLUMNS)) for _ in range(world_size)]
        self._silent: set[int] = set()
        """Ranks that are not waited for any more, until they report something."""
        self._since = time.monotonic()

    def add(self, rank: int, first: int, rows: Rows) -> None:
        """Add rows of a rank from a step on; steps that it left out before count as unknown."""
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
        """Return ranks x steps x columns of the complete steps; those of ranks that are overdue (or, not patient, missing) are nan."""
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


def split_phases(taken: Rows) -> tuple[dict[str, list[float | None]], list[int]]:
    """Return the seconds by phase and rank, and in how many steps each rank was last. Ranks that have not reported have None."""
    world_size = len(taken)
    exposed = taken[:, :, EXPOSED]
    known = ~numpy.isnan(exposed)
    smallest = numpy.where(known, exposed, numpy.inf).min(axis=0, initial=numpy.inf)
    waiting = exposed - smallest
    of_step = numpy.nanmax(numpy.where(known, taken[:, :, :PHASES].sum(axis=2), 0.0), axis=0, initial=0.0)
    longest = numpy.where(known, waiting, 0.0).max(axis=0, initial=0.0)
    last = numpy.where(known, exposed, numpy.inf).argmin(axis=0)[longest > _NOTICEABLE_WAIT * of_step]
    slowest = numpy.bincount(last, minlength=world_size) if len(last) else numpy.zeros(world_size, dtype=int)
    found: dict[str, list[float | None]] = {}
    for name, column in PHASE_COLUMNS.items():
        values = waiting if name == "waiting" else exposed - waiting if column is None else taken[:, :, column]
        found[name] = _rank_sums(values, known)
    return found, [int(count) for count in slowest]


def _rank_sums(values: Rows, known: Rows) -> list[float | None]:
    totals = numpy.where(known, values, 0.0).sum(axis=1)
    return [float(total) if any_ else None for total, any_ in zip(totals, known.any(axis=1), strict=True)]


def sum_counts(taken: Rows, column: int) -> int | None:
    """Return samples or tokens of all ranks; None where none were counted."""
    return int(numpy.nansum(taken[:, :, column])) or None


def make_interval(taken: Rows, first: int, began: float, by_phase: dict[str, list[float | None]], slowest: list[int]) -> dict[str, Any]:
    """Return the record of `ledger.jsonl` for these steps, without memory and FLOPs."""
    wall = float(numpy.nansum(taken[0, :, :PHASES]))
    rounded = {name: [None if value is None else round(value, 6) for value in values] for name, values in by_phase.items()}
    return {
        "time": round(began + wall, 3),
        "seconds": round(wall, 6),
        "first": first,
        "last": first + taken.shape[1] - 1,
        "steps": taken.shape[1],
        "samples": sum_counts(taken, SAMPLES),
        "tokens": sum_counts(taken, TOKENS),
        "phases": rounded,
        "slowest": slowest,
    }


_LABELS = {"data": "data wait", "waiting": "waiting for others"}
"""Phases that the table does not call by their names."""
_RANKS_SHOWN = 8
_SHOWN_SHARE = 0.0005
"""The share from which a phase has a row: below it would read 0.0 %."""
_NAMED_WAIT_SHARE = 0.05
"""The share of waiting from which the slowest rank is named."""
_SLOWEST_MARGIN = 0.15
"""By how much of all steps it has to be the last more often than by chance."""


@dataclass(frozen=True)
class LedgerReport:
    """Where the time of a run went.

    >>> report = LedgerReport(phases={"data": [1.0], "forward": [3.0]}, seconds=4.0, steps=2, samples=64)
    >>> report.shares["data"], report.samples_per_second
    (0.25, 16.0)
    """

    phases: dict[str, list[float | None]]
    """Seconds by phase: one entry per rank, None where that rank has not reported."""
    seconds: float = 0.0
    """The time of this rank, from the first batch on."""
    steps: int = 0
    samples: int | None = None
    """Samples trained on by all ranks; None where no prepared loader counted them."""
    tokens: int | None = None
    flops: float | None = None
    """Floating-point operations of all ranks, where those of a sample are known."""
    mfu: float | None = None
    """The part of what the devices could do in that time that went into the model."""
    memory: dict[str, list[int | None] | None] = field(default_factory=dict)
    """High-water marks in bytes by rank: of the "host", and of the "device" (None where there is none)."""
    slowest: list[int] = field(default_factory=list)
    """How many steps each rank was the last of, so that others waited for it."""
    rank: int = 0
    world_size: int = 1
    late: int = 0
    """Steps that ranks reported too late to be counted."""
    intervals: Sequence[dict[str, Any]] = ()
    """The latest records of `ledger.jsonl`, about one per second."""

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by phase: the mean over the ranks that reported."""
        return {name: _mean(values) for name, values in self.phases.items()}

    @property
    def shares(self) -> dict[str, float]:
        """The part of the time that each phase took: they add up to 1, or are all 0 before anything happened."""
        totals = self.totals
        whole = sum(totals.values())
        return {name: value / whole if whole else 0.0 for name, value in totals.items()}

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all processes together."""
        return _rate(self.samples, self.seconds)

    @property
    def samples_per_second_per_process(self) -> float | None:
        """Samples of one process, on average."""
        together = self.samples_per_second
        return None if together is None else together / self.world_size

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all processes together."""
        return _rate(self.tokens, self.seconds)

    @property
    def slowest_rank(self) -> int | None:
        """The rank that others waited for far more often than for the rest; None if they hardly waited, or for each in turn."""
        total = sum(self.slowest)
        if not total or self.shares.get("waiting", 0.0) < _NAMED_WAIT_SHARE:
            return None
        last = max(range(len(self.slowest)), key=self.slowest.__getitem__)
        return last if self.slowest[last] / total >= 1.0 / self.world_size + _SLOWEST_MARGIN else None

    # -- text -----------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Return the whole report as text; phases that took no time to speak of are left out."""
        from slipstream.observability.report.text_charts import align_columns

        ranks = range(min(self.world_size, _RANKS_SHOWN)) if self.world_size > 1 else ()
        shares, totals = self.shares, self.totals
        rows = [["", "share", "seconds", *(f"rank {rank}" for rank in ranks)]]
        for name, values in self.phases.items():
            if shares[name] >= _SHOWN_SHARE:
                by_rank = ("-" if values[rank] is None else f"{values[rank]:.3f}" for rank in ranks)
                rows.append([_LABELS.get(name, name), f"{shares[name]:.1%}", f"{totals[name]:.3f}", *by_rank])
        return "\n".join([self._head(), *align_columns(rows), *self.answers()])

    def answers(self) -> list[str]:
        """Return lines on throughput, scaling, the slowest rank and memory."""
        lines = [self._throughput(), self._scaling()]
        slowest = self.slowest_rank
        if slowest is not None:
            lines.append(f"waited for most: rank {slowest}, the last in {self.slowest[slowest]} of {self.steps} steps")
        if self.mfu is not None:
            lines.append(f"model FLOPs utilisation: {self.mfu:.1%}")
        lines += [line for line in (self._memory("host"), self._memory("device")) if line]
        if self.late:
            lines.append(f"{self.late} steps of other ranks were reported too late and are not included")
        return [line for line in lines if line]

    @property
    def advice(self) -> str:
        """One line on scaling: see `answers`."""
        return self._scaling() or self._throughput()

    def _head(self) -> str:
        where = "" if self.world_size == 1 else f" on {self.world_size} processes" if self.rank == 0 else f" on rank {self.rank}"
        return f"where the time went{where}: {self.steps} steps in {self.seconds:.1f} s"

    def _throughput(self) -> str:
        samples, tokens = self.samples_per_second, self.tokens_per_second
        parts = [] if samples is None else [f"{_format_rate(samples)} samples/s"]
        parts += [] if tokens is None else [f"{_format_rate(tokens)} tokens/s"]
        if not parts:
            return ""
        if self.world_size == 1:
            return f"throughput: {', '.join(parts)}"
        if self.rank != 0:
            return f"throughput of this process: {', '.join(parts)}"
        each = "" if samples is None else f" ({_format_rate(samples / self.world_size)} samples/s each)"
        return f"throughput of all {self.world_size} processes together: {', '.join(parts)}{each}"

    def _scaling(self) -> str:
        shares = self.shares
        communication, waiting = shares.get("communication", 0.0), shares.get("waiting", 0.0)
        if self.world_size == 1:
            return "with more processes a step holds more samples: compare samples/s, not steps or seconds per step" if self.samples else ""
        if self.rank != 0:
            return f"communication and waiting: {communication:.1%} (rank 0 can tell them apart)"
        work = 1.0 - communication - waiting
        return (
            f"communication {communication:.1%} and waiting {waiting:.1%}: {self.world_size} processes do the work of "
            f"{self.world_size * work:.2f} that need not communicate"
        )

    def _memory(self, kind: str) -> str:
        known = [value for value in self.memory.get(kind) or () if value is not None]
        if not known:
            return ""
        most = f"{kind} memory at most: {convert_bytes(max(known))}"
        return most if len(known) == 1 else f"{most} (rank {(self.memory[kind] or []).index(max(known))})"


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _rate(count: int | None, seconds: float) -> float | None:
    return None if count is None or seconds <= 0.0 else count / seconds


def _format_rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class RunTotals:
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
        self.phases: dict[str, list[float | None]] = {name: [None] * world_size for name in PHASE_COLUMNS}
        self.slowest = [0] * world_size
        self.memory: list[tuple[int | None, int | None]] = [(None, None)] * world_size

    def copy(self) -> RunTotals:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def remember(self, rank: int, memory: tuple[int | None, int | None]) -> None:
        """Record the high-water marks of a rank, of host and device."""
        self.memory[rank] = memory

    def add(self, taken: Rows, first: int) -> dict[str, Any]:
        """Add steps of all ranks (ranks x steps x columns); return their interval."""
        by_phase, slowest = split_phases(taken)
        interval = make_interval(taken, first, self.began, by_phase, slowest)
        interval["flops"] = self._flops(interval["samples"], interval["steps"])
        interval["memory"] = self._memory_by_kind()
        interval["mfu"] = self._mfu(interval["flops"], interval["seconds"])
        self._add_shared(taken, by_phase)
        self.slowest = [before + more for before, more in zip(self.slowest, slowest, strict=True)]
        self.began += float(numpy.nansum(taken[0, :, :PHASES]))
        self.steps += taken.shape[1]
        self.flops += interval["flops"] or 0.0
        return interval

    def add_alone(self, rank: int, rows: Rows) -> None:
        """Add steps of a rank that does not know the others: its communication may be waiting."""
        if len(rows):
            self._add_row(rank, rows.sum(axis=0))
            self.steps += len(rows)

    def add_tails(self, tails: Mapping[int, list[float]], first: int) -> dict[str, Any]:
        """Add what came after the last step, by rank; return its interval, which has no steps. The first rank's is the wall time."""
        taken = numpy.full((self.world_size, 1, COLUMNS), numpy.nan)
        for rank, tail in tails.items():
            taken[rank, 0] = tail
        by_phase, _ = split_phases(taken)
        if len(tails) == 1 and self.world_size > 1:  # of a rank that does not know the others
            ((rank, tail),) = tails.items()
            self._add_row(rank, numpy.array(tail))
        else:
            self._add_shared(taken, by_phase)
        interval = make_interval(taken, first, self.began, by_phase, [0] * self.world_size)
        return {**interval, "last": first - 1, "steps": 0, "flops": None, "mfu": None, "memory": self._memory_by_kind()}

    def _add_shared(self, taken: Rows, by_phase: dict[str, list[float | None]]) -> None:
        self._add_phases(by_phase)
        self.seconds += float(numpy.nansum(taken[0, :, :PHASES]))
        self.samples += sum_counts(taken, SAMPLES) or 0
        self.tokens += sum_counts(taken, TOKENS) or 0

    def _add_row(self, rank: int, row: Any) -> None:
        own = {name: float(row[EXPOSED] if column is None else row[column]) for name, column in PHASE_COLUMNS.items() if name != "waiting"}
        self._add_phases(
            {name: [own.get(name, 0.0) if index == rank else None for index in range(self.world_size)] for name in PHASE_COLUMNS}
        )
        self.seconds += float(row[:PHASES].sum())
        self.samples += int(row[SAMPLES])
        self.tokens += int(row[TOKENS])

    def _add_phases(self, more: dict[str, list[float | None]]) -> None:
        for name, values in more.items():
            before = self.phases[name]
            self.phases[name] = [known if new is None else (known or 0.0) + new for known, new in zip(before, values, strict=True)]

    def _flops(self, samples: int | None, steps: int) -> float | None:
        if self.flops_per_sample is not None and samples is not None:
            return self.flops_per_sample * samples
        return None if self.flops_per_step is None else self.flops_per_step * steps * self.world_size

    def _mfu(self, flops: float | None, seconds: float) -> float | None:
        if flops is None or not self.peak or seconds <= 0.0:
            return None
        return round(flops / seconds / (self.peak * self.world_size), 6)

    def _memory_by_kind(self) -> dict[str, list[int | None] | None]:
        device = [device for _, device in self.memory]
        return {"host": [host for host, _ in self.memory], "device": None if not any(device) else device}

    def report(self, rank: int, late: int, intervals: list[dict[str, Any]]) -> LedgerReport:
        """Return the totals as a `LedgerReport`."""
        flops = self.flops or None
        return LedgerReport(
            phases=self.phases,
            seconds=self.seconds,
            steps=self.steps,
            samples=self.samples or None,
            tokens=self.tokens or None,
            flops=flops,
            mfu=self._mfu(flops, self.seconds),
            memory=self._memory_by_kind(),
            slowest=self.slowest,
            rank=rank,
            world_size=self.world_size,
            late=late,
            intervals=intervals,
        )
