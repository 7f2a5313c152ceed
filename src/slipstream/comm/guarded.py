"""The start of every collective: naming the call at the user's line, and telling the others what cannot be sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.comm.channel import Body, Channel, Limits, aligned
from slipstream.comm.sites import call_site
from slipstream.comm.verify import Call

__all__ = ["Reader", "announce", "check_rank", "refuse"]


_FROM_ANY_LINE = frozenset(
    {
        "wait_for_everyone",
        "main_process_first",
        "local_main_process_first",
        "destroy_process_group",
        "broadcast",
        "broadcast_object_list",
        "copy_tensor_to_devices",
        "gather_tensor_shape",
    }
)
"""Calls that programs make from two branches on purpose: who sends and who receives, who waits before and who after."""


def announce(operation: str, agreement: str, describe: Callable[[], str]) -> Call:
    """A call made at the user's present line; `describe` is asked only when the processes disagree.

    A call that joins everyone's data has to be made at the same line by all: from two lines it is most likely one that a process
    misses, and its data would be mixed with that of the next.
    """
    site = call_site()
    if operation.partition(" ")[0] not in _FROM_ANY_LINE:
        agreement = f"{agreement}\n{site}"
    return Call(operation, agreement, site, lambda: f"{operation} {describe()}".rstrip())


def refuse(channel: Channel, limits: Limits, operation: str, cause: Exception) -> Exception:
    """Tells the other processes that this one cannot take part, so that they raise too; gives back what to raise here.

    Where every process refuses for the same reason they agree, and each raises its own cause.
    """
    call = announce(operation, f"refused: {cause}", lambda: f"(which could not be sent: {cause})")
    with channel.turn(call, limits) as turn:
        turn.exchange(Body())
    return cause


def check_rank(rank: int | None, world_size: int) -> None:
    """Raises for a rank that this job does not have."""
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} does not exist: this job has {world_size} processes, 0 to {world_size - 1}")


class Reader:
    """Takes the parts of a body out again, in the order in which they were added; of an array or a flat tensor of bytes."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._position = 0

    def take(self, length: int) -> Any:
        start = aligned(self._position)
        self._position = start + length
        return self._data[start : start + length]
