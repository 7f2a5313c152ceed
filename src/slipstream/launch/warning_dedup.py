"""Print a warning once per machine when several processes give the same one: warnings of Python and warnings that libraries log.

The launcher passes each worker its `WorkerOutput` settings in one variable; the worker installs them before the user's program runs. The
first process to give a warning claims it by creating a file named after its text and place, and prints it with its rank; the same warning
of the others is dropped on the terminal and kept in their log files.

Never dropped: errors, warnings of one process only, repetitions by the process that was first, records of the user's own code, warnings
with a traceback, and everything if claims cannot be made. Python warnings are left alone if the user has replaced `showwarning`, asks for
"always" or "error", or runs under pytest. With the format json, terminal text of handlers, warnings and unraisable exceptions become
lines of JSON. Printed warnings are reported to the run, if there is one.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TextIO

from slipstream.launch.output import (
    NOTIFIED,
    JsonLineFormatter,
    effective_handlers,
    is_console_handler,
    record_message,
    start_on_new_line,
    use_json_formatter,
    warning_listeners,
)

__all__ = ["OUTPUT_VARIABLE", "WarningDedup", "WorkerOutput", "install_warning_dedup"]

OUTPUT_VARIABLE: Final = "SLIPSTREAM_INTERNAL_VOICE"
"""The variable with the `WorkerOutput` of a worker."""
_MAX_CLAIMS: Final = 1000
"""Claims of one process; a program that has so many different warnings is told all of them."""
_STDOUT: Final = 1
_STDERR: Final = 2


@dataclass(frozen=True, kw_only=True)
class WorkerOutput:
    """How the output of one worker is handled.

    >>> WorkerOutput.load(WorkerOutput(json=True).dump()) == WorkerOutput(json=True)
    True
    """

    json: bool = False
    claims: str = ""
    """The folder where this machine's processes claim warnings; empty: each gives all of its own."""
    hidden: str = ""
    """Where a worker writes down what the terminal shall leave out: this path, a dot, and the number of the stream."""
    files: int = 0
    """The streams that are files of this worker, with the rank put before every line by the launcher: 1 stdout, 2 stderr, 3 both."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> WorkerOutput:
        return cls(**json.loads(text))


def install_warning_dedup(text: str, environ: Mapping[str, str]) -> None:
    """Take up what the launcher wrote into the variable, in a worker that is about to run the user's program."""
    if text:
        WarningDedup(WorkerOutput.load(text), int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")), environ).install()


class WarningDedup:
    """The part of one process in what all of them say."""

    def __init__(self, voice: WorkerOutput, rank: int, world: int, environ: Mapping[str, str]) -> None:
        self._voice = voice
        self._rank = rank
        self._formatter = JsonLineFormatter(lambda: (rank, world), environ) if voice.json else None
        self._claimed: dict[str, bool] = {}
        self._telling = _NotifyState()
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        folders = (here, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
        self._installed = tuple(os.path.normcase(folder) + os.sep for folder in folders)

    def install(self) -> None:
        """From now on: every warning of this process, and every record that is logged, comes past here."""
        made = logging.getLogRecordFactory()

        def make(name: str, *rest: Any, **keywords: Any) -> logging.LogRecord:
            known = logging.Logger.manager.loggerDict.get(name)
            self._meet(list(effective_handlers(known if isinstance(known, logging.Logger) else logging.root)))
            return made(name, *rest, **keywords)

        logging.setLogRecordFactory(make)
        if logging.lastResort is not None:
            self._meet([logging.lastResort])
        if getattr(warnings.showwarning, "__module__", "") in ("warnings", "_py_warnings"):
            warnings.showwarning = self._show
        if self._formatter is not None:
            self._speak_json()

    def _speak_json(self) -> None:
        """What Python itself prints, and the lines that it is printed on."""
        if sys.stdout is not None:
            start_on_new_line(sys.stdout)
        if sys.stderr is not None:
            atexit.register(start_on_new_line(sys.stderr))  # what the launcher has to say follows
        if threading.excepthook is threading.__excepthook__:
            threading.excepthook = self._thread_failed
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = self._could_not_raise

    def _thread_failed(self, told: threading.ExceptHookArgs) -> None:
        """In the place of `threading.excepthook`."""
        if told.exc_type is not SystemExit:
            name = told.thread.name if told.thread is not None else "unknown"
            self._print_exception("threading", "Exception in thread %s", (name,), told)

    def _could_not_raise(self, told: sys.UnraisableHookArgs) -> None:
        """In the place of `sys.unraisablehook`: an exception in __del__ or the like."""
        self._print_exception("sys.unraisablehook", "%s: %r", (told.err_msg or "Exception ignored in", told.object), told)

    def _print_exception(self, logger: str, text: str, args: tuple[object, ...], told: Any) -> None:
        info = (told.exc_type, told.exc_value, told.exc_traceback)
        record = logging.LogRecord(logger, logging.ERROR, "", 0, text, args, info)
        if self._formatter is not None and sys.stderr is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(self._formatter.format(record) + "\n")

    def _meet(self, handlers: Sequence[logging.Handler]) -> None:
        """Handlers that print to the terminal ask before they print a warning, and speak JSON where that is wanted."""
        if self._formatter is not None:
            use_json_formatter(handlers, self._formatter)
        for handler in handlers:
            if is_console_handler(handler) and not any(isinstance(found, _ConsoleFilter) for found in handler.filters):
                handler.addFilter(_ConsoleFilter(self, handler))

    # warnings of Python

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """In the place of `warnings.showwarning`."""
        stream: Any = sys.stderr if file is None else file
        if stream is None:  # a process without a terminal
            return
        text = warnings.formatwarning(message, category, filename, lineno, line)
        if file is None and self._formatter is not None:
            said = f"{category.__name__}: {message}"
            record = logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, "%s", (said,), None)
            text = self._formatter.format(record) + "\n"
        if file is None:
            wanted = _user_wants_all(category, str(message))
            if wanted or self.first(category.__qualname__, str(message), filename, lineno):
                self._tell("py.warnings", f"{category.__name__}: {message}")
            elif not self._only_in_file(text, stream):
                return
            text = text if wanted else self.label(stream) + text
        with contextlib.suppress(OSError):  # as Python does it: a terminal that is gone is no reason to fail
            stream.write(text)

    # both

    def first(self, *what: object) -> bool:
        """Whether this process is the one that is heard with this; also every time that it says it again."""
        if not self._voice.claims:
            return True
        name = hashlib.sha256(repr(what).encode(errors="backslashreplace")).hexdigest()
        if name not in self._claimed:
            if len(self._claimed) >= _MAX_CLAIMS:
                return True
            self._claimed[name] = self._claim(name)
        return self._claimed[name]

    def _claim(self, name: str) -> bool:
        try:
            os.close(os.open(os.path.join(self._voice.claims, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:  # the folder is gone, or the disk is full: rather too often than not at all
            return True
        return True

    def _file(self, stream: object) -> int:
        """The number of a stream that is a file, else 0."""
        return self._voice.files & (_STDOUT if stream is sys.stdout or stream is sys.__stdout__ else _STDERR)

    def _only_in_file(self, text: str, stream: Any) -> bool:
        """Whether the text may still be written: to a file, after the launcher was told to leave it out on the terminal."""
        number = self._file(stream)
        if not number or not text.endswith("\n"):
            return False
        try:
            data = text.encode(getattr(stream, "encoding", None) or "utf-8", getattr(stream, "errors", None) or "strict")
            file = os.open(f"{self._voice.hidden}.{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except (OSError, ValueError):
            return True
        try:
            os.write(file, b"%d\n%s" % (data.count(b"\n"), data))
        finally:
            os.close(file)
        return True

    def label(self, stream: object) -> str:
        """What tells whose warning it is, where nothing else does."""
        named = self._rank == 0 or self._formatter is not None or not self._voice.claims or self._file(stream) > 0
        return "" if named else f"[RANK {self._rank}] "

    def lets_through(self, record: logging.LogRecord, handler: logging.Handler) -> bool:
        """Whether a handler that prints to the terminal prints this record."""
        if record.levelno < logging.WARNING:
            return True
        text, stream = record_message(record), getattr(handler, "stream", None)
        if not self._is_heard(record, text):
            return self._only_in_file(handler.format(record) + getattr(handler, "terminator", "\n"), stream)
        if not vars(record).get(NOTIFIED):
            setattr(record, NOTIFIED, True)
            self._tell(record.name, text)
            label = self.label(stream) if self._is_shared(record, text) else ""
            record.msg = f"{label}{record.msg}" if label else record.msg
        return True

    def _is_heard(self, record: logging.LogRecord, text: str) -> bool:
        return not self._is_shared(record, text) or self.first(record.name, record.levelno, text, record.pathname, record.lineno)

    def _is_shared(self, record: logging.LogRecord, text: str) -> bool:
        """A warning that one process gives for all of them; not one of every process on purpose, or that is shown already."""
        is_warning = record.levelno < logging.ERROR and not record.exc_info
        return is_warning and self._is_installed(record.pathname) and not text.startswith("[RANK ")

    def _tell(self, logger: str, text: str) -> None:
        """What the terminal shows is told to whoever keeps the events of the run; what they say of it is not."""
        if not self._telling.active:
            self._telling.active = True
            try:
                for hear in warning_listeners():
                    hear(logger, text)
            finally:
                self._telling.active = False

    def _is_installed(self, path: str) -> bool:
        """The file of a library, ours included, or of Python itself; the user's own files are elsewhere."""
        path = os.path.normcase(path)
        return "site-packages" in path or "dist-packages" in path or path.startswith(self._installed)


class _NotifyState(threading.local):
    """Whether this thread is about to tell."""

    active: bool = False


class _ConsoleFilter:
    """The filter of one handler."""

    def __init__(self, chorus: WarningDedup, handler: logging.Handler) -> None:
        self._chorus = chorus
        self._handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        return self._chorus.lets_through(record, self._handler)


def _user_wants_all(category: type[Warning], text: str) -> bool:
    """The user, or pytest, wants to see every single one."""
    if "_pytest" in sys.modules or any(option.startswith(("a", "e")) for option in sys.warnoptions):
        return True
    return any(
        action in ("always", "all") and issubclass(category, kind) and (pattern is None or pattern.match(text))
        for action, pattern, kind, *_ in warnings.filters
    )
