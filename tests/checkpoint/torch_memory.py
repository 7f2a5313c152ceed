"""How much memory of torch a call takes at most, counted by torch's profiler: the same number every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes that a call has allocated at its worst moment, beyond what was there before: of the host or of a device, the larger one."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    held: dict[Any, int] = {}
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        memory = event.device_type()
        held[memory] = held.get(memory, 0) + event.nbytes()
        peak = max(peak, held[memory])
    return peak
