"""A pool of gloo ranks on this machine that is kept between runs, so that a distributed test costs milliseconds.

    with ranks(2) as pool:
        assert pool.run(lambda: PartialState().process_index) == [0, 1]

`ranks(2, device="cpu")` names the device family that the ranks compute on; a stand-in accelerator is loaded before they are forked.
Every run starts fresh (own store, own attempt, closed runtime, same seeds and variables). A rank that dies or does not finish is reported
with its signal or its stacks, and the next run has a full pool again; anything that a rank leaves behind fails the run. Nothing listens
outside 127.0.0.1, and the calling process, which may have threads and devices, is never forked: one fresh interpreter
(`testing/server.py`) imports torch and forks the ranks (`testing/worker.py`). `PoolServer` is the connection to it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from slipstream.config.handlers import check_count
from slipstream.config.schema import OPTIONS
from slipstream.devices.table import CPU, named_family
from slipstream.errors import SlipstreamError, StateError
from slipstream.launch.store import ExitNotice
from slipstream.testing import messages

__all__ = ["GLOO_LINES", "DeviceUnavailable", "Outcome", "PoolServer", "RankFailure", "RankPool", "rank_failure", "ranks"]


_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from slipstream.testing.server import serve
serve(*json.loads(sys.argv[2]))
"""
_START_SECONDS = 240.0  # a cold import of torch on a busy machine
_BUILD_SECONDS = 240.0  # and the build of a device
GLOO_LINES = re.compile(r"^(?:\[Gloo\] Rank |.* connected peer ranks is : ).*\n", re.MULTILINE)
"""What gloo prints in torch 2.8 whenever a group is made, and the ends of such lines where processes print at once; later ones do not."""


class DeviceUnavailable(StateError):
    """The device that a pool was asked for cannot be used here; the message says why."""


@dataclass
class PoolServer:
    """The connection to one server and its ranks."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    log: IO[bytes]
    """The output of the server itself, for the error if it could not start."""
    size: int
    channels: list[socket.socket] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    deaths: dict[int, ExitNotice] = field(default_factory=dict)

    @classmethod
    def start(cls, *, size: int, preload: Sequence[str], device: str | None = None) -> PoolServer:
        """Start the interpreter that ranks are forked from; it inherits our variables and import path."""
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        arguments = [theirs.fileno(), size, f"pool-{uuid.uuid4().hex[:12]}", list(preload), device]
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # control-C reaches the test process alone, which then closes the pool
        )
        theirs.close()
        server = cls(process=process, control=ours, log=log, size=size)
        try:
            ours.settimeout(_START_SECONDS + (_BUILD_SECONDS if device else 0.0))
            problem = server._answer("ready")["problem"]
            if problem:
                raise DeviceUnavailable(problem)
        except BaseException:
            server.close()
            raise
        return server

    def fork(self) -> None:
        """Fork a full set of fresh ranks; end the present ones."""
        self._drop_ranks()
        pids = self.request("start", "started")["pids"]
        _, descriptors, _, _ = socket.recv_fds(self.control, 1, 2 * self.size)
        self.pids = [pids[str(rank)] for rank in range(self.size)]
        self.channels = [socket.socket(fileno=descriptor) for descriptor in descriptors[: self.size]]
        self.outputs = list(descriptors[self.size :])

    def request(self, kind: str, answer: str, **values: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.send(kind, **values)
        return self._answer(answer)

    def send(self, kind: str, **values: Any) -> None:
        """Send a command that has no answer."""
        try:
            messages.send(self.control, {"kind": kind, **values})
        except OSError as error:
            raise self._gone() from error

    def receive(self) -> dict[str, Any]:
        """Return the next message of the server; the end of a rank is added to `deaths`."""
        try:
            message, _ = messages.receive(self.control)
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if message["kind"] == "ended":
            notice = ExitNotice.from_json(message["notice"])
            self.deaths[notice.rank] = notice
        return message

    def printed(self, rank: int) -> str:
        """Return what a rank has printed since the last call, on any torch: without what gloo says about its connections."""
        size = os.fstat(self.outputs[rank]).st_size
        text = os.pread(self.outputs[rank], size, 0).decode(errors="replace")
        os.ftruncate(self.outputs[rank], 0)
        return GLOO_LINES.sub("", text)

    def close(self) -> None:
        """End the server, which ends its ranks."""
        self._drop_ranks()
        self.control.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def _answer(self, kind: str) -> dict[str, Any]:
        while (message := self.receive())["kind"] != kind:
            pass
        return message

    def _drop_ranks(self) -> None:
        for channel in self.channels:
            channel.close()
        for output in self.outputs:
            os.close(output)
        self.channels, self.outputs, self.pids, self.deaths = [], [], [], {}

    def _gone(self) -> StateError:
        self.log.seek(0)
        text = self.log.read().decode(errors="replace").strip()
        return StateError(f"the interpreter that the ranks are forked from is gone{': ' if text else ''}{text}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one rank.

    >>> Outcome(rank=0, value=3).failed, Outcome(rank=1, error=ValueError("no")).summary
    (False, 'ValueError: no')
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    """What the function raised; our `TimeoutError` if the rank did not finish (then `stuck` is true)."""
    exit: ExitNotice | None = None
    """How the process ended, if it did."""
    traceback: str = ""
    """The traceback as text; of a stuck rank, the stacks of its threads if known."""
    output: str = ""
    """What the rank printed, to either stream."""
    stuck: bool = False
    when: float = float("inf")
    """Order in time among the ranks of one run."""

    @property
    def failed(self) -> bool:
        """True unless the function returned."""
        return self.error is not None or self.exit is not None

    @property
    def summary(self) -> str:
        """One line: what happened."""
        if self.exit is not None:
            return str(self.exit)
        if self.error is not None:
            return f"{type(self.error).__qualname__}: {self.error}"
        return "returned"


class RankFailure(SlipstreamError, AssertionError):
    """A run of the pool failed; `outcomes` has every rank's part, and the first rank's exception is the cause.

    >>> error = rank_failure("check", [Outcome(rank=0, value=1), Outcome(rank=1, error=ValueError("no"), traceback="ValueError: no")])
    >>> print(error)
    1 of 2 ranks failed in check
      rank 0: returned
      rank 1: ValueError: no
    rank 1 failed first:
    ValueError: no
    """

    def __init__(self, message: str, outcomes: Sequence[Outcome] = ()) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


def rank_failure(name: str, outcomes: Sequence[Outcome], left: Sequence[str] = ()) -> RankFailure:
    """Return the exception for a run in which a rank failed or left something behind (`left`, one line each)."""
    failed = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: (outcome.when, outcome.rank))
    lines = [f"{len(failed)} of {len(outcomes)} ranks failed in {name}" if failed else f"every rank returned from {name}, but not clean"]
    lines += [f"  rank {outcome.rank}: {outcome.summary}" for outcome in outcomes] if failed else []
    lines += [f"  {line}" for line in left]
    if failed:
        first = failed[0]
        lines += [f"rank {first.rank} failed first:", (first.traceback or first.summary).rstrip()]
        lines += [f"rank {outcome.rank} printed:\n{outcome.output.rstrip()}" for outcome in outcomes if outcome.output.strip()]
    error = RankFailure("\n".join(lines), outcomes)
    error.__cause__ = failed[0].error if failed else None
    return error


_TORCH = ("torch", "torch.distributed", "torch._dynamo")
_PRELOAD = (
    *_TORCH,
    "cloudpickle",
    "psutil",
    "slipstream.accelerator.accelerator",
    "slipstream.inference.pipeline",
    "slipstream.testing.worker",
)
"""`torch._dynamo` is what the first optimizer and the first replica import. The rest each rank imports by itself, after every fork."""
_CLEANING_SECONDS = 20.0
_STACKS_SECONDS = 0.5
_DEAD_OR_STUCK = (EOFError, ConnectionError, TimeoutError)  # what a channel raises then; `_gather` finds out which of the two it is
_OWN_FIRST_FRAME = f'\n  File "{Path(__file__).with_name("worker.py")}"'

Result = TypeVar("Result")


def ranks(size: int, device: str | None = None) -> RankPool:
    """Return a pool of `size` ranks: use it with `with`, or `close()` it. Nothing starts before the first run.

    `device` is the device family that the ranks compute on, as the option `device` names it; without it, the options decide.

    >>> with ranks(2) as pool:
    ...     results = pool.run(lambda word: word * 2, "ha")
    ...     outcomes = pool.outcomes(lambda: 1 / 0)
    >>> results
    ['haha', 'haha']
    >>> [outcome.summary for outcome in outcomes]
    ['ZeroDivisionError: division by zero', 'ZeroDivisionError: division by zero']
    """
    return RankPool(size, device)


@dataclass
class _PoolProcesses:
    """The server and its ranks; pools that differ only in variables share them."""

    server: PoolServer | None = None
    attempt: int = 0
    complete: bool = False


class RankPool:
    """The ranks of one test session; see `ranks`. Not for several threads at once. `share` is a pool whose processes are used."""

    def __init__(self, size: int, device: str | None = None, *, share: RankPool | None = None) -> None:
        check_count(size, f"ranks({size!r}): a pool has at least one rank; write ranks(2)")
        if device is not None:
            named_family(device, f"ranks({size}, device={device!r})")
        self.size = size
        self.device = device
        self._processes: _PoolProcesses = _PoolProcesses() if share is None else share._processes

    def run(
        self,
        function: Callable[..., Result],
        /,
        *args: Any,
        timeout: float = 30.0,
        environ: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Result]:
        """Call `function(*args, **kwargs)` on every rank and return the results by rank.

        Raises `RankFailure` if a rank raises, dies or does not finish within `timeout` seconds. `environ` adds variables for this run.
        """
        __tracebackhide__ = True
        outcomes = self.outcomes(function, *args, timeout=timeout, environ=environ, **kwargs)
        if any(outcome.failed for outcome in outcomes):
            raise rank_failure(_name(function), outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        timeout: float = 30.0,
        patience: float = math.inf,
        environ: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Run a function that may fail; return every rank's value, exception or exit, by rank.

        If a rank is expected to be stuck, `patience` ends the run that many seconds after the last of the others has finished.
        """
        __tracebackhide__ = True
        body = messages.pack(function, args, kwargs)
        try:
            outcomes, left = self._run(body, timeout, patience, {**self._device_variables(), **(environ or {})})
        except BaseException:
            self.close()  # interrupted during an exchange (Ctrl-C, a time limit of pytest): start again next time
            raise
        for outcome in outcomes:
            sys.stdout.write("".join(f"[rank {outcome.rank}] {line}\n" for line in outcome.output.splitlines()))
        if left:
            raise rank_failure(_name(function), outcomes, left)
        return outcomes

    def _run(self, body: bytes, timeout: float, patience: float, environ: dict[str, str]) -> tuple[list[Outcome], list[str]]:
        server, port = self._begin()
        run = _Run(server, deadline=time.monotonic() + timeout, seconds=timeout, patience=patience)
        run.send({"attempt": self._processes.attempt, "port": port, "environ": environ}, body)
        run.collect()
        left = run.clean_up()
        outcomes = [run.outcome(rank) for rank in range(self.size)]
        failed_on_device = self.device not in (None, CPU.type) and any(outcome.failed for outcome in outcomes)
        if run.lost or left or failed_on_device:  # work that was queued on a device may still fail, in the next run
            self._processes.complete = False
            server.request("stop", "stopped")  # now, not at the next run: a stuck rank may be using a core
        return outcomes, left

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks, by rank (starts them if need be)."""
        return list(self._ready().pids)

    @property
    def server_pid(self) -> int | None:
        """The process id of the interpreter that ranks are forked from, if it runs."""
        return self._processes.server.process.pid if self._processes.server is not None else None

    def start(self) -> None:
        """Start the ranks, which the first run otherwise does; raise `DeviceUnavailable` if their device cannot be used here."""
        self._ready()

    def close(self) -> None:
        """End the ranks and their server. A closed pool starts again at its next run."""
        processes = self._processes
        if processes.server is not None:
            server, processes.server, processes.complete = processes.server, None, False
            server.close()

    def _device_variables(self) -> dict[str, str]:
        return {} if self.device is None else {str(OPTIONS["device"].variable): self.device}

    def _begin(self) -> tuple[PoolServer, int]:
        """Return a complete pool, and the port of this run's store."""
        while True:
            server = self._ready()
            self._processes.attempt += 1
            port: int = server.request("begin", "begun", attempt=self._processes.attempt)["port"]
            if not server.deaths:
                return server, port
            self._processes.complete = False  # a rank ended between two runs, which is not an outcome of a run

    def _ready(self) -> PoolServer:
        processes = self._processes
        if processes.server is not None and processes.server.process.poll() is not None:
            self.close()
        if processes.server is None:
            processes.server = PoolServer.start(size=self.size, preload=_preload(), device=self.device)
        if not processes.complete:
            processes.server.fork()
            processes.complete = True
        return processes.server

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass
class _Run:
    """One function on every rank: send it, collect the replies, clean up."""

    server: PoolServer
    deadline: float
    seconds: float
    patience: float = math.inf
    """Seconds from the reply of one rank to that of the next, at most."""
    replies: dict[int, tuple[dict[str, Any], bytes]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    printed: dict[int, str] = field(default_factory=dict)
    """The output of a stuck rank before its stacks were requested."""

    @property
    def lost(self) -> set[int]:
        """Ranks that the pool can no longer use."""
        return self.stuck | self.server.deaths.keys()

    def send(self, header: dict[str, Any], body: bytes) -> None:
        for channel in self.server.channels:
            channel.settimeout(self.seconds)
            with contextlib.suppress(*_DEAD_OR_STUCK):
                messages.send(channel, header, body)

    def collect(self) -> None:
        """Wait for the reply or exit of every rank, until the deadline; ranks that still wait learn of a failure."""
        self.stuck = self._gather(self.replies, self.deadline, self.patience)
        if self.stuck:
            self.printed = {rank: self.server.printed(rank) for rank in self.stuck}
            self.server.request("stacks", "asked", ranks=sorted(self.stuck))
            time.sleep(_STACKS_SECONDS)

    def clean_up(self) -> list[str]:
        """Let the ranks close what the run opened; return one line for everything left. Lost ranks are replaced instead."""
        if self.lost:
            return []
        for channel in self.server.channels:
            with contextlib.suppress(*_DEAD_OR_STUCK):
                messages.send(channel, {"kind": "reset"})
        clean: dict[int, tuple[dict[str, Any], bytes]] = {}
        silent = self._gather(clean, time.monotonic() + _CLEANING_SECONDS)
        lines = [f"rank {rank} did not finish closing its runtime within {_CLEANING_SECONDS:.0f} s" for rank in sorted(silent)]
        lines += [f"rank {notice.rank} ended while it closed its runtime: {notice}" for notice in self.server.deaths.values()]
        for rank, (header, _) in sorted(clean.items()):
            lines += [f"rank {rank} could not close its runtime:\n{header['close_error']}"] if header["close_error"] else []
            lines += [f"rank {rank} left behind: {thing}" for thing in header["left"]]
        return lines

    def outcome(self, rank: int) -> Outcome:
        header, body = self.replies.get(rank, ({}, b""))
        base = Outcome(rank=rank, output=self.server.printed(rank), traceback=header.get("text", ""), when=header.get("when", float("inf")))
        if rank in self.stuck:
            lag = "" if math.isinf(self.patience) else f", or {self.patience:g} s after the others"
            limit = TimeoutError(f"rank {rank} did not finish within {self.seconds:g} s{lag}")
            stacks = base.output.partition(_OWN_FIRST_FRAME)[0].rstrip() or "unknown: it did not answer"
            return replace(base, error=limit, traceback=f"{limit}; its threads were at\n{stacks}", output=self.printed[rank], stuck=True)
        if rank in self.server.deaths and not header:
            return replace(base, exit=self.server.deaths[rank], when=0.0)  # a death comes before the failures that it causes
        if header["kind"] == "error":
            return replace(base, error=messages.unpack(body))
        return replace(base, value=messages.unpack(body))

    def _gather(self, into: dict[int, tuple[dict[str, Any], bytes]], deadline: float, patience: float = math.inf) -> set[int]:
        """Receive one frame from each living rank; return the ranks that sent none in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.server.control, selectors.EVENT_READ)
            for rank, channel in enumerate(self.server.channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while pending := set(range(self.server.size)) - into.keys() - self.server.deaths.keys():
                ready = selector.select(deadline - time.monotonic()) if deadline > time.monotonic() else []
                if not ready:
                    return pending
                for key, _ in ready:
                    if key.data is None:
                        self.server.receive()
                    else:
                        selector.unregister(key.fileobj)
                        self._receive_from(key.data, into)
                        deadline = min(deadline, time.monotonic() + patience)
        return set()

    def _receive_from(self, rank: int, into: dict[int, tuple[dict[str, Any], bytes]]) -> None:
        """Receive one frame of one rank; nothing from a rank that has just died, which the server reports."""
        with contextlib.suppress(*_DEAD_OR_STUCK):
            into[rank] = messages.receive(self.server.channels[rank])
            if into[rank][0]["kind"] == "error":
                self.server.send("failed", rank=rank, reason=into[rank][0]["summary"])


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _preload() -> list[str]:
    """Return what the server imports before it forks; with pytest also its assertion rewriter, which rewritten asserts use."""
    return [*_PRELOAD, *(["_pytest.assertion.rewrite"] if "_pytest.assertion.rewrite" in sys.modules else [])]
