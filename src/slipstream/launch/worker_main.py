"""One worker that runs Python: set up the process, run the target, record how it ended, exit.

A forked worker starts in `ForkedWorker.run`, a fresh interpreter with `python -m slipstream.launch.worker_main KIND NAME ARGUMENTS`.
A script runs as with `python script.py`, a module as with `python -m module`; `__main__`, `sys.argv`, `sys.path[0]` and the exit are
those of a fresh interpreter. A failure is written to a file for the launcher, which prints it once for the whole job. A worker prints a
traceback only if it cannot write the file or the user has installed an `excepthook`. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import random
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NoReturn

from slipstream.config.sources import get_int_from_env, patch_environment
from slipstream.errors import ConfigError, PeerLostError, SlipstreamError
from slipstream.launch.failure_report import WorkerError, write_worker_error
from slipstream.launch.output import flush_streams, printable_text
from slipstream.launch.plan import Target
from slipstream.launch.warning_dedup import OUTPUT_VARIABLE, install_warning_dedup
from slipstream.launch.worker_processes import OpenFile, die_with_parent

__all__ = [
    "ERROR_FILE_VARIABLE", "ForkedWorker", "PrepareForLaunch", "SCRATCH_VARIABLE", "STACK_FILE_VARIABLE", "end_interpreter", "run_target",
    "run_worker", "set_environ", "user_traceback",
]


class PrepareForLaunch:
    """A function for `torch.multiprocessing.start_processes`, which calls it with the index of the process and the arguments.

    The function runs with RANK, LOCAL_RANK and FORK_LAUNCHED set; WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and on several machines NPROC
    and NODE_RANK, are inherited. `distributed_type="NO"` without `debug` sets no rank. `notebook_launcher` does not need this class.

    >>> PrepareForLaunch(lambda text: print(text, get_int_from_env(["RANK"], 0)), "MULTI_CPU")(1, "rank")
    rank 1
    """

    def __init__(self, launcher: Callable[..., object], distributed_type: Any = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.has_rank = debug or str(getattr(distributed_type, "value", distributed_type)) != "NO"

    def __call__(self, index: int, *args: object) -> None:
        """Run the function as the process with this index on this machine."""
        variables = {"FORK_LAUNCHED": 1}
        if self.has_rank:
            first = get_int_from_env(["NPROC"], 1) * get_int_from_env(["NODE_RANK"], 0)
            variables |= {"LOCAL_RANK": index, "RANK": first + index}
        with patch_environment(**variables):
            self.launcher(*args)


def run_target(target: Target) -> None:
    """Run a script, module or function in this process; every exception passes through, SystemExit included."""
    _RUNNERS[target.kind](target)


def _run_script(target: Target) -> None:
    path = os.path.abspath(target.name)
    _set_first_path_entry(os.path.dirname(os.path.realpath(path)))
    sys.argv[:] = [target.name, *target.arguments]
    with io.open_code(path) as file:
        source = file.read()
    from importlib.machinery import SourceFileLoader

    main = _new_main(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path), __package__=None, __spec__=None)
    exec(compile(source, path, "exec", dont_inherit=True), main)


def _run_module(target: Target) -> None:
    import runpy

    _set_first_path_entry(os.getcwd())
    sys.argv[:] = ["-m", *target.arguments]
    try:
        # What `python -m` itself uses to find a module, packages with a __main__ included. Private in CPython 3.10 to 3.13; the
        # comparison with plain Python in tests/launch/test_launch_worker.py notices. It can go when runpy has a public function.
        _, spec, code = runpy._get_module_details(target.name)  # type: ignore[attr-defined]
    except (runpy._Error, ImportError) as error:  # type: ignore[attr-defined]
        if isinstance(error, ImportError) and error.name and not target.name.startswith(error.name):
            raise  # a module that it imports is missing, not the module itself
        raise ConfigError(f"There is no module to run as {target.name} (from -m): {error}.") from None
    sys.argv[0] = spec.origin
    main = _new_main(__file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent, __spec__=spec)
    exec(code, main)


def _run_function(target: Target) -> None:
    """Call a pickled function from a private folder that the launching process of the same user has just written."""
    import cloudpickle

    _new_main(__spec__=None)
    with open(target.name, "rb") as file:
        function, arguments = cloudpickle.load(file)
    function(*arguments)


_RUNNERS: Final[Mapping[str, Callable[[Target], None]]] = MappingProxyType(
    {"script": _run_script, "module": _run_module, "function": _run_function}
)


def _set_first_path_entry(folder: str) -> None:
    """Make a folder the first entry of `sys.path`, as a fresh interpreter would."""
    if getattr(sys.flags, "safe_path", False):  # Python 3.11 and later with -P: no such entry is wanted
        return
    sys.path[0:1] = [folder]


def _new_main(**names: object) -> dict[str, object]:
    """Replace the launcher's `__main__` by a fresh module and return its namespace."""
    main = types.ModuleType("__main__")
    main.__dict__.update(names, __builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    return main.__dict__


def user_traceback(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the first frame of the user's code, without the frames of this package's launcher.

    >>> try:
    ...     1 / 0
    ... except ZeroDivisionError as error:
    ...     user_traceback(error) is error.__traceback__
    True
    """
    ours = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "<frozen ")
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(ours):
        traceback = traceback.tb_next
    if isinstance(error, SlipstreamError):
        _drop_own_frames(traceback)
    return traceback


def _drop_own_frames(traceback: types.TracebackType | None) -> None:
    """Leave out our own frames below the user's call, for an exception that we raise on purpose."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    last = None
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(package):
            last = traceback
        traceback = traceback.tb_next
    if last is not None:
        last.tb_next = None


def end_interpreter(code: int) -> NoReturn:
    """End this process as a fresh interpreter ends: threads joined, exit handlers run, objects finalised, files flushed.

    The interpreter itself is not torn down: a forked worker still holds objects of the launcher whose threads it does not have.
    """
    with contextlib.suppress(KeyboardInterrupt):
        # What the interpreter calls first when it ends. Private in CPython 3.10 to 3.13; tests/launch/test_launch_worker.py notices.
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    stuck: list[Any] = []
    _flush_files(stuck)  # first: the collector may close the buffer of a text file before the text has been written to it
    program = _program_modules()
    _kept = _process_groups(program)
    for name in program:
        del sys.modules[name]
    program.clear()
    gc.collect()
    _flush_files(stuck)
    _ends_in_time(partial(ctypes.CDLL(None).fflush, None))  # what C and C++ code has printed and not written yet
    os._exit(code)


_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def _program_modules() -> dict[str, dict[str, Any]]:
    """Return the names and the contents of the modules that are the user's own: neither installed, nor of Python or this package."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    foreign = (package + os.sep, os.path.dirname(os.__file__) + os.sep)
    found = {}
    for name, module in list(sys.modules.items()):
        contents = object.__getattribute__(module, "__dict__") if isinstance(module, types.ModuleType) else {}  # loads no lazy module
        file = str(contents.get("__file__") or "")
        is_own = file and not file.startswith(foreign) and not any(part in file for part in _INSTALLED)
        if name == "__main__" or is_own:
            found[name] = contents
    return found


def _process_groups(program: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Return the process groups that the modules of a program still hold, themselves or in replicas, for the caller to keep.

    torch internals: a thread of gloo's that is done with a collective lets go of it under the lock of its group, and may need the
    interpreter for it (torch 2.13). If the group goes in that moment, its destructor waits for the lock, and has the interpreter.
    """
    torch, replicas = sys.modules.get("torch.distributed"), sys.modules.get("torch.nn.parallel.distributed")
    if torch is None or replicas is None or not torch.is_available():
        return []
    models = [found for found in gc.get_objects() if issubclass(type(found), replicas.DistributedDataParallel)]
    values = [value for contents in program.values() for value in contents.values()]
    own = [value for value in values if issubclass(type(value), torch.ProcessGroup)]
    return own + [model.__dict__.get("process_group") for model in models]


def _flush_files(stuck: list[Any]) -> None:
    """Flush files that the program never closed; text files first, because they write into byte files.

    A file that cannot be flushed in time goes to `stuck`, which keeps it from being closed, and is left out from then on.
    """
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        for file in [found for found in gc.get_objects() if type(found) is kind]:
            if not any(file is known for known in stuck) and not _ends_in_time(partial(_flush, file)):
                stuck += [file, getattr(file, "buffer", None)]
    flush_streams()


def _flush(file: Any) -> None:
    with contextlib.suppress(ValueError, OSError):
        file.flush()


_FLUSH_LIMIT: Final = 5.0
"""Seconds that a file may take to be flushed while daemon threads run."""


def _ends_in_time(flush: Callable[[], object]) -> bool:
    """Flush a file, and return whether that has ended.

    A daemon thread that writes to a pipe nobody reads has the lock of the file for ever; the interpreter does not wait for it either.
    """
    if threading.active_count() == 1:
        flush()
        return True
    flusher = threading.Thread(target=flush, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_LIMIT)
    return not flusher.is_alive()


ERROR_FILE_VARIABLE: Final = "SLIPSTREAM_INTERNAL_ERROR_FILE"
"""Variable with the path of the `WorkerError` that a failing worker writes."""
STACK_FILE_VARIABLE: Final = "SLIPSTREAM_INTERNAL_STACK_FILE"
"""Variable with the path of the stack that a crashing worker writes."""
SCRATCH_VARIABLE: Final = "SLIPSTREAM_INTERNAL_SCRATCH"
"""Variable with the path of a folder for what ends with the worker."""


@dataclass(frozen=True, kw_only=True)
class ForkedWorker:
    """What a forked worker needs beyond what it inherits."""

    target: Target
    environment: Mapping[str, str]
    """All variables of the worker; they replace those of the launcher."""
    stdout: int | None
    stderr: int | None
    """Open files that replace the standard streams, or None to keep them."""
    foreign: frozenset[OpenFile]
    """Open files of the launcher, to be closed in the worker."""
    handlers: Mapping[signal.Signals, Any]
    """The signal handlers from before the launcher installed its own."""
    blocked: frozenset[int]
    """The signals that were blocked before the fork blocked all."""
    parent: int

    def run(self) -> NoReturn:
        """Set up the process right after the fork, run the target, and end."""
        die_with_parent(self.parent)
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        for source, place in ((self.stdout, 1), (self.stderr, 2)):
            if source is not None:
                os.dup2(source, place)
        self._close_foreign()
        os.environ.clear()
        set_environ(self.environment)
        _reseed()
        run_worker(self.target)

    def _close_foreign(self) -> None:
        """Close the files of the launcher, but not what has taken their numbers since the fork.

        torch internals: libuv, on which torch's store runs, replaces a pipe of its own at the beginning of every forked child, and the new
        one gets the numbers of the old one (torch 2.13). If it were closed here, libuv would close in the children of this process, such as
        the workers of a loader, what has these numbers by then. tests/launched/test_launched_runs.py notices.
        """
        for file in self.foreign:
            with contextlib.suppress(OSError):  # closed already
                if os.fstat(file.number).st_ino == file.inode:
                    os.close(file.number)


def set_environ(environment: Mapping[str, str]) -> None:
    """Set variables of this process: in the launcher, before it imports what reads them; in a forked worker, after the fork."""
    os.environ.update(environment)


def run_worker(target: Target) -> NoReturn:
    """Run the target in this process and end the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            # a line of one rank stays in one piece, also where PYTHONUNBUFFERED would write its end separately
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    _enable_faulthandler(os.environ.pop(STACK_FILE_VARIABLE, ""))
    error_path = os.environ.pop(ERROR_FILE_VARIABLE, "")
    _set_multiprocessing_folder(os.environ.pop(SCRATCH_VARIABLE, ""))
    install_warning_dedup(os.environ.pop(OUTPUT_VARIABLE, ""), os.environ)
    code = 0
    try:
        run_target(target)
    except SystemExit as request:
        code = _exit_code(request, error_path)
    except BaseException as error:
        code = _record_failure(error, error_path)
    end_interpreter(code)


def _reseed() -> None:
    """Reseed the random generators, whose states a fork has copied."""
    random.seed()
    legacy = sys.modules.get("numpy.random")
    if legacy is not None:
        legacy.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _enable_faulthandler(path: str) -> None:
    if path:
        with contextlib.suppress(OSError):
            faulthandler.enable(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), all_threads=False)


def _set_multiprocessing_folder(path: str) -> None:
    """Let multiprocessing, and so the workers of data loaders, keep its sockets in a folder that the launcher removes.

    Its own, `pymp-*` in the folder for temporary files, stays there when the process is killed. Python internals: the entry `tempdir` is
    where `multiprocessing.util.get_temp_dir` remembers the folder (Python 3.10 to 3.14); tests/launched/test_launched_failures.py notices.
    """
    if path:
        from multiprocessing.process import current_process

        current_process()._config["tempdir"] = path  # type: ignore[attr-defined]


def _exit_code(request: SystemExit, error_path: str) -> int:
    """Return the exit code that the interpreter would use; any other object is the message of a failure."""
    given: Any = request.code
    if given is None or (isinstance(given, int) and given == 0):
        return 0
    text = printable_text(given)
    sys.last_type, sys.last_value = SystemExit, RuntimeError(f"exit code {text}")  # for exit handlers; see `_record_failure`
    if isinstance(given, int):
        return given & 0xFF if given.bit_length() < 64 else 0xFF  # what does not fit into a C integer is -1
    _write_error(WorkerError(kind="exit", type="SystemExit", message=text, traceback="", when=time.time()), error_path)
    return 1


def _record_failure(error: BaseException, error_path: str) -> int:
    """Write an uncaught exception to the error file; return its exit code."""
    when = time.time()
    sys.last_type, sys.last_value = type(error), RuntimeError(printable_text(error))  # for exit handlers: the text without the frames
    error.__traceback__ = user_traceback(error)
    kind, code = _kind_and_code(error)
    try:
        _call_excepthooks(error)
    except SystemExit as request:  # of the user's hook
        code = _exit_code(request, error_path)
    text = "" if kind in ("interrupt", "peer") else "".join(traceback.format_exception(error))
    record = WorkerError(kind=kind, type=_qualified_name(type(error)), message=printable_text(error), traceback=text, when=when)
    _write_error(record, error_path)
    return code


def _call_excepthooks(error: BaseException) -> None:
    """Call our own hooks, which only examine the error, and then the user's hook, which may print it."""
    hook: Any = sys.excepthook
    while hasattr(hook, "look_at_failure"):  # see observability/memory.py
        hook.look_at_failure(error)
        hook = hook.previous
    if _is_user_hook(hook):
        try:
            hook(type(error), error, error.__traceback__)
        except Exception:  # the user's code: it must not hide the failure
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()


def _is_user_hook(hook: Any) -> bool:
    """Return whether a hook is neither Python's own nor torch's, which prefixes every line with the rank."""
    return hook is not sys.__excepthook__ and not str(getattr(hook, "__module__", "")).startswith("torch.")


def _kind_and_code(error: BaseException) -> tuple[Any, int]:
    table: tuple[tuple[type[BaseException], str, int], ...] = (
        (ConfigError, "config", 2),
        (PeerLostError, "peer", 1),
        (KeyboardInterrupt, "interrupt", 128 + signal.SIGINT),
    )
    return next(((kind, code) for known, kind, code in table if isinstance(error, known)), ("exception", 1))


def _qualified_name(kind: type) -> str:
    """Return the name as Python prints it above a traceback; our own exceptions without their module."""
    plain = kind.__module__ in ("builtins", "__main__") or kind.__module__.partition(".")[0] == "slipstream"
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def _write_error(worker_error: WorkerError, path: str) -> None:
    try:
        write_worker_error(path, worker_error)
    except OSError:  # the launcher will not find it, so print it here
        print(worker_error.traceback or worker_error.message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _kind, _name, *_arguments = sys.argv[1:]
    run_worker(Target(_kind, _name, tuple(_arguments)))  # type: ignore[arg-type]
