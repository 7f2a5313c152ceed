"""Pools of ranks on a device: the option is set in every run, and what is unavailable is a reason, not a hang."""

from __future__ import annotations

import os

import pytest
import torch

from slipstream import Accelerator, PartialState
from slipstream.errors import ConfigError
from slipstream.testing import DeviceUnavailable, ranks as pool_of
from slipstream.testing.plugin import RankPools


def chosen() -> tuple[str, str | None]:
    """The device of a rank, and the variable that it has."""
    return Accelerator().device.type, os.environ.get("SLIPSTREAM_DEVICE")


def test_cpu_by_name(ranks):
    """A pool for the CPU sets the option, and shares its ranks with the pool for no device."""
    assert ranks(2, device="cpu").run(chosen) == [("cpu", "cpu")] * 2
    assert ranks(2, device="cpu").pids == ranks(2).pids
    assert ranks(2).run(os.environ.get, "SLIPSTREAM_DEVICE") == [os.environ.get("SLIPSTREAM_DEVICE")] * 2


def test_unknown_device():
    """A device family that does not exist is an error at once, with the list."""
    with pytest.raises(ConfigError, match=r"ranks\(2, device='gpu'\): there is no such device family.\nWrite one of .*cuda.*cpu"):
        pool_of(2, device="gpu")


def test_family_that_is_not_here(ranks):
    """A family without devices here fails in the ranks, with the reason; nothing falls back to the CPU."""
    outcomes = ranks(1, device="xpu").outcomes(chosen)
    assert "device=xpu (from SLIPSTREAM_DEVICE) cannot be used here: torch" in str(outcomes[0].error)


def test_unavailable_device(monkeypatch, tmp_path):
    """A device that cannot be built is a reason: the pool raises it, the fixture skips the test, and fails it where CI is set."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SLIPSTREAM_STANDIN_CACHE", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    pools = RankPools()
    with pytest.raises(pytest.skip.Exception, match="no-such-compiler") as caught:
        pools(1, device="standin")
    assert isinstance(caught.value.__context__, DeviceUnavailable)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="may not be skipped where CI is set: .*no-such-compiler"):
        pools(2, device="standin")
    assert pools.server_pids == set()


def on_the_device() -> tuple[str, str | None, float, torch.Tensor]:
    """The device of a rank, its backend, a random number of it, and a sum over the ranks."""
    module = torch.get_device_module("standin")
    state = PartialState()
    drawn = torch.rand(1, device=state.device)
    module.set_device(1)
    with torch.inference_mode():
        summed = state.reduce(torch.ones(2, device=state.device))
    return str(state.device), state.backend, drawn.item(), summed


def test_standin_ranks(ranks):
    """Each rank has a device of its own, seeded alike in every run, and its tensors come back on the host."""
    outcomes = ranks(2, device="standin").outcomes(on_the_device)
    first = [outcome.value for outcome in outcomes]
    again = ranks(2, device="standin").run(on_the_device)
    assert [entry[:2] for entry in first] == [("standin:0", "standin"), ("standin:1", "standin")]
    assert [entry[2] for entry in first] == [entry[2] for entry in again] == [torch.rand(1, generator=torch.manual_seed(0)).item()] * 2
    assert [entry[3].tolist() for entry in (*first, *again)] == [[2.0, 2.0]] * 4
    assert first[0][3].device.type == "cpu"
    assert [outcome.output for outcome in outcomes] == ["", ""], "torch warns when a group without a default backend is closed"
