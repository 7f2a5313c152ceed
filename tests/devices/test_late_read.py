"""Values of a device that are read late."""

from __future__ import annotations

import time
from typing import Any

import torch

from slipstream.devices.late_read import LateValues


def read_late() -> Any:
    """Values behind a slow copy: whether they are there, how often the host waits for them, and what they are."""
    device = torch.device("standin", 1)
    torch.standin.set_device(0)
    torch.standin.set_delay(copies=0.3)
    try:
        slow = torch.arange(3.0).pin_memory().to(device, non_blocking=True)
        torch.standin.reset_counters()
        values = LateValues(slow)
        before, waited = values.passed, torch.standin.counters().synchronizations
        later = torch.ones(2).pin_memory().to(device, non_blocking=True)
        while not values.passed:
            time.sleep(0.01)
        began, began_waits = time.perf_counter(), torch.standin.counters().synchronizations
        found = values.tolist()
        took, waits = time.perf_counter() - began, torch.standin.counters().synchronizations - began_waits
        assert later.sum().item() == 2
        forced = LateValues(torch.arange(3.0).pin_memory().to(device, non_blocking=True)).tolist()
    finally:
        torch.standin.set_delay(copies=0.0002)
    return before, waited, found, took, waits, forced


def test_late_values(ranks: Any) -> None:
    """The host asks without waiting and reads past later work, or waits for the values; the device need not be the current one."""
    [(before, waited, found, took, waits, forced)] = ranks(1, device="standin").run(read_late)
    assert not before
    assert waited == 0
    assert found == forced == [0.0, 1.0, 2.0]
    assert took < 0.2, "a copy that takes 0.3 s is queued behind the values"
    assert waits == 1, "for the copy alone"


def test_values_on_host() -> None:
    """On the host there is nothing to wait for."""
    values = LateValues(torch.tensor([1.5]))
    assert (values.at_once, values.passed, values.tolist()) == (True, True, [1.5])
