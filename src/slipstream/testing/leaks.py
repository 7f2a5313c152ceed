"""Detect what a test leaves behind: a process group, a thread, an environment variable, a child process.

Call `observe()` before and `wait_for_none(before)` after: things that are about to end get a short time, the rest is returned in words.
`restore(before)` undoes what can be undone, so that one leaking test fails alone. A process that was running before is never ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import psutil

from slipstream.testing import environment

__all__ = ["ProcessSnapshot", "observe", "restore", "wait_for_none"]

_SET_BY_THE_TEST_RUNNER = frozenset({"PYTEST_CURRENT_TEST", "PYTEST_VERSION", "COLUMNS", "LINES"})
_SET_BY_THE_COMPILER = ("TORCHINDUCTOR_", "TRITON_")  # torch tells its compiler's own child processes where its caches and tools are
# What is kept for the whole process, by design: the monitor of tqdm, trackers and servers of multiprocessing, and the pool of torch's
# compiler (torch 2.8 starts it with the first compiled model, whatever the backend).
_THREADS_OF_OTHERS = ("tqdm.", "torch._inductor.compile_worker.")
_PROGRAMS_OF_OTHERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker/")


@dataclass(frozen=True)
class ProcessSnapshot:
    """The state of the process when the test began."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    variables: Mapping[str, str] = field(repr=False)
    group: bool
    """A process group was open already."""


def observe(variables: Mapping[str, str] | None = None) -> ProcessSnapshot:
    """Return the state of this process.

    >>> before = observe()
    >>> still_running = threading.Event()
    >>> thread = threading.Thread(target=still_running.wait, name="left behind")
    >>> thread.start()
    >>> wait_for_none(before, seconds=0.05)
    ["thread 'left behind' (started by threading)"]
    >>> still_running.set()
    >>> wait_for_none(before)
    []
    """
    return ProcessSnapshot(
        threads=frozenset(threading.enumerate()),
        children=frozenset(child.pid for child in _children()),
        variables=environment.snapshot() if variables is None else variables,
        group=_group_is_open(),
    )


def wait_for_none(before: ProcessSnapshot, *, seconds: float = 2.0, expected: Collection[int] = ()) -> list[str]:
    """Return what is left that was not there before, as text; wait up to `seconds` for it to end. `expected` process ids may stay."""
    deadline = time.monotonic() + seconds
    pause = 0.001
    while True:
        ending = [*_threads(before), *_processes(before, expected)]
        if not ending or time.monotonic() > deadline:
            return [*_group(before), *_variables(before), *ending]
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def restore(before: ProcessSnapshot, *, expected: Collection[int] = ()) -> None:
    """Close a leaked group, put the variables back, and end leaked children (threads cannot be ended)."""
    if _group_is_open() and not before.group:
        sys.modules["torch.distributed"].destroy_process_group()
    now = environment.snapshot()
    environment.replace(
        {**{name: value for name, value in now.items() if _is_set_by_others(name)}, **_compared_variables(before.variables)}
    )
    for child in _new_children(before, expected):
        child.kill()
        child.wait(timeout=5)


def _group(before: ProcessSnapshot) -> Iterable[str]:
    if _group_is_open() and not before.group:
        yield "torch.distributed process group (call destroy_process_group)"


def _group_is_open() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _compared_variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not _is_set_by_others(name)}


def _is_set_by_others(name: str) -> bool:
    """Return whether the test runner sets a variable, or torch, which does so once when its compiler is imported."""
    return name in _SET_BY_THE_TEST_RUNNER or name.startswith(_SET_BY_THE_COMPILER)


def _variables(before: ProcessSnapshot) -> Iterable[str]:
    """Yield changed variables by name; a value may be a secret."""
    was, now = _compared_variables(before.variables), _compared_variables(environment.snapshot())
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            change = "set" if name not in was else "removed" if name not in now else "changed"
            yield f"environment variable {name} ({change})"


def _threads(before: ProcessSnapshot) -> Iterable[str]:
    for thread in threading.enumerate():
        module = getattr(getattr(thread, "_target", None), "__module__", None) or type(thread).__module__
        if thread not in before.threads and not module.startswith(_THREADS_OF_OTHERS):
            yield f"thread {thread.name!r} (started by {module})"


def _processes(before: ProcessSnapshot, expected: Collection[int]) -> Iterable[str]:
    for child in _new_children(before, expected):
        try:
            yield f"child process {child.pid} ({' '.join(child.cmdline()) or child.name()})"
        except psutil.Error:
            continue  # it has ended meanwhile, which is what we wait for


def _new_children(before: ProcessSnapshot, expected: Collection[int]) -> list[psutil.Process]:
    return [child for child in _children() if child.pid not in before.children and child.pid not in expected and not _is_foreign(child)]


def _children() -> list[psutil.Process]:
    return psutil.Process().children() if _has_children() else []


def _has_children() -> bool:
    """Return whether there is a child, by one system call: most tests have none."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_foreign(child: psutil.Process) -> bool:
    try:
        return child.status() == psutil.STATUS_ZOMBIE or any(word in part for part in child.cmdline() for word in _PROGRAMS_OF_OTHERS)
    except psutil.Error:
        return True
