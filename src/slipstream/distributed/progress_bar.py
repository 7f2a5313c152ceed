"""Create progress bars for work that can take long: loading, saving, merging, verifying.

A bar is shown by the main process only, on a terminal or in a notebook only, and only after about a second of work; it is removed when
the work ends, however it ends. Elsewhere `bar` returns one that shows nothing and imports nothing, so callers need not ask. This module
imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

from slipstream.distributed.cluster import this_process
from slipstream.errors import ConfigError

__all__ = [
    "HiddenProgressBar", "ProgressBar", "TqdmProgressBar", "bar", "call_periodically", "counted", "is_interactive", "tqdm", "tqdm_class",
    "waiting",
]


_UPDATE_SECONDS: Final = 0.3
_DELAY_SECONDS: Final = 1.0
_Chunk = TypeVar("_Chunk")


class ProgressBar(Protocol):
    """What shows how far the work is. It is closed by `with`, or by hand."""

    def update(self, count: int = 1) -> None:
        """So much more is done."""

    def to(self, done: int, total: int | None = None) -> None:
        """So much is done, of so much if that was not known before."""

    def close(self) -> None:
        """The work is over, or has failed."""

    def __enter__(self) -> ProgressBar: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class HiddenProgressBar:
    """No bar."""

    def update(self, count: int = 1) -> None:
        """Nothing is shown."""

    def to(self, done: int, total: int | None = None) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing was shown."""

    def __enter__(self) -> HiddenProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing was shown."""


class TqdmProgressBar(HiddenProgressBar):
    """A bar of tqdm; never beyond its total, so that a header or two more do no harm."""

    def __init__(self, **options: Any) -> None:
        self._bar: Any = tqdm_class()(miniters=0, **_width(), **options)

    def update(self, count: int = 1) -> None:
        left = count if self._bar.total is None else self._bar.total - self._bar.n
        self._bar.update(min(count, left))

    def to(self, done: int, total: int | None = None) -> None:
        if total is not None:
            self._bar.total = total
        self.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def bar(
    total: int | None,
    desc: str,
    unit: str = "it",
    *,
    is_main: bool | None = None,
    wanted: bool | None = None,
    after: float = _DELAY_SECONDS,
    initial: int = 0,
) -> ProgressBar:
    """A bar for `total` units of work, "B" being bytes; None if that is not known (yet).

    `is_main` says who this is, for those who know; `wanted=True` shows it everywhere and at once, and lets it stand, `False` nowhere.

    >>> with bar(3, "counting") as shown:
    ...     for _ in range(3):
    ...         shown.update()
    """
    if wanted is False or not (this_process().is_main if is_main is None else is_main) or not (wanted or is_interactive()):
        return HiddenProgressBar()
    scale = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    return TqdmProgressBar(total=total, desc=desc, unit=unit, initial=initial, delay=0.0 if wanted else after, leave=bool(wanted), **scale)


@contextmanager
def waiting(what: str, *, after: float = _DELAY_SECONDS) -> Iterator[None]:
    """Around work of which nothing is known but that it goes on: on a terminal, `what` and how long it takes.

    >>> with waiting("building"):
    ...     sum(range(10))
    45
    """
    if not this_process().is_main or not is_interactive():
        yield
        return
    with (
        TqdmProgressBar(desc=what, delay=after, leave=False, bar_format="{desc} ... {elapsed}") as shown,
        call_periodically(lambda: shown.update(0)),
    ):
        yield


@contextmanager
def call_periodically(move: Callable[[], object], every: float = _UPDATE_SECONDS) -> Iterator[None]:
    """Within it, `move` is called by a thread every so many seconds, and once more at the end."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(every):
            move()

    thread = threading.Thread(target=run, name="slipstream-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        move()


def counted(chunks: Iterable[_Chunk], advance: Callable[[int], object]) -> Iterator[_Chunk]:
    """The same chunks of bytes; how many they are is told when the next one is asked for.

    >>> done = []
    >>> b"".join(counted([b"slip", b"stream"], done.append)), done
    (b'slipstream', [4, 6])
    """
    for chunk in chunks:
        yield chunk
        advance(memoryview(chunk).nbytes)  # type: ignore[arg-type]


def _width() -> dict[str, Any]:
    """As wide as the terminal is, also when that changes; the usual 80 columns where it says that it has none, as some do in containers."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # a notebook has none
        columns = 1
    return {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}


def is_interactive() -> bool:
    """Whether somebody sees what is written to stderr as it comes: on a terminal, or in a notebook."""
    stream = sys.stderr
    return stream is not None and not stream.closed and (stream.isatty() or _in_notebook())


def tqdm_class() -> Any:
    """The class of tqdm that fits: its widget in the process of a notebook itself, text everywhere else."""
    if _in_notebook() and this_process().world_size == 1 and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm as widget

        return widget
    from tqdm.std import tqdm as text

    return text


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in getattr(shell, "config", ())


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by the first process of each machine, or by all with `main_process_only=False`, each on a line of its own.

    Which process this is comes from the runtime or the launcher's variables; nothing is opened for a progress bar. `disable=None` shows it
    on a terminal alone, as in tqdm.

    >>> list(tqdm(range(3), disable=True))
    [0, 1, 2]
    """
    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm({args[0]}, ...): the first argument is what is iterated over; write tqdm(..., main_process_only={args[0]}) "
            "to say who shows the bar"
        )
    process = this_process()
    if main_process_only and not process.is_local_main:
        kwargs["disable"] = True
    elif not main_process_only and process.local_world_size > 1:
        kwargs.setdefault("position", process.local_rank)
    return tqdm_class()(*args, **kwargs)
