"""Barriers, blocks that some ranks run before the others, and functions that run on some ranks only.

All waits here are patient: they last up to `barrier_timeout` as long as the other ranks show signs of life. An exception inside a block
that runs first reaches the ranks that wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from slipstream.distributed.guard import Body, Channel, Limits, encode_message, make_call
from slipstream.errors import DistributedOperationException, PeerLostError

__all__ = ["barrier", "run_first", "run_only_if"]

_LONGEST_FAILURE = 1024


def barrier(channel: Channel, limits: Limits, operation: str = "wait_for_everyone", failure: str = "") -> str:
    """Return when every rank has called it; the result is the `failure` that another rank passed, if one did."""
    body = Body()
    body.add_bytes(encode_message(failure, _LONGEST_FAILURE))
    with channel.guard(make_call(operation, "", str), limits, patient=True) as guarded:
        failures = [data.tobytes().decode(errors="replace") for data in guarded.exchange(body)]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text and rank != channel.rank), "")


@contextmanager
def run_first(channel: Channel, limits: Limits, goes_first: bool, operation: str) -> Iterator[None]:
    """Let processes with `goes_first` run the block before the others do."""
    if not goes_first:
        failure = barrier(channel, limits, operation)
        if failure:
            raise PeerLostError(f"the process that goes first failed inside {operation}, so rank {channel.rank} does not go on: {failure}")
        yield
        return
    try:
        yield
    except DistributedOperationException:
        raise  # the others raise it too, and no longer wait for this block
    except BaseException as error:
        if not hasattr(error, "_reached_waiting_ranks"):  # else a block inside this one has told them
            barrier(channel, limits, operation, f"{type(error).__name__}: {error}")
            error._reached_waiting_ranks = True  # type: ignore[attr-defined]
        raise
    barrier(channel, limits, operation)


def run_only_if(condition: bool, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the function itself if the condition holds, else a function that returns None; without a function, the decorator."""
    if function is None:
        return partial(run_only_if, condition)
    if condition:
        return function

    @wraps(function)
    def do_nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return do_nothing
