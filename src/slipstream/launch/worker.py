"""The life of a worker that runs Python: set up, run the target, say how it ended, end.

A forked worker enters through `Worker.live`, a fresh interpreter through `python -m slipstream.launch.worker KIND NAME ARGUMENTS`;
from there on both are the same. A failure is written down for the launcher, which prints it once for the whole job, so a
worker prints no traceback itself unless that is impossible or the user has installed an `excepthook` of their own.

It never talks to another process but through what it prints (`chorus.py`), and does not import torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from slipstream.errors import ConfigError, PeerLostError
from slipstream.launch.chorus import VOICE, join
from slipstream.launch.report import Confession, write_confession
from slipstream.launch.system import die_with_parent
from slipstream.launch.target import Target, end_interpreter, run, user_traceback

__all__ = ["CONFESSION", "STACK", "Worker", "fresh_interpreter", "live", "take_on"]

CONFESSION: Final = "SLIPSTREAM_INTERNAL_CONFESSION"
"""The variable with the path where a failing worker leaves its record."""
STACK: Final = "SLIPSTREAM_INTERNAL_STACK"
"""The variable with the path where a crashing worker's stack is written."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """What a forked worker is told; everything else it inherits."""

    target: Target
    environment: Mapping[str, str]
    """Complete: it replaces the launcher's."""
    stdout: int | None
    stderr: int | None
    """Open files that replace the standard streams, or None to keep them."""
    foreign: frozenset[int]
    """Open files of the launcher that are none of the worker's business."""
    handlers: Mapping[signal.Signals, Any]
    """What signals did before the launcher installed handlers of its own."""
    blocked: frozenset[int]
    """The signals that were blocked before the fork blocked all of them."""
    parent: int

    def live(self) -> NoReturn:
        """The whole life of a forked worker, from right after the fork."""
        die_with_parent(self.parent)
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        for source, place in ((self.stdout, 1), (self.stderr, 2)):
            if source is not None:
                os.dup2(source, place)
        for number in self.foreign:
            with contextlib.suppress(OSError):
                os.close(number)
        os.environ.clear()
        take_on(self.environment)
        _fresh_randomness()
        live(self.target)


def take_on(environment: Mapping[str, str]) -> None:
    """Set variables of this process: the launcher's, before it imports what reads them, and a forked worker's."""
    os.environ.update(environment)


def live(target: Target) -> NoReturn:
    """Run the target in this process and end the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            # a line of one rank stays in one piece, also where PYTHONUNBUFFERED would write its end separately
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    _watch_for_crashes(os.environ.pop(STACK, ""))
    confession_path = os.environ.pop(CONFESSION, "")
    join(os.environ.pop(VOICE, ""), os.environ)
    code = 0
    try:
        run(target)
    except SystemExit as request:
        code = _exit_code(request, confession_path)
    except BaseException as error:
        code = _failed(error, confession_path)
    end_interpreter(code)


def _fresh_randomness() -> None:
    """A fork copies random states; fresh interpreters would each have one of their own."""
    random.seed()
    legacy = sys.modules.get("numpy.random")
    if legacy is not None:
        legacy.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _watch_for_crashes(path: str) -> None:
    if path:
        with contextlib.suppress(OSError):
            faulthandler.enable(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), all_threads=False)


def _exit_code(request: SystemExit, confession_path: str) -> int:
    """The exit code that the interpreter would give; a text is the message of a failure."""
    if request.code is None:
        return 0
    if request.code != 0:
        sys.last_type, sys.last_value = SystemExit, RuntimeError(f"exit code {request.code}")  # for what runs at exit; see `_failed`
    if isinstance(request.code, int):
        return request.code & 0xFF
    _confess(Confession(kind="exit", type="SystemExit", message=str(request.code), traceback="", when=time.time()), confession_path)
    return 1


def _failed(error: BaseException, confession_path: str) -> int:
    """Write down an exception that nobody caught; returns the exit code that belongs to it."""
    when = time.time()
    sys.last_type, sys.last_value = type(error), RuntimeError(str(error))  # for what runs at exit; its words, and not its frames
    error.__traceback__ = user_traceback(error)
    _show_to_hooks(error)
    kind, code = _kind_and_code(error)
    text = "" if kind in ("interrupt", "peer") else "".join(traceback.format_exception(error))
    _confess(Confession(kind=kind, type=_qualified(type(error)), message=str(error), traceback=text, when=when), confession_path)
    return code


def _show_to_hooks(error: BaseException) -> None:
    """Hooks of ours look at the error and print nothing of it; one of the user's prints it as it likes."""
    hook: Any = sys.excepthook
    while hasattr(hook, "look_at_failure"):  # see runtime/memory/watch.py
        hook.look_at_failure(error)
        hook = hook.previous
    if _is_the_users(hook):
        hook(type(error), error, error.__traceback__)


def _is_the_users(hook: Any) -> bool:
    """Not Python's own, and not the one that torch installs to put the rank before every line."""
    return hook is not sys.__excepthook__ and not str(getattr(hook, "__module__", "")).startswith("torch.")


def _kind_and_code(error: BaseException) -> tuple[Any, int]:
    table: tuple[tuple[type[BaseException], str, int], ...] = (
        (ConfigError, "config", 2),
        (PeerLostError, "peer", 1),
        (KeyboardInterrupt, "interrupt", 128 + signal.SIGINT),
    )
    return next(((kind, code) for known, kind, code in table if isinstance(error, known)), ("exception", 1))


def _qualified(kind: type) -> str:
    """The name as Python prints it above a traceback; our own exceptions without the path of their room."""
    plain = kind.__module__ in ("builtins", "__main__") or kind.__module__.partition(".")[0] == "slipstream"
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def _confess(confession: Confession, path: str) -> None:
    try:
        write_confession(path, confession)
    except OSError:  # no record is possible, so the user must read it here
        print(confession.traceback or confession.message, file=sys.stderr, flush=True)


def fresh_interpreter(arguments: list[str]) -> NoReturn:
    """The entry of a worker that was started with an interpreter of its own."""
    kind, name, *rest = arguments
    live(Target(kind, name, tuple(rest)))  # type: ignore[arg-type]


if __name__ == "__main__":
    fresh_interpreter(sys.argv[1:])
