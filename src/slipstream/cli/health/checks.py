"""Judgements of facts: each check looks at one thing and says what it found, how bad that is and what helps.

Every check is a pure function from `Facts` to a `Finding`, so each can be tested with facts that no machine has at once.
`CHECKS` is the order in which they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from slipstream.cli.health.facts import Facts, Interface
from slipstream.devices.memory import convert_bytes
from slipstream.devices.packages import compare_versions, parse_version
from slipstream.errors import ConfigError

__all__ = ["CHECKS", "Finding", "Level", "judge"]

Level = Literal["ok", "note", "warning", "error"]

_GIB: Final = 2**30
_OLDEST_KERNEL: Final = "5.5"
_FILES_PER_PROCESS: Final = 1024
_SHARED_PER_PROCESS: Final = 64 * 2**20
_MEMORY_PER_PROCESS: Final = _GIB // 2
"""About what a process with torch imported and a small model takes."""


@dataclass(frozen=True)
class Finding:
    """What one check found. A remedy goes with everything that is not fine."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def judge(facts: Facts) -> Iterator[Finding]:
    """The findings of every check, in the order of `CHECKS`."""
    return (check(facts) for check in CHECKS)


def _check_kernel(facts: Facts) -> Finding:
    if facts.system != "Linux":
        return Finding("kernel", "note", f"{facts.system} {facts.kernel}", "Slipstream is tested on Linux; please report what differs here")
    numbers = "".join(facts.kernel.partition("-")[0].partition("+")[0])
    try:
        old = compare_versions(numbers, "<", _OLDEST_KERNEL)
    except ConfigError:
        return Finding("kernel", "note", f"version {facts.kernel} cannot be compared", f"make sure that it is {_OLDEST_KERNEL} or newer")
    if old:
        return Finding(
            "kernel",
            "warning",
            f"Linux {facts.kernel} is older than {_OLDEST_KERNEL}, where processes of one job are known to hang",
            f"run on a host with Linux {_OLDEST_KERNEL} or newer",
        )
    return Finding("kernel", "ok", f"Linux {facts.kernel}")


def _check_versions(facts: Facts) -> Finding:
    missing = [need for need in facts.requirements if need.found is None]
    old = [need for need in facts.requirements if need.found is not None and parse_version(need.found) < parse_version(need.wanted)]
    if missing or old:
        text = ", ".join([*(f"{need.name} is missing" for need in missing), *(f"{need.name} {need.found} is too old" for need in old)])
        install = " ".join(f"'{need.name}>={need.wanted}'" for need in (*missing, *old))
        return Finding("versions", "error", text, f"pip install {install}")
    shown = ", ".join(f"{need.name} {need.found}" for need in facts.requirements if need.name in ("torch", "numpy"))
    return Finding("versions", "ok", f"Python {facts.python}" + (f", {shown}" if shown else ""))


def _check_shared_memory(facts: Facts) -> Finding:
    if facts.shared_memory is None:
        return Finding("shared memory", "note", "this system has no /dev/shm", "loader workers will pass batches through files")
    free, total = facts.shared_memory
    text = f"/dev/shm has {convert_bytes(free)} free of {convert_bytes(total)}"
    needed = _SHARED_PER_PROCESS * facts.local_processes
    if free < needed:
        return Finding(
            "shared memory",
            "warning",
            f"{text}; loader workers of {_processes(facts)} may run out of it (bus error)",
            "start the container with --shm-size=8g or --ipc=host, or mount -o remount,size=8G /dev/shm, or use num_workers=0",
        )
    return Finding("shared memory", "ok", text)


def _check_open_files(facts: Facts) -> Finding:
    if facts.open_files is None:
        return Finding("open files", "note", "this system has no such limit", "nothing to do")
    soft, hard = facts.open_files
    if soft < _FILES_PER_PROCESS:
        able = f"ulimit -n {min(hard, 65536)}" if hard > soft else "raise nofile in /etc/security/limits.conf or the job's settings"
        return Finding(
            "open files",
            "warning",
            f"a process may open {soft} files; connections, shards and loader workers together can need {_FILES_PER_PROCESS}",
            able,
        )
    return Finding("open files", "ok", "no limit per process" if soft >= 2**62 else f"{soft} per process")


def _check_ports(facts: Facts) -> Finding:
    if facts.port_problem is not None:
        return Finding(
            "ports",
            "error",
            f"port {facts.main_process_port} cannot be listened on here: {facts.port_problem}",
            "choose another --main_process_port, or end what uses it (see: ss -ltnp); on one machine leave the option out",
        )
    if facts.main_process_port and facts.machine_rank > 0:
        return Finding("ports", "ok", f"{facts.main_process_port} is taken on machine 0, not here")
    if facts.port_range is None:
        return Finding("ports", "ok", "main_process_port is free" if facts.main_process_port else "a free one is taken when needed")
    first, last = facts.port_range
    if last - first < 1024:
        return Finding(
            "ports",
            "warning",
            f"the kernel hands out ports {first} to {last} only, and every pair of processes needs some",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        )
    if facts.main_process_port and facts.num_machines > 1 and first <= facts.main_process_port <= last:
        return Finding(
            "ports",
            "note",
            f"{facts.main_process_port} is free now, but the kernel may give it away: it hands out {first} to {last}",
            f"choose one below {first}",
        )
    free = f"{facts.main_process_port} is free" if facts.main_process_port else f"{first} to {last}; a free one is taken"
    return Finding("ports", "ok", free)


def _check_loopback(facts: Facts) -> Finding:
    loopback = next((interface for interface in facts.interfaces if interface.loopback), None)
    if loopback is None or not loopback.up:
        state = "is down" if loopback else "has no address or does not exist"
        return Finding("loopback", "error", f"the loopback interface {state}; processes of one machine meet there", "ip link set lo up")
    return Finding("loopback", "ok", f"{loopback.name} is up")


def _check_interface(facts: Facts) -> Finding:
    """Which interface gloo takes: the one it is told; the launcher tells it the one that leads to the main process."""
    if facts.chosen_interface is not None:
        return _chosen(facts, facts.chosen_interface)
    if facts.num_machines == 1:
        return Finding("interface", "ok", "the loopback interface; one machine needs no other")
    found = next((one for one in facts.interfaces if one.name == facts.route_interface), None)
    others = [one.name for one in facts.interfaces if one.up and one.addresses and not one.loopback]
    remedy = f"export GLOO_SOCKET_IFNAME={others[0]} on this machine" if others else "connect this machine to the network of the others"
    if found is None:
        return Finding("interface", "error", f"no interface leads from here to {facts.main_process_ip}", remedy)
    if found.loopback:
        return Finding("interface", "error", f"{facts.main_process_ip} leads to {found.name}, which never leaves this machine", remedy)
    return Finding("interface", "ok", f"gloo is given {found.name} ({found.addresses[0]}), which leads to {facts.main_process_ip}")


def _chosen(facts: Facts, name: str) -> Finding:
    wanted: list[Interface | None] = [next((one for one in facts.interfaces if one.name == part), None) for part in name.split(",")]
    if any(one is None for one in wanted):
        known = ", ".join(one.name for one in facts.interfaces)
        return Finding("interface", "error", f"GLOO_SOCKET_IFNAME={name} names an interface that is not here", f"write one of: {known}")
    if not all(one.up for one in wanted if one):
        return Finding("interface", "error", f"GLOO_SOCKET_IFNAME={name}, and that interface is down", f"ip link set {name} up")
    return Finding("interface", "ok", f"gloo takes {name}, from GLOO_SOCKET_IFNAME")


def _check_hostname(facts: Facts) -> Finding:
    level: Level = "ok" if facts.num_machines == 1 else "warning"
    if not facts.host_addresses:
        return Finding(
            "host name",
            "warning",
            f"{facts.hostname} does not resolve: {facts.host_problem or 'no address'}",
            f"add a line to /etc/hosts, such as: 127.0.1.1 {facts.hostname}",
        )
    shown = f"{facts.hostname} is {', '.join(facts.host_addresses[:3])}"
    if level == "ok" or facts.chosen_interface or not all(map(_is_loopback, facts.host_addresses)):
        return Finding("host name", "ok", shown)
    return Finding(
        "host name",
        level,
        f"{shown}, and gloo goes by it in processes that `slipstream launch` did not start",
        "start them with `slipstream launch`, or export GLOO_SOCKET_IFNAME, or correct /etc/hosts",
    )


def _check_main_process(facts: Facts) -> Finding:
    if facts.num_machines == 1 or facts.main_process_ip is None:
        return Finding("main process", "ok", "not applicable: one machine")
    if not facts.main_addresses:
        return Finding(
            "main process",
            "error",
            f"main_process_ip {facts.main_process_ip} does not resolve here: {facts.main_problem or 'no address'}",
            "give an address instead of a name, or add the name to /etc/hosts on every machine",
        )
    own = {address for interface in facts.interfaces for address in interface.addresses}
    shown = f"{facts.main_process_ip} is {', '.join(facts.main_addresses)}"
    if all(map(_is_loopback, facts.main_addresses)):
        return Finding(
            "main process", "error", f"{shown}, which every machine takes for itself", "give the address of machine 0 in the common network"
        )
    if facts.machine_rank == 0 and not own & set(facts.main_addresses):
        return Finding(
            "main process",
            "warning",
            f"{shown}, which is no address of this machine, although its machine_rank is 0",
            "give an address of machine 0, or start this machine with another --machine_rank",
        )
    return Finding("main process", "ok", shown)


def _check_threads(facts: Facts) -> Finding:
    text = f"{_processes(facts)} on {facts.cores} cores"
    if facts.local_processes > facts.cores:
        return Finding("threads", "warning", f"{text}: they take turns", f"--num_processes {facts.cores} would be as fast")
    if facts.threads is None:
        return Finding("threads", "ok", f"{text}; each gets {max(1, facts.cores // facts.local_processes)} threads")
    if facts.threads * facts.local_processes > facts.cores:
        fitting = max(1, facts.cores // facts.local_processes)
        return Finding(
            "threads",
            "warning",
            f"{text} with {facts.threads} threads each: {facts.threads * facts.local_processes} threads want them",
            f"--num_cpu_threads_per_process {fitting} (or OMP_NUM_THREADS={fitting})",
        )
    return Finding("threads", "ok", f"{text} with {facts.threads} threads each")


def _check_memory(facts: Facts) -> Finding:
    text = f"{convert_bytes(facts.memory.available)} available of {convert_bytes(facts.memory.total)}"
    needed = _MEMORY_PER_PROCESS * facts.local_processes
    if facts.memory.available < needed:
        return Finding(
            "memory",
            "warning",
            f"{text}; {_processes(facts)} need about {convert_bytes(needed)} before any model is loaded",
            "start fewer processes, end other programs, or raise the memory of the job",
        )
    return Finding("memory", "ok", text)


def _check_memory_limit(facts: Facts) -> Finding:
    limit = facts.memory.limit
    if limit is None or limit >= facts.memory.total:
        return Finding("memory limit", "ok", "no control group sets one below the memory of the machine")
    text = f"a control group allows {convert_bytes(limit)} of the machine's {convert_bytes(facts.memory.total)}"
    if limit < _MEMORY_PER_PROCESS * facts.local_processes:
        return Finding("memory limit", "error", f"{text}: too little for {_processes(facts)}", "raise the memory of the job")
    return Finding("memory limit", "note", text, "processes beyond it are killed without a word; ask for more if the model needs it")


def _check_devices(facts: Facts) -> Finding:
    if not facts.devices:
        return Finding("devices", "ok", f"no accelerator is used; processes compute on {facts.device_type}")
    text = f"{facts.devices} x {facts.device_type}"
    if not facts.device_memory:
        return Finding(
            "devices",
            "error",
            f"{text} by their device files, but torch sees none",
            "install a build of torch for them, check the driver, or use --cpu",
        )
    full = [device for device in facts.device_memory if device.free is not None and device.free < _GIB]
    if full:
        shown = ", ".join(f"{device.name} ({convert_bytes(device.free or 0)})" for device in full)
        return Finding("devices", "warning", f"{text}; little memory is free on {shown}", "end what uses them, or choose others: --gpu_ids")
    if facts.local_processes > len(facts.device_memory):
        return Finding(
            "devices",
            "warning",
            f"{text} that torch can use, for {_processes(facts)}: several would share one",
            f"--num_processes {len(facts.device_memory) * facts.num_machines}, or --cpu",
        )
    free = ", ".join("unknown" if one.free is None else convert_bytes(one.free) for one in facts.device_memory)
    return Finding("devices", "ok", f"{text}; free: {free}")


def _check_temporary(facts: Facts) -> Finding:
    if facts.temporary_problem is not None:
        return Finding(
            "temporary folder", "error", f"{facts.temporary} cannot be written to: {facts.temporary_problem}", "set TMPDIR to one that can"
        )
    if facts.temporary_free < 100 * 2**20:
        return Finding(
            "temporary folder", "warning", f"{facts.temporary} has {convert_bytes(facts.temporary_free)} left", "free some, or set TMPDIR"
        )
    return Finding("temporary folder", "ok", f"{facts.temporary}, {convert_bytes(facts.temporary_free)} free")


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _processes(facts: Facts) -> str:
    return "1 process" if facts.local_processes == 1 else f"{facts.local_processes} processes"


CHECKS: Final[tuple[Callable[[Facts], Finding], ...]] = (
    _check_kernel,
    _check_versions,
    _check_shared_memory,
    _check_open_files,
    _check_temporary,
    _check_memory,
    _check_memory_limit,
    _check_devices,
    _check_threads,
    _check_loopback,
    _check_interface,
    _check_hostname,
    _check_ports,
    _check_main_process,
)
