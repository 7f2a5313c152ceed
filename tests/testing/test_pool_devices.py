"""Pools of ranks on a device: the option is set in every run, and what is unavailable is a reason, not a hang."""

from __future__ import annotations

import os

import pytest

from slipstream import Accelerator
from slipstream.errors import ConfigError
from slipstream.testing import DeviceUnavailable, ranks as pool_of


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


def test_unavailable_device_is_a_reason(monkeypatch, tmp_path):
    """A device that cannot be built raises with the reason when the pool starts."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SLIPSTREAM_STANDIN_CACHE", str(tmp_path))
    with pytest.raises(DeviceUnavailable, match="no-such-compiler"), pool_of(1, device="standin") as pool:
        pool.start()


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 1}), ("true", {"failed": 1})])
def test_skipped_here_and_failed_in_ci(pytester, monkeypatch, tmp_path, ci, outcome):
    """A test on a device that cannot be built is skipped with the reason, and fails where CI is set."""
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SLIPSTREAM_STANDIN_CACHE", str(tmp_path))
    pytester.makeconftest('pytest_plugins = ["slipstream.testing.plugin"]')
    pytester.makepyfile("def test_on_it(ranks):\n    ranks(1, device='standin').run(int)\n")
    result = pytester.runpytest("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines(["*no-such-compiler*"])
