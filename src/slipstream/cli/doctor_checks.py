"""The checks of `slipstream doctor` on one machine.

`collect_facts` gathers what is true of this machine into a plain `MachineFacts` record. Each check in `CHECKS` is a pure function that
looks at one fact and returns what it found, how severe it is, and the remedy. Collecting changes nothing and imports torch only to ask
for device memory.
"""

from __future__ import annotations

import platform
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from slipstream.config import Config
from slipstream.devices.count import count_without_torch
from slipstream.devices.memory import HostMemory, available_cores, convert_bytes, host_memory
from slipstream.devices.packages import compare_versions, parse_version, version_of
from slipstream.devices.table import CPU
from slipstream.errors import ConfigError
from slipstream.launch.store import interface_towards, is_loopback

__all__ = [
    "CHECKS", "AccelerateInstallation", "DeviceMemory", "DoctorFinding", "FindingLevel", "Interface", "MachineFacts", "Requirement",
    "accelerate_installations", "collect_facts", "port_problem", "requirements", "resolve_name", "run_checks",
]


_NAME_SERVICE_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    addresses: tuple[str, ...]

    @property
    def loopback(self) -> bool:
        return any(map(is_loopback, self.addresses))


@dataclass(frozen=True)
class Requirement:
    """A library that Slipstream needs: the minimum version, and the version found."""

    name: str
    wanted: str
    found: str | None


@dataclass(frozen=True)
class AccelerateInstallation:
    """An installed distribution named accelerate: Hugging Face's, or the drop-in, which says so in its version."""

    version: str
    folder: str
    answers: bool
    """Whether `import accelerate` finds this one."""

    @property
    def is_drop_in(self) -> bool:
        return self.version.endswith("+slipstream")


@dataclass(frozen=True)
class DeviceMemory:
    """Free bytes of one device; None if unknown."""

    name: str
    free: int | None


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What the checks look at. Every field has a harmless default, so a test sets only what it needs."""

    system: str = "Linux"
    kernel: str = "6.1.0"
    python: str = "3.11.0"
    requirements: tuple[Requirement, ...] = ()
    accelerate: tuple[AccelerateInstallation, ...] = ()
    shared_memory: tuple[int, int] | None = None
    """Free and total bytes of /dev/shm; None if it does not exist."""
    open_files: tuple[int, int] | None = None
    """Soft and hard limit."""
    port_range: tuple[int, int] | None = None
    """The ephemeral ports of the kernel."""
    main_process_port: int | None = None
    port_problem: str | None = None
    """Why this machine cannot listen on main_process_port; None if it can or need not."""
    interfaces: tuple[Interface, ...] = (Interface("lo", True, ("127.0.0.1",)),)
    chosen_interface: str | None = None
    """GLOO_SOCKET_IFNAME."""
    route_interface: str | None = None
    """The interface towards the main process; `slipstream launch` gives it to gloo."""
    hostname: str = "localhost"
    host_addresses: tuple[str, ...] = ("127.0.0.1",)
    """What the host name resolves to; empty if it does not."""
    host_problem: str | None = None
    main_process_ip: str | None = None
    main_addresses: tuple[str, ...] = ()
    main_problem: str | None = None
    num_machines: int = 1
    machine_rank: int = 0
    local_processes: int = 1
    cores: int = 8
    threads: int | None = None
    """OMP_NUM_THREADS, or the option for it."""
    memory: HostMemory = field(default_factory=lambda: HostMemory(total=2**36, available=2**35))
    device_type: str = CPU.type
    devices: int = 0
    device_memory: tuple[DeviceMemory, ...] = ()
    temporary: str = "/tmp"
    temporary_free: int = 2**33
    temporary_problem: str | None = None


def collect_facts(config: Config, environ: Mapping[str, str], *, with_devices: bool = True) -> MachineFacts:
    """Return the facts of this machine that matter for a run with this configuration."""
    launch = config.launch
    named, given = config.device.family, config.describe_device()
    family, devices = count_without_torch(environ, named, given)
    wanted = launch.num_processes or max(devices, 1) * launch.num_machines
    hostname = socket.gethostname()
    host_addresses, host_problem = resolve_name(hostname)
    main_addresses, main_problem = resolve_name(launch.main_process_ip) if launch.main_process_ip else ((), None)
    temporary, free, temporary_problem = _temporary()
    serves = launch.main_process_port and launch.machine_rank == 0
    return MachineFacts(
        system=platform.system(),
        kernel=platform.release(),
        python=platform.python_version(),
        requirements=requirements(),
        accelerate=accelerate_installations(),
        shared_memory=_shared_memory(),
        open_files=_open_files(),
        port_range=_port_range(),
        main_process_port=launch.main_process_port,
        port_problem=port_problem(launch.main_process_port) if serves and launch.main_process_port else None,
        interfaces=_interfaces(),
        chosen_interface=environ.get("GLOO_SOCKET_IFNAME") or None,
        route_interface=interface_towards(launch.main_process_ip) if launch.main_process_ip and main_addresses else None,
        hostname=hostname,
        host_addresses=host_addresses,
        host_problem=host_problem,
        main_process_ip=launch.main_process_ip,
        main_addresses=main_addresses,
        main_problem=main_problem,
        num_machines=launch.num_machines,
        machine_rank=launch.machine_rank,
        local_processes=-(-wanted // launch.num_machines),
        cores=available_cores(),
        threads=launch.num_cpu_threads_per_process or _whole_number(environ.get("OMP_NUM_THREADS")),
        memory=host_memory(),
        device_type=family.type,
        devices=devices,
        device_memory=_device_memory(named, given) if devices and with_devices else (),
        temporary=temporary,
        temporary_free=free,
        temporary_problem=temporary_problem,
    )


def requirements(declared: list[str] | None = None) -> tuple[Requirement, ...]:
    """Return the requirements in the metadata of this installation, without extras, and the versions found."""
    from importlib import metadata

    if declared is None:
        declared = metadata.requires("slipstream") or []
    found = []
    for line in declared:
        match = re.match(r"([A-Za-z0-9._\-]+)\s*>=\s*([\w.]+)\s*$", line)
        if match:
            found.append(Requirement(match[1], match[2], version_of(match[1])))
    return tuple(found)


def accelerate_installations(path: list[str] | None = None) -> tuple[AccelerateInstallation, ...]:
    """Return the distributions named accelerate on the path, in its order; read from metadata, nothing is imported."""
    import sys
    from importlib import machinery, metadata

    entries = sys.path if path is None else path
    spec = machinery.PathFinder.find_spec("accelerate", entries)
    package = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
    found: dict[str, list[Path]] = {}
    for distribution in metadata.distributions(name="accelerate", path=entries):
        found.setdefault(distribution.version, []).append(Path(str(distribution.locate_file(""))).resolve())
    packages = {version: [folder / "accelerate" for folder in folders] for version, folders in found.items()}
    owner = next((version for version, places in packages.items() if package in places), None)
    if owner is None and package is not None:  # an editable installation: its metadata lies elsewhere than its package
        owner = next((version for version, places in packages.items() if not any(place.is_dir() for place in places)), None)
    return tuple(AccelerateInstallation(version, str(folders[0]), version == owner) for version, folders in found.items())


def resolve_name(name: str, seconds: float = _NAME_SERVICE_SECONDS) -> tuple[tuple[str, ...], str | None]:
    """Return the addresses of a name, and the error; the wait for the name service is limited.

    >>> resolve_name("127.0.0.1")
    (('127.0.0.1',), None)
    """
    answer: list[tuple[tuple[str, ...], str | None]] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answer.append((tuple(dict.fromkeys(str(entry[4][0]) for entry in found)), None))
        except (OSError, UnicodeError) as error:
            answer.append(((), getattr(error, "strerror", None) or str(error)))

    asking = threading.Thread(target=ask, daemon=True)  # getaddrinfo has no timeout of its own
    asking.start()
    asking.join(seconds)
    return answer[0] if answer else ((), f"the name service did not answer within {seconds:g} s")


def port_problem(port: int) -> str | None:
    """Return why this machine cannot listen on a port; None if it can."""
    try:
        with socket.create_server(("", port), backlog=1):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _interfaces() -> tuple[Interface, ...]:
    import psutil

    up = {name: statistics.isup for name, statistics in psutil.net_if_stats().items()}
    wanted = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Interface(name, up.get(name, False), tuple(entry.address.partition("%")[0] for entry in entries if entry.family in wanted))
        for name, entries in psutil.net_if_addrs().items()
    )


def _shared_memory() -> tuple[int, int] | None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    usage = shutil.disk_usage(folder)
    return usage.free, usage.total


def _open_files() -> tuple[int, int] | None:
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (2**62 if soft == resource.RLIM_INFINITY else soft), (2**62 if hard == resource.RLIM_INFINITY else hard)


def _port_range() -> tuple[int, int] | None:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:  # another system
        return None
    return int(first), int(last)


def _temporary() -> tuple[str, int, str | None]:
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"slipstream")
            file.flush()
        return folder, shutil.disk_usage(folder).free, None
    except OSError as error:
        return "the temporary folder", 0, error.strerror or str(error)


def _device_memory(named: str | None, given: str) -> tuple[DeviceMemory, ...]:
    from slipstream.devices.memory import available_memory
    from slipstream.devices.table import choose_family, device_for

    family = choose_family(named, given)
    if family is CPU:
        return ()
    devices = [device_for(family, rank) for rank in range(family.count())]
    return tuple(DeviceMemory(str(device), available_memory(device)) for device in devices)


def _whole_number(text: str | None) -> int | None:
    first = (text or "").partition(",")[0].strip()  # OMP_NUM_THREADS may be a list, one entry per level of nesting
    return int(first) if first.isdigit() and int(first) > 0 else None


FindingLevel = Literal["ok", "note", "warning", "error"]

_GIB: Final = 2**30
_OLDEST_KERNEL: Final = "5.5"
_FILES_PER_PROCESS: Final = 1024
_SHARED_PER_PROCESS: Final = 64 * 2**20
_MEMORY_PER_PROCESS: Final = _GIB // 2
"""About the memory of a process with torch and a small model."""


@dataclass(frozen=True)
class DoctorFinding:
    """What one check found, with a remedy for everything that is not ok."""

    name: str
    level: FindingLevel
    text: str
    remedy: str = ""


_Result = tuple[FindingLevel, str, str]
"""Level, text and remedy of one check."""


def run_checks(facts: MachineFacts) -> Iterator[DoctorFinding]:
    """Yield the finding of every check, in the order of `CHECKS`."""
    return (DoctorFinding(name, *check(facts)) for name, check in CHECKS.items())


def _ok(text: str) -> _Result:
    return "ok", text, ""


def _note(text: str, remedy: str) -> _Result:
    return "note", text, remedy


def _warning(text: str, remedy: str) -> _Result:
    return "warning", text, remedy


def _error(text: str, remedy: str) -> _Result:
    return "error", text, remedy


def _check_kernel(facts: MachineFacts) -> _Result:
    if facts.system != "Linux":
        return _note(f"{facts.system} {facts.kernel}", "Slipstream is tested on Linux; please report what differs here")
    numbers = "".join(facts.kernel.partition("-")[0].partition("+")[0])
    try:
        old = compare_versions(numbers, "<", _OLDEST_KERNEL)
    except ConfigError:
        return _note(f"version {facts.kernel} cannot be compared", f"make sure that it is {_OLDEST_KERNEL} or newer")
    if old:
        return _warning(
            f"Linux {facts.kernel} is older than {_OLDEST_KERNEL}, where processes of one job are known to hang",
            f"run on a host with Linux {_OLDEST_KERNEL} or newer",
        )
    return _ok(f"Linux {facts.kernel}")


def _check_versions(facts: MachineFacts) -> _Result:
    missing = [need for need in facts.requirements if need.found is None]
    old = [need for need in facts.requirements if need.found is not None and parse_version(need.found) < parse_version(need.wanted)]
    if missing or old:
        text = ", ".join([*(f"{need.name} is missing" for need in missing), *(f"{need.name} {need.found} is too old" for need in old)])
        install = " ".join(f"'{need.name}>={need.wanted}'" for need in (*missing, *old))
        return _error(text, f"pip install {install}")
    shown = ", ".join(f"{need.name} {need.found}" for need in facts.requirements if need.name in ("torch", "numpy"))
    return _ok(f"Python {facts.python}" + (f", {shown}" if shown else ""))


def _check_accelerate(facts: MachineFacts) -> _Result:
    if not facts.accelerate:
        return _ok("the import name is free; `pip install ./compat` gives it to Slipstream")
    names = {True: "the drop-in", False: "Hugging Face Accelerate"}
    shown = [f"{names[entry.is_drop_in]} {entry.version} in {entry.folder}" for entry in facts.accelerate]
    answering = next((entry for entry in facts.accelerate if entry.answers), None)
    if len(facts.accelerate) > 1:
        who = "nothing" if answering is None else f"{names[answering.is_drop_in]} {answering.version}"
        return _warning(
            f"{' and '.join(shown)} are installed; `import accelerate` finds {who}",
            "`pip uninstall accelerate` until none is left, then install the one that you want",
        )
    if answering is None:
        return _warning(f"{shown[0]} is installed, but `import accelerate` finds no package", "install it again")
    return _ok(f"`import accelerate` finds {shown[0]}")


def _check_shared_memory(facts: MachineFacts) -> _Result:
    if facts.shared_memory is None:
        return _note("this system has no /dev/shm", "loader workers will pass batches through files")
    free, total = facts.shared_memory
    text = f"/dev/shm has {convert_bytes(free)} free of {convert_bytes(total)}"
    needed = _SHARED_PER_PROCESS * facts.local_processes
    if free < needed:
        return _warning(
            f"{text}; loader workers of {_processes(facts)} may run out of it (bus error)",
            "start the container with --shm-size=8g or --ipc=host, or mount -o remount,size=8G /dev/shm, or use num_workers=0",
        )
    return _ok(text)


def _check_open_files(facts: MachineFacts) -> _Result:
    if facts.open_files is None:
        return _note("this system has no such limit", "nothing to do")
    soft, hard = facts.open_files
    if soft < _FILES_PER_PROCESS:
        able = f"ulimit -n {min(hard, 65536)}" if hard > soft else "raise nofile in /etc/security/limits.conf or the job's settings"
        return _warning(
            f"a process may open {soft} files; connections, shards and loader workers together can need {_FILES_PER_PROCESS}", able
        )
    return _ok("no limit per process" if soft >= 2**62 else f"{soft} per process")


def _check_ports(facts: MachineFacts) -> _Result:
    if facts.port_problem is not None:
        return _error(
            f"port {facts.main_process_port} cannot be listened on here: {facts.port_problem}",
            "choose another --main_process_port, or end what uses it (see: ss -ltnp); on one machine leave the option out",
        )
    if facts.main_process_port and facts.machine_rank > 0:
        return _ok(f"{facts.main_process_port} is taken on machine 0, not here")
    if facts.port_range is None:
        return _ok("main_process_port is free" if facts.main_process_port else "a free one is taken when needed")
    first, last = facts.port_range
    if last - first < 1024:
        return _warning(
            f"the kernel hands out ports {first} to {last} only, and every pair of processes needs some",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        )
    if facts.main_process_port and facts.num_machines > 1 and first <= facts.main_process_port <= last:
        return _note(
            f"{facts.main_process_port} is free now, but the kernel may give it away: it hands out {first} to {last}",
            f"choose one below {first}",
        )
    free = f"{facts.main_process_port} is free" if facts.main_process_port else f"{first} to {last}; a free one is taken"
    return _ok(free)


def _check_loopback(facts: MachineFacts) -> _Result:
    loopback = next((interface for interface in facts.interfaces if interface.loopback), None)
    if loopback is None or not loopback.up:
        state = "is down" if loopback else "has no address or does not exist"
        return _error(f"the loopback interface {state}; processes of one machine meet there", "ip link set lo up")
    return _ok(f"{loopback.name} is up")


def _check_interface(facts: MachineFacts) -> _Result:
    """Check the interface that gloo uses: GLOO_SOCKET_IFNAME, or the one towards the main process, which the launcher sets."""
    if facts.chosen_interface is not None:
        return _chosen_interface(facts, facts.chosen_interface)
    if facts.num_machines == 1:
        return _ok("the loopback interface; one machine needs no other")
    found = next((interface for interface in facts.interfaces if interface.name == facts.route_interface), None)
    others = [interface.name for interface in facts.interfaces if interface.up and interface.addresses and not interface.loopback]
    remedy = f"export GLOO_SOCKET_IFNAME={others[0]} on this machine" if others else "connect this machine to the network of the others"
    if found is None:
        return _error(f"no interface leads from here to {facts.main_process_ip}", remedy)
    if found.loopback:
        return _error(f"{facts.main_process_ip} leads to {found.name}, which never leaves this machine", remedy)
    return _ok(f"gloo is given {found.name} ({found.addresses[0]}), which leads to {facts.main_process_ip}")


def _chosen_interface(facts: MachineFacts, name: str) -> _Result:
    wanted: list[Interface | None] = [
        next((interface for interface in facts.interfaces if interface.name == part), None) for part in name.split(",")
    ]
    if any(entry is None for entry in wanted):
        known = ", ".join(interface.name for interface in facts.interfaces)
        return _error(f"GLOO_SOCKET_IFNAME={name} names an interface that is not here", f"write one of: {known}")
    if not all(entry.up for entry in wanted if entry):
        return _error(f"GLOO_SOCKET_IFNAME={name}, and that interface is down", f"ip link set {name} up")
    return _ok(f"gloo takes {name}, from GLOO_SOCKET_IFNAME")


def _check_hostname(facts: MachineFacts) -> _Result:
    if not facts.host_addresses:
        return _warning(
            f"{facts.hostname} does not resolve: {facts.host_problem or 'no address'}",
            f"add a line to /etc/hosts, such as: 127.0.1.1 {facts.hostname}",
        )
    shown = f"{facts.hostname} is {', '.join(facts.host_addresses[:3])}"
    if facts.num_machines == 1 or facts.chosen_interface or not all(map(is_loopback, facts.host_addresses)):
        return _ok(shown)
    return _warning(
        f"{shown}, and gloo goes by it in processes that `slipstream launch` did not start",
        "start them with `slipstream launch`, or export GLOO_SOCKET_IFNAME, or correct /etc/hosts",
    )


def _check_main_process(facts: MachineFacts) -> _Result:
    if facts.num_machines == 1 or facts.main_process_ip is None:
        return _ok("not applicable: one machine")
    if not facts.main_addresses:
        return _error(
            f"main_process_ip {facts.main_process_ip} does not resolve here: {facts.main_problem or 'no address'}",
            "give an address instead of a name, or add the name to /etc/hosts on every machine",
        )
    own = {address for interface in facts.interfaces for address in interface.addresses}
    shown = f"{facts.main_process_ip} is {', '.join(facts.main_addresses)}"
    if all(map(is_loopback, facts.main_addresses)):
        return _error(f"{shown}, which every machine takes for itself", "give the address of machine 0 in the common network")
    if facts.machine_rank == 0 and not own & set(facts.main_addresses):
        return _warning(
            f"{shown}, which is not an address of this machine, although its machine_rank is 0",
            "give an address of machine 0, or start this machine with another --machine_rank",
        )
    return _ok(shown)


def _check_threads(facts: MachineFacts) -> _Result:
    text = f"{_processes(facts)} on {facts.cores} cores"
    if facts.local_processes > facts.cores:
        return _warning(f"{text}: they take turns", f"--num_processes {facts.cores} would be as fast")
    if facts.threads is None:
        return _ok(f"{text}; each gets {max(1, facts.cores // facts.local_processes)} threads")
    if facts.threads * facts.local_processes > facts.cores:
        fitting = max(1, facts.cores // facts.local_processes)
        return _warning(
            f"{text} with {facts.threads} threads each: {facts.threads * facts.local_processes} threads want them",
            f"--num_cpu_threads_per_process {fitting} (or OMP_NUM_THREADS={fitting})",
        )
    return _ok(f"{text} with {facts.threads} threads each")


def _check_memory(facts: MachineFacts) -> _Result:
    text = f"{convert_bytes(facts.memory.available)} available of {convert_bytes(facts.memory.total)}"
    needed = _MEMORY_PER_PROCESS * facts.local_processes
    if facts.memory.available < needed:
        return _warning(
            f"{text}; {_processes(facts)} need about {convert_bytes(needed)} before any model is loaded",
            "start fewer processes, end other programs, or raise the memory of the job",
        )
    return _ok(text)


def _check_memory_limit(facts: MachineFacts) -> _Result:
    limit = facts.memory.limit
    if limit is None or limit >= facts.memory.total:
        return _ok("no control group sets one below the memory of the machine")
    text = f"a control group allows {convert_bytes(limit)} of the machine's {convert_bytes(facts.memory.total)}"
    if limit < _MEMORY_PER_PROCESS * facts.local_processes:
        return _error(f"{text}: too little for {_processes(facts)}", "raise the memory of the job")
    return _note(text, "processes beyond it are killed without a word; ask for more if the model needs it")


def _check_devices(facts: MachineFacts) -> _Result:
    if not facts.devices:
        return _ok(f"no accelerator is used; processes compute on {facts.device_type}")
    text = f"{facts.devices} x {facts.device_type}"
    if not facts.device_memory:
        return _error(
            f"{text} by their device files, but torch sees none", "install a build of torch for them, check the driver, or use --cpu"
        )
    full = [device for device in facts.device_memory if device.free is not None and device.free < _GIB]
    if full:
        shown = ", ".join(f"{device.name} ({convert_bytes(device.free or 0)})" for device in full)
        return _warning(f"{text}; little memory is free on {shown}", "end what uses them, or choose others: --gpu_ids")
    if facts.local_processes > len(facts.device_memory):
        return _warning(
            f"{text} that torch can use, for {_processes(facts)}: several would share one",
            f"--num_processes {len(facts.device_memory) * facts.num_machines}, or --cpu",
        )
    free = ", ".join("unknown" if entry.free is None else convert_bytes(entry.free) for entry in facts.device_memory)
    return _ok(f"{text}; free: {free}")


def _check_temporary(facts: MachineFacts) -> _Result:
    if facts.temporary_problem is not None:
        return _error(f"{facts.temporary} cannot be written to: {facts.temporary_problem}", "set TMPDIR to one that can")
    if facts.temporary_free < 100 * 2**20:
        return _warning(f"{facts.temporary} has {convert_bytes(facts.temporary_free)} left", "free some, or set TMPDIR")
    return _ok(f"{facts.temporary}, {convert_bytes(facts.temporary_free)} free")


def _processes(facts: MachineFacts) -> str:
    return "1 process" if facts.local_processes == 1 else f"{facts.local_processes} processes"


CHECKS: Final[Mapping[str, Callable[[MachineFacts], _Result]]] = MappingProxyType(
    {
        "kernel": _check_kernel,
        "versions": _check_versions,
        "accelerate": _check_accelerate,
        "shared memory": _check_shared_memory,
        "open files": _check_open_files,
        "temporary folder": _check_temporary,
        "memory": _check_memory,
        "memory limit": _check_memory_limit,
        "devices": _check_devices,
        "threads": _check_threads,
        "loopback": _check_loopback,
        "interface": _check_interface,
        "host name": _check_hostname,
        "ports": _check_ports,
        "main process": _check_main_process,
    }
)
