"""Log records as lines of JSON, and what of a running program's output is turned into them.

`JsonLines` is a `logging.Formatter`: one record, one line, always valid JSON in ASCII, with secrets taken out. `speak_json` gives it to
handlers that print plain text to the terminal, and to no others: a handler that writes to a file, or has a formatter of its own making,
stays as it is. `begin_on_new_lines` keeps lines of JSON apart from text that was left without an end. `announce` prints what the launcher
itself has to say, in either format. Nothing here raises because of what a record holds, and nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from slipstream.config.redact import message_redactor, redact
from slipstream.config.sources import environment

__all__ = [
    "HEARD",
    "JsonLines",
    "announce",
    "as_json_line",
    "begin_on_new_lines",
    "handlers_of",
    "hearers",
    "message_of",
    "on_console",
    "speak_json",
]

HEARD: Final = "_heard"
"""The attribute of records that the hearers know of already."""
_BEGINNING: Final = '{"time": "'

_STANDARD: Final = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
"""What every record has; the rest is what the call gave as `extra`."""
_PLAIN_FORMATTERS: Final = ("logging", "torch")
"""Packages whose formatters print text for people."""


class JsonLines(logging.Formatter):
    """One record, one line of JSON. `who` tells rank and world at the time of the record; `environ` holds secrets to take out.

    >>> formatter = JsonLines(who=lambda: (1, 2), environ={})
    >>> line = formatter.format(logging.LogRecord("train", logging.INFO, "train.py", 7, "loss %.1f", (0.5,), None))
    >>> found = json.loads(line)
    >>> found["level"], found["rank"], found["world"], found["message"], found["file"]
    ('INFO', 1, 2, 'loss 0.5', 'train.py:7')
    """

    def __init__(self, who: Callable[[], tuple[int | None, int]], environ: Mapping[str, str]) -> None:
        super().__init__()
        self._who = who
        self._host = socket.gethostname()
        self._shown = message_redactor(environ)

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        rank, world = self._who()
        found: dict[str, object] = {
            "time": _moment(record.created),
            "level": record.levelname,
            "logger": record.name,
            "rank": rank,
            "world": world,
            "host": self._host,
            "message": self._shown(message_of(record).removeprefix(f"[RANK {rank}] ")),
            "file": f"{record.pathname}:{record.lineno}" if record.lineno else None,
        }
        if record.exc_info and record.exc_info[0] is not None:
            found["exception"] = self._shown(self.formatException(record.exc_info))
        elif record.exc_text:
            found["exception"] = self._shown(record.exc_text)
        if record.stack_info:
            found["stack"] = self._shown(record.stack_info)
        extra = {name: self._plain(name, value) for name, value in vars(record).items() if name not in _STANDARD and name[:1] != "_"}
        if extra:
            found["extra"] = extra
        return json.dumps(found)

    def _plain(self, name: str, value: object) -> object:
        """Numbers and truth values as they are, everything else as text."""
        if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            return value
        return self._shown(redact(name, value if isinstance(value, str) else _text(value)))


def _moment(seconds: float) -> str:
    """
    >>> _moment(0.5)
    '1970-01-01T00:00:00.500000Z'
    """
    whole, part = divmod(round(seconds * 1_000_000), 1_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{part:06d}Z"


def message_of(record: logging.LogRecord) -> str:
    """The text of a record, also of one whose arguments do not fit it."""
    try:
        return record.getMessage()
    except Exception as problem:  # a text and arguments that do not fit: the message is not lost over it
        return f"{_text(record.msg)} {_text(record.args)} (these do not fit together: {problem})"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as problem:  # somebody's class that cannot be printed
        return f"<{type(value).__name__} that cannot be printed: {type(problem).__name__}>"


def handlers_of(logger: logging.Logger) -> Iterator[logging.Handler]:
    """The handlers that a record of this logger meets on its way to the root."""
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None


def on_console(handler: logging.Handler) -> bool:
    """Whether a handler prints to stdout or stderr."""
    stream: Any = getattr(handler, "stream", None) if isinstance(handler, logging.StreamHandler) else None
    return stream is not None and any(stream is one for one in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__))


def speak_json(handlers: Iterable[logging.Handler], formatter: logging.Formatter) -> None:
    """Let those handlers that print plain text to the terminal print lines of JSON instead."""
    for handler in handlers:
        kind = type(handler.formatter).__module__.partition(".")[0] if handler.formatter is not None else "logging"
        if kind in _PLAIN_FORMATTERS and on_console(handler):
            handler.setFormatter(formatter)


def begin_on_new_lines(stream: Any) -> Callable[[], None]:
    """From now on a line of JSON that is written to the stream begins on a new line, also after a progress bar or the like.

    The function that this returns ends a line that has no end. What goes around the stream (C code, other processes) is not seen.

    >>> import io
    >>> stream = io.StringIO()
    >>> finish = begin_on_new_lines(stream)
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
        before = "" if ended or not text.startswith(_BEGINNING) else "\n"
        ended = text.endswith("\n") if text else ended
        return write_on(before + text)

    def finish() -> None:
        if not ended:
            stream.write("\n")

    stream.write = write
    return finish


def hearers() -> tuple[Callable[[str, str], None], ...]:
    """Who wants to know of warnings of this process: told the name of the logger and the text. Nobody before there is a runtime."""
    module = sys.modules.get("slipstream.runtime.current")
    current_or_none = getattr(module, "current_or_none", None)  # absent while the module itself is being loaded
    runtime = current_or_none() if current_or_none is not None else None
    return () if runtime is None else tuple(runtime.hearers)


def announce(
    text: str,
    *,
    as_json: bool,
    level: int = logging.INFO,
    rank: int | None = None,
    world: int = 1,
    record: tuple[str, str] | None = None,
) -> None:
    """Print a text of the launcher on stderr, after everything that was printed before; as JSON, the message and traceback of `record`."""
    sys.stdout.flush()
    message, traceback = record or (text, "")
    line = as_json_line(message, level, rank, world, traceback) if as_json else text + "\n"
    print(line, file=sys.stderr, flush=True, end="")


def as_json_line(text: str, level: int, rank: int | None, world: int, traceback: str = "") -> str:
    """A text of the launcher as a whole line."""
    record = logging.LogRecord("slipstream.launch", level, "", 0, "%s", (text.removeprefix("slipstream: ").rstrip(),), None)
    record.exc_text = traceback or None
    return JsonLines(lambda: (rank, world), environment()).format(record) + "\n"
