"""Machines meet over a plain TCP connection before a job does: who came, with which versions, and how far their clocks are apart.

Machine 0 listens on the port of the main process, the others connect to it. Each sends one line that says who it is, then a few
lines that are sent back at once with the time of machine 0; the quickest round trip gives the difference of the clocks. At the
end everyone gets the same list. Messages are lines of JSON of limited length, nothing that arrives is executed or unpickled,
and every wait has a limit. It runs only while the command runs, on the port that the user named.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO, Final

__all__ = ["Machine", "Meeting", "join", "listen", "serve"]

_GREETING: Final = "slipstream doctor 1"
_LONGEST_LINE: Final = 64 * 1024
_ROUND_TRIPS: Final = 8
_PATIENCE: Final = 5.0
"""Seconds that one answer of one connection may take."""
_PAUSE: Final = 0.2

_Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine as the others see it."""

    machine_rank: int
    host: str
    num_machines: int
    versions: dict[str, str]
    skew: float = 0.0
    """Seconds that its clock is ahead of the clock of machine 0."""
    round_trip: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What came of it, the same for everyone who was there."""

    machines: tuple[Machine, ...] = ()
    problems: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    """On a machine that reached nobody: which addresses it tried and what each answered."""


class _Line:
    """A connection that speaks JSON lines, each side waiting for a limited time."""

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
            raise ValueError("the other side does not speak the doctor's language" if line else "the other side hung up")
        return message

    def close(self) -> None:
        self._reader.close()
        self._connection.close()


def listen(port: int) -> socket.socket:
    """A socket that takes connections on every interface, of both versions of IP where there are both."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # the new version may be known and switched off
                raise
    return socket.create_server(("", port))


def serve(listener: socket.socket, me: Machine, *, seconds: float, clock: _Clock = time.time) -> Meeting:
    """Machine 0's part: wait for the others, for `seconds` at most, and tell everyone who came."""
    deadline = time.monotonic() + seconds
    present: dict[int, Machine] = {me.machine_rank: me}
    problems: list[str] = []
    lines: list[_Line] = []
    with ExitStack() as stack:
        while len(present) < me.num_machines and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, address = listener.accept()
            except TimeoutError:
                break
            line = _Line(connection)
            stack.callback(line.close)
            try:
                machine = _welcome(line, me, present, clock)
                present[machine.machine_rank] = machine
                lines.append(line)
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"a connection from {address[0]} was refused: {error}")
        problems += _absent(present, me.num_machines, seconds)
        meeting = Meeting(machines=tuple(present[rank] for rank in sorted(present)), problems=tuple(problems))
        for line in lines:
            _send_if_there(line, asdict(meeting))
    return meeting


def _welcome(line: _Line, me: Machine, present: dict[int, Machine], clock: _Clock) -> Machine:
    hello = line.receive()
    if hello.get("greeting") != _GREETING:
        raise ValueError("it is not a Slipstream doctor of this version")
    machine = _machine(hello["machine"])
    refusal = _refusal(machine, me, present)
    line.send({"refused": refusal})
    if refusal is not None:
        raise ValueError(refusal)
    for _ in range(_ROUND_TRIPS):
        line.receive()
        line.send({"time": clock()})
    result = line.receive()
    return replace(machine, skew=float(result["skew"]), round_trip=float(result["round_trip"]))


def _refusal(machine: Machine, me: Machine, present: dict[int, Machine]) -> str | None:
    if machine.num_machines != me.num_machines:
        return f"{machine.host} was told num_machines={machine.num_machines}, machine 0 was told {me.num_machines}"
    if machine.machine_rank in present:
        return f"{machine.host} and {present[machine.machine_rank].host} both have machine_rank {machine.machine_rank}"
    if not 0 <= machine.machine_rank < me.num_machines:
        return f"{machine.host} has machine_rank {machine.machine_rank}; with {me.num_machines} machines it is 0 to {me.num_machines - 1}"
    return None


def _absent(present: dict[int, Machine], expected: int, seconds: float) -> list[str]:
    missing = [str(rank) for rank in range(expected) if rank not in present]
    return [f"machine_rank {', '.join(missing)} did not come within {seconds:g} s"] if missing else []


def _send_if_there(line: _Line, message: dict[str, Any]) -> None:
    try:
        line.send(message)
    except OSError:  # it has left; the list says that it came, and it will see for itself that it got none
        return


def join(address: str, port: int, me: Machine, *, seconds: float, clock: _Clock = time.time) -> Meeting:
    """Another machine's part: reach machine 0 within `seconds`, compare clocks, and hear who came."""
    deadline = time.monotonic() + seconds
    connection, tried = _reach(address, port, deadline)
    if connection is None:
        return Meeting(problems=(f"machine 0 could not be reached within {seconds:g} s",), tried=tried)
    line = _Line(connection)
    try:
        line.send({"greeting": _GREETING, "machine": asdict(me)})
        if refusal := line.receive().get("refused"):
            return Meeting(problems=(f"machine 0 refused this machine: {refusal}",))
        skew, round_trip = min((_measure(line, clock) for _ in range(_ROUND_TRIPS)), key=lambda sample: sample[1])
        line.send({"skew": skew, "round_trip": round_trip})
        answer = line.receive(max(deadline - time.monotonic(), 0.0) + seconds + _PATIENCE)
        return Meeting(machines=tuple(_machine(one) for one in answer["machines"]), problems=tuple(map(str, answer["problems"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{address} port {port} answered, but not as machine 0 of this command does: {error}"
        return Meeting(problems=(reason,), tried=tried)
    finally:
        line.close()


def _measure(line: _Line, clock: _Clock) -> tuple[float, float]:
    """(how far this clock is ahead, round trip): the other clock is taken to have been read half way."""
    before, started = clock(), time.monotonic()
    line.send({"time": before})
    there = float(line.receive()["time"])
    round_trip = time.monotonic() - started
    return before + round_trip / 2 - there, round_trip


def _reach(address: str, port: int, deadline: float) -> tuple[socket.socket | None, tuple[str, ...]]:
    """A connection, and what every attempt met."""
    met: Counter[str] = Counter()
    while True:
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        except OSError as error:
            found = []
            met[f"{address}: the name does not resolve ({error.strerror or error})"] += 1
        for family, kind, protocol, _, target in found:
            try:
                connection = socket.socket(family, kind, protocol)
                connection.settimeout(max(0.1, min(_PATIENCE, deadline - time.monotonic())))
                connection.connect(target)
                return connection, _attempts(met)
            except OSError as error:
                connection.close()
                met[f"{target[0]} port {port}: {error.strerror or error}"] += 1
        if time.monotonic() >= deadline:
            return None, _attempts(met)
        time.sleep(_PAUSE)


def _attempts(met: Counter[str]) -> tuple[str, ...]:
    return tuple(f"{what} ({count} {'time' if count == 1 else 'times'})" for what, count in met.items())


def _machine(data: dict[str, Any]) -> Machine:
    return Machine(
        machine_rank=int(data["machine_rank"]),
        host=str(data["host"])[:255],
        num_machines=int(data["num_machines"]),
        versions={str(name)[:40]: str(version)[:40] for name, version in dict(data["versions"]).items()},
        skew=float(data["skew"]),
        round_trip=float(data["round_trip"]),
    )
