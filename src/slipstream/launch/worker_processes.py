"""The worker processes of one attempt on this machine, and what the launcher needs from the operating system to control them.

`WorkerProcesses` holds one child per local rank, forked from this interpreter or executed as a program. Each child leads its own session,
so a signal reaches everything that it started and Ctrl-C reaches only the launcher. Exits are noticed at once, and `stop` returns when
every child has ended. `capture_signals` turns signals to the launcher into requests that are checked at safe points: the first asks to stop
the workers, the second to kill them. Parent-death signals, orphan adoption and out-of-memory counters are Linux only; elsewhere these
functions do nothing. Nothing here interprets an exit code, restarts a process, or imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from slipstream.launch.output import flush_streams

__all__ = [
    "KILL_AFTER", "OpenFile", "ProcessExit", "StopRequested", "StopRequests", "WorkerProcesses", "become_subreaper", "capture_signals",
    "die_with_parent", "occupy_standard_streams", "oom_kill_counts", "open_files", "terminate_descendants",
]


_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_IS_LINUX: Final = sys.platform == "linux"


_prctl: Any = ctypes.CDLL(None).prctl if _IS_LINUX else lambda option, value: 0
"""Sets an option of this process. Looked up at import, so that a child may call it between fork and exec."""


def become_subreaper() -> None:
    """Adopt every descendant whose parent ends, so that it can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent ends, or end it now if that has happened."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if _IS_LINUX and os.getppid() != parent:  # it has ended already
        os._exit(128 + signum)


class OpenFile(NamedTuple):
    """An open file of a process. A number alone does not identify it: once it is closed, the next file that is opened gets the number."""

    number: int
    inode: int


def open_files() -> frozenset[OpenFile]:
    """Return the files that this process has open; empty where the system does not list them."""
    found: set[OpenFile] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # raised for the file through which the list itself was read
                found.add(OpenFile(int(name), os.fstat(int(name)).st_ino))
    return frozenset(found)


def oom_kill_counts() -> dict[str, int]:
    """Return how often the out-of-memory killer has acted: "here" (this control group) and "host", if known.

    >>> all(count >= 0 for count in oom_kill_counts().values())
    True
    """
    found = {"here": _oom_kills(_group_counters()), "host": _oom_kills([Path("/proc/vmstat")])}
    return {scope: count for scope, count in found.items() if count is not None}


def _group_counters() -> list[Path]:
    """Return the files that may hold the counter of this control group: version 2, version 1, and both as a container sees them."""
    mount = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    candidates: list[Path] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            candidates += [mount / group.lstrip("/") / "memory.events", mount / "memory.events"]
        elif "memory" in controllers.split(","):
            candidates += [mount / "memory" / group.lstrip("/") / "memory.oom_control", mount / "memory" / "memory.oom_control"]
    return candidates


def _oom_kills(files: list[Path]) -> int | None:
    """Return the counter of the first file that has one."""
    for file in files:
        with contextlib.suppress(OSError):
            counts = dict(line.split(maxsplit=1) for line in file.read_text().splitlines() if " " in line)
            if counts.get("oom_kill", "").isdigit():
                return int(counts["oom_kill"])
    return None


_POLL_SECONDS: Final = 0.01
"""Seconds between polls on systems that cannot report the end of a child."""
KILL_AFTER: Final = 2.0
"""Seconds from the first signal to SIGKILL."""


@dataclass(frozen=True)
class ProcessExit:
    """How a child ended, and when the launcher saw it."""

    local_rank: int
    pid: int
    exit_code: int
    """As in `subprocess`: negative is the number of the signal."""
    seen: float


@dataclass
class _Child:
    pid: int
    watch: int | None
    """A file that becomes readable when the child ends (a pidfd)."""
    program: subprocess.Popen[bytes] | None = None

    def poll(self) -> int | None:
        if self.program is not None:
            return self.program.poll()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def send(self, signum: signal.Signals) -> None:
        """Signal the child and everything in its session; a child that was just forked may not lead one yet."""
        for deliver in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                deliver(self.pid, signum)
                return


class WorkerProcesses:
    """The children by local rank.

    >>> workers = WorkerProcesses()
    >>> workers.execute(0, [sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
    >>> workers.wait(20)
    >>> [end.exit_code for end in workers.poll()], workers.running
    ([3], [])
    """

    def __init__(self) -> None:
        self._children: dict[int, _Child] = {}
        self.pids: dict[int, int] = {}
        """The process id of every child, also of those that have ended."""

    @property
    def running(self) -> list[int]:
        """Local ranks whose process had not ended at the last `poll`."""
        return list(self._children)

    def fork(self, local_rank: int, body: Callable[[], None]) -> None:
        """Start a child that is a copy of this process and runs `body`, which must not return.

        Every signal is blocked in the child until `body` has set up its own handlers and unblocks them.
        """
        flush_streams()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():  # newer Pythons warn of any thread; the store's server never touches Python
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _run_child(body)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        self._add(local_rank, _Child(pid, _open_pidfd(pid)))

    def execute(
        self,
        local_rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        """Start a program as a child; `stdout` and `stderr` are open files, or None to share ours."""
        flush_streams()
        program = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - one prctl call, looked up beforehand
        )
        self._add(local_rank, _Child(program.pid, _open_pidfd(program.pid), program))

    def _add(self, local_rank: int, child: _Child) -> None:
        self._children[local_rank] = child
        self.pids[local_rank] = child.pid

    def wait(self, seconds: float, wake: int | None = None) -> None:
        """Return when a child has ended, when the pipe `wake` is readable (which is then emptied), or after `seconds`."""
        watches = [child.watch for child in self._children.values() if child.watch is not None]
        limit = seconds if len(watches) == len(self._children) else min(seconds, _POLL_SECONDS)
        ready, _, _ = select.select([*watches, *([] if wake is None else [wake])], [], [], max(0.0, limit))
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(wake, 64):
                    pass

    def poll(self) -> list[ProcessExit]:
        """Return the children that have ended since the last call; those killed by a signal come first."""
        ends: list[ProcessExit] = []
        for local_rank, child in list(self._children.items()):
            exit_code = child.poll()
            if exit_code is None:
                continue
            if child.watch is not None:
                os.close(child.watch)
            del self._children[local_rank]
            ends.append(ProcessExit(local_rank, child.pid, exit_code, time.time()))
        _reap_adopted(set(self.pids.values()))
        return sorted(ends, key=lambda end: end.exit_code >= 0)

    def send(self, signum: signal.Signals) -> None:
        """Signal every child that still runs, and what it started."""
        for child in self._children.values():
            child.send(signum)

    def stop(
        self,
        *,
        wait_before_signal: float = 0.0,
        signum: signal.Signals = signal.SIGTERM,
        wait_before_kill: float = KILL_AFTER,
        kill_now: Callable[[], bool] = lambda: False,
        wake: int | None = None,
    ) -> list[ProcessExit]:
        """Wait for the children to end, then send `signum`, then SIGKILL; return how they ended.

        The waits are in seconds. When `kill_now` returns True, SIGKILL is sent at once.
        """
        ends = self._await_all(wait_before_signal, kill_now, wake)
        if self._children:
            self.send(signum)
            ends += self._await_all(wait_before_kill, kill_now, wake)
        if self._children:
            self.send(signal.SIGKILL)
            ends += self._await_all(wait_before_kill, lambda: False, None)
        return ends

    def _await_all(self, seconds: float, kill_now: Callable[[], bool], wake: int | None) -> list[ProcessExit]:
        deadline = time.monotonic() + seconds
        ends = self.poll()
        while self._children and time.monotonic() < deadline and not kill_now():
            self.wait(min(0.2, deadline - time.monotonic()), wake)
            ends += self.poll()
        return ends


def _run_child(body: Callable[[], None]) -> None:
    """Run a forked child to its end. It must never return into the launcher's stack."""
    try:
        os.setsid()
        body()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        flush_streams()
        os._exit(1)


def occupy_standard_streams() -> None:
    """Open the null device for standard streams that are closed: else the next file gets the number, and what is printed goes there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _open_pidfd(pid: int) -> int | None:
    opener = getattr(os, "pidfd_open", None)  # Linux 5.3 and later
    try:
        return None if opener is None else int(opener(pid))
    except OSError:
        return None


def _reap_adopted(own: set[int]) -> None:
    """Reap adopted orphans that have ended."""
    while sys.platform == "linux":  # elsewhere there is no adoption
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in own:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, os.WNOHANG)


_END_BY_THEMSELVES: Final = 0.5
"""Seconds that descendants get to end: multiprocessing's resource tracker and fork server end when those they serve have ended."""


def terminate_descendants() -> list[str]:
    """End every remaining descendant of this process, adopted orphans included (`become_subreaper`); return the names of those ended."""
    if sys.platform == "linux":
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []  # no descendant is left, which is the usual case
    import psutil  # takes a while to import, and is hardly ever needed

    _, found = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=_END_BY_THEMSELVES)
    named: list[str] = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            named.append(f"{process.name()} (pid {process.pid})")
            process.terminate()
    _, alive = psutil.wait_procs(found, timeout=KILL_AFTER)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=KILL_AFTER)
    _reap_adopted(set())
    return named


_HANDLED: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name))


class StopRequested(Exception):
    """The launcher was asked to stop, by this signal."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class StopRequests:
    """The signals that the launcher has received."""

    def __init__(self) -> None:
        self.wake, self._waker = os.pipe()
        for end in (self.wake, self._waker):
            os.set_blocking(end, False)
        self.received: list[signal.Signals] = []
        self.previous: dict[signal.Signals, Any] = {}
        """The handlers from before; a worker restores them."""

    @property
    def stop(self) -> signal.Signals | None:
        """The first signal that asked to stop, or None."""
        return self.received[0] if self.received else None

    def check(self) -> None:
        """Raise `StopRequested` if a signal has arrived."""
        if self.received:
            raise StopRequested(self.received[0])

    def kill_requested(self) -> bool:
        """Return whether a second signal has arrived, which asks to kill the workers."""
        return len(self.received) > 1

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"!")


@contextlib.contextmanager
def capture_signals() -> Iterator[StopRequests]:
    """Collect signals instead of being interrupted by them, until the block ends."""
    requests = StopRequests()
    for signum in _HANDLED:
        before = signal.getsignal(signum)
        if before is signal.SIG_IGN and signum is signal.SIGHUP:
            continue
        requests.previous[signum] = before
        signal.signal(signum, requests._receive)
    try:
        yield requests
    finally:
        for signum, before in requests.previous.items():
            signal.signal(signum, before)
        os.close(requests.wake)
        os.close(requests._waker)
