"""Each check says what it found, how bad that is, and what helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import doctor_checks
from slipstream.cli.doctor import MachineInfo, MeetingResult, check_meeting, single_machine_findings
from slipstream.cli.doctor_checks import (
    CHECKS,
    AccelerateInstallation,
    DeviceMemory,
    DoctorFinding,
    Interface,
    MachineFacts,
    Requirement,
    accelerate_installations,
    run_checks,
)
from slipstream.devices.memory import HostMemory

LO = Interface("lo", True, ("127.0.0.1", "::1"))
ETH = Interface("eth0", True, ("10.0.0.1",))
REAL = AccelerateInstallation("1.15.0", "/site", True)
DROP_IN = AccelerateInstallation("1.15.0+slipstream", "/venv", False)
TWO = {
    "num_machines": 2,
    "main_process_ip": "10.0.0.1",
    "main_addresses": ("10.0.0.1",),
    "interfaces": (LO, ETH),
    "host_addresses": ("10.0.0.1",),
    "route_interface": "eth0",
}

BAD: list[tuple[str, str, dict[str, Any], str, str]] = [
    # check, level, facts, part of the finding, part of the remedy
    ("kernel", "warning", {"kernel": "4.18.0-553.el8_10.x86_64"}, "older than 5.5", "5.5 or newer"),
    ("kernel", "note", {"kernel": "mystery"}, "cannot be compared", "5.5"),
    ("kernel", "note", {"system": "Darwin", "kernel": "24.1.0"}, "Darwin", "Linux"),
    ("versions", "error", {"requirements": (Requirement("torch", "2.8", "2.4.1+cu121"),)}, "torch 2.4.1+cu121 is too old", "'torch>=2.8'"),
    ("versions", "error", {"requirements": (Requirement("rich", "13.0", None),)}, "rich is missing", "'rich>=13.0'"),
    ("accelerate", "warning", {"accelerate": (REAL, DROP_IN)}, "finds Hugging Face Accelerate 1.15.0", "pip uninstall accelerate"),
    ("accelerate", "warning", {"accelerate": (DROP_IN,)}, "finds no package", "install it again"),
    ("shared memory", "warning", {"shared_memory": (64 * 2**20, 64 * 2**20), "local_processes": 4}, "4 processes", "--shm-size"),
    ("shared memory", "note", {"shared_memory": None}, "no /dev/shm", "files"),
    ("open files", "warning", {"open_files": (256, 4096)}, "256 files", "ulimit -n 4096"),
    ("open files", "warning", {"open_files": (256, 256)}, "256 files", "limits.conf"),
    ("open files", "note", {"open_files": None}, "no such limit", "nothing"),
    ("temporary folder", "error", {"temporary_problem": "Read-only file system"}, "Read-only", "TMPDIR"),
    ("temporary folder", "warning", {"temporary_free": 2**20}, "1.0 MB", "TMPDIR"),
    ("memory", "warning", {"memory": HostMemory(total=2**34, available=2**28), "local_processes": 2}, "2 processes", "fewer"),
    ("memory limit", "note", {"memory": HostMemory(total=2**36, available=2**33, limit=2**34)}, "16.0 GB", "killed"),
    ("memory limit", "error", {"memory": HostMemory(total=2**36, available=2**28, limit=2**28)}, "too little", "raise"),
    ("devices", "error", {"devices": 2, "device_type": "npu"}, "torch sees none", "--cpu"),
    ("devices", "warning", {"devices": 1, "device_type": "npu", "device_memory": (DeviceMemory("npu:0", 2**20),)}, "npu:0", "--gpu_ids"),
    ("devices", "warning", {"devices": 1, "device_memory": (DeviceMemory("npu:0", None),), "local_processes": 2}, "share", "--cpu"),
    ("threads", "warning", {"cores": 2, "local_processes": 4}, "take turns", "--num_processes 2"),
    ("threads", "warning", {"cores": 8, "local_processes": 4, "threads": 8}, "32 threads", "OMP_NUM_THREADS=2"),
    ("loopback", "error", {"interfaces": (replace(LO, up=False), ETH)}, "is down", "ip link set lo up"),
    ("loopback", "error", {"interfaces": (ETH,)}, "does not exist", "ip link set lo up"),
    ("interface", "error", {**TWO, "route_interface": None}, "no interface leads from here to 10.0.0.1", "GLOO_SOCKET_IFNAME=eth0"),
    ("interface", "error", {**TWO, "route_interface": None, "interfaces": (LO,)}, "no interface", "network"),
    ("interface", "error", {**TWO, "route_interface": "lo"}, "never leaves this machine", "GLOO_SOCKET_IFNAME=eth0"),
    ("interface", "error", {"chosen_interface": "eth9", "interfaces": (LO, ETH)}, "eth9", "lo, eth0"),
    ("interface", "error", {"chosen_interface": "eth0", "interfaces": (LO, replace(ETH, up=False))}, "is down", "ip link set eth0 up"),
    ("host name", "warning", {"host_addresses": (), "hostname": "vm", "host_problem": "Name not known"}, "not known", "/etc/hosts"),
    ("host name", "warning", {**TWO, "host_addresses": ("127.0.1.1",), "hostname": "node7"}, "node7", "GLOO_SOCKET_IFNAME"),
    ("ports", "error", {"main_process_port": 29500, "port_problem": "Address already in use"}, "29500", "another --main_process_port"),
    ("ports", "warning", {"port_range": (60000, 60100)}, "60000 to 60100", "ip_local_port_range"),
    ("ports", "note", {**TWO, "main_process_port": 40000, "port_range": (32768, 60999)}, "40000", "below 32768"),
    ("main process", "error", {**TWO, "main_addresses": (), "main_problem": "Name or service not known"}, "does not resolve", "address"),
    ("main process", "error", {**TWO, "main_process_ip": "node0", "main_addresses": ("127.0.0.1",)}, "for itself", "machine 0"),
    ("main process", "warning", {**TWO, "main_addresses": ("10.9.9.9",)}, "not an address of this machine", "--machine_rank"),
]  # fmt: skip

GOOD: list[tuple[str, dict[str, Any], str]] = [
    ("kernel", {"kernel": "5.5.0"}, "Linux"),
    ("kernel", {"kernel": "6.18.44-fc-v445"}, "Linux"),
    ("versions", {"requirements": (Requirement("torch", "2.8", "2.13.0+cpu"),)}, "torch 2.13.0+cpu"),
    ("accelerate", {}, "the import name is free"),
    ("accelerate", {"accelerate": (REAL,)}, "finds Hugging Face Accelerate 1.15.0 in /site"),
    ("accelerate", {"accelerate": (replace(DROP_IN, answers=True),)}, "finds the drop-in 1.15.0+slipstream in /venv"),
    ("shared memory", {"shared_memory": (2**33, 2**33)}, "8.0 GB"),
    ("open files", {"open_files": (2**62, 2**62)}, "no limit"),
    ("devices", {"devices": 2, "device_memory": (DeviceMemory("npu:0", 2**34), DeviceMemory("npu:1", None))}, "unknown"),
    ("devices", {}, "cpu"),
    ("threads", {"cores": 8, "local_processes": 4}, "each gets 2"),
    ("threads", {"cores": 8, "local_processes": 4, "threads": 2}, "2 threads each"),
    ("interface", TWO, "eth0 (10.0.0.1)"),
    ("interface", {}, "loopback"),
    ("interface", {"chosen_interface": "eth0", "interfaces": (LO, ETH)}, "GLOO_SOCKET_IFNAME"),
    ("ports", {"main_process_port": 29500}, "free"),
    ("ports", {**TWO, "machine_rank": 1, "main_process_port": 29500}, "machine 0"),
    ("host name", {**TWO, "host_addresses": ("127.0.1.1",), "chosen_interface": "eth0"}, "127.0.1.1"),
    ("main process", TWO, "10.0.0.1"),
    ("main process", {**TWO, "machine_rank": 1, "main_addresses": ("10.0.0.9",)}, "10.0.0.9"),
    ("memory limit", {"memory": HostMemory(total=2**34, available=2**33, limit=2**40)}, "no control group"),
]


def _finding(name: str, facts: dict[str, Any]) -> DoctorFinding:
    return next(finding for finding in run_checks(MachineFacts(**facts)) if finding.name == name)


@pytest.mark.parametrize(("name", "level", "facts", "said", "remedy"), BAD)
def test_problem_has_remedy(name: str, level: str, facts: dict[str, Any], said: str, remedy: str) -> None:
    """What is wrong is said with a remedy."""
    finding = _finding(name, facts)
    assert finding.level == level
    assert said in finding.text
    assert remedy in finding.remedy


@pytest.mark.parametrize(("name", "facts", "said"), GOOD)
def test_fine_is_ok(name: str, facts: dict[str, Any], said: str) -> None:
    """What is fine is said to be."""
    finding = _finding(name, facts)
    assert finding.level == "ok"
    assert said in finding.text


def test_every_check_has_bad_case() -> None:
    """Every check is run and has a bad case here."""
    assert {finding.name for finding in run_checks(MachineFacts())} == {case[0] for case in BAD}
    assert len(CHECKS) == len([name for name in vars(doctor_checks) if name.startswith("_check_")])


def _install(folder: Path, version: str, *, package: bool = True) -> str:
    (folder / f"accelerate-{version}.dist-info").mkdir(parents=True)
    (folder / f"accelerate-{version}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: accelerate\nVersion: {version}\n")
    if package:
        (folder / "accelerate").mkdir()
        (folder / "accelerate" / "__init__.py").touch()
    return str(folder)


def test_who_answers_to_the_name_accelerate(tmp_path: Path) -> None:
    """Both are found by their metadata, and the one that the path finds first is the one that is imported."""
    real, ours = _install(tmp_path / "real", "1.15.0"), _install(tmp_path / "ours", "1.15.0+slipstream")
    assert [(entry.version, entry.answers) for entry in accelerate_installations([ours, real])] == [
        ("1.15.0+slipstream", True),
        ("1.15.0", False),
    ]
    assert [entry.answers for entry in accelerate_installations([real, ours])] == [True, False]
    assert accelerate_installations([str(tmp_path)]) == ()


def test_editable_drop_in(tmp_path: Path) -> None:
    """The metadata of an editable installation lies elsewhere than its package."""
    site, source = _install(tmp_path / "site", "1.15.0+slipstream", package=False), tmp_path / "src"
    (source / "accelerate").mkdir(parents=True)
    (source / "accelerate" / "__init__.py").touch()
    (found,) = accelerate_installations([site, str(source)])
    assert found.answers
    assert found.is_drop_in


# --- several machines ------------------------------------------------------------------------------------------------------


def _machine(rank: int, skew: float = 0.0, torch: str = "2.13.0", round_trip: float = 0.001) -> MachineInfo:
    return MachineInfo(machine_rank=rank, host=f"node{rank}", num_machines=2, versions={"torch": torch}, skew=skew, round_trip=round_trip)


def test_one_machine_not_applicable() -> None:
    """On one machine the questions do not apply."""
    assert all(finding.level == "ok" and "not applicable" in finding.text for finding in single_machine_findings())


@pytest.mark.parametrize(
    ("skew", "level"), [(0.02, "ok"), (-0.9, "ok"), (3.0, "warning"), (-3.0, "warning"), (20.0, "error"), (-3600.0, "error")]
)
def test_clocks_apart(skew: float, level: str) -> None:
    """Clocks that are apart."""
    finding = next(entry for entry in check_meeting(MeetingResult(machines=(_machine(0), _machine(1, skew)))) if entry.name == "clocks")
    assert finding.level == level
    assert level == "ok" or "chronyd" in finding.remedy


def test_farthest_clocks_named() -> None:
    """The two clocks farthest apart are named."""
    machines = (_machine(0), _machine(1, skew=-2.0), _machine(2, skew=2.0))
    finding = next(machine for machine in check_meeting(MeetingResult(machines=machines)) if machine.name == "clocks")
    assert "machine 2 (node2) is ahead of machine 1 (node1)" in finding.text
    assert finding.text.startswith("4.000 s")


def test_slow_network_not_clocks() -> None:
    """A slow network is not blamed on the clocks."""
    finding = next(
        entry
        for entry in check_meeting(MeetingResult(machines=(_machine(0), _machine(1, skew=1.2, round_trip=1.0))))
        if entry.name == "clocks"
    )
    assert finding.level == "ok"


def test_different_versions_named() -> None:
    """Different versions are an error that names the machines."""
    findings = list(check_meeting(MeetingResult(machines=(_machine(0), _machine(1, torch="2.12.0")))))
    finding = next(finding for finding in findings if finding.name == "same versions")
    assert finding.level == "error"
    assert "machine 0: 2.13.0, machine 1: 2.12.0" in finding.text


def test_unreachable_main_process() -> None:
    """A main process that cannot be reached is reported with what was tried."""
    (finding,) = check_meeting(
        MeetingResult(problems=("machine 0 could not be reached within 5 s",), tried=("10.0.0.1 port 29500: Connection refused (9 times)",))
    )
    assert finding.level == "error"
    assert "tried: 10.0.0.1 port 29500: Connection refused (9 times)" in finding.text
    assert "firewall" in finding.remedy
