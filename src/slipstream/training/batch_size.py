"""`find_executable_batch_size`: call a function with a smaller batch until it fits into memory, with the same size on every process.

Errors that are not about memory are raised at once. Before the next attempt, the frames of the failed one are cleared and device caches
are emptied. A rank that runs out of memory sets a flag in the rendezvous store and goes to the agreement call; ranks in another
collective of this library see the flag and join it, and if a rank does not come within a few seconds the process group is ended, which
ends its waits, and all ranks meet in a new one. So everything must be built and prepared inside the function.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from slipstream.config.handlers import check_count
from slipstream.devices.memory import clear_after_failure, should_reduce_batch_size
from slipstream.distributed.call_site import call_site
from slipstream.distributed.current import current
from slipstream.distributed.guard import Body, Channel, CollectiveCall
from slipstream.distributed.process_group import Runtime
from slipstream.errors import (
    ConfigError,
    DistributedOperationException,
    MismatchError,
    PeerLostError,
    StateError,
    WaitTimeoutError,
)
from slipstream.observability.memory import summarize_alive

__all__ = ["BatchSizeSchedule", "find_executable_batch_size"]


class BatchSizeSchedule:
    """The sizes of one `find_executable_batch_size`.

    >>> sizes = BatchSizeSchedule(128, None, effective_batch_size=96)
    >>> sizes.first(processes=2), sizes.after(48, processes=2), sizes.arguments(24, processes=2)
    (48, 24, (24, 2))
    """

    def __init__(self, start: int, reduce: Callable[..., int] | None, effective_batch_size: int | None) -> None:
        for name, value in (("starting_batch_size", start), ("effective_batch_size", effective_batch_size)):
            if value is not None or name == "starting_batch_size":
                check_count(value, f"{name}={value!r} cannot be used: batch sizes are whole numbers from 1; write e.g. 128")
        self._start = start
        self._effective = effective_batch_size
        self._reduce = (lambda size: size // 2) if reduce is None else _with_present_size(reduce)

    @property
    def names(self) -> tuple[str, ...]:
        """What the function gets first."""
        return ("batch_size",) if self._effective is None else ("batch_size", "gradient_accumulation_steps")

    def arguments(self, size: int, processes: int) -> tuple[int, ...]:
        """Return what the function is called with for a size."""
        return (size,) if self._effective is None else (size, self._effective // (processes * size))

    def first(self, processes: int, fitted: int | None = None) -> int:
        """Return the size to begin with: the one that fitted last, if there is one."""
        return self._possible(self._start if fitted is None else fitted, processes)

    def after(self, size: int, processes: int) -> int:
        """Return the size to try when one did not fit; 0 if there is none."""
        smaller = self._reduce(size)
        if isinstance(smaller, bool) or not isinstance(smaller, int) or smaller >= size:
            raise ConfigError(
                f"reduce_batch_size_fn gave {smaller!r} after {size} did not fit: the next batch size has to be a smaller whole number, "
                "such as lambda size: int(size * 0.9)"
            )
        return self._possible(smaller, processes) if smaller > 0 else 0

    def _possible(self, size: int, processes: int) -> int:
        """Return the largest size from this one downwards that makes up the effective batch size."""
        if self._effective is None:
            return size
        share, rest = divmod(self._effective, processes)
        if rest:
            raise ConfigError(
                f"effective_batch_size={self._effective} cannot be shared by {processes} processes: write a multiple of {processes}, "
                f"such as {max(1, share) * processes} or {(share + 1) * processes}"
            )
        return next(index for index in range(min(size, share), 0, -1) if share % index == 0)


def _with_present_size(reduce: Callable[..., int]) -> Callable[[int], int]:
    """Return the user's function as one of the present size; one that needs no argument keeps its own count, and is called without."""
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


_OPERATION = "find_executable_batch_size"
_GRACE_SECONDS = 3.0
"""Seconds that the others have to come by themselves; then the process group is ended, so that they do."""
_MAX_MEETINGS = 6
"""How often processes that are told to come may be in yet another call (in a `finally` of the user's, say) before that is an error."""
_NOTICE_SECONDS = 2.0
"""Seconds that a process whose connection broke looks for the note of the one that ran out of memory."""
_LOST_CONNECTION = ("gloo/transport/", "Connection closed by peer", "Connection reset by peer")
_LONGEST_TEXT = 300
_logger = logging.getLogger(__name__)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    effective_batch_size: int | None = None,
) -> Callable[..., Any]:
    """Decorate a function so that it is called with smaller batch sizes until it does not run out of memory.

    The size is halved, or what `reduce_batch_size_fn` says: a function of the present size, or one without arguments that keeps its
    own count. With `effective_batch_size` the function is called as `function(batch_size, gradient_accumulation_steps, ...)`, and
    `batch_size * processes * steps` is that number for every size that is tried, so that the training stays the same.

    A later call begins with the size that fitted last. Build and prepare everything inside of the function: what is made outside
    keeps its memory between the tries, and with several processes it may belong to a process group that had to be ended.

    >>> @find_executable_batch_size(starting_batch_size=64)
    ... def train(batch_size, epochs):
    ...     if batch_size > 20:
    ...         raise MemoryError
    ...     return f"{epochs} epochs with batches of {batch_size}"
    >>> train(3)
    '3 epochs with batches of 16'

    >>> @find_executable_batch_size(effective_batch_size=96)
    ... def train(batch_size, gradient_accumulation_steps):
    ...     if batch_size > 20:
    ...         raise MemoryError
    ...     return batch_size, gradient_accumulation_steps
    >>> train()
    (12, 8)
    """
    sizes = BatchSizeSchedule(starting_batch_size, reduce_batch_size_fn, effective_batch_size)
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            effective_batch_size=effective_batch_size,
        )
    if not callable(function):
        raise TypeError(
            f"{_OPERATION}({function!r}) needs the function that is to be called: to set the size, write starting_batch_size={function!r}"
        )
    return _decorated(function, sizes)


def _decorated(function: Callable[..., Any], sizes: BatchSizeSchedule) -> Callable[..., Any]:
    """Return the function without the parameters that are filled in; it remembers the size that fitted last."""
    signature = inspect.signature(function)
    given = _check_parameters(function, signature, sizes.names)
    fitted: int | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal fitted
        _check_arguments(function, signature, given, args, kwargs)
        runtime = current()
        search = _Search(runtime, _name(function))
        size = sizes.first(runtime.process.world_size, fitted)
        while True:
            attempt = search.attempt(size, functools.partial(function, *sizes.arguments(size, runtime.process.world_size), *args, **kwargs))
            if attempt.fits:
                fitted = size
                return attempt.result
            next_size = sizes.after(size, runtime.process.world_size)
            search.reduce(size, next_size, attempt)
            size = next_size

    call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[len(given) :])  # type: ignore[attr-defined]
    return call


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _check_parameters(function: Callable[..., Any], signature: inspect.Signature, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the parameters that are filled in; raise if the function has no place for them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [name for name, parameter in signature.parameters.items() if parameter.kind in positional]
    first = next(iter(signature.parameters), None)
    wanted = ", ".join(names)
    if first in ("self", "cls"):
        raise TypeError(
            f"{_OPERATION} cannot decorate the method {_name(function)}{signature}, as the batch size comes first: decorate a function "
            f"({wanted}, ...) inside of it, or the bound method"
        )
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        return tuple(own[: len(names)])
    if len(own) < len(names):
        short = getattr(function, "__name__", "function")
        raise TypeError(f"{_OPERATION}: {_name(function)}{signature} has no place for {wanted}: write def {short}({wanted}, ...)")
    return tuple(own[: len(names)])


def _check_arguments(
    function: Callable[..., Any], signature: inspect.Signature, given: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise for a call that passes what is filled in, or that the function could not take."""
    passed = [name for name in given if name in kwargs]
    try:
        if passed:
            raise TypeError(f"{passed[0]} was passed")
        signature.bind(*(0 for _ in given), *args, **kwargs)
    except TypeError as error:
        rest = ", ".join(list(signature.parameters)[len(given) :])
        raise TypeError(
            f"{_name(function)} was called with arguments that do not fit ({error}): {_OPERATION} fills in {' and '.join(given)} by "
            f"itself, so call it as {getattr(function, '__name__', 'function')}({rest})"
        ) from None


# -- one try ----------------------------------------------------------------------------------------------------------


@dataclass
class _Attempt:
    """How one try went: on this process, and, once they have agreed, on all of them."""

    fits: bool
    result: Any = None
    text: str = ""
    """Why it does not fit, with the rank where there are several; nothing if this process was called away from its try."""
    cause: BaseException | None = None
    """The out-of-memory error of this process, with emptied frames."""
    alive: str = ""
    """What tensors there were when memory ran out."""


class _Search:
    """One call of the decorated function: its tries, and the agreement with the other processes after each."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._tried: list[int] = []
        self._ended_after: int | None = None
        """The last size after which the process group had to be ended."""

    @property
    def _several(self) -> bool:
        return self._runtime.process.world_size > 1

    def attempt(self, size: int, function: Callable[[], Any]) -> _Attempt:
        """Call the function, and return how that went on all processes; errors that are not about memory are raised."""
        self._tried.append(size)
        own = self._call(function)
        if not own.fits:
            clear_after_failure(_is_between_processes)
        return self._agree(own) if self._several else own

    def _call(self, function: Callable[[], Any]) -> _Attempt:
        try:
            return _Attempt(fits=True, result=function())
        except Exception as error:
            if should_reduce_batch_size(error):
                self._runtime.store_flags.set(self._try)
                alive = summarize_alive()
                _empty_frames(error)
                return _Attempt(fits=False, text=_one_line(error), cause=error, alive=alive)
            if not self._is_called_away(error):
                if self._ended_after is not None:
                    _logger.warning(
                        "the process group had to be ended when batch size %s of %s did not fit: if the error that follows is about it, "
                        "build and prepare the model inside of the function",
                        self._ended_after,
                        self._name,
                    )
                raise
            _empty_frames(error)
            return _Attempt(fits=False)

    def reduce(self, size: int, next_size: int, attempt: _Attempt) -> None:
        """Log that a size did not fit; raise if there is none left."""
        if next_size < 1:
            tried = ", ".join(map(str, self._tried))
            raise StateError(
                f"no batch size fits: {self._name} ran out of memory with {tried} (the last time: {attempt.text}). "
                "Use a smaller model or sample, activation checkpointing, or a device with more memory"
            ) from attempt.cause
        if self._runtime.process.is_main:
            text = "batch size %s did not fit (%s); trying %s. When memory ran out: %s"
            _logger.warning(text, size, attempt.text, next_size, attempt.alive)

    # -- several processes ----------------------------------------------------------------------------------------

    @property
    def _try(self) -> str:
        """What is tried, in words that have to be the same on all processes."""
        return f"{self._name}, try {len(self._tried)} with batch size {self._tried[-1]}"

    def _is_called_away(self, error: Exception) -> bool:
        """Return whether this error is how this process hears that the batch did not fit on another one."""
        if not self._several or not _is_between_processes(error):
            return False
        return self._runtime.store_flags.is_set(self._try, wait=_NOTICE_SECONDS)

    def _agree(self, own: _Attempt) -> _Attempt:
        """Return the same answer on all processes: whether the batch fitted on all of them."""
        outcomes = self._exchange(own)
        if own.text:
            self._runtime.store_flags.clear(self._try)  # everybody is here, so everybody has seen it
        if all(fits for fits, *_ in outcomes):
            return own
        failed = [(rank, text, alive) for rank, (_, text, alive) in enumerate(outcomes) if text][:3]
        texts = "; ".join(f"rank {rank}: {text}" for rank, text, _ in failed)
        alive = "; ".join(f"rank {rank}: {alive}" for rank, _, alive in failed)
        return _Attempt(fits=False, text=texts, cause=own.cause, alive=alive)

    def _exchange(self, own: _Attempt) -> list[tuple[bool, str, str]]:
        """Return what every process says of its try; if one does not come, end the present group and meet the others in the next."""
        limits, flags = self._runtime.limits, self._runtime.store_flags
        used = self._runtime.generation if self._runtime.is_open else None
        outcome = "fits" if own.fits else own.text
        call = CollectiveCall(_OPERATION, self._try, call_site(), lambda: f"{_OPERATION} of {self._try} ({outcome})")
        for meeting in range(_MAX_MEETINGS):
            channel = self._open()
            brief = bool(own.text) and self._runtime.generation == used
            waits = replace(limits, timeout=min(_GRACE_SECONDS, limits.timeout)) if brief else limits
            try:
                body = Body()
                body.add(numpy.frombuffer(json.dumps([own.fits, own.text, own.alive]).encode(), dtype=numpy.uint8))
                with channel.guard(call, waits, patient=not brief) as guarded:
                    return [tuple(json.loads(data.tobytes())) for data in guarded.exchange(body)]
            except MismatchError:
                if meeting == _MAX_MEETINGS - 1 or not flags.is_set(self._try):
                    raise
            except PeerLostError:
                if not flags.is_set(self._try):
                    raise
                self._end_group()
            except WaitTimeoutError:
                if not brief:
                    raise
                self._end_group()
        raise AssertionError("the last meeting returns or raises")

    def _end_group(self) -> None:
        self._runtime.abandon(_OPERATION, f"{call_site()}, where {self._try} did not fit")
        self._ended_after = self._tried[-1]

    def _open(self) -> Channel:
        """Return the group, opened if it has to be, as patient with ranks that still work as the exchange itself."""
        limits = self._runtime.limits
        started = time.monotonic()
        while True:
            try:
                return self._runtime.channel()
            except WaitTimeoutError:
                if time.monotonic() - started > limits.barrier_timeout or self._runtime.others_are_silent(limits.timeout):
                    raise


def _is_between_processes(error: BaseException) -> bool:
    """Return whether an error may come from another process: one of ours, or a lost connection of torch's, also as the cause of another."""
    if isinstance(error, DistributedOperationException | torch.distributed.DistError):
        return True
    if isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST_CONNECTION):
        return True
    return error.__cause__ is not None and _is_between_processes(error.__cause__)


# -- forgetting a failed try ------------------------------------------------------------------------------------------


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:_LONGEST_TEXT] if text else type(error).__name__


def _empty_frames(error: BaseException) -> None:
    """Empty the frames that an exception, and those behind it, hold: their variables are what keeps the memory."""
    behind: list[BaseException | None] = [error]
    seen: set[int] = set()
    while behind:
        present = behind.pop()
        if present is None or id(present) in seen:
            continue
        seen.add(id(present))
        traceback.clear_frames(present.__traceback__)
        behind += [present.__cause__, present.__context__, *getattr(present, "exceptions", ())]
