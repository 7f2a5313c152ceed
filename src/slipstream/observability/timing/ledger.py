"""`Ledger` measures where the time of one Accelerator's training loop goes on every rank, with throughput and FLOPs.

A step costs a few entries in the meter's log. Once per interval, between two steps and on the training thread, `settle` reads the log,
calls the examiners (guards), sends the rows to rank 0 through the rendezvous store, and on rank 0 joins them to intervals for `sinks`.
There is no thread, no collective and no wait, except for up to two seconds on rank 0 at the very end. The phases of a rank add up to the
elapsed time. A rank that is late, stopped or gone leaves gaps and blocks no other rank.

`StoreMessages` sends messages through the rendezvous store. `StoreExchange` uses one key per rank: a rank publishes when rank 0 has taken
its previous message, and buffers otherwise. A store that fails ends the exchange with one log line, never the training.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import numpy
import torch

from slipstream.devices.memory import device_peak_memory, host_peak_memory, timing_event_factory
from slipstream.distributed.process_group import read_now
from slipstream.logging import get_logger
from slipstream.observability.options import LedgerKwargs
from slipstream.observability.timing.meter import COLUMNS, LOG_LIMIT, OTHER, PHASES, SAMPLES, Meter, mark_phase
from slipstream.observability.timing.report import LedgerReport, RowJoiner, RunTotals
from slipstream.observability.timing.step_times import (
    DeviceClock,
    MeterReader,
    RankMessage,
    Rows,
    StepWindow,
    pack_message,
    to_seconds,
    unpack_message,
)

__all__ = ["FlopCount", "Ledger", "StoreExchange", "StoreMessages", "measure_peak_flops"]


_POLL_SECONDS = 0.01


class StoreMessages:
    """Messages between ranks under keys of the rendezvous store.

    `store` returns the current store; None for one process, or before a group was opened. A store that fails ends the exchange over that
    store with one warning (`warning.format(reason)`), never the training.
    """

    def __init__(self, store: Callable[[], Any], prefix: str, warning: str, logger: str = __name__) -> None:
        self._store = store
        self._prefix = prefix
        self._warning, self._logger = warning, logger
        self._failed: Any = None

    @property
    def reachable(self) -> bool:
        """Whether there is a store that has not failed."""
        return self._store() not in (None, self._failed)

    def has(self, *keys: str) -> bool:
        """Return whether there is a message under each key."""
        return bool(self._ask(lambda store: store.check([f"{self._prefix}/{key}" for key in keys]), False))

    def publish(self, key: str, message: bytes) -> bool:
        """Leave a message; return whether that worked."""

        def publish(store: Any) -> bool:
            store.set(f"{self._prefix}/{key}", message)
            store.check([f"{self._prefix}/{key}"])  # `set` does not wait for an answer: now it is there
            return True

        return bool(self._ask(publish, False))

    def read(self, key: str) -> bytes | None:
        """Return a message, which stays; None if there is none."""
        found: bytes | None = self._ask(lambda store: read_now(store, f"{self._prefix}/{key}"), None)
        return found

    def delete(self, key: str) -> bool:
        """Remove a message; return whether there was one."""
        return bool(self._ask(lambda store: store.delete_key(f"{self._prefix}/{key}"), False))

    def take(self, key: str) -> bytes | None:
        """Return and remove a message; None if there is none. Of two ranks that take it, the one that deletes it gets it."""
        message = self.read(key) if self.has(key) else None
        return message if message is not None and self.delete(key) else None

    def _ask(self, what: Callable[[Any], Any], otherwise: Any) -> Any:
        store = self._store()
        if store is None or store is self._failed:
            return otherwise
        try:
            return what(store)
        except RuntimeError as error:  # torch's errors of stores: closed, not reached, too late
            self._failed = store
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            get_logger(self._logger).warning(self._warning.format(reason), main_process_only=False)
            return otherwise


class StoreExchange(StoreMessages):
    """The messages of a ledger to rank 0, one key for each rank."""

    def __init__(self, store: Callable[[], Any], number: int, rank: int, world_size: int) -> None:
        warning = f"the ledger of rank {rank} can no longer reach the others ({{}}): it continues with this rank alone"
        super().__init__(store, f"ledger/{number}", warning)
        self._rank = str(rank)
        self._others = range(1, world_size)

    # -- ranks other than 0 ---------------------------------------------------------------------------------------

    def can_publish(self) -> bool:
        """Return whether rank 0 has taken the previous message of this rank."""
        return not self.has(self._rank) and self.reachable

    def send(self, message: bytes) -> bool:
        """Leave a message for rank 0, where `can_publish` allows it."""
        return self.publish(self._rank, message)

    def send_last(self, message: bytes) -> bool:
        """Leave the last message, beside one that may not have been taken."""
        return self.publish(f"{self._rank}/last", message)

    def is_closed(self) -> bool:
        """Return whether rank 0 has stopped taking messages; an earlier one may not have been taken."""
        return self.has("closed") or not self.reachable

    def take_back(self) -> bytes | None:
        """Return and remove the message of this rank that rank 0 has not taken, if there is one."""
        return self.take(self._rank)

    # -- rank 0 ---------------------------------------------------------------------------------------------------

    def collect(self) -> dict[int, bytes]:
        """Return and remove the messages of the other ranks."""
        return {other: message for other in self._others if (message := self.take(str(other))) is not None}

    def collect_last(self, wait: float) -> dict[int, list[bytes]]:
        """Return and remove all remaining messages; wait so many seconds for ranks that have not left their last one."""
        found: dict[int, list[bytes]] = {}
        missing, deadline = list(self._others), time.monotonic() + wait
        while True:
            for other in list(missing):
                last = self.take(f"{other}/last")
                if last is not None:
                    missing.remove(other)
                    earlier = self.take(str(other))
                    found[other] = [last] if earlier is None else [earlier, last]
            if not missing or not self.reachable or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
        return {**found, **{other: [earlier] for other in missing if (earlier := self.take(str(other))) is not None}}

    def close(self) -> dict[int, list[bytes]]:
        """Announce that no more messages are taken, and then take what was left until then."""
        self.publish("closed", b"closed")
        return self.collect_last(0.0)


_MATRIX_SIZE = 768
_SHORT_PRODUCT = 0.001
"""Seconds of a product below which larger ones are measured."""
_LARGE_SIZE = 2048
_QUEUED_PRODUCTS = 8
_REPEATS = 5
_TIME_LIMIT = 0.2
"""Seconds after which no further product is begun."""


class FlopCount:
    """Counts the operations of a step: of forward passes and of backward passes, each in a block of its own.

    >>> counting = FlopCount()
    >>> with counting.block():
    ...     product = torch.ones(2, 3) @ torch.ones(3, 4)
    >>> counting.total
    48
    """

    def __init__(self) -> None:
        self.total = 0
        self._inside = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """Count the operations of a block; a block inside of another adds nothing."""
        from torch.utils.flop_counter import FlopCounterMode

        if self._inside:
            yield
            return
        self._inside = True
        counter = FlopCounterMode(display=False)
        try:
            with counter:
                yield
        finally:
            self._inside = False
            self.total += counter.get_total_flops()


def measure_peak_flops(device: torch.device, dtype: torch.dtype | None = None) -> float:
    """Return operations per second of products of matrices on this device: the best of a few.

    Where one product takes less than a millisecond, starting and waiting would be most of it: then several larger ones are queued.
    """
    seconds = _time_products(device, dtype, _MATRIX_SIZE, 1)
    if seconds >= _SHORT_PRODUCT:
        return 2.0 * _MATRIX_SIZE**3 / seconds
    return 2.0 * _LARGE_SIZE**3 * _QUEUED_PRODUCTS / _time_products(device, dtype, _LARGE_SIZE, _QUEUED_PRODUCTS)


def _time_products(device: torch.device, dtype: torch.dtype | None, size: int, count: int) -> float:
    """Return the seconds of so many products of square matrices, one after the other: the least of a few attempts."""
    factor = torch.ones((size, size), device=device, dtype=dtype or torch.get_default_dtype())
    product: Any = torch.empty_like(factor)
    best, first = float("inf"), time.perf_counter()
    with torch.no_grad():
        for _ in range(_REPEATS):
            began = time.perf_counter()
            if began - first > _TIME_LIMIT:
                break
            for _ in range(count):
                torch.mm(factor, factor, out=product)
            product[0, 0].item()  # waits for the device
            best = min(best, time.perf_counter() - began)
    return best


_RANKS_PER_INTERVAL = 16
"""Up to how many processes rank 0 asks all of them every interval; with more it asks as many per second."""
_PATIENCE_INTERVALS = 5.0
"""Intervals after which a silent rank is left out."""
_MAX_UNSENT_STEPS = 100_000
"""Steps that a rank keeps while rank 0 does not take them."""
_FINAL_WAIT = 2.0
"""Seconds that rank 0 waits for the others at the end, and each rank for its device where a script ends without `finish`."""
_COUNTED_STEP = 1
"""The step whose operations are counted: in the first one much happens once."""


class Ledger:
    """Measures where the time of one Accelerator's training loop goes.

    >>> ledger = Ledger(LedgerKwargs())
    >>> ledger.report().steps
    0
    """

    def __init__(
        self,
        options: LedgerKwargs | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Callable[[], Any] = lambda: None,
        number: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.options = options or LedgerKwargs()
        self.rank, self.world_size = rank, world_size
        self.number = number
        """Which ledger of this process it is: the same on every rank, and part of its keys in the store."""
        self.meter: Meter | None = Meter() if self.options.enabled else None
        """Where marks go; None if the ledger is off."""
        self.examiners: list[Callable[[StepWindow], None]] = []
        """Called on every rank with the steps since the last interval, before they are sent to rank 0."""
        self.sinks: list[Callable[[dict[str, Any]], None]] = []
        """Called on rank 0 with every interval: a line of `ledger.jsonl`."""
        self.event_sinks: list[Callable[[dict[str, Any]], None]] = []
        """Called on rank 0 with every event that a rank sent by `tell`: a line of `events.jsonl`."""
        self.admits: Callable[[Mapping[str, Any]], bool] = bool
        """On rank 0: whether an event goes to `event_sinks`."""
        self.endings: list[Callable[[], None]] = []
        """Called on every rank when training ends by itself, before its last steps are sent."""
        self.last_words: list[Callable[[], None]] = []
        """Called on rank 0 at the end, when every rank has reported."""
        self.expects: Callable[[], bool] = bool
        """On rank 0: whether something waits for reports of other ranks, so that the end of a script waits a moment for them."""
        self.unheard: list[Callable[[Mapping[str, Any]], None]] = []
        """Called on other ranks at the end, with events that were sent too late for rank 0."""
        self.events: list[dict[str, Any]] = []
        """Events of this rank that rank 0 has not taken yet."""
        self.interval = self.options.interval * max(1.0, world_size / _RANKS_PER_INTERVAL)
        self._device, self._dtype = torch.device(device), dtype
        self._exchange = StoreExchange(store, number, rank, world_size)
        self._joiner = RowJoiner(world_size, _PATIENCE_INTERVALS * self.interval)
        self._totals = RunTotals(world_size)
        self._intervals: deque[dict[str, Any]] = deque(maxlen=3600)
        self._untold = numpy.zeros((0, COLUMNS))
        self._base = 0
        """The number of the first step of this process, in a resumed run."""
        self._drained = 0
        """Steps that were taken from the meter."""
        self._reader = MeterReader(0 if self.meter is None else self.meter.since)
        self._due = 0
        self._clock: DeviceClock | None = None
        self._counting = FlopCount() if self.options.count_flops else None
        self._counted: float | None = None
        """Operations of one step of this rank, once they were counted."""
        self._finished: LedgerReport | None = None
        if self.meter is not None:
            self._start(self.meter)

    def _start(self, meter: Meter) -> None:
        # models hold the meter: through it they would hold all that examines
        meter.attend = partial(_settle_if_alive, weakref.ref(self), weakref.ref(meter))
        meter.token_counter = partial(_find_token_counter, self.options.tokens)
        events = timing_event_factory(self._device)
        if events is not None:
            meter.clock = self._clock = DeviceClock(events)
        self._set_due(meter, meter.since)

    def _set_due(self, meter: Meter, now: int) -> None:
        self._due = now + int(self.interval * 1e9)
        meter.due = 0 if self._counting is not None else self._due

    # -- the step -------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of the current step, from 0."""
        return 0 if self.meter is None else self.meter.step + self._base

    @property
    def has_device_clock(self) -> bool:
        """Whether time is measured on the device, so that `settle` tells what the device has passed."""
        return self._clock is not None

    def count_from(self, step: int) -> None:
        """Continue with this step number, after resuming from a checkpoint."""
        self.settle(wait=math.inf)  # the steps before have the numbers of before
        self._base = 0 if self.meter is None else step - self.meter.step

    @property
    def losses(self) -> list[tuple[int, float | torch.Tensor]]:
        """(step, loss) of the backward passes that no examiner has seen yet; a number where the loss was on the host."""
        base = self._base
        return [] if self.meter is None else [(base + step, loss) for step, loss in list(self.meter.losses)]

    def _attend(self, now: int) -> None:
        """Settle between two steps if an interval is over or the log is full, and count FLOPs."""
        meter = self.meter
        assert meter is not None
        if self._counting is not None:
            self._count(meter, self._counting)
        if now >= self._due or len(meter.log) > LOG_LIMIT:
            meter.thread = get_ident()
            self.settle()

    def _count(self, meter: Meter, counting: FlopCount) -> None:
        if meter.step == _COUNTED_STEP:
            meter.counting = counting
        elif meter.step > _COUNTED_STEP:
            self._counted = float(counting.total)
            meter.counting = self._counting = None

    # -- once per interval ----------------------------------------------------------------------------------------

    def settle(self, *, wait: float = 0.0) -> None:
        """Examine the steps since the last call, report them, and on rank 0 collect what the others reported. Waits for no rank.

        Steps that the device has not passed are left for the next call; with `wait`, this waits for the device so many seconds first.
        """
        meter = self.meter
        if meter is None:
            return
        meter.tick()
        self._set_due(meter, meter.log[-1])
        with mark_phase(meter if meter.has_begun else None, OTHER):
            if wait and self._clock is not None:
                self._clock.wait(wait)
            window = self._drain(meter)
            for examine in self.examiners:
                examine(window)
            if self._finished is None:
                self._tell()

    def _drain(self, meter: Meter) -> StepWindow:
        """Return and remove the rows of steps that have ended."""
        first = self._drained
        rows = self._read(meter)
        limit = math.inf if self._clock is None or self._clock.is_idle else self._drained
        losses = [(self._base + step, loss) for step, loss in meter.losses if step < limit]
        for _ in losses:
            meter.losses.popleft()
        if first <= _COUNTED_STEP < self._drained and self._counted is not None:
            samples = rows[_COUNTED_STEP - first, SAMPLES]
            self._totals.flops_per_step = self._counted
            self._totals.flops_per_sample = self._counted / samples if samples else None
        if self._finished is None:
            self._untold = numpy.concatenate([self._untold, rows])[-_MAX_UNSENT_STEPS:] if len(self._untold) else rows
        if not first and len(rows):
            self._totals.began = time.time() - float(rows[:, :PHASES].sum()) - 1e-9 * float(self._reader.open[:PHASES].sum())
        return StepWindow(len(rows), self._base + first, rows, losses, limit=self._base + limit, passed=self._clock is not None)

    def _read(self, meter: Meter) -> Rows:
        log = meter.log
        length, spent = (len(log), None) if self._clock is None else self._clock.take(log)
        rows = to_seconds(self._reader.read(log[:length], spent))
        del log[:length]
        self._drained += len(rows)
        return rows

    def _tell(self) -> None:
        if self.rank == 0:
            self._hear(self.rank, self._message())
            for other, message in self._exchange.collect().items():
                self._hear(other, unpack_message(message))
            self._join()
        elif self._exchange.can_publish():
            self._exchange.send(pack_message(self._message()))

    def _message(self, tail: list[float] | None = None) -> RankMessage:
        """Return and clear what this rank has not reported yet."""
        rows, self._untold = self._untold, self._untold[:0]
        events, self.events = self.events, []
        if self.rank:
            self._totals.add_alone(self.rank, rows)
        return RankMessage(self._drained - len(rows), rows, (host_peak_memory(), device_peak_memory(self._device)), events, tail)

    def _hear(self, rank: int, message: RankMessage) -> None:
        self._joiner.add(rank, message.first, message.rows)
        self._totals.remember(rank, message.memory)
        for event in filter(self.admits, message.events):
            self._deliver(self.event_sinks, event)

    def _join(self, *, patient: bool = True) -> None:
        first = self._joiner.next
        taken = self._joiner.take(patient=patient)
        if taken is not None:
            self._find_peak()
            interval = self._totals.add(taken, self._base + first)
            self._intervals.append(interval)
            self._deliver(self.sinks, interval)

    def _find_peak(self) -> None:
        totals, options = self._totals, self.options
        totals.flops_per_sample = totals.flops_per_sample or options.flops_per_sample
        if totals.peak is None and (totals.flops_per_sample or totals.flops_per_step):
            totals.peak = options.peak_flops or measure_peak_flops(self._device, self._dtype)

    def _deliver(self, sinks: list[Callable[[dict[str, Any]], None]], record: dict[str, Any]) -> None:
        for sink in list(sinks):
            try:
                sink(record)
            except OSError as error:  # a full disk is not a reason to stop training
                sinks.remove(sink)
                get_logger(__name__).warning(f"the ledger is no longer written: {error}")

    # -- events and reports ---------------------------------------------------------------------------------------

    def tell(self, event: Mapping[str, Any]) -> None:
        """Send an event for `events.jsonl` to rank 0's `event_sinks`: at once there, with the next interval from other ranks.

        `time` and `rank` are filled in where they are missing.
        """
        record = {"time": time.time(), "rank": self.rank, **event}
        if self.rank == 0:
            if self.admits(record):
                self._deliver(self.event_sinks, record)
        elif len(self.events) < _MAX_UNSENT_STEPS:
            self.events.append(record)

    def report(self) -> LedgerReport:
        """Return what is known now. Not collective; on rank 0 with what the other ranks have reported so far."""
        if self._finished is not None:
            return self._finished
        if self.meter is not None and self.meter.thread == get_ident():  # another thread may look, and touch nothing
            self.settle()
        return self._report(self._tail())

    def finish(self) -> LedgerReport:
        """End the run: report the last steps and what came after them. Rank 0 waits a moment for the others. Once."""
        if self._finished is not None or self.meter is None:
            return self._finished or self._report(None)
        return self._end(self.endings, math.inf, lambda tail: bool(self._drained or any(tail)))  # without training, no rank reports

    def leave(self, *, patient: bool = False) -> None:
        """End the ledger of a script without `finish`, or of a process that fails.

        `patient`: the script has ended normally. Then it may wait for other ranks, if something needs their reports (`expects`).
        """
        if self._finished is None and self.meter is not None:
            # the device may wait without end for ranks that are gone
            self._end(self.endings if patient else [], _FINAL_WAIT if patient else 0.0, lambda tail: patient and self.expects())

    def _end(self, endings: list[Callable[[], None]], wait: float, waits: Callable[[list[float]], bool]) -> LedgerReport:
        for end in endings:
            end()
        self.settle(wait=wait)
        tail = self._tail()
        if self.rank:
            return self._publish_last(tail)
        return self._collect_last(tail, _FINAL_WAIT if waits(tail) else 0.0)

    def _publish_last(self, tail: list[float]) -> LedgerReport:
        message = self._message(tail)
        self._exchange.send_last(pack_message(message))
        if self.unheard and self._exchange.is_closed():
            earlier = self._exchange.take_back()
            for event in [*(unpack_message(earlier).events if earlier else ()), *message.events]:
                for hear in self.unheard:
                    hear(event)
        self._finished = self._report(tail)
        return self._finished

    def _collect_last(self, tail: list[float], wait: float) -> LedgerReport:
        self._hear(0, self._message(tail))
        tails = {0: tail}
        for collect in (partial(self._exchange.collect_last, wait), self._exchange.close):
            if len(tails) == self.world_size:
                break  # every rank has sent its last message
            for other, message in ((other, unpack_message(data)) for other, packed in collect().items() for data in packed):
                self._hear(other, message)
                if message.tail is not None:
                    tails[other] = message.tail
        self._join(patient=False)
        interval = self._totals.add_tails(tails, self._base + self._joiner.next)
        if any(any(values) for values in interval["phases"].values()):  # such as a last checkpoint
            self._intervals.append(interval)
            self._deliver(self.sinks, interval)
        for call in self.last_words:
            call()
        self._finished = self._report(None)
        return self._finished

    def _tail(self) -> list[float]:
        """Return the row of the current step so far, or of what came after the last one."""
        meter = self.meter
        if meter is None:
            return [0.0] * COLUMNS
        reader = self._reader.copy()
        if self._clock is None:
            if meter.thread == get_ident():
                meter.tick()
            reader.read(meter.log[:])
        return [float(value) for value in to_seconds(reader.open)]

    def _report(self, tail: list[float] | None) -> LedgerReport:
        """Return a report; on rank 0 of many it leaves out steps that not all ranks have reported yet."""
        totals = self._totals.copy()
        if self.rank:
            totals.add_alone(self.rank, self._untold)
        if tail is not None and (self.rank or self.world_size == 1):
            totals.add_tails({self.rank: tail}, self._drained)
        totals.remember(self.rank, (host_peak_memory(), device_peak_memory(self._device)))
        return totals.report(self.rank, self._joiner.late, list(self._intervals))


def _settle_if_alive(ledger: weakref.ref[Ledger], meter: weakref.ref[Meter], now: int) -> None:
    present, left = ledger(), meter()
    if present is not None:
        present._attend(now)
    elif left is not None:  # its Accelerator is gone, and the prepared objects are still used
        left.log.clear()


def _find_token_counter(wanted: str | Callable[[Any], int] | None, batch: Any) -> Callable[[Any], int] | None:
    """Return a function that counts the tokens of a loader's batches, chosen by the first batch; None if there are none."""
    if callable(wanted):
        return wanted
    name = wanted or "input_ids"

    def count(batch: Any) -> int:
        found = batch.get(name) if isinstance(batch, Mapping) else None
        return found.numel() if isinstance(found, torch.Tensor) else 0

    return count if isinstance(batch, Mapping) and isinstance(batch.get(name), torch.Tensor) else None
