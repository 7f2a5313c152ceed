"""What tests of real launches share: a launcher that runs or has run, and questions about processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

PATIENCE = 60.0


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
        files = [path for path in self._notes.glob(f"up-{attempt}-*") if path.read_text()]
        return {int(path.name.rsplit("-", 1)[1]): int(path.read_text()) for path in files}

    def finish(self) -> Finished:
        out, err = self.process.communicate(timeout=PATIENCE)
        return Finished(self.process.returncode, out, err)


def eventually(what: Callable[[], bool], limit: float = PATIENCE) -> bool:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.01)
    return False


def gone(pid: int) -> bool:
    """Ended; whoever must reap it may not have done so yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
