"""How one rank's part of a run ended: with a value, with an exception, or with the end (or the silence) of the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.launch.contract import ExitNotice

__all__ = ["Outcome", "RankFailure", "failure"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank gave back.

    >>> Outcome(rank=0, value=3).failed, Outcome(rank=1, error=ValueError("no")).summary
    (False, 'ValueError: no')
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    """What the function raised. A `TimeoutError` of ours if the rank did not finish (then `stuck` is true)."""
    exit: ExitNotice | None = None
    """How the process ended, if it did."""
    traceback: str = ""
    """The traceback as text; of a stuck rank, the stacks of its threads where they could be had."""
    output: str = ""
    """What the rank printed, to either stream."""
    stuck: bool = False
    when: float = float("inf")
    """Order in time among the ranks of one run."""

    @property
    def failed(self) -> bool:
        """True unless the function returned."""
        return self.error is not None or self.exit is not None

    @property
    def summary(self) -> str:
        """One line: what happened."""
        if self.exit is not None:
            return str(self.exit)
        if self.error is not None:
            return f"{type(self.error).__qualname__}: {self.error}"
        return "returned"


class RankFailure(SlipstreamError, AssertionError):
    """A run of the pool failed; `outcomes` has every rank's part, and the first rank's exception is the cause.

    >>> error = failure("check", [Outcome(rank=0, value=1), Outcome(rank=1, error=ValueError("no"), traceback="ValueError: no")])
    >>> print(error)
    1 of 2 ranks failed in check
      rank 0: returned
      rank 1: ValueError: no
    rank 1 failed first:
    ValueError: no
    """

    def __init__(self, message: str, outcomes: Sequence[Outcome] = ()) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


def failure(name: str, outcomes: Sequence[Outcome], left: Sequence[str] = ()) -> RankFailure:
    """The exception for a run of which some part failed, or that left something behind (`left`, one line each)."""
    failed = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: (outcome.when, outcome.rank))
    lines = [f"{len(failed)} of {len(outcomes)} ranks failed in {name}" if failed else f"every rank returned from {name}, but not clean"]
    lines += [f"  rank {outcome.rank}: {outcome.summary}" for outcome in outcomes] if failed else []
    lines += [f"  {line}" for line in left]
    if failed:
        first = failed[0]
        lines += [f"rank {first.rank} failed first:", (first.traceback or first.summary).rstrip()]
        lines += [f"rank {outcome.rank} printed:\n{outcome.output.rstrip()}" for outcome in outcomes if outcome.output.strip()]
    error = RankFailure("\n".join(lines), outcomes)
    error.__cause__ = failed[0].error if failed else None
    return error
