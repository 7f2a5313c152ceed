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


def test_a_failure_strikes_its_rank_alone(ranks):
    fine, failed = ranks(2).outcomes(lambda: passes(faults.fail_at(rank=1, call=2)))
    assert fine.value == 4
    assert isinstance(failed.error, faults.InjectedFault)
    assert "rank 1 was told to fail at call 2" in str(failed.error)


def test_a_failure_can_be_of_any_kind(ranks):
    assert isinstance(ranks(1).outcomes(lambda: passes(faults.fail_at(0, 0, OSError("disk full"))))[0].error, OSError)


def test_a_fault_belongs_to_one_attempt(ranks):
    assert ranks(2).run(lambda: passes(faults.fail_at(rank=1, call=2), attempt=1)) == [4, 4]


def test_a_killed_rank_ends_without_a_word(ranks):
    fine, killed = ranks(2).outcomes(lambda: passes(faults.kill_at(rank=1, call=2)))
    assert (fine.value, killed.exit.signal_name) == (4, "SIGKILL")


def test_a_stopped_rank_does_not_go_on(ranks):
    fine, stopped = ranks(2).outcomes(lambda: passes(faults.stop_at(rank=1, call=2)), patience=0.7)
    assert (fine.value, stopped.stuck) == (4, True)


def test_a_spinning_rank_does_not_go_on_but_can_say_where_it_is(ranks):
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
    assert ticks_during(make(0, 0, 0.5)) > 1


def test_no_other_thread_runs_while_the_lock_is_held():
    assert ticks_during(faults.hold_gil_at(0, 0, 0.5)) < 10  # of fifty: a few before, when its speed is known, and after


def test_no_fault_never_strikes(ranks):
    assert ranks(2).run(lambda: passes(faults.no_fault())) == [4, 4]
