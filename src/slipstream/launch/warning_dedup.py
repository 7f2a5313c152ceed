"""Print a warning once per machine when several processes give the same one: warnings of Python and warnings that libraries log.

The launcher passes each worker its `WorkerOutput` settings in one variable. The first process to give a warning claims it by creating a
file named after its text and origin, and prints it with its rank; the others drop it on the terminal and keep it in their log files.

Never dropped: errors, warnings of one process only, repetitions by the process that was first, records of the user's own code, warnings
with a traceback, and everything if claims cannot be made. Python warnings are left alone if the user has replaced `showwarning`, asks for
"always" or "error", or runs under pytest. With the format json, terminal output of handlers, warnings and unraisable exceptions become
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
    STDERR,
    STDOUT,
    JsonLineFormatter,
    effective_handlers,
    is_console_handler,
    record_message,
    start_on_new_line,
    use_json_formatter,
    warning_listeners,
)

__all__ = ["OUTPUT_VARIABLE", "WarningDedup", "WorkerOutput", "install_warning_dedup"]

OUTPUT_VARIABLE: Final = "SLIPSTREAM_INTERNAL_OUTPUT"
"""The variable with the `WorkerOutput` of a worker."""
_MAX_CLAIMS: Final = 1000
"""Claims per process; a program with more different warnings prints all further ones."""


@dataclass(frozen=True, kw_only=True)
class WorkerOutput:
    """How the output of one worker is handled.

    >>> WorkerOutput.load(WorkerOutput(json=True).dump()) == WorkerOutput(json=True)
    True
    """

    json: bool = False
    claims: str = ""
    """The folder where the processes of this machine claim warnings; empty: each prints all its own."""
    hidden: str = ""
    """The lines that the terminal leaves out go to this path, a dot, and the number of the stream."""
    files: int = 0
    """The streams that are files of this worker, with the rank put before every line by the launcher: 1 stdout, 2 stderr, 3 both."""

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> WorkerOutput:
        return cls(**json.loads(text))


def install_warning_dedup(text: str, environ: Mapping[str, str]) -> None:
    """Install the settings that the launcher wrote into the variable, before the user's program runs."""
    if text:
        WarningDedup(WorkerOutput.load(text), int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1")), environ).install()


class WarningDedup:
    """Decides in one process which warnings it prints for all processes of the machine."""

    def __init__(self, output: WorkerOutput, rank: int, world: int, environ: Mapping[str, str]) -> None:
        self._output = output
        self._rank = rank
        self._formatter = JsonLineFormatter(lambda: (rank, world), environ) if output.json else None
        self._claimed: dict[str, bool] = {}
        self._notifying = _NotifyState()
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        folders = (here, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
        self._installed = tuple(os.path.normcase(folder) + os.sep for folder in folders)

    def install(self) -> None:
        """Intercept the warnings of this process and the records that reach the terminal."""
        factory = logging.getLogRecordFactory()

        def make(name: str, *rest: Any, **keywords: Any) -> logging.LogRecord:
            known = logging.Logger.manager.loggerDict.get(name)
            self._attach(list(effective_handlers(known if isinstance(known, logging.Logger) else logging.root)))
            return factory(name, *rest, **keywords)

        logging.setLogRecordFactory(make)
        if logging.lastResort is not None:
            self._attach([logging.lastResort])
        if getattr(warnings.showwarning, "__module__", "") in ("warnings", "_py_warnings"):
            warnings.showwarning = self._show_warning
        if self._formatter is not None:
            self._install_json()

    def _install_json(self) -> None:
        """Print exceptions that Python itself reports as JSON, on lines of their own."""
        if sys.stdout is not None:
            start_on_new_line(sys.stdout)
        if sys.stderr is not None:
            atexit.register(start_on_new_line(sys.stderr))  # messages of the launcher follow
        if threading.excepthook is threading.__excepthook__:
            threading.excepthook = self._print_thread_exception
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = self._print_unraisable

    def _print_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        """Replace `threading.excepthook`."""
        if args.exc_type is not SystemExit:
            name = args.thread.name if args.thread is not None else "unknown"
            self._print_exception("threading", "Exception in thread %s", (name,), args)

    def _print_unraisable(self, args: sys.UnraisableHookArgs) -> None:
        """Replace `sys.unraisablehook`, which reports exceptions in __del__ and similar."""
        self._print_exception("sys.unraisablehook", "%s: %r", (args.err_msg or "Exception ignored in", args.object), args)

    def _print_exception(self, logger: str, text: str, args: tuple[object, ...], hook: Any) -> None:
        info = (hook.exc_type, hook.exc_value, hook.exc_traceback)
        record = logging.LogRecord(logger, logging.ERROR, "", 0, text, args, info)
        if self._formatter is not None and sys.stderr is not None:
            with contextlib.suppress(OSError):
                sys.stderr.write(self._formatter.format(record) + "\n")

    def _attach(self, handlers: Sequence[logging.Handler]) -> None:
        """Filter the handlers that print to the terminal, and set the JSON formatter where it is wanted."""
        if self._formatter is not None:
            use_json_formatter(handlers, self._formatter)
        for handler in handlers:
            if is_console_handler(handler) and not any(isinstance(found, _ConsoleFilter) for found in handler.filters):
                handler.addFilter(_ConsoleFilter(self, handler))

    # warnings of Python

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Replace `warnings.showwarning`."""
        stream: Any = sys.stderr if file is None else file
        if stream is None:  # a process without a terminal
            return
        text = warnings.formatwarning(message, category, filename, lineno, line)
        if file is None:
            short = f"{category.__name__}: {message}"
            if self._formatter is not None:
                record = logging.LogRecord("py.warnings", logging.WARNING, filename, lineno, "%s", (short,), None)
                text = self._formatter.format(record) + "\n"
            wanted = _user_wants_all(category, str(message))
            if wanted or self.is_first(category.__qualname__, str(message), filename, lineno):
                self._notify("py.warnings", short)
            elif not self._hide_from_terminal(text, stream):
                return
            text = text if wanted else self.label(stream) + text
        with contextlib.suppress(OSError):  # as Python does: a closed terminal is not a reason to fail
            stream.write(text)

    # both

    def is_first(self, *what: object) -> bool:
        """Return whether this process prints this warning: it is the first to claim it, now or before."""
        if not self._output.claims:
            return True
        name = hashlib.sha256(repr(what).encode(errors="backslashreplace")).hexdigest()
        if name not in self._claimed:
            if len(self._claimed) >= _MAX_CLAIMS:
                return True
            self._claimed[name] = self._claim(name)
        return self._claimed[name]

    def _claim(self, name: str) -> bool:
        try:
            os.close(os.open(os.path.join(self._output.claims, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:  # the folder is gone, or the disk is full: print it rather than lose it
            pass
        return True

    def _file(self, stream: object) -> int:
        """Return the number of a stream that is a file, else 0."""
        return self._output.files & (STDOUT if stream is sys.stdout or stream is sys.__stdout__ else STDERR)

    def _hide_from_terminal(self, text: str, stream: Any) -> bool:
        """Return whether the text may be written: to a log file, after the text was recorded as hidden from the terminal."""
        number = self._file(stream)
        if not number or not text.endswith("\n"):
            return False
        try:
            data = text.encode(getattr(stream, "encoding", None) or "utf-8", getattr(stream, "errors", None) or "strict")
            file = os.open(f"{self._output.hidden}.{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except (OSError, ValueError):
            return True
        try:
            os.write(file, b"%d\n%s" % (data.count(b"\n"), data))
        finally:
            os.close(file)
        return True

    def label(self, stream: object) -> str:
        """Return the rank as a prefix, where nothing else names it."""
        named = self._rank == 0 or self._formatter is not None or not self._output.claims or self._file(stream) > 0
        return "" if named else f"[RANK {self._rank}] "

    def is_printed(self, record: logging.LogRecord, handler: logging.Handler) -> bool:
        """Return whether a handler that prints to the terminal prints this record."""
        if record.levelno < logging.WARNING:
            return True
        text, stream = record_message(record), getattr(handler, "stream", None)
        is_shared = self._is_shared(record, text)
        if is_shared and not self.is_first(record.name, record.levelno, text, record.pathname, record.lineno):
            return self._hide_from_terminal(handler.format(record) + getattr(handler, "terminator", "\n"), stream)
        if not vars(record).get(NOTIFIED):
            setattr(record, NOTIFIED, True)
            self._notify(record.name, text)
            label = self.label(stream) if is_shared else ""
            record.msg = f"{label}{record.msg}" if label else record.msg
        return True

    def _is_shared(self, record: logging.LogRecord, text: str) -> bool:
        """Return whether one process may print this record for all; not if every process logs it on purpose."""
        is_warning = record.levelno < logging.ERROR and not record.exc_info
        return is_warning and self._is_installed(record.pathname) and not text.startswith("[RANK ")

    def _notify(self, logger: str, text: str) -> None:
        """Pass a printed warning to the listeners, but not what they log themselves."""
        if not self._notifying.active:
            self._notifying.active = True
            try:
                for listener in warning_listeners():
                    listener(logger, text)
            finally:
                self._notifying.active = False

    def _is_installed(self, path: str) -> bool:
        """Return whether a file belongs to a library, ours included, or to Python itself, and not to the user."""
        path = os.path.normcase(path)
        return "site-packages" in path or "dist-packages" in path or path.startswith(self._installed)


class _NotifyState(threading.local):
    """Whether this thread is notifying listeners."""

    active: bool = False


class _ConsoleFilter:
    """The filter of one handler."""

    def __init__(self, dedup: WarningDedup, handler: logging.Handler) -> None:
        self._dedup = dedup
        self._handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        return self._dedup.is_printed(record, self._handler)


def _user_wants_all(category: type[Warning], text: str) -> bool:
    """Return whether the user or pytest has asked to see every warning."""
    if "_pytest" in sys.modules or any(option.startswith(("a", "e")) for option in sys.warnoptions):
        return True
    return any(
        action in ("always", "all") and issubclass(category, kind) and (pattern is None or pattern.match(text))
        for action, pattern, kind, *_ in warnings.filters
    )
