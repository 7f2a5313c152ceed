"""Read what a device computes late, without waiting for the work that is queued on it.

A host that reads a value the usual way (`.item()`, `.tolist()`) waits until the device has done everything before it. `LateValues` marks
the point at which values will be there: `passed` asks without waiting, and reading after that point waits for a small copy alone, because
it goes through a stream of its own (`beside_queue`). Devices without streams or events are read the usual way. A `CompletionMark` tells
another thread whether a device has done what it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slipstream.devices.table import CPU, family_of

if TYPE_CHECKING:
    import torch

__all__ = ["CompletionMark", "LateValues", "beside_queue", "completion_event", "completion_mark"]


@contextmanager
def beside_queue(device: torch.device | str) -> Iterator[None]:
    """Within the block, work for a device does not wait for what is queued there: for values that it has computed already.

    Bring the result to the host within the block: then nothing of it is under way when the block ends.
    """
    family = family_of(device)
    if family is CPU or not family.has("Stream"):
        yield
        return
    with family.ask("stream", family.ask("Stream", device=device)):
        yield


class LateValues:
    """A tensor whose values are read once the device has computed them. Nothing may change it until then.

    >>> import torch
    >>> values = LateValues(torch.tensor([1, 2]))
    >>> values.passed, values.tolist()
    (True, [1, 2])
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        family = family_of(tensor.device)
        queue = None if family is CPU else family.ask("current_stream", device=tensor.device)
        self._event: Any = None if queue is None else queue.record_event()

    @property
    def at_once(self) -> bool:
        """Whether there is nothing to wait for later: the values are on the host, or their device has no events."""
        return self._event is None

    @property
    def passed(self) -> bool:
        """Whether the values are there. A device without events does not tell: then this is true, and reading may wait."""
        return self._event is None or bool(self._event.query())

    def tolist(self) -> Any:
        """Return the values; waits for the device unless `passed`."""
        if self._event is None:
            return self._tensor.tolist()
        if not self._event.query():
            self._event.synchronize()
        with beside_queue(self._tensor.device):
            return self._tensor.tolist()


class CompletionMark:
    """A point in the work of the current device. Setting it again moves it."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self._is_set = False

    def set(self) -> None:
        """Set the mark behind everything that the current stream of the current device was given."""
        self._event.record()
        self._is_set = True

    def is_pending(self) -> bool:
        """Return whether the mark was set and the device has not passed it; any thread may ask."""
        try:
            return self._is_set and not self._event.query()
        except RuntimeError:  # an error of the device, which the program meets itself
            return False


def completion_mark(device: str | None) -> CompletionMark | None:
    """Return a mark for devices of a type; None if work is done when a call returns, or if the family has no events.

    >>> completion_mark("cpu") is None
    True
    """
    event = None if device is None or family_of(device) is CPU else completion_event(device)
    return None if event is None else CompletionMark(event)


def completion_event(device: torch.device | str) -> torch.Event | None:
    """Return an event on which the host can wait for work of a device, recorded once; None if the device has none."""
    import torch

    try:
        event = torch.Event(device=device, blocking=True)
        event.record(torch.accelerator.current_stream(device))  # an event asks its device for support only now
        event.query()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return event
