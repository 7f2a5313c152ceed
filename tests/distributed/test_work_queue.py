"""Units are claimed once, taken over from those that are gone alone, and every process reads the same reports in the same order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
from torch.distributed import HashStore

from slipstream.distributed.work_queue import queue as work_queue
from slipstream.distributed.work_queue.queue import PoisonItem, StoreQueue
from slipstream.launch.store import ExitNotice, exit_key, holds_items_key


@pytest.fixture
def queues() -> list[StoreQueue]:
    store = HashStore()
    return [StoreQueue(store, "work", rank, 3) for rank in range(3)]


def store_of(queue: StoreQueue) -> Any:
    return queue._job


def kill(queue: StoreQueue) -> None:
    store_of(queue).set(exit_key(queue.rank), ExitNotice(queue.rank, "node0", 1, -9).to_json())


def test_claims_follow_each_other(queues: list[StoreQueue]) -> None:
    assert [queues[rank].take(most) for rank, most in ((0, 1), (2, 5), (1, 2), (0, 1))] == [0, 1, 6, 8]


def test_items_are_counted_with_the_next_claim(queues: list[StoreQueue]) -> None:
    queues[0].report([0, 1], b"first", items=7)
    assert queues[1].finished_items() == 0
    assert queues[0].take(3) == 0
    assert queues[1].finished_items() == 7
    assert queues[1].take(1) == 3


def test_all_see_the_same_reports_in_the_same_order(queues: list[StoreQueue]) -> None:
    long = bytes(range(256)) * 50_000  # in several pieces, beside the log
    queues[1].report([3, 4, 5, 9], b"\nof 1\n", items=4)
    queues[0].report([0], long, items=1)
    queues[1].report([6], long[1:], items=1)
    queues[2].report([7], b"", items=1)
    for queue in queues:
        reports = queue.reports()
        assert [(report.rank, report.units) for report in reports] == [(1, (3, 4, 5, 9)), (0, (0,)), (1, (6,)), (2, (7,))]
        assert list(queue.bodies(reports)) == [b"\nof 1\n", long, long[1:], b""]
        assert queue.reports() == []
    queues[0].report([8], b"later", items=1)
    assert [report.units for report in queues[2].reports()] == [(8,)]


def test_results_leave_the_store_when_all_have_read_them(queues: list[StoreQueue]) -> None:
    queues[0].report([0], b"x" * 10_000, items=1)
    keys = store_of(queues[0]).num_keys()
    for queue in queues:
        queue.forget()
    assert store_of(queues[0]).num_keys() == keys + 1 - 2, "the counter of readers came, results and log went"


def test_nothing_is_taken_from_the_living(queues: list[StoreQueue]) -> None:
    queues[1].hold([4])
    assert [queues[0].take_over(lambda: [4, 5]) for _ in range(3)] == [None, None, None]


def test_the_units_of_a_dead_rank_go_to_one_of_the_others(queues: list[StoreQueue], capsys: pytest.CaptureFixture[str]) -> None:
    queues[1].hold([4, 5])
    queues[2].hold([6])
    kill(queues[1])
    unfinished = [4, 5, 6, 7]  # nobody says to hold 7: its claim came a moment ago, or from the dead
    assert queues[0].take_over(lambda: unfinished) is None, "two looks have to say it"
    assert queues[2].take_over(lambda: unfinished) is None
    assert queues[0].take_over(lambda: unfinished) == 4
    queues[0].hold([4])
    queues[2].hold([])
    assert queues[2].take_over(lambda: [4, 5, 7]) == 5
    assert queues[0].take_over(lambda: [7]) == 7
    assert (
        capsys.readouterr().err
        == "slipstream: rank 1 (host node0, pid 1) was ended by SIGKILL; what it had not finished goes to the others\n"
    )


def test_a_unit_that_two_processes_died_with_is_not_given_to_a_third(queues: list[StoreQueue]) -> None:
    kill(queues[1])
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4]
    queues[0].hold([4])
    assert [queues[2].take_over(lambda: [4]) for _ in range(2)] == [None, None]
    kill(queues[0])
    assert queues[2].take_over(lambda: [4]) is None
    with pytest.raises(PoisonItem) as caught:
        queues[2].take_over(lambda: [4])
    assert (caught.value.unit, caught.value.end) == (4, "rank 0 (host node0, pid 1) was ended by SIGKILL")


def test_who_takes_over_and_leaves_gives_back_too(queues: list[StoreQueue]) -> None:
    kill(queues[1])
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4]
    queues[0].leave(early=True)
    assert [queues[2].take_over(lambda: [4]) for _ in range(2)] == [None, 4]


def test_who_leaves_early_gives_back_too(queues: list[StoreQueue]) -> None:
    queues[1].hold([4])
    queues[1].leave(early=True)
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4]
    assert queues[0].gone() == {1: "rank 1 left the work before its end"}


def test_silence_counts_as_gone(queues: list[StoreQueue], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(work_queue.time, "monotonic", lambda: now)
    store_of(queues[0]).set("beacon/1", json.dumps({"beat": 5}))
    assert queues[0].take_over(lambda: [4]) is None
    now = work_queue.SILENCE_SECONDS - 1
    assert queues[0].take_over(lambda: [4]) is None
    assert queues[0].gone() == {}
    store_of(queues[0]).set("beacon/1", json.dumps({"beat": 6}))
    assert queues[0].take_over(lambda: [4]) is None
    now += work_queue.SILENCE_SECONDS + 1
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4]
    assert "no sign of life" in queues[0].gone()[1]


def test_a_process_of_this_machine_that_runs_is_only_busy(queues: list[StoreQueue], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(work_queue.time, "monotonic", lambda: now)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    store_of(queues[0]).set("beacon/1", json.dumps({"beat": 5, "host": socket.gethostname(), "pid": child.pid}))
    assert queues[0].take_over(lambda: [4]) is None
    now += 100 * work_queue.SILENCE_SECONDS
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, None]
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4], "one that was stopped is not"
    child.kill()
    child.communicate()


def test_a_failure_ends_the_queue_for_all_and_the_first_one_is_told(queues: list[StoreQueue]) -> None:
    queues[0].report([0], b"", items=3)
    queues[1].fail("the first")
    queues[2].fail("the second")
    assert queues[0].take(1) >= 1 << 31
    assert queues[0].failure() == "the first"
    assert queues[1].finished_items() == 3


def test_the_launcher_can_read_who_may_be_lost(queues: list[StoreQueue]) -> None:
    store = store_of(queues[0])
    queues[1].leave(early=False)
    assert [store.get(holds_items_key(rank)) for rank in range(3)] == [b"1", b"0", b"1"]


def test_the_first_who_is_there_does_what_one_has_to_do(queues: list[StoreQueue]) -> None:
    assert [queue.is_first() for queue in queues] == [True, False, False]
    kill(queues[0])
    queues[1]._next_look = queues[2]._next_look = 0.0
    assert [queue.is_first() for queue in queues[1:]] == [True, False]
    queues[1].settle()
    assert all(queue.is_settled() for queue in queues)
