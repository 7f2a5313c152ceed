"""Watch sections in which torch's own collectives run, such as gradient averaging in a backward pass.

Those waits happen in C++, where the guard cannot see them. A `TorchCollectiveWatchdog` records that this rank is in such a section, at
the user's line; the heartbeat thread reports long waits and, when a wait cannot end, closes the connections of torch's group so that the
blocked call fails. The error that leaves the section names every rank and its line. Entering and leaving costs a few assignments. An
error of the program's own passes through unchanged; if torch's collectives had begun, the next section opens another generation of the
group.

On an accelerator the host leaves the section before the collectives are done, and waits wherever it needs a result. So the section counts
as entered until the device has passed its end; if it cannot, the error is printed, and raised by the next call that needs the group.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from time import monotonic
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from slipstream.distributed.call_site import format_site, is_package_frame
from slipstream.distributed.guard import GroupChannel
from slipstream.distributed.heartbeat import RankPosition, format_ranks
from slipstream.distributed.wait_monitor import Limits, WaitMonitor
from slipstream.errors import DistributedOperationException, StateError

if TYPE_CHECKING:
    from slipstream.devices.late_read import CompletionMark

__all__ = ["NullWatchdog", "TorchCollectiveWatchdog"]

_FIRST_LOOK_SECONDS = 0.5
_getframe = sys._getframe


class NullWatchdog:
    """The watchdog of a single process, which watches nothing.

    >>> with NullWatchdog():
    ...     1 + 1
    2
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def enter(self) -> None:
        """Begin a section without a `with` block; `leave` must follow."""
        self.__enter__()

    def leave(self, error: BaseException | None = None) -> None:
        """End the section, with the error that ended it, if any; it may be replaced by an error that explains it."""
        self.__exit__(type(error) if error is not None else None, error, None)


class TorchCollectiveWatchdog(NullWatchdog):
    """A kind of section, created once and entered any number of times in succession, by the thread that calls collectives.

    `channel` returns the present generation of the group, and opens one if there is none. It is called at the first entry, and at the
    first one after a generation has ended. `point_to_point`: the section sends and receives, which not every backend counts as
    collectives of the group.
    """

    def __init__(self, kind: str, limits: Limits, channel: Callable[[], GroupChannel], *, point_to_point: bool = False) -> None:
        self._least_ops = int(point_to_point)
        self.since = 0.0
        self.ask_after = 0.4 * min(limits.hang_warning or limits.timeout, limits.timeout)
        self._kind = kind
        self._limits = limits
        self._present = channel
        self._channel: Any = None
        self._number = 0
        self._at: tuple[int, CodeType | None, int] = (0, None, 0)
        """Number of the section, and the user's code object and instruction."""
        self._ours = _PackageFrameCache()
        self._heartbeat: Any = None
        self._count_torch_ops: Callable[[], int] = int
        self._torch_ops_before = 0
        self._left = 0.0
        self._mark: CompletionMark | None = None
        """The end of the section on the device; None where work is done when a call returns."""
        self._monitor: tuple[float, WaitMonitor] | None = None
        self._finding: tuple[float, DistributedOperationException] | None = None
        """The error found by the heartbeat thread, with the time of the section it belongs to."""

    # -- the thread that computes ---------------------------------------------------------------------------------

    def __enter__(self) -> None:
        if self._channel is None or not self._channel.usable:
            self._bind()
        frame: FrameType | None = _getframe(1)
        ours = self._ours
        while frame is not None and ours[frame.f_code.co_filename]:
            frame = frame.f_back
        heartbeat = self._heartbeat
        heartbeat.sections += 1
        self._number = number = self._number + 1
        self._at = (number, None, 0) if frame is None else (number, frame.f_code, frame.f_lasti)
        self._torch_ops_before = self._count_torch_ops()
        self.since = monotonic()
        heartbeat.section = self
        heartbeat.in_section = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._fail(error)
        elif self._mark is not None:
            self._mark.set()
        self._heartbeat.in_section = False
        if error is None and self._finding is not None and self._finding[0] == self.since:
            raise self._finding[1]  # a device whose collectives were ended goes on without an error

    def is_pending(self) -> bool:
        """Return whether the device has not passed the end of the section, which the host has left."""
        return self._mark is not None and not self._heartbeat.in_section and self._mark.is_pending()

    def _bind(self) -> None:
        channel = self._channel = self._present()
        self._number, self._heartbeat = 0, channel.heartbeat
        # Kept separately: it is also called after the channel has released its group.
        self._count_torch_ops = channel.count_torch_collectives
        self._mark = None
        if channel.device is not None:
            from slipstream.devices.late_read import completion_mark  # loaded only where there is a device

            self._mark = completion_mark(channel.device)

    def _fail(self, error: BaseException) -> None:
        """Raise an error that explains a broken connection between the processes; return if the error is the program's own."""
        position = self.position(True)
        try:
            if isinstance(error, DistributedOperationException):
                return  # raised by a Slipstream collective in the section; it names every rank
            if not _is_connection_error(error):
                self._record_failure(position, error)
                return
            self._heartbeat.find_peer_failure(0.0 if self._finding_on(position) else 1.5)
            # Not every backend counts what is sent from rank to rank, as pipelines do; an expired wait has begun in any case.
            if not position.torch_ops and self._heartbeat.peer_failure is None and not _has_timed_out(error):
                raise StateError(
                    f"{position.call} averages gradients in a process group that has been released since its model was prepared: prepare "
                    "the model again (`model = accelerator.prepare(model)`), and it is wrapped for the present group"
                ) from error
            raise self._explain(position, error) from error
        finally:
            self._heartbeat.in_section = False
            self._heartbeat.section = None  # not completed

    def _record_failure(self, position: RankPosition, error: BaseException) -> None:
        """Record that this rank did not complete the section; the others may still wait in it."""
        text = f"{position.call} with {type(error).__name__}: {_first_line(error)}"
        self._heartbeat.sections -= 1
        self._number -= 1
        self._heartbeat.failure = self._heartbeat.sections, text
        if position.torch_ops:  # the other ranks would match their next torch collectives with the rest of these
            reason = f"rank {self._heartbeat.rank} failed in {text}"
            self._channel.torch_group_desynchronized = self._channel.torch_group_desynchronized or reason

    def _explain(self, position: RankPosition, error: BaseException) -> DistributedOperationException:
        """Return an error that explains a broken connection of torch's group, from the other ranks, the launcher or the heartbeat."""
        monitor, heartbeat = WaitMonitor(self._heartbeat, self._limits, section=position), self._heartbeat
        text = _shorten_gloo_error(error)
        try:
            finding = self._finding_on(position)
            if finding is not None:
                raise finding
            if heartbeat.peer_failure is None and _has_timed_out(error):
                heartbeat.refresh()
                monitor.raise_timeout(monotonic() - position.since)
            if heartbeat.peer_failure is None:
                ended = heartbeat.ended_ranks()
                heartbeat.peer_failure = f"the connection to {format_ranks(ended) if ended else 'another rank'} broke ({text})"
            if not heartbeat.is_mismatch:
                heartbeat.post("gave_up", generation=position.generation, call=position.call, because=heartbeat.peer_failure)
            monitor.raise_peer_failure()
        except DistributedOperationException as explained:
            self._channel.abort(_first_line(explained))
            return explained

    def _finding_on(self, position: RankPosition) -> DistributedOperationException | None:
        return self._finding[1] if self._finding is not None and self._finding[0] == position.since else None

    # -- the heartbeat thread -------------------------------------------------------------------------------------

    def position(self, waiting: bool) -> RankPosition:
        """Return where this rank is, or was last."""
        number, code, instruction = self._at
        heartbeat = self._heartbeat
        on_device = waiting and not heartbeat.in_section
        if self._left < self.since and not waiting:
            self._left = monotonic()  # approximately: the first request after the section was left
        return RankPosition(
            generation=self._channel.generation,
            sequence=heartbeat.collective.sequence,
            operation=self._kind,
            site="unknown place" if code is None else format_site(code.co_filename, _line_number(code, instruction), code.co_name),
            waiting=waiting,
            since=self.since if waiting else self._left,
            sections=heartbeat.sections,
            sections_since_call=heartbeat.sections_since_call,
            watched=True,
            number=number,
            torch_ops=max(self._least_ops, self._count_torch_ops() - self._torch_ops_before) if waiting else 0,
            torch_ops_since_call=heartbeat.torch_ops_since_call,
            on_device=on_device,
        )

    def check(self) -> None:
        """Check the wait in a section that is in progress."""
        since = self.since
        if monotonic() - since < _FIRST_LOOK_SECONDS or (self._finding is not None and self._finding[0] == since):
            return
        if self._monitor is None or self._monitor[0] != since:
            self._monitor = since, WaitMonitor(self._heartbeat, self._limits, section=self.position(True))
        try:
            self._monitor[1].check()
        except DistributedOperationException as error:
            if self.since == since and (self._heartbeat.in_section or self.is_pending()):
                self._end_wait(since, error)

    def _end_wait(self, since: float, error: DistributedOperationException) -> None:
        self._finding = since, error
        if not self._heartbeat.in_section:  # what waits for the device now is not ours, and may return with results that are none
            self._channel.unraised = error
            print(f"slipstream: {error}", file=sys.stderr, flush=True)
            self._channel.abort(_first_line(error))
        elif not self._channel.abort(_first_line(error)):
            print(
                f"slipstream: {error}\nThis program opened torch's process group itself, so rank {self._heartbeat.rank} waits until "
                "the other process ends, or for the time limit of that group.",
                file=sys.stderr,
                flush=True,
            )


class _PackageFrameCache(dict[str, bool]):
    """Whether a file belongs to this package, cached: a look-up costs a sixth of a call."""

    def __missing__(self, filename: str) -> bool:
        self[filename] = found = is_package_frame(filename)
        return found


def _line_number(code: CodeType, instruction: int) -> int:
    """Return the line of an instruction; computed on demand, because it scans the code's line table."""
    return next((line for start, end, line in code.co_lines() if line and start <= instruction < end), code.co_firstlineno)


def _is_connection_error(error: BaseException) -> bool:
    """Return whether an error says that another rank could not be reached, rather than that the program is wrong."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/transport/" in text or "Connection closed by peer" in text)


def _has_timed_out(error: BaseException) -> bool:
    return "imed out" in str(error)


def _shorten_gloo_error(error: BaseException) -> str:
    """Return the text of a gloo error without its source line and the guesses that follow."""
    return re.sub(r"^\[\S*\] ", "", _first_line(error)).partition(". ")[0]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
