"""`slipstream doctor`: look for problems that keep jobs from running here, and say how to solve them.

On one machine it checks facts about that machine (`doctor_checks.py`). With `--num_machines`, run on every machine at the same time, the
machines also connect over plain TCP to the port of the main process and compare ranks, versions and clocks. Messages are JSON lines of
limited length, nothing that arrives is executed or unpickled, and every wait has a limit. Ranks and addresses may come from Slurm or
another cluster. Exit code 1 if something is wrong, 2 for options that cannot be used.
"""

from __future__ import annotations

import errno
import json
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO, Final

import click

from slipstream.cli.doctor_checks import DoctorFinding, collect_facts, run_checks
from slipstream.config import OPTIONS, Config, flag_names, resolve
from slipstream.config.sources import environment
from slipstream.devices.packages import version_of
from slipstream.distributed.cluster import detect
from slipstream.errors import ConfigError

__all__ = [
    "MachineInfo", "MeetingResult", "check_meeting", "command", "diagnose", "host_meeting", "join_meeting", "listen_for_machines",
    "single_machine_findings",
]


_GREETING: Final = "slipstream doctor 1"
_LONGEST_LINE: Final = 64 * 1024
_ROUND_TRIPS: Final = 8
_PATIENCE: Final = 5.0
"""Seconds that one answer of one connection may take."""
_PAUSE: Final = 0.2

_Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """One machine as the others see it."""

    machine_rank: int
    host: str
    num_machines: int
    versions: dict[str, str]
    skew: float = 0.0
    """Seconds that its clock is ahead of the clock of machine 0."""
    round_trip: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeetingResult:
    """The result of a meeting, the same on every machine that took part."""

    machines: tuple[MachineInfo, ...] = ()
    problems: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    """On a machine that could not connect: the addresses that it tried and their errors."""


class _JsonConnection:
    """A connection that exchanges JSON lines; every wait has a limit."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._reader: BinaryIO = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float = _PATIENCE) -> dict[str, Any]:
        self._connection.settimeout(seconds)
        line = self._reader.readline(_LONGEST_LINE)
        message = json.loads(line) if line.endswith(b"\n") else None
        if not isinstance(message, dict):
            raise ValueError("the other side does not speak the doctor's protocol" if line else "the other side hung up")
        return message

    def close(self) -> None:
        self._reader.close()
        self._connection.close()


def listen_for_machines(port: int) -> socket.socket:
    """Return a socket that accepts connections on every interface, over IPv4 and IPv6 where both exist."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 may be supported and switched off
                raise
    return socket.create_server(("", port))


def host_meeting(listener: socket.socket, me: MachineInfo, *, seconds: float, clock: _Clock = time.time) -> MeetingResult:
    """On machine 0: wait up to `seconds` for the others, and send everyone the list of machines."""
    deadline = time.monotonic() + seconds
    present: dict[int, MachineInfo] = {me.machine_rank: me}
    problems: list[str] = []
    lines: list[_JsonConnection] = []
    with ExitStack() as stack:
        while len(present) < me.num_machines and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, address = listener.accept()
            except TimeoutError:
                break
            line = _JsonConnection(connection)
            stack.callback(line.close)
            try:
                machine = _welcome(line, me, present, clock)
                present[machine.machine_rank] = machine
                lines.append(line)
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"a connection from {address[0]} was refused: {error}")
        missing = [str(rank) for rank in range(me.num_machines) if rank not in present]
        problems += [f"machine_rank {', '.join(missing)} did not come within {seconds:g} s"] if missing else []
        meeting = MeetingResult(machines=tuple(present[rank] for rank in sorted(present)), problems=tuple(problems))
        for line in lines:
            with suppress(OSError):  # it has left; it will notice that it received no list
                line.send(asdict(meeting))
    return meeting


def _welcome(line: _JsonConnection, me: MachineInfo, present: dict[int, MachineInfo], clock: _Clock) -> MachineInfo:
    hello = line.receive()
    if hello.get("greeting") != _GREETING:
        raise ValueError("it is not a Slipstream doctor of this version")
    machine = _parse_machine(hello["machine"])
    refusal = _refusal(machine, me, present)
    line.send({"refused": refusal})
    if refusal is not None:
        raise ValueError(refusal)
    for _ in range(_ROUND_TRIPS):
        line.receive()
        line.send({"time": clock()})
    result = line.receive()
    return replace(machine, skew=float(result["skew"]), round_trip=float(result["round_trip"]))


def _refusal(machine: MachineInfo, me: MachineInfo, present: dict[int, MachineInfo]) -> str | None:
    if machine.num_machines != me.num_machines:
        return f"{machine.host} has num_machines={machine.num_machines}, machine 0 has {me.num_machines}"
    if machine.machine_rank in present:
        return f"{machine.host} and {present[machine.machine_rank].host} both have machine_rank {machine.machine_rank}"
    if not 0 <= machine.machine_rank < me.num_machines:
        return f"{machine.host} has machine_rank {machine.machine_rank}; with {me.num_machines} machines it is 0 to {me.num_machines - 1}"
    return None


def join_meeting(address: str, port: int, me: MachineInfo, *, seconds: float, clock: _Clock = time.time) -> MeetingResult:
    """On another machine: connect to machine 0 within `seconds`, compare clocks, and receive the list of machines."""
    deadline = time.monotonic() + seconds
    connection, tried = _reach(address, port, deadline)
    if connection is None:
        return MeetingResult(problems=(f"machine 0 could not be reached within {seconds:g} s",), tried=tried)
    line = _JsonConnection(connection)
    try:
        line.send({"greeting": _GREETING, "machine": asdict(me)})
        if refusal := line.receive().get("refused"):
            return MeetingResult(problems=(f"machine 0 refused this machine: {refusal}",))
        skew, round_trip = min((_measure(line, clock) for _ in range(_ROUND_TRIPS)), key=lambda sample: sample[1])
        line.send({"skew": skew, "round_trip": round_trip})
        answer = line.receive(max(deadline - time.monotonic(), 0.0) + seconds + _PATIENCE)
        return MeetingResult(
            machines=tuple(_parse_machine(entry) for entry in answer["machines"]), problems=tuple(map(str, answer["problems"]))
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{address} port {port} answered, but not as machine 0 of this command does: {error}"
        return MeetingResult(problems=(reason,), tried=tried)
    finally:
        line.close()


def _measure(line: _JsonConnection, clock: _Clock) -> tuple[float, float]:
    """Return (how far this clock is ahead, round trip), assuming that the other clock was read half way."""
    before, started = clock(), time.monotonic()
    line.send({"time": before})
    there = float(line.receive()["time"])
    round_trip = time.monotonic() - started
    return before + round_trip / 2 - there, round_trip


def _reach(address: str, port: int, deadline: float) -> tuple[socket.socket | None, tuple[str, ...]]:
    """Return a connection, and the error of every failed attempt."""
    errors: Counter[str] = Counter()
    while True:
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        except OSError as error:
            found = []
            errors[f"{address}: the name does not resolve ({error.strerror or error})"] += 1
        for family, kind, protocol, _, target in found:
            try:
                connection = socket.socket(family, kind, protocol)
                connection.settimeout(max(0.1, min(_PATIENCE, deadline - time.monotonic())))
                connection.connect(target)
                return connection, _attempts(errors)
            except OSError as error:
                connection.close()
                errors[f"{target[0]} port {port}: {error.strerror or error}"] += 1
        if time.monotonic() >= deadline:
            return None, _attempts(errors)
        time.sleep(_PAUSE)


def _attempts(errors: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{what} ({count} {'time' if count == 1 else 'times'})" for what, count in errors.items())


def _parse_machine(data: dict[str, Any]) -> MachineInfo:
    return MachineInfo(
        machine_rank=int(data["machine_rank"]),
        host=str(data["host"])[:255],
        num_machines=int(data["num_machines"]),
        versions={str(name)[:40]: str(version)[:40] for name, version in dict(data["versions"]).items()},
        skew=float(data["skew"]),
        round_trip=float(data["round_trip"]),
    )


_NOTICEABLE: Final = 1.0
"""Seconds: logs of several machines no longer sort."""
_DANGEROUS: Final = 10.0
"""Seconds: torch's dynamic rendezvous compares heartbeats by wall clock and considers a machine lost after 15 s without one."""


def single_machine_findings() -> Iterator[DoctorFinding]:
    """Yield the findings for a single machine."""
    yield DoctorFinding("machines", "ok", "not applicable: one machine")
    yield DoctorFinding("clocks", "ok", "not applicable: one machine")


def check_meeting(meeting: MeetingResult) -> Iterator[DoctorFinding]:
    """Yield the findings about machines, versions and clocks."""
    yield from _presence(meeting)
    if len(meeting.machines) > 1:
        yield _versions(meeting)
        yield _clocks(meeting)


def _presence(meeting: MeetingResult) -> Iterator[DoctorFinding]:
    hosts = ", ".join(f"{machine.machine_rank} ({machine.host})" for machine in meeting.machines)
    for problem in meeting.problems:
        tried = f"; tried: {'; '.join(meeting.tried)}" if meeting.tried else ""
        there = f"; present: {hosts}" if hosts else ""
        yield DoctorFinding("machines", "error", f"{problem}{tried}{there}", _remedy(meeting))
    if not meeting.problems:
        slowest = max(machine.round_trip for machine in meeting.machines)
        yield DoctorFinding("machines", "ok", f"all {len(meeting.machines)} met: {hosts}; slowest round trip {slowest * 1000:.1f} ms")


def _remedy(meeting: MeetingResult) -> str:
    if meeting.tried:
        return (
            "run this command on machine 0 at the same time, with the same --main_process_ip, --main_process_port and "
            "--num_machines; then look at the firewall between the machines"
        )
    return "run this command on every machine at the same time, each with its own --machine_rank"


def _versions(meeting: MeetingResult) -> DoctorFinding:
    names = dict.fromkeys(name for machine in meeting.machines for name in machine.versions)
    for name in names:
        found = {machine.machine_rank: machine.versions.get(name, "missing") for machine in meeting.machines}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"machine {rank}: {version}" for rank, version in found.items())
            return DoctorFinding(
                "same versions", "error", f"{name} differs ({shown})", f"install the same version of {name} on every machine"
            )
    return DoctorFinding("same versions", "ok", ", ".join(f"{name} {version}" for name, version in meeting.machines[0].versions.items()))


def _clocks(meeting: MeetingResult) -> DoctorFinding:
    """Return the finding about the largest clock difference between two machines."""
    first, *_, last = sorted(meeting.machines, key=lambda machine: machine.skew)
    apart = last.skew - first.skew
    error = (first.round_trip + last.round_trip) / 2
    text = f"{apart:.3f} s apart at most (measured to {max(error, 0.0005):.3f} s)"
    if apart - error < _NOTICEABLE:
        return DoctorFinding("clocks", "ok", text)
    who = f"machine {last.machine_rank} ({last.host}) is ahead of machine {first.machine_rank} ({first.host})"
    remedy = "start a time service on every machine: systemctl enable --now chronyd (or systemd-timesyncd)"
    if apart - error < _DANGEROUS:
        return DoctorFinding("clocks", "warning", f"{text}: {who}; logs of the machines will not sort", remedy)
    return DoctorFinding("clocks", "error", f"{text}: {who}; an elastic rendezvous would consider live machines lost", remedy)


_FLAGS: Final = (
    "config_file",
    "cpu",
    "device",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "num_cpu_threads_per_process",
)
_STYLES: Final = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def diagnose(config: Config, environ: Mapping[str, str], *, seconds: float) -> list[DoctorFinding]:
    """Return every finding for a run with this configuration."""
    config, findings = _with_cluster_options(config, environ)
    findings += run_checks(collect_facts(config, environ))
    if config.launch.num_machines == 1:
        return [*findings, *single_machine_findings()]
    config.require_main_process()
    return [*findings, *check_meeting(_meet(config, seconds))]


def _with_cluster_options(config: Config, environ: Mapping[str, str]) -> tuple[Config, list[DoctorFinding]]:
    """Return the configuration with the options that a cluster provides, where they were not given."""
    try:
        process = detect(environ)
    except ConfigError as error:
        remedy = "correct these variables, or unset them all to run as a single process"
        return config, [DoctorFinding("rank variables", "error", str(error), remedy)]
    if process.num_nodes == 1 or config.origin("num_machines").kind != "default":
        return config, [DoctorFinding("rank variables", "ok", f"{process.cluster}: process {process.rank} of {process.world_size}")]
    known = {
        "num_machines": process.num_nodes,
        "machine_rank": process.node_rank,
        "main_process_ip": process.master_addr,
        "main_process_port": process.master_port,
    }
    not_given = {name: value for name, value in known.items() if config.origin(name).kind == "default"}
    text = f"{process.cluster}: machine {process.node_rank} of {process.num_nodes}"
    return config.replace(caller=process.cluster, **not_given), [DoctorFinding("rank variables", "ok", text)]


def _meet(config: Config, seconds: float) -> MeetingResult:
    launch = config.launch
    assert launch.main_process_ip is not None
    assert launch.main_process_port is not None
    versions = {name: version_of(name) or "missing" for name in ("slipstream", "torch")}
    me = MachineInfo(
        machine_rank=launch.machine_rank,
        host=socket.gethostname(),
        num_machines=launch.num_machines,
        versions={**versions, "python": ".".join(platform.python_version_tuple()[:2])},
    )
    if launch.machine_rank != 0:
        return join_meeting(launch.main_process_ip, launch.main_process_port, me, seconds=seconds)
    try:
        with listen_for_machines(launch.main_process_port) as listener:
            return host_meeting(listener, me, seconds=seconds)
    except OSError as error:
        return MeetingResult(problems=(f"port {launch.main_process_port} cannot be listened on: {error.strerror or error}",))


def _table(findings: list[DoctorFinding]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for title in ("", "check", "finding, and what helps"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        mark = Text(finding.level, style=_STYLES[finding.level])
        remedy = Text(f"\n> {finding.remedy}", style="italic") if finding.remedy else ""
        table.add_row(mark, Text(finding.name), Text.assemble(finding.text, remedy))
    return table


def _verdict(findings: list[DoctorFinding]) -> str:
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if errors:
        return f"{errors} of {len(findings)} checks found something that must be fixed."
    if warnings:
        return f"Jobs can run here; {warnings} of {len(findings)} checks found something that may disturb them."
    return f"All {len(findings)} checks are fine."


def _with_flags(command: click.Command) -> click.Command:
    for name in _FLAGS:
        option = OPTIONS[name]
        kind: dict[str, Any] = {"is_flag": True, "default": None} if option.is_switch else {"metavar": option.type.__name__.upper()}
        command.params.append(click.Option([*flag_names(option), name], help=option.help, **kind))
    return command


@_with_flags
@click.command(name="doctor", short_help="Look for problems that keep jobs from running here, with remedies.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--wait", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True, help="Seconds to wait for other machines."
)
def command(as_json: bool, wait: float, **flags: Any) -> None:
    """Look for problems that keep jobs from running here, with remedies.

    With --num_machines, run it on every machine at the same time, each with its own --machine_rank.
    """
    environ = environment()
    config = resolve(flags=flags, environ=environ, default_file=True)
    findings = diagnose(config, environ, seconds=wait)
    if as_json:
        click.echo(json.dumps({"verdict": _verdict(findings), "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        from rich.console import Console

        Console().print(_table(findings))
        click.echo(_verdict(findings))
    click.get_current_context().exit(1 if any(finding.level == "error" for finding in findings) else 0)
