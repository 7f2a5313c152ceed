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
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from slipstream.distributed.cluster import this_process
from slipstream.errors import ConfigError

__all__ = ["ProgressBar", "TqdmProgressBar", "bar", "counted", "is_interactive", "show_progress", "tqdm", "tqdm_class", "waiting"]


_UPDATE_SECONDS: Final = 0.3
_DELAY_SECONDS: Final = 1.0
_Chunk = TypeVar("_Chunk")


class ProgressBar:
    """Shows how far the work is; this base class shows nothing. A bar is closed by `with`, or by hand."""

    def update(self, count: int = 1) -> None:
        """Add to what is done."""

    def to(self, done: int, total: int | None = None) -> None:
        """Set what is done, and the total if that was not known before."""

    def close(self) -> None:
        """Remove the bar: the work is over, or has failed."""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


class TqdmProgressBar(ProgressBar):
    """A bar of tqdm that never goes beyond its total."""

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
    """Return a bar for `total` units of work, "B" being bytes; None if the total is not known (yet).

    `is_main`: whether this is the main process, for callers that know. `wanted=True` shows the bar everywhere, at once, and leaves it on
    the screen; `wanted=False` never shows it.

    >>> with bar(3, "counting") as shown:
    ...     for _ in range(3):
    ...         shown.update()
    """
    if wanted is False or not (wanted or is_interactive()) or not (this_process().is_main if is_main is None else is_main):
        return ProgressBar()
    scale = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    return TqdmProgressBar(total=total, desc=desc, unit=unit, initial=initial, delay=0.0 if wanted else after, leave=bool(wanted), **scale)


@contextmanager
def waiting(what: str, *, after: float = _DELAY_SECONDS) -> Iterator[None]:
    """Show `what` and the elapsed time around work of unknown size, on a terminal.

    >>> with waiting("building"):
    ...     sum(range(10))
    45
    """
    if not this_process().is_main or not is_interactive():
        yield
        return
    with (
        TqdmProgressBar(desc=what, delay=after, leave=False, bar_format="{desc} ... {elapsed}") as shown,
        _call_periodically(lambda: shown.update(0)),
    ):
        yield


@contextmanager
def _call_periodically(move: Callable[[], object], every: float = _UPDATE_SECONDS) -> Iterator[None]:
    """Call `move` from a thread every so many seconds inside the block, and once more at its end."""
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


@contextmanager
def show_progress(progress: bool | None, *, is_main: bool, finished: Callable[[], int], total: int, before: int) -> Iterator[None]:
    """Show a bar of finished items; `progress` None shows it where there is a terminal."""
    with bar(total, "", "item", is_main=is_main, wanted=progress, initial=before) as shown:
        if not isinstance(shown, TqdmProgressBar):
            yield
            return

        def move() -> None:
            with suppress(RuntimeError):  # the store is gone, which the work itself will report
                shown.to(min(total, before + finished()))

        with _call_periodically(move):
            yield


def counted(chunks: Iterable[_Chunk], advance: Callable[[int], object]) -> Iterator[_Chunk]:
    """Yield the same chunks of bytes, and call `advance` with the size of each when the next one is asked for.

    >>> done = []
    >>> b"".join(counted([b"slip", b"stream"], done.append)), done
    (b'slipstream', [4, 6])
    """
    for chunk in chunks:
        yield chunk
        advance(memoryview(chunk).nbytes)  # type: ignore[arg-type]


def _width() -> dict[str, Any]:
    """Return options for the width of the terminal, also when it changes; 80 columns where it says that it has none (some containers)."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # a notebook has none
        columns = 1
    return {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}


def is_interactive() -> bool:
    """Whether stderr is a terminal or a notebook."""
    stream = sys.stderr
    return stream is not None and not stream.closed and (stream.isatty() or _in_notebook())


def tqdm_class() -> Any:
    """Return the class of tqdm that fits: its widget in the process of a notebook, text everywhere else."""
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
