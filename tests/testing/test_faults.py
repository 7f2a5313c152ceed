"""Each fault strikes at its rank, call and attempt, does what its name says, and nothing elsewhere."""

from __future__ import annotations

import os
import threading
import time

import pytest

from slipstream.testing import faults


def passes(fault: faults.Fault, attempt: int = 0) -> int:
    """A loop of the user's: how many calls were made."""
    made = 0
    for call in range(4):
        fault.reach(int(os.environ["RANK"]), call, attempt)
        made += 1
    return made


def test_fail_strikes_rank_alone(ranks):
    """A failure hits its rank alone."""
    fine, failed = ranks(2).outcomes(lambda: passes(faults.fail_at(rank=1, call=2)))
    assert fine.value == 4
    assert isinstance(failed.error, faults.InjectedFault)
    assert "rank 1 fails as requested at call 2" in str(failed.error)


def test_fail_with_any_error(ranks):
    """A failure can be of any kind."""
    assert isinstance(ranks(1).outcomes(lambda: passes(faults.fail_at(0, 0, OSError("disk full"))))[0].error, OSError)


def test_fault_belongs_to_attempt(ranks):
    """A fault belongs to one attempt."""
    assert ranks(2).run(lambda: passes(faults.fail_at(rank=1, call=2), attempt=1)) == [4, 4]


def test_killed_rank(ranks):
    """A killed rank ends without a message."""
    fine, killed = ranks(2).outcomes(lambda: passes(faults.kill_at(rank=1, call=2)))
    assert (fine.value, killed.exit.signal_name) == (4, "SIGKILL")


def test_stopped_rank(ranks):
    """A stopped rank does not continue."""
    fine, stopped = ranks(2).outcomes(lambda: passes(faults.stop_at(rank=1, call=2)), patience=0.7)
    assert (fine.value, stopped.stuck) == (4, True)


def test_spinning_rank_shows_stack(ranks):
    """A spinning rank does not continue but can say where it is."""
    fine, spinning = ranks(2).outcomes(lambda: passes(faults.spin_at(rank=1, call=2)), patience=0.7)
    assert (fine.value, spinning.stuck) == (4, True)
    assert "in act" in spinning.traceback


def ticks_during(fault: faults.Fault) -> int:
    """How often another thread of this process gets its turn while the fault lasts."""
    counted = 0
    over = threading.Event()

    def count() -> None:
        nonlocal counted
        while not over.wait(0.01):
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    time.sleep(0.05)
    before = counted
    fault.reach(0, 0)
    during = counted - before
    over.set()
    thread.join()
    return during


@pytest.mark.parametrize("make", [faults.slow_at, faults.spin_at])
def test_other_threads_run_during(make):
    """Other threads run during."""
    assert ticks_during(make(0, 0, 0.5)) > 1


def test_held_gil_stops_threads():
    """No other thread runs while the lock is held."""
    assert ticks_during(faults.hold_gil_at(0, 0, 0.5)) < 10  # of fifty: a few before, when its speed is known, and after


def test_no_fault_never_strikes(ranks):
    """No fault never hits."""
    assert ranks(2).run(lambda: passes(faults.no_fault())) == [4, 4]
