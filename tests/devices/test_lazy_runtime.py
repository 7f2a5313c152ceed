"""The lazy-tensor runtime answers as torch's own device modules do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slipstream.devices.lazy_runtime import LazyRuntime


def _runtime(hardware: str | None, started: bool = True) -> LazyRuntime:
    held = {"state": 5}
    return LazyRuntime(
        lambda: started,
        SimpleNamespace(device_type=lambda: hardware, addressable_device_count=lambda: 4),
        SimpleNamespace(
            get_rng_state=lambda: held["state"],
            set_rng_state=lambda seed: held.update(state=seed),
            get_memory_info=lambda device: {"bytes_used": 30, "bytes_limit": 100},
        ),
    )


@pytest.mark.parametrize(("hardware", "available"), [("TPU", True), ("CUDA", True), ("CPU", False), (None, False)])
def test_no_accelerator_not_available(hardware: str | None, available: bool) -> None:
    """A runtime without an accelerator is not available."""
    assert _runtime(hardware).is_available() is available


def test_is_initialized() -> None:
    """It says whether it was started."""
    assert _runtime("TPU").is_initialized()
    assert not _runtime("TPU", started=False).is_initialized()


def test_random_states_restored() -> None:
    """Random states come back."""
    runtime = _runtime("TPU")
    state = runtime.get_rng_state()
    assert isinstance(state, torch.Tensor)
    runtime.manual_seed_all(9)
    assert int(runtime.get_rng_state()) == 9
    runtime.set_rng_state(state)
    assert int(runtime.get_rng_state()) == 5


def test_free_memory_from_limit() -> None:
    """Free memory is what the limit leaves."""
    assert _runtime("TPU").mem_get_info() == (70, 100)
    assert _runtime("TPU").device_count() == 4
