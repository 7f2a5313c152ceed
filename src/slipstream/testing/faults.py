"""Faults at a chosen rank and call, to test what the other ranks see.

    fault = kill_at(rank=1, call=3)
    for step in range(10):
        fault.reach(state.process_index, step)   # rank 1 is killed when it reaches step 3
        state.gather(...)

A fault strikes in attempt 0 only unless it says otherwise, so a restarted job gets through: pass the attempt to `reach`. Nothing is
random and nothing is patched: a loop without `reach` has no faults.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Fault", "InjectedFault", "fail_at", "hold_gil_at", "kill_at", "no_fault", "slow_at", "spin_at", "stop_at"]


_SAMPLE = 1_000_000


class InjectedFault(RuntimeError):
    """Raised by `fail_at`."""


@dataclass(frozen=True)
class Fault:
    """A fault of one rank at one call; created by the functions of this module.

    >>> Fault(rank=0, call=2, act=lambda: print("now")).reach(0, 2)
    now
    """

    rank: int
    call: int
    act: Callable[[], None] = field(repr=False)
    attempt: int = 0
    """The attempt of the job (restarts so far) in which it happens."""

    def reach(self, rank: int, call: int, attempt: int = 0) -> None:
        """Report the position of the program; the fault strikes if it is this rank, call and attempt."""
        if (rank, call, attempt) == (self.rank, self.call, self.attempt):
            self.act()


def no_fault() -> Fault:
    """A fault that never strikes: for the run that the others are compared with.

    >>> no_fault().reach(0, 0)
    """
    return Fault(rank=-1, call=-1, act=lambda: None)


def fail_at(rank: int, call: int, error: BaseException | None = None, *, attempt: int = 0) -> Fault:
    """The rank raises: `InjectedFault`, or `error`.

    >>> fail_at(rank=1, call=3).reach(0, 3)
    >>> fail_at(rank=1, call=3).reach(1, 3)
    Traceback (most recent call last):
    slipstream.testing.faults.InjectedFault: rank 1 fails as requested at call 3
    """

    def act() -> None:
        raise error if error is not None else InjectedFault(f"rank {rank} fails as requested at call {call}")

    return Fault(rank, call, act, attempt)


def kill_at(rank: int, call: int, number: int = signal.SIGKILL, *, attempt: int = 0) -> Fault:
    """The rank's process ends by a signal, without a word: no exception, no `finally`.

    >>> kill_at(rank=1, call=3).reach(0, 3)  # at rank 0 nothing happens
    """
    return Fault(rank, call, lambda: os.kill(os.getpid(), number), attempt)


def stop_at(rank: int, call: int, *, attempt: int = 0) -> Fault:
    """The rank's process is stopped (SIGSTOP): it lives, but no thread of it does anything until SIGCONT arrives.

    >>> stop_at(rank=1, call=3).reach(1, 2)  # one call too early
    """
    return kill_at(rank, call, signal.SIGSTOP, attempt=attempt)


def slow_at(rank: int, call: int, seconds: float, *, attempt: int = 0) -> Fault:
    """The rank comes late: it sleeps, and its other threads continue.

    >>> slow_at(rank=0, call=0, seconds=0.01).reach(0, 0)
    """
    return Fault(rank, call, lambda: time.sleep(seconds), attempt)


def spin_at(rank: int, call: int, seconds: float = float("inf"), *, attempt: int = 0) -> Fault:
    """The rank computes without end (or for `seconds`): busy Python, which lets its other threads have their turn.

    >>> spin_at(rank=0, call=0, seconds=0.01).reach(0, 0)
    """

    def act() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    return Fault(rank, call, act, attempt)


def hold_gil_at(rank: int, call: int, seconds: float, *, attempt: int = 0) -> Fault:
    """The rank holds the interpreter's lock, as a foreign function that forgot to release it does: none of its Python threads runs.

    >>> hold_gil_at(rank=0, call=0, seconds=0.01).reach(0, 0)
    """

    def act() -> None:
        # `sum` over an iterator in C never releases the lock, and unlike a sleep it is not ended by a signal.
        started = time.thread_time()  # not by the clock: on a busy machine the sample would look slow, and the rest be too short
        sum(itertools.repeat(0, _SAMPLE))
        sum(itertools.repeat(0, int(seconds / (time.thread_time() - started) * _SAMPLE)))

    return Fault(rank, call, act, attempt)
