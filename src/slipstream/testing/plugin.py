"""Fixtures for pytest: `ranks`, a factory of rank pools kept for the session, and `no_leaks`, which fails a test that leaves something
behind.

Opt-in, in a conftest:

    pytest_plugins = ["slipstream.testing.plugin"]

    @pytest.fixture(autouse=True)  # to apply it to every test
    def clean(no_leaks): ...

Then:

    def test_sum(ranks):
        assert ranks(2).run(my_distributed_function) == [3, 3]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from slipstream.testing import leaks
from slipstream.testing.rank_pool import RankPool

__all__ = ["RankPools", "no_leaks", "rank_pools", "ranks"]


class RankPools:
    """One pool for each size that the session has used.

    >>> pools = RankPools()
    >>> pools(2) is pools(2), pools(3).size
    (True, 3)
    >>> pools.close()
    """

    def __init__(self) -> None:
        self._by_size: dict[int, RankPool] = {}

    def __call__(self, size: int = 2) -> RankPool:
        if size not in self._by_size:
            self._by_size[size] = RankPool(size)
        return self._by_size[size]

    @property
    def server_pids(self) -> set[int]:
        """Processes of the session itself: no test has leaked them."""
        return {pool.server_pid for pool in self._by_size.values() if pool.server_pid is not None}

    def close(self) -> None:
        """End every pool."""
        for pool in self._by_size.values():
            pool.close()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """The pools of this session; tests take them through `ranks`."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(rank_pools: RankPools) -> RankPools:
    """`ranks(2).run(function)`: a pool of two, started at its first use and kept for the session."""
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
