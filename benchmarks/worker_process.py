"""A process that carries out commands one at a time, so that it keeps what it holds through all rounds of a measurement.

The script that measures has a `WorkerProcess`; the program of the process ends in `serve(make_worker)`. Commands and answers are lines of
JSON: `process.ask("save", folder=...)` calls `worker.save(folder=...)` and returns what it returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from figures import HERE


class Killed(Exception):
    """The process was killed: it needed more memory than its control group has."""


class WorkerProcess:
    """A running worker of this folder."""

    def __init__(self, script: str, *words: str, environment: dict[str, str] | None = None) -> None:
        self._order: dict[str, Any] = {}
        command = [sys.executable, str(HERE / script), *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self._answer()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, do: str, **values: Any) -> Any:
        """Send a command and return the answer."""
        assert self._process.stdin is not None
        self._order = {"do": do, **values}
        self._process.stdin.write(json.dumps(self._order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            if self._process.wait() == -signal.SIGKILL:
                raise Killed
            raise SystemExit(f"a worker ended with exit code {self._process.returncode} at {self._order}"[:200])
        return json.loads(line)


def serve(make: Callable[[], object]) -> None:
    """Be the process: make a worker, and call its methods until there are no more commands."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not get between the answers
    worker = make()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(worker, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers, flush=True)
