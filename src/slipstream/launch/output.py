"""The output of workers: where it goes (terminal, files or both), and log records as lines of JSON.

`parse_tee` reads torchrun's notation. `LogFolder` makes `<log_dir>/<run>/attempt_<n>/<rank>/stdout.log` and `stderr.log`, or a private
temporary folder that is removed at the end. `Tee` copies whole lines from these files to the terminal with the rank in front; it has no
thread, because a thread would not survive the fork of the next attempt. `JsonLineFormatter` writes one record as one line of JSON with
secrets removed; `use_json_formatter` gives it to handlers that print plain text to the terminal and to no others. `announce` prints
messages of the launcher in either format. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from slipstream.config.redaction import message_redactor, redact
from slipstream.config.sources import environment
from slipstream.errors import ConfigError

__all__ = [
    "JsonLineFormatter", "LogFolder", "NOTIFIED", "STDERR", "STDOUT", "Tee", "WorkerFiles", "announce", "as_json_line",
    "effective_handlers", "flush_streams", "is_console_handler", "parse_tee", "printable_text", "record_message", "start_on_new_line",
    "use_json_formatter", "warning_listeners",
]


STDOUT: Final = 1
STDERR: Final = 2
_CLAIMS: Final = ".claims"
_CHUNK: Final = 1 << 16
_CHUNKS_AT_ONCE: Final = 16
_LONGEST_LINE: Final = 1 << 24
"""Bytes of a line that are held until it ends; the terminal shows a longer one as several."""
_TERMINAL_WAIT: Final = 0.1
"""Seconds from one question to the next whether a terminal that takes nothing is still waited for."""


def parse_tee(text: str, local_processes: int) -> dict[int, int]:
    """Which streams of each local rank go to the terminal and a file: 0 none, 1 stdout, 2 stderr, 3 both.

    >>> parse_tee("3", 2), parse_tee("1:3", 2)
    ({0: 3, 1: 3}, {0: 0, 1: 3})
    """
    if ":" not in text:
        return dict.fromkeys(range(local_processes), int(text))
    chosen = {int(rank): int(streams) for rank, _, streams in (pair.partition(":") for pair in text.split(","))}
    beyond = [rank for rank in chosen if rank >= local_processes]
    if beyond:
        raise ConfigError(
            f"tee={text} names local rank {beyond[0]}, but this machine runs {local_processes}.\n"
            f"Local ranks are counted from 0: write 0 to {local_processes - 1}."
        )
    return {rank: chosen.get(rank, 0) for rank in range(local_processes)}


@dataclass(frozen=True)
class WorkerFiles:
    """The files of one worker in one attempt. A stream without a file goes to the terminal."""

    folder: Path
    stdout: Path | None
    stderr: Path | None
    followed: int = 3
    """The streams whose files are copied to the terminal: 1 stdout, 2 stderr, 3 both."""
    kept: bool = True
    """The files remain after the run."""
    scratch: Path = Path()
    """A folder for what ends with the process; the launcher removes it, since a process that is killed cannot."""

    @property
    def files(self) -> int:
        """The streams that have files."""
        return (STDOUT if self.stdout else 0) | (STDERR if self.stderr else 0)

    @property
    def is_shown(self) -> bool:
        """Whether the terminal shows everything that the worker prints."""
        return self.files & ~self.followed == 0

    @property
    def claims(self) -> Path:
        """The folder where the workers of this machine claim warnings."""
        return self.folder.parent / _CLAIMS

    @property
    def hidden(self) -> Path:
        """The lines that the terminal leaves out are in this path, a dot, and the number of the stream."""
        return self.claims / f"hidden-{self.folder.name}"

    @property
    def error(self) -> Path:
        return self.folder / "failure.json"

    @property
    def stack(self) -> Path:
        return self.folder / "stack.txt"

    @property
    def log(self) -> Path | None:
        """The file to name in the report of a failure; None if it does not remain."""
        return (self.stderr or self.stdout) if self.kept else None


class LogFolder:
    """The folder of one run, readable for the user alone.

    The local ranks in `direct` print to the terminal what `tee` does not name, also with a `log_dir`.
    """

    def __init__(self, log_dir: str | None, run_id: str, tee: Mapping[int, int], direct: Collection[int] = ()) -> None:
        self._tee = tee
        self._direct = direct
        self.kept = log_dir is not None
        try:
            if log_dir is None:
                self.path = Path(tempfile.mkdtemp(prefix="slipstream-"))
            else:
                os.makedirs(log_dir, exist_ok=True)
                self.path = Path(tempfile.mkdtemp(prefix=f"{run_id}-", dir=os.path.abspath(log_dir)))
        except OSError as error:
            raise ConfigError(
                f"log_dir={log_dir} cannot be used: {error.strerror}.\nGive a folder that can be written to with --log_dir."
            ) from None
        self._scratch = Path(tempfile.mkdtemp(prefix="slipstream-")) if self.kept else self.path

    def worker_files(self, attempt: int, rank: int, local_rank: int) -> WorkerFiles:
        """Create the folder of one worker and return its files."""
        folder = self.path / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True, mode=0o700)
        followed = self._tee.get(local_rank, 0)
        streams = STDOUT | STDERR if self.kept and local_rank not in self._direct else followed
        stdout = folder / "stdout.log" if streams & STDOUT else None
        stderr = folder / "stderr.log" if streams & STDERR else None
        scratch = self._scratch / f"{attempt}-{local_rank}"  # short: the path of a socket has a hundred characters
        files = WorkerFiles(folder, stdout, stderr, followed, self.kept, scratch)
        scratch.mkdir(mode=0o700)
        files.claims.mkdir(exist_ok=True, mode=0o700)
        return files

    def end_attempt(self, attempt: int) -> None:
        """Remove what nobody needs of an attempt that is over, so that a job with many restarts does not fill the disk."""
        for path in [*self._scratch.glob(f"{attempt}-*"), *([] if self.kept else [self.path / f"attempt_{attempt}"])]:
            shutil.rmtree(path, ignore_errors=True)

    def not_shown(self) -> list[int]:
        """Return the local ranks with output that goes to files only."""
        return [rank for rank, followed in self._tee.items() if self.kept and rank not in self._direct and followed != STDOUT | STDERR]

    def remove(self) -> None:
        """Remove a temporary folder; of a folder that the user named, only the files of the launcher."""
        for path in [*(self.path.glob(f"attempt_*/{_CLAIMS}") if self.kept else ()), self._scratch]:
            shutil.rmtree(path, ignore_errors=True)


class Tee:
    """Copies lines from files to the terminal as they are written.

    A terminal that nobody reads is never waited for, except by `finish`, and no file keeps the others waiting: the caller has processes to
    watch. `log` gets a message when a terminal fails, and its lines go nowhere from then on.
    """

    def __init__(self, log: Callable[[str], None] = lambda text: None) -> None:
        self._log = log
        self._sources: list[_FollowedFile] = []
        self._terminals: dict[int, _Terminal] = {}

    def follow(self, path: Path, prefix: str, destination: int, *, hidden: Path | None = None, json_lines: bool = False) -> None:
        """Copy what is appended to `path` to the open file `destination`, with `prefix` before every line.

        Texts that the worker has written into the file `hidden` are left out. With `json_lines`, lines of JSON get no prefix.
        """
        terminal = self._terminals.setdefault(destination, _Terminal(destination, self._log))
        self._sources.append(_FollowedFile(path, prefix.encode(), terminal, _HiddenLines(hidden), json_lines))

    def pump(self) -> bool:
        """Copy the whole lines that are new, a megabyte of each file at most; return whether there may be more at once."""
        return any([source.pump() for source in self._sources])  # a list, so that each file has its turn

    def finish(self, patience: Callable[[], float] = lambda: math.inf) -> None:
        """Copy the rest, including a last line without a line break, and close the files.

        `patience` returns the seconds for which a terminal may take nothing before the rest is dropped; it is asked again and again.
        """
        for source in self._sources:
            source.finish(patience)
        self._sources.clear()


class _Terminal:
    """An open file that lines are copied to, and what it has not taken yet."""

    def __init__(self, number: int, log: Callable[[str], None]) -> None:
        self._number = number
        self._log = log
        self._pending = memoryview(b"")
        self._failed = False
        self._taken = 0.0
        """When it took something, or was given something, for the last time."""

    def put(self, data: bytes) -> None:
        """Take over data, after what was given before has been written."""
        assert not self._pending
        self._taken = time.monotonic()
        self._pending = memoryview(b"" if self._failed else data)

    def drain(self, seconds: float = 0.0) -> bool:
        """Write as long as no write takes more than `seconds`; return whether everything is written."""
        try:
            while self._pending and select.select([], [self._number], [], seconds)[1]:
                written = os.write(self._number, self._pending[: select.PIPE_BUF])  # so much, a pipe that is ready takes without a wait
                self._pending = self._pending[written:]
                self._taken = time.monotonic()
        except BlockingIOError:  # somebody has set the terminal to refuse what it cannot take at once
            return False
        except OSError as error:
            self._pending, self._failed = memoryview(b""), True
            if not isinstance(error, BrokenPipeError):  # the reader has seen enough
                self._log(f"output of the processes is no longer shown: file {self._number} cannot be written: {error.strerror}")
        return not self._pending

    def wait(self, patience: Callable[[], float]) -> None:
        """Return when everything is written, or dropped because the terminal took nothing for longer than `patience` allows."""
        while not self.drain(_TERMINAL_WAIT):
            if time.monotonic() - self._taken > patience():
                self._pending, self._failed = memoryview(b""), True


class _HiddenLines:
    """Texts in the log file of a worker that the terminal leaves out.

    The worker writes a text here before it prints it, so a reader that reads the output first and this file second knows all of them.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._at = 0
        self._texts: list[list[bytes]] = []

    def without(self, lines: list[bytes], last: bool) -> tuple[list[bytes], list[bytes]]:
        """Return the lines to show, and the lines at the end that may begin a hidden text."""
        self._read()
        shown: list[bytes] = []
        place = 0
        while place < len(lines) and self._texts:
            found = next((text for text in self._texts if lines[place : place + len(text)] == text), None)
            if found is not None:
                self._texts.remove(found)
                place += len(found)
            elif not last and any(lines[place:] == text[: len(lines) - place] for text in self._texts):
                return shown, lines[place:]
            else:
                shown.append(lines[place])
                place += 1
        return shown + lines[place:], []

    def _read(self) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, "rb") as file:
                file.seek(self._at)
                *lines, _ = file.read().split(b"\n")
        except FileNotFoundError:  # nothing is hidden yet
            return
        while lines and len(lines) > int(lines[0]):
            count = int(lines[0])
            self._texts.append(lines[1 : 1 + count])
            self._at += sum(len(line) + 1 for line in lines[: 1 + count])
            del lines[: 1 + count]


class _FollowedFile:
    def __init__(self, path: Path, prefix: bytes, terminal: _Terminal, hidden: _HiddenLines, json_lines: bool) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by finish
        self._prefix = prefix
        self._terminal = terminal
        self._hidden = hidden
        self._json_lines = json_lines
        self._waiting: list[bytes] = []
        self._rest: list[bytes] = []
        """The pieces of a line that has not ended."""
        self._rest_size = 0

    def pump(self) -> bool:
        for _ in range(_CHUNKS_AT_ONCE):
            if not self._terminal.drain():
                return False
            chunk = self._file.read(_CHUNK)
            if not chunk:
                return False
            self._take(chunk)
        return True

    def finish(self, patience: Callable[[], float]) -> None:
        end = os.fstat(self._file.fileno()).st_size  # a process that a worker left behind may write for ever
        self._terminal.wait(patience)
        while self._file.tell() < end and (chunk := self._file.read(_CHUNK)):
            self._take(chunk)
            self._terminal.wait(patience)
        self._copy([b"".join(self._rest)] if self._rest else [], last=True)
        self._terminal.wait(patience)
        self._file.close()

    def _take(self, chunk: bytes) -> None:
        """Copy the lines that end in a chunk, and a line that has become longer than a line can be."""
        first, *others = chunk.split(b"\n")
        self._rest.append(first)
        self._rest_size += len(first)
        if not others and self._rest_size < _LONGEST_LINE:
            return
        lines = [b"".join(self._rest), *others[:-1]]
        self._rest = [piece for piece in others[-1:] if piece]
        self._rest_size = sum(map(len, self._rest))
        self._copy(lines, last=False)

    def _copy(self, lines: list[bytes], last: bool) -> None:
        shown, self._waiting = self._hidden.without(self._waiting + lines, last)
        flush_streams()
        self._terminal.put(b"".join(self._labelled(line) + b"\n" for line in shown))
        self._terminal.drain()

    def _labelled(self, line: bytes) -> bytes:
        return line if self._json_lines and line.startswith(b"{") and line.endswith(b"}") else self._prefix + line


def flush_streams() -> None:
    """Write buffered output now; after a fork both processes would write it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()


NOTIFIED: Final = "_notified"
"""The attribute of records that the listeners have received."""
_LINE_START: Final = '{"time": "'

_STANDARD: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
"""The attributes of every record; all others are `extra` of the call."""
_PLAIN_FORMATTERS: Final = ("logging", "torch")
"""Packages whose formatters print text for people."""


class JsonLineFormatter(logging.Formatter):
    """Formats a record as one line of JSON. `who` returns the rank and the number of processes; secrets of `environ` are removed.

    >>> formatter = JsonLineFormatter(who=lambda: (1, 2), environ={})
    >>> line = formatter.format(logging.LogRecord("train", logging.INFO, "train.py", 7, "loss %.1f", (0.5,), None))
    >>> found = json.loads(line)
    >>> found["level"], found["rank"], found["world"], found["message"], found["file"]
    ('INFO', 1, 2, 'loss 0.5', 'train.py:7')
    """

    def __init__(self, who: Callable[[], tuple[int | None, int]], environ: Mapping[str, str]) -> None:
        super().__init__()
        self._who = who
        self._host = socket.gethostname()
        self._redact = message_redactor(environ)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without a line break."""
        rank, world = self._who()
        found: dict[str, object] = {
            "time": _timestamp(record.created),
            "level": record.levelname,
            "logger": record.name,
            "rank": rank,
            "world": world,
            "host": self._host,
            "message": self._redact(record_message(record).removeprefix(f"[RANK {rank}] ")),
            "file": f"{record.pathname}:{record.lineno}" if record.lineno else None,
        }
        if record.exc_info and record.exc_info[0] is not None:
            found["exception"] = self._redact(self.formatException(record.exc_info))
        elif record.exc_text:
            found["exception"] = self._redact(record.exc_text)
        if record.stack_info:
            found["stack"] = self._redact(record.stack_info)
        extra = {name: self._plain(name, value) for name, value in vars(record).items() if name not in _STANDARD and name[:1] != "_"}
        if extra:
            found["extra"] = extra
        return json.dumps(found)

    def _plain(self, name: str, value: object) -> object:
        """Return numbers and booleans as they are, everything else as text."""
        if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            return value
        return self._redact(redact(name, value if isinstance(value, str) else printable_text(value)))


def _timestamp(seconds: float) -> str:
    """
    >>> _timestamp(0.5)
    '1970-01-01T00:00:00.500000Z'
    """
    whole, part = divmod(round(seconds * 1_000_000), 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{part:06d}Z"


def record_message(record: logging.LogRecord) -> str:
    """Return the text of a record, also if its arguments do not fit the format."""
    try:
        return record.getMessage()
    except Exception as problem:  # the arguments do not fit: keep the message
        return f"{printable_text(record.msg)} {printable_text(record.args)} (these do not fit together: {problem})"


def printable_text(value: object) -> str:
    """Return the text of an object, or a note where its `__str__` raises.

    >>> printable_text(3)
    '3'
    """
    try:
        return str(value)
    except Exception as problem:  # a class whose __str__ raises
        return f"<{type(value).__name__} that cannot be printed: {type(problem).__name__}>"


def effective_handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Yield the handlers that a record of this logger reaches."""
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None


def is_console_handler(handler: logging.Handler) -> bool:
    """Return whether a handler prints to stdout or stderr."""
    stream: Any = getattr(handler, "stream", None) if isinstance(handler, logging.StreamHandler) else None
    return stream is not None and any(stream is console for console in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__))


def use_json_formatter(handlers: Iterable[logging.Handler], formatter: logging.Formatter) -> None:
    """Set the formatter on those handlers that print plain text to the terminal."""
    for handler in handlers:
        kind = type(handler.formatter).__module__.partition(".")[0] if handler.formatter is not None else "logging"
        if kind in _PLAIN_FORMATTERS and is_console_handler(handler):
            handler.setFormatter(formatter)


def start_on_new_line(stream: Any) -> Callable[[], None]:
    """Make every line of JSON that is written to the stream begin on a new line, also after a progress bar.

    Return a function that ends an unfinished line. Output that bypasses the stream (C code, other processes) is not seen.

    >>> import io
    >>> stream = io.StringIO()
    >>> finish = start_on_new_line(stream)
    >>> for text in ("50%", '{"time": "now"}\\n', "a line\\n", '{"time": "then"}\\n', "99%"):
    ...     _ = stream.write(text)
    >>> finish()
    >>> stream.getvalue()
    '50%\\n{"time": "now"}\\na line\\n{"time": "then"}\\n99%\\n'
    """
    write_on: Callable[[str], int] = stream.write
    ended = True

    def write(text: str) -> int:
        nonlocal ended
        before = "" if ended or not text.startswith(_LINE_START) else "\n"
        ended = text.endswith("\n") if text else ended
        return write_on(before + text)

    def finish() -> None:
        if not ended:
            stream.write("\n")

    stream.write = write
    return finish


def warning_listeners() -> tuple[Callable[[str, str], None], ...]:
    """Return the functions that receive logger name and text of each warning; none before there is a runtime."""
    module = sys.modules.get("slipstream.distributed.current")
    current_or_none = getattr(module, "current_or_none", None)  # absent while the module itself is being loaded
    runtime = current_or_none() if current_or_none is not None else None
    return () if runtime is None else tuple(runtime.warning_listeners)


def announce(
    text: str,
    *,
    as_json: bool,
    level: int = logging.INFO,
    rank: int | None = None,
    world: int = 1,
    record: tuple[str, str] | None = None,
) -> None:
    """Print a message of the launcher on stderr; as JSON, with the message and traceback of `record`."""
    flush_streams()
    message, traceback = record or (text, "")
    line = as_json_line(message, level, rank, world, traceback) if as_json else text + "\n"
    with contextlib.suppress(OSError):  # nobody can read it, and the processes must be watched all the same
        print(line, file=sys.stderr, flush=True, end="")


def as_json_line(text: str, level: int, rank: int | None, world: int, traceback: str = "") -> str:
    """Return a message of the launcher as one line of JSON."""
    record = logging.LogRecord("slipstream.launch", level, "", 0, "%s", (text.removeprefix("slipstream: ").rstrip(),), None)
    record.exc_text = traceback or None
    return JsonLineFormatter(lambda: (rank, world), environment()).format(record) + "\n"
