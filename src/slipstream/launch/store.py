"""The rendezvous store of a job: opening it as server or client, and the keys that the launcher and the workers share.

The server listens on a socket that is bound here, because torch would listen on every interface. A client first tries a plain socket and
reports what it tried; torch's client would print stack traces. Connections to other machines get time limits, so a broken connection is
an error and not an endless wait. Keys live under one prefix per attempt, so a restarted job never reads what the previous attempt wrote.
Nothing here imports torch before a store is opened.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NoReturn

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    # torch internals: `torch.distributed.TCPStore` under the name that torch declares its types for. Tried on torch 2.13; mypy notices.
    from torch._C._distributed_c10d import TCPStore

__all__ = [
    "ALARM_KEY", "ExitNotice", "FOLLOWED_LOSS_KEY", "LOST_HOLDERS_KEY", "StoreAddress", "attempt_prefix", "connect_store", "exit_key",
    "holds_items_key", "interface_towards", "is_loopback", "local_address_towards", "open_listener", "serve_store", "short_name_lookups",
    "signal_name", "silence_stderr", "wait_for_listener",
]


_BACKLOG: Final = 4096
_PAUSE: Final = 0.25


@dataclass(frozen=True)
class StoreAddress:
    """The address of a store, as the processes receive it."""

    host: str
    port: int


def open_listener(host: str, port: int | None, origin: str = "") -> tuple[socket.socket, StoreAddress]:
    """Return a listening socket on `host`, on the given port or a free one; `origin` is the option of the port, for errors.

    >>> listener, address = open_listener("127.0.0.1", None)
    >>> listener.getsockname() == (address.host, address.port)
    True
    >>> listener.close()
    """
    problem: OSError | None = None
    for family, address in _addresses_to_bind(host, port or 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:  # a fixed port may still be in TIME_WAIT from the last job; one that the system chooses must be unused
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            problem = error
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            break
        return listener, StoreAddress(host, listener.getsockname()[1])
    raise ConfigError(_cannot_listen(host, port, origin, problem))


def _addresses_to_bind(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Return the address itself; where that is not an address of this machine (a translated or loopback name), every interface."""
    everywhere = [(socket.AF_INET, ("0.0.0.0", port))]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return everywhere
    named = [(family, (str(address[0]), int(address[1]))) for family, _, _, _, address in found]
    loopback_name = host not in ("127.0.0.1", "::1", "localhost") and all(is_loopback(address[0]) for _, address in named)
    return everywhere if loopback_name else named + everywhere


def is_loopback(address: str) -> bool:
    """Return whether an address never leaves this machine."""
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


def serve_store(listener: socket.socket, address: StoreAddress) -> TCPStore:
    """Serve a store on `listener`; return this process's connection to it."""
    from torch._C._distributed_c10d import TCPStore

    bound = listener.getsockname()[0]
    host = "127.0.0.1" if bound == "0.0.0.0" else bound
    with silence_stderr():  # torch warns about addresses without a name, which are correct
        store = TCPStore(host, address.port, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=listener.detach())
    _initialize_server(store)
    return store


def _initialize_server(store: TCPStore) -> None:
    """Make a request of each kind that workers make first, so that the server's thread has set itself up before a worker is forked.

    A static object that this thread makes on a first request takes a lock of the C library, that of functions to call at exit. A worker
    forked in that moment has the lock taken for ever, and hangs when torch makes such an object in it.
    """
    # torch internals: the first `get` makes an object in the thread of the server (torch 2.13, glibc 2.36).
    # tests/launch/test_launch_store.py notices others. It can go when the server makes nothing late, or the C library resets the lock.
    key = "server"
    store.set(key, "")
    store.add(f"{key}/count", 1)
    store.get(key)
    store.wait([key], timedelta(seconds=60))
    store.check([key])
    store.compare_set(key, "", "")
    store.multi_get([key])
    store.delete_key(key)
    store.delete_key(f"{key}/count")


def connect_store(
    address: StoreAddress,
    *,
    patience: float,
    limit: float,
    check: Callable[[], None],
    log: Callable[[str], None] = lambda text: None,
    is_known: bool = False,
) -> TCPStore:
    """Return a client of the store at `address`, which may take up to `patience` seconds to appear.

    An open connection counts as lost after `limit` seconds of silence. `check` is called during the wait and may raise; `log` receives
    one message if the wait is long. `is_known` says that a launcher has told this address: it has talked to the store itself, so nobody
    has to find out whether it is one.
    """
    from torch._C._distributed_c10d import TCPStore

    from slipstream.launch.worker_processes import open_files

    wait_for_listener(address, patience, check, log)
    if not is_known:
        _check_is_store(address, patience)
    before = open_files()
    with silence_stderr():
        store = TCPStore(address.host, address.port, None, False, timedelta(seconds=limit), wait_for_workers=False)
    for file in open_files() - before:
        _set_keepalive(file.number, address.port, limit)
    return store


def _check_is_store(address: StoreAddress, patience: float) -> None:
    """Raise if what listens is not a store. A child tries it, because torch's client waits for an answer without a limit."""
    if sys.platform != "linux":
        return
    from slipstream.launch.worker_processes import WorkerProcesses

    answer = -1
    workers = WorkerProcesses()
    workers.fork(0, lambda: _probe_store(address, patience))
    deadline = time.monotonic() + patience
    while workers.running and time.monotonic() < deadline:
        workers.wait(deadline - time.monotonic())
        answer = next((end.exit_code for end in workers.poll()), answer)
    workers.stop(signum=signal.SIGKILL)
    if answer != 0:
        reply = f"no answer within {patience:.0f} s" if answer < 0 else "an answer in a different protocol"
        raise ConfigError(
            f"Something listens at {address.host}, port {address.port} (main_process_ip, main_process_port), but it is not a launcher.\n"
            f"Tried: a connection, and the handshake of torch's store; there was {reply}.\n"
            "Check the address and the port, and whether a proxy or another service answers there."
        )


def _probe_store(address: StoreAddress, patience: float) -> NoReturn:
    from torch._C._distributed_c10d import TCPStore

    try:
        with silence_stderr():
            TCPStore(address.host, address.port, None, False, timedelta(seconds=patience), wait_for_workers=False)
    except RuntimeError:
        os._exit(3)
    os._exit(0)


def wait_for_listener(address: StoreAddress, patience: float, check: Callable[[], None], log: Callable[[str], None]) -> None:
    """Return when something listens at `address`; raise a ConfigError with what was tried if nothing does in time."""
    start = time.monotonic()
    tries, noted = 0, False
    while True:
        tries += 1
        try:
            socket.create_connection((address.host, address.port), timeout=min(5.0, patience)).close()
            return
        except OSError as error:
            problem = _describe_os_error(error)
        check()
        waited = time.monotonic() - start
        if waited >= patience:
            raise ConfigError(_unreachable(address, problem, tries, waited))
        if waited > 3 and not noted:
            noted = True
            log(f"waiting for machine 0 at {address.host}, port {address.port} ({problem}); giving up after {patience:.0f} s")
        time.sleep(_PAUSE)


def _describe_os_error(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name has no address"
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def _unreachable(address: StoreAddress, problem: str, tries: int, waited: float) -> str:
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)})
        resolved = f"{address.host} is {', '.join(found)}" if found != [address.host] else f"address {address.host}"
    except OSError:
        resolved = f"{address.host} has no address here"
    return (
        f"Machine 0 cannot be reached at {address.host}, port {address.port} (main_process_ip, main_process_port).\n"
        f"Tried: {resolved}; {tries} connections in {waited:.0f} s; the last one: {problem}.\n"
        "Start the launcher on machine 0 too, check that both give the same address and port, and that no firewall is between them.\n"
        "To wait longer: --rdzv_conf timeout=300"
    )


def _set_keepalive(number: int, port: int, limit: float) -> None:
    """Set time limits on the connection that torch has just opened; it sets none, and some of its requests wait without one."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        if connection.getpeername()[1] != port:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        third = max(1, int(limit / 3))
        for name, value in (("TCP_KEEPIDLE", third), ("TCP_KEEPINTVL", third), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", int(limit * 1000))):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def silence_stderr() -> Iterator[None]:
    """Hide what torch's C++ code prints about a failed request (stack traces); the exception passes through."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def local_address_towards(host: str) -> str:
    """Return the address of this machine on the route to `host`; raise an OSError if there is none.

    >>> local_address_towards("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: the system only chooses a route
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Return the network interface over which `host` is reached, or None if that is unknown."""
    import psutil

    try:
        own = local_address_towards(host)
    except OSError:
        return None
    # machine 0 reaches itself over the route of the loopback interface, but with the address of the right one
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return name
    return None


_RESOLVER_VARIABLE = "RES_OPTIONS"


@contextlib.contextmanager
def short_name_lookups() -> Iterator[None]:
    """Limit each name lookup in the block to one second. No effect where the C library has no such setting.

    >>> with short_name_lookups():
    ...     pass
    """
    reload = getattr(ctypes.CDLL(None), "__res_init", None)
    if reload is None or _RESOLVER_VARIABLE in os.environ:  # not glibc, or the user has chosen
        yield
        return
    os.environ[_RESOLVER_VARIABLE] = "timeout:1 attempts:1"
    reload()
    try:
        yield
    finally:
        del os.environ[_RESOLVER_VARIABLE]
        reload()


ALARM_KEY = "alarm"
"""A counter that grows when every waiting rank must check the others (a rank ended, a rank gave up)."""

LOST_HOLDERS_KEY = "holds_items/lost"
"""A counter: processes of this attempt that were lost and whose items the others take over; see `holds_items_key`."""
FOLLOWED_LOSS_KEY = "holds_items/followed"
"""A counter: processes that failed because of such a loss."""


def attempt_prefix(run_id: str, attempt: int) -> str:
    """Return the key prefix of one attempt of one job."""
    return f"slipstream/{run_id}/{attempt}"


def exit_key(rank: int) -> str:
    """Return the key of the `ExitNotice` of a rank, below the prefix of the attempt; the agent writes it."""
    return f"exit/{rank}"


def holds_items_key(rank: int) -> str:
    """Return the key under which a rank writes "1" while it works on items that the others take over if it dies, and "0" afterwards.

    The agent reads it when a rank has died: the loss of a rank that had written "1" does not end the attempt for the others.
    """
    return f"holds_items/{rank}"


def signal_name(exit_code: int) -> str:
    """Return the name of the signal behind a negative exit code.

    >>> signal_name(-9), signal_name(-35)[:6]
    ('SIGKILL', 'signal')
    """
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


@dataclass(frozen=True)
class ExitNotice:
    """How a worker ended that the launcher had not stopped; the agent writes it as soon as it knows.

    >>> notice = ExitNotice(rank=1, host="node0", pid=4711, exit_code=-9, reason="killed")
    >>> ExitNotice.from_json(notice.to_json()) == notice
    True
    >>> str(notice)
    'rank 1 (host node0, pid 4711) was ended by SIGKILL: killed'
    """

    rank: int
    host: str
    pid: int
    exit_code: int | None
    """As in `subprocess`: negative is the number of the signal. None: its machine was lost."""
    reason: str = ""
    """The exception in one line, or what is known of the signal ("the kernel's out-of-memory killer")."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ExitNotice:
        return cls(**json.loads(text))

    @property
    def signal_name(self) -> str | None:
        """SIGKILL for -9; None for an ordinary exit."""
        return None if self.exit_code is None or self.exit_code >= 0 else signal_name(self.exit_code)

    def __str__(self) -> str:
        how = f"was ended by {self.signal_name}" if self.signal_name else f"ended with exit code {self.exit_code}"
        how = "was lost" if self.exit_code is None else how
        who = f"host {self.host}, pid {self.pid}" if self.pid else f"host {self.host}"
        return f"rank {self.rank} ({who}) {how}" + (f": {self.reason}" if self.reason else "")
