"""Barriers, blocks that the main process runs first, and functions that run on one rank.

All of them are patient: they wait up to `barrier_timeout` as long as the other ranks show signs of life. An exception inside a block that
runs first reaches the ranks that wait for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from slipstream.distributed.collectives import barrier
from slipstream.distributed.guard import Channel
from slipstream.distributed.wait_monitor import Limits
from slipstream.errors import DistributedOperationException, PeerLostError

__all__ = ["run_first", "barrier_before_close", "run_only_if", "wait_for_everyone"]


def wait_for_everyone(channel: Channel, limits: Limits, operation: str = "wait_for_everyone") -> None:
    """Returns when every process has called it."""
    barrier(channel, limits, operation)


@contextmanager
def run_first(channel: Channel, limits: Limits, goes_first: bool, operation: str) -> Iterator[None]:
    """Processes with `goes_first` run the block before the others do."""
    if not goes_first:
        trouble = barrier(channel, limits, operation)
        if trouble:
            raise PeerLostError(f"the process that goes first failed inside {operation}, so rank {channel.rank} does not go on: {trouble}")
        yield
        return
    try:
        yield
    except DistributedOperationException:
        raise  # the others are in it too, and no longer wait for this block
    except BaseException as error:
        barrier(channel, limits, operation, f"{type(error).__name__}: {error}")
        raise
    barrier(channel, limits, operation)


def run_only_if(condition: bool, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function itself where the condition holds; elsewhere one that does nothing and gives None.

    Without a function, the decorator that does this to one.
    """
    if function is None:
        return partial(run_only_if, condition)
    if condition:
        return function

    @wraps(function)
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


def barrier_before_close(channel: Channel, limits: Limits) -> None:
    """Closing the group is a call that all make: a rank that is elsewhere shows here.

    While an exception is on its way nobody is waited for: the others learn that this rank has left.
    """
    if sys.exc_info()[0] is None:
        barrier(channel, limits, "destroy_process_group")
