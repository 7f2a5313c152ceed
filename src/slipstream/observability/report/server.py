"""A small HTTP server that shows runs in progress.

It sends the page, views of runs, and updates as server-sent events.

    GET /                      the page
    GET /api/runs              the runs: name, project, state, started, ended
    GET /api/view?run=NAME     what the page shows of one; &points= and &low=, &high= (steps), &name= (again for each series), and
                               &only=series for the curves without the rest
    GET /api/events            `update`: what is new in a run; `runs`: the list, when a run appears or disappears
    GET /media/RUN/NAME        an image

It only reads. It answers GET and HEAD, by default on the loopback interface, to requests whose Host header names this machine (against
DNS rebinding), and refuses pages of other origins. The only names in a request are those of runs, which are looked up, and of images,
which are opened inside their run directory. Connections, queues and timeouts are limited; `close` ends all threads.
"""

from __future__ import annotations

import errno
import gzip
import ipaddress
import json
import os
import socket
import socketserver
import sys
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import isfinite
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs, unquote, urlsplit

from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.paths import open_inside
from slipstream.observability.report.page import IMAGE_TYPES, content_security_policy, render_page
from slipstream.observability.report.watcher import RunWatcher, encode_event

__all__ = ["DEFAULT_PORT", "ReportServer", "is_loopback"]

DEFAULT_PORT: Final = 8377
_PORTS_TRIED: Final = 50
_MAX_CONNECTIONS: Final = 128
_MAX_REFUSED: Final = 32
"""How many connections beyond the limit get an answer that says so; others are closed at once."""
_MAX_POINTS: Final = 20_000
_HEARTBEAT: Final = 15.0
_TIMEOUT: Final = 30.0
_REFUSED_TIMEOUT: Final = 2.0
_GZIP_FROM: Final = 1 << 15
_CHUNK: Final = 1 << 18

_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)
_STREAM: Final = "text/event-stream; charset=utf-8"
_DENY_ALL: Final = "default-src 'none'; frame-ancestors 'none'"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("box.example")
    (True, True, True, False, False)
    """
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


class ReportServer(ThreadingHTTPServer):
    """The server of some runs: `ReportServer(places)`, then `serve()` until `close()` or Ctrl-C.

    `port=None` is the usual port, or a free one if that is taken; `port=0` is any free one. `url` says which it is.
    """

    daemon_threads = False  # `close` ends and joins them
    block_on_close = True
    request_queue_size = 64

    def __init__(
        self, places: Sequence[str | os.PathLike[str]], *, host: str = "127.0.0.1", port: int | None = None, interval: float = 0.5
    ) -> None:
        self.watch = RunWatcher(places, interval=interval, wait=True)
        self.host = host
        self.names = frozenset({host.lower(), "localhost", *(() if is_loopback(host) else (socket.gethostname().lower(),))})
        """Names of this machine that a Host header may have."""
        self._connections: set[socket.socket] = set()
        self._refused: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._closed = False
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._bind(host, port)

    def _bind(self, host: str, port: int | None) -> None:
        for wanted in (DEFAULT_PORT, 0) if port is None else (port,):
            try:
                super().__init__((host, wanted), _RequestHandler)
            except OSError as error:
                if port is None and wanted and error.errno == errno.EADDRINUSE:
                    continue
                raise ConfigError(_describe_bind_error(host, wanted, error)) from error
            except OverflowError as error:
                raise ConfigError(f"There is no port {wanted}: ports go from 1 to 65535, and --port 0 takes any that is free.") from error
            return

    def server_bind(self) -> None:
        """Bind without asking a name server what this machine is called."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where the page is."""
        everywhere = _address(self.host)
        shown = "127.0.0.1" if everywhere is not None and everywhere.is_unspecified else self.host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.server_port}/"

    # -- beginning and end ----------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer until `close` is called in another thread, or until Ctrl-C; everything has ended when this returns."""
        self.watch.start()
        try:
            self.serve_forever(poll_interval=0.1)
        finally:
            self._end()

    def close(self) -> None:
        """End `serve`, from another thread."""
        self.shutdown()

    def _end(self) -> None:
        with self._guard:
            self._closed = True
            connections = list(self._connections)
        self.watch.stop()
        for connection in connections:  # wakes up whoever waits for the next request of a client, or for a client that does not read
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has gone already
                continue
        self.server_close()

    # -- connections ----------------------------------------------------------------------------------------------

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Limit the number of connections: some of those beyond it get an answer, others are closed at once."""
        with self._guard:
            if self._closed or len(self._refused) >= _MAX_REFUSED:
                return False
            if len(self._connections) - len(self._refused) >= _MAX_CONNECTIONS:
                self._refused.add(request)
            self._connections.add(request)
            return True

    def is_refused(self, request: Any) -> bool:
        """Return whether a connection is beyond the limit."""
        with self._guard:
            return request in self._refused

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection and close it."""
        with self._guard:
            self._connections.discard(request)
            self._refused.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect during an answer; show any other error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _describe_bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        free = next((index for index in range(port + 1, min(port + _PORTS_TRIED, 65536)) if _is_free(host, index)), 0)
        return (
            f"Port {port} on {host} is in use by another program, perhaps by another `slipstream watch`.\n"
            f"Write --port {free or 0} instead"
            + (", or --port 0 for any port that is free." if free else ", which takes any port that is free.")
        )
    if error.errno == errno.EACCES:
        return f"Port {port} on {host} needs more rights than this user has: write a --port above 1023, or --port 0 for any that is free."
    return (
        f"{host} is not an address of this machine on which port {port} can be opened ({error.strerror or error}).\n"
        "Leave --host out for this machine alone, or write 0.0.0.0 for all of its addresses."
    )


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError:
        return False
    return True


class _RequestHandler(BaseHTTPRequestHandler):
    """One connection."""

    server: ReportServer
    protocol_version = "HTTP/1.1"
    server_version = "slipstream"
    sys_version = ""
    timeout = _TIMEOUT
    refused: bool
    disable_nagle_algorithm = True
    _routes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"/": "_page", "/api/runs": "_runs", "/api/view": "_view", "/api/events": "_events"}
    )

    def setup(self) -> None:
        self.refused = self.server.is_refused(self.request)
        super().setup()
        if self.refused:
            self.connection.settimeout(_REFUSED_TIMEOUT)

    def do_GET(self) -> None:  # noqa: N802
        if self.refused:
            self.close_connection = True
            self._missing("There are too many connections: close a page, or try again.", HTTPStatus.SERVICE_UNAVAILABLE)
            return
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body of a request is not read
        refused = self._objection()
        if refused is not None:
            self._send(HTTPStatus.FORBIDDEN, refused.encode(), "text/plain; charset=utf-8")
            return
        parts = urlsplit(self.path)
        try:
            query = parse_qs(parts.query, max_num_fields=2000)
        except ValueError:
            self._missing("This request has too many fields.", HTTPStatus.BAD_REQUEST)
            return
        route = self._routes.get(parts.path)
        if route is not None:
            getattr(self, route)(query)
        elif parts.path.startswith("/media/"):
            run, _, name = parts.path.removeprefix("/media/").partition("/")
            self._picture(unquote(run), f"media/{unquote(name)}")
        else:
            self._missing("There is no such page here.")

    do_HEAD = do_GET  # noqa: N815

    def _refuse_method(self) -> None:
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"This server is for reading.", "text/plain; charset=utf-8", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""

    # -- who may ask ----------------------------------------------------------------------------------------------

    def _objection(self) -> str | None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return "This server only answers to names of this machine; open it by the address that `slipstream watch` printed."
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and self.headers.get("Sec-Fetch-Mode") != "navigate":
            return "Pages of other origins are refused."
        return None

    def _is_ours(self, host: str) -> bool:
        name = host.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name in self.server.names:
            return True
        address = _address(name)
        return address is not None and (address.is_loopback or not is_loopback(self.server.host))

    # -- answers --------------------------------------------------------------------------------------------------

    def _page(self, query: dict[str, list[str]]) -> None:
        text = render_page([], live=True, title="Runs")
        allowed = f"{content_security_policy(live=True)}; frame-ancestors 'none'"
        self._send(HTTPStatus.OK, text.encode(), "text/html; charset=utf-8", allowed=allowed)

    def _runs(self, query: dict[str, list[str]]) -> None:
        data = json.dumps(self.server.watch.summaries(), separators=(",", ":"), allow_nan=False).encode()
        self._send(HTTPStatus.OK, data, "application/json")

    def _view(self, query: dict[str, list[str]]) -> None:
        run = self.server.watch.run(query.get("run", [""])[0])
        if run is None:
            self._missing("There is no run of this name here; /api/runs has the names.")
            return
        try:
            points = int(query.get("points", ["2000"])[0])
            low, high = (_parse_limit(query.get(name)) for name in ("low", "high"))
        except ValueError:
            self._missing("points is a whole number; low and high are numbers.", HTTPStatus.BAD_REQUEST)
            return
        only = query.get("only")
        if only not in (None, ["series"]):
            self._missing("The only supported value is only=series.", HTTPStatus.BAD_REQUEST)
            return
        chosen = {"names": query.get("name"), "points": max(1, min(points, _MAX_POINTS)), "low": low, "high": high}
        data = run.view(only_series=only is not None, **chosen)
        self._send(HTTPStatus.OK, data, "application/json")

    def _picture(self, key: str, name: str) -> None:
        run = self.server.watch.run(key)
        kind = IMAGE_TYPES.get(PurePosixPath(name).suffix.lower())
        if run is None or kind is None or not name.startswith("media/"):
            self._missing("There is no such picture here.")
            return
        try:
            file = os.fdopen(open_inside(run.path, name), "rb")
        except CheckpointError:
            self._missing("There is no such picture here.")
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            self._head(HTTPStatus.OK, kind, size)
            while self.command != "HEAD" and size > 0:
                data = file.read(min(_CHUNK, size))
                if not data:  # it was shortened: fewer bytes than said, which the client sees by the closed connection
                    self.close_connection = True
                    return
                self.wfile.write(data)
                size -= len(data)

    def _events(self, query: dict[str, list[str]]) -> None:
        self.close_connection = True
        if self.command == "HEAD":
            self._head(HTTPStatus.OK, _STREAM, None)
            return
        listener = self.server.watch.listen()
        if listener is None:
            self._missing("There are too many listeners.", HTTPStatus.SERVICE_UNAVAILABLE)
            return
        try:
            self._head(HTTPStatus.OK, _STREAM, None)
            self.wfile.write(b"retry: 1000\n\n" + encode_event("runs", self.server.watch.summaries()))
            while (found := listener.next(_HEARTBEAT)) is not None:
                self.wfile.write(found or b": still here\n\n")
        except OSError:  # the page was closed
            return
        finally:
            self.server.watch.forget(listener)

    # -- sending --------------------------------------------------------------------------------------------------

    def _missing(self, text: str, status: HTTPStatus = HTTPStatus.NOT_FOUND) -> None:
        self._send(status, text.encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, data: bytes, kind: str, more: Mapping[str, str] | None = None, allowed: str = _DENY_ALL) -> None:
        headers = dict(more or {})
        if len(data) >= _GZIP_FROM and "gzip" in self.headers.get("Accept-Encoding", ""):
            data = gzip.compress(data, compresslevel=1, mtime=0)
            headers["Content-Encoding"] = "gzip"
        self._head(status, kind, len(data), headers, allowed)
        if self.command != "HEAD":
            self.wfile.write(data)

    def _head(
        self, status: HTTPStatus, kind: str, size: int | None, more: Mapping[str, str] | None = None, allowed: str = _DENY_ALL
    ) -> None:
        self.send_response(status)
        length = {} if size is None else {"Content-Length": str(size)}
        ending = {"Connection": "close"} if self.close_connection else {}
        fixed = {"Content-Type": kind, "Content-Security-Policy": allowed, **_HEADERS}
        for name, value in {**fixed, **length, **ending, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()


def _parse_limit(given: list[str] | None) -> float | None:
    if not given:
        return None
    value = float(given[0])
    if not isfinite(value):
        raise ValueError(given[0])
    return value
