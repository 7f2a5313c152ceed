"""When an error that says "out of memory" ends this process, what was alive is written down first.

`watch_memory` puts a hook before the `sys.excepthook` that is there. The hook looks at the error, and if memory ran out it logs a short
table, writes `memory-rank<rank>.json`, and adds a line to the error that says where; then the hook that was there before goes on as if
nothing had been. It never hides the error, and never raises one of its own. The launcher's workers, whose failures are caught, ask it too.

A notebook shows errors without `sys.excepthook`: there `memory_snapshot()` can be called by hand.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from slipstream.devices.memory import should_reduce_batch_size
from slipstream.runtime.current import current, current_or_none
from slipstream.runtime.memory.naming import Named
from slipstream.runtime.memory.snapshot import MemorySnapshot, memory_snapshot

__all__ = ["FailureHook", "MemoryWatch", "alive_in_a_line", "examine", "watch_memory"]

_Names = Callable[[], Iterable[Named]]
_Folder = Callable[[], "Path | None"]
_Tell = Callable[[Path, MemorySnapshot], object]
_SEEN: Final = "_slipstream_has_looked"
_DEEPEST: Final = 20
_logger = logging.getLogger(__name__)


class MemoryWatch:
    """Who knows the names of tensors, and where a snapshot goes. Made by `watch_memory`; `close` ends it."""

    def __init__(self, names: _Names, folder: _Folder, tell: _Tell | None) -> None:
        self._names, self._folder, self._tell = _held(names), _held(folder), None if tell is None else _held(tell)

    @property
    def has_owner(self) -> bool:
        """Whether whoever knows the names is still there."""
        return self._names() is not None

    def named(self) -> Iterator[Named]:
        """The tensors that have names; none once their owner is gone."""
        names = self._names()
        if names is not None:
            yield from names()

    def folder(self) -> Path | None:
        """Where a snapshot is written."""
        folder = self._folder()
        return None if folder is None else folder()

    def tell(self, path: Path, snapshot: MemorySnapshot) -> None:
        """Says where a snapshot is."""
        tell = None if self._tell is None else self._tell()
        if tell is not None:
            tell(path, snapshot)

    def close(self) -> None:
        """Nothing is asked here any more; with the last watch the hook goes too, if none was put before it."""
        runtime = current_or_none()
        if runtime is not None and self in runtime.memory_watches:
            runtime.memory_watches.remove(self)
            if not runtime.memory_watches and isinstance(sys.excepthook, FailureHook):
                sys.excepthook = sys.excepthook.previous


def watch_memory(names: _Names, folder: _Folder = lambda: None, tell: _Tell | None = None) -> MemoryWatch:
    """From now on, an error about memory that ends this process is answered with a snapshot.

    `names()` gives what tensors are called (`named_tensors(models, optimizers)`), `folder()` where `memory-rank<rank>.json` goes, or None
    for nowhere, and `tell(path, snapshot)` is called when it is there. Methods are held weakly: a watch keeps nobody alive.

    >>> import torch
    >>> weight = torch.zeros(1000)
    >>> watch = watch_memory(lambda: [("parameter", "weight", weight)])
    >>> [one.name for one in memory_snapshot().alive if one.name]
    ['weight']
    >>> watch.close()
    """
    watch = MemoryWatch(names, folder, tell)
    watches = current().memory_watches
    watches[:] = [*(one for one in watches if one.has_owner), watch]
    if not isinstance(sys.excepthook, FailureHook):
        sys.excepthook = FailureHook(sys.excepthook)
    return watch


class FailureHook:
    """A `sys.excepthook` that looks at an error before the one that was there shows it."""

    def __init__(self, previous: Callable[..., Any]) -> None:
        self.previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.look_at_failure(error)
        self.previous(kind, error, trace)

    def look_at_failure(self, error: BaseException) -> None:
        """Looks, and shows nothing of the error itself: for those who catch it (`launch/worker.py`)."""
        examine(error)


def examine(error: BaseException) -> None:
    """If an error says that memory ran out, or came of one that does: writes down what is alive. Once for each error; never raises."""
    try:
        if getattr(error, _SEEN, False) or not _is_about_memory(error):
            return
        setattr(error, _SEEN, True)
        _write_down(error)
    except Exception as problem:  # the error that is being told counts for more
        _logger.warning("memory ran out, and what was alive could not be told (%s: %s)", type(problem).__name__, problem)


def alive_in_a_line() -> str:
    """Return what is alive now as a clause for one line (`MemorySnapshot.line`). Never raises."""
    try:
        return memory_snapshot(1).line()
    except Exception as problem:  # memory has run out: it may be too little for this too
        return f"what was alive could not be told ({type(problem).__name__})"


def _is_about_memory(error: BaseException) -> bool:
    one: BaseException | None = error
    for _ in range(_DEEPEST):
        if one is None:
            return False
        if should_reduce_batch_size(one):
            return True
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return False


def _write_down(error: BaseException) -> None:
    snapshot = memory_snapshot()
    runtime = current_or_none()
    watches = [] if runtime is None else list(runtime.memory_watches)
    rank = f"[RANK {snapshot.rank}] " if runtime is not None and runtime.process.world_size > 1 else ""
    _logger.error("%smemory ran out: %s", rank, snapshot)
    written: Path | None = None
    for watch in watches:
        try:
            folder = watch.folder()
            if folder is not None:
                written = snapshot.write(folder / f"memory-rank{snapshot.rank}.json")
                watch.tell(written, snapshot)
        except Exception as problem:  # a full disk, a store that is gone: what is in the log is still there
            _logger.warning("%sthe snapshot of memory could not be written (%s: %s)", rank, type(problem).__name__, problem)
    where = f"; all of it is in {written}" if written is not None else ""
    if hasattr(error, "add_note"):
        error.add_note(f"When memory ran out, {snapshot.line()}{where}")
    elif where:
        _logger.error("%s%s", rank, where.removeprefix("; "))


def _held(function: Any) -> Callable[[], Any]:
    """A function as it is, and a method by a weak reference to its object: both asked by a call."""
    return weakref.WeakMethod(function) if inspect.ismethod(function) else lambda: function
