"""`slipstream doctor`: machines meet, facts are collected, and the verdict is an exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from click.testing import CliRunner

from slipstream.cli.doctor import MachineInfo, MeetingResult, command, diagnose, host_meeting, join_meeting, listen_for_machines
from slipstream.cli.doctor_checks import collect_facts, port_problem, requirements, resolve_name
from slipstream.config import resolve
from slipstream.errors import ConfigError


def _machine(rank: int, of: int = 2) -> MachineInfo:
    return MachineInfo(machine_rank=rank, host=f"node{rank}", num_machines=of, versions={"torch": "2.13.0"})


def _ahead(seconds: float) -> Callable[[], float]:
    return lambda: time.time() + seconds


def _meet(*others: tuple[MachineInfo, float], of: int, seconds: float = 10.0) -> list[MeetingResult]:
    """Machine 0 and the others, each with a clock that is ahead by so much, in threads of this process."""
    with listen_for_machines(0) as listener, ThreadPoolExecutor() as threads:
        port = listener.getsockname()[1]
        main = threads.submit(host_meeting, listener, _machine(0, of), seconds=seconds)
        rest = [threads.submit(join_meeting, "127.0.0.1", port, machine, seconds=seconds, clock=_ahead(skew)) for machine, skew in others]
        return [main.result(timeout=30), *(entry.result(timeout=30) for entry in rest)]


def test_machines_share_result() -> None:
    """Machines meet and everyone hears the same."""
    main, *others = _meet((_machine(2, 3), 5.0), (_machine(1, 3), -3.0), of=3)
    assert all(other == main for other in others)
    assert [machine.machine_rank for machine in main.machines] == [0, 1, 2]
    assert main.problems == ()
    assert [round(machine.skew) for machine in main.machines] == [0, -3, 5]


def test_duplicate_machine_rank() -> None:
    """Two machines with one rank are both reported."""
    main, entry, other = _meet((_machine(1, 3), 0.0), (replace(_machine(1, 3), host="twin"), 0.0), of=3, seconds=2.0)
    assert any("both have machine_rank 1" in problem for problem in main.problems)
    assert any("machine_rank 2 did not come" in problem for problem in main.problems)
    assert any("both have machine_rank 1" in problem for problem in (*entry.problems, *other.problems))


def test_different_num_machines() -> None:
    """Machines that were told different numbers do not meet."""
    main, other = _meet((_machine(1, 4), 0.0), of=2, seconds=1.0)
    assert any("num_machines=4" in problem for problem in main.problems)
    assert "num_machines=4" in other.problems[0]


def test_missing_machine_named() -> None:
    """A machine that stays away is named."""
    (main,) = _meet(of=2, seconds=0.3)
    assert main.problems == ("machine_rank 1 did not come within 0.3 s",)


def test_stranger_on_port_ignored() -> None:
    """A stranger on the port changes nothing."""
    with listen_for_machines(0) as listener, ThreadPoolExecutor() as threads:
        port = listener.getsockname()[1]
        main = threads.submit(host_meeting, listener, _machine(0), seconds=10.0)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b'{"greeting": "hello"}\n', b"[1]\n"):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(garbage)
        joined = join_meeting("127.0.0.1", port, _machine(1), seconds=10.0)
        assert joined == main.result(timeout=30)
    assert [machine.machine_rank for machine in joined.machines] == [0, 1]
    assert len(joined.problems) == 3


def test_unreachable_with_attempts() -> None:
    """Nobody there is reported with what was tried."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    meeting = join_meeting("127.0.0.1", port, _machine(1), seconds=0.5)
    assert meeting.machines == ()
    assert any(f"127.0.0.1 port {port}: Connection refused" in attempt for attempt in meeting.tried)


def test_other_service_told_apart() -> None:
    """A main process of another kind is told apart."""
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        meeting = join_meeting("127.0.0.1", server.getsockname()[1], _machine(1), seconds=2.0)
        thread.join(timeout=10)
    assert "not as machine 0 of this command does" in meeting.problems[0]


# --- facts -----------------------------------------------------------------------------------------------------------------


def test_port_in_use() -> None:
    """A port in use is seen."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert "in use" in (port_problem(port) or "")
    assert port_problem(port) is None


def test_unresolvable_name_is_fact() -> None:
    """A name that does not resolve is a fact and not an error."""
    addresses, problem = resolve_name("no-such-host.invalid")
    assert addresses == ()
    assert problem


def test_requirements_from_metadata() -> None:
    """Requirements are read from the metadata."""
    found = requirements(["torch>=2.8", "no-such-library >= 1.0", "pytest>=8.0; extra == 'testing'"])
    assert [(need.name, need.wanted) for need in found] == [("torch", "2.8"), ("no-such-library", "1.0")]
    assert found[0].found is not None
    assert found[1].found is None


def test_processes_per_machine() -> None:
    """Processes are counted per machine."""
    config = resolve(flags={"num_processes": 6, "num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": 29500}, environ={})
    assert collect_facts(config, {}).local_processes == 3


@pytest.mark.parametrize(("value", "threads"), [("4", 4), ("4,2", 4), ("", None), ("many", None), ("0", None)])
def test_threads_variable(value: str, threads: int | None) -> None:
    """The threads variable is read."""
    assert collect_facts(resolve(environ={}), {"OMP_NUM_THREADS": value}).threads == threads


# --- the command -----------------------------------------------------------------------------------------------------------


def test_this_machine_is_fit() -> None:
    """Here the machine is ready for a job."""
    result = CliRunner().invoke(command, ["--json", "--cpu", "--num_processes", "1"])
    findings = json.loads(result.output)["findings"]
    assert result.exit_code == 0, findings
    assert {"kernel", "threads", "loopback", "clocks"} <= {finding["name"] for finding in findings}


def test_error_exit_code_one() -> None:
    """An error is exit code one and readable."""
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        result = CliRunner().invoke(command, ["--main_process_port", port])
    assert result.exit_code == 1
    assert port in result.output
    assert "another" in result.output
    assert "1 of" in result.output


def test_no_torch_without_device() -> None:
    """It imports no torch where there is no device."""
    code = (
        "import sys\nfrom slipstream.cli.doctor import command\n"
        "try:\n    command(['--json'])\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_half_set_rank_variables() -> None:
    """Rank variables that are half set are a finding."""
    findings = diagnose(resolve(environ={}), {"RANK": "1"}, seconds=1.0)
    assert findings[0].name == "rank variables"
    assert findings[0].level == "error"


def test_machines_without_meeting_point() -> None:
    """Several machines without a place to meet is a config error."""
    with pytest.raises(ConfigError, match="main_process_ip"):
        diagnose(resolve(flags={"num_machines": 2}, environ={}), {}, seconds=1.0)


def test_two_commands_meet_also_slurm() -> None:
    """Two commands find each other and under Slurm they need no flags."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_LOCALID": "0", "SLURM_NODELIST": "localhost,localhost"}
    slurm |= {"SLURM_JOB_NODELIST": "localhost,localhost", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    slurm |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", "from slipstream.cli.doctor import command; command(['--json', '--wait', '30'])"],
            env={**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in running:
        output, _ = process.communicate(timeout=60)
        found = {finding["name"]: finding for finding in json.loads(output)["findings"]}
        assert found["machines"]["text"].startswith("all 2 met"), found
        assert found["clocks"]["level"] == "ok"
        assert "slurm" in found["rank variables"]["text"]


def test_named_device_counted() -> None:
    """The device that an option names is the one that is looked at; one that does not exist is refused."""
    facts = collect_facts(resolve(flags={"device": "standin"}, environ={}), {"STANDIN_VISIBLE_DEVICES": "0,1"}, with_devices=False)
    assert (facts.device_type, facts.devices, facts.local_processes) == ("standin", 2, 2)
    assert collect_facts(resolve(flags={"device": "cpu"}, environ={}), {}).devices == 0
    with pytest.raises(ConfigError, match="there is no such device family"):
        collect_facts(resolve(flags={"device": "gpu"}, environ={}), {})
