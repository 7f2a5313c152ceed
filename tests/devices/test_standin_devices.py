"""Random states and memory of a real device: seeded, captured, restored, made equal; given back, counted, at its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import PartialState
from slipstream.devices import rng
from slipstream.devices.memory import (
    allocator_statistics,
    available_memory,
    clear_device_cache,
    device_peak_memory,
    release_memory,
    should_reduce_batch_size,
)
from slipstream.utils import set_seed, synchronize_rng_states

# -- random states ----------------------------------------------------------------------------------------------------------


def draw(index: int) -> list[float]:
    numbers: list[float] = torch.rand(3, device=torch.device("standin", index)).tolist()
    return numbers


def random_states() -> Any:
    """What every device draws after the same seed, after a state was restored, and whether the fingerprint sees a draw."""
    set_seed(7)
    host = torch.rand(3).tolist()
    seeded = [draw(index) for index in range(4)]
    state, before = rng.capture(), rng.fingerprint()
    expected = [draw(index) for index in range(4)]
    after = rng.fingerprint()
    assert rng.restore(state) == ()
    assert rng.fingerprint() == before
    again = [draw(index) for index in range(4)]
    return host, seeded, expected == again, expected != seeded, before != after, list(state)


def test_random_states(ranks: Any) -> None:
    """A seed reaches every device, each device has a state of its own, and all of them come back."""
    [(host, seeded, same, moved, seen, kinds)] = ranks(1, device="standin").run(random_states)
    assert seeded == [host] * 4
    assert (same, moved, seen) == (True, True, True)
    assert kinds == ["python", "numpy", "torch", "standin"]


def test_states_of_ranks(ranks: Any) -> None:
    """Each rank draws on its own device: other numbers with `device_specific`, and the same once the states are those of rank 0."""

    def run() -> Any:
        state = PartialState()
        place = state.device.index
        set_seed(7, device_specific=True)
        apart = draw(place)
        if state.is_main_process:
            draw(place)
        synchronize_rng_states(["standin"])
        return place, apart, draw(place)

    (first, apart, together), (second, other, same) = ranks(2, device="standin").run(run)
    assert (first, second) == (0, 1)
    assert apart != other
    assert together == same


# -- memory ---------------------------------------------------------------------------------------------------------------------


def test_memory(ranks: Any) -> None:
    """Memory that nothing uses is given back, peaks and failures are counted per device, and the end of memory is recognised."""

    def run() -> Any:
        size, device = 1 << 20, torch.device("standin", 1)
        clear_device_cache(garbage_collection=True)
        free = available_memory(device)
        torch.standin.reset_peak_memory_stats(device)
        before = device_peak_memory(device)
        kept = torch.zeros(size // 4, device=device)
        taken = free - available_memory(device)
        grown = device_peak_memory(device) - before
        (kept,) = release_memory(kept)
        back = free - available_memory(device)
        torch.standin.set_capacity(size, device)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch.zeros(2 * size, device=device)
        counted = allocator_statistics()["standin:1"]
        return kept, taken, grown, back, should_reduce_batch_size(raised.value), counted["failures"], counted["most_allocated"]

    [(kept, taken, grown, back, recognised, failures, most)] = ranks(1, device="standin").run(run)
    assert kept is None
    assert (taken, grown, back) == (1 << 20, 1 << 20, 0)
    assert recognised
    assert failures >= 1
    assert most >= 1 << 20
