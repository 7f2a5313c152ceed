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


def test_machines_meet_and_everyone_hears_the_same() -> None:
    main, *others = _meet((_machine(2, 3), 5.0), (_machine(1, 3), -3.0), of=3)
    assert all(other == main for other in others)
    assert [machine.machine_rank for machine in main.machines] == [0, 1, 2]
    assert main.problems == ()
    assert [round(machine.skew) for machine in main.machines] == [0, -3, 5]


def test_two_machines_with_one_rank_are_both_told() -> None:
    main, entry, other = _meet((_machine(1, 3), 0.0), (replace(_machine(1, 3), host="twin"), 0.0), of=3, seconds=2.0)
    assert any("both have machine_rank 1" in problem for problem in main.problems)
    assert any("machine_rank 2 did not come" in problem for problem in main.problems)
    assert any("both have machine_rank 1" in problem for problem in (*entry.problems, *other.problems))


def test_machines_that_were_told_different_numbers_do_not_meet() -> None:
    main, other = _meet((_machine(1, 4), 0.0), of=2, seconds=1.0)
    assert any("num_machines=4" in problem for problem in main.problems)
    assert "num_machines=4" in other.problems[0]


def test_a_machine_that_stays_away_is_named() -> None:
    (main,) = _meet(of=2, seconds=0.3)
    assert main.problems == ("machine_rank 1 did not come within 0.3 s",)


def test_a_stranger_on_the_port_changes_nothing() -> None:
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


def test_nobody_there_is_reported_with_what_was_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    meeting = join_meeting("127.0.0.1", port, _machine(1), seconds=0.5)
    assert meeting.machines == ()
    assert any(f"127.0.0.1 port {port}: Connection refused" in attempt for attempt in meeting.tried)


def test_a_main_process_of_another_kind_is_told_apart() -> None:
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


def test_a_port_in_use_is_seen() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert "in use" in (port_problem(port) or "")
    assert port_problem(port) is None


def test_a_name_that_does_not_resolve_is_a_fact_and_not_an_error() -> None:
    addresses, problem = resolve_name("no-such-host.invalid")
    assert addresses == ()
    assert problem


def test_requirements_are_read_from_the_metadata() -> None:
    found = requirements(["torch>=2.8", "no-such-library >= 1.0", "pytest>=8.0; extra == 'testing'"])
    assert [(need.name, need.wanted) for need in found] == [("torch", "2.8"), ("no-such-library", "1.0")]
    assert found[0].found is not None
    assert found[1].found is None


def test_processes_are_counted_per_machine() -> None:
    config = resolve(flags={"num_processes": 6, "num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": 29500}, environ={})
    assert collect_facts(config, {}).local_processes == 3


@pytest.mark.parametrize(("value", "threads"), [("4", 4), ("4,2", 4), ("", None), ("many", None), ("0", None)])
def test_the_threads_variable_is_read(value: str, threads: int | None) -> None:
    assert collect_facts(resolve(environ={}), {"OMP_NUM_THREADS": value}).threads == threads


# --- the command -----------------------------------------------------------------------------------------------------------


def test_here_the_machine_is_fit_for_a_job() -> None:
    result = CliRunner().invoke(command, ["--json", "--cpu", "--num_processes", "1"])
    findings = json.loads(result.output)["findings"]
    assert result.exit_code == 0, findings
    assert {"kernel", "threads", "loopback", "clocks"} <= {finding["name"] for finding in findings}


def test_an_error_is_exit_code_one_and_readable() -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        result = CliRunner().invoke(command, ["--main_process_port", port])
    assert result.exit_code == 1
    assert port in result.output
    assert "another" in result.output
    assert "1 of" in result.output


def test_it_imports_no_torch_where_there_is_no_device() -> None:
    code = (
        "import sys\nfrom slipstream.cli.doctor import command\n"
        "try:\n    command(['--json'])\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_rank_variables_that_are_half_set_are_a_finding() -> None:
    findings = diagnose(resolve(environ={}), {"RANK": "1"}, seconds=1.0)
    assert findings[0].name == "rank variables"
    assert findings[0].level == "error"


def test_several_machines_without_a_place_to_meet_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="main_process_ip"):
        diagnose(resolve(flags={"num_machines": 2}, environ={}), {}, seconds=1.0)


def test_two_commands_find_each_other_and_under_slurm_they_need_no_flags() -> None:
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
