"""The smaller parts: output files, the store's socket, Slurm, settings of the rendezvous."""

from __future__ import annotations

import os
import socket
import stat

import pytest
from hypothesis import given, strategies as st

from slipstream.config import resolve
from slipstream.errors import ConfigError
from slipstream.launch.output import LogFolder, Tee, parse_tee
from slipstream.launch.plan import MachineSpec, Target, make_plan
from slipstream.launch.rendezvous import RendezvousTimeouts
from slipstream.launch.slurm import fill_from_slurm, first_host
from slipstream.launch.store import StoreAddress, connect_store, interface_towards, open_listener, silence_stderr


def test_tee_names_existing_ranks():
    """Tee by rank names only ranks that exist."""
    assert parse_tee("0:1,1:2", 3) == {0: 1, 1: 2, 2: 0}
    with pytest.raises(ConfigError, match="local rank 3"):
        parse_tee("3:1", 3)


def test_log_folder_private_and_temporary(tmp_path):
    """Files are for the user alone and temporary ones go again."""
    kept, temporary = LogFolder(str(tmp_path / "logs"), "run", {0: 3}), LogFolder(None, "run", {})
    for folder in (kept, temporary):
        files = folder.worker_files(0, 5, 0)
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert (files.stdout is None) == (files.stderr is None) == (folder is temporary)
        folder.remove()
    assert kept.path.exists()
    assert not temporary.path.exists()


def test_log_folder_not_writable(tmp_path):
    """A folder for logs that cannot be made is refused."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        LogFolder(str(tmp_path / "file"), "run", {})


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_tee_copies_whole_lines(tmp_path_factory, chunks):
    """Tee copies every byte in whole lines."""
    folder = tmp_path_factory.mktemp("tee")
    source, terminal = folder / "source", folder / "terminal"
    source.touch()
    tee = Tee()
    destination = os.open(terminal, os.O_WRONLY | os.O_CREAT)
    tee.follow(source, "", destination)
    with open(source, "ab", buffering=0) as file:
        for chunk in chunks:
            file.write(chunk)
            tee.pump()
            assert terminal.read_bytes() in (b"".join(chunks)[: len(terminal.read_bytes())], b"")
            assert terminal.read_bytes()[-1:] in (b"\n", b"")
    tee.finish()
    os.close(destination)
    everything = b"".join(chunks)
    assert terminal.read_bytes() == everything + (b"" if everything.endswith(b"\n") or not everything else b"\n")


def test_tee_prefixes_rank(tmp_path, capfd):
    """Tee puts the rank before every line."""
    (tmp_path / "log").write_bytes(b"one\ntwo\nthree")
    tee = Tee()
    tee.follow(tmp_path / "log", "[default1]:", 1)
    tee.finish()
    assert capfd.readouterr().out == "[default1]:one\n[default1]:two\n[default1]:three\n"


def test_free_ports_on_loopback():
    """Free ports differ and are on the loopback interface."""
    found = [open_listener("127.0.0.1", None) for _ in range(20)]
    assert len({place.port for _, place in found}) == 20
    assert {listener.getsockname()[0] for listener, _ in found} == {"127.0.0.1"}
    for listener, _ in found:
        listener.close()


def test_port_in_use_named():
    """A port in use is refused by its number."""
    listener, place = open_listener("127.0.0.1", None)
    with listener, pytest.raises(ConfigError, match=rf"Port {place.port} on 127.0.0.1 \(main_process_port\) is already in use"):
        open_listener("127.0.0.1", place.port, "main_process_port")


def unreachable(host: str, port: int) -> str:
    with pytest.raises(ConfigError) as refused:
        connect_store(StoreAddress(host, port), patience=0.3, limit=5, check=lambda: None)
    return str(refused.value)


def test_unreachable_machine_error():
    """A machine that cannot be reached is reported with what was tried."""
    listener, place = open_listener("127.0.0.1", None)
    listener.close()
    message = unreachable("127.0.0.1", place.port)
    assert f"127.0.0.1, port {place.port}" in message
    assert "connection refused" in message
    assert "no address" in unreachable("no-such-host.invalid", 1)


def test_wait_for_listener_interrupted():
    """Waiting for a machine can be broken off."""
    class Enough(Exception):
        pass

    def check():
        raise Enough

    with pytest.raises(Enough):
        connect_store(StoreAddress("127.0.0.1", 1), patience=60, limit=5, check=check)


def test_silence_stderr_hides_only_libraries(capfd):
    """Quietly hides what libraries print and only that."""
    os.write(2, b"before ")
    with silence_stderr():
        os.write(2, b"hidden ")
    os.write(2, b"after")
    assert capfd.readouterr().err == "before after"


def test_interface_towards_address():
    """The interface that leads to an address."""
    assert interface_towards("127.0.0.1") == ("lo" if os.uname().sysname == "Linux" else "lo0")
    assert interface_towards("no-such-host.invalid") is None


def test_loopback_name_binds_all_interfaces(monkeypatch):
    """A name that only means this machine is bound on every interface."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))])
    listener, _ = open_listener("this-host", None)
    with listener:
        assert listener.getsockname()[0] == "0.0.0.0"


STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_slurm_one_launcher_per_node():
    """Srun with one launcher per node needs no flags."""
    launch = fill_from_slurm(resolve(environ={}), STEP).launch
    assert (launch.num_machines, launch.machine_rank, launch.main_process_ip) == (2, 1, "gpu07")
    assert launch.main_process_port == fill_from_slurm(resolve(environ={}), {**STEP, "SLURM_NODEID": "0"}).launch.main_process_port


@pytest.mark.parametrize(
    "change",
    [{"SLURM_STEP_NUM_TASKS": "8"}, {"SLURM_STEP_ID": ""}, {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}],
    ids=["a task per process", "not under srun", "one node"],
)
def test_slurm_other_jobs_unchanged(change):
    """Other Slurm jobs are left alone."""
    assert fill_from_slurm(resolve(environ={}), {**STEP, **change}).launch.num_machines == 1


def test_slurm_keeps_user_options():
    """Slurm never overrides the user."""
    config = resolve(flags={"num_machines": 1}, environ={})
    assert fill_from_slurm(config, STEP) is config
    assert fill_from_slurm(resolve(flags={"main_process_port": 5}, environ={}), STEP).launch.main_process_port == 5


@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True), min_size=1, max_size=4))
def test_slurm_first_plain_host(names):
    """The first of plain names."""
    assert first_host(",".join(names)) == names[0]


def settings(text: str) -> RendezvousTimeouts:
    config = resolve(flags={"cpu": True, "num_processes": 2, "rdzv_conf": text}, environ={})
    return RendezvousTimeouts.read(make_plan(config, Target("script", __file__), {}, MachineSpec()))


def test_rendezvous_settings_checked():
    """Settings of the rendezvous are checked."""
    assert settings("timeout=3,join_timeout=4") == RendezvousTimeouts(timeout=3, join_timeout=4)
    with pytest.raises(ConfigError, match="does not know"):
        settings("time_out=3")
    with pytest.raises(ConfigError, match="not a number of seconds"):
        settings("timeout=soon")
