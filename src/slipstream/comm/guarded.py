"""The start of every collective: naming the call at the user's line, and telling the others what cannot be sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slipstream.comm.channel import Body, Channel, Limits, aligned
from slipstream.comm.sites import call_site
from slipstream.comm.verify import Call

__all__ = ["Reader", "announce", "refuse"]


def announce(operation: str, agreement: str, describe: Callable[[], str]) -> Call:
    """A call made at the user's present line; `describe` is asked only when the processes disagree."""
    return Call(operation, agreement, call_site(), lambda: f"{operation} {describe()}".rstrip())


def refuse(channel: Channel, limits: Limits, operation: str, cause: Exception) -> Exception:
    """Tells the other processes that this one cannot take part, so that they raise too; gives back what to raise here.

    Where every process refuses for the same reason they agree, and each raises its own cause.
    """
    call = announce(operation, f"refused: {cause}", lambda: f"(which could not be sent: {cause})")
    with channel.turn(call, limits) as turn:
        turn.exchange(Body())
    return cause


class Reader:
    """Takes the parts of a body out again, in the order in which they were added; of an array or a flat tensor of bytes."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._position = 0

    def take(self, length: int) -> Any:
        start = aligned(self._position)
        self._position = start + length
        return self._data[start : start + length]
