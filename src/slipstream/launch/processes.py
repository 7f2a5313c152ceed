"""The processes of one attempt on this machine: started, watched, stopped.

`Crew` holds one child per local rank. A child is forked from this interpreter (`fork`) or is a program of its own (`execute`);
either way it leads a session of its own, so that a signal reaches everything it started and a Ctrl-C at the terminal reaches
the launcher alone. A child's end is noticed the moment it happens, and `stop` comes back with every child gone.

It never interprets an exit code, never restarts anything, and knows nothing of torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slipstream.launch.system import prepare_child

__all__ = ["KILL_AFTER", "Crew", "End", "end_descendants"]

_SLICE: Final = 0.01
"""Seconds of a wait where the system cannot report the end of a child."""
KILL_AFTER: Final = 2.0
"""Seconds from the polite signal to SIGKILL."""


@dataclass(frozen=True)
class End:
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


class Crew:
    """The children by local rank.

    >>> crew = Crew()
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
                _run_body(body)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        self._add(local_rank, _Child(pid, _watch(pid)))

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
        self._add(local_rank, _Child(program.pid, _watch(program.pid), program))

    def _add(self, local_rank: int, child: _Child) -> None:
        self._children[local_rank] = child
        self.pids[local_rank] = child.pid

    def wait(self, seconds: float, wake: int | None = None) -> None:
        """Return when a child has ended, when the file `wake` is readable, or after `seconds`."""
        watches = [child.watch for child in self._children.values() if child.watch is not None]
        limit = seconds if len(watches) == len(self._children) else min(seconds, _SLICE)
        select.select([*watches, *([] if wake is None else [wake])], [], [], max(0.0, limit))

    def poll(self) -> list[End]:
        """The children that have ended since the last look; a child killed by a signal comes before one that exited."""
        ends: list[End] = []
        for local_rank, child in list(self._children.items()):
            exit_code = child.poll()
            if exit_code is None:
                continue
            if child.watch is not None:
                os.close(child.watch)
            del self._children[local_rank]
            ends.append(End(local_rank, child.pid, exit_code, time.time()))
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
    ) -> list[End]:
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

    def _await_all(self, seconds: float, hurry: Callable[[], bool], wake: int | None) -> list[End]:
        deadline = time.monotonic() + seconds
        ends = self.poll()
        while self._children and time.monotonic() < deadline and not hurry():
            self.wait(min(0.2, deadline - time.monotonic()), wake)
            ends += self.poll()
        return ends


def _run_body(body: Callable[[], None]) -> None:
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


def _watch(pid: int) -> int | None:
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


def end_descendants(patience: float = KILL_AFTER) -> list[str]:
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
