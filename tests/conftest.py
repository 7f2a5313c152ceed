"""What every test of this project is held to: no leaks, and a tier that it belongs to.

Tests that use the pool of ranks are marked `ranks` by themselves, so `pytest -m "not ranks and not launched"` runs the quick tier alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from hypothesis import settings

pytest_plugins = ["slipstream.testing.plugin", "pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="repeat what is repeated in CI a few times as often as `make soak` wants")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("same", derandomize=True, database=None, deadline=None)
    settings.register_profile("explore", deadline=None)
    if not config.getoption("hypothesis_profile", None):  # every run tries the same examples; `--hypothesis-profile explore` tries others
        settings.load_profile("same")
    config.addinivalue_line("markers", "soak: repeats something with random faults; `--soak` makes it many rounds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)


def pytest_collection_finish() -> None:
    """What the collection made lives to the end: collecting garbage, which some tests do often, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[..., int]:
    """`rounds(ci=3, soak=50)`: how often to repeat, by where we are."""
    return lambda *, ci, soak: soak if request.config.getoption("--soak") else ci


@pytest.fixture(autouse=True)
def _clean(no_leaks: None) -> None:
    """Every test of ours is held to `no_leaks`."""
