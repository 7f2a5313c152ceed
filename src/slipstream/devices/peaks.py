"""High-water marks of memory, and clocks of devices: what a process can ask about itself at any time, for a few microseconds.

Torch is imported when a function needs it; no family of devices is named here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.devices.table import CPU, family_of

__all__ = ["device_peak", "host_peak", "timing_events"]

_STATUS = Path("/proc/self/status")


def host_peak(status: Path = _STATUS) -> int:
    """The most main memory that this process ever held, in bytes.

    >>> host_peak() > 1_000_000
    True
    """
    try:
        text = status.read_text()
    except OSError:  # not Linux
        text = ""
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "")
    if line:
        return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def device_peak(device: Any) -> int | None:
    """The most memory that torch ever held on a device, in bytes; None for the host, and where the device does not tell.

    >>> device_peak("cpu") is None
    True
    """
    family = family_of(device)
    most = None if family is CPU else family.ask("max_memory_allocated", device)
    return None if most is None else int(most)


def timing_events(device: Any) -> Callable[[], Any] | None:
    """Makes events that can be recorded on a device and say how long it took from one to the next; None where work is done at once.

    >>> timing_events("cpu") is None
    True
    """
    import torch

    if family_of(device) is CPU:
        return None
    try:
        torch.Event(device=device, enable_timing=True)
    except (RuntimeError, NotImplementedError, TypeError):  # a family without such events: the clock of the host has to do
        return None
    return lambda: torch.Event(device=device, enable_timing=True)
