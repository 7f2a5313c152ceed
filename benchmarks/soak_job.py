"""The job that `soak_training.py` disturbs: its disk, its hosts, its launchers, and where its ranks are.

As root the job has a disk of its own that can be filled (a small filesystem in memory), a /dev/shm and a TMPDIR in which only its own files
are, and every other launch is on two hosts. Without root it runs on this machine as it is. Every process of the job carries a variable
by which it is found, also when it has lost its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from _soak_training_worker import STATUS
from figures import launch, quiet_environment

from slipstream.testing.hosts import Hosts, hosts_unavailable, two_hosts

RANKS = 4
DISK_MB = 48
LIMIT = 90.0
"""Seconds after which something that should have happened counts as missing."""
LEFT_SECONDS = 8.0
"""Seconds within which every process ends after its launcher: processes that load data look for their parent every five seconds."""
MARK = "SOAK_JOB"
TIMEOUT, HEARTBEAT = 20, 10
"""Seconds after which a rank gives up another one, and a launcher another machine."""


@dataclass(frozen=True)
class Status:
    """Where a rank is."""

    launch: int
    attempt: int
    pid: int
    step: int
    time: float


class JobEnded(Exception):
    """The job ended although it should have gone on."""


@dataclass
class Job:
    """One job, launched again and again until it is done."""

    folder: Path
    pace: float
    hosts: Hosts | None
    disk: Path
    """The filesystem of the project folder."""
    memory: Path
    """Where the job has its /dev/shm and its TMPDIR."""
    is_root: bool
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    launches: int = 0
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def project(self) -> Path:
        return self.disk / "project"

    @property
    def machines(self) -> int:
        """How many hosts this launch is on: one and two in turns."""
        return 2 if self.hosts is not None and self.launches % 2 == 0 else 1

    @property
    def output(self) -> Path:
        return self.folder / f"launch-{self.launches}.txt"

    def start(self) -> None:
        """Launch the job; it goes on where it was."""
        self.launches += 1
        words = (str(self.folder), str(self.project), str(self.pace))
        limits = ["--timeout", str(TIMEOUT), "--max_restarts", "100000"]
        if self.hosts is None or self.machines == 1:
            commands = [launch(RANKS, "_soak_training_worker.py", *words, options=limits)]
        else:
            meeting = ["--main_process_ip", self.hosts.addresses[0], "--main_process_port", str(20000 + self.launches)]
            limits += ["--num_machines", "2", *meeting, "--rdzv_conf", f"heartbeat={HEARTBEAT}"]
            machines = [[*limits, "--machine_rank", str(rank)] for rank in range(2)]
            commands = [
                [*self.hosts.prefix(rank), *launch(RANKS, "_soak_training_worker.py", *words, options=options)]
                for rank, options in enumerate(machines)
            ]
        variables = {MARK: self.mark, "SOAK_LAUNCH": str(self.launches), "TMPDIR": str(self.memory / "tmp")}
        variables["TORCH_FR_BUFFER_SIZE"] = "64"  # torch records its last 2,000 collectives: at one kilobyte each, this looks like growth
        with self.output.open("ab") as output:
            self.launchers = [
                subprocess.Popen([*self._own_memory(), *command], stdout=output, stderr=output, env=quiet_environment(**variables))
                for command in commands
            ]

    def _own_memory(self) -> list[str]:
        """Return the words that run a command with the job's own /dev/shm."""
        if not self.is_root:
            return []
        return ["unshare", "--mount", "sh", "-c", f'mount --bind {self.memory / "shm"} /dev/shm && exec "$@"', "sh"]

    def text(self, since: int = 0) -> str:
        """Return what the launchers have printed, from a byte on."""
        return self.output.read_bytes()[since:].decode(errors="replace")

    def statuses(self) -> list[Status]:
        """Return where the ranks of this launch are, as far as they have finished a step."""
        found = []
        for rank in range(RANKS):
            with contextlib.suppress(FileNotFoundError):
                content = (self.folder / f"status-{rank}").read_bytes()
                if len(content) == STATUS.size and (status := Status(*STATUS.unpack(content))).launch == self.launches:
                    found.append(status)
        return found

    def step(self) -> int:
        """Return the last step that every rank has finished in its present attempt."""
        found = self.statuses()
        return min(status.step for status in found) if len(found) == RANKS else 0

    def attempt(self) -> int:
        """Return the attempt that every rank has finished a step in; -1 while there is none."""
        found = self.statuses()
        return min(status.attempt for status in found) if len(found) == RANKS else -1

    def ended(self) -> bool:
        """Return whether a launcher has ended."""
        return any(launcher.poll() is not None for launcher in self.launchers)

    def wait(self, what: str, reached: Callable[[], bool], *, limit: float = LIMIT, may_end: bool = False) -> float:
        """Return the seconds until something is reached. Raise `JobEnded` if it is not, or if the job ends before."""
        began = time.monotonic()
        while not reached():
            if not may_end and self.ended():
                codes = [launcher.poll() for launcher in self.launchers]
                raise JobEnded(f"a launcher ended (exit codes {codes}) before {what}")
            if time.monotonic() > began + limit:
                raise JobEnded(f"not within {limit:.0f} s: {what}")
            time.sleep(0.01)
        return time.monotonic() - began

    def wait_for_step(self, *, after: int | None = None, attempt: int | None = None) -> float:
        """Return the seconds until every rank has finished another step, in another attempt than `attempt`."""
        before = self.step() if after is None else after
        if attempt is not None:
            return self.wait(f"a step of attempt {attempt + 1}", lambda: self.attempt() > attempt)
        return self.wait(f"step {before + 1}", lambda: self.step() > before)

    def processes(self) -> list[psutil.Process]:
        """Return every process of the job that runs, wherever it hangs in the tree."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def await_launchers(self, limit: float = LIMIT) -> None:
        """Wait until the launchers have ended; kill those that do not."""
        deadline = time.monotonic() + limit
        while not all(launcher.poll() is not None for launcher in self.launchers) and time.monotonic() < deadline:
            time.sleep(0.02)
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait(10)

    def await_end(self, limit: float = LIMIT) -> list[str]:
        """Wait until the job has ended, and return which processes are left, after they were ended."""
        self.await_launchers(limit)
        return self.end_processes(self.processes())

    def end_processes(self, processes: list[psutil.Process]) -> list[str]:
        """Wait until processes have ended, and return which did not, after they were killed."""
        deadline = time.monotonic() + LEFT_SECONDS
        while (left := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.05)
        names = [f"{process.pid} {' '.join(_command(process))[-60:]}" for process in left]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._reap()
        return names

    def _reap(self) -> None:
        """Reap the processes that were left to this one, which has adopted them."""
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if child.status() == psutil.STATUS_ZOMBIE and child.pid not in [launcher.pid for launcher in self.launchers]:
                    os.waitpid(child.pid, os.WNOHANG)

    def files_left(self) -> dict[str, int]:
        """Return how many files the job has in its TMPDIR and in its /dev/shm."""
        return {name: sum(len(files) for _, _, files in os.walk(self.memory / name)) for name in ("tmp", "shm")}

    def folders_left(self) -> int:
        return len(os.listdir(self.memory / "tmp"))

    def clear_left(self) -> None:
        """Remove what a launcher that was killed has left: nobody else can."""
        for path in (self.memory / "tmp").iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        for launcher in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                launcher.send_signal(signal.SIGTERM)
        self.await_end(20)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@contextlib.contextmanager
def make_job(folder: Path, pace: float) -> Iterator[Job]:
    """Make the disk, the hosts and the job, and take everything away at the end but the folder."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what has lost its parent comes to this process
    is_root = hosts_unavailable() is None
    disk, memory = folder / "disk", folder / "memory"
    for path in (disk, memory):
        path.mkdir(parents=True)
    with contextlib.ExitStack() as closing:
        if is_root:
            for path, size in ((disk, DISK_MB), (memory, 1024)):
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "soak", str(path)], check=True)
                closing.callback(subprocess.run, ["umount", "--lazy", str(path)], check=False)
        for name in ("tmp", "shm"):
            (memory / name).mkdir()
        hosts = closing.enter_context(two_hosts()) if is_root else None
        job = Job(folder, pace, hosts, disk, memory, is_root)
        closing.callback(job.close)
        yield job
