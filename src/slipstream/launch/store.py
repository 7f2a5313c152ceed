"""Opening the store where the processes of a job meet: as its server, or as a client of one that may not be up yet.

The server listens on a socket that is bound here, because torch's own would listen on every interface of the machine. A client
tries with plain sockets first and says what it tried when it gives up; torch's client would print stack traces instead.
A connection to another machine gets time limits of its own, so that a cut cable is an error and not a wait without end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NoReturn

from slipstream.errors import ConfigError
from slipstream.launch.processes import Crew
from slipstream.launch.system import open_files

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["Place", "address_towards", "await_listener", "connect", "interface_of", "listen", "quietly", "serve"]

_BACKLOG: Final = 4096
_PAUSE: Final = 0.25


@dataclass(frozen=True)
class Place:
    """A store's address as the processes are told it."""

    host: str
    port: int


def listen(host: str, port: int | None, origin: str = "") -> tuple[socket.socket, Place]:
    """A listening socket on `host`, on the given port or a free one; `origin` says where the port came from.

    >>> listener, place = listen("127.0.0.1", None)
    >>> listener.getsockname() == (place.host, place.port)
    True
    >>> listener.close()
    """
    problem: OSError | None = None
    for family, address in _addresses_to_bind(host, port or 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:  # a fixed port may still be remembered from the job before; a free one must be free for everybody
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            problem = error
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            break
        return listener, Place(host, listener.getsockname()[1])
    raise ConfigError(_cannot_listen(host, port, origin, problem))


def _addresses_to_bind(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """The address itself; where that is not one of this machine's (a translated or loopback name), every interface."""
    everywhere = [(socket.AF_INET, ("0.0.0.0", port))]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return everywhere
    named = [(family, (str(address[0]), int(address[1]))) for family, _, _, _, address in found]
    loopback_name = host not in ("127.0.0.1", "::1", "localhost") and all(_is_loopback(address[0]) for _, address in named)
    return everywhere if loopback_name else named + everywhere


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _cannot_listen(host: str, port: int | None, origin: str, problem: OSError | None) -> str:
    where = f" ({origin})" if origin else ""
    if problem is not None and problem.errno == errno.EADDRINUSE:
        return (
            f"Port {port} on {host}{where} is already in use, perhaps by another job.\n"
            "Give another one with --main_process_port; on one machine leave it out, and a free port is taken."
        )
    if problem is not None and problem.errno == errno.EACCES:
        return f"Port {port}{where} is reserved for the administrator.\nGive one above 1023 with --main_process_port."
    reason = problem.strerror if problem is not None else "the name has no address"
    return f"The launcher cannot listen on {host}, port {port}{where}: {reason}.\nmain_process_ip must be an address of machine 0."


def serve(listener: socket.socket, place: Place) -> TCPStore:
    """A store that answers on `listener`, and this process's own connection to it."""
    from torch._C._distributed_c10d import TCPStore

    bound = listener.getsockname()[0]
    host = "127.0.0.1" if bound == "0.0.0.0" else bound
    with quietly():  # torch remarks on addresses without a name, which are no mistake
        return TCPStore(host, place.port, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=listener.detach())


def connect(
    place: Place, *, patience: float, limit: float, check: Callable[[], None], note: Callable[[str], None] = lambda text: None
) -> TCPStore:
    """A client of the store at `place`, which may take up to `patience` seconds to appear.

    `limit` is after how many seconds of silence an established connection counts as lost; `check` is called in between and may
    raise; `note` is told once when it takes longer.
    """
    from torch._C._distributed_c10d import TCPStore

    await_listener(place, patience, check, note)
    _refuse_strangers(place, patience)
    before = open_files()
    with quietly():
        store = TCPStore(place.host, place.port, None, False, timedelta(seconds=limit), wait_for_workers=False)
    for number in open_files() - before:
        _limit_silence(number, place.port, limit)
    return store


def _refuse_strangers(place: Place, patience: float) -> None:
    """Talk to whoever listens from a process that can be given up: torch's client waits for an answer without a limit."""
    if sys.platform != "linux":
        return
    answer = -1
    crew = Crew()
    crew.fork(0, lambda: _try_to_talk(place, patience))
    deadline = time.monotonic() + patience
    while crew.running and time.monotonic() < deadline:
        crew.wait(deadline - time.monotonic())
        answer = next((end.exit_code for end in crew.poll()), answer)
    crew.stop(signum=signal.SIGKILL)
    if answer != 0:
        heard = f"no answer within {patience:.0f} s" if answer < 0 else "an answer in another language"
        raise ConfigError(
            f"Something listens at {place.host}, port {place.port} (main_process_ip, main_process_port), but it is not a launcher.\n"
            f"Tried: a connection, and the first words of torch's store; there was {heard}.\n"
            "Check the address and the port, and whether a proxy or another service answers in its place."
        )


def _try_to_talk(place: Place, patience: float) -> NoReturn:
    from torch._C._distributed_c10d import TCPStore

    try:
        with quietly():
            TCPStore(place.host, place.port, None, False, timedelta(seconds=patience), wait_for_workers=False)
    except RuntimeError:
        os._exit(3)
    os._exit(0)


def await_listener(place: Place, patience: float, check: Callable[[], None], note: Callable[[str], None]) -> None:
    """Return when somebody listens at `place`; a ConfigError with all that was tried when nobody does in time."""
    start = time.monotonic()
    tries, said = 0, False
    while True:
        tries += 1
        try:
            socket.create_connection((place.host, place.port), timeout=min(5.0, patience)).close()
            return
        except OSError as error:
            problem = _told(error)
        check()
        waited = time.monotonic() - start
        if waited >= patience:
            raise ConfigError(_unreachable(place, problem, tries, waited))
        if waited > 3 and not said:
            said = True
            note(f"waiting for machine 0 at {place.host}, port {place.port} ({problem}); giving up after {patience:.0f} s")
        time.sleep(_PAUSE)


def _told(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name has no address"
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def _unreachable(place: Place, problem: str, tries: int, waited: float) -> str:
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)})
        resolved = f"{place.host} is {', '.join(found)}" if found != [place.host] else f"address {place.host}"
    except OSError:
        resolved = f"{place.host} has no address here"
    return (
        f"Machine 0 cannot be reached at {place.host}, port {place.port} (main_process_ip, main_process_port).\n"
        f"Tried: {resolved}; {tries} connections in {waited:.0f} s; the last one: {problem}.\n"
        "Start the launcher on machine 0 too, check that both give the same address and port, and that no firewall is between them.\n"
        "To wait longer: --rdzv_conf timeout=300"
    )


def _limit_silence(number: int, port: int, limit: float) -> None:
    """Time limits on the connection that torch has just opened; it sets none, and some of its requests wait without one."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        if connection.getpeername()[1] != port:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        third = max(1, int(limit / 3))
        for name, value in (("TCP_KEEPIDLE", third), ("TCP_KEEPINTVL", third), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", int(limit * 1000))):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what torch's C++ side prints about a failed request (stack traces) off the terminal; the exception comes through."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def address_towards(host: str) -> str:
    """The address of this machine on the way to `host`; an OSError if there is none.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: the system only chooses a route
        return str(probe.getsockname()[0])


def interface_of(host: str) -> str | None:
    """The network interface over which `host` is reached from here, or None when it cannot be told."""
    import psutil

    try:
        own = address_towards(host)
    except OSError:
        return None
    named = [name for name, entries in psutil.net_if_addrs().items() if any(entry.address.partition("%")[0] == own for entry in entries)]
    # machine 0 reaches itself over the loopback interface's route, but with the address of the right one
    return named[0] if named else None
