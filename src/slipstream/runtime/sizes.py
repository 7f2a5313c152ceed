"""Which batch sizes are tried, one after the other: numbers only, so that every process comes to the same ones by itself.

With an effective batch size, only sizes are tried that make it up exactly: `batch size * processes * steps` is that number for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from slipstream.errors import ConfigError

__all__ = ["Sizes"]


class Sizes:
    """The sizes of one `find_executable_batch_size`.

    >>> sizes = Sizes(128, None, effective_batch_size=96)
    >>> sizes.first(processes=2), sizes.after(48, processes=2), sizes.arguments(24, processes=2)
    (48, 24, (24, 2))
    """

    def __init__(self, start: int, reduce: Callable[..., int] | None, effective_batch_size: int | None) -> None:
        _check_whole("starting_batch_size", start)
        if effective_batch_size is not None:
            _check_whole("effective_batch_size", effective_batch_size)
        self._start = start
        self._effective = effective_batch_size
        self._reduce = _halved if reduce is None else _with_present_size(reduce)

    @property
    def names(self) -> tuple[str, ...]:
        """What the function gets first."""
        return ("batch_size",) if self._effective is None else ("batch_size", "gradient_accumulation_steps")

    def arguments(self, size: int, processes: int) -> tuple[int, ...]:
        """What the function is called with for a size."""
        return (size,) if self._effective is None else (size, self._effective // (processes * size))

    def first(self, processes: int, fitted: int | None = None) -> int:
        """The size to begin with: the one that fitted last, if there is one."""
        return self._possible(self._start if fitted is None else fitted, processes)

    def after(self, size: int, processes: int) -> int:
        """The size to try when one did not fit; 0 if there is none."""
        smaller = self._reduce(size)
        if isinstance(smaller, bool) or not isinstance(smaller, int) or smaller >= size:
            raise ConfigError(
                f"reduce_batch_size_fn gave {smaller!r} after {size} did not fit: the next batch size has to be a smaller whole number, "
                "such as lambda size: int(size * 0.9)"
            )
        return self._possible(smaller, processes) if smaller > 0 else 0

    def _possible(self, size: int, processes: int) -> int:
        """The largest size from this one downwards that makes up the effective batch size."""
        if self._effective is None:
            return size
        share, rest = divmod(self._effective, processes)
        if rest:
            raise ConfigError(
                f"effective_batch_size={self._effective} cannot be shared by {processes} processes: write a multiple of {processes}, "
                f"such as {max(1, share) * processes} or {(share + 1) * processes}"
            )
        return next(one for one in range(min(size, share), 0, -1) if share % one == 0)


def _check_whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} cannot be used: batch sizes are whole numbers from 1; write e.g. 128")


def _halved(size: int) -> int:
    return size // 2


def _with_present_size(reduce: Callable[..., int]) -> Callable[[int], int]:
    """The user's function as one of the present size; one that needs no argument keeps its own count, and is called without."""
    if not callable(reduce):
        raise ConfigError(f"reduce_batch_size_fn={reduce!r} is not a function: write e.g. lambda size: int(size * 0.9)")
    signature = inspect.signature(reduce)
    for given in (0, 1):
        try:
            signature.bind(*(0 for _ in range(given)))
        except TypeError:
            continue
        return (lambda size: reduce(size)) if given else (lambda size: reduce())
    raise ConfigError(f"reduce_batch_size_fn takes {signature}: it is called with the batch size that did not fit, or with nothing")
