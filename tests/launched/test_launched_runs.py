"""Launches that go well: as many ranks as asked for, arguments as given, output where it should be."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from launching import command, launch, script

pytestmark = pytest.mark.launched

REPORT = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
         "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME")
told = {"argv": sys.argv[1:], "total": total.item(), "threads": torch.get_num_threads(), "run": os.environ["TORCHELASTIC_RUN_ID"],
        "parent": os.getppid(), "variables": {name: os.environ[name] for name in names}}
with open(f"{os.environ['NOTES']}/told-{dist.get_rank()}.json", "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
"""
NASTY = ["--", "--num_processes", "9", "", "a b", "line\nbreak", "\udcff\udcfe", "'\"$HOME;`ls`", "-m"]


def told(folder: Path):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("told-*.json"))]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_and_arguments_unchanged(launch, script, tmp_path, method):
    """As many ranks as asked for with their arguments byte for byte."""
    train = script(REPORT)
    finished = launch("--cpu", "--num-processes", "2", "--start_method", method, train, *NASTY)
    assert (finished.code, finished.err) == (0, "")
    ranks = told(tmp_path)
    assert [rank["variables"] for rank in ranks] == [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank in range(2)
    ]
    assert {rank["total"] for rank in ranks} == {2.0}
    assert [rank["argv"] for rank in ranks] == [NASTY, NASTY]
    assert {rank["threads"] for rank in ranks} == {1}
    assert len({rank["run"] for rank in ranks}) == 1


def test_single_process_exec(command, script):
    """One process takes the launcher's place."""
    running = command("--cpu", script("import os, sys; print(os.getpid(), os.environ['SLIPSTREAM_CONFIG'], sys.argv[1:])"), *NASTY)
    finished = running.finish()
    assert finished.code == 0
    pid, rest = finished.out.split(" ", 1)
    assert int(pid) == running.process.pid
    assert '"cpu":[true,' in rest
    assert finished.out.endswith(f"{NASTY}\n")


def test_module_output_files_and_terminal(launch, script, tmp_path):
    """A module and its output in files and on the terminal."""
    script("import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)", "mod.py")
    finished = launch("--cpu", "--num_processes", "2", "--log_dir", "logs", "--role", "trainer", "-m", "mod")
    assert finished.code == 0
    assert sorted(finished.out.splitlines()) == ["[trainer0]:out 0", "[trainer1]:out 1"]
    assert sorted(finished.err.splitlines()) == ["[trainer0]:err 0", "[trainer1]:err 1"]
    logs = {str(path.relative_to(tmp_path / "logs")).partition("/")[2]: path.read_text() for path in (tmp_path / "logs").rglob("*.log")}
    assert logs == {f"attempt_0/{rank}/std{name}.log": f"{name} {rank}\n" for rank in (0, 1) for name in ("out", "err")}


def test_program_without_python(launch):
    """A program of its own."""
    program = 'echo "$RANK of $WORLD_SIZE: $1"; exit $((RANK * 5))'
    finished = launch("--cpu", "--num_processes", "2", "--no_python", "sh", "-c", program, "sh", "a b")
    assert sorted(finished.out.splitlines()) == ["0 of 2: a b", "1 of 2: a b"]
    assert finished.code == 5
    assert "rank 1 of 2" in finished.err


def test_show_starts_nothing(launch, script, tmp_path):
    """Show starts nothing."""
    finished = launch("--show", "--cpu", "--num_processes", "2", script("open('started', 'w')"))
    assert finished.code == 0
    assert "fork: safe here" in finished.out
    assert not (tmp_path / "started").exists()


def test_four_launches_at_once(command, script):
    """Four launches at once all succeed."""
    train = script("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\nprint('met')")
    launches = [command("--cpu", "--num_processes", "2", train) for _ in range(4)]
    finished = [launch.finish() for launch in launches]
    assert [(entry.code, entry.out, entry.err) for entry in finished] == [(0, "met\nmet\n", "")] * 4


HOLD = """
from telling import up
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
up()
while not os.path.exists(f"{os.environ['NOTES']}/go"):
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""


def listeners(pids: set[int]) -> set[str]:
    """The local addresses on which processes listen, from the kernel's own tables."""
    import psutil

    return {
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables")
def test_listens_on_loopback_only(command, script, tmp_path):
    """Nothing of a job on one machine listens off the loopback interface."""
    running = command("--cpu", "--num_processes", "2", script(HOLD))
    pids = {running.process.pid, *running.pids().values()}
    found = listeners(pids)
    (tmp_path / "go").touch()
    assert running.finish().code == 0
    assert found == {"127.0.0.1"}


def opened(pid: int) -> set[str]:
    return {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables")
def test_worker_inherits_no_launcher_file(command, script, tmp_path):
    """Neither its sockets nor its pipes: a worker that outlived the launcher would keep them alive."""
    running = command("--cpu", "--num_processes", "2", script(HOLD.replace("dist.", "0 and dist.")))
    workers = [opened(pid) for pid in running.pids().values()]
    launcher = opened(running.process.pid)
    (tmp_path / "go").touch()
    assert running.finish().code == 0
    for worker in workers:
        kept = {name for name in worker & launcher if not name.startswith("/")}
        assert len(kept) <= 2, kept  # the two pipes that are stdout and stderr here
        assert all(name.startswith("pipe:") for name in kept)


DRAW = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
print(f"rank {os.environ['RANK']} of {dist.get_world_size()} drew {torch.randn(1).item()}")
dist.destroy_process_group()
"""


def test_unseeded_ranks_differ(launch, script):
    """Unseeded ranks draw different numbers."""
    finished = launch("--cpu", "--num_processes", "2", script(DRAW))
    draws = [line.rpartition(" ")[2] for line in finished.out.splitlines()]
    assert len(set(draws)) == 2, finished


def test_single_process_overrides_leftovers(launch, script):
    """One process overrides what is left of another job."""
    left = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    finished = launch("--cpu", "--num_processes", "1", script(DRAW), **left)
    assert finished.out.startswith("rank 0 of 1 drew"), finished


FORKS = """
import os, sys
opened = [number for _ in range(20) for number in os.pipe()]
inodes = [os.fstat(number).st_ino for number in opened]
child = os.fork()
if child == 0:
    for number, inode in zip(opened, inodes):
        if os.fstat(number).st_ino != inode:
            os._exit(1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_children_keep_files(launch, script):
    """A process that a rank forks, such as the worker of a loader, has the files of the rank, each under its number."""
    finished = launch("--cpu", "--num_processes", "2", script(FORKS))
    assert (finished.code, finished.err) == (0, "")
