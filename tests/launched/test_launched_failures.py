"""Launches that fail: the first failure is told last, once; exit codes are kept; nobody is left behind."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import command, eventually, gone, launch, script

pytestmark = pytest.mark.launched

ONE_RAISES = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
def deep():
    raise ValueError("the real cause")
if dist.get_rank() == 1:
    deep()
dist.all_reduce(torch.ones(1))
"""
HOLD = """
from telling import up
import sys, time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
up()
if sys.argv[1:] == ["alone"]:
    time.sleep(600)
while True:
    dist.barrier()
    time.sleep(0.02)
"""
TWO = ("--cpu", "--num_processes", "2")


def test_first_failure_reported_last(launch, script):
    """The first failure is reported last and once."""
    train = script(ONE_RAISES)
    finished = launch(*TWO, train)
    assert finished.code == 1
    assert finished.err.count("Traceback") == 1
    assert finished.err.count("the real cause") == 2  # the line of code and the exception
    assert finished.err.splitlines()[-1] == "ValueError: the real cause"
    assert [line for line in finished.err.splitlines() if "File" in line] == [
        f'  File "{train}", line 7, in <module>',
        f'  File "{train}", line 5, in deep',
    ]
    assert "rank 0 stopped because of it" in finished.err
    assert "torch" not in finished.err


def test_late_cause_reported(launch, script):
    """While the others failed only because of another one, that one gets the time to report."""
    follower = "from slipstream.errors import PeerLostError; raise PeerLostError('rank 0 gave up')"
    train = script(f"import os, time\nif os.environ['RANK'] == '1':\n    {follower}\ntime.sleep(1.5)\nraise ValueError('the real cause')\n")
    finished = launch(*TWO, "--max_restarts", "1", train)
    assert finished.err.splitlines()[-1] == "ValueError: the real cause"
    assert finished.err.count("rank 1 stopped because of it: PeerLostError: rank 0 gave up") == 2


def test_log_folder_keeps_tracebacks(launch, script, tmp_path):
    """A log folder keeps every traceback and is named."""
    finished = launch(*TWO, "--log_dir", "logs", script(ONE_RAISES))
    log = Path(finished.err.splitlines()[-1].removeprefix("Its output: "))
    assert log.read_text().endswith("ValueError: the real cause\n")
    assert len(list((tmp_path / "logs").rglob("stderr.log"))) == 2


@pytest.mark.parametrize("code", [3, 255])
def test_exit_codes_kept(launch, script, code):
    """Exit codes are kept."""
    assert launch(*TWO, script(f"import os, sys; sys.exit({code} if os.environ['RANK'] == '1' else 0)")).code == code


def test_config_error_without_traceback(launch, script):
    """A configuration error in a worker is reported without a traceback."""
    finished = launch(*TWO, script("from slipstream.errors import ConfigError; raise ConfigError('RANK is set, WORLD_SIZE is not')"))
    assert finished.code == 2
    assert finished.err.splitlines()[-1] == "RANK is set, WORLD_SIZE is not"
    assert "Traceback" not in finished.err


def test_port_in_use_named(launch, script):
    """A port in use is refused by its number."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = launch(*TWO, "--main_process_port", str(port), script(""))
    assert finished.code == 2
    assert f"Port {port}" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_killed_worker_ends_job(request, command, script, method):
    """A killed worker is named, and the job ends."""
    running = command(*TWO, "--start_method", method, script(HOLD))
    pids = running.pids()
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    finished = running.finish()
    assert time.monotonic() - killed < 30 or not request.config.getoption("--soak")
    assert finished.code == 128 + signal.SIGKILL
    assert f"rank 1 of 2 (host {os.uname().nodename}, pid {pids[1]}) was ended by SIGKILL." in finished.err
    assert "out-of-memory" in finished.err.splitlines()[-1]
    assert all(gone(pid) for pid in pids.values())


@pytest.fixture
def little_memory() -> Iterator[tuple[str, ...]]:
    """What to put before a command so that it and its children get little memory together."""
    mount, name = Path("/sys/fs/cgroup"), f"slipstream-test-{os.getpid()}"
    limits = [(mount / "memory" / name, "memory.limit_in_bytes"), (mount / name, "memory.max")]
    group, file = limits[0] if (mount / "memory").exists() else limits[1]
    try:
        group.mkdir()
        try:
            (group / file).write_text(str(700 << 20))
        except OSError:
            group.rmdir()
            raise
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
    assert eventually(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_oom_kill_named(command, script, little_memory):
    """An out of memory kill is called that."""
    train = script("import os, time\nif os.environ['RANK'] == '1': kept = [bytearray(1 << 20) for _ in range(4000)]\ntime.sleep(60)")
    finished = command(*TWO, train, prefix=little_memory).finish()
    assert finished.code == 137
    assert "rank 1 of 2" in finished.err
    assert finished.err.splitlines()[-1].startswith("The kernel's out-of-memory killer ended it")


@pytest.mark.parametrize("way", ["stopped", "deaf"])
def test_stuck_worker_ended(command, script, way):
    """A worker that does not react is ended too."""
    train = script(("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if way == "deaf" else "") + HOLD)
    running = command(*TWO, train, "alone")
    pids = running.pids()
    if way == "stopped":
        os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    assert running.finish().code == 137
    assert gone(pids[0])


def test_no_worker_outlives_launcher(command, script):
    """No worker outlives the launcher."""
    running = command(*TWO, script(HOLD))
    pids = running.pids()
    running.process.kill()
    assert eventually(lambda: all(gone(pid) for pid in pids.values()))


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_reaches_workers(command, script, tmp_path, signum, code):
    """A signal to the launcher reaches the workers."""
    train = script(
        "import os, signal, sys, time\nfrom telling import up\n"
        "def end(number, frame):\n    open(f\"{os.environ['NOTES']}/got-{number}-{os.environ['RANK']}\", 'w').close(); sys.exit(0)\n"
        f"signal.signal({int(signum)}, end)\nup()\ntime.sleep(600)"
    )
    running = command(*TWO, train)
    pids = running.pids()
    running.process.send_signal(signum)
    finished = running.finish()
    assert finished.code == code
    assert finished.err == f"slipstream: stopped by {signum.name}; 2 processes ended.\n"
    assert sorted(path.name for path in tmp_path.glob("got-*")) == [f"got-{int(signum)}-0", f"got-{int(signum)}-1"]
    assert all(gone(pid) for pid in pids.values())


def test_second_signal_kills(command, script):
    """The second signal kills the workers at once."""
    running = command(*TWO, script("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + HOLD), "alone")
    pids = running.pids()
    running.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    running.process.send_signal(signal.SIGINT)
    assert running.finish().code == 130
    assert all(gone(pid) for pid in pids.values())


def test_leftover_processes_ended(launch, script, tmp_path):
    """What workers leave behind is ended."""
    train = script(
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "open(f\"{os.environ['NOTES']}/left-{os.environ['RANK']}\", 'w').write(str(child.pid))"
    )
    assert launch(*TWO, train).code == 0
    left = [int(path.read_text()) for path in tmp_path.glob("left-*")]
    assert len(left) == 2
    assert all(gone(pid) for pid in left)


@pytest.mark.parametrize("own_session", [False, True])
def test_restart_meets_no_earlier_process(launch, script, tmp_path, own_session):
    """What a killed process has started is ended before the next attempt begins."""
    train = script(
        "import os, signal, subprocess\n"
        "note, first = f\"{os.environ['NOTES']}/child-{os.environ['RANK']}\", os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "if first:\n"
        f"    child = subprocess.Popen(['sleep', '600'], start_new_session={own_session})\n"
        "    open(note, 'w').write(str(child.pid))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "elif os.path.exists(note):\n"
        "    raise SystemExit(os.path.exists(f'/proc/{open(note).read()}'))"
    )
    finished = launch(*TWO, "--max_restarts", "1", train)
    assert finished.code == 0, finished.err
    assert list(tmp_path.glob("child-*"))


@pytest.mark.parametrize("options", [(), ("--log_dir", "logs")], ids=["temporary", "kept"])
def test_killed_workers_leave_no_files(launch, script, tmp_path, monkeypatch, options):
    """What a killed process leaves in the folder for temporary files is removed with its attempt, and at the end everything is."""
    train = script(
        "import json, multiprocessing.util, os, signal, tempfile\n"
        "own, attempt = multiprocessing.util.get_temp_dir(), os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open(own + '/socket', 'w').close()\n"
        "found = [name for _, folders, files in os.walk(tempfile.gettempdir()) for name in (*folders, *files)]\n"
        "open(f\"{os.environ['NOTES']}/found-{attempt}-{os.environ['RANK']}\", 'w').write(json.dumps([own, found]))\n"
        "if attempt == '0': os.kill(os.getpid(), signal.SIGKILL)"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    assert launch(*TWO, "--max_restarts", "1", *options, train, TMPDIR=str(folder)).code == 0
    for rank in range(2):
        own, found = json.loads((tmp_path / f"found-1-{rank}").read_text())
        assert own.startswith(str(folder))
        assert os.path.basename(own) == f"1-{rank}"
        assert not [name for name in found if name.startswith(("pymp", "0-", "attempt_0"))]
    assert os.listdir(folder) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_restarts_after_every_kill(command, script, rounds, tmp_path):
    """A job comes back after every kill."""
    kills = rounds(ci=3, soak=50)
    train = script(
        "import os\nlast = int(os.environ['TORCHELASTIC_RESTART_COUNT']) == int(os.environ['TORCHELASTIC_MAX_RESTARTS'])\n"
        + HOLD.replace("while True:", "for _ in range(3) if last else iter(int, 1):")
    )
    running = command(*TWO, "--max_restarts", str(kills), train)
    choice = random.Random(0)
    for attempt in range(kills):
        pids = running.pids(attempt=attempt)
        time.sleep(choice.random() * 0.1)
        os.kill(pids[choice.randrange(2)], signal.SIGKILL)
    finished = running.finish()
    assert finished.code == 0, finished.err
    assert finished.err.count("starting all processes again") == kills
