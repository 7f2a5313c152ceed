"""Several machines: as launchers on the loopback interface, and as two hosts in network namespaces of their own."""

# ruff: noqa: F401, F811 - the fixtures come from launching.py by name

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from launching import Running, command, free_port, launch, script

from slipstream.testing.hosts import Hosts, hosts_unavailable, two_hosts

pytestmark = pytest.mark.launched

WORK = """
from telling import up
import os, signal, socket, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"rank {rank} on {socket.gethostname()}, {total.item():.0f} in all, attempt {attempt}")
up()
if sys.argv[1:] == ["kill"] and rank == 3 and attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
while sys.argv[1:] == ["hold"]:
    dist.barrier()
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""


COLLECTIVES = """
import socket, torch
from slipstream import MismatchError, PartialState
state = PartialState()
me = state.process_index
hosts = state.gather([socket.gethostname()])
rows = len(state.gather(torch.ones(5000 + me)))
try:
    state.gather(torch.ones(1)) if me else state.wait_for_everyone()
except MismatchError as error:
    named = "wait_for_everyone" in str(error) and "gather" in str(error)
state.destroy_process_group()
print(f"rank {me}: {hosts} {rows} {named} {state.reduce(me)}")
"""


def machine(rank: int, port: str, *, address: str = "127.0.0.1", machines: int = 2, processes: int = 4) -> list[str]:
    meeting = ["--main_process_ip", address, "--main_process_port", port]
    return ["--cpu", "--num_machines", str(machines), "--num_processes", str(processes), "--machine_rank", str(rank), *meeting]


def test_failure_restarts_all_machines(command, script):
    """A failure on one machine restarts all of them."""
    train, port = script(WORK), free_port()
    launchers = [command(*machine(rank, port), "--max_restarts", "1", train, "kill") for rank in range(2)]
    finished = [launcher.finish() for launcher in launchers]
    assert [entry.code for entry in finished] == [0, 0], finished
    for index, entry in enumerate(finished):
        here = f"on {os.uname().nodename}, 4 in all, attempt"
        expected = [f"rank {rank} {here} {attempt}" for attempt in (0, 1) for rank in (2 * index, 2 * index + 1)]
        assert sorted(entry.out.splitlines(), key=lambda line: line[-1] + line) == expected
        assert "rank 3 of 4" in entry.err
        assert "was ended by SIGKILL" in entry.err


def test_all_launchers_report_same_failure(command, script):
    """Without restarts every launcher tells the same first failure."""
    train, port = script(WORK), free_port()
    launchers = [command(*machine(rank, port), train, "kill") for rank in range(2)]
    finished = [launcher.finish() for launcher in launchers]
    assert [entry.code for entry in finished] == [137, 137]
    assert len({entry.err.rpartition("slipstream: ")[2] for entry in finished}) == 1
    assert finished[0].err.rpartition("slipstream: ")[2].startswith("rank 3 of 4")


def test_machine_lost_before_restart_named(command, script):
    """A launcher that ends together with its processes is named by the one that waits for it to start them again."""
    port, train = free_port(), script(WORK)
    options = ["--max_restarts", "3", "--rdzv_conf", "heartbeat=4"]
    launchers = [command(*machine(rank, port), *options, train, "hold") for rank in range(2)]
    launchers[0].pids(4)
    launchers[1].process.kill()
    finished = launchers[0].finish()
    assert finished.code == 1
    assert "starting all processes again: attempt 2 of 4" in finished.err
    assert re.search(r"slipstream: Machine 1 \(host .*\) sent no heartbeat for 4 s", finished.err)


def test_taken_machine_rank_named(command, script):
    """A machine rank that is taken is named."""
    train, port = script(""), free_port()
    launchers = [command(*machine(rank, port, machines=3, processes=3), train) for rank in (0, 1, 1)]
    finished = [launcher.finish() for launcher in launchers]
    assert [entry.code for entry in finished] == [2, 2, 2]
    pids = [launcher.process.pid for launcher in launchers[1:]]
    for entry in finished:
        assert "Two launchers have machine_rank=1" in entry.err
        assert all(f"pid {pid}" in entry.err for pid in pids)


def test_launchers_that_disagree_refused(command, script):
    """Launchers that disagree are refused."""
    train, port = script(""), free_port()
    launchers = [command(*machine(rank, port, processes=2 + 2 * rank), train) for rank in range(2)]
    finished = [launcher.finish() for launcher in launchers]
    assert [entry.code for entry in finished] == [2, 2]
    for entry in finished:
        assert "num_processes=2 on machine 0, num_processes=4 on machine 1" in entry.err


def test_missing_machines_named(launch, script):
    """Machines that never come are named."""
    finished = launch(*machine(0, free_port(), machines=3, processes=3), "--rdzv_conf", "join_timeout=0.5", script(""))
    assert finished.code == 2
    assert "machines 1, 2 did not join within" in finished.err


def test_other_service_at_address(launch, script):
    """Something else that listens at the address is reported."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        finished = launch(*machine(1, str(server.server_port)), "--rdzv_conf", "timeout=1", script(""))
        server.shutdown()
    assert finished.code == 2
    assert "it is not a launcher" in finished.err
    assert len(finished.err.splitlines()) <= 5


def test_torch_rendezvous_backend(command, script):
    """Torch's own rendezvous."""
    train, port = script(WORK), free_port()
    flags = ["--cpu", "--num_machines", "2", "--num_processes", "2", "--rdzv_backend", "c10d", "--rdzv_conf", f"endpoint=127.0.0.1:{port}"]
    launchers = [command(*flags, "--machine_rank", str(rank), train, MASTER_ADDR="x") for rank in range(2)]
    finished = [launcher.finish() for launcher in launchers]
    assert [entry.code for entry in finished] == [0, 0], finished
    assert sorted(entry.out.split(" on ")[0] for entry in finished) == ["rank 0", "rank 1"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := hosts_unavailable():
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


@pytest.fixture
def on_both(hosts: Hosts, command: Callable[..., Running], script: Callable[..., str]) -> Callable[..., list[Running]]:
    """Starts a launcher on each of the two hosts."""
    train = script(WORK)

    def start(*words: str) -> list[Running]:
        flags = [machine(rank, "29511", address=hosts.addresses[0], processes=2) for rank in range(2)]
        return [command(*flags[rank], train, *words, prefix=hosts.prefix(rank)) for rank in range(2)]

    return start


@pytest.mark.netns
def test_two_hosts(hosts, on_both):
    """Two hosts work together."""
    finished = [launcher.finish() for launcher in on_both()]
    assert [entry.code for entry in finished] == [0, 0], finished
    assert [entry.out for entry in finished] == [f"rank {rank} on {hosts.names[rank]}, 2 in all, attempt 0\n" for rank in range(2)]
    assert [entry.err for entry in finished] == ["", ""]


@pytest.mark.netns
def test_collectives_across_hosts(hosts, command, script):
    """The collectives of the library cross hosts."""
    check = script(COLLECTIVES)
    flags = [machine(rank, "29512", address=hosts.addresses[0], processes=2) for rank in range(2)]
    launchers = [command(*flags[rank], check, prefix=hosts.prefix(rank)) for rank in range(2)]
    finished = [launcher.finish() for launcher in launchers]
    assert [entry.out for entry in finished] == [f"rank {rank}: {list(hosts.names)} 10001 True 1\n" for rank in range(2)], finished


@pytest.mark.netns
def test_host_cut_off_named_by_both(request, hosts, on_both):
    """A host that is cut off is named by both sides."""
    launchers = on_both("hold")
    launchers[0].pids()
    hosts.cut(1)
    cut = time.monotonic()
    finished = [launcher.finish() for launcher in launchers]
    assert time.monotonic() - cut < 30 or not request.config.getoption("--soak")
    assert [entry.code for entry in finished] == [1, 1]
    assert f"rank 1 of 2 (host {hosts.names[1]}) was lost." in finished[0].err
    assert f"Machine 1 (host {hosts.names[1]}) sent no heartbeat" in finished[0].err
    assert f"machine 0 ({hosts.names[0]}, {hosts.addresses[0]}, port 29511) can no longer be reached" in finished[1].err
    assert "Traceback" not in finished[0].err + finished[1].err
