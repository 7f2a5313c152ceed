"""Children: started, noticed, signalled, and all gone at the end. No torch in any of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slipstream.launch.worker_processes import StopRequested, WorkerProcesses, capture_signals, oom_kill_counts, open_files

PATIENT = 30.0


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def gone(pid: int) -> bool:
    """Ended; whoever must reap it may not have done so yet."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def eventually(what, limit: float = PATIENT) -> bool:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.01)
    return False


def all_ends(workers: WorkerProcesses):
    ends = []
    while workers.running:
        workers.wait(PATIENT)
        ends += workers.poll()
    return {end.local_rank: end.exit_code for end in ends}


@pytest.fixture
def workers():
    workers = WorkerProcesses()
    yield workers
    workers.stop(signum=signal.SIGKILL)


def sleeper(workers: WorkerProcesses, local_rank: int, before: str = "pass", after: str = "time.sleep(60)") -> None:
    """A child that has said that it is up."""
    ready, said = os.pipe()
    program = f"import os, signal, subprocess, time; {before}; os.write({said}, b'!'); {after}"
    os.set_inheritable(said, True)
    workers.fork(local_rank, lambda: _become(program))
    os.read(ready, 1)
    for end in (ready, said):
        os.close(end)


def _become(program: str) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execv(sys.executable, python(program))


def test_exit_codes_and_signals(workers):
    """Exit codes and signals come back as they were."""
    workers.execute(0, python("raise SystemExit(7)"), os.environ)
    workers.execute(1, python("import os; os.kill(os.getpid(), 9)"), os.environ)
    workers.fork(2, lambda: os._exit(5))
    assert all_ends(workers) == {0: 7, 1: -9, 2: 5}


def test_killed_exit_comes_first(workers):
    """Of two ends seen at once the killed one comes first."""
    workers.execute(0, python(""), os.environ)
    workers.execute(1, python("import os; os.kill(os.getpid(), 9)"), os.environ)
    assert eventually(lambda: all(gone(pid) for pid in workers.pids.values()))
    assert [end.local_rank for end in workers.poll()] == [1, 0]


def test_forked_child_never_returns(workers, capfd):
    """A forked child never returns into our stack."""
    workers.fork(0, lambda: 1 / 0)
    workers.fork(1, lambda: None)
    assert all_ends(workers) == {0: 1, 1: 1}
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_buffered_output_printed_once(capfd):
    """What was printed before a fork is printed once."""
    program = """
import sys
from slipstream.launch.worker_processes import WorkerProcesses
print("before", end="")
workers = WorkerProcesses()
workers.fork(0, lambda: None)
workers.wait(30)
"""
    assert subprocess.run(python(program), stdout=subprocess.PIPE, timeout=PATIENT, check=True).stdout == b"before"


def test_stop_waits_for_exit(workers):
    """Stop waits for those who end by themselves."""
    sleeper(workers, 0, after="time.sleep(0.2); os._exit(3)")
    assert [end.exit_code for end in workers.stop(wait_before_signal=PATIENT)] == [3]


def test_stop_ignored_or_stopped_child(workers):
    """Stop ends a child that ignores the signal and one that is stopped."""
    sleeper(workers, 0, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    sleeper(workers, 1)
    os.kill(workers.pids[1], signal.SIGSTOP)
    codes = {end.local_rank: end.exit_code for end in workers.stop(wait_before_kill=0.3)}
    assert codes[0] == -signal.SIGKILL
    assert codes[1] in (-signal.SIGKILL, -signal.SIGTERM)
    assert not workers.running


def test_stop_reaches_grandchildren(workers, tmp_path):
    """Stop reaches what a child has started."""
    note = tmp_path / "pid"
    sleeper(workers, 0, f"p = subprocess.Popen(['sleep', '60']); open({str(note)!r}, 'w').write(str(p.pid))")
    workers.stop()
    assert eventually(lambda: gone(int(note.read_text())))


def test_hurry_kills_at_once(workers):
    """When hurry returns True, the wait for the children ends."""
    sleeper(workers, 0, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert [end.exit_code for end in workers.stop(wait_before_kill=PATIENT * 10, kill_now=lambda: True)] == [-signal.SIGKILL]


def test_children_die_with_parent(tmp_path):
    """Children die with their parent."""
    note = tmp_path / "pids"
    program = f"""
import os, sys, time
from slipstream.launch.worker_processes import WorkerProcesses, die_with_parent
workers, parent = WorkerProcesses(), os.getpid()
workers.execute(0, ["sleep", "60"], os.environ)
def body():
    die_with_parent(parent)
    open({str(note)!r} + ".ready", "w").close()
    time.sleep(60)
workers.fork(1, body)
open({str(note)!r}, "w").write(" ".join(str(pid) for pid in workers.pids.values()))
time.sleep(60)
"""
    with subprocess.Popen(python(program)) as parent:
        ready = Path(f"{note}.ready")
        assert eventually(lambda: ready.exists() and note.exists() and len(note.read_text().split()) == 2)
        parent.kill()
    assert eventually(lambda: all(gone(int(pid)) for pid in note.read_text().split()))


def test_orphans_found_and_ended():
    """Orphans of children are found and ended."""
    program = """
import os, subprocess, sys
from slipstream.launch.worker_processes import WorkerProcesses, become_subreaper, terminate_descendants
become_subreaper()
workers = WorkerProcesses()
orphan = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
workers.execute(0, [sys.executable, "-c", orphan], os.environ)
while workers.running:
    workers.wait(30)
    workers.poll()
print(terminate_descendants())
"""
    pid, left = subprocess.run(python(program), capture_output=True, text=True, timeout=PATIENT, check=True).stdout.splitlines()
    assert left == f"['sleep (pid {pid})']"
    assert gone(int(pid))


def test_descendants_that_end_by_themselves():
    """What ends when its parent has ended, as helpers of multiprocessing do, is not ended and not named."""
    program = """
import os, subprocess, sys
from slipstream.launch.worker_processes import become_subreaper, terminate_descendants
become_subreaper()
helper = "import os, time; ready = os.write(1, b'ready'); os.read(0, 1); time.sleep(0.05)"
orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {helper!r}], stdin=0, start_new_session=True)"
reader, writer = os.pipe()
out, into = os.pipe()
subprocess.run([sys.executable, "-c", orphan], stdin=reader, stdout=into, check=True)
os.read(out, 5)
os.close(reader)
os.close(writer)
print(terminate_descendants())
"""
    assert subprocess.run(python(program), capture_output=True, timeout=PATIENT, check=True).stdout == b"[]\n"


def test_no_descendants_no_work():
    """No descendants is no work."""
    program = "import sys; from slipstream.launch import worker_processes as w; print(w.terminate_descendants(), 'psutil' in sys.modules)"
    assert subprocess.run(python(program), capture_output=True, timeout=PATIENT, check=True).stdout == b"[] False\n"


def test_signal_recorded_and_wakes():
    """A signal is noted and wakes but does not interrupt."""
    with capture_signals() as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        WorkerProcesses().wait(PATIENT, requests.wake)
        assert requests.received == [signal.SIGTERM, signal.SIGINT]
        assert requests.kill_requested()
        with pytest.raises(StopRequested) as stopped:
            requests.check()
        assert stopped.value.signum is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_ignored_hangup_stays_ignored():
    """A hangup stays ignored where it was ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with capture_signals() as requests:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.SIGHUP not in requests.previous
    finally:
        signal.signal(signal.SIGHUP, before)


def test_open_files_and_oom_counts():
    """The system reports open files and memory kills."""
    before = open_files()
    with open(os.devnull) as file:
        assert [opened.number for opened in open_files() - before] == [file.fileno()]
    assert oom_kill_counts() == oom_kill_counts()
