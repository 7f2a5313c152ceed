"""Watch sections in which torch's own collectives run, such as gradient averaging in a backward pass.

Those waits happen in C++, where the guard cannot see them. A `TorchCollectiveWatchdog` records that this rank is in such a section, at
the user's line; the heartbeat thread reports long waits and, when a wait cannot end, closes the connections of torch's group so that the
blocked call fails. The error that leaves the section names every rank and its line. Entering and leaving costs a few assignments. An
error of the program's own passes through unchanged; if torch's collectives had begun, the next section opens another generation of the
group.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from time import monotonic
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from slipstream.distributed.call_site import format_site, is_package_frame
from slipstream.distributed.guard import GroupChannel
from slipstream.distributed.heartbeat import RankPosition
from slipstream.distributed.wait_monitor import Limits, WaitMonitor
from slipstream.errors import DistributedOperationException, StateError

__all__ = ["NullWatchdog", "TorchCollectiveWatchdog"]

_FIRST_LOOK_SECONDS = 0.5
_getframe = sys._getframe


class NullWatchdog:
    """One process: nothing to wait for, so nothing to watch.

    >>> with NullWatchdog():
    ...     1 + 1
    2
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def enter(self) -> None:
        return None

    def leave(self, error: BaseException | None = None) -> None:
        return None


class TorchCollectiveWatchdog:
    """A kind of section, made once and entered any number of times, one after the other; by the thread that calls collectives.

    `channel` gives the present generation of the group, and opens one if there is none: asked for at the first entry, and at the
    first one after a generation has ended.
    """

    def __init__(self, kind: str, limits: Limits, channel: Callable[[], GroupChannel]) -> None:
        self.since = 0.0
        self.ask_after = 0.4 * min(limits.hang_warning or limits.timeout, limits.timeout)
        self._kind = kind
        self._limits = limits
        self._present = channel
        self._channel: Any = _NoChannel()
        self._number = 0
        self._at: tuple[int, CodeType | None, int] = (0, None, 0)
        """Number of the section, and the user's place: code, and instruction in it."""
        self._ours = _PackageFrameCache()
        self._beacon: Any = None
        self._begun: Callable[[], int] = int
        self._begun_before = 0
        self._left = 0.0
        self._vigil: tuple[float, WaitMonitor] | None = None
        self._verdict: tuple[float, DistributedOperationException] | None = None
        """What the beacon's thread has found, with the entry that it belongs to."""

    # -- the thread that computes ---------------------------------------------------------------------------------

    def __enter__(self) -> None:
        if not self._channel.fit:
            self._bind()
        frame: FrameType | None = _getframe(1)
        ours = self._ours
        while frame is not None and ours[frame.f_code.co_filename]:
            frame = frame.f_back
        beacon = self._beacon
        beacon.sections += 1
        self._number = number = self._number + 1
        self._at = (number, None, 0) if frame is None else (number, frame.f_code, frame.f_lasti)
        self._begun_before = self._begun()
        self.since = monotonic()
        beacon.watched = self
        beacon.inside = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._fail(error)
        self._beacon.inside = False

    def enter(self) -> None:
        """As `with watch:`, where a block is in the way; `leave` has to follow."""
        self.__enter__()

    def leave(self, error: BaseException | None = None) -> None:
        """Ends the section; with the error that ended it, if there was one, which may become another."""
        self.__exit__(type(error) if error is not None else None, error, None)

    def _bind(self) -> None:
        self._channel, self._number = self._present(), 0
        self._beacon = self._channel.beacon
        self._begun = self._channel.begun  # kept by itself: it is asked for after the channel has let go of its group, too

    def _fail(self, error: BaseException) -> None:
        """Raises what an error in the section means between the processes; returns if it is the program's own."""
        here = self.here(True)
        try:
            if isinstance(error, DistributedOperationException):
                return  # of a collective of ours in the section: all has been said
            if not _is_connection_error(error):
                self._spoil(here, error)
                return
            self._beacon.find_loss(0.0 if self._verdict_on(here) else 1.5)
            if not here.begun and self._beacon.loss is None:
                raise StateError(
                    f"{here.call} averages gradients in a process group that has been released since its model was prepared: prepare the "
                    "model again (`model = accelerator.prepare(model)`), and it is wrapped for the present group"
                ) from error
            raise self._meaning(here, error) from error
        finally:
            self._beacon.inside = False
            self._beacon.watched = None  # not completed, so nothing that the others took part in

    def _spoil(self, here: RankPosition, error: BaseException) -> None:
        """This rank did not take part in the section; the others may be in it, waiting for the rest of what it began."""
        text = f"{here.call} with {type(error).__name__}: {_first_line(error)}"
        self._beacon.sections -= 1
        self._number -= 1
        self._beacon.failure = self._beacon.sections, text
        if here.begun:
            self._channel.spoil(f"rank {self._beacon.rank} failed in {text}")

    def _meaning(self, here: RankPosition, error: BaseException) -> DistributedOperationException:
        """What a broken connection of torch's group means: the others, the launcher, or our own thread can say."""
        vigil, beacon = WaitMonitor(self._beacon, self._limits, section=here), self._beacon
        text = _shorten_gloo_error(error)
        try:
            verdict = self._verdict_on(here)
            if verdict is not None:
                raise verdict
            if beacon.loss is None and "imed out" in text:
                beacon.refresh()
                vigil.give_up(monotonic() - here.since)
            beacon.loss = beacon.loss or f"the connection to {beacon.gone()} broke ({text})"
            if not beacon.mistake:
                beacon.post("gave_up", generation=here.generation, call=here.call, because=beacon.loss)
            vigil.lose()
        except DistributedOperationException as meaning:
            self._channel.give_up(_first_line(meaning))
            return meaning

    def _verdict_on(self, here: RankPosition) -> DistributedOperationException | None:
        return self._verdict[1] if self._verdict is not None and self._verdict[0] == here.since else None

    # -- the beacon's thread --------------------------------------------------------------------------------------

    def here(self, waiting: bool) -> RankPosition:
        """Where this rank is, or was last."""
        number, code, instruction = self._at
        beacon = self._beacon
        if self._left < self.since and not waiting:
            self._left = monotonic()  # about then: the first who asks after it was left
        return RankPosition(
            generation=self._channel.generation,
            sequence=beacon.here.sequence,
            operation=self._kind,
            site="unknown place" if code is None else format_site(code.co_filename, _line_number(code, instruction), code.co_name),
            waiting=waiting,
            since=self.since if waiting else self._left,
            sections=beacon.sections,
            syncs=beacon.syncs,
            watched=True,
            number=number,
            begun=self._begun() - self._begun_before if waiting else 0,
            reductions=beacon.reductions,
        )

    def look(self) -> None:
        """The vigil over a section that is under way."""
        since = self.since
        if monotonic() - since < _FIRST_LOOK_SECONDS or (self._verdict is not None and self._verdict[0] == since):
            return
        if self._vigil is None or self._vigil[0] != since:
            self._vigil = since, WaitMonitor(self._beacon, self._limits, section=self.here(True))
        try:
            self._vigil[1].look()
        except DistributedOperationException as error:
            if self._beacon.inside and self.since == since:
                self._end_wait(since, error)

    def _end_wait(self, since: float, error: DistributedOperationException) -> None:
        self._verdict = since, error
        if not self._channel.give_up(_first_line(error)):
            print(
                f"slipstream: {error}\nThis program opened torch's process group itself, so rank {self._beacon.rank} waits until "
                "the other process ends, or for the time limit of that group.",
                file=sys.stderr,
                flush=True,
            )


class _PackageFrameCache(dict[str, bool]):
    """Whether a file is ours, remembered: a look-up costs a sixth of a call."""

    def __missing__(self, filename: str) -> bool:
        self[filename] = found = is_package_frame(filename)
        return found


class _NoChannel:
    """The channel of a watch that has not been entered yet."""

    fit = False


def _line_number(code: CodeType, instruction: int) -> int:
    """The line of an instruction: found when somebody asks, as it takes a walk through the code's table."""
    return next((line for start, end, line in code.co_lines() if line and start <= instruction < end), code.co_firstlineno)


def _is_connection_error(error: BaseException) -> bool:
    """Whether an error says that another rank could not be reached, and not that the program is wrong."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/transport/" in text or "Connection closed by peer" in text)


def _shorten_gloo_error(error: BaseException) -> str:
    """The text of an error of gloo without the line of its source and the guesses that follow."""
    return re.sub(r"^\[\S*\] ", "", _first_line(error)).partition(". ")[0]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
