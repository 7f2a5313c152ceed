"""What the launcher and its workers have agreed on: names of store keys and the record of how a worker ended.

The agent (launcher side) and `comm/beacon.py` (worker side) both speak through the rendezvous store. The keys live under
one prefix per attempt, so that a restarted job never reads what the attempt before it wrote. Nothing here imports torch.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass

__all__ = ["ALARM_KEY", "FOLLOWED_KEY", "LOST_KEY", "ExitNotice", "attempt_prefix", "bearing_key", "exit_key"]

ALARM_KEY = "alarm"
"""A counter: raised by one whenever something happens that every waiting rank must look at (a rank ended, a rank gave up)."""

LOST_KEY = "bearing/lost"
"""A counter: processes of this attempt that were lost and that the others can do without; see `bearing_key`."""
FOLLOWED_KEY = "bearing/followed"
"""A counter: processes that failed because of such a loss."""


def attempt_prefix(run_id: str, attempt: int) -> str:
    """The key prefix of one attempt of one job."""
    return f"slipstream/{run_id}/{attempt}"


def exit_key(rank: int) -> str:
    """Where the agent writes the `ExitNotice` of a rank, below the attempt's prefix."""
    return f"exit/{rank}"


def bearing_key(rank: int) -> str:
    """Where a rank writes "1" while it works on items that the others take over if it dies, and "0" afterwards; below the same prefix.

    The agent reads it when a rank has died: the loss of one that had written "1" does not end the attempt for the others.
    """
    return f"bearing/{rank}"


@dataclass(frozen=True)
class ExitNotice:
    """How a worker ended without being asked to: written by the agent as soon as it knows.

    >>> notice = ExitNotice(rank=1, host="node0", pid=4711, exit_code=-9, reason="killed")
    >>> ExitNotice.from_json(notice.to_json()) == notice
    True
    >>> str(notice)
    'rank 1 (host node0, pid 4711) was ended by SIGKILL: killed'
    """

    rank: int
    host: str
    pid: int
    exit_code: int | None
    """As `subprocess` gives it: negative is the number of the signal. None: its machine was lost, so nobody knows."""
    reason: str = ""
    """The exception in one line, or what is known of the signal ("the kernel's out-of-memory killer")."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExitNotice:
        return cls(**json.loads(text))

    @property
    def signal_name(self) -> str | None:
        """SIGKILL for -9; None for an ordinary exit."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"

    def __str__(self) -> str:
        if self.exit_code is None:
            how = "was lost"
        else:
            how = f"was ended by {self.signal_name}" if self.signal_name else f"ended with exit code {self.exit_code}"
        who = f"host {self.host}, pid {self.pid}" if self.pid else f"host {self.host}"
        return f"rank {self.rank} ({who}) {how}" + (f": {self.reason}" if self.reason else "")
