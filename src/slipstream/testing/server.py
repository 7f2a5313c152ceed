"""The interpreter from which the ranks of a pool are forked: a fresh process with torch and Slipstream imported once.

`RankPool` starts it as a process of its own, because forking a test process that has threads is not safe. It forks the ranks, serves one
loopback-only store per run, writes an `ExitNotice` for a rank that ended (as the launcher does, so that other ranks can name it) and
tells the test process. It ends with the test process, and its ranks end with it.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from slipstream.devices.table import named_family
from slipstream.errors import SlipstreamError
from slipstream.launch.store import ALARM_KEY, ExitNotice, attempt_prefix, exit_key, open_listener, serve_store
from slipstream.launch.worker_processes import die_with_parent
from slipstream.testing import environment, messages

__all__ = ["serve"]


def serve(control_descriptor: int, size: int, run_id: str, preload: Sequence[str], device: str | None) -> None:
    """Answer the pool's commands until it closes. A device that has to be loaded is loaded here, and started in the ranks only."""
    environment.replace({**environment.snapshot(), **environment.rank_variables(0, size, run_id=run_id, attempt=0, port=0)})
    for name in preload:
        importlib.import_module(name)
    server = _Server(control=socket.socket(fileno=control_descriptor), size=size, run_id=run_id)
    try:
        if device is not None:
            named_family(device).enable()
    except SlipstreamError as error:
        messages.send(server.control, {"kind": "ready", "problem": str(error)})
        return
    try:
        server.loop()
    finally:
        server.stop()


@dataclass
class _Server:
    control: socket.socket
    size: int
    run_id: str
    attempt: int = 0
    store: Any = None
    """The `TCPStore` of the current run."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process id to rank, of the ranks that live."""

    def loop(self) -> None:
        children, wakeup = socket.socketpair()
        for end in (children, wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(children, selectors.EVENT_READ)
            messages.send(self.control, {"kind": "ready", "problem": ""})
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                # Commands first: "begin" of the run in which a rank ended was sent before the rank could end.
                if self.control in ready and not self.handle_command():
                    return
                if children in ready:
                    children.recv(4096)
                    self.reap()

    def handle_command(self) -> bool:
        try:
            command, _ = messages.receive(self.control)
        except (EOFError, ConnectionError):
            return False
        getattr(self, f"on_{command.pop('kind')}")(**command)
        return True

    def on_start(self) -> None:
        """Fork every rank, and send their channels and outputs to the test process."""
        self.stop()
        gc.collect()
        gc.freeze()  # so that a collection in a rank examines only its own objects, and copies no shared page
        channels = [socket.socketpair() for _ in range(self.size)]
        outputs = [_output() for _ in range(self.size)]
        server = os.getpid()
        for rank in range(self.size):
            pid = os.fork()
            if pid == 0:
                self.run_rank(rank, server, channels, outputs[rank].fileno())
            self.pids[pid] = rank
        messages.send(self.control, {"kind": "started", "pids": {rank: pid for pid, rank in self.pids.items()}})
        socket.send_fds(self.control, [b"!"], [*(mine.fileno() for mine, _ in channels), *(output.fileno() for output in outputs)])
        for mine, theirs in channels:
            mine.close()
            theirs.close()
        for output in outputs:
            output.close()

    def run_rank(self, rank: int, server: int, channels: list[tuple[socket.socket, socket.socket]], output: int) -> None:
        """Run a forked rank to its end; it never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(server)
            self.control.close()
            for other, (mine, theirs) in enumerate(channels):
                mine.close()
                if other != rank:
                    theirs.close()
            from slipstream.testing import worker

            worker.serve_runs(
                worker.RankProcess(rank, self.size, self.run_id, channels[rank][1], output, environment.snapshot(), os.getcwd())
            )
            code = 0
        finally:
            if code:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def on_begin(self, attempt: int) -> None:
        """Open a fresh store for one run: the keys of `init_process_group` would otherwise meet those of the run before."""
        self.store, self.attempt = None, attempt
        listener, address = open_listener("127.0.0.1", None)
        self.store = serve_store(listener, address)
        messages.send(self.control, {"kind": "begun", "port": address.port})

    def on_failed(self, rank: int, reason: str) -> None:
        """The function of a rank raised: under the launcher its process would have ended now."""
        pid = next((pid for pid, of in self.pids.items() if of == rank), 0)
        self.publish_exit(rank, pid, 1, reason)

    def on_stacks(self, ranks: list[int]) -> None:
        from slipstream.testing.worker import STACKS_SIGNAL

        for pid, rank in self.pids.items():
            if rank in ranks:
                os.kill(pid, STACKS_SIGNAL)
        messages.send(self.control, {"kind": "asked"})

    def on_stop(self) -> None:
        self.stop()
        messages.send(self.control, {"kind": "stopped"})

    def reap(self) -> None:
        for pid in list(self.pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank, code = self.pids.pop(pid), os.waitstatus_to_exitcode(status)
                notice = self.publish_exit(rank, pid, code, "")
                messages.send(self.control, {"kind": "ended", "notice": notice.to_json()})

    def publish_exit(self, rank: int, pid: int, exit_code: int, reason: str) -> ExitNotice:
        notice = ExitNotice(rank=rank, host=socket.gethostname(), pid=pid, exit_code=exit_code, reason=reason)
        if self.store is not None:
            prefix = attempt_prefix(self.run_id, self.attempt)
            self.store.set(f"{prefix}/{exit_key(rank)}", notice.to_json())
            self.store.add(f"{prefix}/{ALARM_KEY}", 1)
        return notice

    def stop(self) -> None:
        """End every living rank, also a stopped one, and close the store, so that the next fork finds no thread of it."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        self.pids.clear()
        self.store = None


def _output() -> IO[bytes]:
    """Return a file for the output of a rank; the test process reads and empties it."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by the caller, once the ranks have it)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
