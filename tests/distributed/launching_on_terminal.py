"""A program on a terminal of its own, and what is to be seen there in the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

PATIENCE = 90


def on_terminal(
    words: Sequence[str], environment: Mapping[str, str] | None = None, cwd: Path | None = None, *, size: tuple[int, int] = (24, 100)
) -> str:
    """Everything that a program writes to a terminal of so many rows and columns; an error if it fails."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    try:
        process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=cwd, start_new_session=True)
        os.close(theirs)
        before = signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.alarm(PATIENCE)
        try:
            written = b"".join(iter(lambda: _read(ours), b""))
            code = process.wait()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    finally:
        os.close(ours)
    text = written.decode(errors="replace")
    assert code == 0, text
    return text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # nobody has the other end any more
        return b""


def screen(written: str) -> list[str]:
    """The lines that are left to see, as a terminal shows what was written."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|[\r\n]|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[A":
            row = max(0, row - 1)
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]
