"""What tests of real launches share: fixtures that start one through the command line, and questions about processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slipstream.testing.rank_pool import GLOO_LINES

PATIENCE = 60.0
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Finished:
    code: int
    out: str
    err: str


class Running:
    """A launcher that is running, and what its workers have said about themselves."""

    def __init__(self, process: subprocess.Popen[str], notes: Path) -> None:
        self.process = process
        self._notes = notes

    def pids(self, count: int = 2, attempt: int = 0) -> dict[int, int]:
        """The process ids by rank, as soon as `count` workers of an attempt are up."""
        found: dict[int, int] = {}
        eventually(lambda: len(found := self._read(attempt)) >= count or self.process.poll() is not None)
        found = self._read(attempt)
        assert len(found) >= count, f"only {found} came up; the launcher says {self.process.poll()}"
        return found

    def _read(self, attempt: int) -> dict[int, int]:
        files = [path for path in self._notes.glob(f"up-{attempt}-*[0-9]") if path.read_text()]
        return {int(path.name.rsplit("-", 1)[1]): int(path.read_text()) for path in files}

    def finish(self) -> Finished:
        out, err = self.process.communicate(timeout=PATIENCE)
        return Finished(self.process.returncode, GLOO_LINES.sub("", out), err)


def eventually(what: Callable[[], bool], limit: float = PATIENCE) -> bool:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.01)
    return False


def free_port() -> str:
    """A port for a launcher that will listen in a while: not one of those that the system hands out to everybody who asks for any."""
    while True:
        port = 12000 + secrets.randbelow(18000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return str(port)


def gone(pid: int) -> bool:
    """Ended; whoever must reap it may not have done so yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


UP = """
import os
def up():
    note = f"{os.environ['NOTES']}/up-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
    with open(note + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(note + ".part", note)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts `slipstream launch ...` in a folder of its own; whatever is left of it is ended after the test."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "telling.py").write_text(UP)
    environment = {name: value for name, value in os.environ.items() if name not in RANKS}
    environment.update(OMP_NUM_THREADS="1", NOTES=str(tmp_path), SLIPSTREAM_HOME=str(tmp_path / "home"))

    def start(*words: str, prefix: tuple[str, ...] = (), **variables: str) -> Running:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "slipstream", "launch", *words],
            cwd=tmp_path,
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            start_new_session=True,
        )
        started.append(process)
        return Running(process, tmp_path)

    try:
        yield start
    finally:
        for process in started:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


@pytest.fixture
def launch(command: Callable[..., Running]) -> Callable[..., Finished]:
    """Runs `slipstream launch ...` to its end."""
    return lambda *words, **variables: command(*words, **variables).finish()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a script and returns its path."""

    def write(text: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write
