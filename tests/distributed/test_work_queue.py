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
from slipstream.distributed.work_queue.queue import PoisonItem, WorkQueue
from slipstream.launch.store import ExitNotice, exit_key, holds_items_key


@pytest.fixture
def queues() -> list[WorkQueue]:
    store = HashStore()
    return [WorkQueue(store, "work", rank, 3) for rank in range(3)]


def store_of(queue: WorkQueue) -> Any:
    return queue._job


def kill(queue: WorkQueue) -> None:
    store_of(queue).set(exit_key(queue.rank), ExitNotice(queue.rank, "node0", 1, -9).to_json())


def test_claims_follow_each_other(queues: list[WorkQueue]) -> None:
    assert [queues[rank].take(most) for rank, most in ((0, 1), (2, 5), (1, 2), (0, 1))] == [0, 1, 6, 8]


def test_items_counted_with_next_claim(queues: list[WorkQueue]) -> None:
    """Items are counted with the next claim."""
    queues[0].report([0, 1], b"first", items=7)
    assert queues[1].finished_items() == 0
    assert queues[0].take(3) == 0
    assert queues[1].finished_items() == 7
    assert queues[1].take(1) == 3


def test_reports_in_same_order(queues: list[WorkQueue]) -> None:
    """All see the same reports in the same order."""
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


def test_read_results_leave_store(queues: list[WorkQueue]) -> None:
    """Results leave the store when all have read them."""
    queues[0].report([0], b"x" * 10_000, items=1)
    keys = store_of(queues[0]).num_keys()
    for queue in queues:
        queue.forget()
    assert store_of(queues[0]).num_keys() == keys + 1 - 2, "the counter of readers came, results and log went"


def test_live_ranks_keep_units(queues: list[WorkQueue]) -> None:
    """Nothing is taken from the living."""
    queues[1].hold([4])
    assert [queues[0].take_over(lambda: [4, 5]) for _ in range(3)] == [None, None, None]


def test_dead_rank_units_taken_over(queues: list[WorkQueue], capsys: pytest.CaptureFixture[str]) -> None:
    """The units of a dead rank go to one of the others."""
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


def test_poison_item_ends_work(queues: list[WorkQueue]) -> None:
    """A unit that two processes died with is not given to a third."""
    kill(queues[1])
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4]
    queues[0].hold([4])
    assert [queues[2].take_over(lambda: [4]) for _ in range(2)] == [None, None]
    kill(queues[0])
    assert queues[2].take_over(lambda: [4]) is None
    with pytest.raises(PoisonItem) as caught:
        queues[2].take_over(lambda: [4])
    assert (caught.value.unit, caught.value.end) == (4, "rank 0 (host node0, pid 1) was ended by SIGKILL")


def test_taken_over_units_given_back(queues: list[WorkQueue]) -> None:
    """Who takes over and leaves gives back too."""
    kill(queues[1])
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4]
    queues[0].leave(early=True)
    assert [queues[2].take_over(lambda: [4]) for _ in range(2)] == [None, 4]


def test_early_leaver_units_given_back(queues: list[WorkQueue]) -> None:
    """Who leaves early gives back too."""
    queues[1].hold([4])
    queues[1].leave(early=True)
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4]
    assert queues[0].gone == {1: "rank 1 left the work before its end"}


def test_silence_counts_as_gone(queues: list[WorkQueue], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(work_queue.time, "monotonic", lambda: now)
    store_of(queues[0]).set("heartbeat/1", json.dumps({"beat": 5}))
    assert queues[0].take_over(lambda: [4]) is None
    now = work_queue.SILENCE_SECONDS - 1
    assert queues[0].take_over(lambda: [4]) is None
    assert queues[0].gone == {}
    store_of(queues[0]).set("heartbeat/1", json.dumps({"beat": 6}))
    assert queues[0].take_over(lambda: [4]) is None
    now += work_queue.SILENCE_SECONDS + 1
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4]
    assert "no sign of life" in queues[0].gone[1]


def test_running_local_process_not_gone(queues: list[WorkQueue], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of this machine that runs is only busy."""
    now = 0.0
    monkeypatch.setattr(work_queue.time, "monotonic", lambda: now)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    store_of(queues[0]).set("heartbeat/1", json.dumps({"beat": 5, "host": socket.gethostname(), "pid": child.pid}))
    assert queues[0].take_over(lambda: [4]) is None
    now += 100 * work_queue.SILENCE_SECONDS
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, None]
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert [queues[0].take_over(lambda: [4]) for _ in range(2)] == [None, 4], "one that was stopped is not"
    child.kill()
    child.communicate()


def test_first_failure_ends_queue(queues: list[WorkQueue]) -> None:
    """A failure ends the queue for all and the first one is told."""
    queues[0].report([0], b"", items=3)
    queues[1].fail("the first")
    queues[2].fail("the second")
    assert queues[0].take(1) >= 1 << 31
    assert queues[0].failure() == "the first"
    assert queues[1].finished_items() == 3


def test_launcher_reads_held_items(queues: list[WorkQueue]) -> None:
    """The launcher can read who may be lost."""
    store = store_of(queues[0])
    queues[1].leave(early=False)
    assert [store.get(holds_items_key(rank)) for rank in range(3)] == [b"1", b"0", b"1"]


def test_lowest_present_rank_is_first(queues: list[WorkQueue]) -> None:
    """The first who is there does what one has to do."""
    assert [queue.is_first() for queue in queues] == [True, False, False]
    kill(queues[0])
    queues[1]._next_look = queues[2]._next_look = 0.0
    assert [queue.is_first() for queue in queues[1:]] == [True, False]
    queues[1].settle()
    assert all(queue.is_settled() for queue in queues)
