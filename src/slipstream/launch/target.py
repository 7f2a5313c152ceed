"""Running what the user named, inside an interpreter that is already up, as if that interpreter had been started for it.

A script runs as by `python script.py`, a module as by `python -m module`, a function (a file that the notebook launcher wrote)
is called. `__main__`, `sys.argv`, `sys.path[0]` and the exit are what they would be in a fresh interpreter. It never looks at
the arguments, and nothing here imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn

from slipstream.config.sources import get_int_from_env, patch_environment
from slipstream.errors import ConfigError, SlipstreamError

__all__ = ["Kind", "PrepareForLaunch", "Target", "end_interpreter", "run", "user_traceback"]

Kind = Literal["script", "module", "executable", "function"]


@dataclass(frozen=True)
class Target:
    """What to run: its kind, its name (a path, a module, a program or the file of a function) and its arguments, untouched."""

    kind: Kind
    name: str
    arguments: tuple[str, ...] = ()


class PrepareForLaunch:
    """A function for `torch.multiprocessing.start_processes`, which calls it with the index of the process and the arguments.

    The function runs with RANK, LOCAL_RANK and FORK_LAUNCHED set; WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and on several machines NPROC
    and NODE_RANK, are those of the parent. `distributed_type="NO"` without `debug` sets no rank. `notebook_launcher` needs none of this.

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


def run(target: Target) -> None:
    """Run a script, module or function in this process; exceptions come through, SystemExit among them."""
    _RUNNERS[target.kind](target)


def _run_script(target: Target) -> None:
    path = os.path.abspath(target.name)
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    sys.argv[:] = [target.name, *target.arguments]
    with io.open_code(path) as file:
        source = file.read()
    from importlib.machinery import SourceFileLoader

    main = _new_main(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path), __package__=None, __spec__=None)
    exec(compile(source, path, "exec", dont_inherit=True), main)


def _run_module(target: Target) -> None:
    import runpy

    _first_on_path(os.getcwd())
    sys.argv[:] = ["-m", *target.arguments]
    try:
        # what `python -m` itself uses to find a module, packages with a __main__ included
        _, spec, code = runpy._get_module_details(target.name)  # type: ignore[attr-defined]
    except (runpy._Error, ImportError) as error:  # type: ignore[attr-defined]
        if isinstance(error, ImportError) and error.name and not target.name.startswith(error.name):
            raise  # a module that it imports is missing, not the module itself
        raise ConfigError(f"There is no module to run as {target.name} (from -m): {error}.") from None
    sys.argv[0] = spec.origin
    main = _new_main(__file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader, __package__=spec.parent, __spec__=spec)
    exec(code, main)


def _run_function(target: Target) -> None:
    """A pickled (function, arguments) pair, in a private folder that the launching process of the same user has just written."""
    import cloudpickle

    _new_main(__spec__=None)
    with open(target.name, "rb") as file:
        function, arguments = cloudpickle.load(file)
    function(*arguments)


_RUNNERS: Final[Mapping[str, Callable[[Target], None]]] = MappingProxyType(
    {"script": _run_script, "module": _run_module, "function": _run_function}
)


def _first_on_path(folder: str) -> None:
    """Put a folder where a fresh interpreter would, in place of what this one's start put there."""
    if getattr(sys.flags, "safe_path", False):  # Python 3.11 and later, -P: the user wants no such entry
        return
    sys.path[0:1] = [folder]


def _new_main(**names: object) -> dict[str, object]:
    """A fresh `__main__` module in place of the launcher's."""
    main = types.ModuleType("__main__")
    main.__dict__.update(names, __builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    return main.__dict__


def user_traceback(error: BaseException) -> types.TracebackType | None:
    """The traceback from the first frame of the user's code on, without the frames of this room.

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
        _cut_after_the_users(traceback)
    return traceback


def _cut_after_the_users(traceback: types.TracebackType | None) -> None:
    """An exception that we raise on purpose says all there is to say: the way to it inside of this package is left out."""
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
        threading._shutdown()  # type: ignore[attr-defined] # what the interpreter calls first when it ends
    atexit._run_exitfuncs()
    _flush_files()  # before objects go: the collector may close the inner part of a text file before the outer part has written
    sys.modules.pop("__main__", None)
    gc.collect()
    _flush_files()
    os._exit(code)


def _flush_files() -> None:
    """Files that the program never closed; text before bytes, because it writes into them."""
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        for file in [found for found in gc.get_objects() if type(found) is kind]:
            with contextlib.suppress(ValueError, OSError):
                file.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
