"""The pool of ranks: fresh runs, named failures, and always whole again."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from slipstream.errors import ConfigError
from slipstream.launch.store import ALARM_KEY, ExitNotice, attempt_prefix, exit_key
from slipstream.testing import RankFailure, ranks as pool_of


def rank() -> int:
    return int(os.environ["RANK"])


def total() -> float:
    """A real collective through plain torch."""
    dist.init_process_group("gloo")
    tensor = torch.tensor([rank() + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def test_results_by_rank(ranks):
    """Results come back by rank."""
    assert ranks(3).run(rank) == [0, 1, 2]


def test_closures_and_arguments(ranks):
    """Closures and arguments travel."""
    offset = 10
    assert ranks(2).run(lambda scale, *, shift: offset + scale * rank() + shift, 5, shift=0.5) == [10.5, 15.5]


def test_tensors_and_classes_return(ranks):
    """Tensors and own classes come back."""
    @dataclasses.dataclass
    class Pair:
        name: str
        value: torch.Tensor

    first, second = ranks(2).run(lambda: Pair(f"rank {rank()}", torch.full((2,), rank())))
    assert isinstance(second, Pair)
    assert (first.name, second.value.tolist()) == ("rank 0", [1, 1])


def test_collectives_in_each_run(ranks):
    """Collectives run and again in the next run."""
    assert [ranks(2).run(total) for _ in range(3)] == [[3.0, 3.0]] * 3


def test_group_closed_between_runs(ranks):
    """The group of one run is closed before the next."""
    ranks(2).run(total)
    assert ranks(2).run(dist.is_initialized) == [False, False]


def test_runs_start_equal(ranks):
    """Every run starts from the same variables folder and seeds."""
    def disturb():
        os.environ["LEFT_OVER"] = "1"
        del os.environ["RANK"]
        os.chdir("/")
        torch.rand(5)

    def look():
        return "LEFT_OVER" in os.environ, rank(), os.getcwd(), torch.rand(1).item(), random.random()

    before = ranks(2).run(look)
    outcomes = ranks(2).outcomes(lambda: torch.rand(3))
    assert all(not outcome.failed for outcome in outcomes)
    with pytest.raises(RankFailure, match="left behind: environment variable LEFT_OVER"):
        ranks(2).run(disturb)
    assert ranks(2).run(look) == before


def test_run_with_variables(ranks):
    """A run can be given variables."""
    assert ranks(2).run(lambda: os.environ["EXTRA"], environ={"EXTRA": "yes"}) == ["yes", "yes"]
    assert ranks(2).run(lambda: "EXTRA" in os.environ) == [False, False]


def test_rank_environment(ranks):
    """A rank is reported who it is as under the elastic agent."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS")
    assert ranks(2).run(lambda: [os.environ[name] for name in names]) == [[r, r, "2", "2", "127.0.0.1", "True", "1"] for r in "01"]


def test_attempts_differ(ranks):
    """Attempts differ between runs."""
    first, second = (ranks(2).run(lambda: int(os.environ["TORCHELASTIC_RESTART_COUNT"])) for _ in range(2))
    assert len(set(first)) == len(set(second)) == 1
    assert second[0] > first[0]


def test_first_failure_with_traceback(ranks):
    """The first failure is shown with its traceback and all are listed."""
    def uneven():
        if rank() == 0:
            time.sleep(0.2)
            raise KeyError("late")
        raise ValueError("early")

    with pytest.raises(RankFailure) as caught:
        ranks(2).run(uneven)
    text = str(caught.value)
    assert "2 of 2 ranks failed in" in text
    assert "rank 0: KeyError: 'late'" in text
    assert "rank 1 failed first:" in text
    assert 'raise ValueError("early")' in text
    assert isinstance(caught.value.__cause__, ValueError)


def test_outcomes_collect_failures(ranks):
    """Outcomes collect what run would raise."""
    good, bad = ranks(2).outcomes(lambda: 1 // (1 - rank()))
    assert (good.value, good.failed) == (1, False)
    assert isinstance(bad.error, ZeroDivisionError)


def test_unpicklable_exception_named(ranks):
    """An exception that cannot travel is still named."""
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a}{b}")

    def fail():
        raise Odd("no", "pe")

    assert "Odd: nope" in str(ranks(2).outcomes(fail)[0].error)


def test_unpicklable_value_explained(ranks):
    """A value that cannot travel is explained."""
    with pytest.raises(RankFailure, match=r"returned lock, which cannot be pickled .*return plain data or tensors"):
        ranks(2).run(threading.Lock)


def test_asserts_explained(ranks):
    """Asserts are explained as pytest does."""
    def check():
        values = [1, 2, 3]
        assert sum(values) == 7

    with pytest.raises(RankFailure, match="assert 6 == 7"):
        ranks(2).run(check)


def test_system_exit_is_outcome(ranks):
    """System exit is an outcome and not the end of the rank."""
    def leave():
        raise SystemExit(3)  # not sys.exit, which a tracker package may have replaced in this process

    pids = ranks(2).pids
    assert [outcome.error.code for outcome in ranks(2).outcomes(leave)] == [3, 3]
    assert ranks(2).pids == pids


def test_output_by_rank_in_order(ranks, capsys):
    """Output is kept in order and printed by rank."""
    def talk():
        print("one")
        print("two", file=sys.stderr)
        os.write(1, b"three\n")

    assert [outcome.output for outcome in ranks(2).outcomes(talk)] == ["one\ntwo\nthree\n"] * 2
    assert "[rank 1] two" in capsys.readouterr().out


def test_no_output_of_gloo(ranks):
    """What gloo prints about its connections in some versions of torch is no output of the rank."""
    text = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\nhello"
    assert [outcome.output for outcome in ranks(1).outcomes(lambda: print(text))] == ["hello\n"]


def test_killed_rank_named_and_replaced(ranks):
    """A killed rank is named with its signal and the pool is whole again."""
    def die():
        dist.init_process_group("gloo")
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    survivor, dead = ranks(2).outcomes(die)
    assert dead.exit.signal_name == "SIGKILL"
    assert isinstance(survivor.error, RuntimeError)
    assert ranks(2).run(total) == [3.0, 3.0]


def test_death_reported_first(ranks):
    """Run reports a death first."""
    with pytest.raises(RankFailure, match=r"rank 1 failed first:\nrank 1 .* ended with exit code 7"):
        ranks(2).run(lambda: os._exit(7) if rank() else 1 / 0)


def test_exit_notice_of_dead_rank(ranks):
    """The notice of a dead rank reaches the survivors' store."""
    def survive():
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        prefix = attempt_prefix(os.environ["TORCHELASTIC_RUN_ID"], int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        store.wait([f"{prefix}/{ALARM_KEY}"])
        return store.get(f"{prefix}/{exit_key(1)}").decode()

    notice = ExitNotice.from_json(ranks(2).outcomes(survive)[0].value)
    assert (notice.rank, notice.signal_name) == (1, "SIGTERM")


def test_exit_notice_of_failed_rank(ranks):
    """The notice of a failed rank gives the exception."""
    def survive():
        if rank() == 1:
            raise ValueError("wrong input")
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
        prefix = attempt_prefix(os.environ["TORCHELASTIC_RUN_ID"], int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        return store.get(f"{prefix}/{exit_key(1)}").decode()

    assert "ValueError: wrong input" in ranks(2).outcomes(survive)[0].value


def test_stuck_rank_stack_and_replaced(ranks):
    """A stuck rank is reported with its stack and replaced."""
    def stay():
        if rank() == 1:
            print("before")
            time.sleep(600)

    fine, stuck = ranks(2).outcomes(stay, timeout=60, patience=1.0)
    assert not fine.failed
    assert stuck.stuck
    assert "did not finish within 60 s, or 1 s after the others" in stuck.traceback
    assert "in stay" in stuck.traceback
    assert stuck.output == "before\n"
    assert ranks(2).run(rank) == [0, 1]


def test_stopped_rank_replaced(ranks):
    """A stopped rank is replaced too."""
    stuck = ranks(2).outcomes(lambda: os.kill(os.getpid(), signal.SIGSTOP), timeout=0.5)
    assert [outcome.stuck for outcome in stuck] == [True, True]
    assert ranks(2).run(rank) == [0, 1]


def test_rank_ended_between_runs(ranks):
    """A rank that ends between two runs is replaced without blame."""
    victim = ranks(2).pids[1]
    os.kill(victim, signal.SIGKILL)
    while psutil.pid_exists(victim):
        time.sleep(0.01)
    assert ranks(2).run(rank) == [0, 1]
    assert ranks(2).pids[1] != victim


def test_left_thread_fails_run(ranks):
    """A thread left in a rank fails the run by name."""
    def leave():
        threading.Thread(target=time.sleep, args=(60,), name="forgotten", daemon=True).start()

    with pytest.raises(RankFailure, match="rank 0 left behind: thread 'forgotten'"):
        ranks(2).run(leave)


def test_left_child_fails_run(ranks):
    """A child left by a rank fails the run."""
    def leave():
        leave.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    with pytest.raises(RankFailure, match="left behind: child process"):
        ranks(1).run(leave)


def test_interrupted_run_then_next(ranks):
    """An interrupted run does not confuse the next."""
    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    pending = signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks(1).run(time.sleep, 60)
    finally:
        signal.signal(signal.SIGALRM, old)
        signal.setitimer(signal.ITIMER_REAL, *pending)
    assert ranks(1).run(rank) == [0]


def test_listens_on_loopback_only(ranks):
    """Nothing listens off the loopback interface."""
    def listeners():
        total()
        processes = [psutil.Process(), psutil.Process().parent()]
        found = [connection.laddr.ip for process in processes for connection in process.net_connections() if connection.status == "LISTEN"]
        assert found, "the store and gloo listen somewhere"
        return set(found)

    assert ranks(2).run(listeners) == [{"127.0.0.1"}] * 2


def test_no_process_after_kill(tmp_path):
    """No process is left when the test process is killed."""
    script = tmp_path / "session.py"
    script.write_text(
        "import os, signal, time\n"
        "from slipstream.testing import ranks\n"
        "pool = ranks(2)\n"
        "print(*pool.pids, pool.server_pid, flush=True)\n"
        "pool.run(time.sleep, 600, timeout=600)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        process.kill()
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if psutil.pid_exists(pid)]}"
        time.sleep(0.05)


@pytest.mark.parametrize("size", [0, -1, "2", 1.5, True])
def test_pool_size_checked(size):
    """A pool has a sensible size."""
    with pytest.raises(ConfigError, match=r"write ranks\(2\)"):
        pool_of(size)
