"""The worker processes of one attempt on this machine, and what the launcher needs from the operating system to control them.

`WorkerProcesses` holds one child per local rank, forked from this interpreter or executed as a program. Each child leads its own session,
so a signal reaches everything that it started and Ctrl-C reaches only the launcher. Exits are noticed at once, and `stop` returns when
every child is gone. `capture_signals` turns signals to the launcher into requests that are checked at safe points: the first asks to stop
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
from pathlib import Path
from types import FrameType
from typing import Any, Final

__all__ = [
    "KILL_AFTER", "ProcessExit", "StopRequested", "StopRequests", "WorkerProcesses", "become_subreaper", "capture_signals",
    "die_with_parent", "oom_kill_counts", "open_descriptors", "prepare_child", "terminate_descendants",
]


_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_IS_LINUX: Final = sys.platform == "linux"


def _prctl() -> Callable[[int, int], int] | None:
    if not _IS_LINUX:
        return None
    library = ctypes.CDLL(None, use_errno=True)
    prctl = library.prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong]
    prctl.restype = ctypes.c_int
    return prctl


def become_subreaper() -> None:
    """From now on a descendant whose parent ends becomes a child of this process, so that it can still be found and ended."""
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent ends; ends it at once when that has already happened."""
    prctl = _prctl()
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def prepare_child(parent: int) -> Callable[[], None]:
    """What a new child runs between fork and exec to die with its parent; everything it needs is looked up beforehand."""
    prctl = _prctl()

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(128 + signal.SIGKILL)

    return prepare


def open_descriptors() -> frozenset[int]:
    """The numbers of the files that this process has open; empty where the system does not tell."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    return frozenset(int(name) for name in names if _is_open(int(name)))


def _is_open(number: int) -> bool:
    """False for the one through which the list itself was read."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def oom_kill_counts() -> dict[str, int]:
    """How often the kernel's out-of-memory killer has struck so far: "here" (this control group) and "host", where known.

    >>> all(count >= 0 for count in oom_kill_counts().values())
    True
    """
    found = {"here": _first_count(_group_counters(), "oom_kill"), "host": _first_count([Path("/proc/vmstat")], "oom_kill")}
    return {scope: count for scope, count in found.items() if count is not None}


def _group_counters() -> list[Path]:
    """Files that may hold this control group's counter: version 2, version 1, and both as a container sees them."""
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


def _first_count(files: list[Path], name: str) -> int | None:
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, count = line.partition(" ")
            if key == name and count.isdigit():
                return int(count)
    return None


_POLL_SECONDS: Final = 0.01
"""Seconds of a wait where the system cannot report the end of a child."""
KILL_AFTER: Final = 2.0
"""Seconds from the polite signal to SIGKILL."""


@dataclass(frozen=True)
class ProcessExit:
    """How a child ended, and when that was seen."""

    local_rank: int
    pid: int
    exit_code: int
    """As `subprocess` gives it: negative is the number of the signal."""
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
        """To the child and to everything in its session; a child that has just been forked may not lead one yet."""
        for deliver in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                deliver(self.pid, signum)
                return


class WorkerProcesses:
    """The children by local rank.

    >>> crew = WorkerProcesses()
    >>> crew.execute(0, [sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
    >>> crew.wait(20)
    >>> [end.exit_code for end in crew.poll()], crew.running
    ([3], [])
    """

    def __init__(self) -> None:
        self._children: dict[int, _Child] = {}
        self.pids: dict[int, int] = {}
        """The process id of every child that was started, also of those that have ended."""

    @property
    def running(self) -> list[int]:
        """Local ranks whose process has not ended, as far as `poll` has seen."""
        return list(self._children)

    def fork(self, local_rank: int, body: Callable[[], None]) -> None:
        """Start a child that is a copy of this process and runs `body`, which must not return.

        Every signal is blocked in the child until `body` has set up its own handlers and unblocks them.
        """
        _flush()
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
        """Start a child that is a program of its own; `stdout` and `stderr` are open files, or None to share ours."""
        _flush()
        program = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=prepare_child(os.getpid()),  # noqa: PLW1509 - one prctl call, looked up beforehand
        )
        self._add(local_rank, _Child(program.pid, _open_pidfd(program.pid), program))

    def _add(self, local_rank: int, child: _Child) -> None:
        self._children[local_rank] = child
        self.pids[local_rank] = child.pid

    def wait(self, seconds: float, wake: int | None = None) -> None:
        """Return when a child has ended, when the file `wake` is readable, or after `seconds`."""
        watches = [child.watch for child in self._children.values() if child.watch is not None]
        limit = seconds if len(watches) == len(self._children) else min(seconds, _POLL_SECONDS)
        select.select([*watches, *([] if wake is None else [wake])], [], [], max(0.0, limit))

    def poll(self) -> list[ProcessExit]:
        """The children that have ended since the last look; a child killed by a signal comes before one that exited."""
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
        """A signal to every child that still runs, and to what it started."""
        for child in self._children.values():
            child.send(signum)

    def stop(
        self,
        *,
        grace: float = 0.0,
        signum: signal.Signals = signal.SIGTERM,
        patience: float = KILL_AFTER,
        hurry: Callable[[], bool] = lambda: False,
        wake: int | None = None,
    ) -> list[ProcessExit]:
        """Give the children `grace` seconds to end by themselves, then `signum`, then after `patience` seconds SIGKILL.

        Returns how they ended. `hurry` is asked again and again; once it says yes, SIGKILL is sent at once.
        """
        ends = self._await_all(grace, hurry, wake)
        if self._children:
            self.send(signum)
            ends += self._await_all(patience, hurry, wake)
        if self._children:
            self.send(signal.SIGKILL)
            ends += self._await_all(patience, lambda: False, None)
        return ends

    def _await_all(self, seconds: float, hurry: Callable[[], bool], wake: int | None) -> list[ProcessExit]:
        deadline = time.monotonic() + seconds
        ends = self.poll()
        while self._children and time.monotonic() < deadline and not hurry():
            self.wait(min(0.2, deadline - time.monotonic()), wake)
            ends += self.poll()
        return ends


def _run_child(body: Callable[[], None]) -> None:
    """The whole life of a forked child. It must never return into the launcher's stack."""
    try:
        os.setsid()
        body()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        os._exit(1)


def _flush() -> None:
    """What is buffered now would otherwise be written by the child as well."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()


def _open_pidfd(pid: int) -> int | None:
    opener = getattr(os, "pidfd_open", None)  # Linux 5.3 and later
    try:
        return None if opener is None else int(opener(pid))
    except OSError:
        return None


def _reap_adopted(own: set[int]) -> None:
    """Let go of adopted orphans that have ended; they are nobody else's to wait for."""
    while sys.platform == "linux":  # elsewhere there is no adoption
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in own:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, os.WNOHANG)


def terminate_descendants(patience: float = KILL_AFTER) -> list[str]:
    """End every process that descends from this one and is still there; returns how each was called.

    Orphans are found because the launcher has adopted them (`system.adopt_orphans`).
    """
    if sys.platform == "linux":
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []  # nobody is left, which is the usual case
    import psutil  # takes a while to import, and is hardly ever needed

    found = psutil.Process().children(recursive=True)
    named: list[str] = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            named.append(f"{process.name()} (pid {process.pid})")
            process.terminate()
    _, alive = psutil.wait_procs(found, timeout=patience)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=patience)
    _reap_adopted(set())
    return named


_HANDLED: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name))


class StopRequested(Exception):
    """The launcher was asked to stop, by this signal."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class StopRequests:
    """What has been asked of the launcher so far."""

    def __init__(self) -> None:
        self.wake, self._waker = os.pipe()
        for end in (self.wake, self._waker):
            os.set_blocking(end, False)
        self.received: list[signal.Signals] = []
        self.previous: dict[signal.Signals, Any] = {}
        """What the signals did before; a worker goes back to it."""

    @property
    def stop(self) -> signal.Signals | None:
        """The first signal that asked to stop, or None."""
        return self.received[0] if self.received else None

    def check(self) -> None:
        """Raise `StopRequested` when the launcher was asked to stop."""
        if self.received:
            raise StopRequested(self.received[0])

    def hurry(self) -> bool:
        """Asked a second time: no more patience with the workers. Also empties the pipe that wakes the launcher."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 64):
                pass
        return len(self.received) > 1

    def _note(self, number: int, frame: FrameType | None) -> None:
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
        signal.signal(signum, requests._note)
    try:
        yield requests
    finally:
        for signum, before in requests.previous.items():
            signal.signal(signum, before)
        os.close(requests.wake)
        os.close(requests._waker)
