"""How workers failed: the record that a worker leaves, which failure came first, and the report that the user reads.

A failing worker writes a `WorkerError` (one JSON file in a private folder). The launcher combines it with the exit code of the process
into a `WorkerFailure`, picks the first one, and prints it once, last, with the frames of the user's code; the others get one line each.
The first failure is decided by time, with two rules: a process that stopped because another was lost is never first, and a process ended
by a signal counts as the cause of failures that were reported shortly afterwards. Nothing here starts or stops a process or imports torch.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from slipstream.launch.store import signal_name

__all__ = [
    "WorkerError", "WorkerFailure", "WorkerErrorKind", "first_failure", "first_failure_of_job", "lost_machine_failures", "exit_status",
    "read_worker_error", "render_report", "render_log_record", "user_stack", "write_worker_error",
]

_MAX_TEXT: Final = 64 * 1024
_REACTION_SECONDS: Final = 0.5
"""Seconds within which the loss of a process shows up in the others, before the launcher itself has seen it."""
_HERE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LINE: Final = 200
_BROKEN_CONNECTION: Final = re.compile(r"gloo/transport/.*(Connection (closed|reset) by peer|Broken pipe|Socket closed)", re.DOTALL)
"""The error of torch's gloo backend when the process at the other end has ended."""
_MAX_LISTED: Final = 8
"""With more failures than this, the others are summarized."""

WorkerErrorKind = Literal["exception", "config", "peer", "exit", "interrupt"]


@dataclass(frozen=True, kw_only=True)
class WorkerError:
    """The record that a failing worker writes."""

    kind: WorkerErrorKind
    """exception · config (a ConfigError: no traceback, exit code 2) · peer (stopped because another process was lost) ·
    exit (sys.exit with a message) · interrupt (KeyboardInterrupt)"""
    type: str
    message: str
    traceback: str
    """The user's frames and the exception, as Python prints them; may be empty."""
    when: float


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """How one process of the job failed."""

    rank: int
    host: str
    pid: int
    exit_code: int | None
    """As in `subprocess`; None if the machine was lost."""
    seen: float
    order: int = 0
    """The order in which the launcher saw the processes end."""
    error: WorkerError | None = None
    detail: str = ""
    """What is known of a signal ("the kernel's out-of-memory killer"), or of a lost machine."""
    stack: str = ""
    """The stack at the crash, if the process could still write one (a segmentation fault)."""
    log: str | None = None
    """The file with its output, if there is one."""

    @property
    def consequence(self) -> bool:
        """Whether another process was the cause: the worker says so, or its connection to another one broke."""
        return self.error is not None and (self.error.kind == "peer" or bool(_BROKEN_CONNECTION.search(self.error.message)))

    @property
    def reason(self) -> str:
        """The exception in one line, or what is known of the exit."""
        if self.error is not None and self.error.kind != "interrupt":
            if _BROKEN_CONNECTION.search(self.error.message):
                return f"{self.error.type}: its connection to another process broke"
            name = self.error.type if self.error.kind != "exit" else ""
            first = self.error.message.strip().splitlines()[:1]
            line = ": ".join(part for part in (name, *first) if part)
            return line if len(line) <= _LINE else line[: _LINE - 3] + "..."
        return self.detail

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorkerFailure:
        known = dict(data)
        error = known.pop("error", None)
        return cls(**known, error=WorkerError(**error) if error else None)


def write_worker_error(path: str, error: WorkerError) -> None:
    """Write the record where the launcher looks for it; the file is complete or absent."""
    shortened = replace(error, message=_shorten(error.message), traceback=_shorten(error.traceback))
    folder = os.path.dirname(path)
    handle, temporary = tempfile.mkstemp(prefix=".part-", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(asdict(shortened), file)
    os.replace(temporary, path)


def read_worker_error(path: str | os.PathLike[str]) -> WorkerError | None:
    """Return the record of a worker, or None if there is none."""
    try:
        return WorkerError(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _shorten(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def first_failure(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """Return the failure that caused the others.

    >>> killed = WorkerFailure(rank=1, host="a", pid=11, exit_code=-9, seen=10.0)
    >>> lost = WorkerError(kind="peer", type="PeerLostError", message="rank 1 died", traceback="", when=9.9)
    >>> survivor = WorkerFailure(rank=0, host="a", pid=10, exit_code=1, seen=10.2, order=1, error=lost)
    >>> first_failure([survivor, killed]).rank
    1
    """
    causes = [failure for failure in failures if not failure.consequence] or list(failures)
    return min(causes, key=lambda failure: (_failure_time(failure, causes), failure.order, failure.rank))


def _failure_time(failure: WorkerFailure, others: Sequence[WorkerFailure]) -> float:
    """Return when a failure happened: as the process recorded it, or else before anything that it may have caused."""
    if failure.error is not None:
        return failure.error.when
    caused = [
        other.error.when
        for other in others
        if other.error is not None and other.order >= failure.order and other.error.when > failure.seen - _REACTION_SECONDS
    ]
    return min([failure.seen, *caused]) - 1e-6


def exit_status(exit_code: int | None) -> int:
    """Return the exit code of the command for a process that failed this way: its own, or 128 plus the number of the signal.

    >>> exit_status(3), exit_status(-9), exit_status(None), exit_status(0)
    (3, 137, 1, 1)
    """
    if not exit_code:
        return 1
    return 128 - exit_code if exit_code < 0 else exit_code


def user_stack(text: str) -> str:
    """Return the user's part of a stack that a crashing interpreter wrote: newest first, down to the call by our worker.

    >>> print(user_stack(f'Fatal\\n\\n  File "a.py", line 1 in f\\n  File "{_HERE}target.py", line 2 in run\\n  File "b.py"'))
    Fatal
    <BLANKLINE>
      File "a.py", line 1 in f
    """
    lines = text.splitlines()
    ours = next((number for number, line in enumerate(lines) if f'File "{_HERE}' in line), len(lines))
    return "\n".join(lines[:ours])


def lost_machine_failures(ranks: Sequence[int], host: str, reason: str, seen: float) -> list[WorkerFailure]:
    """Return the failures of the processes of a machine that was lost."""
    return [WorkerFailure(rank=rank, host=host, pid=0, exit_code=None, seen=seen, detail=reason) for rank in ranks]


def first_failure_of_job(machines: Sequence[Sequence[WorkerFailure]]) -> WorkerFailure:
    """Return the first failure of the job: of the first machine that reported, unless that was a consequence of another's.

    Clocks of machines differ, so the order of reports decides between machines.
    """
    firsts = [first_failure(failures) for failures in machines if failures]
    return next((failure for failure in firsts if not failure.consequence), firsts[0])


def render_report(machines: Sequence[Sequence[WorkerFailure]], *, world_size: int, attempts: int = 1) -> str:
    """Return the text for the terminal: the other failures in one line each, then the first one.

    `machines` holds the failures of each machine, in the order in which the machines reported.
    """
    first, headline, followers = _summarize(machines, world_size, attempts)
    return "\n".join([*followers, "", f"slipstream: {headline}.", *_details(first), *_output(first)]).strip("\n")


def render_log_record(machines: Sequence[Sequence[WorkerFailure]], *, world_size: int, attempts: int = 1) -> tuple[str, str]:
    """Return the report for a log record: a message that begins with the cause, and the traceback, if there is one."""
    first, headline, followers = _summarize(machines, world_size, attempts)
    traceback = first.error.traceback if first.error is not None and _shows_traceback(first) else ""
    account = [first.reason] if traceback and first.reason else _details(first)
    cause = ": ".join([headline, *account[:1]])
    return "\n".join([cause, *account[1:], *followers, *_output(first)]), traceback.rstrip()


def _summarize(machines: Sequence[Sequence[WorkerFailure]], world_size: int, attempts: int) -> tuple[WorkerFailure, str, list[str]]:
    """Return the first failure, its headline, and a line for each of the others."""
    first = first_failure_of_job(machines)
    everyone = [failure for failures in machines for failure in failures]
    lost_with_it = [failure for failure in everyone if first.exit_code is failure.exit_code is None and failure.host == first.host]
    rest = [failure for failure in everyone if failure is not first and failure not in lost_with_it]
    headline = _headline(first, [failure.rank for failure in lost_with_it] or [first.rank], world_size, attempts)
    return first, headline, _followers(first, rest)


def _output(first: WorkerFailure) -> list[str]:
    return [f"Its output: {first.log}"] if first.log else []


def _followers(first: WorkerFailure, others: Sequence[WorkerFailure]) -> list[str]:
    lines: list[str] = []
    ranks_by_text: dict[str, list[int]] = {}
    brief = len(others) > _MAX_LISTED
    for failure in sorted(others, key=lambda other: other.rank):
        ranks_by_text.setdefault(_follower_line(first, failure, brief), []).append(failure.rank)
    for text, ranks in ranks_by_text.items():
        text = f"were {text[4:]}" if len(ranks) > 1 and text.startswith("was ") else text
        lines.append(f"{_ranks(ranks)} {text}")
    return lines


def _follower_line(first: WorkerFailure, failure: WorkerFailure, brief: bool) -> str:
    if first.error and failure.error and (first.reason == failure.reason or first.consequence and failure.consequence):
        return f"failed the same way: {first.error.type}"
    how = "stopped because of it" if failure.consequence else f"{_ending(failure)}, after that"
    return f"{how}: {failure.reason}" if failure.reason and not brief else how


def _ending(failure: WorkerFailure) -> str:
    if failure.exit_code is None:
        return "was lost"
    if failure.exit_code < 0:
        return f"was ended by {signal_name(failure.exit_code)}"
    if failure.exit_code == 0:
        return "ended with exit code 0 while it was processing items of the work queue"
    return f"failed with exit code {failure.exit_code}"


def _ranks(ranks: Sequence[int]) -> str:
    """
    >>> _ranks([0, 2, 3, 4, 7]), _ranks([5])
    ('ranks 0, 2-4, 7', 'rank 5')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    listed = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def _headline(first: WorkerFailure, ranks: Sequence[int], world_size: int, attempts: int) -> str:
    where = f"host {first.host}, pid {first.pid}" if first.pid else f"host {first.host}"
    how = "were lost" if len(ranks) > 1 else _ending(first)
    tries = f", in attempt {attempts}" if attempts > 1 else ""
    return f"{_ranks(ranks)} of {world_size} ({where}) {how}{tries}"


def _shows_traceback(first: WorkerFailure) -> bool:
    return first.error is not None and bool(first.error.traceback) and first.error.kind not in ("config", "exit", "peer")


def _details(first: WorkerFailure) -> list[str]:
    error = first.error
    if error is not None and error.kind in ("config", "exit"):
        return [error.message.rstrip()]
    if error is not None and error.kind == "peer":
        return [f"{error.type}: {error.message.rstrip()}"]
    if error is not None and _shows_traceback(first):
        return [error.traceback.rstrip()]
    stack = ["Where it was:", first.stack.rstrip()] if first.stack else []
    return ([first.detail] if first.detail else []) + stack
