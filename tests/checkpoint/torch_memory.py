"""How much memory of torch a call takes at most, counted by torch's profiler: the same number every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(call: Callable[[], Any]) -> int:
    """Bytes that a call has allocated at its worst moment, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
