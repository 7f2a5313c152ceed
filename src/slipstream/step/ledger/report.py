"""`LedgerReport`: what `accelerator.ledger()` gives: totals, rates, the slowest rank, and a table in words.

It is a record: nothing is asked of other processes when it is made or read. Rank 0 knows all ranks, as far as they have told; any other
rank knows itself, and cannot tell communication from waiting, for which ranks have to be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.devices.memory import convert_bytes

__all__ = ["LedgerReport"]

_LABELS = {
    "data": "data wait",
    "forward": "forward",
    "backward": "backward",
    "communication": "communication",
    "waiting": "waiting for others",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "other": "other",
}
_RANKS_SHOWN = 8
_SHOWN = 0.0005
"""The share from which a phase has a row: below it would read 0.0 %."""
_NAMED = 0.05
"""The share of waiting from which the slowest rank is named."""
_STANDS_OUT = 0.15
"""By how much of all steps it has to be the last more often than by chance."""


@dataclass(frozen=True)
class LedgerReport:
    """Where the time of a run went.

    >>> report = LedgerReport(phases={"data": [1.0], "forward": [3.0]}, seconds=4.0, steps=2, samples=64)
    >>> report.shares["data"], report.samples_per_second
    (0.25, 16.0)
    """

    phases: dict[str, list[float | None]]
    """Seconds by phase: one entry per rank, None where that rank has not told."""
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
    """Steps of ranks that told too late to be counted."""
    intervals: Sequence[dict[str, Any]] = ()
    """The last of what `ledger.jsonl` has, about one per second."""

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by phase: the mean over the ranks that told."""
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
        if not total or self.shares.get("waiting", 0.0) < _NAMED:
            return None
        last = max(range(len(self.slowest)), key=self.slowest.__getitem__)
        return last if self.slowest[last] / total >= 1.0 / self.world_size + _STANDS_OUT else None

    # -- in words -------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """The whole report as text; phases that took no time to speak of are left out."""
        ranks = range(min(self.world_size, _RANKS_SHOWN)) if self.world_size > 1 else ()
        lines = [self._head(), f"{'':20}{'share':>7}{'seconds':>10}" + "".join(f"{f'rank {rank}':>10}" for rank in ranks)]
        shares, totals = self.shares, self.totals
        for name, values in self.phases.items():
            if shares[name] < _SHOWN:
                continue
            told = "".join(f"{_spelled(values[rank]):>10}" for rank in ranks)
            lines.append(f"{_LABELS.get(name, name):20}{shares[name]:>6.1%}{totals[name]:>11.3f}{told}")
        return "\n".join([*lines, *self.answers()])

    def answers(self) -> list[str]:
        """What the numbers mean: throughput, what more processes bring, who is waited for, memory."""
        lines = [self._throughput(), self._scaling()]
        slowest = self.slowest_rank
        if slowest is not None:
            lines.append(f"waited for most: rank {slowest}, the last in {self.slowest[slowest]} of {self.steps} steps")
        if self.mfu is not None:
            lines.append(f"model FLOPs utilisation: {self.mfu:.1%}")
        lines += [line for line in (self._memory("host"), self._memory("device")) if line]
        if self.late:
            lines.append(f"{self.late} steps of other ranks were told too late and are not in it")
        return [line for line in lines if line]

    @property
    def advice(self) -> str:
        """One line on what more processes bring: see `answers`."""
        return self._scaling() or self._throughput()

    def _head(self) -> str:
        where = "" if self.world_size == 1 else f" on {self.world_size} processes" if self.rank == 0 else f" on rank {self.rank}"
        return f"where the time went{where}: {self.steps} steps in {self.seconds:.1f} s"

    def _throughput(self) -> str:
        samples, tokens = self.samples_per_second, self.tokens_per_second
        parts = [] if samples is None else [f"{_number(samples)} samples/s"]
        parts += [] if tokens is None else [f"{_number(tokens)} tokens/s"]
        if not parts:
            return ""
        if self.world_size == 1:
            return f"throughput: {', '.join(parts)}"
        if self.rank != 0:
            return f"throughput of this process: {', '.join(parts)}"
        each = "" if samples is None else f" ({_number(samples / self.world_size)} samples/s each)"
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
            f"{self.world_size * work:.2f} that need not talk to each other"
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


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spelled(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
