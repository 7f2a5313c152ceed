"""Time on asynchronous devices, and the report of a ledger as text."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fake_clock import MS, Clock, Loop, on_clock

from slipstream.observability.timing.ledger import Ledger
from slipstream.observability.timing.meter import (
    BACKWARD,
    CHECKPOINT,
    EXPOSED,
    FORWARD,
    OPTIMIZER,
    PHASES,
    TOKENS,
    mark_phase,
)
from slipstream.observability.timing.report import LedgerReport

# -- asynchronous devices ---------------------------------------------------------------------------------------------


class FakeDevice:
    """A device that works off its queue in its own time, while the host goes on."""

    def __init__(self) -> None:
        self.host = Clock()
        self.free = 0
        self.behind = 0

    def work(self, milliseconds: int) -> None:
        self.free = max(self.free, self.host.now) + milliseconds * MS

    def event(self) -> Any:
        device = self

        class Event:
            at = 0

            def record(self) -> None:
                self.at = max(device.free, device.host.now)

            def query(self) -> bool:
                return self.at <= device.host.now

            def synchronize(self) -> None:
                device.host.now = max(device.host.now, self.at)

            def elapsed_time(self, later: Any) -> float:
                return float(later.at - self.at) / MS

        return Event()


def test_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time of a device counts where it was spent and not where it was asked for."""
    device = FakeDevice()
    monkeypatch.setattr("slipstream.observability.timing.ledger.timing_event_factory", lambda _: device.event)
    monkeypatch.setattr("slipstream.observability.timing.step_times.perf_counter_ns", device.host)
    ledger = Ledger()
    meter, windows = ledger.meter, []
    assert meter is not None
    ledger.examiners.append(windows.append)
    meter.due = ledger._due = 1 << 62
    meter.begin()
    for _ in range(3):
        for phase, asked, work in ((FORWARD, 1, 20), (BACKWARD, 1, 40), (EXPOSED, 1, 10), (OPTIMIZER, 1, 5)):
            with mark_phase(meter, phase):
                device.host.nap("", asked)
                device.work(work)
        device.host.nap("", 2)
        meter.losses.append((meter.step, 0.5))
        meter.tick()
        meter.end_step()
    ledger.settle()
    assert windows[0].steps == 0, "the device has not come to the end of the first step: nobody waits for it"
    assert (windows[0].losses, windows[0].limit) == ([], 0), "it may not have computed them"
    device.host.nap("", 1000)
    ledger.settle()
    rows = windows[1].rows
    assert len(rows) == 3
    assert windows[1].losses == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert windows[1].passed
    assert rows[1, [FORWARD, BACKWARD, EXPOSED, OPTIMIZER]] == pytest.approx([0.020, 0.040, 0.010, 0.005])
    assert rows[:, :PHASES].sum() == pytest.approx(3 * 0.075 + 0.001), "on the device, from the first mark on"
    assert rows[0, TOKENS] == 0
    with mark_phase(meter, CHECKPOINT):
        device.work(7)
    assert ledger.finish().phases["checkpoint"] == pytest.approx([0.007])


# -- words ------------------------------------------------------------------------------------------------------------


def test_report_table() -> None:
    """The table answers why more processes are not faster."""
    phases = {"data": [1.0, 1.0], "forward": [2.0, 4.0], "backward": [2.0, 2.0], "communication": [1.0, 1.0], "waiting": [2.0, 0.0]}
    report = LedgerReport(phases=phases, seconds=8.0, steps=10, samples=800, slowest=[1, 9], world_size=2)
    text = report.table()
    assert "100 samples/s (50 samples/s each)" in text
    assert "communication 12.5% and waiting 12.5%: 2 processes do the work of 1.50 that need not communicate" in text
    assert "waited for most: rank 1, the last in 9 of 10 steps" in text
    assert report.advice in report.answers()
    assert report.slowest_rank == 1
    in_turn = LedgerReport(phases=phases, seconds=8.0, steps=10, slowest=[4, 6], world_size=2)
    assert in_turn.slowest_rank is None
    alone = LedgerReport(phases={"data": [1.0]}, seconds=1.0, steps=10, samples=10)
    assert "compare samples/s, not steps" in alone.advice
    other = LedgerReport(phases=phases, seconds=8.0, steps=10, rank=1, world_size=2, samples=10)
    assert "rank 0 can tell them apart" in other.advice


@pytest.mark.parametrize(("nap", "told"), [(1, False), (200, True)])
def test_summary(capsys: pytest.CaptureFixture[str], nap: int, told: bool) -> None:
    """`end_training` says where the time went if there was enough of it, and leaves out phases that took none."""
    loop = Loop(forward=nap)
    for batch in loop.loader:
        loop.step(batch)
    loop.accelerator.end_training()
    text = capsys.readouterr().err
    assert ("where the time went: 10 steps in 2.1 s" in text) is told
    assert ("forward" in text) is told
    assert "0.0%" not in text
    assert "evaluation" not in text


def test_ledger_alone() -> None:
    """A ledger on its own clock needs no accelerator."""
    ledger = on_clock(Ledger(), Clock())
    assert ledger.report().table().startswith("where the time went: 0 steps")


def test_report_from_thread() -> None:
    """Another thread may ask and disturbs nothing."""
    loop = Loop()
    reports: list[LedgerReport] = []
    for batch in loop.loader:
        loop.step(batch, body=2)
        asking = threading.Thread(target=lambda: reports.append(loop.accelerator.ledger()))
        asking.start()
        asking.join()
    assert len(reports) == 10
    assert loop.found() == dict(loop.clock.napped)
