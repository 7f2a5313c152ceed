"""The test process's end of one server: starts it, gives it commands, holds the channels of its ranks, and remembers who died."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from slipstream.errors import StateError
from slipstream.launch.contract import ExitNotice
from slipstream.testing import wire

__all__ = ["Link"]

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from slipstream.testing.server import serve
serve(*json.loads(sys.argv[2]))
"""
_START_SECONDS = 240.0  # a cold import of torch on a busy machine


@dataclass
class Link:
    """One server and its ranks."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    log: IO[bytes]
    """What the server itself printed: of interest only if it could not start."""
    size: int
    channels: list[socket.socket] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    deaths: dict[int, ExitNotice] = field(default_factory=dict)

    @classmethod
    def start(cls, *, size: int, preload: Sequence[str]) -> Link:
        """Start the interpreter that ranks are forked from; it inherits our variables and import path."""
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        arguments = [theirs.fileno(), size, f"pool-{uuid.uuid4().hex[:12]}", list(preload)]
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # control-C reaches the test process alone, which then closes the pool
        )
        theirs.close()
        link = cls(process=process, control=ours, log=log, size=size)
        try:
            ours.settimeout(_START_SECONDS)
            link._answer("ready")
        except BaseException:
            link.close()
            raise
        return link

    def fork(self) -> None:
        """A full set of fresh ranks; those that were there are ended."""
        self._drop_ranks()
        pids = self.ask("start", "started")["pids"]
        _, descriptors, _, _ = socket.recv_fds(self.control, 1, 2 * self.size)
        self.pids = [pids[str(rank)] for rank in range(self.size)]
        self.channels = [socket.socket(fileno=descriptor) for descriptor in descriptors[: self.size]]
        self.outputs = list(descriptors[self.size :])

    def ask(self, kind: str, answer: str, **values: Any) -> dict[str, Any]:
        """A command and its answer."""
        self.tell(kind, **values)
        return self._answer(answer)

    def tell(self, kind: str, **values: Any) -> None:
        """A command that has no answer."""
        try:
            wire.send(self.control, {"kind": kind, **values})
        except OSError as error:
            raise self._gone() from error

    def hear(self) -> dict[str, Any]:
        """The next message of the server; the end of a rank is remembered in `deaths` as it passes."""
        try:
            message, _ = wire.receive(self.control)
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if message["kind"] == "ended":
            notice = ExitNotice.from_json(message["notice"])
            self.deaths[notice.rank] = notice
        return message

    def printed(self, rank: int) -> str:
        """What a rank has printed since the last call."""
        size = os.fstat(self.outputs[rank]).st_size
        text = os.pread(self.outputs[rank], size, 0).decode(errors="replace")
        os.ftruncate(self.outputs[rank], 0)
        return text

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
        while (message := self.hear())["kind"] != kind:
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
