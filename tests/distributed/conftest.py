"""Fixtures of the tests of `slipstream.distributed`."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def soak_limit(request: pytest.FixtureRequest) -> Callable[[float], float]:
    """`seconds < soak_limit(10)`: an upper bound of seconds, which holds on an idle machine and decides in the soak only."""
    return lambda seconds: seconds if request.config.getoption("--soak") else float("inf")
