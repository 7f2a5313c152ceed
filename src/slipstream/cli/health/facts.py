"""What is true of this machine right now, collected once into a plain record that `checks.py` judges.

Collecting opens and closes things (a port, a file in the temporary folder) and leaves nothing behind. Torch is imported only
to ask devices for their free memory, and only if device files say that there are any.
"""

from __future__ import annotations

import platform
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from slipstream.config import Config
from slipstream.devices.host import HostMemory, cores, host_memory
from slipstream.devices.packages import version_of
from slipstream.devices.table import CPU, count_without_torch
from slipstream.launch.store import interface_of

__all__ = ["DeviceMemory", "Facts", "Interface", "Requirement", "collect", "port_problem", "requirements", "resolve_name"]

_NAME_SERVICE_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    addresses: tuple[str, ...]

    @property
    def loopback(self) -> bool:
        return any(address == "::1" or address.startswith("127.") for address in self.addresses)


@dataclass(frozen=True)
class Requirement:
    """A library that Slipstream needs: the least version, and the one found."""

    name: str
    wanted: str
    found: str | None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device; None where it does not tell."""

    name: str
    free: int | None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the checks look at. Every field has a harmless default, so a test states only what it is about."""

    system: str = "Linux"
    kernel: str = "6.1.0"
    python: str = "3.11.0"
    requirements: tuple[Requirement, ...] = ()
    shared_memory: tuple[int, int] | None = None
    """Free and total bytes of /dev/shm; None where there is no such thing."""
    open_files: tuple[int, int] | None = None
    """Soft and hard limit."""
    port_range: tuple[int, int] | None = None
    """The ports that the kernel hands out by itself."""
    main_process_port: int | None = None
    port_problem: str | None = None
    """Why main_process_port cannot be listened on here; None if it can, or if nobody asked."""
    interfaces: tuple[Interface, ...] = (Interface("lo", True, ("127.0.0.1",)),)
    chosen_interface: str | None = None
    """GLOO_SOCKET_IFNAME."""
    route_interface: str | None = None
    """Over which interface the main process is reached; `slipstream launch` gives it to gloo."""
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


def collect(config: Config, environ: Mapping[str, str], *, with_devices: bool = True) -> Facts:
    """The facts of this machine, as far as a run with this configuration is concerned."""
    launch = config.launch
    family, devices = count_without_torch(environ)
    if config.device.cpu:
        family, devices = CPU, 0
    wanted = launch.num_processes or max(devices, 1) * launch.num_machines
    hostname = socket.gethostname()
    host_addresses, host_problem = resolve_name(hostname)
    main_addresses, main_problem = resolve_name(launch.main_process_ip) if launch.main_process_ip else ((), None)
    temporary, free, temporary_problem = _temporary()
    serves = launch.main_process_port and launch.machine_rank == 0
    return Facts(
        system=platform.system(),
        kernel=platform.release(),
        python=platform.python_version(),
        requirements=requirements(),
        shared_memory=_shared_memory(),
        open_files=_open_files(),
        port_range=_port_range(),
        main_process_port=launch.main_process_port,
        port_problem=port_problem(launch.main_process_port) if serves and launch.main_process_port else None,
        interfaces=_interfaces(),
        chosen_interface=environ.get("GLOO_SOCKET_IFNAME") or None,
        route_interface=interface_of(launch.main_process_ip) if launch.main_process_ip and main_addresses else None,
        hostname=hostname,
        host_addresses=host_addresses,
        host_problem=host_problem,
        main_process_ip=launch.main_process_ip,
        main_addresses=main_addresses,
        main_problem=main_problem,
        num_machines=launch.num_machines,
        machine_rank=launch.machine_rank,
        local_processes=-(-wanted // launch.num_machines),
        cores=cores(),
        threads=launch.num_cpu_threads_per_process or _whole_number(environ.get("OMP_NUM_THREADS")),
        memory=host_memory(),
        device_type=family.type,
        devices=devices,
        device_memory=_device_memory() if devices and with_devices else (),
        temporary=temporary,
        temporary_free=free,
        temporary_problem=temporary_problem,
    )


def requirements(declared: list[str] | None = None) -> tuple[Requirement, ...]:
    """What the metadata of this installation asks for, and what is there; extras are left out."""
    from importlib import metadata

    if declared is None:
        declared = metadata.requires("slipstream") or []
    found = []
    for line in declared:
        match = re.match(r"([A-Za-z0-9._\-]+)\s*>=\s*([\w.]+)\s*$", line)
        if match:
            found.append(Requirement(match[1], match[2], version_of(match[1])))
    return tuple(found)


def resolve_name(name: str, seconds: float = _NAME_SERVICE_SECONDS) -> tuple[tuple[str, ...], str | None]:
    """The addresses of a name, and what went wrong; a name service that does not answer is not waited for.

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
    """Why this machine cannot listen on a port; None if it can."""
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


def _device_memory() -> tuple[DeviceMemory, ...]:
    from slipstream.devices.memory import available_memory
    from slipstream.devices.table import best_family, device_for

    family = best_family()
    if family is CPU:
        return ()
    devices = [device_for(family, rank) for rank in range(family.count())]
    return tuple(DeviceMemory(str(device), available_memory(device)) for device in devices)


def _whole_number(text: str | None) -> int | None:
    first = (text or "").partition(",")[0].strip()  # OMP_NUM_THREADS may be a list, one entry per level of nesting
    return int(first) if first.isdigit() and int(first) > 0 else None
