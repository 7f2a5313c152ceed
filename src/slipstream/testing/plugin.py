"""Fixtures for pytest: `ranks`, a factory of rank pools kept for the session, and `no_leaks`, which fails a test that leaves something
behind. A test on a device that cannot be used here is skipped with the reason, and fails where the variable CI is set.

Opt-in, in a conftest:

    pytest_plugins = ["slipstream.testing.plugin"]

    @pytest.fixture(autouse=True)  # to apply it to every test
    def clean(no_leaks): ...

Then:

    def test_sum(ranks):
        assert ranks(2).run(my_distributed_function) == [3, 3]

    @pytest.mark.parametrize("device", ["cpu", "standin"])
    def test_on_both(ranks, device):
        assert ranks(2, device=device).run(my_distributed_function) == [3, 3]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NoReturn

import pytest

from slipstream.config.sources import environment
from slipstream.testing import leaks
from slipstream.testing.rank_pool import DeviceUnavailable, RankPool

__all__ = ["RankPools", "no_leaks", "pytest_addoption", "rank_pools", "ranks", "skip_or_fail", "standin"]


class RankPools:
    """One pool for each size and device that the session has used; those for the CPU share their processes with those for no device.

    >>> pools = RankPools()
    >>> pools(2) is pools(2), pools(3).size, pools(2, device="cpu").device
    (True, 3, 'cpu')
    >>> pools.close()
    """

    def __init__(self, default: str | None = None) -> None:
        self._default = default
        self._pools: dict[tuple[int, str | None], RankPool] = {}
        self._unavailable: dict[str | None, str] = {}

    def __call__(self, size: int = 2, device: str | None = None) -> RankPool:
        device = device or self._default
        key = size, device
        if device in self._unavailable:
            skip_or_fail(self._unavailable[device])
        if key not in self._pools:
            shared = self(size) if device == "cpu" and self._default is None else None
            pool = RankPool(size, device, share=shared)
            if device not in (None, "cpu"):
                self._start(pool)
            self._pools[key] = pool
        return self._pools[key]

    def _start(self, pool: RankPool) -> None:
        try:
            pool.start()
        except DeviceUnavailable as error:
            self._unavailable[pool.device] = str(error)
            skip_or_fail(str(error))

    @property
    def server_pids(self) -> set[int]:
        """Processes of the session itself: no test has leaked them."""
        return {pool.server_pid for pool in self._pools.values() if pool.server_pid is not None}

    def close(self) -> None:
        """End every pool."""
        for pool in self._pools.values():
            pool.close()


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test that is running for this reason; fail it where the variable CI is set, because there it must run."""
    if environment().get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(f"this test may not be skipped where CI is set: {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--device`."""
    parser.addoption("--device", default=None, help="the device family of pools of ranks for which a test names none, such as standin")


@pytest.fixture(scope="session")
def rank_pools(pytestconfig: pytest.Config) -> Iterator[RankPools]:
    """The pools of this session; tests take them through `ranks`."""
    pools = RankPools(pytestconfig.getoption("--device", None))
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def standin() -> str:
    """The name of the stand-in accelerator, for `--device`: skips the test where it cannot be built. It is not enabled in this process."""
    from slipstream.testing.standin import StandinUnavailable, extension_file

    try:
        extension_file()
    except StandinUnavailable as error:
        skip_or_fail(str(error))
    return "standin"


@pytest.fixture
def ranks(rank_pools: RankPools) -> RankPools:
    """`ranks(2).run(function)`: a pool of two, started at its first use and kept for the session; `ranks(2, device="cpu")` on a device."""
    return rank_pools


@pytest.fixture
def no_leaks(rank_pools: RankPools) -> Iterator[None]:
    """Fails a test that leaves a process group, a thread, an environment variable or a child process behind, and names it."""
    before = leaks.observe()
    yield
    left = leaks.wait_for_none(before, expected=rank_pools.server_pids)
    if "slipstream.distributed.current" in sys.modules:
        sys.modules["slipstream.distributed.current"].reset()  # the state of one process is not a leak, but the next test starts without it
    if left:
        leaks.restore(before, expected=rank_pools.server_pids)
        pytest.fail("this test left behind:\n" + "\n".join(f"  {thing}" for thing in left), pytrace=False)
